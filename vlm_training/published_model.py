"""The published model of one variant: a folder of files, its record, and the model before it.

A model has no second copy: the last checkpoint of its training makes the same bytes again.
``training_store.py`` publishes it in a store.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from vlm_durable.commands import command
from vlm_durable.files.files import exchange, make_directory, sha256_of, sync_directory, sync_file
from vlm_durable.files.layout import AssetFolders
from vlm_durable.files.sealed_json import BrokenSealError, FormatVersionError, sealed, unsealed
from vlm_durable.versions.findings import Finding, FindingKind
from vlm_durable.versions.version_mark import VersionMark
from vlm_durable.versions.versioned_object import RecordDamagedError, VersionedObject

ASSET = "description_model"


_IDENTITY = ("fingerprint", "files")
"""The parts of a record that are alike in two records of one version."""


class PublishedModel(VersionedObject[Mapping[str, Any]]):
    """One variant's model. The newest record counts, of its two copies and the one in its version mark."""

    def __init__(self, asset: AssetFolders, name: str) -> None:
        super().__init__(asset.partition(name))
        self.folder = asset.published / name
        self.export = asset.staging / name
        """The folder in which the next model is assembled."""
        self.kept = asset.versions / f"{name}.before"
        """The model that was published before."""

    def parsed(self, content: bytes) -> Mapping[str, Any]:
        """See VersionedObject."""
        try:
            record = unsealed(content, f"the record of {ASSET} {self.key}")
        except BrokenSealError as error:
            raise RecordDamagedError(f"the record of {self.key} cannot be read: {error}") from error
        record.pop("format", None)
        # Models that were published first do not say it.
        if (name := record.get("name", self.mark.name)) != self.mark.name:
            raise RecordDamagedError(f"the record of {self.key} is that of {name}")
        return record

    @property
    def record(self) -> Mapping[str, Any] | None:
        """The record of the newest model that was published here; None where nothing says that one was.

        Raises RecordDamagedError where what said so is damaged, FormatVersionError, OSError.
        """
        reading = self.mark.read()
        mark = reading.mark
        marked = mark.content["published"] if mark is not None and mark.content is not None else None
        records = (*self._standing(), marked)
        known = [record for record in records if record is not None]
        if not known and (reading.is_unreadable or any(copy.damage is not None for copy in self.copies())):
            where = ", ".join(str(path) for path in (*self.record_paths, *self.mark.copies) if path.exists())
            raise RecordDamagedError(
                f"nothing tells which model of {self.key} was published: none of {where} can be read."
                f" Nothing was changed. Put one of them back from a backup; or move them elsewhere and"
                f" materialize {ASSET} {self.key}, which publishes it anew and keeps the folder of before in"
                f" {self.quarantine}."
            )
        return max(known, key=lambda record: int(record["sequence"]), default=None)

    def trouble(self, digest: Callable[[Path], str] = sha256_of) -> Finding | None:
        """Why nothing may be described with what stands there; None where it is the newest model.

        digest: gives the SHA-256 of a file; one that remembers it makes this cheap.
        """

        def finding(kind: FindingKind, sentence: str, next_step: str = "") -> Finding:
            return Finding(kind, self.asset, None, sentence, next_step, str(self.folder))

        try:
            newest, standing = self.record, [record["sequence"] for record in self._standing()]
            if newest is None or self.is_whole(newest, digest=digest):
                return None
        except (FormatVersionError, RecordDamagedError) as error:
            return finding(FindingKind.RECORD, f"{error}")
        except OSError as error:
            return finding(FindingKind.UNREADABLE, f"{error}")
        kind, older = FindingKind.DIGEST_DIFFERS, "its files are others than those of its record"
        if newest["sequence"] not in standing:
            kind, older = FindingKind.RECORD, "its record is lost"
            if standing:
                kind, older = FindingKind.PUT_BACK, f"version {max(standing)} stands there"
        return finding(
            kind,
            f"the model of {self.key} is not the newest one that was published: {older}, and version"
            f" {newest['sequence']} ({newest['step']} steps) was here. Nothing was changed.",
            f"Materialize {ASSET} {self.key}, which makes that one again from its last checkpoint, or name"
            f" the folder itself as the model: {self.folder}. {command('status')} shows the variants.",
        )

    def is_whole(
        self,
        record: Mapping[str, Any],
        folder: Path | None = None,
        digest: Callable[[Path], str] = sha256_of,
    ) -> bool:
        """Whether a folder, the published one unless given, has the files of a record with their digests."""
        within = folder or self.folder
        return all(
            (within / name).is_file() and digest(within / name) == expected
            for name, expected in record["files"].items()
        )

    def empty_export(self) -> None:
        """Make an empty folder for the next model."""
        if (record := self.record) is not None and self.is_whole(record, self.export):
            # An earlier start died after it exchanged the folders: this is the published model of before.
            self._keep_export()
        shutil.rmtree(self.export, ignore_errors=True)
        make_directory(self.export)

    def settle(self, record: Mapping[str, Any]) -> bool:
        """Whether the newest model stands whole. Then both copies of its record and its mark say so."""
        if not self.is_whole(record):
            return False
        self.mark.raise_to(self._mark(record))
        if any(copy.record != record for copy in self.copies()):
            self._write(record)
        return True

    def publish(self, record: Mapping[str, Any]) -> None:
        """Exchange the folders in one step, then mark and write the record. The earlier model is kept.

        Its number is raised above all that were given here, unless these files have one. A death before the
        mark leaves a model without a record: the next start publishes the same bytes.
        """
        newest = self.record
        number, known = int(record["sequence"]), int(newest["sequence"]) if newest is not None else 0
        is_known = newest is not None and all(newest[part] == record[part] for part in _IDENTITY)
        number = max(number, known if is_known else self.mark.next_sequence(known))
        record = {**record, "name": self.mark.name, "sequence": number}
        for name in record["files"]:
            sync_file(self.export / name)
        for folder in (self.export, *(path for path in self.export.rglob("*") if path.is_dir())):
            sync_directory(folder)
        if newest is None:
            self._set_aside_unknown(record)
        exchange(self.export, self.folder)
        # If a model is kept already, only the model of the record may take its place.
        if not is_known and newest and (not self.kept.exists() or self.is_whole(newest, self.export)):
            self._keep_export()
        self._record(record)
        shutil.rmtree(self.export, ignore_errors=True)

    def record_changed(self, name: str) -> None:
        """Take a file of the published model into its record as it stands, under the next number.

        Nothing is written if the record has it already.
        """
        record = self.record
        if record is None or name not in record["files"]:
            return
        digest = sha256_of(self.folder / name)
        if digest != record["files"][name]:
            number = self.mark.next_sequence(int(record["sequence"]))
            self._record({**record, "files": {**record["files"], name: digest}, "sequence": number})

    def _record(self, record: Mapping[str, Any]) -> None:
        self.mark.write(self._mark(record))
        self._write(record)

    def _write(self, record: Mapping[str, Any]) -> None:
        make_directory(self.paths.record.parent)
        self.settle_record(sealed(record))

    def _mark(self, record: Mapping[str, Any]) -> VersionMark:
        digest = hashlib.sha256(json.dumps(record["files"], sort_keys=True).encode()).hexdigest()
        return replace(
            VersionMark.now(self.mark.name, record["sequence"], digest), content={"published": dict(record)}
        )

    def _standing(self) -> list[Mapping[str, Any]]:
        return [copy.record for copy in self.copies() if copy.record is not None]

    def _set_aside_unknown(self, record: Mapping[str, Any]) -> None:
        """Move a folder that has no record into the quarantine, unless the new model has all of its files."""
        standing = [path for path in self.folder.rglob("*") if path.is_file()]
        own = {self.folder / name: digest for name, digest in record["files"].items()}
        if any(own.get(path) != sha256_of(path) for path in standing):
            make_directory(self.quarantine)
            os.rename(self.folder, self.quarantine / f"{self.key}.{uuid.uuid4().hex[:12]}")  # noqa: PTH104
            for folder in (self.quarantine, self.folder.parent):
                sync_directory(folder)
            make_directory(self.folder)

    def _keep_export(self) -> None:
        shutil.rmtree(self.kept, ignore_errors=True)
        os.rename(self.export, self.kept)  # noqa: PTH104 - the whole folder, as it is
