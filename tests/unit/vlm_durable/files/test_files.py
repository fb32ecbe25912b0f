"""Durable files: what a power cut, a full disk or a disk that lies leaves of them."""

import os
import random
from pathlib import Path

import pytest

from faults.file_operations import FileOperations
from faults.lossy_disk import LossyDisk
from vlm_durable.files import files
from vlm_durable.files.files import DurableWriteError, TemporaryFile


@pytest.mark.parametrize("keep", [False, True])
def test_a_file_moved_aside_stands_somewhere_after_any_power_cut(tmp_path, keep):
    """What does not verify is never lost: it has one of its names at any cut, and the new one at the end."""
    home = tmp_path / "home"
    path = home / "damaged.parquet"
    path.parent.mkdir()
    path.write_bytes(b"x")
    disk = LossyDisk.holding(home)
    with FileOperations(home).watched() as operations:
        aside = files.set_aside(path, home / "quarantine", keep=keep)
    for cut in range(len(operations.log) + 1):
        if cut:
            disk.apply(operations.log[cut - 1])
        for way in range(10):
            left = tmp_path / f"left-{cut}-{way}"
            disk.after_power_cut(left, random.Random(way) if way else None)
            names = [one.relative_to(left) for one in left.rglob("*") if one.is_file()]
            assert {(left / name).read_bytes() for name in names} == {b"x"}
    disk.after_power_cut(left := tmp_path / "left")
    names = [one.relative_to(left) for one in left.rglob("*") if one.is_file()]
    assert set(names) == {aside.relative_to(home), *([Path(path.name)] if keep else [])}


@pytest.mark.parametrize(
    "spoil", [lambda data: data[:-1], lambda data: data[:-1] + b"?", lambda data: data + b"?"]
)
def test_bytes_that_read_back_other_are_refused(tmp_path, monkeypatch, spoil):
    """Shorter, longer or changed: no file of either kind is given a name."""
    real = os.fsync

    def spoiling(descriptor):
        real(descriptor)
        (path,) = tmp_path.glob(".*.tmp")
        path.write_bytes(spoil(path.read_bytes()))

    monkeypatch.setattr(os, "fsync", spoiling)
    with pytest.raises(DurableWriteError):
        files.write_temporary(tmp_path / "file", b"bytes")
    streamed = TemporaryFile(tmp_path / "file")
    streamed.write(b"bytes")
    with pytest.raises(DurableWriteError):
        streamed.seal()
    streamed.discard()
    assert list(tmp_path.iterdir()) == []


def test_a_streamed_file_is_synced_before_it_is_read_back(tmp_path, monkeypatch):
    """Its bytes are on the disk before anything is made of them."""
    synced = []
    monkeypatch.setattr(os, "fsync", synced.append)
    streamed = TemporaryFile(tmp_path / "file")
    streamed.write(b"bytes")
    streamed.seal()
    assert len(synced) == 1


def test_a_file_that_stands_already_is_left_alone_and_nothing_else_is_left(tmp_path):
    """Beaten to a name: the other's bytes stay, and no temporary file lies beside them."""
    files.write_new(tmp_path / "note", b"first")
    with pytest.raises(FileExistsError):
        files.write_new(tmp_path / "note", b"second")
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("note", b"first")]


@pytest.mark.parametrize("write", [files.write_temporary, lambda path, data: TemporaryFile(path).write(data)])
def test_a_temporary_name_that_is_taken_is_refused(tmp_path, monkeypatch, write):
    """Promise 9: a file that stands under the temporary name, by a link too, is not written to."""
    (tmp_path / "another").write_bytes(b"first")
    taken = tmp_path / "taken.tmp"
    taken.symlink_to(tmp_path / "another")
    monkeypatch.setattr(files, "temporary_name", lambda path, staging=None: taken)
    with pytest.raises(DurableWriteError):
        write(tmp_path / "file", b"second")
    assert (tmp_path / "another").read_bytes() == b"first"


def test_working_folders_are_for_this_account_alone(tmp_path):
    """Whatever umask a shell had: who may enter them could hold our locks, and stop us."""
    before = os.umask(0)
    try:
        files.restrict_umask()
        files.make_directory(tmp_path / "home" / ".state" / "locks")
        files.make_directory(tmp_path / "home" / "property_catalog")
    finally:
        os.umask(before)
    modes = {
        name: (tmp_path / "home" / name).stat().st_mode & 0o777 for name in (".state", "property_catalog")
    }
    assert modes == {".state": 0o700, "property_catalog": 0o755}
