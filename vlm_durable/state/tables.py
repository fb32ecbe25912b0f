"""All tables of the control state, declared in one place.

All times are in unix seconds.
"""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa

VERSION = 6
"""The schema's version; others are refused. A bit that was flipped before version 6 could not be noticed."""

metadata = sa.MetaData()
"""The tables that must not be lost."""

liveness = sa.MetaData()
"""The tables that matter only while processes run: written without fsync, made anew where unreadable."""


CANCELS_LOOKED_UNTIL = "cancels_looked_until"
"""Name in ``meta``: unix seconds; runs that a person ended before it are in ``cancels``."""

CATALOG_ID = "catalog_id"
"""Name in ``meta``: the catalogue whose partitions the others name, where homes could share a database."""

WITHDRAWING = "withdrawing"
"""Name in ``meta``: partitions whose properties are being withdrawn; see vlm_durable/state/withdrawing.py."""


meta = sa.Table(
    "meta",
    metadata,
    sa.Column("name", sa.Text, primary_key=True),
    sa.Column("value", sa.Text, nullable=False),
    comment="version: of the schema; changes: write transactions so far, by which copies are ordered",
)

pause = sa.Table(
    "pause",
    metadata,
    sa.Column("id", sa.Integer, sa.CheckConstraint("id = 1"), primary_key=True),
    sa.Column("since", sa.Double, nullable=False),
    sa.Column("reason", sa.Text, nullable=False),
    comment="One row while everything stands still",
)

node_pauses = sa.Table(
    "node_pauses",
    metadata,
    sa.Column("node", sa.Text, primary_key=True),
    sa.Column("since", sa.Double, nullable=False),
    sa.Column("reason", sa.Text, nullable=False),
    comment="Nodes of a cluster that take nothing more while their row stands",
)

cancels = sa.Table(
    "cancels",
    metadata,
    sa.Column("partition", sa.Text, primary_key=True),
    sa.Column("run_id", sa.Text, nullable=False),
    sa.Column("at", sa.Double, nullable=False),
    comment="Partitions that a person cancelled",
)

device_failures = sa.Table(
    "device_failures",
    metadata,
    sa.Column("device", sa.Text, primary_key=True),
    sa.Column("occurrence", sa.Text, primary_key=True),
    sa.Column("at", sa.Double, primary_key=True),
    sa.Column("why", sa.Text, nullable=False),
    comment="What is held against a device",
)

devices_left_out = sa.Table(
    "devices_left_out",
    metadata,
    sa.Column("device", sa.Text, primary_key=True),
    sa.Column("since", sa.Double, nullable=False),
    comment="Devices that are not used until a person takes them back",
)

known_canaries = sa.Table(
    "known_canaries",
    metadata,
    sa.Column("id", sa.Text, primary_key=True),
    sa.Column("device_kind", sa.Text, nullable=False),
    sa.Column("meaning", sa.Text, nullable=False),
    sa.Column("versions", sa.Text, nullable=False),
    sa.Column("digest", sa.Text, nullable=False),
    sa.Column("device", sa.Text, nullable=False),
    sa.Column("at", sa.Double, nullable=False),
    sa.Column("confirmed", sa.Boolean, nullable=False),
    comment="What a sound device answers to the canary: see vlm_engine/canary.py. id: a digest of the kind,"
    " the meaning and the versions. device: which gave it first; confirmed: another has answered the same",
)

good_canaries = sa.Table(
    "good_canaries",
    metadata,
    sa.Column("device", sa.Text, primary_key=True),
    sa.Column("at", sa.Double, nullable=False),
    comment="When each device was last asked and gave the right answers",
)

failed_canaries = sa.Table(
    "failed_canaries",
    metadata,
    sa.Column("device", sa.Text, primary_key=True),
    sa.Column("at", sa.Double, primary_key=True),
    sa.Column("good_at", sa.Double),
    sa.Column("why", sa.Text, nullable=False),
    sa.Column("known", sa.Text),
    sa.Column("told", sa.Boolean, nullable=False),
    comment="When a device gave wrong answers: its rows between good_at (null: ever) and at are in doubt."
    " known: id of the known answer that it contradicts. told: an alert has named the keys",
)

attempts = sa.Table(
    "attempts",
    metadata,
    sa.Column("partition", sa.Text, primary_key=True),
    sa.Column("launches", sa.Integer, nullable=False),
    sa.Column("attempts", sa.Integer, nullable=False),
    sa.Column("interruptions", sa.Integer, nullable=False),
    sa.Column("rows", sa.BigInteger, nullable=False),
    sa.Column("not_before", sa.Double, nullable=False),
    sa.Column("reckoned", sa.Text),
    sa.Column("run_key", sa.Text),
    sa.Column("run_tick", sa.Text),
    sa.Column("run_requested_at", sa.Double),
    sa.Column("given_up", sa.Boolean, nullable=False),
    sa.Column("told", sa.Text),
    sa.Column("alerted", sa.Boolean, nullable=False),
    sa.Column("why", sa.Text, nullable=False),
    comment="Partitions that the retry schedule tries again: see sensors/retry_ledger.py",
)

