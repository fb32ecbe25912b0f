"""The sensors of this home, built from the settings: what each of them watches, and its limits.

Here is the verdict on a published file, too. What a sensor decides is in ``sensors``, the retry schedule in
``retries.py``, and where alerts go in ``vlm_assets/services/alert_delivery.py``.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import dagster as dg

from resources.alerts.outbox import Outbox
from sensors.alerts import AlertScan, build_alerts_sensor
from sensors.cancels import Cancels
from sensors.catalog_watch import CatalogWatch, build_catalog_watch_sensor
from sensors.device_health import DeviceWatcher
from sensors.leases_after_end import LeasesAfterEnd
from sensors.left_copies import LeftCopies, build_left_copies_sensor
from sensors.new_ranges import NewRanges, build_new_ranges_sensor
from sensors.progress_judge import ProgressLimits
from sensors.published_file_drift import DriftWatcher, build_published_file_drift_sensor
from sensors.reconciliation import TagsOf, build_reconciliation_sensor
from sensors.run_end import RunEnder
from sensors.ticks import Ticks
from sensors.worker_health import HealthWatcher, build_worker_health_sensor
from vlm_assets.assets.dagster_versions import tags_of_found
from vlm_assets.assets.fingerprint import Meanings, digest_of
from vlm_assets.assets.partition_state import PartitionState, PartitionStates
from vlm_assets.automation.retries import RETRY_RUNS
from vlm_assets.config.engine_choice import chosen_engine
from vlm_assets.config.extensions import installed, launcher_of
from vlm_assets.config.question_sets import looked_at_by
from vlm_assets.config.resource_settings import build_gpu, control_state, prepared_runs
from vlm_assets.config.settings import Settings
from vlm_assets.services.alert_delivery import build_delivery, pages_address
from vlm_assets.services.expected_cost import ExpectedCost, heaviest_first
from vlm_assets.services.store_looks import READ_EACH_LOOK, store_looks
from vlm_assets.webserver.api import reload_running
from vlm_assets.webserver.home import POOL
from vlm_catalog.catalog import Catalog, CatalogMissingError, catalog_path
from vlm_catalog.catalog_copies import check_copies, has_catalog, last_put_back, note_repair
from vlm_catalog.catalog_file import CatalogError
from vlm_catalog.ingest import IngestBusyError, close_tail
from vlm_catalog.stored_catalog import put_back_catalog
from vlm_catalog.withdrawn_ids import restore_withdrawn
from vlm_durable.files.layout import AssetFolders
from vlm_durable.mirror.bucket import StoreError
from vlm_durable.state.pause import pause_of
from vlm_durable.state.workers import Workers
from vlm_durable.versions.findings import Finding, FindingKind
from vlm_durable.versions.published import Verification
from vlm_durable.versions.verified_files import VerifiedFiles
from vlm_durable.wording import counted
from vlm_engine.devices.find import DriverNvml
from vlm_engine.devices.health import HealthCheck
from vlm_engine.server.running_server import PATIENCE_SECONDS

_STORE_SECONDS = 10.0
"""How long one tick looks at the store; the next tick goes on."""

_UNTOLD = FindingKind.EARLIER_VERSION
"""Readers and a restoration do without the earlier versions."""


@dataclass(frozen=True)
class DriftLooks:
    """The looks at one asset's partitions."""

    settings: Settings
    asset: AssetFolders
    keys: Sequence[str]
    meanings: Meanings
    _opened: dict[tuple[int, int], Catalog] = field(default_factory=dict)
    _stored: dict[tuple[str, str], str] = field(default_factory=dict)
    """What was wrong in the store at the last look."""

    @property
    def made_from(self) -> tuple[AssetFolders, ...]:
        """The assets whose published rows this one follows from."""
        if self.asset == self.settings.embeddings:
            return (self.settings.descriptions,)
        assets_above = looked_at_by(self.settings, self.asset.name)
        return tuple(map(self.settings.layout.asset, assets_above))

    def check_store(self) -> tuple[Mapping[str, str], list[str]]:
        """List the objects in the store, ask for what changed, read a few, and put back what was wrong.

        Returns a sentence for each partition with a problem, and sentences about what was done or failed.
        """
        looks = store_looks(self.settings).get(self.asset.name)
        if looks is None:
            return {}, []
        try:
            notes = looks.inspect(seconds=_STORE_SECONDS, read=READ_EACH_LOOK, mend=True)
        except StoreError as error:
            notes = [str(error)]
        troubles = looks.troubles()
        self._stored.clear()
        self._stored.update({(self.asset.name, key): trouble for key, trouble in troubles.items()})
        return troubles, notes

    def doubtful(self) -> frozenset[str]:
        """The partitions whose file was verified too long ago, or was found damaged by whoever read it."""
        return VerifiedFiles(self.settings.state_directory).doubtful(self.asset.name)

    def expectation(self) -> str:
        """Digest of the catalogue's version and the settings."""
        catalog = self._catalog()
        meaning = self.meanings.of_asset(self.asset.name).parts
        return digest_of([catalog.catalog_id, catalog.header.sequence, dict(meaning)])

    @contextlib.contextmanager
    def verifier(self) -> Iterator[Callable[[str], Verification | None]]:
        """Gives verdicts by key. A file is read if it changed, or is in doubt, since it was verified."""
        verified = VerifiedFiles(self.settings.state_directory, seconds=math.inf)
        states = PartitionStates(
            self.settings, self._catalog(), meanings=self.meanings, verified=verified, stored=self._stored
        )
        try:
            yield lambda key: self._verdict(states.read(self.asset.name, key))
        finally:
            verified.save()

    def _verdict(self, state: PartitionState) -> Verification | None:
        if any(finding.kind is FindingKind.PENDING for finding in state.findings):
            return None
        findings = (finding for finding in state.findings if finding.kind is not _UNTOLD)
        with_costs = tuple(self._with_cost(state, finding) for finding in findings)
        return Verification(state.key, state.record, with_costs)

    def _with_cost(self, state: PartitionState, finding: Finding) -> Finding:
        """The finding of a stale partition, with what making it anew costs."""
        if finding.kind is not FindingKind.STALE:
            return finding
        images = ExpectedCost.from_catalog(self.settings, self._catalog()).whole.get(state.key, 0)
        cost = f"{counted(state.expected, 'properties')} with {counted(images, 'images')} to describe"
        if self.asset == self.settings.embeddings:
            cost = f"{counted(state.expected, 'descriptions')} to embed"
        step = f"{finding.next_step} That costs {cost}; nothing else does it. It stays readable as it is."
        return replace(finding, next_step=step)

    def _catalog(self) -> Catalog:
        """The catalogue as it stands, opened anew where its file has changed."""
        stat = catalog_path(self.settings.home).stat()
        at = (stat.st_ino, stat.st_mtime_ns)
        if at not in self._opened:
            self._opened.clear()
            self._opened[at] = Catalog.open(self.settings.home)
        return self._opened[at]


