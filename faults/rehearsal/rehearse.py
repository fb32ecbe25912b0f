"""A rehearsal: a home of its own, faults by a seed, the simulation, and what came of it.

``simulation.py`` has what happens.
"""

from __future__ import annotations

import io
import json
import math
import random
import shutil
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pyarrow as pa
import sqlalchemy as sa
import typer

from faults.rehearsal.fault_plan import Fault, draw_faults
from faults.rehearsal.simulation import BASE_SECONDS, DAY, Findings, Simulation
from vlm_assets.commands.terminal import AsJson, Home, chosen_settings, say, say_as_json
from vlm_assets.config.resource_settings import build_gpu, build_vision_language_model
from vlm_assets.config.settings import Settings
from vlm_assets.services.command_error import CommandError
from vlm_assets.services.expected_cost import ExpectedCost
from vlm_assets.services.measurement import Measurement, current_measurement, read_measurements
from vlm_assets.services.pace import Pace
from vlm_assets.services.progress import doing
from vlm_catalog.catalog import Catalog
from vlm_catalog.catalog_copies import publish_catalog
from vlm_catalog.catalog_file import SCHEMA, CatalogHeader, CatalogWriter
from vlm_catalog.ranges import cut_ranges
from vlm_durable.commands import command
from vlm_durable.files.files import write_replacing
from vlm_durable.state.tables import alert_events
from vlm_durable.wording import UNITS, counted, duration

_START = 1_800_000_000.0
"""When a rehearsal begins, in unix seconds: always the same, so that a seed replays exactly."""

_MOST_DAYS = 30.0
"""Beyond twice the planned time, after which a rehearsal is over whatever is left."""

_MEAN_IMAGES = 9.5

_OF_THE_PICTURE = frozenset({"spans", "struck", "progress"})

_DAYS, _DEVICES, _NODES = 25.0, 10, 4
"""Of a run of which nothing was measured."""


@dataclass(frozen=True)
class Scenario:
    """What is rehearsed. faults: None: four a day. properties: of a made-up catalogue; None: the home's own.

    days: that the run takes if nothing happens; None: what the plan says, from what was measured. devices,
    nodes: None: as this machine has them, where something was measured; else 10 and 4 are assumed.
    """

    seed: int = 1
    days: float | None = None
    devices: int | None = None
    nodes: int | None = None
    faults: int | None = None
    properties: int | None = None


@dataclass(kw_only=True)
class Rehearsal(Findings):
    """What came of it. days_simulated: until the last partition was published. unfinished: partitions.

    alerts: told, by kind in ``alerts_by_kind``. seconds: that the rehearsal took. assumed: whether nothing
    was measured and nobody said on how many devices or machines it runs.
    """

    seed: int
    properties: int
    partitions: int
    devices: int
    nodes: int
    assumed: bool
    alerts: int
    days_planned: float
    days_simulated: float
    unfinished: int
    faults: Mapping[str, int]
    alerts_by_kind: Mapping[str, int]
    open_alerts: Mapping[str, str]
    seconds: float
    struck: list[Fault]

    def as_json(self) -> dict[str, Any]:
        """All but what only the picture shows."""
        return {name: value for name, value in vars(self).items() if name not in _OF_THE_PICTURE}

    @property
    def nothing_is_lost(self) -> bool:
        """Whether each property came out exactly once."""
        return not (self.lost or self.doubled or self.unfinished)

    def took(self) -> str:
        """How long it took against the plan, for people."""
        took, planned = (duration(days * DAY) for days in (self.days_simulated, self.days_planned))
        return f"{took} against {planned} without faults ({self.days_simulated / self.days_planned - 1:+.1%})"


