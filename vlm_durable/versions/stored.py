"""The published partitions of one asset in an S3 store: the place of record that several machines share.

What lives here: copying what this machine published, taking over what another one did, and the fence between
them. What does not: the store (``vlm_durable.mirror``), and the steps on disk (``partition_files``). Keys
have the layout of the home's files.

The record goes first, with the publication as pending and on the condition that it is still the one that was
read: that is the fence. Then the earlier versions and the file, then the record again. Whoever was overtaken
meets a condition that no longer holds, and changes nothing more.
"""

from __future__ import annotations

import contextlib
import hashlib
from dataclasses import replace
from pathlib import Path

from vlm_durable.commands import command
from vlm_durable.files import files
from vlm_durable.files.layout import VERSION_NUMBERS, AssetFolders
from vlm_durable.mirror.bucket import NoObjectError, ObjectDamagedError, S3Folder, Stored, TakenError
from vlm_durable.versions.partition_files import (
    LOCK_SECONDS,
    FileDamagedError,
    PartitionFiles,
    PartitionVersions,
    PendingPublication,
    PublishedError,
    PublishedRecord,
    PutBackError,
    RecordDamagedError,
    put_back_sentence,
)
from vlm_durable.wording import counted


def newest_here_command() -> str:
    """The command by which a person says that no other machine has anything newer than this one."""
    return command("repair", "--newest-here")


_RECORD_BYTES = 64 << 20
_FILE_BYTES = 5 << 30
"""As much as a store takes in one put."""


class OvertakenError(PublishedError):
    """Another machine has published this partition since this one looked. Its publication stands."""


class OlderInStoreError(PutBackError):
    """The store has the newest version that is whole anywhere, and a newer one was here: a person decides."""


