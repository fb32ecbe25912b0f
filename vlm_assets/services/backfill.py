"""A backfill of some partitions: which they are, its launch in Dagster, its progress, and how it ended."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict

from resources.dagster_names import NEVER_STARTED
from sensors.partition_history import PartitionHistory
from vlm_assets.assets.fingerprint import ANEW, KEEP
from vlm_assets.assets.partition_state import State
from vlm_assets.config.question_sets import config_of_runs, options_of, with_downstream
from vlm_assets.config.settings import Settings, of_env_file
from vlm_assets.services.command_error import CommandError
from vlm_assets.services.expected_cost import SetProgress, read_progress
from vlm_assets.services.status import Status, read_status
from vlm_assets.webserver.api import LAUNCHED_BY, STALE, DagsterApi
from vlm_assets.webserver.home import named_variables
from vlm_catalog.catalog import Catalog
from vlm_catalog.catalog_file import CatalogError
from vlm_catalog.ranges import PropertyRange
from vlm_durable.commands import command
from vlm_durable.wording import counted

if TYPE_CHECKING:
    from sensors.dagster_internals.events import CheckEvaluation, DagsterFacts
    from sensors.dagster_internals.runs import LaunchedBackfill
    from sensors.outlook import Outlook

SHOWN = 5
"""Partitions that did not end well, and checks that did not pass, that are told one by one."""

_FAILED = frozenset({State.FAILED, State.GIVEN_UP, State.REFUSED, State.DAMAGED, State.LOST})

_COMMITTED = frozenset({State.INTERRUPTED, State.FAILED, State.REFUSED, State.GIVEN_UP})
"""States with committed rows, where nothing is published."""

KeysOf = Callable[["DagsterFacts"], Sequence[str]]
"""Chooses the partitions of a backfill, once Dagster can be asked."""


@contextlib.contextmanager
def dagster_facts(settings: Settings) -> Iterator[DagsterFacts]:
    """What the sensors read, of this home's Dagster, whoever runs it. Raises CommandError, OSError."""
    import dagster as dg

    from sensors.dagster_internals.events import DagsterFacts

    named, file = named_variables(settings.dagster_home), of_env_file()
    # The Dagster that `serve` starts has these too.
    os.environ.update({name: file[name] for name in named & file.keys() if name not in os.environ})
    if lacking := sorted(named - os.environ.keys()):
        raise CommandError(
            f"{settings.dagster_home / 'dagster.yaml'} names {', '.join(lacking)}, and this shell has no such"
            " variable. Nothing was launched. Set it as the service has it, then do it again."
        )
    with contextlib.ExitStack() as opened:
        logging.getLogger().addFilter(_is_not_a_retry)
        opened.callback(logging.getLogger().removeFilter, _is_not_a_retry)
        instance = opened.enter_context(dg.DagsterInstance.from_config(str(settings.dagster_home)))
        yield DagsterFacts(instance, settings.names)


def _is_not_a_retry(record: logging.LogRecord) -> bool:
    """Drops what Dagster logs at each retry: `run` prints one line for the whole outage."""
    return not str(record.msg).startswith("Retrying failed database")


def all_keys(home: Path) -> list[str]:
    """Every partition of the catalogue. Raises CatalogError."""
    return [bounds.key for bounds in Catalog.open(home).ranges]


def known_keys(home: Path, keys: Sequence[str]) -> list[str]:
    """These partitions, each once. Raises CatalogError if the catalogue does not have one of them."""
    unknown = sorted(set(keys).difference(all_keys(home)))
    if unknown:
        raise CatalogError(
            f"{', '.join(unknown[:5])}: the catalogue in {home} has no such partition."
            f" {command('status', '--json')} lists them all."
        )
    return sorted(set(keys))


def failed_keys(home: Path, status: Status, dagster: DagsterFacts) -> list[str]:
    """Partitions whose last run failed, or whose files are not what they should be, in either asset."""
    keys, history = all_keys(home), PartitionHistory(status.assets)
    history.update(dagster)
    failed = {key for key, run in history.open_runs(dagster, frozenset(keys)) if run.ended_badly}
    failed.update(partition.key for partition in status.partitions if partition.state in _FAILED)
    return [key for key in keys if key in failed]


