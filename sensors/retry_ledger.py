"""The ledger of the re-materialization: the attempts and launches of each partition, and what came right.

The table ``done_again`` is for a person who slept, and wants to see first what came right by itself.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, replace

import sqlalchemy as sa

from resources.alerts.alert import Alert, Severity
from resources.dagster_names import is_tagged, tag_value
from vlm_durable.commands import command
from vlm_durable.state.database import ControlState
from vlm_durable.state.tables import attempts as _table
from vlm_durable.state.tables import done_again as _done
from vlm_durable.state.tables import meta, put_row, text_of
from vlm_durable.wording import counted

_TICK_REQUEST = "look_asked"
"""Row of the table ``meta``."""

_DONE_KEPT_SECONDS = 31 * 24 * 3600.0
_LONGEST_WHY = 200
_PERSON = "person"


@dataclass(frozen=True)
class Request:
    """A launch, written down before it is made. tick: the tick that makes it; at: unix seconds."""

    run_key: str
    tick: str
    at: float


@dataclass(frozen=True)
class Entry:
    """One partition that was tried again, or left to a person.

    launches: of all time, so that a run key is never used twice. attempts: in a row without a new committed
    row. interruptions: runs in a row that were ended from outside, without a new row. rows: committed at the
    last tick. not_before: unix seconds. reckoned: the run whose end was counted last. requested: the launch
    that is under way. told: what the last alert about it was for (see ``told_person``), or
    that a person has asked for it since. alerted: whether an alert of it is open. why: the error of its last
    run, or the reason of its last launch.
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

    def needs_person(self, asset: str) -> bool:
        """Whether an asset is left to a person, who was told so."""
        kind, _, of_run = (self.told or "").partition(": ")
        return kind == _PERSON and is_tagged(of_run, of_run.partition(" ")[0], [asset])


def told_person(run_id: str, assets: Collection[str]) -> str:
    """What an entry has in ``told`` if these assets are left to a person, after this run."""
    return f"{_PERSON}: {tag_value(run_id, assets)}"


def asked_again(run_id: str) -> str:
    """What an entry has in ``told`` if a person's button asked for what this run had left to a person."""
    return f"asked: {run_id}"


def told_stale(run_id: str) -> str:
    """What an entry has in ``told`` if its partition is stale and left to a person, after this run."""
    return f"stale: {run_id}"


def subject(key: str) -> str:
    """The subject of the alerts about one partition's attempts."""
    return f"partitions/{key}/attempts"


def interrupted_again(entry: Entry, now: float) -> Alert:
    """The alert of a partition whose runs are interrupted again and again, without a new row."""
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
    """The alert of a partition that used up its attempts."""
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


def left_to_person(entry: Entry, assets: Collection[str], why: str, now: float) -> Alert:
    """The alert of a partition that a check refused, and that another try would not cure."""
    return _alert_of(
        entry,
        now,
        kind="partition_needs_person",
        title=f"Partition {entry.key} is not tried again by itself ({', '.join(assets)})",
        next_step=(
            f"{command('show', 'ID')} shows a failed property. Put right what its kind says (missing or"
            f" damaged images, limits, prompt), then {command('run', entry.key)}."
        ),
        expected="failed rows that another try may cure",
        actual=why,
    )


def left_stale(entry: Entry, assets: Collection[str], why: str, now: float) -> Alert:
    """The alert of a partition whose run did not end well, and that another run would make anew."""
    return _alert_of(
        entry,
        now,
        kind="partition_needs_person",
        title=f"Partition {entry.key} is not tried again by itself ({', '.join(assets)})",
        next_step=f"{command('run', entry.key)} says what making it anew takes, and asks.",
        expected="a partition made under the settings that count now",
        actual=f"it was made under other settings; {why}",
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
        """Replace the entries that were ``read`` by ``entries``, durably. Raises ControlStateError.

        Returns False and changes nothing if another tick has changed the ledger meanwhile: schedule and
        button may tick at once, and a partition that both launched would run twice.
        """

        def write(connection: sa.Connection) -> bool:
            if _entries(connection) != read:
                return False
            for key in read.keys() | entries.keys():
                before, now = read.get(key), entries.get(key)
                if before == now:
                    continue
                if now is not None:
                    put_row(connection, _table, **_row(now))
                else:
                    connection.execute(_table.delete().where(_table.c.partition == key))
            return True

        return self._state.write(write)


@dataclass(frozen=True)
class TickRequest:
    """A person's request for a tick. run_id: of the button's run; at_once: wait for no back-off."""

    run_id: str
    at_once: bool


def request_tick(state: ControlState, request: TickRequest) -> None:
    """Write a request down; it replaces one that was not answered yet. Raises ControlStateError."""
    value = json.dumps(asdict(request))
    state.write(lambda connection: put_row(connection, meta, name=_TICK_REQUEST, value=value))


def pending_request(state: ControlState) -> TickRequest | None:
    """The request that was not answered yet. Raises ControlStateError."""
    text = state.read(lambda connection: text_of(connection, _TICK_REQUEST))
    return None if text is None else TickRequest(**json.loads(text))


def forget_request(state: ControlState, request: TickRequest) -> None:
    """Forget a request, unless another has replaced it. Raises ControlStateError."""
    is_request = (meta.c.name == _TICK_REQUEST, meta.c.value == json.dumps(asdict(request)))
    state.write(lambda connection: connection.execute(meta.delete().where(*is_request)))


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
    """The partitions completed since a time (unix seconds), oldest first. Raises ControlStateError."""
    query = sa.select(_done.c.partition, _done.c.at, _done.c.runs, _done.c.why)
    query = query.where(_done.c.at >= since).order_by(_done.c.at)
    return state.read(lambda connection: [DoneAgain(*row) for row in connection.execute(query)])


def note_done_again(state: ControlState, done: Collection[DoneAgain], *, now: float) -> None:
    """Note completed partitions, unless a later time is noted already; forget those of a month ago."""
    if not done:
        return

    def write(connection: sa.Connection) -> None:
        connection.execute(_done.delete().where(_done.c.at < now - _DONE_KEPT_SECONDS))
        rows = connection.execute(sa.select(_done.c.partition, _done.c.at))
        latest = {row.partition: row.at for row in rows}
        for partition in done:
            if latest.get(partition.key, 0.0) < partition.at:
                row = asdict(partition) | {"why": partition.why[:_LONGEST_WHY], "partition": partition.key}
                del row["key"]
                put_row(connection, _done, **row)

    state.write(write)


def _entries(connection: sa.Connection) -> dict[str, Entry]:
    return {row["partition"]: _entry(dict(row)) for row in connection.execute(sa.select(_table)).mappings()}


def _entry(row: dict[str, object]) -> Entry:
    run_key, tick, at = row.pop("run_key"), row.pop("run_tick"), row.pop("run_requested_at")
    row["key"] = row.pop("partition")
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