def rehearse(
    settings: Settings, scenario: Scenario, each_day: Callable[[Rehearsal], None] = lambda result: None
) -> Rehearsal:
    """Rehearse a run under these settings in a home that is thrown away. Raises CatalogError.

    Nothing of the settings' own home is changed: only its catalogue is read. each_day: is given the result so
    far after each simulated day.
    """
    began = time.monotonic()
    with _home(settings, scenario) as own:
        catalog = Catalog.open(own.home)
        pace, seconds, devices, nodes, assumed = _planned(settings, own, catalog, scenario)
        count = round(4 * seconds / DAY) if scenario.faults is None else scenario.faults
        chance = random.Random(scenario.seed)
        faults = draw_faults(chance, count=count, seconds=seconds)

        def result() -> Rehearsal:
            findings = simulation.findings
            ended = max((at for at, _ in findings.progress), default=simulation.clock.now)
            raised_alerts = sa.select(alert_events.c.kind).where(alert_events.c.what == "raised")
            raised = Counter(
                simulation.state.read(lambda connection: connection.scalars(raised_alerts).all())
            )
            return Rehearsal(
                **vars(findings),
                seed=scenario.seed,
                properties=catalog.rows,
                partitions=len(catalog.ranges),
                devices=devices,
                nodes=nodes,
                assumed=assumed,
                alerts=sum(raised.values()),
                days_planned=round(seconds / DAY, 6),
                days_simulated=round((ended - _START) / DAY, 6),
                unfinished=len(catalog.ranges) - findings.published,
                faults=dict(sorted(Counter(fault.kind.value for fault in faults).items())),
                alerts_by_kind=dict(sorted(raised.items())),
                open_alerts=dict(simulation.open_alerts),
                seconds=round(time.monotonic() - began, 1),
                struck=faults,
            )

        simulation = Simulation(
            own,
            seed=scenario.seed,
            devices=devices,
            nodes=nodes,
            pace=pace,
            start=_START,
            faults=faults,
            most_seconds=2 * seconds + _MOST_DAYS * DAY,
            each_day=lambda: each_day(result()),
        )
        simulation.run()
        lost, doubled = _compared(own, catalog)
        simulation.findings.lost += lost
        simulation.findings.doubled += doubled
        return result()


def _planned(
    settings: Settings, own: Settings, catalog: Catalog, scenario: Scenario
) -> tuple[Pace, float, int, int, bool]:
    """What runs take, what all take without faults in seconds, devices, nodes; whether these are assumed."""
    measured, measured_devices = _measured(settings)
    devices = scenario.devices or (_DEVICES if measured is None else measured_devices)
    default_nodes = math.ceil(devices / measured_devices) if measured is not None else _NODES
    nodes = min(scenario.nodes or default_nodes, devices)
    assumed = measured is None and None in (scenario.devices, scenario.nodes)
    images = list(ExpectedCost.from_catalog(own, catalog).whole.values())
    if scenario.days is None and measured is not None:
        pace = Pace.from_measurement(measured)
        return pace, pace.seconds(images, devices, machines=nodes), devices, nodes, assumed
    if scenario.days is None and scenario.properties is None:
        raise CommandError(
            "Nothing is measured under these settings, so nobody knows how long the run takes:"
            f" {command('plan')} measures. Or give --days."
        )
    seconds = (scenario.days or _DAYS) * DAY
    beside = len(images) * BASE_SECONDS
    if seconds * devices <= beside:
        raise CommandError(
            f"{counted(len(images), 'partitions')} start for longer than {seconds / DAY:g} days on"
            f" {counted(devices, 'devices')}: give more days, or larger partitions (VLM_ASSETS_RANGE_SIZE)."
        )
    each = (seconds * devices - beside) / sum(images)
    return Pace(BASE_SECONDS, each, 0.0, 0.0, 1, between_seconds=0.0), seconds, devices, nodes, assumed


def _measured(settings: Settings) -> tuple[Measurement | None, int]:
    """What was measured under the settings, and the usable devices of this machine."""
    if not read_measurements(settings):
        return None, 1
    gpu = build_gpu(settings)
    return current_measurement(settings, build_vision_language_model(settings), gpu), max(
        1, len(gpu.usable())
    )


@contextmanager
def _home(settings: Settings, scenario: Scenario) -> Iterator[Settings]:
    """Settings with a home of its own and a catalogue in it."""
    with tempfile.TemporaryDirectory(prefix="vlm-assets-rehearsal-") as folder:
        alone = {"store": None, "state_url": None, "ray_address": None}
        own = settings.model_copy(update={"home": Path(folder), **alone})
        if scenario.properties is None:
            publish_catalog(own.home, Catalog.open(settings.home).path.read_bytes())
        else:
            publish_catalog(own.home, _made_up(scenario, settings.range_size or 1000))
        yield own


