"""An ingest killed at any of its file operations leaves a catalogue, the old or the new one, and goes on."""

from __future__ import annotations

import contextlib
import errno
import os
from pathlib import Path

import pytest

from tests.support.kills import killed_homes
from tests.support.listings import write_listing
from tests.support.shares import ALL
from vlm_catalog.catalog import Catalog, CatalogMissingError
from vlm_catalog.catalog_copies import backup_paths, known_versions, last_put_back
from vlm_catalog.catalog_file import UNREADABLE, CatalogHeader, verify_file
from vlm_catalog.ingest import ingest

SHARES = 3


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A home with five properties in three ranges, whose listing has grown and changed since."""
    listing = tmp_path / "images" / "list.jsonl"
    write_listing(listing, {f"id {n}": [f"{n}a.jpg"] for n in range(5)})
    ingest(listing, tmp_path / "home", range_size=2)
    write_listing(listing, {f"id {n}": [f"{n}b.jpg"] for n in range(8)})
    return tmp_path / "home"


def intact_backups(home: Path) -> list[CatalogHeader]:
    """The headers of the backups that read wholly."""
    found = []
    for path in backup_paths(home):
        with contextlib.suppress(*UNREADABLE):
            found.append(verify_file(path))
    return found


def test_an_update_killed_anywhere_leaves_the_old_or_the_new_catalogue(home: Path, tmp_path: Path) -> None:
    """The old catalogue reads wholly before the rename, the new one after it, and each has a second copy.

    A re-run ends where an ingest that was never killed ends.
    """
    source = tmp_path / "images" / "list.jsonl"
    old = Catalog.open(home)
    work = lambda: ingest(source, home, update=True)  # noqa: E731
    homes = killed_homes(home, work, tmp_path / "killed", parts=SHARES)
    new = Catalog.open(home)
    assert new.rows == 8
    assert not ALL or {"write", "fsync", "create", "replace"} <= {operation.name for _, operation in homes}
    headers = []
    for killed in (*(killed for killed, _ in homes), home):
        catalog = Catalog.open(killed)
        catalog.verify()
        headers.append(catalog.header)
        assert any(header == catalog.header for header in intact_backups(killed))
        ingest(source, killed, update=True)
        assert Catalog.open(killed).header == new.header
        assert intact_backups(killed)[0] == new.header
        assert known_versions(killed) == {new.catalog_id: 2}
        assert not list(killed.rglob("*.tmp")) + list(killed.rglob(".*.tmp"))
    switch = headers.index(new.header)
    assert headers == [old.header] * switch + [new.header] * (len(headers) - switch)
    assert 0 < switch < len(headers)


def test_a_first_ingest_killed_anywhere_leaves_no_catalogue_or_a_whole_one(
    home: Path, tmp_path: Path
) -> None:
    """A home never holds half a catalogue, and the next ingest goes through without a person's help."""
    source = tmp_path / "images" / "list.jsonl"
    fresh, seen = tmp_path / "fresh", set()
    work = lambda: ingest(source, fresh)  # noqa: E731
    for killed, _ in killed_homes(fresh, work, tmp_path / "killed", parts=SHARES):
        try:
            catalog = Catalog.open(killed)
        except CatalogMissingError:
            seen.add("missing")
            ingest(source, killed)
            catalog = Catalog.open(killed)
        catalog.verify()
        assert catalog.rows == 8
        assert last_put_back(killed) is None, "nothing was put right"
        seen.add("whole")
    assert seen == {"missing", "whole"}


@pytest.mark.parametrize("operation", ["write", "fsync", "replace"])
@pytest.mark.parametrize("number", [1, 2, 3])
def test_a_disk_that_refuses_leaves_the_old_catalogue(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, operation: str, number: int
) -> None:
    """No room, or an input/output error, at any step: an error is raised and the old catalogue stands."""
    before = Catalog.open(home)
    calls = 0
    original = getattr(os, operation)

    def refuse(*arguments: object, **options: object) -> object:
        nonlocal calls
        calls += 1
        if calls == number:
            raise OSError(errno.ENOSPC, "No space left on device")
        return original(*arguments, **options)

    with monkeypatch.context() as patched:
        patched.setattr(os, operation, refuse)
        with pytest.raises(OSError, match="No space left"):
            ingest(tmp_path / "images" / "list.jsonl", home, update=True)
    after = Catalog.open(home)
    after.verify()
    assert after.header == before.header
    assert ingest(tmp_path / "images" / "list.jsonl", home, update=True).rows == 8
