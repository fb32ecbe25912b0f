"""dataset_progress: how far the whole dataset is, as an asset whose page has the picture and the figures.

The page is drawn anew while something works, and once it has come to rest. ``vlm-assets status`` says the
same (``vlm_assets/services/status.py``), and needs no Dagster.
"""

# No postponed annotations here: Dagster reads an asset's parameters from its real ones.

import hashlib
import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import dagster as dg
import sqlalchemy as sa

from sensors.sensor_definition import Decided, Situation, build_sensor
from sensors.ticks import Ticks
from vlm_assets.assets import markdown
from vlm_assets.assets.partition_state import State
from vlm_assets.assets.property_catalog import first_ingest, with_first_ingest
from vlm_assets.automation.picture import progress_picture
from vlm_assets.config.resource_settings import control_state
from vlm_assets.config.settings import Settings
from vlm_assets.services.status import Status, read_status
from vlm_catalog.catalog import Catalog, CatalogMissingError, catalog_path
from vlm_durable.commands import command
from vlm_durable.state import tables
from vlm_durable.state.pause import pause_of
from vlm_durable.state.workers import Workers
from vlm_durable.wording import counted

ASSET = "dataset_progress"
SENSOR = "progress_picture"
INTERVAL_SECONDS = 60
DRAW_SECONDS = 1800.0
"""The longest time between two pictures during work. The event log keeps each picture: 50 KB on SQLite."""

LAG_SHARE = 0.05
"""A picture may be as old as this share of the time that the work has taken: one a minute in the first
quarter of an hour, one each half hour after ten hours. Each start of work costs some ninety pictures more."""


def picture_of(status: Status) -> bytes:
    """The picture of a status, as a PNG."""
    stretches = [stretch for rows in status.published.values() for stretch in rows.stretches]
    paused = _first_upper(status.paused) if status.paused else None
    return progress_picture(status.partitions, status.devices, stretches, paused=paused)


def _first_upper(sentence: str) -> str:
    return f"{sentence[0].upper()}{sentence[1:]}"


def progress_metadata(status: Status) -> dict[str, dg.MetadataValue]:
    """The picture and the figures of the page; Dagster plots the numbers over time."""
    picture = markdown.picture(picture_of(status), alt="all partitions")
    described = [partition for partition in status.partitions if partition.asset == status.assets[0]]
    properties = sum(partition.usable_rows for partition in described)
    metadata: dict[str, dg.MetadataValue] = {
        "progress": markdown.metadata(picture),
        "what happens next": markdown.metadata(markdown.bullets(status.next_steps)),
        "percent described": dg.MetadataValue.float(round(100.0 * properties / max(1, status.properties), 2)),
        "properties described": dg.MetadataValue.int(properties),
        "properties/s": dg.MetadataValue.float(round(status.properties_per_second or 0.0, 2)),
        "failed rows": dg.MetadataValue.int(sum(status.failed_by_kind.values())),
    }
    metadata["tried again and done in a day"] = dg.MetadataValue.int(len(status.done_again))
    if status.paused:
        metadata["paused"] = dg.MetadataValue.text(_first_upper(status.paused))
    if status.seconds_left is not None:
        metadata["hours left"] = dg.MetadataValue.float(round(status.seconds_left / 3600, 2))
    if status.failed_by_kind:
        metadata["failed rows by kind"] = markdown.metadata(
            markdown.table(("kind", "rows"), status.failed_by_kind.items())
        )
    for state in State:
        count = sum(1 for partition in described if partition.state is state)
        metadata[f"partitions {state.value}"] = dg.MetadataValue.int(count)
    if status.stale.keys:
        metadata["what is stale"] = markdown.metadata(markdown.bullets(status.stale.sentences()))
    if status.warnings:
        metadata["could not be read"] = markdown.metadata(markdown.bullets(status.warnings))
    return metadata


def _page(settings: Settings, status: Status) -> dict[str, dg.MetadataValue]:
    """The metadata of the page; after a planned run, with how far the plan was off."""
    from vlm_assets.services.forecast import compare_with_run

    compared = compare_with_run(settings)
    planned = {} if compared is None else {"the plan": dg.MetadataValue.text(compared.sentence())}
    return {**progress_metadata(status), **planned}


def build_dataset_progress(settings: Settings) -> dg.AssetsDefinition:
    """The asset. It has no upstream, else its button would ask about each missing partition."""

    @dg.asset(
        key=settings.names.key(ASSET),
        group_name=settings.names.name("properties"),
        kinds={"duckdb"},
        owners=settings.owner_list,
        tags=settings.tag_values,
        description=with_first_ingest(
            settings,
            "How far the whole dataset is: all partitions in one picture, properties described over time,"
            " devices side by side, time left, failed rows by kind; from what is on disk, so that it is right"
            " after anything. A sensor keeps it up to date, without runs; Materialize looks at once."
            f" The same as {command('status')}.",
        ),
    )
    def dataset_progress(context: dg.AssetExecutionContext) -> dg.MaterializeResult[None]:
        settings.name_in_commands()
        status = read_status(settings, Catalog.open(settings.home))
        for step in status.next_steps:
            context.log.info(step)
        return dg.MaterializeResult(metadata=_page(settings, status))

    return dataset_progress


