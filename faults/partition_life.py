"""One life of a process that brings a partition from nothing to its second published version.

The same order as a materialization (vlm_assets/assets/materialize.py), without Dagster and a model: journal,
commits, stage, publish, retire; then a second generation over the first. What is said is said only after
the product promised it. What does not live here: how a life ends (lives.py) and what is made of what
it said (ledger.py).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pyarrow as pa

from vlm_durable.files.layout import AssetFolders, Home
from vlm_durable.journal.journal import Journal, clear_retired
from vlm_durable.journal.segments import JournalIdentity
from vlm_durable.versions.published import PublishedPartitions

KEY = "000000000-000000011"
TOTAL, BATCH, VERSIONS = 12, 3, 2
SCHEMA = pa.schema(
    [
        pa.field("ordinal", pa.int64()),
        pa.field("property_id", pa.string()),
        pa.field("text", pa.string()),
        pa.field("embedding", pa.list_(pa.float32(), 4)),
    ]
)
IDS = frozenset(f"property-{n:05d}" for n in range(TOTAL))

Say = Callable[..., None]


def rows(ordinals: list[int], version: int) -> pa.Table:
    """The rows of these ordinals as the version has them: every value follows from both."""
    return pa.table(
        {
            "ordinal": ordinals,
            "property_id": [f"property-{n:05d}" for n in ordinals],
            "text": [f"version {version} of {n} " * 4 for n in ordinals],
            "embedding": [[float(n), float(version), 0.5, -1.0] for n in ordinals],
        },
        schema=SCHEMA,
    )


def asset(home: Path) -> AssetFolders:
    """The asset whose partition is written."""
    return Home(home).asset("property_descriptions")


def journal_directory(home: Path, version: int) -> Path:
    """Where the work under way of a version lies."""
    return asset(home).partition(KEY).journal(f"generation-{version}")


def high_water_mark(home: Path, version: int) -> Path:
    """A version's high-water mark, kept apart."""
    return asset(home).partition(KEY).high_water_mark(f"generation-{version}")


def journal_identity(version: int) -> JournalIdentity:
    """Whose rows a version's journal holds."""
    fingerprints = {"catalogue": "c", "model": f"m{version}"}
    return JournalIdentity(KEY, f"generation-{version}", fingerprints, SCHEMA, IDS)


def open_journal(home: Path, version: int) -> Journal:
    """Open a version's journal: recover and verify it."""
    return Journal.open(
        journal_directory(home, version),
        journal_identity(version),
        high_water_mark=high_water_mark(home, version),
        quarantine=asset(home).partition(KEY).quarantine,
    )


def live(home: Path, say: Say, *, commits: int | None = None) -> None:
    """Go on from whatever stands in ``home``. ``commits``: stop after so many (None: until all is done)."""
    published = PublishedPartitions(asset(home), lock_seconds=0)
    paths = asset(home).partition(KEY)
    say(
        journals=[path.name for path in paths.journals.glob("*")],
        staged=len([*paths.asset.staging.glob(".*")]),
    )
    if record := published.record(KEY):
        _settle_published(home, int(record.fingerprint), published)
    version = say_standing(published, say)
    while version < VERSIONS:
        version += 1
        with open_journal(home, version) as journal:
            restored = pa.Table.from_batches(journal.read_ordered(5), schema=SCHEMA)
            say(version=version, restored=restored["ordinal"].to_pylist(), exact=are_exact(restored, version))
            todo = [n for n in range(TOTAL) if f"property-{n:05d}" in journal.missing_ids]
            for start in range(0, len(todo), BATCH)[:commits]:
                mine = todo[start : start + BATCH]
                say(submitted=mine, of=version)
                journal.submit(rows(mine, version))
                journal.flush()
                say(promised=mine, of=version)
            if journal.missing_ids:
                return
            staged = published.stage(
                KEY, journal.read_ordered(), SCHEMA, expected_ids=IDS, fingerprint=str(version)
            )
            with staged:
                say(publishing=version)
                published.publish(staged)
            say(published=version)
            journal.retire()
            say(retired=f"generation-{version}")
    say_standing(published, say)
    say(finished=True, verified=published.verify(KEY).sentence() if not published.verify(KEY).ok else "")


def say_standing(published: PublishedPartitions, say: Say) -> int:
    """Say which version readers see, 0 for none, and whether its rows are exactly those of the version."""
    record = published.record(KEY)
    if record is None:
        say(standing=0, exact=True)
        return 0
    version = int(record.fingerprint)
    table = published.read(KEY).to_table()
    complete = table["ordinal"].to_pylist() == list(range(TOTAL))
    say(standing=version, exact=complete and are_exact(table, version))
    return version


def _settle_published(home: Path, version: int, published: PublishedPartitions) -> None:
    """What a start does where a version is published: verify, restore, finish the journal's retirement."""
    if not published.verify(KEY).ok:
        published.restore(KEY)
    journal = journal_directory(home, version)
    if journal.is_dir() and not clear_retired(journal, high_water_mark(home, version)):
        with open_journal(home, version) as finished:
            finished.retire()


def are_exact(table: pa.Table, version: int) -> bool:
    """Whether every value is what this version's rows have, and none comes twice."""
    ordinals = table["ordinal"].to_pylist()
    expected = rows(ordinals, version).to_pylist()
    return len(set(ordinals)) == len(ordinals) and bool(table.to_pylist() == expected)
