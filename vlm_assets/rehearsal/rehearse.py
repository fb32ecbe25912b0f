"""A rehearsal: a home of its own, faults by a seed, the simulation, and what came of it.

What lives here: putting the parts together, and the outcome. What does not: what happens
(``simulation.py``), arguments and output (``cli/rehearse.py``).
"""

from __future__ import annotations

import random
import shutil
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow as pa
import sqlalchemy as sa

from resources.state.tables import alert_events
from vlm_assets.catalog.catalog import Catalog, catalog_path
from vlm_assets.catalog.catalog_copies import publish_catalog
from vlm_assets.catalog.catalog_file import SCHEMA, CatalogHeader, CatalogWriter
from vlm_assets.catalog.ranges import cut_ranges
from vlm_assets.rehearsal.fault_plan import Fault, draw_faults
from vlm_assets.rehearsal.simulation import (
    DAY,
    LOAD_SECONDS,
    PUBLISH_SECONDS,
    START_SECONDS,
    Simulation,
    Span,
)
from vlm_assets.settings import Settings

_START = 1_800_000_000.0
"""When a rehearsal begins, in unix seconds: always the same, so that a seed replays exactly."""

_MOST_DAYS = 30.0
"""Beyond twice the planned time, after which a rehearsal is over whatever is left."""

_MEAN_IMAGES = 9.5


@dataclass(frozen=True)
class Scenario:
    """What is rehearsed. days: that the run would take if nothing happened. faults: None: four a day.

    properties: of a made-up catalogue; None: the catalogue of the home.
    """

    seed: int = 1
    days: float = 25.0
    devices: int = 10
    nodes: int = 4
    faults: int | None = None
    properties: int | None = None


@dataclass(frozen=True)
class Rehearsal:
    """What came of it. days_simulated: until the last partition was published. unfinished: partitions.

    lost: rows that a process had promised and the next start did not find. recomputed: rows that were
    computed again. alerts: told, by kind in ``alerts_by_kind``. seconds: that the rehearsal took.
    """

    seed: int
    properties: int
    partitions: int
    devices: int
    nodes: int
    lost: int
    doubled: int
    recomputed: int
    alerts: int
    days_planned: float
    days_simulated: float
    unfinished: int
    deaths: int
    by_hand: int
    faults: Mapping[str, int]
    alerts_by_kind: Mapping[str, int]
    open_alerts: Mapping[str, str]
    seconds: float
    spans: list[Span] = field(repr=False)
    struck: list[Fault] = field(repr=False)
    progress: list[tuple[float, int]] = field(repr=False)

    @property
    def nothing_is_lost(self) -> bool:
        """Whether each property came out exactly once."""
        return not (self.lost or self.doubled or self.unfinished)


def rehearse(settings: Settings, scenario: Scenario, *, began: float | None = None) -> Rehearsal:
    """Rehearse a run under these settings in a home that is thrown away. Raises CatalogError.

    Nothing of the settings' own home is changed: only its catalogue is read.
    """
    began = time.monotonic() if began is None else began
    with _home(settings, scenario) as own:
        catalog = Catalog.open(own.home)
        seconds = scenario.days * DAY
        count = round(4 * scenario.days) if scenario.faults is None else scenario.faults
        chance = random.Random(scenario.seed)  # noqa: S311 - repeatable, not secret
        faults = draw_faults(chance, count=count, seconds=seconds)
        simulation = Simulation(
            own,
            seed=scenario.seed,
            devices=scenario.devices,
            nodes=min(scenario.nodes, scenario.devices),
            rate=_rate(own, catalog, scenario),
            start=_START,
            faults=faults,
            most_seconds=2 * seconds + _MOST_DAYS * DAY,
        )
        found = simulation.run()
        ended = max((at for at, _ in found.progress), default=simulation.clock.now)
        raised = _alerts(simulation)
        lost, doubled = _compared(own, catalog)
        return Rehearsal(
            seed=scenario.seed,
            properties=catalog.rows,
            partitions=len(catalog.ranges),
            devices=scenario.devices,
            nodes=scenario.nodes,
            lost=found.lost + lost,
            doubled=found.doubled + doubled,
            recomputed=found.recomputed,
            alerts=sum(raised.values()),
            days_planned=scenario.days,
            days_simulated=round((ended - _START) / DAY, 3),
            unfinished=len(catalog.ranges) - found.published,
            deaths=found.deaths,
            by_hand=found.by_hand,
            faults=dict(sorted(Counter(one.kind.value for one in faults).items())),
            alerts_by_kind=dict(sorted(raised.items())),
            open_alerts=dict(simulation.open_alerts),
            seconds=round(time.monotonic() - began, 1),
            spans=found.spans,
            struck=faults,
            progress=found.progress,
        )