def _made_up(scenario: Scenario, range_size: int) -> bytes:
    """A catalogue of so many properties, with nine or ten images on average."""
    chance = np.random.default_rng(scenario.seed)
    count = scenario.properties or 0
    images = np.clip(chance.poisson(_MEAN_IMAGES, count), 1, None)
    writer = CatalogWriter()
    for property_range in cut_ranges(0, count, range_size):
        offsets = np.concatenate([[0], np.cumsum(images[property_range.start : property_range.stop])]).astype(
            np.int32
        )
        uris = pa.array(["i"] * int(offsets[-1]))
        sizes = pa.array(np.full(int(offsets[-1]), 200_000, np.int64))
        ordinals = range(property_range.start, property_range.stop)
        columns = {
            "ordinal": pa.array(ordinals, pa.int64()),
            "property_id": pa.array([f"property-{n:08d}" for n in ordinals]),
            "image_uris": pa.ListArray.from_arrays(pa.array(offsets), uris),
            "image_bytes": pa.ListArray.from_arrays(pa.array(offsets), sizes),
            "inputs_digest": pa.array(["0"] * len(property_range)),
        }
        writer.add(property_range, pa.table(columns, schema=SCHEMA))
    name = str(uuid.UUID(int=scenario.seed))
    return writer.finish(CatalogHeader(name, 1, "images", range_size, (), ()))


def _compared(settings: Settings, catalog: Catalog) -> tuple[int, int]:
    """Properties of published partitions that are missing from their files, and those that come twice."""
    import duckdb

    keys = settings.descriptions.published_keys()
    if not keys:
        return 0, 0
    files = str(settings.descriptions.published / "*.parquet")
    with duckdb.connect() as connection:
        query = "select count(*), count(distinct property_id) from read_parquet(?)"
        ((rows, distinct),) = connection.execute(query, [files]).fetchall()
    expected = sum(
        len(property_range) for property_range in catalog.ranges if property_range.key in set(keys)
    )
    return expected - distinct, rows - distinct


_COLOURS = {
    "published": "#009e73",
    "verified": "#56b4e9",
    "failed": "#d55e00",
    "killed": "#cc79a7",
    "interrupted": "#f0c842",
}
_INK = "#262a30"


def draw_timeline(rehearsal: Rehearsal) -> bytes:
    """The picture as PNG. Time since the start from left to right; a line for each device."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(
        figsize=(12, 4.2 + 0.22 * rehearsal.devices), dpi=100, facecolor="#fcfbf8", layout="constrained"
    )
    FigureCanvasAgg(figure)
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=[2, max(1.0, 0.16 * rehearsal.devices)])
    start = min((span.start for span in rehearsal.spans), default=0.0)
    # The largest unit of which there are two.
    unit, unit_seconds = next(
        (span for span in UNITS if rehearsal.days_planned * DAY >= 2 * span[1]), UNITS[-1]
    )
    published = [((at - start) / unit_seconds, rows) for at, rows in rehearsal.progress]
    above.plot(*zip((0.0, 0.0), *published, strict=True), color=_COLOURS["published"], linewidth=2)
    above.plot(
        (0, rehearsal.days_planned * DAY / unit_seconds),
        (0, rehearsal.properties),
        color="#74787e",
        linestyle=":",
    )
    above.set_ylabel("properties published")
    above.set_title(
        f"Rehearsal, seed {rehearsal.seed}: {rehearsal.lost} lost, {rehearsal.doubled} doubled,"
        f" {rehearsal.recomputed:,} recomputed; {rehearsal.took()}",
        loc="left", color=_INK,
    )  # fmt: skip
    for fault in rehearsal.struck:
        for axes in (above, below):
            ends = fault.at + max(fault.seconds, 600)
            axes.axvspan(fault.at / unit_seconds, ends / unit_seconds, color="#d55e00", alpha=0.15, lw=0)
    devices = sorted({span.device for span in rehearsal.spans})
    for how, colour in _COLOURS.items():
        for number, device in enumerate(devices):
            bars = [
                ((span.start - start) / unit_seconds, (span.stop - span.start) / unit_seconds)
                for span in rehearsal.spans
                if span.device == device and span.how == how
            ]
            below.broken_barh(bars, (number - 0.4, 0.8), color=colour, label=how if not number else None)
    below.set_yticks(range(len(devices)), devices, size=8)
    below.set_xlabel(unit)
    figure.legend(*below.get_legend_handles_labels(), loc="outside lower left", ncols=6, fontsize=8)
    stream = io.BytesIO()
    figure.savefig(stream, format="png")
    return stream.getvalue()


program = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

_EXAMPLES = """\b
make rehearse                                                your catalogue, as long as the plan says
make rehearse ARGS='--days 25 --devices 10 --nodes 4'        the same on other machines
make rehearse ARGS='--properties 1350000 --seed 7'           a made-up one"""


@program.command(epilog=_EXAMPLES)
def rehearse_command(
    home: Home = None,
    seed: Annotated[
        int, typer.Option(min=0, help="Draws the faults; the same seed is replayed exactly.")
    ] = 1,
    days: Annotated[
        float | None,
        typer.Option(
            min=0.01, help="Days that it takes if nothing happens; default: what was measured says."
        ),
    ] = None,
    devices: Annotated[
        int | None,
        typer.Option(
            min=1, max=1000, help="GPUs in all; default: as here, or 10 where nothing was measured."
        ),
    ] = None,
    nodes: Annotated[
        int | None,
        typer.Option(min=1, max=1000, help="Machines that they are in; default: like this one, or 4 then."),
    ] = None,
    faults: Annotated[int | None, typer.Option(min=0, help="How many; default: four a day.")] = None,
    properties: Annotated[
        int | None, typer.Option(min=1, help="Of a made-up catalogue; default: the home's own.")
    ] = None,
    picture: Annotated[
        Path | None, typer.Option(help="Write the timeline as a picture (PNG) to this file.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Rehearse the run on a simulated clock, with faults by a seed.

    Real decisions and real journals. Without --days it takes what `vlm-assets plan` measured; a made-up
    catalogue takes 25 days on 10 devices where nothing was.
    Nothing of the home is changed. Exit code 1 if a row is lost or doubled, or a partition is left over.
    """
    scenario = Scenario(seed, days, devices, nodes, faults, properties)
    with _result_so_far() as each_day:
        doing("rehearsing the run, day by day")
        rehearsal = rehearse(chosen_settings(home), scenario, each_day)
        if picture is not None:
            picture.write_bytes(draw_timeline(rehearsal))
        if as_json:
            say_as_json(rehearsal.as_json())
        else:
            _show(rehearsal, picture)
    if not rehearsal.nothing_is_lost:
        raise typer.Exit(1)


