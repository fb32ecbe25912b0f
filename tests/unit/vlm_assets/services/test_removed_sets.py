"""The files of a question set that no settings name are looked after, and withdrawn from, as all others."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from tests.support.damage import flip_bit
from tests.support.homes import DESCRIPTIONS, Dataset, publish
from vlm_assets.assets.partition_state import State
from vlm_assets.config.settings import load_settings
from vlm_assets.services.home_audit import audit
from vlm_assets.services.home_backup import back_up, restore_home
from vlm_assets.services.pruning import RemovalKind, delete_set, find_removable, remove
from vlm_assets.services.repairs import Remedy, find_repairs, put_right
from vlm_assets.services.status import read_status
from vlm_assets.services.withdrawal import prepare_withdrawal, withdraw
from vlm_catalog.catalog import Catalog
from vlm_catalog.catalog_copies import recorded_catalogs
from vlm_catalog.catalog_file import is_tombstone
from vlm_catalog.chosen_catalog import check_catalog
from vlm_catalog.published_ids import unlisted_ids
from vlm_durable.files.files import set_aside
from vlm_durable.files.layout import AssetFolders
from vlm_durable.versions.findings import FindingKind
from vlm_durable.versions.published import PublishedPartitions
from vlm_durable.versions.version_mark import mark_copies

FIRST, SECOND, THIRD = "000000000-000000002", "000000003-000000005", "000000006-000000008"
CONDITION = "property_condition"


def ask(dataset: Dataset, key: str, text: str = "a new roof") -> AssetFolders:
    """Publish the answers of the set ``condition`` for a range."""
    asset = dataset.settings.layout.asset(CONDITION)
    wanted = next(one for one in dataset.catalog.ranges if one.key == key)
    rows = [{**row, "raw_text": text, "fingerprint": "fp-c"} for row in dataset.rows(key)]
    parts = {"catalogue_slice": dataset.catalog.slice_digest(wanted), "schema": "s"}
    publish(PublishedPartitions(asset), key, rows, DESCRIPTIONS, "fp-c", parts)
    return asset


@pytest.fixture
def condition(dataset: Dataset) -> AssetFolders:
    """The files of a set that was asked of two ranges of three; the settings name no set."""
    ask(dataset, FIRST)
    return ask(dataset, SECOND)


def files_with(home: Path, property_id: str) -> list[Path]:
    """Every file of a home in which an id stands, parquet files decoded."""
    found = []
    for path in home.rglob("*"):
        if path.is_file():
            rows = (
                json.dumps(pq.read_table(path).to_pylist(), default=str) if path.suffix == ".parquet" else ""
            )
            if f'"{property_id}"' in rows or f'"{property_id}"'.encode() in path.read_bytes():
                found.append(path)
    return found


def test_the_audit_says_that_no_settings_name_it_and_misses_nothing(dataset, condition):
    """One sentence that says what to do; what is published of it counts, and what is not is no loss."""
    found = audit(dataset.settings, dataset.catalog, deep=True)
    assert found.ok
    (warning,) = found.warnings
    assert (warning.kind, warning.asset, warning.key) == (FindingKind.REMOVED_SET, CONDITION, None)
    assert "Put condition back into the file of VLM_ASSETS_QUESTIONS" in warning.text
    total = found.total(CONDITION)
    assert (total.expected, total.rows, total.not_yet) == (6, 6, 0)
    assert found.partitions_in(CONDITION, State.DONE) == 2


def test_status_says_what_to_do_about_it(dataset, condition):
    """In one line, beside all that is published: whoever never audits learns of the files too."""
    status = read_status(dataset.settings, dataset.catalog)
    steps, kinds = status.next_steps, {finding.kind for finding in status.findings}
    assert FindingKind.REMOVED_SET in kinds, "in the words of the audit"
    (line,) = [step for step in steps if "question set condition" in step]
    assert "Put condition back" in line and "`vlm-assets prune --set condition`" in line
    assert any(step.startswith("Everything is published") for step in steps)
    list(delete_set(dataset.settings, condition))
    assert not [
        step for step in read_status(dataset.settings, dataset.catalog).next_steps if "condition" in step
    ]


def test_its_damage_is_found_and_put_right_from_the_copy(dataset, condition):
    """Where no copy is whole, a person is told: nothing can be computed for a set that nobody names."""
    paths = condition.partition(FIRST)
    flip_bit(paths.published, 40)
    found = audit(dataset.settings, dataset.catalog, deep=True)
    assert {(one.asset, one.key) for one in found.wrong} == {(CONDITION, FIRST)}
    repairs = find_repairs(dataset.settings, found, failed=True)
    assert [(one.asset, one.key, one.remedy) for one in repairs] == [
        (CONDITION, FIRST, Remedy.RESTORE),
        ("property_descriptions", SECOND, Remedy.RETRY_FAILED),
    ], "what failed of the set is not tried again"
    put_right(dataset.settings, repairs[0])
    assert audit(dataset.settings, dataset.catalog, deep=True).ok
    for path in (paths.published, paths.version(0)):
        flip_bit(path, 40)
    (repair,) = find_repairs(dataset.settings, audit(dataset.settings, dataset.catalog, deep=True))
    assert repair.remedy is Remedy.BY_HAND
    assert "VLM_ASSETS_QUESTIONS" in repair.sentence()


def test_a_file_of_it_that_no_record_says_what_it_must_be_stays(dataset, condition):
    """Nobody could compute it again: it is not moved away, though no record and no mark of it reads."""
    paths = condition.partition(FIRST)
    for path in (paths.record, paths.record_copy, *mark_copies(paths.version_mark)):
        path.write_bytes(b"?")
    (repair,) = find_repairs(dataset.settings, audit(dataset.settings, dataset.catalog, deep=True))
    assert repair.remedy is Remedy.BY_HAND
    put_right(dataset.settings, repair)
    assert paths.published.exists()
    assert paths.version(0).exists()


def test_a_backup_brings_its_files_and_journals_back(dataset, condition, commit, tmp_path):
    """Published files, versions, records, marks and work under way, to the byte."""
    commit(dataset.settings, THIRD, 2, CONDITION)
    ask(dataset, FIRST, "an old roof")
    back_up(dataset.settings, tmp_path / "backup")
    copy = load_settings(model="example", home=tmp_path / "copy")
    restore_home(copy, tmp_path / "backup")

    def files(home: Path) -> dict[Path, bytes]:
        paths = (path for path in home.rglob("*") if CONDITION in path.parts and path.suffix != ".lock")
        return {path.relative_to(home): path.read_bytes() for path in paths if path.is_file()}

    assert files(copy.home) == files(dataset.settings.home)
    assert len(files(copy.home)) > 12
    assert audit(copy, Catalog.open(copy.home), deep=True).ok


def test_prune_removes_what_it_needs_no_more(dataset, condition):
    """Earlier versions and the quarantine; the published files and their copies stay."""
    ask(dataset, FIRST, "an old roof")
    set_aside(condition.partition(FIRST).version(1), condition.partition(FIRST).quarantine, keep=True)
    plan = find_removable(dataset.settings, dataset.catalog)
    assert {removal.kind for removal in plan.removals} == {
        RemovalKind.EARLIER_VERSION,
        RemovalKind.QUARANTINED,
    }
    assert {removal.asset for removal in plan.removals} == {CONDITION}
    list(remove(dataset.settings, plan.removals))
    assert find_removable(dataset.settings, dataset.catalog).removals == []
    assert audit(dataset.settings, dataset.catalog, deep=True).ok


def test_nothing_of_a_withdrawn_property_is_left_in_its_files(dataset, condition, commit):
    """Published files, versions, journals and quarantine; the rows of the others stay as they were."""
    settings = dataset.settings
    ask(dataset, FIRST, "an old roof")
    set_aside(condition.partition(FIRST).version(1), condition.partition(FIRST).quarantine, keep=True)
    commit(settings, FIRST, 2, CONDITION, "next")
    commit(settings, THIRD, 3, CONDITION)
    before = pq.read_table(condition.partition(FIRST).published).to_pylist()
    second = condition.partition(SECOND).published.read_bytes()
    gone = ["p1", "p6"]
    for property_id in gone:
        assert any(CONDITION in path.parts for path in files_with(settings.home, property_id))
    said = list(withdraw(settings, prepare_withdrawal(settings, gone)))
    for property_id in gone:
        assert files_with(settings.home, property_id) == []
    after = pq.read_table(condition.partition(FIRST).published).to_pylist()
    assert [is_tombstone(row["property_id"]) for row in after] == [False, True, False]
    assert [after[at]["raw_text"] for at in (0, 2)] == [before[at]["raw_text"] for at in (0, 2)]
    assert condition.partition(SECOND).published.read_bytes() == second
    assert list(condition.journals.glob("*/*")) == []
    assert sum("with all its rows: no settings name its question set" in one for one in said) == 2
    found = audit(settings, dataset.catalog, deep=True)
    assert found.ok
    assert {one.kind for one in found.warnings} == {FindingKind.REMOVED_SET}


def test_published_ranges_that_it_alone_has_keep_their_ordinals(dataset, condition):
    """Of a catalogue that is gone or older, its records say which property has which number."""
    home = dataset.settings.home
    for asset in (dataset.settings.descriptions, dataset.settings.embeddings):
        for folder in (asset.published, asset.versions, asset.version_marks):
            shutil.rmtree(folder)
    catalog_id = dataset.catalog.catalog_id
    assert recorded_catalogs(home) == {catalog_id}
    assert [(one.range.key, one.ids) for one in unlisted_ids(home, None)] == [
        (FIRST, ("p0", "p1", "p2")),
        (SECOND, ("p3", "p4", "p5")),
    ]
    assert unlisted_ids(home, dataset.catalog) == []
    later = "000000009-000000011"
    rows = [
        {"property_id": f"p{at}", "ordinal": at, "status": "ok", "fingerprint": "fp-c"} for at in (9, 10, 11)
    ]
    publish(PublishedPartitions(condition), later, rows, DESCRIPTIONS, "fp-c", {})
    catalog = home / "property_catalog" / "catalog.parquet"
    assert check_catalog(home, str(catalog)).unlisted == (later,)
