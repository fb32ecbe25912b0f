"""One partition of an asset: its expected rows, its journal, and the finished rows that it adopts.

Here are the name of the generation that a materialization works at, opening its journal, adopting rows that
other generations made from the same inputs, choosing the failed rows that are tried again, and the note that
checks refused finished rows: without it they only wait for publication. The order of a materialization is in
``materialize.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import chain
from typing import Self

import pyarrow as pa

from vlm_assets.assets.fingerprint import Fingerprint
from vlm_assets.config.settings import Settings
from vlm_durable.commands import command
from vlm_durable.files.files import sync_directory
from vlm_durable.files.layout import PartitionPaths
from vlm_durable.files.sealed_json import BrokenSealError, read_sealed, write_sealed
from vlm_durable.journal.commits import CommitPace
from vlm_durable.journal.high_water_mark import read_mark
from vlm_durable.journal.journal import Journal, clear_retired
from vlm_durable.journal.journal_errors import JournalLossError, SegmentUnreadableError
from vlm_durable.journal.segments import JournalIdentity, segment_paths, verified_rows, with_later_columns
from vlm_durable.journal.setting_aside import is_set_aside
from vlm_durable.versions.partition_files import NotPublishedError, PublishedRecord
from vlm_durable.versions.partition_rows import PartitionRows
from vlm_durable.versions.published import PublishedPartitions
from vlm_durable.versions.versioned_object import PublishedError
from vlm_durable.wording import counted
from vlm_engine.ladder import TRANSIENT_KINDS

OK, FAILED, NOT_ASKED = "ok", "failed", "not_asked"
"""The status of a row. NOT_ASKED: the question set's ``where`` leaves the property out."""

MOST_TRIES = 3
"""How often a property is tried that fails for a reason that may pass."""

COMMIT_ROWS = 2000
"""Finished rows that are committed at once, at most: a bound of memory. Time decides before, save with a very
fast model."""

INPUTS = "inputs_digest"
"""The column with the digest of all that decides a row: its property's inputs, the model, the settings."""

CONFIDENCE = "confidence"
"""The column with the confidence of each field of a description; files of earlier versions lack it. It is no
part of the fingerprint."""

_AFTER = "-after-"


@dataclass(frozen=True)
class Partition:
    """A partition of an asset in the home of these settings: one row for each expected id, in their order."""

    settings: Settings
    asset: str
    key: str
    expected_ids: tuple[str, ...]
    fingerprint: Fingerprint

    @cached_property
    def paths(self) -> PartitionPaths:
        """The paths of its files."""
        return self.settings.layout.asset(self.asset).partition(self.key)

    def open_journal(self, generation: str, schema: pa.Schema, *, accept_loss: str | None = None) -> Journal:
        """Open a generation's journal: recover and verify it. Raises JournalError.

        accept_loss: the reason of a person who gives up rows that cannot be restored.
        """
        return Journal.open(
            self.paths.journal(generation),
            JournalIdentity(
                self.key, generation, dict(self.fingerprint.parts), schema, frozenset(self.expected_ids)
            ),
            high_water_mark=self.paths.high_water_mark(generation),
            quarantine=self.paths.quarantine,
            accept_loss=accept_loss,
            pace=CommitPace(self.settings.commit_seconds, COMMIT_ROWS),
        )

    def finish_retirement(self, generation: str, rows_schema: Callable[[], pa.Schema]) -> str | None:
        """Retire the journal of a published file where a crash came between publication and retirement.

        Returns a sentence about a journal that stays. rows_schema: returns the columns of the journal's rows,
        which differ from the file's: parquet names the elements of a list otherwise. Raises JournalError.
        """
        directory, mark = self.paths.journal(generation), self.paths.high_water_mark(generation)
        if not directory.is_dir() or clear_retired(directory, mark):
            return None
        last = read_mark(mark, key=self.key, generation=generation).mark
        if last is not None and last.retired:
            # It was put back from a copy, or its removal was cut short: opening it would report lost rows.
            return f"{directory} is older than what was published: {command('prune')} removes it."
        try:
            with self.open_journal(generation, rows_schema()) as journal:
                if journal.missing_ids:
                    # Another machine published the partition while this one was half way: no row is lost.
                    return f"{directory} is left behind: others published the partition."
                journal.retire()
        except JournalLossError:
            # What it lost is no loss: the published file has all rows.
            return f"{directory} is left behind: files of it are gone, and the partition is published."
        return None


def generation_of(partition: Partition, record: PublishedRecord | None, asked_by: str | None) -> str:
    """The name of the generation under these settings.

    record: of what is published. asked_by: the root run in which a person asks for new rows. It has a
    generation of its own, so that it resumes after a crash and is not repeated once it is finished.
    """
    generation, paths = partition.fingerprint.generation(asked_by), partition.paths
    if record is not None and (asked_by or record.fingerprint != partition.fingerprint.digest):
        published = str(record.metadata.get("generation"))
        if published == generation or published.startswith(f"{generation}{_AFTER}"):
            return published
        # The settings are back to earlier ones whose output was replaced since, or an old run with an
        # option is re-executed. That generation is closed, so this one is new. It is named after the version
        # that it replaces, so that it resumes after a crash.
        mark = read_mark(paths.high_water_mark(generation), key=partition.key, generation=generation).mark
        if mark is not None and mark.retired:
            generation = f"{generation}{_AFTER}{record.sequence}"
    while is_set_aside(paths, generation):
        generation = f"{generation}{_AFTER}{record.sequence if record is not None else 0}"
    return generation