def _rate(settings: Settings, catalog: Catalog, scenario: Scenario) -> float:
    """Images a second of a device, so that all takes the planned days where nothing happens."""
    images = int(np.minimum(catalog.image_counts(), settings.max_images).sum())
    beside = len(catalog.ranges) * (START_SECONDS + LOAD_SECONDS + PUBLISH_SECONDS)
    seconds = scenario.days * DAY * scenario.devices - beside
    if seconds <= 0:
        raise ScenarioError(
            f"{len(catalog.ranges)} partitions start for longer than {scenario.days:g} days on"
            f" {scenario.devices} devices: give more days, or larger partitions (VLM_ASSETS_RANGE_SIZE)."
        )
    return images / seconds


class ScenarioError(ValueError):
    """What cannot be rehearsed; the message says what to change."""


@contextmanager
def _home(settings: Settings, scenario: Scenario) -> Iterator[Settings]:
    """Settings with a home of its own and a catalogue in it."""
    with tempfile.TemporaryDirectory(prefix="vlm-assets-rehearsal-") as folder:
        own = settings.model_copy(update={"home": Path(folder), "store": None, "state_url": None})
        if scenario.properties is None:
            known = Catalog.open(settings.home)
            catalog_path(own.home).parent.mkdir()
            shutil.copyfile(known.path, catalog_path(own.home))
        else:
            publish_catalog(own.home, _made_up(scenario, settings.range_size or 1000))
        yield own


def _made_up(scenario: Scenario, range_size: int) -> bytes:
    """A catalogue of so many properties, with nine or ten images on average."""
    chance = np.random.default_rng(scenario.seed)
    count = scenario.properties or 0
    images = np.clip(chance.poisson(_MEAN_IMAGES, count), 1, None)
    writer = CatalogWriter()
    for one in cut_ranges(0, count, range_size):
        offsets = np.concatenate([[0], np.cumsum(images[one.start : one.stop])]).astype(np.int32)
        uris = pa.array(["i"] * int(offsets[-1]))
        sizes = pa.array(np.full(int(offsets[-1]), 200_000, np.int64))
        ordinals = range(one.start, one.stop)
        columns = {
            "ordinal": pa.array(ordinals, pa.int64()),
            "property_id": pa.array([f"property-{n:08d}" for n in ordinals]),
            "image_uris": pa.ListArray.from_arrays(pa.array(offsets), uris),
            "image_bytes": pa.ListArray.from_arrays(pa.array(offsets), sizes),
            "inputs_digest": pa.array(["0"] * len(one)),
        }
        writer.add(one, pa.table(columns, schema=SCHEMA))
    name = str(uuid.UUID(int=scenario.seed))
    return writer.finish(CatalogHeader(name, 1, "images", range_size, (), ()))


def _alerts(simulation: Simulation) -> Counter[str]:
    """How many alerts of each kind were told."""
    query = (
        sa.select(alert_events.c.kind, sa.func.count())
        .where(alert_events.c.what == "raised")
        .group_by(alert_events.c.kind)
    )
    raised: Counter[str] = Counter()
    for kind, count in simulation.state.read(lambda connection: connection.execute(query).all()):
        raised[kind] = count
    return raised


def _compared(settings: Settings, catalog: Catalog) -> tuple[int, int]:
    """Properties of published partitions that are missing from their files, and those that come twice."""
    import duckdb

    keys = settings.descriptions.published_keys()
    if not keys:
        return 0, 0
    files = str(settings.descriptions.published / "*.parquet")
    found = duckdb.execute(
        "select count(*), count(distinct property_id) from read_parquet(?)", [files]
    ).fetchone()
    rows, distinct = found if found is not None else (0, 0)
    wanted = sum(len(one) for one in catalog.ranges if one.key in set(keys))
    return wanted - distinct, rows - distinct
