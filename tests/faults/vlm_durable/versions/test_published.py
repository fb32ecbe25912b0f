"""A publication stopped, failed or cut off at every operation, and damage to every part of what it wrote."""

from __future__ import annotations

import errno
import os
import random
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from faults.file_operations import FileOperations
from faults.lossy_disk import LossyDisk
from tests.support.damage import flip_bit
from tests.support.forking import StartForkServer
from tests.support.shares import SHARE, share_of
from vlm_durable.files.files import DurableWriteError
from vlm_durable.files.layout import Home
from vlm_durable.versions.findings import FindingKind
from vlm_durable.versions.partition_files import PartitionFiles
from vlm_durable.versions.published import PublishedPartitions
from vlm_durable.versions.version_mark import mark_copies
from vlm_durable.versions.versioned_object import RecordDamagedError

RunKilled = Callable[..., list[bool]]

ASSET = "a"
KEY = "000000000-000000001"
SCHEMA = pa.schema([("property_id", pa.string()), ("text", pa.string())])
IDS = ["x", "y"]
SHARES = 3


def published(home: Path) -> PublishedPartitions:
    return PublishedPartitions(Home(home).asset(ASSET), lock_seconds=0)


def files_of(home: Path) -> PartitionFiles:
    return PartitionFiles(Home(home).asset(ASSET), KEY)


def publish(home: Path, text: str) -> None:
    partitions = published(home)
    batch = pa.record_batch([IDS, [text, text]], schema=SCHEMA)
    with partitions.stage(KEY, [batch], SCHEMA, expected_ids=IDS, fingerprint=text) as staged:
        partitions.publish(staged)


def restore(directory: Path) -> None:
    published(directory).restore(KEY)


def text_of(path: Path) -> str | None:
    if not path.exists():
        return None
    with pq.ParquetFile(path) as file:
        return file.read(["text"], use_threads=False).column(0)[0].as_py()


def state(directory: Path) -> str:
    """The texts of the published file and of the backups, oldest last: ``cc b a`` written ``ccba``."""
    partition = files_of(directory)
    paths = [partition.published, *map(partition.slot, (0, 1, 2))]
    return "".join(text_of(path) or "-" for path in paths)


@pytest.fixture(params=["first", "fourth"])
def base(request: pytest.FixtureRequest, memory_path: Path) -> Path:
    """A directory before the publication of ``d``: nothing published yet, or three versions before."""
    directory = memory_path / "base"
    directory.mkdir()
    for text in "abc" if request.param == "fourth" else "":
        publish(directory, text)
    return directory


def expected(base: Path) -> tuple[str, str]:
    """The state before and after."""
    return ("ccba", "ddcb") if files_of(base).published.exists() else ("----", "dd--")


def assert_recovers(directory: Path, base: Path, *, go_on: bool = True) -> str:
    """Readers see the whole old or new file, verifying settles everything, and the next publication works."""
    old, new = expected(base)
    partitions = published(directory)
    seen = text_of(partitions.path(KEY))
    assert (seen or "-") in (old[0], new[0])
    assert [path.name for path in directory.glob(f"{ASSET}/*")] == ([f"{KEY}.parquet"] if seen else [])
    record = partitions.record(KEY)
    assert (record.fingerprint if record else None) == seen
    found = partitions.verify(KEY)
    settled = state(directory)
    if seen:
        assert found.ok, found.sentence()
    else:
        assert [one.kind for one in found.findings] == [FindingKind.NOT_PUBLISHED]
    assert settled == (new if seen == "d" else old)
    marked = files_of(directory).marked()
    assert (marked.published if marked else None) == partitions.record(KEY), (
        "the mark is never behind or ahead"
    )
    assert partitions.verify(KEY).repairs == ()
    assert not list(files_of(directory).quarantine.glob("*"))
    if go_on:
        publish(directory, "e")
        assert state(directory) == "ee" + settled[1:3]
        assert partitions.verify(KEY).ok
        assert not [path for path in directory.rglob("*.tmp") if path.is_file()]
    return settled


