"""A publication that fails or is cut off at every operation, and what does not verify on the way."""

from __future__ import annotations

import errno
import os
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from faults.file_operations import FileOperations
from faults.lossy_disk import LossyDisk
from tests.support.damage import flip_bit
from tests.support.shares import share_of
from vlm_durable.files.files import DurableWriteError
from vlm_durable.files.layout import Home
from vlm_durable.versions.findings import FindingKind
from vlm_durable.versions.partition_files import PartitionFiles
from vlm_durable.versions.published import PublishedPartitions

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


def versions(base: Path, texts: str) -> Path:
    """A directory in which these texts are published, one after the other."""
    base.mkdir()
    for text in texts:
        publish(base, text)
    return base


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
    return versions(memory_path / "base", "abc" if request.param == "fourth" else "")


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


def operations_of(root: Path, action: Callable[[], None]) -> list[Any]:
    operations = FileOperations(root)
    with operations.watched():
        action()
    log: list[Any] = operations.log
    return log


def cut_anywhere(base: Path, log: list[Any]) -> Iterator[tuple[int, LossyDisk]]:
    """The disk before the first of these operations on what stands in ``base``, and after each of them."""
    disk = LossyDisk.holding(base)
    yield 0, disk
    for cut, operation in enumerate(log, start=1):
        disk.apply(operation)
        yield cut, disk


@pytest.mark.parametrize("eager", [False, True])
def test_cut_off_while_an_older_record_is_brought_up(memory_path: Path, eager: bool) -> None:
    """At any operation of that: it is done again, and comes out the same, with nothing lost."""
    base = versions(memory_path / "base", "ab")
    records = {path: path.read_bytes() for path in files_of(base).record_paths}
    publish(base, "c")
    for path, content in records.items():
        path.write_bytes(content)
    shutil.copytree(base, trial := memory_path / "trial")
    log = operations_of(trial, lambda: published(trial).verify(KEY))
    assert len(log) > 10
    for cut, disk in cut_anywhere(base, log):
        chance = None if eager else random.Random(cut)
        disk.after_power_cut(left := memory_path / f"cut{cut}", chance, eager=eager)
        assert published(left).verify(KEY).ok
        assert state(left) == "ccba"
        assert published(left).record(KEY).sequence == 3
        assert published(left).verify(KEY).repairs == ()
        assert not list(files_of(left).quarantine.glob("*"))


@pytest.mark.promise("Readers see the whole old file or the whole new one")
@pytest.mark.parametrize("way", ["durable", "eager", "chance"])
def test_power_cut_at_every_operation(base: Path, way: str) -> None:
    """Only what was made durable survives, or some of the rest besides: the promise holds all the same."""
    shutil.copytree(base, root := base.parent / "root")
    log = operations_of(root, lambda: publish(root, "d"))
    cuts = {*share_of(range(len(log)), SHARES), len(log)}
    for cut, disk in cut_anywhere(base, log):
        if cut in cuts:
            chance = random.Random(cut) if way == "chance" else None
            disk.after_power_cut(left := base.parent / f"cut{cut}", chance, eager=way == "eager")
            settled = assert_recovers(left, base, go_on=way == "chance")
    assert settled == expected(base)[1], "what was acknowledged is durable"


@pytest.mark.parametrize("name", ["ENOSPC", "EDQUOT", "EIO", "EROFS"])
def test_disk_fails_at_every_operation(base: Path, name: str) -> None:
    """A disk that fails, once or from then on, gives a clear error; the old or new file stays, whole."""
    code = getattr(errno, name)
    shutil.copytree(base, trial := base.parent / "trial")
    count = len(operations_of(trial, lambda: publish(trial, "d")))
    assert count > 20, "a publication has more operations than that: nothing would fail here"
    for number in share_of(range(1, count + 1), SHARES):
        shutil.copytree(base, folder := base.parent / f"at{number}")
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


@pytest.mark.parametrize("bad", ["published", "slot0"])
@pytest.mark.parametrize("action", ["publish", "restore"])
@pytest.mark.promise("What does not verify is moved aside")
def test_power_cut_keeps_what_was_damaged(memory_path: Path, bad: str, action: str) -> None:
    """What does not verify is never deleted: at any cut it stands under its old name or in the quarantine."""
    base = versions(memory_path / "base", "c")
    partition = files_of(base)
    path = {"published": partition.published, "slot0": partition.slot(0)}[bad]
    flip_bit(path, 40)
    damaged = path.read_bytes()
    shutil.copytree(base, root := memory_path / "root")
    act = {"publish": lambda: publish(root, "d"), "restore": lambda: published(root).restore(KEY)}[action]
    for cut, disk in cut_anywhere(base, operations_of(root, act)):
        for way, chance in (("durable", None), ("chance", random.Random(cut))):
            disk.after_power_cut(left := memory_path / f"{way}{cut}", chance)
            kept = [one.read_bytes() for one in left.rglob("*") if one.is_file()]
            assert damaged in kept
    assert list(files_of(root).quarantine.glob("*"))


def test_power_cut_after_setting_aside(memory_path: Path) -> None:
    """Promise 9: what a person set aside is in the quarantine for good; no old name comes back."""
    base, root = versions(memory_path / "base", "abc"), memory_path / "root"
    partition = files_of(base)
    names = [partition.published, *map(partition.slot, (0, 1, 2)), *partition.record_paths]
    shutil.copytree(base, root)
    *_, (_, disk) = cut_anywhere(base, operations_of(root, lambda: published(root).set_aside(KEY)))
    disk.after_power_cut(left := memory_path / "left", None)
    assert not [path for path in names if (left / path.relative_to(base)).exists()]
    kept = [path.read_bytes() for path in files_of(left).quarantine.iterdir()]
    assert sorted(kept) == sorted(path.read_bytes() for path in names)
    assert published(left).record(KEY) is None
