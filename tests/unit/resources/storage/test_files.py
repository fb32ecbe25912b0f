"""resources/storage/files.py: the order of the steps where a file is moved aside or a journal goes."""

import os

import pytest

from resources.storage import files
from resources.storage.files import DurableWriteError, TemporaryFile


def test_a_file_moved_aside_is_durable_there_before_its_old_name_goes(tmp_path, steps):
    """At no moment, and after no power cut, does it stand nowhere; afterwards it stands in one place."""
    (tmp_path / "home").mkdir()
    path = tmp_path / "home" / "damaged.parquet"
    path.write_bytes(b"x")
    aside = files.set_aside(path, tmp_path / "home" / "quarantine")
    assert aside.read_bytes() == b"x"
    assert steps[-4:] == ["link damaged", "sync quarantine", "unlink damaged", "sync home"]


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