@dataclass(frozen=True)
class BackfillProgress:
    """The keys of a backfill by state, over all the assets: done means done in each of them.

    under_way: launched, most of them waiting for their turn. runs: runs that work at this moment.
    never_started: the run of each waited in vain for a process, which is no failure of the partition.
    properties, rate and seconds_left: of the question set that is furthest behind, properties done, how many
    a second, and how long the rest takes; None where no rate was measured.
    """

    done: frozenset[str]
    under_way: frozenset[str]
    failed: frozenset[str]
    runs: int
    never_started: frozenset[str] = frozenset()
    properties: int = 0
    rate: float | None = None
    seconds_left: float | None = None


class BackfillOptions(TypedDict, total=False):
    """How a backfill works on its partitions: see ``Backfill``."""

    run_config: Mapping[str, object]
    stale_too: bool
    retry_failed: bool


@dataclass
class Backfill:
    """The backfill of some partitions (``keys``), launched and followed from a terminal.

    api: launches. dagster: how the runs and partitions stand.
    """

    api: DagsterApi
    dagster: DagsterFacts
    settings: Settings
    keys: Sequence[str]
    run_config: Mapping[str, object] = field(default_factory=dict)
    """The config of each run that it launches."""
    stale_too: bool = False
    """Whether a partition that was made under other settings counts as work to do."""
    retry_failed: bool = False
    """Whether properties that failed are tried again in partitions that were never published."""
    followed: list[str] = field(default_factory=list)
    """Ids of the Dagster backfills that this one continues or has launched."""
    lacking: Mapping[str, Collection[str]] = field(default_factory=dict)
    """The assets to be made, for each partition that was not complete at the beginning."""
    made_again: frozenset[str] = frozenset()
    """Those whose new runs were not seen yet: Dagster still shows what was there before."""
    deferred: bool = False
    """Whether it has to begin again when these have ended: an asset waits for what it is made from."""

    def __post_init__(self) -> None:
        self.history = PartitionHistory(self.assets)
        self._sizes = {key: len(PropertyRange.from_key(key)) for key in self.keys}

    @property
    def assets(self) -> tuple[str, ...]:
        """The assets that it launches and follows."""
        return self.settings.computed_assets

    def begin(self) -> str:
        """Continue unfinished backfills, and launch one for the partitions that they lack. Says what it did.

        After an error it may be called again: it then finds a backfill whose launch was not answered.
        """
        self.followed.clear()
        self.deferred = False
        status = self.status()
        self.lacking = lacking = self._lacking(status)
        options = stale_options(self.assets, status.stale.settings, stale_too=self.stale_too)
        self.made_again = frozenset(lacking)
        if not self.keys:
            return "Nothing to do: there is no such partition."
        sentences = []
        if not lacking:
            sentences.append(
                f"Nothing to do: {len(self.keys)} of"
                f" {counted(len(self.keys), 'partitions are', 'partition is')} complete."
            )
        left = {key: set(assets) for key, assets in lacking.items()}
        for backfill in self.dagster.unfinished_backfills(self.assets):
            # One that was launched before a question set was added knows nothing of it.
            stale = backfill.tags.get(STALE)
            launched_keys = frozenset[str]().union(*backfill.keys.values())
            under_way = launched_keys & lacking.keys()
            if self.stale_too and stale != _in_words(options):
                # Its runs keep partitions that are stale now, or their option is unknown.
                under_way -= status.stale_keys
            if under_way:
                self.followed.append(backfill.id)
                for asset, made in backfill.keys.items():
                    for key in under_way & made:
                        left[key].discard(asset)
                sentences.append(
                    f"Going on with backfill {backfill.id}:"
                    f" {counted(len(under_way), 'partitions are', 'partition is')} left."
                )
            anew = launched_keys & status.stale_keys & frozenset(self.keys)
            if anew and not self.stale_too and stale != KEEP:
                sentences.append(
                    f"Backfill {backfill.id} was launched before to make"
                    f" {counted(len(anew), 'stale partitions')} anew, and goes on with that. Its page cancels"
                    f" it: {self.api.url}/runs/b/{backfill.id}."
                )
        retried = self._retried(status)
        launches: dict[tuple[tuple[str, ...], tuple[str, ...]], list[str]] = {}
        for key, assets in sorted(left.items()):
            # What another backfill makes is not there yet for those that are made from it.
            made_elsewhere = lacking[key] - assets
            launched = tuple(
                asset
                for asset in self.assets
                if asset in assets.difference(with_downstream(self.settings, made_elsewhere))
            )
            self.deferred |= len(launched) < len(assets)
            again = tuple(asset for asset in launched if asset in retried.get(key, ()))
            if launched:
                launches.setdefault((launched, again), []).append(key)
        for (launched, again), keys in launches.items():
            # Another start would keep what failed, and end as the last one did.
            config = config_of_runs(self.settings, {asset: {"retry_failed": True} for asset in again})
            sentences.append(
                self.launch(keys, options, config if again else self.run_config, assets=launched)
            )
        return " ".join(sentences)

    def _lacking(self, status: Status) -> dict[str, set[str]]:
        """What is to be made: of each of the partitions that are not complete, these assets.

        What is complete is not among them: its file would only be read and compared again.
        """
        keys = frozenset(self.keys)
        lacking: dict[str, set[str]] = {}
        for partition in status.partitions:
            is_stale = self.stale_too and partition.state is State.STALE
            if partition.key in keys and (is_stale or not partition.is_complete):
                lacking.setdefault(partition.key, set()).add(partition.asset)
        return {key: with_downstream(self.settings, assets) for key, assets in lacking.items()}

    def _retried(self, status: Status) -> dict[str, set[str]]:
        """The question sets, by partition, in which failed properties are tried again."""
        retried: dict[str, set[str]] = {}
        for partition in status.partitions if self.retry_failed else ():
            paths = self.settings.layout.asset(partition.asset).partition(partition.key)
            of_set = partition.images_left is not None and partition.state in _COMMITTED
            if of_set and not paths.published.exists():
                retried.setdefault(partition.key, set()).add(partition.asset)
        return retried

    def launch(
        self,
        keys: Collection[str],
        stale: Mapping[str, str],
        run_config: Mapping[str, object],
        *,
        assets: Sequence[str],
    ) -> str:
        """Launch a backfill of these partitions, these assets together. Says what it did.

        stale: for each asset, what its runs do with partitions that are stale by then. run_config: what else
        they are asked.
        """
        stale = {asset: option for asset, option in stale.items() if asset in assets}
        new = self.api.launch_backfill(
            assets,
            sorted(keys),
            title=counted(len(keys), "partitions"),
            tags={LAUNCHED_BY: "terminal", STALE: _in_words(stale)},
            run_config=with_stale(self.settings, run_config, stale),
        )
        self.followed.append(new)
        of_what = f" ({', '.join(assets)})" if len(assets) < len(self.assets) else ""
        return f"Launched backfill {new} of {len(keys)} of {counted(len(self.keys), 'partitions')}{of_what}."

    def progress(self) -> BackfillProgress:
        """The progress of the partitions."""
        from dagster import DagsterRunStatus

        self.history.update(self.dagster)
        keys = frozenset(self.keys)
        runs = self.history.open_runs(self.dagster, keys)
        failed = frozenset(key for key, run in runs if run.ended_badly)
        never_started = frozenset(key for key, run in runs if run.interrupted_by == NEVER_STARTED) & failed
        under_way = frozenset(key for key, run in runs if not run.finished)
        made = keys.intersection(*self.history.materialized.values()) - failed - under_way
        # What Dagster does not show as made was never there, or its new run began.
        self.made_again &= made
        done = made - self.made_again
        slowest = self._slowest_set(done)
        return BackfillProgress(
            done=done,
            under_way=under_way,
            failed=failed - never_started,
            runs=len(self.dagster.runs_in([DagsterRunStatus.STARTED])),
            never_started=never_started,
            properties=sum(slowest.done.get(key, 0) for key in self._sizes),
            rate=slowest.rate.per_second,
            seconds_left=slowest.seconds_left(self._sizes),
        )

    def _slowest_set(self, complete: Collection[str]) -> SetProgress:
        left = {key: assets for key, assets in self.lacking.items() if key not in complete}
        anew = {asset: [key for key, assets in left.items() if asset in assets] for asset in self.assets}
        progress = read_progress(self.settings, Catalog.open(self.settings.home), anew).values()
        return min(progress, key=lambda of_set: sum(of_set.done.values()))

    def status(self) -> Status:
        """The status of the home, as ``vlm-assets status`` shows it."""
        return read_status(self.settings, Catalog.open(self.settings.home))

    def ended(self, now: BackfillProgress) -> bool:
        """Whether Dagster has ended the backfills, so that nothing more will happen.

        The partitions that Dagster shows as done do not decide: one that is made again was done before.
        """
        # A failed run may be retried: only the backfill knows, and it is asked only when no run is under way.
        if now.under_way:
            return False
        unfinished = any(backfill.unfinished for backfill in self._read_followed())
        if unfinished:
            # Dagster launches nothing of it while its definitions do not load, and does not say so.
            self.api.definitions_loaded()
        return not unfinished

    def given_up(self) -> list[str]:
        """Why Dagster gave up backfills that have ended, a sentence each.

        Its daemon reads new ranges some seconds after the webserver, and gives up a backfill of those that it
        has not read yet.
        """
        return [
            f"Dagster gave up backfill {backfill.id}: {backfill.error}"
            for backfill in self._read_followed()
            if backfill.error
        ]

    def _read_followed(self) -> list[LaunchedBackfill]:
        backfills = (self.dagster.backfill(backfill_id) for backfill_id in self.followed)
        return [backfill for backfill in backfills if backfill is not None]