@pytest.fixture(scope="module")
def run_killed(fork_server: StartForkServer) -> Iterator[RunKilled]:
    """A function that publishes a text in each folder, or verifies it, and says which were killed.

    It takes the folders by the number of the operation at which each one's process dies.
    """
    with fork_server(Path(__file__).parents[1] / "killed_publisher.py") as server:

        def run(folders: dict[int, Path], text: str | None) -> list[bool]:
            return [
                server.kill_at(number, folder=str(folder), key=KEY, text=text) is not None
                for number, folder in folders.items()
            ]

        yield run


def copies(base: Path, numbers: Iterable[int]) -> dict[int, Path]:
    return {number: shutil.copytree(base, base.parent / f"at{number}") for number in numbers}


def operations_of(root: Path, action: Callable[[], None]) -> list[Any]:
    operations = FileOperations(root)
    with operations.watched():
        action()
    log: list[Any] = operations.log
    return log


@pytest.mark.promise("Readers see the whole old file or the whole new one")
def test_killed_at_every_operation(base: Path, run_killed: RunKilled) -> None:
    """SIGKILL at any file operation leaves the whole old or new file, and the next run goes on."""
    shutil.copytree(base, trial := base.parent / "trial")
    count = len(operations_of(trial, lambda: publish(trial, "d")))
    struck = share_of(range(1, count + 1), SHARES)
    folders = copies(base, [*struck, count + 1])
    assert run_killed(folders, "d") == [True] * len(struck) + [False]
    states = [assert_recovers(folder, base) for folder in folders.values()]
    old, new = expected(base)
    assert states == sorted(states, key=[old, new].index), "the change happens once"
    assert {old, new} == set(states)