done_again = sa.Table(
    "done_again",
    metadata,
    sa.Column("partition", sa.Text, primary_key=True),
    sa.Column("at", sa.Double, nullable=False),
    sa.Column("runs", sa.Integer, nullable=False),
    sa.Column("why", sa.Text, nullable=False),
    comment="Partitions that a retry completed, for people",
)

restorations = sa.Table(
    "restorations",
    metadata,
    sa.Column("at", sa.Double, primary_key=True),
    sa.Column("why", sa.Text, nullable=False),
    sa.Column("copy_at", sa.Double),
    comment="When this database was put back from a copy; copy_at is null where no copy was good",
)

alert_events = sa.Table(
    "alert_events",
    metadata,
    sa.Column("seq", sa.Integer, primary_key=True),
    sa.Column("id", sa.Text, nullable=False, unique=True),
    sa.Column("what", sa.Text, nullable=False),
    sa.Column("kind", sa.Text, nullable=False),
    sa.Column("subject", sa.Text, nullable=False, index=True),
    sa.Column("at", sa.Double, nullable=False),
    sa.Column("event", sa.JSON, nullable=False),
    # The number of a pruned event is never another's.
    sqlite_autoincrement=True,
    comment="Outbox and history in one: see resources/alerts/outbox.py",
)

alert_targets = sa.Table(
    "alert_targets",
    metadata,
    sa.Column("target", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("told", sa.Integer, nullable=False),
    sa.Column("message", sa.Integer),
    sa.Column("tries", sa.Integer, nullable=False, server_default="0"),
    sa.Column("burst", sa.Integer, nullable=False, server_default="0"),
    sa.Column("due", sa.Double, nullable=False, server_default="0"),
    comment="How far each target was told, by its number in the settings. told: the last event it knows."
    " message: the last event of the message that it is being sent, null between messages; tries: of it."
    " burst: messages since it was last quiet. due: until then it is left alone",
)

for _table in metadata.tables.values():
    # SQLite's pages carry no digests: a flipped bit in a cell would be read as if it had been written. This
    # index repeats every cell, and ``PRAGMA integrity_check`` compares tables with their indexes.
    sa.Index(f"{_table.name}_twice", *_table.columns).ddl_if(dialect="sqlite")

workers = sa.Table(
    "workers",
    liveness,
    sa.Column("name", sa.Text, primary_key=True),
    sa.Column("record", sa.JSON, nullable=False),
    comment="The last heartbeat of each materialization. Whether it lives is decided by its lock; another"
    " machine says so in its row of ``nodes``",
)

nodes = sa.Table(
    "nodes",
    liveness,
    sa.Column("name", sa.Text, primary_key=True),
    sa.Column("beat_at", sa.Double, nullable=False),
    sa.Column("record", sa.JSON, nullable=False),
    comment="The last heartbeat of each node of a cluster; beat_at: by the clock of this database",
)

ticks = sa.Table(
    "ticks",
    liveness,
    sa.Column("name", sa.Text, primary_key=True),
    sa.Column("at", sa.Double, nullable=False),
    sa.Column("interval_seconds", sa.Double, nullable=False),
    sa.Column("since", sa.Double, nullable=False),
    comment="The last tick of each sensor and schedule: see sensors/ticks.py",
)

quality_summaries = sa.Table(
    "quality_summaries",
    liveness,
    sa.Column("key", sa.Text, primary_key=True),
    sa.Column("made_of", sa.Text, nullable=False),
    sa.Column("summary", sa.JSON, nullable=False),
    comment="What each published partition says; made_of: a digest of its file and of what was asked of it",
)

drift_snapshots = sa.Table(
    "drift_snapshots",
    liveness,
    sa.Column("asset", sa.Text, primary_key=True),
    sa.Column("snapshot", sa.JSON, nullable=False),
    comment="What the drift sensor saw at its last look; without it, every partition is looked at anew",
)

batch_sizes = sa.Table(
    "batch_sizes",
    liveness,
    sa.Column("device", sa.Text, primary_key=True),
    sa.Column("meaning", sa.Text, primary_key=True),
    sa.Column("cost", sa.BigInteger, primary_key=True, autoincrement=False),
    sa.Column("rate", sa.Double, nullable=False),
    sa.Column("seconds", sa.Double, nullable=False),
    sa.Column("held", sa.Boolean, nullable=False),
    comment="How fast batches of a size are on devices of a name: see vlm_engine/batches.py",
)


def put_row(connection: sa.Connection, table: sa.Table, **values: object) -> None:
    """Write a row in place of the one that has its primary key, if there is one."""
    connection.execute(table.delete().where(*(column == values[column.name] for column in table.primary_key)))
    connection.execute(table.insert().values(**values))


def text_of(connection: sa.Connection, name: str) -> str | None:
    """The value of a name in ``meta``; None where it has none."""
    return connection.scalar(sa.select(meta.c.value).where(meta.c.name == name))


def read_snapshot(connection: sa.Connection, name: str) -> Any:
    """What was last seen of an asset, or of its objects in a store; None where nothing is known."""
    return connection.scalar(sa.select(drift_snapshots.c.snapshot).where(drift_snapshots.c.asset == name))
