"""The published partitions of one asset in an S3 store: the place of record that several machines share.

The order of the puts and the fence between machines are in ``fenced_object``. Keys have the layout of the
home's files.
"""

from __future__ import annotations

import contextlib
from dataclasses import replace
from pathlib import Path

from vlm_durable.commands import command
from vlm_durable.files import files
from vlm_durable.files.layout import VERSION_NUMBERS, AssetFolders
from vlm_durable.mirror.bucket import NoObjectError, ObjectDamagedError
from vlm_durable.mirror.mirror import Mirror
from vlm_durable.versions.fenced_object import (
    FILE_BYTES,
    FencedObject,
    HomeFile,
    OvertakenError,
    is_file,
    verified_bytes,
)
from vlm_durable.versions.partition_files import (
    LOCK_SECONDS,
    PartitionFiles,
    PartitionVersions,
    PendingPublication,
    PublishedRecord,
    PutBackError,
    put_back_finding,
)
from vlm_durable.versions.version_mark import UNKNOWN_STORE
from vlm_durable.versions.versioned_object import PublishedError, RecordDamagedError
from vlm_durable.wording import counted


def newest_here_command() -> str:
    """The command by which a person confirms that no other machine has anything newer than this machine."""
    return command("repair", "--newest-here")


class OlderInStoreError(PutBackError):
    """The store has the newest whole version, and a newer version was here once: a person decides."""