@contextmanager
def _result_so_far() -> Iterator[Callable[[Rehearsal], None]]:
    """Gives what keeps a result in a file, whose place is said. The file goes when all went well."""
    files: list[Path] = []

    def keep(result: Rehearsal) -> None:
        if not files:
            files.append(Path(tempfile.mkdtemp(prefix="vlm-assets-rehearsed-")) / "rehearsal.json")
            say(f"The result so far is in {files[0]}, as of the last simulated day.", err=True)
        doing("rehearsing the run, day by day")
        write_replacing(files[0], json.dumps(result.as_json(), indent=2).encode())

    yield keep
    for file in files:
        shutil.rmtree(file.parent)


def _show(rehearsal: Rehearsal, picture: Path | None) -> None:
    say(
        f"{rehearsal.properties:,} properties in {counted(rehearsal.partitions, 'partitions')} on"
        f" {counted(rehearsal.devices, 'devices')} of {counted(rehearsal.nodes, 'machines')},"
        f" {counted(sum(rehearsal.faults.values()), 'faults')} (seed {rehearsal.seed})"
    )
    if rehearsal.faults:
        say("  " + ", ".join(f"{count} {kind}" for kind, count in rehearsal.faults.items()))
    if rehearsal.assumed:
        say("Nothing is measured here, so these machines are assumed: say yours with --devices and --nodes.")
    lost = (
        "nothing is lost and nothing comes twice" if not (rehearsal.lost or rehearsal.doubled) else "BROKEN"
    )
    say(f"Rows lost: {rehearsal.lost}. Doubled: {rehearsal.doubled}. So {lost}.", bold=True)
    say(
        f"Recomputed: {counted(rehearsal.recomputed, 'rows')}, after {counted(rehearsal.deaths, 'deaths')}"
        " of a process at its journal."
    )
    say(
        f"Done after {rehearsal.took()}."
        + (f" {counted(rehearsal.unfinished, 'partitions')} left over." if rehearsal.unfinished else "")
    )
    alert_counts = ", ".join(f"{count} {kind}" for kind, count in rehearsal.alerts_by_kind.items()) or "none"
    say(
        f"Alerts: {rehearsal.alerts} ({alert_counts}). A person put"
        f" {counted(rehearsal.by_hand, 'partitions')} right by hand."
    )
    if rehearsal.errors:
        names = ", ".join(f"{count} {name}" for name, count in sorted(rehearsal.errors.items()))
        say(f"Processes that ended with an error of their own: {names}.")
    say(f"Rehearsed in {rehearsal.seconds:.0f} s." + (f" Timeline: {picture}" if picture else ""))
