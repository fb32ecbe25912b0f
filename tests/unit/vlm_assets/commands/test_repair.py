"""Repair restores what has a whole copy, names what must be computed, and never deletes anything."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from vlm_assets.services.home_audit import audit
from vlm_assets.services.repairs import Remedy, find_repairs
from vlm_assets.services.status import read_status
from vlm_durable.versions.findings import FindingKind
from vlm_durable.versions.version_mark import mark_copies

FIRST, SECOND, THIRD = "000000000-000000002", "000000003-000000005", "000000006-000000008"
DESCRIBED, EMBEDDED = "property_descriptions", "property_embeddings"


def plan(dataset, *, deep=False):
    return find_repairs(dataset.settings, audit(dataset.settings, dataset.catalog, deep=deep))


def test_a_partition_put_back_wholly_is_for_a_person(dataset, call):
    """Status, audit and repair warn with both dates; what is accepted counts from then on."""
    older = dataset.descriptions.record(FIRST)
    newest = dataset.put_back(FIRST)
    found = audit(dataset.settings, dataset.catalog)
    (warning,) = [one for one in found.warnings if one.kind is FindingKind.PUT_BACK]
    assert older.published_at in warning.sentence and newest.published_at in warning.sentence
    assert (DESCRIBED, FIRST, Remedy.BY_HAND) in [(one.asset, one.key, one.remedy) for one in plan(dataset)]
    for _ in range(2):
        note = next(one.note for one in read_status(dataset.settings, dataset.catalog).partitions)
        assert note == warning.text, "each look says so"
    assert call("repair", "--accept-version", FIRST).exit_code == 1
    done = call("repair", "--accept-version", FIRST, "--yes")
    assert done.exit_code == 0, done.output
    accepted = replace(older, sequence=newest.sequence + 1)
    assert dataset.descriptions.record(FIRST) == accepted, "no number is given twice"
    assert FindingKind.PUT_BACK not in {one.kind for one in audit(dataset.settings, dataset.catalog).warnings}
    assert "nothing to accept" in call("repair", "--accept-version", FIRST, "--yes").output


@pytest.mark.parametrize("wholly", [False, True])
def test_a_mark_that_cannot_be_read_beside_files_that_differ_is_for_a_person(dataset, call, wholly):
    """Status, audit and repair name the command; nothing is computed, whichever version it was."""
    dataset.put_back(FIRST, wholly=wholly)
    paths = dataset.settings.descriptions.partition(FIRST)
    for path in mark_copies(paths.version_mark):
        path.write_bytes(b"?")
    if wholly:
        paths.record_copy.unlink()
    for _ in range(2):
        note = next(one.note for one in read_status(dataset.settings, dataset.catalog).partitions)
        assert "version mark" in note
    (planned,) = (one for one in plan(dataset) if one.asset == DESCRIBED)
    if not wholly:
        # Its record is the older one, and no file is that version: neither is believed.
        assert (planned.remedy, planned.forgets) == (Remedy.COMPUTE, True)
        return
    assert planned.remedy is Remedy.BY_HAND
    assert f"--accept-version {FIRST}" in planned.sentence()
    assert call("repair", "--accept-version", FIRST, "--yes").exit_code == 0
    assert DESCRIBED not in {one.asset for one in plan(dataset, deep=True)}


def test_repair_asks_before_it_changes_anything_and_then_restores_at_once(dataset, call):
    """Without a terminal and without --yes it lists, changes nothing and ends with 1; with it all is back."""
    dataset.descriptions.path(FIRST).unlink()
    asked = call("repair")
    assert asked.exit_code == 1
    assert "restore" in asked.output and "--yes" in asked.output
    assert not dataset.descriptions.path(FIRST).exists()
    done = call("repair", "--yes")
    assert done.exit_code == 0, done.output
    assert call("audit", "--deep").exit_code == 0
    assert "Nothing to repair" in call("repair").output


def test_repair_without_dagster_says_what_is_not_done(dataset, call):
    """What must be computed where no Dagster runs is not silently left: the partition is named, and 1."""
    dataset.descriptions.path(FIRST).unlink()
    dataset.copy_of(FIRST).unlink()
    done = call("repair", "--yes")
    assert done.exit_code == 1
    assert f"no Dagster runs on this home: {FIRST}." in done.output


def test_one_repair_that_fails_does_not_stop_the_others(dataset, call):
    """A partition that cannot be put right is named, and the next one is put right all the same."""
    for key in (FIRST, SECOND):
        dataset.descriptions.path(key).unlink()
    first = dataset.descriptions.path(FIRST)
    # A folder under the file's name: it cannot be replaced, and it is nobody's to remove.
    first.mkdir()
    done = call("repair", "--yes")
    assert done.exit_code == 1
    assert FIRST in done.output
    assert dataset.descriptions.path(SECOND).is_file()
    assert first.is_dir()


def test_repair_as_json_changes_nothing_without_a_yes(dataset, call):
    """A script reads what is wrong and what would be done; with --yes it reads what was done."""
    dataset.descriptions.path(FIRST).unlink()
    done = call("repair", "--json")
    told = json.loads(done.stdout)
    assert (done.exit_code, told["right"], told["done"], told["sentences"]) == (1, False, False, [])
    assert [(one["key"], one["remedy"]) for one in told["repairs"]] == [(FIRST, "RESTORE")]
    assert [[finding["kind"] for finding in one["findings"]] for one in told["repairs"]] == [["missing"]]
    assert not dataset.descriptions.path(FIRST).exists()
    done = call("repair", "--json", "--yes")
    assert (done.exit_code, json.loads(done.stdout)["right"]) == (0, True)
    assert dataset.descriptions.path(FIRST).exists()
    done = call("repair", "--json")
    assert (done.exit_code, json.loads(done.stdout)["repairs"]) == (0, [])
