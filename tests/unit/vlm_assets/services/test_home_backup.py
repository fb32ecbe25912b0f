"""A backup holds what the home holds, is brought up to date by what is new, and is never restored half."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.damage import flip_bit
from tests.support.listings import write_listing
from vlm_assets.config.resource_settings import control_state
from vlm_assets.config.settings import Settings, load_settings
from vlm_assets.services.command_error import CommandError
from vlm_assets.services.home_audit import audit
from vlm_assets.services.home_backup import _restored_last, back_up
from vlm_catalog.catalog import Catalog
from vlm_catalog.catalog_file import withdrawal_note
from vlm_catalog.ingest import ingest
from vlm_durable.files.file_backup import BackupError, read_list, restore
from vlm_durable.state.pause import pause, pause_of


def restored(settings: Settings, folder: Path, home: Path) -> Settings:
    restore(folder, home, last=_restored_last)
    return load_settings(model="example", home=home)


def bytes_of(home: Path) -> dict[str, bytes]:
    """Every file that must come back, with its bytes."""
    return {
        str(path.relative_to(home)): path.read_bytes()
        for path in home.rglob("*")
        if path.is_file() and not path.name.endswith((".lock", "state.db", "liveness.db", "-wal", "-shm"))
    }


@pytest.fixture(autouse=True)
def old_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was written a moment ago is trusted not to change within its own second."""
    monkeypatch.setattr("vlm_durable.files.seen_files._SETTLED_NS", 0)


def test_what_was_committed_and_published_is_restored_to_the_byte(dataset, commit, tmp_path) -> None:
    """Published files with their versions and records, journals with their marks, control state, reviews."""
    settings, key = dataset.settings, dataset.keys[1]
    dataset.describe(key, text="another house")
    dataset.embed(key)
    commit(settings, dataset.keys[0], 2, generation="next")
    pause(control_state(settings), "an hour of maintenance", now=1.0)
    (settings.home / "review.jsonl").write_text("{}\n")
    found = back_up(settings, tmp_path / "backup")
    assert (found.properties, found.published, found.under_way) == (9, 6, 1)
    copy = restored(settings, tmp_path / "backup", tmp_path / "copy")
    here, there = bytes_of(settings.home), bytes_of(copy.home)
    assert there == {name: data for name, data in here.items() if not name.startswith(".state/copies/")}
    report = audit(copy, Catalog.open(copy.home), deep=True)
    assert not report.wrong
    assert pause_of(control_state(copy)).reason == "an hour of maintenance"
    assert control_state(copy).restorations() == [], "nothing was damaged"


def test_the_next_backup_copies_only_what_is_new(dataset, tmp_path) -> None:
    """Unchanged files are neither read nor written, and what is named no more is removed."""
    folder = tmp_path / "backup"
    first = back_up(dataset.settings, folder)
    assert first.copied
    again = back_up(dataset.settings, folder)
    assert (again.copied, again.files) == (0, first.files)
    dataset.describe(dataset.keys[0], text="another house")
    dataset.embed(dataset.keys[0])
    third = back_up(dataset.settings, folder)
    # Of two partitions: a file, a record and a mark, each of which shares its content with its copy.
    assert 4 <= third.copied <= 10
    named = {kept.sha256 for kept in read_list(folder).files.values()}
    assert {path.name for path in (folder / "contents").glob("*/*")} == named
    copy = restored(dataset.settings, folder, tmp_path / "copy")
    assert not audit(copy, Catalog.open(copy.home), deep=True).wrong


@pytest.mark.promise("Of two valid versions the newer is true")
def test_a_partition_that_was_put_back_replaces_no_newer_one_in_the_backup(dataset, tmp_path) -> None:
    """The sentence sends a person to the backup for the newest file: it must still be there."""
    folder, key = tmp_path / "backup", dataset.keys[0]
    paths = dataset.settings.descriptions.partition(key)
    names = (paths.published, paths.record, paths.record_copy, paths.version(0))
    before = {path: path.read_bytes() for path in names}
    newest = dataset.describe(key, text="another house")
    dataset.embed(key)
    back_up(dataset.settings, folder)
    for path, content in before.items():
        path.write_bytes(content)
    paths.version(1).unlink()
    with pytest.raises(CommandError, match=r"was put back: version 1 .* The backup before stays as it is"):
        back_up(dataset.settings, folder)
    name = str(paths.published.relative_to(dataset.settings.home))
    assert read_list(folder).files[name].sha256 == newest.sha256