def test_killed_while_recovering(memory_path: Path, run_killed: RunKilled) -> None:
    """A second kill, at any operation of the recovery from the first, changes nothing of the promise."""
    base = memory_path / "base"
    base.mkdir()
    for text in "abc":
        publish(base, text)
    shutil.copytree(base, trial := memory_path / "trial")
    count = len(operations_of(trial, lambda: publish(trial, "d")))
    stopped = copies(base, share_of(range(count // 2 + 1, count + 1), SHARES))
    assert all(run_killed(stopped, "d"))
    chance = random.Random(SHARE)
    again = {
        number: shutil.copytree(chance.choice([*stopped.values()]), memory_path / f"again{number}")
        for number in share_of(range(1, 23), 2)
    }
    ends = run_killed(again, None)
    assert any(ends)
    for folder, was_killed in zip(again.values(), ends, strict=True):
        if was_killed:
            assert_recovers(folder, base)


def older_record(base: Path) -> None:
    """Three versions, and a record, in both copies, of the second beside the file of the third."""
    base.mkdir()
    for text in "ab":
        publish(base, text)
    records = {path: path.read_bytes() for path in files_of(base).record_paths}
    publish(base, "c")
    for path, content in records.items():
        path.write_bytes(content)


def assert_brought_up(directory: Path) -> None:
    """Whatever stopped it, the next start has the record of the newest version, and nothing is lost."""
    assert published(directory).verify(KEY).ok
    assert state(directory) == "ccba"
    assert published(directory).record(KEY).sequence == 3
    assert published(directory).verify(KEY).repairs == ()
    assert not list(files_of(directory).quarantine.glob("*"))


def test_stopped_while_an_older_record_is_brought_up(memory_path: Path, run_killed: RunKilled) -> None:
    """A kill or a power cut at any operation of that: it is done again, and comes out the same."""
    older_record(base := memory_path / "base")
    shutil.copytree(base, trial := memory_path / "trial")
    log = operations_of(trial, lambda: published(trial).verify(KEY))
    assert len(log) > 10
    folders = copies(base, share_of(range(1, len(log) + 1), SHARES))
    assert all(run_killed(folders, None))
    for folder in folders.values():
        assert_brought_up(folder)
    disk = LossyDisk.holding(base)
    for cut, operation in enumerate([*log, None]):
        disk.after_power_cut(left := memory_path / f"cut{cut}", random.Random(cut))
        assert_brought_up(left)
        if operation:
            disk.apply(operation)


@pytest.mark.parametrize("way", ["durable", "eager", "chance"])
def test_power_cut_at_every_operation(base: Path, way: str) -> None:
    """Only what was made durable survives, or some of the rest besides: the promise holds all the same."""
    shutil.copytree(base, root := base.parent / "root")
    log = operations_of(root, lambda: publish(root, "d"))
    disk = LossyDisk.holding(base)
    cuts = {*share_of(range(len(log)), SHARES), len(log)}
    for cut in range(len(log) + 1):
        if cut in cuts:
            chance = random.Random(cut) if way == "chance" else None
            disk.after_power_cut(left := base.parent / f"cut{cut}", chance, eager=way == "eager")
            settled = assert_recovers(left, base, go_on=way == "chance")
        if cut < len(log):
            disk.apply(log[cut])
    assert settled == expected(base)[1], "what was acknowledged is durable"


def test_power_cut_after_recovery(memory_path: Path) -> None:
    """A process stops anywhere, the next one settles it, then the power goes: what was settled is durable."""

    class Stopped(BaseException):
        pass

    base = memory_path / "base"
    base.mkdir()
    for text in "abc":
        publish(base, text)
    shutil.copytree(base, trial := memory_path / "trial")
    log = operations_of(trial, lambda: publish(trial, "d"))
    stops = [number for number, one in enumerate(log) if number and one.name != "close"]
    assert len(stops) > 20, "a publication has more operations than that"
    for stop in share_of(stops, SHARES):
        shutil.copytree(base, root := memory_path / f"root{stop}")
        operations = FileOperations(root)

        def before(operation: Any, operations: Any, stop: int = stop) -> None:
            if operation.name != "close" and len(operations.log) >= stop:
                raise Stopped

        operations.before = before
        with operations.watched(), pytest.raises(Stopped):
            publish(root, "d")
        operations.before = lambda operation, operations: None
        # Outside: what a process made durable before it had to wait for the lock does not count.
        with files_of(root).locked(0), operations.watched():
            _, repairs = files_of(root).settle()
        assert all("interrupted" in one for one in repairs)
        settled = state(root)
        disk = LossyDisk.holding(base)
        for operation in operations.log:
            disk.apply(operation)
        disk.after_power_cut(left := memory_path / f"left{stop}", None)
        assert assert_recovers(left, base) == settled
        chance = random.Random(stop)
        disk = LossyDisk.holding(base)
        for operation in operations.log[: chance.randint(stop, len(operations.log))]:
            disk.apply(operation)
        disk.after_power_cut(left := memory_path / f"cut{stop}", chance)
        assert_recovers(left, base)


@pytest.mark.parametrize("name", ["ENOSPC", "EDQUOT", "EIO", "EROFS"])
def test_disk_fails_at_every_operation(base: Path, name: str) -> None:
    """A disk that fails, once or from then on, gives a clear error; the old or new file stays, whole."""
    code = getattr(errno, name)
    shutil.copytree(base, trial := base.parent / "trial")
    count = len(operations_of(trial, lambda: publish(trial, "d")))
    assert count > 20, "a publication has more operations than that: nothing would fail here"
    for number, folder in copies(base, share_of(range(1, count + 1), SHARES)).items():
        operations = FileOperations(folder)
        calls = 0

        def before(operation: Any, operations: Any, number: int = number) -> None:
            nonlocal calls
            calls += 1
            failing = calls == number if name == "EIO" else calls >= number
            if failing and not (name in ("ENOSPC", "EDQUOT") and operation.name == "unlink"):
                if operation.name == "close":
                    operations.real["close"](operation.descriptor)
                raise OSError(code, os.strerror(code), *operation.paths)

        operations.before = before
        with operations.watched(), pytest.raises(OSError, match=os.strerror(code)) as failure:
            publish(folder, "d")
        assert failure.value.errno == code
        assert_recovers(folder, base)


def test_short_writes_lose_nothing(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A system call that writes less than it was asked to is called again."""
    new = expected(base)[1]
    write = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, data: write(descriptor, bytes(data)[:7]))
    publish(base, "d")
    assert state(base) == new
    assert published(base).verify(KEY).ok


def test_bytes_changed_before_the_read_back(base: Path) -> None:
    """A disk that acknowledges what it did not keep is noticed, for every file and every write."""
    shutil.copytree(base, trial := base.parent / "trial")
    log = operations_of(trial, lambda: publish(trial, "d"))
    syncs = [number for number, operation in enumerate(log) if operation.name == "fsync"]
    assert {one.paths for one in log if one.name == "write"} == {log[number].paths for number in syncs}
    for number in syncs:
        shutil.copytree(base, folder := base.parent / f"lying{number}")
        operations = FileOperations(folder)

        def before(operation: Any, operations: Any, number: int = number) -> None:
            if len(operations.log) == number:
                path = operations.root / operation.paths[0]
                flip_bit(path)

        operations.before = before
        with operations.watched(), pytest.raises(DurableWriteError, match="reads back as"):
            publish(folder, "d")
        assert_recovers(folder, base)


@pytest.mark.promise("A changed, missing or added bit", "Nothing damaged is used")
def test_every_flipped_bit_is_found(memory_path: Path) -> None:
    """A flipped bit anywhere in the published file or its backups, footers included, is found."""
    for text in "abc":
        publish(memory_path, text)
    partitions = published(memory_path)
    partition = files_of(memory_path)
    chance = random.Random(3)
    for path, kind in (
        (partition.published, {"digest_differs", "unreadable", "rows_differ"}),
        (partition.slot(0), {"second_copy"}),
        (partition.slot(2), {"earlier_version"}),
    ):
        whole = path.read_bytes()
        for _ in range(50):
            damaged = bytearray(whole)
            damaged[chance.randrange(len(whole))] ^= 1 << chance.randrange(8)
            path.write_bytes(damaged)
            found = partitions.verify(KEY).findings
            assert len(found) == 1 and found[0].kind in kind
        path.write_bytes(whole)
    assert partitions.verify(KEY).ok


def test_every_damaged_record_is_found(memory_path: Path) -> None:
    """A flipped bit, a cut or added bytes in the record: its copy brings it back, or the loss is named."""
    for text in "ab":
        publish(memory_path, text)
    partitions = published(memory_path)
    record = partitions.record(KEY)
    path, copy = files_of(memory_path).record_paths
    marks = mark_copies(files_of(memory_path).paths.version_mark)
    whole = path.read_bytes()
    assert copy.read_bytes() == whole
    chance = random.Random(5)
    for number in range(60):
        damaged = bytearray(whole)
        if number % 3 == 0:
            damaged = damaged[: chance.randrange(len(whole))]
        elif number % 3 == 1:
            damaged[chance.randrange(len(whole))] ^= 1 << chance.randrange(8)
        else:
            damaged += chance.randbytes(chance.randint(1, 9))
        path.write_bytes(damaged)
        assert partitions.record(KEY) == record
        found = partitions.verify(KEY)
        assert found.ok and found.repairs
        assert path.read_bytes() == whole
        path.write_bytes(damaged)
        copy.write_bytes(damaged)
        with pytest.raises(RecordDamagedError):
            partitions.record(KEY)
        if number % 10 == 0:
            found = partitions.verify(KEY)
            assert found.ok and "written anew" in found.sentence(), "the mark has the record too"
            assert partitions.record(KEY) == record
        path.write_bytes(damaged)
        copy.write_bytes(damaged)
        kept = {one: one.read_bytes() for one in marks}
        for one in marks:
            one.write_bytes(damaged)
        assert partitions.verify(KEY).findings[0].kind is FindingKind.RECORD
        for one, content in kept.items():
            one.write_bytes(content)
        path.write_bytes(whole)
        copy.write_bytes(whole)


@pytest.mark.parametrize("bad", ["published", "slot0", "slot1", "record", "copy"])
def test_killed_and_then_damaged(memory_path: Path, run_killed: RunKilled, bad: str) -> None:
    """A kill at any operation and damage to any one file besides: a whole version is still restored."""
    base = memory_path / "base"
    base.mkdir()
    for text in "abc":
        publish(base, text)
    shutil.copytree(base, trial := memory_path / "trial")
    count = len(operations_of(trial, lambda: publish(trial, "d")))
    # Before the record of the publication under way is written, there is nothing to settle.
    start = count // 2
    folders = copies(base, share_of(range(start, count + 1), SHARES))
    assert all(run_killed(folders, "d"))
    damaged = 0
    for folder in folders.values():
        partition = files_of(folder)
        path = {
            "published": partition.published,
            "slot0": partition.slot(0),
            "slot1": partition.slot(1),
            "record": partition.record_path,
            "copy": partition.record_copy,
        }[bad]
        if path.exists():
            flip_bit(path)
            damaged += 1
        partitions = published(folder)
        partitions.verify(KEY)
        partitions.restore(KEY)
        assert text_of(partition.published) in ("c", "d")
        assert partitions.read(KEY).to_table()["property_id"].to_pylist() == IDS
        publish(folder, "e")
        assert state(folder)[:2] == "ee"
        assert partitions.verify(KEY).ok
    assert damaged > len(folders) // 3, "the file was there to be damaged in too few of the cases"


@pytest.mark.parametrize("bad", ["published", "slot0"])
@pytest.mark.parametrize("action", ["publish", "restore"])
@pytest.mark.promise("What does not verify is moved aside")
def test_power_cut_keeps_what_was_damaged(memory_path: Path, bad: str, action: str) -> None:
    """What does not verify is never deleted: at any cut it stands under its old name or in the quarantine."""
    base = memory_path / "base"
    base.mkdir()
    publish(base, "c")
    partition = files_of(base)
    path = {"published": partition.published, "slot0": partition.slot(0)}[bad]
    flip_bit(path, 40)
    damaged = path.read_bytes()
    shutil.copytree(base, root := memory_path / "root")
    log = operations_of(
        root,
        lambda: publish(root, "d") if action == "publish" else restore(root),
    )
    disk = LossyDisk.holding(base)
    for cut, operation in enumerate([*log, None]):
        for way, chance in (("durable", None), ("chance", random.Random(cut))):
            disk.after_power_cut(left := memory_path / f"{way}{cut}", chance)
            kept = [one.read_bytes() for one in left.rglob("*") if one.is_file()]
            assert damaged in kept
        if operation:
            disk.apply(operation)
    assert list(files_of(root).quarantine.glob("*"))


def test_power_cut_after_setting_aside(memory_path: Path) -> None:
    """Promise 9: what a person set aside is in the quarantine for good; no old name comes back."""
    base, root = memory_path / "base", memory_path / "root"
    base.mkdir()
    for text in "abc":
        publish(base, text)
    partition = files_of(base)
    names = [partition.published, *map(partition.slot, (0, 1, 2)), *partition.record_paths]
    shutil.copytree(base, root)
    disk = LossyDisk.holding(base)
    for operation in operations_of(root, lambda: published(root).set_aside(KEY)):
        disk.apply(operation)
    disk.after_power_cut(left := memory_path / "left", None)
    assert not [path for path in names if (left / path.relative_to(base)).exists()]
    kept = [path.read_bytes() for path in files_of(left).quarantine.iterdir()]
    assert sorted(kept) == sorted(path.read_bytes() for path in names)
    assert published(left).record(KEY) is None