class StoredPartitions:
    """The partitions of an asset in a store. Raises StoreError, above all StoreAwayError, in every method."""

    def __init__(self, asset: AssetFolders, store: S3Folder) -> None:
        self._asset = asset
        self._store = store

    @property
    def name(self) -> str:
        """The asset's."""
        return self._asset.name

    def push(self, key: str) -> None:
        """Have the store hold what is published here; when it returns, it does, and its record says so.

        Raises OvertakenError, PublishedError where the store lost what it had of this partition, and what
        reading the files here raises.
        """
        self._store.prove()
        partition = PartitionFiles(self._asset, key)
        with partition.locked(LOCK_SECONDS):
            ours, _ = partition.settle()
            record = ours.published
            if record is None:
                return
            theirs, at = self._record(partition)
            if (
                theirs.published is not None
                and theirs.published.sha256 == record.sha256
                and (theirs.pending is not None or theirs.sequence >= record.sequence)
            ):
                # The store has it. What is pending there is another machine's, and is not to be taken back.
                if theirs.pending is None:
                    self._mend(partition, theirs, at)
            else:
                standing = self._standing(partition, theirs)
                if standing is None:
                    self._refuse_unproven(partition, ours, theirs)
                self._refuse_overtaken(ours, standing)
                self._publish(partition, ours, theirs, at)
            partition.note_store(str(self._store))

    def put_back(self, key: str, *, newest_here: bool = False) -> tuple[str, ...]:
        """Have the store hold, to the byte, what its record stands for; reads all of it there.

        What is missing or damaged there is put from a whole file here, the record too. newest_here: a person
        says that no other machine has a newer version than a store that lost its own. Returns what was done,
        in sentences. Raises PublishedError where this machine does not have what is missing, or may not have
        the newest version.
        """
        self._store.prove()
        partition = PartitionFiles(self._asset, key)
        with partition.locked(LOCK_SECONDS):
            theirs, at, damage = self._record_or_damage(partition)
            if self._standing(partition, theirs) is not None:
                return self._mend(partition, theirs, at)
            ours, _ = partition.settle()
            self._refuse_unproven(partition, ours, theirs, damage, newest_here=newest_here)
            self._publish(partition, ours, theirs, at)
            standing, at = self._record(partition)
            partition.note_store(str(self._store))
            record = self._store.address(self._name(partition.record_path))
            return (f"{record} was put back.", *self._mend(partition, standing, at))

    def _refuse_unproven(
        self,
        partition: PartitionFiles,
        ours: PartitionVersions,
        theirs: PartitionVersions,
        damage: str | None = None,
        *,
        newest_here: bool = False,
    ) -> None:
        """Raise PublishedError where a store that has nothing published may have had a newer version.

        damage: what is wrong with its record.
        """
        file = self._store.head(self._name(partition.published))
        begun = theirs.pending.record if theirs.pending is not None else None
        lacking = damage or (
            "the store's record only says that a publication began."
            if begun
            else "the store has no record of it."
        )
        # Which version the store had, only its file can say then.
        if ours.published is None or (file is not None and not _has(ours, file.sha256)):
            raise PublishedError(
                f"partition {partition.key}: {lacking} This machine does not have the version that was"
                f" published there. Nothing was changed. Run {command('repair')} on the machine that"
                " published"
                " it."
            )
        if newest_here or (begun is not None and _has(ours, begun.sha256)):
            return
        if begun is not None and begun.sequence > ours.sequence:
            raise PublishedError(
                f"partition {partition.key}: another machine began to publish version {begun.sequence} in"
                f" {self._store} and has not finished. This machine has version {ours.sequence}, which is"
                f" older. Nothing was changed. Run {command('repair')} on the machine that has the newer one."
                f" If that machine is gone for good, fill the store from here: {newest_here_command()}."
            )
        if file is None and (damage is not None or partition.last_store() == str(self._store)):
            raise PublishedError(
                f"partition {partition.key}: {lacking} Its file is not there either, and both were: was the"
                " store emptied? Nothing was changed. Another machine may have published a newer version than"
                f" {ours.sequence}, which is here, so a person says which machine fills the store again:"
                f" {newest_here_command()}, on the machine that worked last."
            )

    def _publish(
        self, partition: PartitionFiles, ours: PartitionVersions, theirs: PartitionVersions, at: Stored | None
    ) -> None:
        """Put what is published here in place of the store's version."""
        record = ours.published
        assert record is not None
        # What is damaged or gone here is `verify`'s to tell of: it keeps no newer version from the store.
        kept = [
            (number, version)
            for number, version in enumerate(ours.previous, start=1)
            if partition.holds(partition.slot(number), version)
        ]
        ours = replace(ours, previous=tuple(version for _, version in kept))
        intent = replace(theirs, pending=PendingPublication(record, ours.previous))
        at = self._put(self._name(partition.record_path), intent.to_bytes(self._asset.name), over=at)
        for number, version in kept:
            self._put_file(partition.slot(number), version, fence=(partition, at))
        self._put_file(partition.published, record, fence=(partition, at))
        self._put(self._name(partition.record_path), ours.to_bytes(self._asset.name), over=at)

    def _mend(
        self, partition: PartitionFiles, theirs: PartitionVersions, at: Stored | None
    ) -> tuple[str, ...]:
        """Put every object that is not, to the byte, what the store's record says; says which.

        Raises PublishedError where nobody here has the published file's bytes.
        """
        record = self._standing(partition, theirs)
        assert record is not None
        # While a publication is under way its machine moves the earlier versions.
        previous = () if theirs.pending is not None else theirs.previous
        notes: list[str] = []
        for number, version in enumerate((record, *previous)):
            path = partition.slot(number) if number else partition.published
            # Before it is judged: what another machine puts meanwhile is not replaced.
            stored = self._store.head(self._name(path))
            wrong = self._wrong(path, version, deep=True)
            if wrong is None:
                continue
            if number == 0 and theirs.pending is not None and _is(stored, theirs.pending.record):
                return tuple(notes)
            here = (partition.published, *map(partition.slot, VERSION_NUMBERS))
            source = next((file for file in here if partition.holds(file, version)), None)
            if source is not None:
                self._refuse_other_record(partition, at)
                self._put(self._name(path), _verified_bytes(source, version), over=stored)
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
        """What is wrong with a file in the store, in a sentence. deep: its bytes are read."""
        name = self._name(path)
        found = self._store.head(name)
        what = f"{self._store.address(name)} (version {version.sequence}, digest {version.sha256[:12]})"
        if found is None:
            return f"{what} is not there."
        if found.sha256 != version.sha256:
            return f"{what} is not what its record stands for."
        if deep:
            try:
                self._store.get_whole(name, version.sha256, most=_FILE_BYTES)
            except NoObjectError:
                return f"{what} is not there."
            except ObjectDamagedError as error:
                return f"{what} is damaged: {error}."
        return None

    def pull(self, key: str) -> tuple[str, ...]:
        """Take over what another machine has published; what stood here becomes the version before it.

        Returns what was done, in sentences. Raises PublishedError where the store has an older version
        that does not come from this machine's, or lacks the bytes of its record: a person decides.
        """
        partition = PartitionFiles(self._asset, key)
        theirs, _ = self._record(partition)
        record = self._standing(partition, theirs)
        if record is None:
            return ()
        with partition.locked(LOCK_SECONDS):
            return self._pull(partition, record)

    def _pull(self, partition: PartitionFiles, record: PublishedRecord) -> tuple[str, ...]:
        try:
            ours, notes = partition.settle(lambda newest: self._bytes_of(partition, newest))
        except PutBackError:
            self._refuse_older(partition, record)
            # The store's is newer than all that was ever here. What stands here goes into the quarantine.
            ours, notes = PartitionVersions(partition.key), []
        if _has(ours, record.sha256):
            if ours.sequence < record.sequence and ours.published == replace(record, sequence=ours.sequence):
                partition.renumber(ours, record.sequence)
            partition.note_store(str(self._store))
            return ()
        newest = partition.next_sequence(ours) - 1
        if newest > record.sequence:
            raise self._older(partition, ours, record, newest)
        self._take_over(partition, ours, record, notes)
        return (
            f"Partition {partition.key} was taken over from {self._store}: version {record.sequence},"
            f" {counted(record.rows, 'rows')}, digest {record.sha256[:12]}.",
            *notes,
        )

    def accept_older(self, key: str) -> tuple[str, ...]:
        """Have the store's older version count as the newest, where the newer one that was here is lost.

        A person says so. It gets a new number, so that nothing goes back. Returns what was done, in
        sentences. Raises PublishedError where there is nothing to accept.
        """
        partition = PartitionFiles(self._asset, key)
        theirs, _ = self._record(partition)
        record = self._standing(partition, theirs)
        nothing = PublishedError(f"partition {key}: there is nothing to accept. Nothing was changed.")
        if record is None:
            raise nothing
        notes: list[str] = []
        with partition.locked(LOCK_SECONDS):
            with contextlib.suppress(OlderInStoreError):
                self._pull(partition, record)
                raise nothing
            number = partition.next_sequence(PartitionVersions(key))
            self._take_over(partition, PartitionVersions(key), replace(record, sequence=number), notes)
        self.push(key)
        return (
            f"Version {record.sequence} of {key} of {self.name} in {self._store} (published"
            f" {record.published_at}) counts as the newest from now on, as version {number}.",
            *notes,
        )

    def _take_over(
        self, partition: PartitionFiles, ours: PartitionVersions, record: PublishedRecord, notes: list[str]
    ) -> None:
        """Publish the store's version here; what stood here becomes the version before it."""
        content = self._content(partition, record)
        temporary = files.write_temporary(partition.published, content, partition.staging)
        try:
            partition.put_in_place(temporary, record, ours, notes)
        finally:
            temporary.unlink(missing_ok=True)
        partition.note_store(str(self._store))

    def _older(
        self, partition: PartitionFiles, ours: PartitionVersions, record: PublishedRecord, newest: int
    ) -> PublishedError:
        """The error where the store has an older version than one that was durable here."""
        if ours.published is None or partition.whole_file(ours.published) is None:
            return OlderInStoreError(
                f"partition {partition.key}: version {newest} was published here, and is in none of its"
                f" files; {self._store} has version {record.sequence} (published {record.published_at})."
                " Nothing was changed. Materialize it on a machine that has the newer one, which puts that"
                " into the store, or accept what the store has:"
                f" {command('repair', '--accept-version', partition.key)}."
            )
        return PublishedError(
            f"partition {partition.key}: version {ours.sequence} is published here, and {self._store} has"
            f" version {record.sequence}, which is none of those kept here. Nothing was changed. To put this"
            f" machine's version there, remove {self._store.address(self._name(partition.record_path))} and"
            f" {self._store.address(self._name(partition.published))}, then {newest_here_command()}. To"
            f" take over what"
            f" the store has, move {partition.published} and all of {partition.record_path.with_suffix('')}.*"
            f" away, then {command('repair', '--accept-version', partition.key)}."
        )

    def _refuse_older(self, partition: PartitionFiles, record: PublishedRecord) -> None:
        """Raise PutBackError where a partition was put back here, and a newer one than the store's was here.

        Of what stands here and what the store has the newer one is offered.
        """
        newest, older = partition.put_back(partition.whole_records())
        assert newest is not None and older is not None and older.published is not None
        standing = older.published
        if newest.sequence <= record.sequence:
            return
        if standing.sequence >= record.sequence:
            raise PutBackError(put_back_sentence(partition, newest, standing))
        raise OlderInStoreError(
            f"Partition {partition.key} of {self.name} was put back: version {standing.sequence} (published"
            f" {standing.published_at}) stands here, and version {newest.sequence} (published"
            f" {newest.published_at}, digest {newest.sha256[:12]}), which was here, is neither in its files"
            f" nor in {self._store}. The newest one that is whole is version {record.sequence} (published"
            f" {record.published_at}) in {self._store}. Nothing was changed. Put the file of version"
            f" {newest.sequence} back from a backup as {partition.published}, or accept what the store has:"
            f" {command('repair', '--accept-version', partition.key)}."
        )

    def trouble(self, key: str, *, deep: bool = False) -> str | None:
        """What is wrong with a partition in the store, in a sentence; None where nothing is.

        deep: the published file is read to the byte; else its checksum is asked for.
        """
        partition = PartitionFiles(self._asset, key)
        while True:
            theirs, at, damage = self._record_or_damage(partition)
            record = self._standing(partition, theirs)
            where = self._store.address(self._name(partition.record_path))
            wrong: str | None
            if record is None:
                wrong = damage or f"{where} is not there: no record."
            else:
                wrong = self._wrong(partition.published, record, deep=deep)
            # Another machine may have published in between: then it is asked again.
            if wrong is None or self._store.head(self._name(partition.record_path)) == at:
                return wrong and (
                    f"{wrong} Did a lifecycle rule or a person change it?"
                    f" {command('repair')} puts it back from a machine that has it."
                )

    def content_of(self, record: PublishedRecord) -> bytes | None:
        """The bytes of a version's file, where the store has it: for ``PublishedPartitions.restore``."""
        return self._bytes_of(PartitionFiles(self._asset, record.key), record)

    def has(self, record: PublishedRecord) -> bool:
        """Whether the store says that it has a version's file."""
        partition = PartitionFiles(self._asset, record.key)
        heads = (self._store.head(self._name(path)) for path in self._places(partition))
        return any(head is not None and head.sha256 == record.sha256 for head in heads)

    def published(self, key: str) -> PublishedRecord | None:
        """What the store says is published."""
        partition = PartitionFiles(self._asset, key)
        theirs, _ = self._record(partition)
        return self._standing(partition, theirs)

    def forget_earlier(self, key: str) -> None:
        """Remove the earlier versions of a partition from the store, after they are gone from the home.

        Nothing where the store has published something else than this machine. Raises OvertakenError.
        """
        partition = PartitionFiles(self._asset, key)
        with partition.locked(LOCK_SECONDS):
            ours, _ = partition.settle()
            theirs, at = self._record(partition)
            if ours.published is None or theirs.published != ours.published or theirs.pending is not None:
                return
            if theirs.previous:
                self._put(
                    self._name(partition.record_path),
                    replace(theirs, previous=()).to_bytes(self._asset.name),
                    over=at,
                )
            for number in VERSION_NUMBERS[1:]:
                self._store.delete(self._name(partition.slot(number)))

    def _record(self, partition: PartitionFiles) -> tuple[PartitionVersions, Stored | None]:
        name = self._name(partition.record_path)
        at = self._store.head(name)
        if at is None:
            return PartitionVersions(partition.key), None
        content = self._store.get(name, most=_RECORD_BYTES)
        if hashlib.sha256(content).hexdigest() != at.sha256:
            raise OvertakenError(
                f"partition {partition.key}: its record in {self._store} was replaced while it was read."
                " Start again."
            )
        try:
            return self._parsed(content, partition), at
        except RecordDamagedError as error:
            raise RecordDamagedError(
                f"{self._store.address(name)}: {error}. Nothing was changed. {command('repair')} puts it back"
                " from a machine that has the partition."
            ) from error

    def _record_or_damage(
        self, partition: PartitionFiles
    ) -> tuple[PartitionVersions, Stored | None, str | None]:
        """As ``_record``; one that is damaged counts as none, and a sentence says what is wrong with it."""
        name = self._name(partition.record_path)
        at = self._store.head(name)
        if at is None:
            return PartitionVersions(partition.key), None, None
        try:
            content = self._store.get_whole(name, at.sha256 or "", most=_RECORD_BYTES)
            return self._parsed(content, partition), at, None
        except (ObjectDamagedError, NoObjectError, RecordDamagedError) as error:
            return PartitionVersions(partition.key), at, f"The record is damaged: {error}."

    def _parsed(self, content: bytes, partition: PartitionFiles) -> PartitionVersions:
        return PartitionVersions.from_bytes(
            content, asset=self._asset.name, key=partition.key, origin=self._asset.origin
        )

    def _standing(self, partition: PartitionFiles, theirs: PartitionVersions) -> PublishedRecord | None:
        """What the store has published: a pending version counts once its file is there."""
        if theirs.pending is not None:
            found = self._store.head(self._name(partition.published))
            if found is not None and found.sha256 == theirs.pending.record.sha256:
                return theirs.pending.record
        return theirs.published

    @staticmethod
    def _places(partition: PartitionFiles) -> list[Path]:
        return [partition.published, *map(partition.slot, VERSION_NUMBERS[1:])]

    def _bytes_of(self, partition: PartitionFiles, record: PublishedRecord) -> bytes | None:
        """The file of a version, where the store has it."""
        for name in map(self._name, self._places(partition)):
            found = self._store.head(name)
            if found is not None and found.sha256 == record.sha256:
                content = self._store.get(name, most=_FILE_BYTES)
                if hashlib.sha256(content).hexdigest() == record.sha256:
                    return content
        return None

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

    def _refuse_overtaken(self, ours: PartitionVersions, theirs: PublishedRecord | None) -> None:
        if theirs is not None and not _has(ours, theirs.sha256):
            raise OvertakenError(
                f"partition {ours.key} is not published in {self._store}: another machine has published"
                f" version {theirs.sequence} there, which this machine did not start from. Nothing there was"
                " changed. Materialize the partition again: it takes that version over."
            )

    def _put_file(
        self,
        path: Path,
        record: PublishedRecord,
        *,
        fence: tuple[PartitionFiles, Stored | None],
    ) -> None:
        """Have the store hold a file of this partition."""
        partition, at = fence
        name = self._name(path)
        content: bytes | None = None
        while True:
            found = self._store.head(name)
            if _is(found, record):
                return
            content = content or _verified_bytes(path, record)
            # Another machine may still have had a put under way for an older record: it cannot have a second.
            self._refuse_other_record(partition, at)
            try:
                self._store.put(name, content, over=found)
            except TakenError:
                continue

    def _refuse_other_record(self, partition: PartitionFiles, at: Stored | None) -> None:
        if self._store.head(self._name(partition.record_path)) != at:
            raise OvertakenError(
                f"partition {partition.key}: another machine publishes it in {self._store}, and has begun"
                " later. Nothing there was changed. Materialize the partition again."
            )

    def _put(self, name: str, content: bytes, *, over: Stored | None) -> Stored:
        try:
            return self._store.put(name, content, over=over)
        except TakenError as error:
            raise OvertakenError(
                f"{self._store.address(name)} was changed by another machine, so nothing was published there."
                " Materialize the partition again: it takes over what that one published."
            ) from error

    def _name(self, path: Path) -> str:
        return str(path.relative_to(self._asset.home.root))


def _has(ours: PartitionVersions, sha256: str | None) -> bool:
    """Whether a file is that of what is published here, or was made over."""
    return any(one is not None and one.sha256 == sha256 for one in (ours.published, *ours.previous))


def _is(stored: Stored | None, record: PublishedRecord) -> bool:
    """Whether an object is, by its checksum, the file of a record."""
    return stored is not None and stored.sha256 == record.sha256


def _verified_bytes(path: Path, record: PublishedRecord) -> bytes:
    content = path.read_bytes()
    if hashlib.sha256(content).hexdigest() != record.sha256:
        raise FileDamagedError(f"{path} is not what its record says: it was not copied.")
    return content
