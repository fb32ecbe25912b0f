"""Repair restores what has a whole copy, names what must be computed, and never deletes anything."""

from __future__ import annotations

import shutil

import pytest

from tests.support.damage import damage_rows
from vlm_assets.services.home_audit import audit
from vlm_assets.services.repairs import Remedy, find_repairs, put_right, recomputations
from vlm_durable.journal.high_water_mark import HighWaterMark, write_mark
from vlm_durable.versions.findings import FindingKind
from vlm_durable.versions.version_mark import mark_copies

FIRST, SECOND, THIRD = "000000000-000000002", "000000003-000000005", "000000006-000000008"
DESCRIBED, EMBEDDED = "property_descriptions", "property_embeddings"


def plan(dataset, *, deep=False, failed=False):
    found = audit(dataset.settings, dataset.catalog, deep=deep)
    return find_repairs(dataset.settings, found, failed=failed)


def remedies(repairs):
    return {(one.asset, one.key): one.remedy for one in repairs}


def test_a_sound_dataset_needs_nothing(dataset):
    """Nothing is touched where nothing is wrong."""
    assert plan(dataset, deep=True) == []


@pytest.mark.parametrize("lost", ["published", "copy", "record", "copy of the record"])
def test_one_of_two_copies_lost_is_restored_in_place(dataset, lost):
    """Any one file of a partition comes back from the other one, byte for byte, and without a device."""
    paths = dataset.settings.descriptions.partition(FIRST)
    path = {
        "published": paths.published,
        "copy": paths.version(0),
        "record": paths.record,
        "copy of the record": paths.record_copy,
    }[lost]
    sound = path.read_bytes()
    path.unlink()
    repairs = plan(dataset)
    assert remedies(repairs) == {(DESCRIBED, FIRST): Remedy.RESTORE}
    put_right(dataset.settings, repairs[0])
    assert path.read_bytes() == sound
    assert audit(dataset.settings, dataset.catalog, deep=True).ok


def test_a_damaged_page_is_restored_even_where_sizes_fit(dataset):
    """A page that does not read is no reason to compute again while the second copy is whole."""
    sound = dataset.descriptions.path(FIRST).read_bytes()
    damage_rows(dataset.descriptions.path(FIRST))
    repairs = plan(dataset)
    assert remedies(repairs) == {(DESCRIBED, FIRST): Remedy.RESTORE}
    put_right(dataset.settings, repairs[0])
    assert dataset.descriptions.path(FIRST).read_bytes() == sound
    assert len(list(dataset.settings.descriptions.partition(FIRST).quarantine.iterdir())) == 1


def test_both_copies_lost_are_computed_again(dataset):
    """What no copy holds is computed, descriptions and then the embeddings of the new ones."""
    dataset.descriptions.path(FIRST).unlink()
    damage_rows(dataset.copy_of(FIRST))
    repairs = plan(dataset)
    assert remedies(repairs) == {(DESCRIBED, FIRST): Remedy.COMPUTE}
    assert "Neither the file nor its second copy" in repairs[0].sentence()
    (wanted,) = recomputations(repairs, (DESCRIBED, EMBEDDED))
    assert wanted.assets == (DESCRIBED, EMBEDDED)
    assert wanted.run_config(dataset.settings) == {"ops": {DESCRIBED: {"config": {"recompute": True}}}}


def test_rows_that_are_wrong_in_both_copies_are_computed_again(empty):
    """A second copy of wrong rows restores nothing."""
    empty.describe(FIRST, lambda rows: rows[1:])
    assert remedies(plan(empty)) == {(DESCRIBED, FIRST): Remedy.COMPUTE}


def test_embeddings_of_other_descriptions_are_computed_alone(dataset):
    """Descriptions that are sound are not computed again for their embeddings' sake."""
    dataset.describe(SECOND, text="a villa")
    (wanted,) = recomputations(plan(dataset), (DESCRIBED, EMBEDDED))
    assert (wanted.assets, wanted.keys) == ((EMBEDDED,), (SECOND,))


def test_an_older_record_beside_a_newer_file_is_brought_up_to_it(dataset):
    """Finished work is never computed again while a whole file of it is there."""
    newest = dataset.put_back(FIRST, wholly=False)
    repairs = plan(dataset)
    assert remedies(repairs) == {(DESCRIBED, FIRST): Remedy.RESTORE}
    put_right(dataset.settings, repairs[0])
    assert dataset.descriptions.record(FIRST) == newest
    assert audit(dataset.settings, dataset.catalog, deep=True).ok
    assert plan(dataset, deep=True) == []


def test_the_records_of_descriptions_and_embeddings_exchanged(dataset):
    """A record names its asset: both are written anew, and nothing is computed."""
    both = [asset.partition(FIRST) for asset in (dataset.settings.descriptions, dataset.settings.embeddings)]
    for one, other in zip(*((paths.record, paths.record_copy) for paths in both), strict=True):
        one_was, other_was = one.read_bytes(), other.read_bytes()
        one.write_bytes(other_was)
        other.write_bytes(one_was)
    repairs = plan(dataset)
    assert remedies(repairs) == {(DESCRIBED, FIRST): Remedy.RESTORE, (EMBEDDED, FIRST): Remedy.RESTORE}
    for one in repairs:
        put_right(dataset.settings, one)
    assert plan(dataset, deep=True) == []