_SERVER_SLACK_SECONDS = 180.0
"""Added to the start of a model server: the server that held its device before must end first."""

_SILENCES = 4.0
"""Stuck limit of a server: four token timeouts. The engine itself gives the server up after three."""

_USUAL_INTERVAL = 30.0
_START_SECONDS = 1200.0
"""How long a run imports, and reads its model and its partition, before it may wait for a model server."""


def build_sensors(settings: Settings, keys: Sequence[str]) -> list[dg.SensorDefinition]:
    """The sensors that watch workers, devices, files, the catalogue, and what Dagster believes of them.

    keys: all partitions. With VLM_ASSETS_RUN_NEW_RANGES_AFTER_HOURS, the sensor that runs new ones is there
    too.
    """
    state = control_state(settings)
    workers, outbox, ticks = Workers(state), Outbox(state), Ticks(state, settings.names)
    assets = settings.partitioned_assets
    drift = build_drift_watcher(settings, keys, workers, outbox)
    catalog = CatalogWatch(
        compare=lambda: _compare_catalogs(settings),
        last_put_back=lambda: last_put_back(settings.home),
        errors=CatalogError,
        outbox=outbox,
    )
    sensors = [
        build_reconciliation_sensor(
            assets, keys, workers=workers, ticks=ticks, tags_of=build_tags_of(settings)
        ),
        *_liveness_sensors(settings, assets, ticks),
        build_published_file_drift_sensor(drift, ticks=ticks),
        build_catalog_watch_sensor(catalog, ticks=ticks),
    ]
    if settings.run_new_ranges_after_hours is not None:
        new_ranges = NewRanges(
            assets=settings.computed_assets,
            keys=tuple(keys),
            close=lambda now: close_old_tail(settings, now=now),
            untouched=lambda keys: _untouched(settings, keys),
            heaviest_first=heaviest_first(settings),
            paused=lambda: pause_of(state) is not None,
            cap=RETRY_RUNS,
        )
        sensors.append(build_new_ranges_sensor(new_ranges, ticks=ticks))
    return sensors


def build_tags_of(settings: Settings) -> TagsOf:
    """The tags by which Dagster compares the versions of what is found on disk, under these settings."""
    meanings = Meanings.from_settings(settings)
    return lambda asset, record, newest_event: tags_of_found(
        record, meanings.of_asset(asset).parts, settings.names, newest_event=newest_event
    )