def rows_to_try_again(journal: Journal) -> frozenset[str]:
    """Ids of committed rows that failed for a reason that may pass, and have a try left."""
    tries = journal.failed_tries
    if all(number >= MOST_TRIES for number in tries.values()):
        return frozenset()
    return frozenset(
        row["property_id"]
        for batch in journal.read_ordered()
        for row in batch.select(["property_id", "error_kind"]).to_pylist()
        if 0 < tries.get(row["property_id"], 0) < MOST_TRIES and row["error_kind"] in TRANSIENT_KINDS
    )


def adopt_rows(
    journal: Journal,
    partition: Partition,
    inputs: Mapping[str, str],
    published: PublishedPartitions,
    *,
    failed_too: bool,
    in_doubt: Callable[[pa.Table], Sequence[bool]] = lambda rows: [False] * rows.num_rows,
) -> tuple[int, list[str]]:
    """Adopt the ok rows made from the same inputs: of other generations, and of published versions.

    The two versions before the published one are read last: after a return to earlier settings their rows
    are not computed again. inputs: the digest of all that decides a row, by id. failed_too: adopt the failed
    rows of published versions as well. in_doubt: which rows of a table may be wrong; they are not adopted.
    Returns how many were adopted, and sentences about rows in doubt and files that cannot be read, whose rows
    are computed again. Safe to repeat after an interruption: only missing rows are adopted.
    """
    schema, notes = journal.schema, list[str]()
    adopted = 0
    statuses = {OK, FAILED} if failed_too else {OK}
    donors = chain(
        ((rows, {OK}) for rows in _other_journals(partition, journal.generation, notes)),
        ((rows, statuses) for rows in _published_rows(published, partition.key, notes)),
    )
    while (missing := journal.missing_ids) and (donor := next(donors, None)) is not None:
        table, usable = donor
        rows = zip(*(table[name].to_pylist() for name in ("property_id", "status", INPUTS)), strict=True)
        fits = [
            property_id in missing and status in usable and inputs[property_id] == made_of
            for property_id, status, made_of in rows
        ]
        doubts = [fit and doubt for fit, doubt in zip(fits, in_doubt(table), strict=True)]
        if any(doubts):
            notes.append(
                f"{counted(sum(doubts), 'finished rows are', 'finished row is')} not adopted: a device that"
                " gave wrong answers made them."
            )
            fits = [fit and not doubt for fit, doubt in zip(fits, doubts, strict=True)]
        if any(fits):
            taken = with_later_columns(table.filter(pa.array(fits)), schema)
            journal.submit(_with_fingerprint(taken, partition.fingerprint.digest))
            journal.flush()
            adopted += taken.num_rows
    return adopted, list(dict.fromkeys(notes))


def _other_journals(partition: Partition, generation: str, notes: list[str]) -> Iterator[pa.Table]:
    for folder in sorted(partition.paths.journals.glob("*")):
        if folder.name == generation or is_set_aside(partition.paths, folder.name):
            continue
        for path in segment_paths(folder):
            try:
                yield verified_rows(path)
            except SegmentUnreadableError as error:
                notes.append(f"{error}. Its rows are not adopted.")


def _published_rows(published: PublishedPartitions, key: str, notes: list[str]) -> Iterator[pa.Table]:
    """The rows of what is published, then those of the versions before it, newest first."""
    try:
        yield from _tables(published.read(key), notes)
    except NotPublishedError:
        return
    except (PublishedError, OSError) as error:
        notes.append(f"{error} Its rows are not adopted.")
    try:
        for version in published.read_earlier(key, notes):
            yield from _tables(version, notes)
    except (PublishedError, OSError) as error:
        notes.append(f"{error} The rows of earlier versions are not adopted.")


def _tables(rows: PartitionRows, notes: list[str]) -> Iterator[pa.Table]:
    try:
        for batch in rows.iter_batches():
            yield pa.Table.from_batches([batch])
    except (OSError, pa.ArrowException) as error:
        notes.append(f"{rows.path}: {error} Its rows are not adopted.")


def _with_fingerprint(rows: pa.Table, fingerprint: str) -> pa.Table:
    """The rows with this generation's fingerprint, which would have made the same from these inputs."""
    position = rows.schema.get_field_index("fingerprint")
    return rows.set_column(position, rows.schema.field(position), pa.array([fingerprint] * len(rows)))


_ABOUT = "May be deleted: checks refused these rows. The next start checks them again."


@dataclass(frozen=True)
class Refusal:
    """Finished rows that checks refused. checks: a sentence for each failed check, by its name."""

    generation: str
    checks: Mapping[str, str]

    @classmethod
    def read(cls, paths: PartitionPaths, generations: Collection[str]) -> Self | None:
        """The refusal of one of these generations; None where none was noted."""
        try:
            content = read_sealed(paths.refusal)
            refusal = cls(content["generation"], content["checks"])
        except (OSError, BrokenSealError, KeyError):
            return None
        return refusal if refusal.generation in generations else None

    def write(self, paths: PartitionPaths) -> None:
        """Write the note durably. Raises OSError."""
        write_sealed(paths.refusal, {"about": _ABOUT, **asdict(self)})


def clear_refusal(paths: PartitionPaths) -> None:
    """Remove the note, because rows change or the checks have passed. Raises OSError."""
    if paths.refusal.exists():
        paths.refusal.unlink()
        sync_directory(paths.refusal.parent)
