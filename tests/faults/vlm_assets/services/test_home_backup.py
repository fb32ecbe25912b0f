"""Backups of a home in which work goes on, and backups and restorations that are killed."""

from __future__ import annotations

import json
import os
import queue
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from faults.file_operations import FileOperations, Operation
from faults.ledger import Ledger
from faults.lives import Life, live_to_the_end
from faults.partition_life import KEY, TOTAL, VERSIONS, live
from tests.support.kills import killed_homes
from tests.support.listings import write_listing
from vlm_assets.config.settings import load_settings
from vlm_assets.services.home_backup import _restored_last, back_up
from vlm_catalog.catalog import Catalog
from vlm_catalog.catalog_file import CatalogError
from vlm_catalog.ingest import ingest
from vlm_durable.files.file_backup import BackupWriter, restore

SHARES = 20
PROGRAM = """
import json, sys
from pathlib import Path
from faults.partition_life import live
live(Path(sys.argv[1]), lambda **one: print(json.dumps(one), flush=True))
"""


@pytest.fixture(scope="module")
def ingested(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A home of one partition, with nothing done."""
    folder = tmp_path_factory.mktemp("ingested")
    listing = write_listing(folder / "list.jsonl", {f"property-{n:05d}": [f"{n}.jpg"] for n in range(TOTAL)})
    ingest(listing, folder / "home", range_size=TOTAL)
    assert [one.key for one in Catalog.open(folder / "home").ranges] == [KEY]
    return folder / "home"


@pytest.fixture
def home(ingested: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(ingested, tmp_path / "home"))


def make(home: Path, folder: Path) -> None:
    back_up(load_settings(model="example", home=home), folder)


def bring_back(folder: Path, home: Path) -> Path:
    restore(folder, home, last=_restored_last)
    return home


def check(home: Path, promised: list[dict[str, Any]]) -> None:
    """Start in a restored home: what was promised before the backup is there, and work is finished."""
    Catalog.open(home).verify()
    ledger = Ledger(home)
    ledger.hear(Life(promised))
    # What was done while it was copied may be there, too.
    ledger.publishing = VERSIONS
    ledger.submitted = {version: set(range(TOTAL)) for version in range(1, VERSIONS + 1)}
    ledger.close(live_to_the_end(home))


class Writer:
    """A life in which each file operation waits until it is let go on."""

    def __init__(self, home: Path) -> None:
        self.said: list[dict[str, Any]] = []
        self._reached: queue.Queue[bool] = queue.Queue()
        self._go: queue.Queue[None] = queue.Queue()
        self._is_free = False
        self._is_done = False
        self._own = threading.get_ident()
        self._operations = FileOperations(home, self._wait)
        self._thread = threading.Thread(target=self._live, args=[home], daemon=True)

    def _wait(self, operation: Operation, operations: FileOperations) -> None:
        if threading.get_ident() != self._own and not self._is_free:
            self._reached.put(True)
            self._go.get(timeout=60)

    def _live(self, home: Path) -> None:
        try:
            live(home, lambda **one: self.said.append(one))
        finally:
            self._is_done = True
            self._reached.put(False)

    def __enter__(self) -> Writer:
        self._operations.install()
        self._thread.start()
        self._reached.get(timeout=60)
        return self

    def go_on(self, operations: int) -> None:
        """Let it do so many operations, or come to its end."""
        for _ in range(operations):
            if self._is_done:
                return
            self._go.put(None)
            self._reached.get(timeout=60)

    def __exit__(self, *_: object) -> None:
        self._is_free = True
        self._go.put(None)
        self._thread.join(60)
        for name, function in self._operations.real.items():
            setattr(os, name, function)


@pytest.mark.parametrize(
    ("begun", "pace"), [(5, 3), (60, 1), (90, 7), (120, 2), (150, 20), (200, 5), (240, 11), (280, 1)]
)
def test_a_backup_while_rows_are_committed_and_published_starts_and_lacks_nothing(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, begun: int, pace: int
) -> None:
    """Whatever mixture of moments was copied: what its beginning had committed is there, once and exact."""
    copy = BackupWriter.copy
    with Writer(home) as writer:

        def copy_beside(self: BackupWriter, source: Path, name: str) -> Any:
            writer.go_on(pace)
            return copy(self, source, name)

        writer.go_on(begun)
        promised = list(writer.said)
        monkeypatch.setattr(BackupWriter, "copy", copy_beside)
        make(home, tmp_path / "backup")
    monkeypatch.undo()
    check(bring_back(tmp_path / "backup", tmp_path / "copy"), promised)


@pytest.mark.parametrize("jump", [3, 7, 9, 11, 13])
def test_a_partition_that_is_finished_between_two_copies_is_in_the_backup(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, jump: int
) -> None:
    """Its journal is gone when its turn comes, or its file is another one: the rows are in either."""
    copy, copies = BackupWriter.copy, 0
    with Writer(home) as writer:

        def copy_beside(self: BackupWriter, source: Path, name: str) -> Any:
            nonlocal copies
            copies += 1
            if copies == jump:
                writer.go_on(10_000)
            return copy(self, source, name)

        while sum(len(one.get("promised", ())) for one in writer.said) < TOTAL:
            writer.go_on(1)
        promised = list(writer.said)
        monkeypatch.setattr(BackupWriter, "copy", copy_beside)
        make(home, tmp_path / "backup")
    monkeypatch.undo()
    check(bring_back(tmp_path / "backup", tmp_path / "copy"), promised)


def test_a_backup_beside_a_process_that_works(home: Path, tmp_path: Path) -> None:
    """The same with a process that nobody holds up, and a second backup of what it has done since."""
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(home)], stdout=subprocess.PIPE, text=True, env=os.environ
    )
    said: list[dict[str, Any]] = []
    assert process.stdout is not None
    while "promised" not in (said[-1] if said else {}):
        said.append(json.loads(process.stdout.readline()))
    make(home, tmp_path / "backup")
    check(bring_back(tmp_path / "backup", tmp_path / "copy"), said)
    rest, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    said += map(json.loads, rest.splitlines())
    make(home, tmp_path / "backup")
    check(bring_back(tmp_path / "backup", tmp_path / "later"), said)


def contents(home: Path) -> dict[str, bytes]:
    files = [path for path in home.rglob("*") if path.is_file() and path.suffix != ".lock"]
    return {str(path.relative_to(home)): path.read_bytes() for path in files}


def test_a_killed_backup_leaves_the_one_before_and_the_next_goes_on(home: Path, tmp_path: Path) -> None:
    """At any operation, half written: what is restored is the backup before, or the new one whole."""
    live(home, lambda **_: None, commits=2)
    old = tmp_path / "old"
    make(home, old)
    live(home, lambda **_: None)
    whole = Path(shutil.copytree(old, tmp_path / "whole"))
    killed = killed_homes(whole, lambda: make(home, whole), tmp_path / "killed", parts=SHARES)
    first = contents(bring_back(old, tmp_path / "first"))
    second = contents(bring_back(whole, tmp_path / "second"))
    assert first != second
    seen = []
    for folder, operation in killed:
        back = contents(bring_back(folder, tmp_path / f"back-{folder.name}"))
        assert back in (first, second), f"killed before {operation}"
        seen.append(back == second)
        make(home, folder)
        assert contents(bring_back(folder, tmp_path / f"again-{folder.name}")) == second
        assert not list((folder / ".staging").iterdir())
    assert seen == sorted(seen) and not seen[0], "the change happens once"


def test_a_killed_restoration_starts_nothing_and_is_finished_by_the_next(home: Path, tmp_path: Path) -> None:
    """No command works in half a home: the catalogue comes last."""
    live(home, lambda **_: None)
    folder = tmp_path / "backup"
    make(home, folder)
    whole = tmp_path / "whole"
    for back, _ in killed_homes(whole, lambda: bring_back(folder, whole), tmp_path / "killed"):
        if contents(back) == contents(whole):  # It is done.
            continue
        missing = contents(whole).keys() - contents(back).keys()
        if not all(name.startswith(".versions/property_catalog/") for name in missing):
            with pytest.raises(CatalogError):
                Catalog.open(back)
        assert contents(bring_back(folder, back)) == contents(whole)