def _liveness_sensors(
    settings: Settings, assets: Sequence[AssetFolders], ticks: Ticks
) -> list[dg.SensorDefinition]:
    """The sensors of this machine's workers and devices; none where an extension has its own."""
    if launcher_of(settings).has_sensors:
        return []
    health = build_health_watcher(settings)
    gpu = build_gpu(settings)
    leases = LeasesAfterEnd(
        Path(gpu.leases_directory), health.ender, silence=health.limits.loading, home=gpu.home
    )
    watching = [
        build_worker_health_sensor(
            health,
            leases,
            pool=None if settings.names.prefix else POOL,
            ticks=ticks,
            prepared=lambda: prepared_runs(settings),
        )
    ]
    if settings.mirror.keeps_copies:
        left_copies = LeftCopies(
            assets,
            settings.mirror,
            lambda: {
                (worker.asset, worker.partition) for worker in Workers(control_state(settings)).living()
            },
        )
        watching.append(build_left_copies_sensor(left_copies, ticks=ticks))
    return watching


def build_health_watcher(settings: Settings) -> HealthWatcher:
    """The watcher of the workers and devices of this machine."""
    state, gpu = control_state(settings), build_gpu(settings)
    outbox = Outbox(state)
    devices = DeviceWatcher(
        outbox, gpu.left_out_devices(), gpu.find, HealthCheck(DriverNvml()).judge_all, gpu.node
    )
    ender = RunEnder(outbox, gpu.left_out_devices(), grace=settings.grace_seconds)
    return HealthWatcher(Workers(state), outbox, devices, ender, worker_limits(settings))


def build_alerts(
    settings: Settings, watched: Iterable[dg.SensorDefinition], *, schedules: Mapping[str, float]
) -> dg.SensorDefinition:
    """The alerts sensor. Raises SettingsError.

    watched, schedules: the other sensors and schedules, whose silence is noticed; seconds between two ticks.
    """
    state = control_state(settings)
    delivery = build_delivery(settings)
    names = settings.names
    intervals = {sensor.name: float(sensor.minimum_interval_seconds or _USUAL_INTERVAL) for sensor in watched}
    by_hand = tuple(asset for extension in installed() for asset in extension.assets_by_hand(settings))
    scan = AlertScan(
        delivery.outbox,
        assets=(*(asset.name for asset in settings.partitioned_assets), *by_hand),
        by_hand=by_hand,
        watched={names.plain(name): seconds for name, seconds in {**intervals, **schedules}.items()},
        paused=lambda: pause_of(state) is not None,
        working=lambda: {worker.run_id for worker in Workers(state).living()},
        silence=settings.device_wait_seconds + _START_SECONDS,
        names=names,
    )
    return build_alerts_sensor(scan, delivery, address=lambda: pages_address(settings))


def worker_limits(settings: Settings) -> ProgressLimits:
    """How long a worker may make no progress.

    A worker is not stuck while it waits for its model server: the engine itself gives a silent server up.
    """
    loading = settings.model_load_seconds
    least = ProgressLimits.least
    if chosen_engine(settings).engine == "server":
        # The engine gives a server up that is alive and silent, and starts another.
        least = max(least, _SILENCES * settings.server_token_seconds)
        wait = settings.model_load_seconds if settings.server_url is None else PATIENCE_SECONDS
        loading = max(loading, wait + _SERVER_SLACK_SECONDS)
    return ProgressLimits(least=least, most=settings.stuck_seconds, loading=loading)


def build_drift_watcher(
    settings: Settings, keys: Sequence[str], workers: Workers, outbox: Outbox
) -> DriftWatcher:
    """The watcher of all published files of a home."""
    meanings = Meanings.from_settings(settings)
    looks = [DriftLooks(settings, asset, keys, meanings) for asset in settings.partitioned_assets]
    return DriftWatcher(looks, workers, outbox)


def _compare_catalogs(settings: Settings) -> None:
    """Put a damaged copy of the catalogue right, the store's too. Without a catalogue it does nothing."""
    home = settings.home
    if not has_catalog(home):
        return
    check_copies(home)
    if (restored := restore_withdrawn(home)) is not None:
        note_repair(home, "The list of withdrawn ids was restored", restored)
    with contextlib.suppress(StoreError):
        put_back_catalog(home, settings.mirror)


def close_old_tail(settings: Settings, *, now: float) -> str | None:
    """Make a partition of the tail if its first property has waited long enough; a sentence, or None.

    now: unix seconds. Raises CatalogError, OSError.
    """
    hours = settings.run_new_ranges_after_hours
    try:
        tail = Catalog.open(settings.home).header.tail
        if hours is None or tail is None or now - tail.since < hours * 3600.0:
            return None
        closed = close_tail(settings.home, settings.mirror)
    except (CatalogMissingError, IngestBusyError):
        return None
    if closed is None:
        return None
    waited = (
        f"The last {counted(len(closed), 'properties have', 'property has')} waited long enough: it is"
        f" partition {closed.key} now."
    )
    return f"{waited} {reload_running(settings.dagster_home)}"


def _untouched(settings: Settings, keys: Collection[str]) -> list[str]:
    """The partitions that no asset has published or begun, and that no person cancelled."""
    touched = set(Cancels(control_state(settings)).read())
    for asset in settings.partitioned_assets:
        touched |= asset.touched_keys()
    return [key for key in keys if key not in touched]