def test_a_flipped_byte_in_the_backup_is_refused_and_copied_anew(dataset, tmp_path) -> None:
    """No damaged file is restored; without a catalogue no command works in what is not complete."""
    settings, folder, home = dataset.settings, tmp_path / "backup", tmp_path / "copy"
    back_up(settings, folder)
    kept = read_list(folder).files[f"property_descriptions/{dataset.keys[1]}.parquet"]
    content = folder / "contents" / kept.sha256[:2] / kept.sha256
    flip_bit(content)
    with pytest.raises(
        BackupError, match=r"holds other bytes than were backed up.*vlm-assets backup .* --deep"
    ):
        restored(settings, folder, home)
    assert not list(home.rglob("catalog.parquet"))
    assert back_up(settings, folder).copied == 0
    assert back_up(settings, folder, deep=True).copied == 1
    copy = restored(settings, folder, home)
    assert not audit(copy, Catalog.open(copy.home), deep=True).wrong
    assert not (home / ".restoring").exists()


def test_a_damaged_list_is_read_from_its_copy_and_never_taken_for_none(dataset, tmp_path) -> None:
    """Unreadable is not empty: the next backup must not remove what only a damaged list names."""
    folder = tmp_path / "backup"
    back_up(dataset.settings, folder)
    (folder / "backup.json").write_bytes(b"?")
    restored(dataset.settings, folder, tmp_path / "copy")
    (folder / "backup.copy.json").write_bytes(b"")
    with pytest.raises(BackupError, match="cannot be read"):
        restored(dataset.settings, folder, tmp_path / "other")
    with pytest.raises(BackupError, match="cannot be read"):
        back_up(dataset.settings, folder)


def test_nothing_that_is_there_is_written_over(dataset, tmp_path) -> None:
    """A home with files, a folder of something else, another home's backup, a folder inside the home."""
    settings, folder = dataset.settings, tmp_path / "backup"
    back_up(settings, folder)
    with pytest.raises(BackupError, match="is not empty"):
        restored(settings, folder, settings.home)
    with pytest.raises(CommandError, match="lie in each other"):
        back_up(settings, settings.home / "backup")
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "cat.jpg").write_bytes(b"cat")
    with pytest.raises(BackupError, match="other files"):
        back_up(settings, tmp_path / "photos")
    with pytest.raises(BackupError, match="no finished backup"):
        restored(settings, tmp_path / "photos", tmp_path / "copy")
    before = read_list(folder)
    ingest(write_listing(tmp_path / "list.jsonl", {"p": ["p.jpg"]}), tmp_path / "another", range_size=1)
    with pytest.raises(CommandError, match="another home"):
        back_up(load_settings(model="example", home=tmp_path / "another"), folder)
    withdrawal_note(settings.state_directory).write_text("{}")
    with pytest.raises(CommandError, match="withdrawal"):
        back_up(settings, folder)
    assert read_list(folder) == before


def test_damaged_files_take_no_place_of_whole_ones_in_the_backup(dataset, tmp_path) -> None:
    """A home whose disk rots must not rot its backup; one damaged copy of two is no reason to refuse."""
    settings, folder, key = dataset.settings, tmp_path / "backup", dataset.keys[0]
    back_up(settings, folder)
    dataset.descriptions.path(key).write_bytes(b"rot")
    back_up(settings, folder)
    before = read_list(folder)
    dataset.copy_of(key).write_bytes(b"rot")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("vlm_assets.services.home_backup._TRIES", 2)
        with pytest.raises(CommandError, match="vlm-assets repair"):
            back_up(settings, folder)
    assert read_list(folder) == before