@dataclass(frozen=True)
class Drawn:
    """moved: what the last picture showed; seen: what the last tick saw; at: when it was drawn (unix).

    pause: the sentence of the pause that it showed; empty where it showed none. began: when the work began
    that is under way (unix seconds); 0 at rest.
    """

    moved: str = ""
    seen: str = ""
    at: float = 0.0
    pause: str = ""
    began: float = 0.0

    def is_due(self, moved: str, *, works: bool, now: float, pause: str = "") -> bool:
        """Whether to draw. works: whether anything works now, so that the picture is old in any case."""
        if pause != self.pause and not (pause and works):
            return True
        if moved == self.moved and not works:
            return False
        # At rest since the last tick: the end is shown at once.
        settled = not works and moved == self.seen
        return settled or now - self.at >= self._wait(now)

    def _wait(self, now: float) -> float:
        # The tick after a minute may come a little early.
        shortest = 0.75 * INTERVAL_SECONDS
        return min(DRAW_SECONDS, max(shortest, LAG_SHARE * (now - (self.began or now))))


def build_progress_sensor(settings: Settings, progress: dg.AssetsDefinition) -> dg.SensorDefinition:
    """The sensor that draws the picture anew, without a run: the Runs page lists real work only."""
    state = control_state(settings)

    def decide(at: Situation) -> Decided:
        drawn, moved, pause = at.cursor_as(Drawn), _what_moved(settings), pause_of(state)
        if not moved:
            return _to_begin(settings, drawn, at.now)
        paused, works = pause.sentence() if pause else "", bool(Workers(state).living())
        is_due = drawn.is_due(moved, works=works, now=at.now, pause=paused)
        # A moment between two runs does not count as rest.
        began = (drawn.began or at.now) if works or moved != drawn.seen else 0.0
        if is_due:
            status = read_status(settings, Catalog.open(settings.home))
            picture = dg.AssetMaterialization(settings.names.key(ASSET), metadata=_page(settings, status))
            cursor = json.dumps(asdict(Drawn(moved, moved, at.now, paused, began)))
            return Decided("Drawn.", cursor, events=[picture])
        why = f"Nothing is started: {paused}." if paused else "Nothing has moved, or the picture is young."
        return Decided(why, json.dumps(asdict(replace(drawn, seen=moved, began=began))))

    return build_sensor(
        SENSOR,
        decide,
        interval_seconds=INTERVAL_SECONDS,
        description=(
            "Draws the picture of all partitions anew, without a run: each minute when work begins, later"
            " every half hour, and once everything is at rest or paused. A tick that draws nothing opens no"
            " partition."
        ),
        ticks=Ticks(state, settings.names),
        target=progress,
    )


def _to_begin(settings: Settings, drawn: Drawn, now: float) -> Decided:
    """If nothing was ever started, show the first steps once, and again when they change."""
    steps = first_steps(settings)
    shown = hashlib.sha256("\n".join(steps).encode()).hexdigest()[:16]
    if shown == drawn.moved:
        return Decided("Nothing was ever started.")
    page = {"what to do first": markdown.metadata(markdown.bullets(steps))}
    cursor = json.dumps(asdict(Drawn(shown, shown, now)))
    shown_page = dg.AssetMaterialization(settings.names.key(ASSET), metadata=page)
    return Decided("What to do first is shown.", cursor, events=[shown_page])


def first_steps(settings: Settings) -> list[str]:
    """The first steps in a new home, each with its whole command. Raises CatalogUnreadableError."""
    home = ("--home", settings.home)
    try:
        catalog = Catalog.open(settings.home)
    except CatalogMissingError:
        return [
            *first_ingest(settings),
            "Then this page says how to go on, within two minutes. docs/first-1000.md has all of the way.",
        ]
    # Properties that do not fill a partition wait for more, unless a person adds --missing.
    missing = ("--missing",) if catalog.waiting else ()
    if settings.names.prefix:
        asset = settings.names.key(settings.descriptions.name).to_user_string()
        return [
            f"{counted(catalog.rows, 'properties')} in the catalogue, and none is described yet.",
            f"Describe everything: materialize {asset}, all partitions. Then this page shows how far it is.",
            *(
                [f"Properties that wait until a partition is full: {catalog.waiting}."]
                if catalog.waiting
                else []
            ),
        ]
    return [
        f"{counted(catalog.rows, 'properties')} in the catalogue, and none is described yet.",
        f"See 20 answers beside their images first: {command('compare', *home, '--html', 'tried.html')}",
        f"How long all of it takes, and what to set: {command('plan', *home)}",
        f"Describe everything: {command('run', *missing, *home)}. Partitions that are full are on the page of"
        " property_descriptions too: Materialize.",
        "Then this page shows how far it is. docs/first-1000.md has all of the way.",
    ]


def _what_moved(settings: Settings) -> str:
    """A digest that changes whenever anything worked, was published, tried again, left out or ingested.

    Empty where nothing was ever started.
    """
    state = settings.state_directory
    if not (state / "workers").is_dir() and not settings.descriptions.published.is_dir():
        return ""
    watched = [catalog_path(settings.home), state / "workers"]
    for asset in settings.partitioned_assets:
        watched += [asset.published, asset.versions, asset.journals]
    seen = "".join(f"{path.name} {_changed_at(path)}\n" for path in watched)
    seen += control_state(settings).read(_noted)
    return hashlib.sha256(seen.encode()).hexdigest()[:16]


def _noted(connection: sa.Connection) -> str:
    """The attempts, cancels and devices left out that the picture shows, as text."""
    shown = (tables.attempts, tables.cancels, tables.devices_left_out)
    return repr([connection.execute(sa.select(table).order_by(*table.primary_key)).all() for table in shown])


def _changed_at(path: Path) -> int | None:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return None
