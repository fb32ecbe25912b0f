"""The order of file operations of one commit: the protocol, held step by step.

Taking out any fsync, read-back, link, directory sync or fence check changes the list and fails here.
"""

import os
import re
from pathlib import Path

from resources.journal import manifests, segments
from resources.journal.writer_lock import WriterLock
from resources.storage import files

WRITE_SEGMENT = [
    "create segment.tmp",
    "write segment.tmp",
    "fsync segment.tmp",
    "close",
    "read back segment.tmp",
]
WRITE_MANIFEST = [step.replace("segment", "manifest") for step in WRITE_SEGMENT]
WRITE_MARK = [step.replace("segment", "mark") for step in WRITE_SEGMENT]
COMMIT = [
    *WRITE_SEGMENT,
    "decode segment.tmp",
    "check lock",
    "check overtaken",
    "link segment.tmp segment",
    "unlink segment.tmp",
    "fsync journal/",
    "close",
    "check lock",
    *WRITE_MANIFEST,
    "check overtaken",
    "link manifest.tmp manifest",
    "unlink manifest.tmp",
    "fsync journal/",
    "close",
    "check overtaken",
    *WRITE_MARK,
    "replace mark.tmp mark",
    "fsync state/",
    "close",
]


def test_one_commit_takes_every_step_in_order(home, monkeypatch):
    """Rule 'Commit on a local disk', steps 2 to 6: the recorded operations are exactly these."""
    with home.open() as journal:
        steps = Steps(monkeypatch, home)
        journal.submit(home.rows(0, 1))
        journal.flush()
        monkeypatch.undo()
    assert steps.taken == COMMIT


def test_a_pruning_commit_removes_only_after_everything_is_durable(committed, monkeypatch):
    """The old manifest goes last, after the mark; nothing else is ever removed by a commit."""
    with committed.open() as journal:
        steps = Steps(monkeypatch, committed)
        journal.submit(committed.rows(9))
        journal.flush()
        monkeypatch.undo()
    assert steps.taken == [*COMMIT, "unlink manifest"]


def test_new_directories_are_made_durable_in_their_parents(tmp_path, monkeypatch):
    """Step 5: a directory that is created is fsynced into the one above it, from the top down."""
    synced = []
    monkeypatch.setattr(files, "sync_directory", synced.append)
    files.make_directory(tmp_path / "a" / "b")
    assert synced == [tmp_path.parent, tmp_path, tmp_path / "a"]


class Steps:
    """Records what the commit thread asks of the operating system, under short names."""

    def __init__(self, monkeypatch, home):
        self.taken = []
        self.open_files = {}
        self.home = home
        for name in ("open", "write", "fsync", "close", "link", "unlink", "rename", "replace"):
            monkeypatch.setattr(os, name, getattr(self, f"_{name}")(getattr(os, name)))
        for owner, name, step in (
            (files, "verify_bytes", "read back"),
            (WriterLock, "check", "check lock"),
            (manifests, "refuse_if_overtaken", "check overtaken"),
        ):
            monkeypatch.setattr(owner, name, self._noted(step, getattr(owner, name)))
        monkeypatch.setattr(segments, "decode", self._noted("decode", segments.decode, place=1))

    def _noted(self, step, real, place=0):
        def call(*arguments, **named):
            subject = arguments[place] if "check" not in step else None
            self.taken.append(f"{step} {self._short(subject)}" if subject is not None else step)
            return real(*arguments, **named)

        return call

    def _short(self, path):
        path = os.fspath(path)
        if path == str(self.home.directory):
            return "journal/"
        if path == str(self.home.mark.parent):
            return "state/"
        name = Path(path).name.lstrip(".")
        kind = re.match(r"segment|manifest", name)
        return (kind[0] if kind else "mark") + (".tmp" if name.endswith(".tmp") else "")

    def _open(self, real):
        def call(path, flags, *rest, **named):
            descriptor = real(path, flags, *rest, **named)
            self.open_files[descriptor] = self._short(path)
            if flags & os.O_CREAT:
                assert flags & os.O_EXCL, "a temporary name must be new"
                self.taken.append(f"create {self._short(path)}")
            return descriptor

        return call

    def _on_descriptor(self, name, real):
        def call(descriptor, *rest):
            self.taken.append(f"{name} {self.open_files[descriptor]}")
            return real(descriptor, *rest)

        return call

    def _write(self, real):
        return self._on_descriptor("write", real)

    def _fsync(self, real):
        return self._on_descriptor("fsync", real)

    def _close(self, real):
        def call(descriptor):
            if descriptor in self.open_files:
                self.taken.append("close")
            return real(descriptor)

        return call

    def _on_paths(self, name, real):
        def call(*paths, **named):
            existing = name != "unlink" or os.path.lexists(paths[0])
            if existing:
                self.taken.append(" ".join([name, *map(self._short, paths)]))
            return real(*paths, **named)

        return call

    def _link(self, real):
        return self._on_paths("link", real)

    def _unlink(self, real):
        return self._on_paths("unlink", real)

    def _rename(self, real):
        return self._on_paths("rename", real)

    def _replace(self, real):
        return self._on_paths("replace", real)
