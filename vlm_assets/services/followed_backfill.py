"""A backfill (``backfill.py``) that is followed to its end: through outages, and launched again."""

from __future__ import annotations

import contextlib
import sqlite3
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Protocol, TypeVar, Unpack

from vlm_assets.config.settings import Settings
from vlm_assets.services.backfill import (
    Backfill,
    BackfillOptions,
    BackfillProgress,
    BackfillSummary,
    KeysOf,
    all_keys,
    dagster_facts,
    summarize,
)
from vlm_assets.services.command_error import CommandError
from vlm_assets.webserver.api import (
    CodeLocationError,
    DagsterApi,
    DagsterApiError,
    DagsterUnreachableError,
)
from vlm_assets.webserver.home import running_address
from vlm_durable.commands import command
from vlm_durable.mirror.bucket import StoreAwayError
from vlm_durable.state.sqlite_file import ControlStateError

_AGAIN_SECONDS = 2.0

_LAUNCHES = 5
"""How often a backfill is launched that Dagster gives up."""

_T = TypeVar("_T")


class BackfillView(Protocol):
    """Shows a person a backfill that is followed."""

    def say(self, sentence: str) -> None:
        """Show a sentence."""

    def warn(self, sentence: str) -> None:
        """Show a sentence about what is not as it should be."""

    def progress(self, partitions: int) -> AbstractContextManager[Callable[[BackfillProgress], None]]:
        """A function that shows how far so many partitions are, until the context ends."""


@dataclass(frozen=True)
class Patience:
    """Repeats a question that fails, for as long as the Dagster that is asked lives.

    watch: lets so many seconds pass, and raises if that Dagster has ended.
    """

    view: BackfillView
    watch: Callable[[float], None]

    def ask(self, question: Callable[[], _T]) -> _T:
        """Repeat ``question`` while a service is away. Says when that begins and ends."""
        waits = False
        while True:
            try:
                answer = question()
            except Exception as error:
                why = _who_is_away(error)
                if why is None:
                    raise
                if not waits:
                    self.view.warn(
                        f"{why.rstrip('.')}. Runs go on meanwhile; asking again until there is an answer."
                    )
                waits = True
                self.watch(_AGAIN_SECONDS)
            else:
                if waits:
                    self.view.say("There are answers again.")
                return answer


def _who_is_away(error: Exception) -> str | None:
    """Which service gave no answer, and why, in a line; None if no service is away.

    Raises CommandError where Dagster's database would answer another try in the same way.
    """
    if isinstance(error, DagsterUnreachableError | CodeLocationError | ControlStateError | StoreAwayError):
        return str(error).partition("\n")[0]
    from sqlalchemy import exc

    # Dagster's own exception, after some tries to reach Postgres, has the last of them as its cause.
    cause = error if isinstance(error, exc.SQLAlchemyError) else error.__cause__
    if not isinstance(cause, exc.SQLAlchemyError):
        return None
    reason = getattr(cause, "orig", None) or cause
    why = str(reason).partition("\n")[0]
    is_away = isinstance(cause, exc.OperationalError | exc.InterfaceError | exc.TimeoutError)
    # SQLite has this code for a statement that the tables do not fit.
    if is_away and getattr(reason, "sqlite_errorcode", None) != sqlite3.SQLITE_ERROR:
        return f"Dagster's database gave no answer: {why}"
    raise CommandError(
        f"Dagster's database is not what this version of Dagster expects: {why}. If it is of an earlier"
        " version, stop Dagster and migrate it: `dagster instance migrate`."
    ) from error


def watch_from_outside(api: DagsterApi, seconds: float) -> None:
    """Let so many seconds pass beside a Dagster that another process started.

    Raises DagsterApiError if it has ended.
    """
    time.sleep(seconds)
    address = running_address(api.dagster_home)
    if address is None:
        raise DagsterApiError(
            f"The Dagster of this home at {api.url} has ended. What is done is kept, and the backfill goes on"
            f" with the next start: {command('serve')}, or {command('run')}."
        )
    api.url = address  # it may have been started again meanwhile


def materialize_partitions(
    patience: Patience,
    api: DagsterApi,
    settings: Settings,
    keys: KeysOf | None,
    *,
    start: Callable[[], None] = lambda: None,
    **options: Unpack[BackfillOptions],
) -> BackfillSummary:
    """Choose the partitions, all unless given, and follow their backfill to its end.

    start: see ``follow``.
    """
    with contextlib.ExitStack() as opened:
        dagster = patience.ask(lambda: opened.enter_context(dagster_facts(settings)))
        chosen = patience.ask(lambda: keys(dagster)) if keys is not None else all_keys(settings.home)
        return follow(Backfill(api, dagster, settings, chosen, **options), patience, start=start)


def follow(
    work: Backfill, patience: Patience, *, start: Callable[[], None] = lambda: None
) -> BackfillSummary:
    """Launch a backfill, show its progress until it ends, and say how it ended.

    start: starts the process that launches its runs. A failed answer ends nothing: Dagster is asked again as
    long as it lives.
    """
    patience.view.say(patience.ask(work.begin))
    start()
    for launch in range(1, _LAUNCHES + 1):
        if work.followed:
            _watch(work, patience)
        given_up = patience.ask(work.given_up)
        for sentence in given_up:
            patience.view.warn(sentence)
        if not (given_up or work.deferred) or launch == _LAUNCHES:
            break
        if given_up:
            patience.watch(launch * _AGAIN_SECONDS)
        patience.view.say(patience.ask(work.begin))
    return patience.ask(partial(summarize, work))


def _watch(work: Backfill, patience: Patience) -> None:
    """Show the progress of a backfill until it ends."""
    # Often enough to watch, seldom enough that a large catalogue's keys are no load.
    interval = max(2.0, len(work.keys) / 2000)
    with patience.view.progress(len(work.keys)) as show:

        def ended() -> bool:
            now = work.progress()
            show(now)
            return work.ended(now)

        while not patience.ask(ended):
            patience.watch(interval)
