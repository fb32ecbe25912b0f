"""Partitions published in a real S3 store, and their work under way, by two machines over one store.

A machine lives the life of the one partition (``partition_life.py``) as a materialization with a store does:
pull, open, claim, copy, stage, publish, push, close. It is killed at a request or a file operation, lost with
its disk, or stopped and overtaken; the server is killed beneath it; an object is damaged or removed. What was
acknowledged is in the store, so the ledger holds whichever machine goes on. Fault table rows 22 and 23.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import threading
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pyarrow as pa

from faults.file_operations import die, strike_at
from faults.ledger import Ledger, PromiseBrokenError
from faults.lives import Life, StoppedLife, act_in_child, act_until_time, stop_here
from faults.partition_life import (
    BATCH,
    IDS,
    KEY,
    SCHEMA,
    TOTAL,
    VERSIONS,
    Say,
    are_exact,
    asset,
    high_water_mark,
    journal_directory,
    open_journal,
    rows,
    say_standing,
)
from faults.s3_server import BUCKET, S3Server
from vlm_durable.journal.high_water_mark import read_mark
from vlm_durable.journal.journal import clear_retired
from vlm_durable.journal.journal_errors import JournalLossError
from vlm_durable.mirror.bucket import S3Folder, client
from vlm_durable.mirror.stored_journal import (
    Copying,
    HeadDamagedError,
    StoredJournal,
    close_published,
    pull_closed,
    pull_others,
)
from vlm_durable.versions.published import PublishedPartitions
from vlm_durable.versions.stored import StoredPartitions
from vlm_durable.versions.versioned_object import PublishedError

_REQUESTS = 105
"""A few more than a whole life sends, without the probes of the store."""
_OPERATIONS = 700
_SECONDS = 3.0
_OVERTAKEN = frozenset(
    {"TakenOverError", "OvertakenError", "PublishedError", "JournalLossError", "TakenError"}
)
_NAMED = _OVERTAKEN | {"HeadDamagedError", "RecordDamagedError", "NoObjectError"}
"""Errors that name an object which is damaged or gone."""


def struck(chance: random.Random, server: S3Server, number: int) -> Counter[str]:
    """One store, two machines, and what happens to them; in the end both have what the store has."""
    kinds = (_killed_at_requests, _killed_at_operations, _object_struck, _overtaken, _machine_lost)
    kind = _server_killed if number % 15 == 7 else kinds[number % len(kinds)]
    pair = Pair(server, f"stored-{number}")
    try:
        strikes = kind(chance, pair)
        pair.close()
    except PromiseBrokenError as broken:
        raise PromiseBrokenError(f"{kind.__name__[1:]}: {broken}") from broken
    shutil.rmtree(pair.home)
    return Counter(strikes=strikes, cases=1)


class Pair:
    """Two machines over a folder of a store, and the ledger of what they were promised."""

    def __init__(self, server: S3Server, name: str) -> None:
        self.server = server
        self.home = server.folder.parent / name
        self.store = S3Folder.parse(f"s3://{BUCKET}/{name}")
        self.ledger = Ledger(self.home, wakes=True, unread=True)

    def act(
        self, machine: str, at: int = 0, strike: Callable[[], None] = die, *, arrives: bool = False
    ) -> Act:
        """A life of a machine, struck at its ``at``-th request (0: never), before it is sent or answered."""
        return over_store(
            self.server, partial(live, self.home / machine, self.store), at, strike, arrives=arrives
        )

    def live(self, machine: str, act: Act | None = None, **options: object) -> Life:
        """Hear a life of a machine, to its end unless it is struck."""
        return self.ledger.hear(act_in_child(self.home / machine, act or self.act(machine), **options))  # type: ignore[arg-type]

    def close(self) -> None:
        """Let both machines finish, and compare the store with each of them."""
        self.ledger.refused = frozenset()
        for machine in "ab":
            if not self.live(machine).finished or self.ledger.published != VERSIONS:
                raise PromiseBrokenError(f"machine {machine} did not finish at the end (home: {self.home})")
        for machine in "ab":
            life = act_in_child(self.home / machine, over_store(self.server, partial(self._compare, machine)))
            problems = [report["problem"] for report in life.reports if "problem" in report]
            if problems or life.error is not None:
                raise PromiseBrokenError(
                    f"at the end: {problems} {life.error} {life.message} (home: {self.home})"
                )

    def _compare(self, machine: str, say: Say) -> None:
        own = asset(self.home / machine)
        stored, record = StoredPartitions(own, self.store), PublishedPartitions(own).record(KEY)
        if problem := stored.trouble(KEY, deep=True):
            say(problem=problem)
        if (there := stored.published(KEY)) is None or record is None or there.sha256 != record.sha256:
            say(problem=f"machine {machine} has {record}, the store {there}")
        for version in range(1, VERSIONS + 1):
            journal = StoredJournal(own.partition(KEY), f"generation-{version}", self.store)
            try:
                manifest = journal.read_manifest()
            except HeadDamagedError:
                if version == VERSIONS:
                    raise
                continue  # It was struck, and no start needs the closed journal of an earlier version.
            if manifest is None or not manifest.retired or manifest.segments:
                say(problem=f"the journal of version {version} is not closed: {manifest}")


Act = Callable[[Say], None]


def over_store(
    server: S3Server, act: Act, at: int = 0, strike: Callable[[], None] = die, *, arrives: bool = False
) -> Act:
    """``act`` in a child with the server's environment, struck at its ``at``-th request (0: never).

    arrives: it was answered; else it is not sent. Probes of the store are counted with the answers alone.
    """
    sent, lock = 0, threading.Lock()

    def count(probe: str) -> None:
        nonlocal sent
        if "probe" not in probe:
            with lock:
                sent += 1
                is_struck = sent == at
            if is_struck:
                strike()

    def before(request: object, **_: object) -> None:
        count(str(getattr(request, "url", "")))

    def after(**_: object) -> None:
        count("")

    def acted(say: Say) -> None:
        os.environ.update(server.environment)
        client.cache_clear()
        if arrives:
            client().meta.events.register("response-received.s3", after)
        else:
            client().meta.events.register("before-send.s3", before)
        act(say)
        say(requests=sent)

    return acted


def live(home: Path, store: S3Folder, say: Say) -> None:
    """Go on from whatever stands in ``home`` and in the store, to the second published version."""
    own = asset(home)
    paths, stored = own.partition(KEY), StoredPartitions(own, store)
    published = PublishedPartitions(own, lock_seconds=0)
    stored.pull(KEY)
    pull_closed(paths, store)
    if record := published.record(KEY):
        if not published.verify(KEY).ok:
            published.restore(KEY, stored.content_of)
        stored.push(KEY)
        _finish_retirement(home, int(record.fingerprint), store)
    version = say_standing(published, say)
    while version < VERSIONS:
        version += 1
        in_store = StoredJournal(paths, f"generation-{version}", store)
        in_store.pull()
        list(pull_others(paths, f"generation-{version}", store))
        with contextlib.ExitStack() as stack:
            copying = stack.enter_context(Copying(in_store, most_bytes=1 << 20))
            journal = stack.enter_context(open_journal(home, version))
            copying.begin(journal)
            copying.flush()
            restored = pa.Table.from_batches(journal.read_ordered(5), schema=SCHEMA)
            say(version=version, restored=restored["ordinal"].to_pylist(), exact=are_exact(restored, version))
            todo = [n for n in range(TOTAL) if f"property-{n:05d}" in journal.missing_ids]
            for start in range(0, len(todo), BATCH):
                mine = todo[start : start + BATCH]
                say(submitted=mine, of=version)
                journal.submit(rows(mine, version))
                journal.flush()
                copying.flush()
                say(promised=mine, of=version)
            # Machines write other bytes for the same rows, as devices do.
            batches = journal.read_ordered(5 if home.name == "a" else 4)
            staged = published.stage(KEY, batches, SCHEMA, expected_ids=IDS, fingerprint=str(version))
            with staged:
                copying.flush()
                say(publishing=version)
                published.publish(staged)
                stored.push(KEY)
            say(published=version)
            journal.retire()
            copying.retire()
    say_standing(published, say)
    say(finished=True, verified=published.verify(KEY).sentence() if not published.verify(KEY).ok else "")


def _finish_retirement(home: Path, version: int, store: S3Folder) -> None:
    """As a start does where a version is published: close its journal in the store, then the one here."""
    generation, mark = f"generation-{version}", high_water_mark(home, version)
    directory = journal_directory(home, version)
    close_published(asset(home).partition(KEY), generation, store)
    if directory.is_dir() and not clear_retired(directory, mark):
        last = read_mark(mark, key=KEY, generation=generation).mark
        if last is None or not last.retired:
            # A segment that nobody has: all of its rows are published, so it stays, as in the product.
            with contextlib.suppress(JournalLossError), open_journal(home, version) as finished:
                if not finished.missing_ids:
                    finished.retire()


def _killed_at_requests(chance: random.Random, pair: Pair) -> int:
    """Kills in a row, each before a request is sent or when it is answered, on either machine."""
    strikes = 0
    for _ in range(3):
        machine = chance.choice("ab")
        at, arrives = chance.randint(1, _REQUESTS), chance.random() < 0.5
        strikes += pair.live(machine, pair.act(machine, at, arrives=arrives)).killed
    return strikes


def _killed_at_operations(chance: random.Random, pair: Pair) -> int:
    """Kills in a row at a file operation, on either machine, or from outside at any moment."""
    strikes = 0
    for _ in range(3):
        machine = chance.choice("ab")
        if chance.random() < 0.3:
            act = pair.act(machine)
            life = act_until_time(pair.home / machine, act, chance.uniform(0.0, _SECONDS))
            strikes += pair.ledger.hear(life).killed
            continue
        before = strike_at(chance.randint(1, _OPERATIONS), torn=chance.random() < 0.3)
        strikes += pair.live(machine, before=before).killed
    return strikes


def _machine_lost(chance: random.Random, pair: Pair) -> int:
    """A machine is killed and never comes back; a new one, or the other one, goes on from the store alone."""
    strikes = 0
    for _ in range(2):
        machine = chance.choice("ab")
        strikes += pair.live(machine, pair.act(machine, chance.randint(1, _REQUESTS))).killed
        if chance.random() < 0.5:  # A start that is cut short comes before the loss.
            pair.live(machine, pair.act(machine, chance.randint(1, 40)))
        shutil.rmtree(pair.home / machine, ignore_errors=True)  # A kill before its first file leaves none.
    return strikes


def _server_killed(chance: random.Random, pair: Pair) -> int:
    """The server dies beneath a machine and is started again: the machine goes on by itself."""

    def restart() -> None:
        pair.server.kill()
        pair.server.start()

    machine = chance.choice("ab")
    moment = chance.uniform(0.0, 0.5 * _SECONDS)
    life = act_until_time(pair.home / machine, pair.act(machine), moment, restart)
    pair.ledger.hear(life)
    if not life.finished:
        raise PromiseBrokenError(f"the machine did not go on: {life.error} (home: {pair.home})")
    return 1


def _overtaken(chance: random.Random, pair: Pair) -> int:
    """A machine is stopped at a request; the other one goes on, finishes or dies; the first one wakes."""
    pair.ledger.refused = _OVERTAKEN
    act = pair.act("a", chance.randint(1, _REQUESTS), stop_here)
    with StoppedLife(pair.home / "a", 0, act) as writer:
        if writer.is_stopped:
            pair.ledger.hear(writer.life_so_far())
            at = chance.randint(1, _REQUESTS) if chance.random() < 0.4 else 0
            pair.live("b", pair.act("b", at))
        reported = len(writer.life_so_far().reports)
        woken = writer.wake()
    if writer.is_stopped:
        del woken.reports[:reported]
    pair.ledger.hear_woken(woken)
    return int(writer.is_stopped)


def _object_struck(chance: random.Random, pair: Pair) -> int:
    """An object is removed or replaced after a life or a kill. Who has the bytes puts them back."""
    machine = chance.choice("ab")
    if chance.random() < 0.5:
        pair.live(
            "b" if machine == "a" else "a", pair.act("b" if machine == "a" else "a", chance.randint(1, 60))
        )
    pair.live(machine, pair.act(machine, chance.choice((0, chance.randint(1, _REQUESTS)))))
    names = _objects(pair)
    if not names:
        return 0
    name = chance.choice(names)
    other = chance.choice((None, b"", b"damage", "cut", "flip"))
    objects = pair.server.client()
    key = f"{pair.store.prefix}{name}"
    if other is None:
        objects.delete_object(Bucket=BUCKET, Key=key)
    else:
        data = objects.get_object(Bucket=BUCKET, Key=key)["Body"].read()
        if other == "cut":
            other = data[: len(data) // 2]
        elif other == "flip":
            at = chance.randrange(len(data) or 1)
            other = data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :] if data else b"?"
        objects.put_object(Bucket=BUCKET, Key=key, Body=other)
    pair.ledger.refused = _NAMED
    for worker in (*chance.sample("ab", 1), machine):
        if not pair.live(worker).finished:
            _repair(pair, machine)
    if not pair.live(machine).finished:
        raise PromiseBrokenError(f"{name} as {other!r}: who worked last does not go on (home: {pair.home})")
    return 1


def _objects(pair: Pair) -> list[str]:
    """The names of the partition's objects. SeaweedFS lists nothing below a folder named .versions."""
    paths = asset(pair.home / "a").partition(KEY)
    objects, root = pair.server.client(), pair.home / "a"
    fixed = [str(path.relative_to(root)) for path in (paths.published, paths.record, paths.version(1))]
    names = []
    for name in fixed:
        with contextlib.suppress(objects.exceptions.ClientError):
            objects.head_object(Bucket=BUCKET, Key=pair.store.prefix + name)
            names.append(name)
    below = f"{pair.store.prefix}{paths.journals.relative_to(root)}/"
    listed = objects.list_objects_v2(Bucket=BUCKET, Prefix=below).get("Contents", ())
    return names + [entry["Key"].removeprefix(pair.store.prefix) for entry in listed]


def _repair(pair: Pair, machine: str) -> None:
    """What a person does who reads the sentence: repair on the machine that worked last."""

    def repair(say: Say) -> None:
        stored = StoredPartitions(asset(pair.home / machine), pair.store)
        try:
            stored.put_back(KEY)
        except PublishedError as error:
            if "--newest-here" in str(error):
                stored.put_back(KEY, newest_here=True)

    life = act_in_child(pair.home / machine, over_store(pair.server, repair))
    if life.error is not None and life.error not in _NAMED:
        raise PromiseBrokenError(f"the repair ended with {life.error}: {life.message} (home: {pair.home})")
