"""The ledger of the re-materialization: what was tried again how often, what was launched, and what is done.

What lives here: the table ``attempts`` as entries and what a person is told of one, the wish for a look at
once, and the table ``done_again``, which a person who slept wants to see first. What does not: what is
decided from it (``retry_decision.py``), and when it is told (``failed_partitions.py``).
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, replace

import sqlalchemy as sa

from resources.alerts.alert import Alert, Severity
from vlm_durable.commands import command
from vlm_durable.state.database import ControlState
from vlm_durable.state.tables import attempts as _table
from vlm_durable.state.tables import done_again as _done
from vlm_durable.state.tables import meta
from vlm_durable.wording import counted

_LOOK_ASKED = "look_asked"

_DONE_KEPT_SECONDS = 31 * 24 * 3600.0
_LONGEST_WHY = 200


@dataclass(frozen=True)
class Request:
    """A launch that was written down before it was made. tick: which tick made it; at: unix seconds."""

    run_key: str
    tick: str
    at: float


@dataclass(frozen=True)
class Entry:
    """One partition that was tried again, or left to a person.

    launches: of all time, so that a run key is never used twice. attempts: in a row without a new row
    committed. interruptions: runs in a row that were ended from outside, without a new row. rows: committed
    at the last look. not_before: unix seconds. reckoned: the run whose end was last taken into account.
    told: what a person was last told of it. alerted: whether an alert of it is open. why: what its
    last run died of, or why it was last launched.
    """

    key: str
    launches: int = 0
    attempts: int = 0
    interruptions: int = 0
    rows: int = 0
    not_before: float = 0.0
    reckoned: str | None = None
    requested: Request | None = None
    given_up: bool = False
    told: str | None = None
    alerted: bool = False
    why: str = ""


def subject(key: str) -> str:
    """The subject of all that is told of one partition's attempts."""
    return f"partitions/{key}/attempts"


def interrupted_again(entry: Entry, now: float) -> Alert:
    """A partition whose runs end for no fault of its own again and again, without a new row."""
    return _alert_of(
        entry,
        now,
        kind="interrupted_again",
        severity="warning",
        title=f"Partition {entry.key} was interrupted {counted(entry.interruptions, 'times')} without a"
        f" new row",
        next_step=(
            "See what ends its runs (the run's page: it never started, no device, a model server or a disk"
            " of images that is away; the machine's log: a time limit, memory); it is resumed all the same,"
            " less and less often."
        ),
        expected="a new row committed between two interruptions",
        actual=f"{entry.interruptions} in a row without one",
    )


def given_up(entry: Entry, why: str, now: float) -> Alert:
    """A partition that was tried often enough."""
    return _alert_of(
        entry,
        now,
        kind="partition_given_up",
        title=(
            f"Partition {entry.key} is given up after {counted(entry.attempts, 'attempts')} without a new row"
        ),
        next_step=(
            "Open its last run and read the error. When its cause is gone, materialize the partition by hand:"
            " what is committed is kept, and its attempts count from the start. All that were given up at"
            " once: the job failed_partitions_now with `at_once: true`."
        ),
        expected="a materialization that gets on",
        actual=why,
    )


def left_to_person(entry: Entry, why: str, now: float) -> Alert:
    """A partition that a check refused and that no further try would cure."""
    return _alert_of(
        entry,
        now,
        kind="partition_needs_person",
        title=f"Partition {entry.key} is not tried again by itself",
        next_step=(
            f"{command('show', 'ID')} shows a failed property. Put right what its kind says (missing or"
            " damaged"
            " images, limits, prompt), then materialize with `retry_failed: true`."
        ),
        expected="failed rows that another try may cure",
        actual=why,
    )


def _alert_of(
    entry: Entry,
    now: float,
    *,
    kind: str,
    title: str,
    next_step: str,
    expected: str,
    actual: str,
    severity: Severity = "error",
) -> Alert:
    """An alert of a partition's attempts: its subject, run and page follow from the entry."""
    return Alert(
        kind=kind,
        subject=subject(entry.key),
        occurrence=entry.reckoned or f"launch {entry.launches}",
        severity=severity,
        title=title,
        next_step=next_step,
        partition=entry.key,
        expected=expected,
        actual=actual,
        page=f"runs/{entry.reckoned}" if entry.reckoned else None,
        at=now,
    )