def test_a_record_lost_twice_is_set_aside_and_computed(dataset):
    """Without a record nobody knows what the file must be: it is kept aside, never trusted, never deleted."""
    paths = dataset.settings.descriptions.partition(FIRST)
    for path in (paths.record, paths.record_copy, *mark_copies(paths.version_mark)):
        path.write_bytes(b"?")
    sound = dataset.descriptions.path(FIRST).read_bytes()
    (one,) = (one for one in plan(dataset) if one.asset == DESCRIBED)
    assert (one.remedy, one.forgets) == (Remedy.COMPUTE, True)
    put_right(dataset.settings, one)
    assert not dataset.descriptions.path(FIRST).exists()
    assert sound in [path.read_bytes() for path in paths.quarantine.iterdir()]


def test_what_vanished_is_computed_as_a_new_generation(dataset):
    """The generation that was published and vanished is closed: a plain start would stop at its mark."""
    mark = dataset.settings.descriptions.partition(FIRST).high_water_mark("g")
    mark.parent.mkdir(parents=True)
    write_mark(mark, HighWaterMark(FIRST, "g", 3, 4, 1, None, retired=True))
    dataset.descriptions.set_aside(FIRST)
    assert remedies(plan(dataset))[DESCRIBED, FIRST] is Remedy.COMPUTE


def test_foreign_files_are_moved_out_of_the_readers_way(dataset):
    """A foreign parquet file is kept in the quarantine, and the audit is sound again."""
    asset = dataset.settings.descriptions
    folder = asset.published
    shutil.copy(folder / f"{FIRST}.parquet", folder / "mine.parquet")
    (one,) = plan(dataset)
    assert [finding.kind for finding in one.findings] == [FindingKind.FOREIGN_FILE]
    put_right(dataset.settings, one)
    assert not (folder / "mine.parquet").exists()
    assert [path.name.split(".")[0] for path in asset.quarantine.iterdir()] == ["mine"]
    assert audit(dataset.settings, dataset.catalog).ok


def test_a_partition_that_a_check_refused_is_tried_again(empty, commit, refuse):
    """All rows committed and nothing published: only the failed ones are computed again."""
    commit(empty.settings, FIRST, 3)
    refuse(empty.settings, FIRST)
    commit(empty.settings, SECOND, 2)
    repairs = plan(empty)
    assert remedies(repairs) == {(DESCRIBED, FIRST): Remedy.RETRY_FAILED}
    (wanted,) = recomputations(repairs, (DESCRIBED, EMBEDDED))
    assert wanted.run_config(empty.settings) == {
        "ops": {DESCRIBED: {"config": {"retry_failed": True, "stale": "keep"}}}
    }


def test_failed_properties_are_tried_again_only_when_asked(dataset):
    """--failed takes the partitions with failed rows and no others; ok rows are kept by the run option."""
    assert plan(dataset) == []
    repairs = plan(dataset, failed=True)
    assert remedies(repairs) == {(DESCRIBED, SECOND): Remedy.RETRY_FAILED}
    (wanted,) = recomputations(repairs, (DESCRIBED, EMBEDDED))
    assert wanted.assets == (DESCRIBED, EMBEDDED)


def test_failed_properties_of_a_stale_partition_are_for_a_person(dataset):
    """What is stale would be described anew as a whole, which may take days: never by `--failed`."""
    dataset.replace_images("p4")
    (stale,) = plan(dataset, failed=True)
    assert (stale.key, stale.remedy) == (SECOND, Remedy.BY_HAND)
    assert "`vlm-assets run --stale`" in stale.sentence()
    assert recomputations([stale], (DESCRIBED, EMBEDDED)) == []


def test_sound_embeddings_are_left_alone_beside_restored_descriptions(dataset):
    """Embeddings that only look wrong beside a damaged file are not computed again."""
    path = dataset.descriptions.path(SECOND)
    shutil.copy(dataset.descriptions.path(FIRST), path)
    assert remedies(plan(dataset)) == {(DESCRIBED, SECOND): Remedy.RESTORE}


def test_partitions_that_need_the_same_go_together(dataset):
    """One backfill for all partitions that are materialized alike, another for the others."""
    for key in (FIRST, THIRD):
        dataset.descriptions.path(key).unlink()
        dataset.copy_of(key).unlink()
    dataset.describe(SECOND, text="a villa")
    groups = recomputations(plan(dataset), (DESCRIBED, EMBEDDED))
    assert {(one.assets, one.keys) for one in groups} == {
        ((DESCRIBED, EMBEDDED), (FIRST, THIRD)),
        ((EMBEDDED,), (SECOND,)),
    }
