"""A training in an S3 store: copies of its checkpoints, and the finished model, for another machine.

Copies are made beside the training. Another machine takes them over, and a fence keeps two machines from
publishing at once. A checkpoint is cut into parts, because a store takes 5 GB at once.
"""

from __future__ import annotations

import hashlib
import re
import threading
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from vlm_durable.files.files import TemporaryFile, make_directory, publish_new
from vlm_durable.files.sealed_json import sealed
from vlm_durable.mirror.mirror import Mirror
from vlm_durable.versions.fenced_object import FencedObject, HomeFile, OvertakenError
from vlm_durable.versions.partition_files import FileDamagedError
from vlm_durable.versions.versioned_object import PublishedError
from vlm_training.checkpoints import KEPT, Checkpoints, digest_in, step_in
from vlm_training.published_model import PublishedModel
from vlm_training.training_plan import TrainingError

PART_BYTES: Final = 256 << 20
_PART: Final = re.compile(r"(.+)\.\d{5}-of-\d{5}")


class StoredCheckpoints:
    """The copies of one training's checkpoints. Every method raises StoreError, above all StoreAwayError."""

    def __init__(self, store: Mirror) -> None:
        """store: the folder of these checkpoints alone."""
        self._store = store

    def put(self, path: Path) -> None:
        """Copy a checkpoint, and remove older copies. The store checks the SHA-256 of each part.

        Raises FileNotFoundError if the file was removed meanwhile, because a newer checkpoint exists.
        """
        self._store.prove()
        parts = max(1, -(-path.stat().st_size // PART_BYTES))
        with path.open("rb") as stream:
            for number in range(parts):
                content = stream.read(PART_BYTES)
                name = f"{path.name}.{number:05}-of-{parts:05}"
                stored = self._store.head(name)
                if stored is None or stored.sha256 != hashlib.sha256(content).hexdigest():
                    self._store.put(name, content, over=stored)
        self._rotate(step_in(path.name))

    def pull(self, into: Checkpoints, *, after: int) -> str | None:
        """Take over the newest whole checkpoint after step ``after``. Returns a sentence, or None."""
        copies = self._parts_by_checkpoint()
        for name in _whole(copies):
            if step_in(name) <= after:
                return None
            make_directory(into.folder)
            file = TemporaryFile(into.folder / name)
            try:
                for part in sorted(copies[name]):
                    file.write(self._store.get(part, most=PART_BYTES))
                if file.seal() == digest_in(name):
                    publish_new(file.path, into.folder / name)
                    return f"The checkpoint of step {step_in(name)} was taken over from {self._store}."
            finally:
                file.discard()
        return None

    def _parts_by_checkpoint(self) -> Mapping[str, list[str]]:
        """The names of the parts of each checkpoint."""
        copies = defaultdict[str, list[str]](list)
        for part, _ in self._store.names():
            match = _PART.fullmatch(part)
            if match is not None and digest_in(match[1]) is not None:
                copies[match[1]].append(part)
        return copies

    def _rotate(self, newest: int) -> None:
        copies = self._parts_by_checkpoint()
        whole = _whole(copies)
        for name, parts in copies.items():
            # Another machine may be copying a checkpoint that is not whole yet.
            if name in whole[KEPT:] or (name not in whole and step_in(name) < newest):
                for part in parts:
                    self._store.delete(part)


def _whole(copies: Mapping[str, Sequence[str]]) -> list[str]:
    """The checkpoints with all of their parts, the newest first."""
    whole = [name for name, parts in copies.items() if len(parts) == int(parts[0].rpartition("-")[2])]
    return sorted(whole, key=step_in, reverse=True)


class StoreCopies:
    """Copies the newest checkpoint beside the training, in a thread. An outage stops nothing.

    failed: called with a sentence when a copy fails; not again until a copy succeeds.
    """

    def __init__(self, stored: StoredCheckpoints, failed: Callable[[str], None]) -> None:
        self._stored, self._failed = stored, failed
        self._newest: Path | None = None
        self._guard = threading.Lock()
        self._thread: threading.Thread | None = None
        self._is_away = False

    def offer(self, path: Path) -> None:
        """Have a checkpoint on this machine's disk copied. Returns at once."""
        with self._guard:
            self._newest = path
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._copy, daemon=True)
                self._thread.start()

    def wait(self) -> None:
        """Return when the newest checkpoint is copied, or copying it has failed."""
        thread = self._thread
        if thread is not None:
            thread.join()

    def _copy(self) -> None:
        while True:
            with self._guard:
                path, self._newest = self._newest, None
                if path is None:
                    self._thread = None
                    return
            try:
                self._stored.put(path)
                self._is_away = False
            except FileNotFoundError:
                continue  # It was removed meanwhile, because a newer one was offered.
            except Exception as error:  # Else the thread would end in silence.
                if not self._is_away:
                    self._failed(
                        f"{path.name} was not copied to the store: {error} The training goes on, and the copy"
                        " before stands there: a machine that is lost now loses what came since."
                    )
                self._is_away = True


class StoredModel:
    """The finished model of one variant in the store, published as a partition is
    (``vlm_durable/versions/fenced_object.py``). Every method raises StoreError, and TrainingError where
    another machine overtook this one.
    """

    def __init__(self, store: Mirror, model: PublishedModel) -> None:
        root = model.paths.asset.home.root
        self._store, self._model = store, model
        self._name = str(model.paths.record.relative_to(root))
        self._folder = f"{model.folder.relative_to(root)}/"

    def record(self) -> tuple[Mapping[str, Any] | None, FencedObject]:
        """The record in the store; from then on it is the fence. Raises TrainingError, FormatVersionError."""
        fenced = FencedObject(self._store, self._name)
        try:
            content = fenced.read()
            return None if content is None else self._model.parsed(content), fenced
        except PublishedError as error:
            raise TrainingError(
                f"{fenced.address}: {error}. Nothing was changed. If it is damaged, put it back from a"
                " version of the bucket, or remove it: the next start here puts this machine's model there."
            ) from error

    def pull(self, record: Mapping[str, Any]) -> bool:
        """Fetch the files of a record into the empty export; False if the store lacks one of them."""
        fenced, into = FencedObject(self._store, self._name), self._model.export
        for name, digest in record["files"].items():
            if Path(name).is_absolute() or ".." in Path(name).parts:
                raise TrainingError(f"{fenced.address} names {name!r}, outside of its folder.")
            content = fenced.fetch([self._folder + name], digest)
            if content is None:
                return False
            make_directory((into / name).parent)
            (into / name).write_bytes(content)
        return True

    def push(self, *, over: bool = False) -> None:
        """Put the published model into the store. over: also over an earlier one of the same training."""
        record = self._model.record
        if record is None or not self._store.keeps_copies:
            return
        self._store.prove()
        stored, fenced = self.record()
        is_same = stored is not None and stored["fingerprint"] == record["fingerprint"]
        is_published = stored is not None and is_same and not stored.get("pending")
        if stored is not None and is_published and stored["files"] != record["files"]:
            if not over or stored["sequence"] >= record["sequence"]:
                return  # Another machine published it first: the next materialization takes its bytes.
            is_published = False
        if stored is not None and not is_same and stored["sequence"] >= record["sequence"]:
            raise self._overtaken(fenced)
        files = [
            HomeFile(self._folder + name, self._model.folder / name, digest)
            for name, digest in record["files"].items()
        ]
        try:
            if is_published:
                fenced.put_files(files)
            else:
                fenced.publish(sealed({**record, "pending": True}), files, sealed(record))
        except OvertakenError as error:
            raise self._overtaken(fenced) from error
        except FileDamagedError as error:
            raise TrainingError(str(error)) from error
        for name, _ in list(self._store.names(self._folder)):
            if name.removeprefix(self._folder) not in record["files"]:
                if fenced.is_overtaken:
                    return  # Another machine has begun to publish: the file may be its own.
                self._store.delete(name)

    def _overtaken(self, fenced: FencedObject) -> TrainingError:
        return TrainingError(
            f"{fenced.address} was written by another machine, which has published another"
            " training of this variant since this one began. Nothing there was replaced; the model that was"
            " trained here is in this home. To publish it all the same, remove that record and materialize"
            " the variant here."
        )