class Attempts:
    """The ledger of one home."""

    def __init__(self, state: ControlState) -> None:
        self._state = state

    def read(self) -> dict[str, Entry]:
        """Entries by partition key. Raises ControlStateError."""
        return self._state.read(_entries)

    def write(self, entries: Mapping[str, Entry], *, read: Mapping[str, Entry]) -> bool:
        """Replace what was ``read`` by ``entries``, durably. Raises ControlStateError.

        False, and nothing is changed, where another look has changed the ledger meanwhile: schedule and
        button are two, and a partition that both launched would run twice.
        """

        def write(connection: sa.Connection) -> bool:
            if _entries(connection) != read:
                return False
            for key in read.keys() | entries.keys():
                before, now = read.get(key), entries.get(key)
                if before == now:
                    continue
                connection.execute(_table.delete().where(_table.c.partition == key))
                if now is not None:
                    connection.execute(_table.insert().values(_row(now)))
            return True

        return self._state.write(write)


@dataclass(frozen=True)
class AskedLook:
    """A person asked for a look. run_id: of the button's run; at_once: wait for no back-off."""

    run_id: str
    at_once: bool


def ask_for_look(state: ControlState, asked: AskedLook) -> None:
    """Write a wish down; one that was not answered yet is replaced. Raises ControlStateError."""

    def write(connection: sa.Connection) -> None:
        connection.execute(meta.delete().where(meta.c.name == _LOOK_ASKED))
        connection.execute(meta.insert().values(name=_LOOK_ASKED, value=json.dumps(asdict(asked))))

    state.write(write)


def asked_look(state: ControlState) -> AskedLook | None:
    """The wish that is not answered yet. Raises ControlStateError."""
    query = sa.select(meta.c.value).where(meta.c.name == _LOOK_ASKED)
    text = state.read(lambda connection: connection.execute(query).scalar())
    return None if text is None else AskedLook(**json.loads(text))


def look_answered(state: ControlState, asked: AskedLook) -> None:
    """Forget a wish, unless another has replaced it. Raises ControlStateError."""
    answered = (meta.c.name == _LOOK_ASKED, meta.c.value == json.dumps(asdict(asked)))
    state.write(lambda connection: connection.execute(meta.delete().where(*answered)))


@dataclass(frozen=True)
class DoneAgain:
    """A partition that was completed without a person.

    at: when that was seen (unix seconds). runs: after its first. why: what had been wrong.
    """

    key: str
    at: float
    runs: int
    why: str


def done_again_since(state: ControlState, since: float) -> list[DoneAgain]:
    """What was completed since (unix seconds), oldest first. Raises ControlStateError."""
    query = sa.select(_done.c.partition, _done.c.at, _done.c.runs, _done.c.why)
    query = query.where(_done.c.at >= since).order_by(_done.c.at)
    return state.read(lambda connection: [DoneAgain(*row) for row in connection.execute(query)])


def note_done_again(state: ControlState, done: Collection[DoneAgain], *, now: float) -> None:
    """Note partitions, unless a later time is known; forget those of a month ago."""
    if not done:
        return

    def write(connection: sa.Connection) -> None:
        connection.execute(_done.delete().where(_done.c.at < now - _DONE_KEPT_SECONDS))
        rows = connection.execute(sa.select(_done.c.partition, _done.c.at))
        latest = {row.partition: row.at for row in rows}
        for partition in done:
            if latest.get(partition.key, 0.0) < partition.at:
                connection.execute(_done.delete().where(_done.c.partition == partition.key))
                row = asdict(partition) | {"why": partition.why[:_LONGEST_WHY], "partition": partition.key}
                del row["key"]
                connection.execute(_done.insert().values(row))

    state.write(write)


def _entries(connection: sa.Connection) -> dict[str, Entry]:
    return {row["partition"]: _entry(dict(row)) for row in connection.execute(sa.select(_table)).mappings()}


def _entry(row: dict[str, object]) -> Entry:
    run_key, tick, at = row.pop("run_key"), row.pop("run_tick"), row.pop("run_requested_at")
    row["key"] = row.pop("partition")
    del row["seal"]
    entry = Entry(**row)  # type: ignore[arg-type]  # the columns are its fields
    if run_key is None:
        return entry
    return replace(entry, requested=Request(str(run_key), str(tick), float(str(at))))


def _row(entry: Entry) -> dict[str, object]:
    row = asdict(entry)
    request = entry.requested
    del row["requested"], row["key"]
    return {
        **row,
        "partition": entry.key,
        "run_key": request.run_key if request else None,
        "run_tick": request.tick if request else None,
        "run_requested_at": request.at if request else None,
    }