class StoredPartitions:
    """The partitions of an asset in a store. Raises StoreError, above all StoreAwayError, in every method."""

    def __init__(self, asset: AssetFolders, store: Mirror) -> None:
        self._asset = asset
        self._store = store

    @property
    def name(self) -> str:
        """The asset's name."""
        return self._asset.name

    def push(self, key: str) -> None:
        """Put the version that is published here into the store; file and record are there on return.

        Raises OvertakenError, PublishedError where the store lost its files of this partition, and the errors
        of reading the files here.
        """
        if not self._store.keeps_copies:
            return
        self._store.prove()
        partition = PartitionFiles(self._asset, key)
        with partition.locked(LOCK_SECONDS):
            local, _ = partition.settle()
            record = local.published
            if record is None:
                return
            stored, fenced = self._read_record(partition)
            if (
                stored.published is not None
                and stored.published.sha256 == record.sha256
                and (stored.pending is not None or stored.sequence >= record.sequence)
            ):
                # The store has it. A pending version there is another machine's, and must not be taken back.
                if stored.pending is None:
                    self._mend(partition, stored, fenced)
            else:
                published = self._published_in(partition, stored)
                if published is None:
                    self._refuse_unproven(partition, local, stored)
                self._refuse_overtaken(local, published)
                self._publish(partition, local, stored, fenced)
            partition.mark.note_store(str(self._store))

    def put_back(self, key: str, *, newest_here: bool = False) -> tuple[str, ...]:
        """Compare every byte of a partition in the store with its record, and put damaged files back.

        Missing or damaged objects are put from a whole file here, the record too. newest_here: a person
        confirms that no other machine has a newer version, for a store that lost its own. Returns sentences
        about what was done. Raises PublishedError where this machine lacks a missing file, or may not have
        the newest version.
        """
        self._store.prove()
        partition = PartitionFiles(self._asset, key)
        with partition.locked(LOCK_SECONDS):
            stored, fenced, damage = self._read_record_or_damage(partition)
            if self._published_in(partition, stored) is not None:
                return self._mend(partition, stored, fenced)
            local, _ = partition.settle()
            self._refuse_unproven(partition, local, stored, damage, newest_here=newest_here)
            self._publish(partition, local, stored, fenced)
            restored, fenced = self._read_record(partition)
            partition.mark.note_store(str(self._store))
            return (f"{fenced.address} was put back.", *self._mend(partition, restored, fenced))

    def _refuse_unproven(
        self,
        partition: PartitionFiles,
        local: PartitionVersions,
        stored: PartitionVersions,
        damage: str | None = None,
        *,
        newest_here: bool = False,
    ) -> None:
        """Raise PublishedError where a store without a published version may have had a newer one.

        damage: what is wrong with the store's record.
        """
        file = self._store.head(self._name(partition.published))
        pending = stored.pending.record if stored.pending is not None else None
        lacking = damage or (
            "the store's record only says that a publication began."
            if pending
            else "the store has no record of it."
        )
        # Then only the store's file can tell which version the store had.
        if local.published is None or (file is not None and not _has(local, file.sha256)):
            raise PublishedError(
                f"partition {partition.key}: {lacking} This machine does not have the version that was"
                f" published there. Nothing was changed. Run {command('repair')} on the machine that"
                " published"
                " it."
            )
        if newest_here or (pending is not None and _has(local, pending.sha256)):
            return
        if pending is not None and pending.sequence > local.sequence:
            raise PublishedError(
                f"partition {partition.key}: another machine began to publish version {pending.sequence} in"
                f" {self._store} and has not finished. This machine has version {local.sequence}, which is"
                f" older. Nothing was changed. Run {command('repair')} on the machine that has the newer one."
                f" If that machine is gone for good, fill the store from here: {newest_here_command()}."
            )
        last_store = partition.mark.last_store()
        if file is None and (damage is not None or last_store in (str(self._store), UNKNOWN_STORE)):
            both_were = "may have been" if last_store == UNKNOWN_STORE else "were"
            raise PublishedError(
                f"partition {partition.key}: {lacking} Its file is not there either, and both {both_were}:"
                " was the store emptied? Nothing was changed. Another machine may have published a newer"
                f" version than {local.sequence}, which is here, so a person says which machine fills the"
                " store again:"
                f" {newest_here_command()}, on the machine that worked last."
            )

    def _publish(
        self,
        partition: PartitionFiles,
        local: PartitionVersions,
        stored: PartitionVersions,
        fenced: FencedObject,
    ) -> None:
        """Replace the store's version by the version that is published here."""
        record = local.published
        assert record is not None
        # `verify` reports damaged or missing backups: they must not keep a newer version from the store.
        kept = [
            (number, version)
            for number, version in enumerate(local.previous, start=1)
            if partition.holds(partition.slot(number), version)
        ]
        local = replace(local, previous=tuple(version for _, version in kept))
        intent = replace(stored, pending=PendingPublication(record, local.previous))
        places = [(partition.slot(number), version) for number, version in kept]
        fenced.publish(
            intent.to_bytes(self._asset.name),
            [
                HomeFile(self._name(path), path, version.sha256)
                for path, version in (*places, (partition.published, record))
            ],
            local.to_bytes(self._asset.name),
        )

    def _mend(
        self, partition: PartitionFiles, stored: PartitionVersions, fenced: FencedObject
    ) -> tuple[str, ...]:
        """Put back every object that is not, to the byte, what the store's record says. Returns sentences.

        Raises PublishedError where this machine does not have the published file's bytes.
        """
        record = self._published_in(partition, stored)
        assert record is not None
        # While a publication is under way, the publishing machine moves the earlier versions.
        previous = () if stored.pending is not None else stored.previous
        notes: list[str] = []
        for number, version in enumerate((record, *previous)):
            path = partition.slot(number) if number else partition.published
            # The head is read before the file is judged, so no later put of another machine is replaced.
            file_object = self._store.head(self._name(path))
            wrong = self._wrong(path, version, deep=True)
            if wrong is None:
                continue
            if number == 0 and stored.pending and is_file(file_object, stored.pending.record.sha256):
                return tuple(notes)
            local_paths = (partition.published, *map(partition.slot, VERSION_NUMBERS))
            source = next((file for file in local_paths if partition.holds(file, version)), None)
            if source is not None:
                fenced.refuse_overtaken()
                fenced.put(self._name(path), verified_bytes(source, version.sha256), over=file_object)
                notes.append(f"{wrong} It was put back from {source}.")
            elif number == 0:
                raise PublishedError(
                    f"partition {partition.key}: {wrong} This machine has no whole file of version"
                    f" {version.sequence} (digest {version.sha256[:12]}). Nothing was changed. Run"
                    f" {command('repair')} on a machine that published it, or put it back from a version of"
                    " the bucket."
                )
        return tuple(notes)

    def _wrong(self, path: Path, version: PublishedRecord, *, deep: bool) -> str | None:
        """Say what is wrong with a file in the store; None where nothing is. deep: its bytes are read."""
        name = self._name(path)
        stored_object = self._store.head(name)
        subject = f"{self._store.address(name)} (version {version.sequence}, digest {version.sha256[:12]})"
        if stored_object is None:
            return f"{subject} is not there."
        if stored_object.sha256 != version.sha256:
            return f"{subject} is not what its record stands for."
        if deep:
            try:
                self._store.get_whole(name, version.sha256, most=FILE_BYTES)
            except NoObjectError:
                return f"{subject} is not there."
            except ObjectDamagedError as error:
                return f"{subject} is damaged: {error}."
        return None

    def pull(self, key: str) -> tuple[str, ...]:
        """Take over the version that another machine published; the file here becomes the version before it.

        Returns sentences about what was done. Raises PublishedError where the store has an older version
        that is not one of this machine's, or lacks the bytes of its record: a person decides.
        """
        partition = PartitionFiles(self._asset, key)
        stored, _ = self._read_record(partition)
        record = self._published_in(partition, stored)
        if record is None:
            return ()
        with partition.locked(LOCK_SECONDS):
            return self._pull(partition, record)

    def _pull(self, partition: PartitionFiles, record: PublishedRecord) -> tuple[str, ...]:
        try:
            local, notes = partition.settle(lambda newest: self._bytes_of(partition, newest))
        except PutBackError:
            self._refuse_older(partition, record)
            # The store's version is newer than all that were ever here. The file here is quarantined.
            local, notes = PartitionVersions(partition.key), []
        if _has(local, record.sha256):
            if local.sequence < record.sequence and local.published == replace(
                record, sequence=local.sequence
            ):
                partition.renumber(local, record.sequence)
            partition.mark.note_store(str(self._store))
            return ()
        newest = partition.mark.next_sequence(local.sequence) - 1
        if newest > record.sequence:
            raise self._older(partition, local, record, newest)
        self._take_over(partition, local, record, notes)
        return (
            f"Partition {partition.key} was taken over from {self._store}: version {record.sequence},"
            f" {counted(record.rows, 'rows')}, digest {record.sha256[:12]}.",
            *notes,
        )

    def accept_older(self, key: str) -> tuple[str, ...]:
        """Let the store's older version count as the newest, where the newer one that was here is lost.

        For a person who decides so. The version gets a new number, so that no number goes back. Returns
        sentences about what was done. Raises PublishedError where there is nothing to accept.
        """
        partition = PartitionFiles(self._asset, key)
        stored, _ = self._read_record(partition)
        record = self._published_in(partition, stored)
        nothing = f"partition {key}: there is nothing to accept."
        if record is None:
            raise PublishedError(f"{nothing} Nothing was changed.")
        notes: list[str] = []
        with partition.locked(LOCK_SECONDS):
            with contextlib.suppress(OlderInStoreError):
                pulled = self._pull(partition, record)
                raise PublishedError(" ".join((nothing, *(pulled or ("Nothing was changed.",)))))
            number = partition.mark.next_sequence()
            self._take_over(partition, PartitionVersions(key), replace(record, sequence=number), notes)
        self.push(key)
        return (
            f"Version {record.sequence} of {key} of {self.name} in {self._store} (published"
            f" {record.published_at}) counts as the newest from now on, as version {number}.",
            *notes,
        )

    def _take_over(
        self, partition: PartitionFiles, local: PartitionVersions, record: PublishedRecord, notes: list[str]
    ) -> None:
        """Publish the store's version here; the file that was here becomes the version before it."""
        content = self._content(partition, record)
        temporary = files.write_temporary(partition.published, content, partition.staging)
        try:
            partition.put_in_place(temporary, record, local, notes)
        finally:
            temporary.unlink(missing_ok=True)
        partition.mark.note_store(str(self._store))

    def _older(
        self, partition: PartitionFiles, local: PartitionVersions, record: PublishedRecord, newest: int
    ) -> PublishedError:
        """The error for a store that has an older version than one that was durable here."""
        if local.published is None or partition.whole_file(local.published) is None:
            return OlderInStoreError(
                f"partition {partition.key}: version {newest} was published here, and is in none of its"
                f" files; {self._store} has version {record.sequence} (published {record.published_at})."
                " Nothing was changed. Materialize it on a machine that has the newer one, which puts that"
                " into the store, or accept what the store has:"
                f" {command('repair', '--accept-version', partition.key)}."
            )
        return PublishedError(
            f"partition {partition.key}: version {local.sequence} is published here, and {self._store} has"
            f" version {record.sequence}, which is none of those kept here. Nothing was changed. To put this"
            f" machine's version there, remove {self._store.address(self._name(partition.record_path))} and"
            f" {self._store.address(self._name(partition.published))}, then {newest_here_command()}. To"
            f" take over what"
            f" the store has, move {partition.published} and all of {partition.record_path.with_suffix('')}.*"
            f" away, then {command('repair', '--accept-version', partition.key)}."
        )

    def _refuse_older(self, partition: PartitionFiles, record: PublishedRecord) -> None:
        """Raise PutBackError where a partition was put back, and a version newer than the store's is lost.

        The message offers the newer one of the store's version and the version here.
        """
        newest, older = partition.put_back(partition.whole_records())
        assert newest is not None and older is not None and older.published is not None
        local = older.published
        if newest.sequence <= record.sequence:
            return
        if local.sequence >= record.sequence:
            raise PutBackError(put_back_finding(partition, newest, local).text)
        raise OlderInStoreError(
            f"Partition {partition.key} of {self.name} was put back: version {local.sequence} (published"
            f" {local.published_at}) stands here, and version {newest.sequence} (published"
            f" {newest.published_at}, digest {newest.sha256[:12]}), which was here, is neither in its files"
            f" nor in {self._store}. The newest one that is whole is version {record.sequence} (published"
            f" {record.published_at}) in {self._store}. Nothing was changed. Put the file of version"
            f" {newest.sequence} back from a backup as {partition.published}, or accept what the store has:"
            f" {command('repair', '--accept-version', partition.key)}."
        )

    def trouble(self, key: str, *, deep: bool = False) -> str | None:
        """Say what is wrong with a partition in the store; None where nothing is.

        deep: every byte of the published file is read; else the store is asked for its checksum.
        """
        partition = PartitionFiles(self._asset, key)
        while True:
            stored, fenced, damage = self._read_record_or_damage(partition)
            record = self._published_in(partition, stored)
            wrong: str | None
            if record is None:
                wrong = damage or f"{fenced.address} is not there: no record."
            else:
                wrong = self._wrong(partition.published, record, deep=deep)
            # Another machine may have published in between: then everything is read again.
            if wrong is None or not fenced.is_overtaken:
                return wrong and f"{wrong} Did a lifecycle rule or a person change it?"

    def content_of(self, record: PublishedRecord) -> bytes | None:
        """A version's file from the store, None where it lacks it: for ``PublishedPartitions.restore``."""
        return self._bytes_of(PartitionFiles(self._asset, record.key), record)

    def has(self, record: PublishedRecord) -> bool:
        """Whether the store has a version's file, by its checksum."""
        partition = PartitionFiles(self._asset, record.key)
        heads = (self._store.head(self._name(path)) for path in self._places(partition))
        return any(is_file(head, record.sha256) for head in heads)

    def published(self, key: str) -> PublishedRecord | None:
        """The record of the version that the store has published; None where it has none."""
        partition = PartitionFiles(self._asset, key)
        stored, _ = self._read_record(partition)
        return self._published_in(partition, stored)

    def forget_earlier(self, key: str) -> tuple[str, ...]:
        """Remove the earlier versions of a partition from the store, after they are gone from the home.

        Does nothing where the store has another published version than this machine. Returns sentences about
        what was done. Raises OvertakenError.
        """
        if not self._store.keeps_copies:
            return ()
        partition = PartitionFiles(self._asset, key)
        with partition.locked(LOCK_SECONDS):
            local, _ = partition.settle()
            stored, fenced = self._read_record(partition)
            if local.published is None or stored.published != local.published or stored.pending is not None:
                return ()
            if stored.previous:
                fenced.put_record(replace(stored, previous=()).to_bytes(self._asset.name))
            for number in VERSION_NUMBERS[1:]:
                self._store.delete(self._name(partition.slot(number)))
        return (f"Removed the earlier versions of {key} of {self.name} from {self._store} too.",)

    def _read_record(self, partition: PartitionFiles) -> tuple[PartitionVersions, FencedObject]:
        fenced = FencedObject(self._store, self._name(partition.record_path))
        content = fenced.read()
        if content is None:
            return PartitionVersions(partition.key), fenced
        try:
            return partition.parsed(content), fenced
        except RecordDamagedError as error:
            raise RecordDamagedError(
                f"{fenced.address}: {error}. Nothing was changed. {command('repair')} puts it back"
                " from a machine that has the partition."
            ) from error

    def _read_record_or_damage(
        self, partition: PartitionFiles
    ) -> tuple[PartitionVersions, FencedObject, str | None]:
        """As ``_read_record``; a damaged record counts as none, and a sentence says what is wrong with it."""
        fenced = FencedObject(self._store, self._name(partition.record_path))
        try:
            content = fenced.read(whole=True)
            stored = PartitionVersions(partition.key) if content is None else partition.parsed(content)
            return stored, fenced, None
        except (ObjectDamagedError, NoObjectError, RecordDamagedError) as error:
            return PartitionVersions(partition.key), fenced, f"The record is damaged: {error}."

    def _published_in(self, partition: PartitionFiles, stored: PartitionVersions) -> PublishedRecord | None:
        """The version that the store has published: a pending version counts once its file is there."""
        if stored.pending is not None:
            file_object = self._store.head(self._name(partition.published))
            if is_file(file_object, stored.pending.record.sha256):
                return stored.pending.record
        return stored.published

    @staticmethod
    def _places(partition: PartitionFiles) -> list[Path]:
        return [partition.published, *map(partition.slot, VERSION_NUMBERS[1:])]

    def _bytes_of(self, partition: PartitionFiles, record: PublishedRecord) -> bytes | None:
        """The file of a version, where the store has it."""
        fenced = FencedObject(self._store, self._name(partition.record_path))
        return fenced.fetch(map(self._name, self._places(partition)), record.sha256)

    def _content(self, partition: PartitionFiles, record: PublishedRecord) -> bytes:
        content = self._bytes_of(partition, record)
        if content is not None:
            return content
        raise PublishedError(
            f"The record of partition {record.key} in {self._store} stands for version {record.sequence}"
            f" (digest {record.sha256[:12]}), and no object there has these bytes. Nothing was changed. Did a"
            " lifecycle rule or a person remove it? A machine that published the partition still has it, and"
            " puts it back when the partition is materialized there; else put it back from a version of the"
            " bucket, or remove the record there and materialize with `recompute: true`."
        )

    def _refuse_overtaken(self, local: PartitionVersions, stored_record: PublishedRecord | None) -> None:
        if stored_record is not None and not _has(local, stored_record.sha256):
            raise OvertakenError(
                f"partition {local.key} is not published in {self._store}: another machine has published"
                f" version {stored_record.sequence} there, which this machine did not start from. Nothing"
                " there was changed. Materialize the partition again: it takes that version over."
            )

    def _name(self, path: Path) -> str:
        return str(path.relative_to(self._asset.home.root))


def _has(versions: PartitionVersions, sha256: str | None) -> bool:
    """Whether a digest is that of the published version, or of one of the versions before it."""
    return any(
        version is not None and version.sha256 == sha256
        for version in (versions.published, *versions.previous)
    )
