"""resources/engine/file_digests.py: weights are hashed once a day, and never believed unseen."""

import os
import time

import pytest

from resources.engine import file_digests
from resources.engine.file_digests import file_digest

DAY = 86_400


@pytest.fixture
def weights(tmp_path, monkeypatch):
    """A file that counts as large, last changed an hour ago."""
    monkeypatch.setattr(file_digests, "SMALL_BYTES", 4)
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"weights")
    real = time.time_ns
    monkeypatch.setattr(file_digests.time, "time_ns", lambda: real() + 3600 * 10**9)
    return path


@pytest.fixture
def hashed(monkeypatch):
    """The files that were read in full, in order; every look begins as in a new process."""
    read = []
    real = file_digests.sha256_of

    def noting(path):
        read.append(path)
        return real(path)

    monkeypatch.setattr(file_digests, "sha256_of", noting)
    return read


def digest(path, kept_in):
    file_digests._digest.cache_clear()
    return file_digest(path, kept_in)


def test_the_next_process_reads_a_digest_and_not_the_weights(weights, hashed, tmp_path):
    """The same digest, without reading the file again."""
    first = digest(weights, tmp_path / "digests")
    assert digest(weights, tmp_path / "digests") == first
    assert hashed == [weights]


@pytest.mark.parametrize("kept_time", [True, False])
def test_a_changed_file_is_hashed_again(weights, hashed, tmp_path, kept_time):
    """Other bytes of the same length, under the same modification time too."""
    first = digest(weights, tmp_path / "digests")
    before = weights.stat()
    weights.write_bytes(b"WEIGHTS")
    if kept_time:
        os.utime(weights, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert digest(weights, tmp_path / "digests") != first
    assert len(hashed) == 2


def test_a_bit_that_rots_is_noticed_within_a_day(weights, hashed, tmp_path, monkeypatch):
    """What was remembered a day ago is not believed any more, nor what a later clock wrote."""
    digest(weights, tmp_path / "digests")
    now = file_digests.time.time_ns
    for days in (1.01, -1.0):
        monkeypatch.setattr(file_digests.time, "time_ns", lambda days=days: now() + int(days * DAY * 10**9))
        digest(weights, tmp_path / "digests")
    assert len(hashed) == 3


def test_a_damaged_note_counts_as_none(weights, hashed, tmp_path):
    """A digest that does not verify is computed again."""
    first = digest(weights, tmp_path / "digests")
    (note,) = (tmp_path / "digests").iterdir()
    note.write_bytes(note.read_bytes().replace(first.encode(), b"0" * 64))
    assert digest(weights, tmp_path / "digests") == first
    assert len(hashed) == 2


def test_a_file_that_changed_just_now_is_not_remembered(weights, hashed, tmp_path, monkeypatch):
    """Its next change could come within the same tick of the clock."""
    monkeypatch.setattr(file_digests.time, "time_ns", lambda: weights.stat().st_mtime_ns + 10**6)
    digest(weights, tmp_path / "digests")
    assert not (tmp_path / "digests").exists()