def stale_options(assets: Sequence[str], settings: Mapping[str, str], *, stale_too: bool) -> dict[str, str]:
    """The option of runs for stale partitions, by asset: to keep them, or the settings to make them for.

    settings: the digest of each asset's present settings; an unknown one is missing.
    """
    return {asset: settings.get(asset, ANEW) if stale_too else KEEP for asset in assets}


def with_stale(
    settings: Settings, run_config: Mapping[str, object], stale: Mapping[str, str]
) -> dict[str, object]:
    """Add the option for stale partitions of each asset to a run config."""
    options = {asset: options_of(settings, run_config, asset) for asset in stale}
    return config_of_runs(settings, {asset: {**options[asset], "stale": stale[asset]} for asset in stale})


def _in_words(stale: Mapping[str, str]) -> str:
    return " ".join(dict.fromkeys(stale.values()))


@dataclass(frozen=True)
class BackfillSummary:
    """How a backfill of some partitions (``keys``) ended.

    left_keys: partitions that are not complete. outlooks: what becomes of partitions whose last run did not
    end well, and how many more there are. status: that of the home after the end.
    """

    keys: Sequence[str]
    left_keys: frozenset[str]
    outlooks: tuple[Sequence[Outlook], int]
    status: Status
    failing: Sequence[CheckEvaluation]

    @property
    def complete(self) -> int:
        """How many of the partitions are complete."""
        return len(frozenset(self.keys) - self.left_keys)

    @property
    def ok(self) -> bool:
        """Whether every partition is complete and no check failed with ERROR."""
        return self.complete == len(self.keys) and all(check.severity != "ERROR" for check in self.failing)


def summarize(work: Backfill) -> BackfillSummary:
    """Say how a backfill has ended.

    Raises ControlStateError, CatalogError, and what Dagster's database raises.
    """
    from sensors.outlook import outlooks

    dagster, history = work.dagster, work.history
    history.update(dagster)
    status = work.status()
    left_keys = status.keys_left(stale_too=work.stale_too)
    given_up = {partition.key for partition in status.partitions if partition.state is State.GIVEN_UP}
    return BackfillSummary(
        keys=work.keys,
        left_keys=left_keys,
        outlooks=outlooks(dagster, left_keys.intersection(work.keys), given_up, most=SHOWN),
        status=status,
        failing=[
            result
            for result in dagster.latest_results(work.assets)
            if (key := result.partition) is not None
            and key in work.keys
            # An earlier result is of a check that the partition was made again without.
            and result.storage_id > history.materialized[result.asset].get(key, 0)
        ],
    )
