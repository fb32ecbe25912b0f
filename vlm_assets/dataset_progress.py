"""dataset_progress: how far the whole dataset is, as an asset whose page has the picture and the figures.

What lives here: Dagster's side: what the page shows, and the schedule that keeps it up to date. What does
not: what is known (``status.py``) and the drawing (``progress_picture.py``). The same as
`vlm-assets status`, which needs no Dagster.
"""

# No postponed annotations here: Dagster reads an asset's parameters from its real ones.

import base64
import hashlib
from collections.abc import Mapping, Sequence
from datetime import UTC
from pathlib import Path

import dagster as dg

from resources.pause import pause_of
from resources.workers import Workers
from vlm_assets.catalog import Catalog, catalog_path
from vlm_assets.partition_states import State
from vlm_assets.progress_picture import Cell, DeviceBar, Look, progress_picture
from vlm_assets.settings import Settings
from vlm_assets.status import DeviceStatus, Status, read_status
from vlm_assets.throughput import throughput

ASSET = "dataset_progress"
SCHEDULE = "dataset_progress_schedule"
EVERY_TEN_MINUTES = "*/10 * * * *"

LOOKS: Mapping[State, Look] = {
    State.DONE: Look.DONE,
    State.RUNNING: Look.RUNNING,
    State.INTERRUPTED: Look.INTERRUPTED,
    State.CANCELLED: Look.INTERRUPTED,
    State.FAILED: Look.FAILED,
    State.GIVEN_UP: Look.FAILED,
    State.REFUSED: Look.FAILED,
    State.DAMAGED: Look.FAILED,
    State.NOT_STARTED: Look.NOT_STARTED,
}


def picture_of(status: Status) -> bytes:
    """The picture of a status, as a PNG."""
    return progress_picture(
        {
            asset: [
                Cell(LOOKS[one.state], one.rows / one.expected)
                for one in status.partitions
                if one.asset == asset
            ]
            for asset in status.assets
        },
        throughput(stretch for rows in status.published.values() for stretch in rows.stretches),
        [DeviceBar(one.id, one.properties_per_second, one.now, _note(one)) for one in status.devices],
    )


def _note(device: DeviceStatus) -> str | None:
    if device.left_out is not None:
        return "left out"
    return None if device.is_here else "not here now"


def progress_metadata(status: Status) -> dict[str, dg.MetadataValue]:
    """What a person wants to know; the numbers are plotted over time."""
    encoded = base64.b64encode(picture_of(status)).decode("ascii")
    described = [one for one in status.partitions if one.asset == status.assets[0]]
    properties = sum(one.rows for one in described)
    metadata: dict[str, dg.MetadataValue] = {
        "progress": dg.MetadataValue.md(f"![all partitions](data:image/png;base64,{encoded})"),
        "what happens next": dg.MetadataValue.md("\n".join(f"- {step}" for step in status.next_steps)),
        "percent described": dg.MetadataValue.float(round(100.0 * properties / max(1, status.properties), 2)),
        "properties described": dg.MetadataValue.int(properties),
        "properties/s now": dg.MetadataValue.float(round(sum(one.now or 0.0 for one in status.devices), 2)),
        "failed rows": dg.MetadataValue.int(sum(status.failed_by_kind.values())),
    }
    if status.seconds_left is not None:
        metadata["hours left"] = dg.MetadataValue.float(round(status.seconds_left / 3600, 2))
    if status.failed_by_kind:
        metadata["failed rows by kind"] = dg.MetadataValue.md(
            "\n".join(["| kind | rows |", "| --- | --- |", *_rows(status.failed_by_kind)])
        )
    for state in State:
        count = sum(1 for one in described if one.state is state)
        metadata[f"partitions {state.value}"] = dg.MetadataValue.int(count)
    if status.warnings:
        metadata["could not be read"] = dg.MetadataValue.md("\n".join(f"- {one}" for one in status.warnings))
    return metadata


def build_dataset_progress(settings: Settings, *, followed: Sequence[str]) -> dg.AssetsDefinition:
    """The asset. ``followed``: the assets whose partitions it shows."""

    @dg.asset(
        name=ASSET,
        deps=list(followed),
        group_name="properties",
        kinds={"duckdb"},
        description=(
            "How far the whole dataset is: all partitions in one picture, properties described over time,"
            " devices side by side, time left, failed rows by kind; from what is on disk, so that it is right"
            " after anything. A schedule keeps it up to date; Materialize looks at once."
            " The same as `vlm-assets status`."
        ),
    )
    def dataset_progress(context: dg.AssetExecutionContext) -> dg.MaterializeResult[None]:
        status = read_status(settings, Catalog.open(settings.home))
        for step in status.next_steps:
            context.log.info(step)
        return dg.MaterializeResult(metadata=progress_metadata(status))

    return dataset_progress


def build_progress_schedule(settings: Settings, progress: dg.AssetsDefinition) -> dg.ScheduleDefinition:
    """Look again every ten minutes, where something runs or has changed since; a tick opens no partition."""

    @dg.schedule(
        name=SCHEDULE,
        cron_schedule=EVERY_TEN_MINUTES,
        target=progress,
        default_status=dg.DefaultScheduleStatus.RUNNING,
        description="Keeps the picture of all partitions up to date; nothing is started where nothing moves.",
    )
    def dataset_progress_schedule(
        context: dg.ScheduleEvaluationContext,
    ) -> dg.RunRequest | dg.SkipReason:
        pause = pause_of(settings.state_directory)
        if pause is not None:
            return dg.SkipReason(f"Nothing moves: {pause.sentence()}.")
        if not catalog_path(settings.home).exists():
            return dg.SkipReason("There is no catalogue yet.")
        if Workers(settings.state_directory / "workers").living():
            at = context.scheduled_execution_time.astimezone(UTC)
            return dg.RunRequest(run_key=at.isoformat())
        # The same key at the next tick starts nothing: Dagster knows that it has run.
        return dg.RunRequest(run_key=f"at rest, {_what_moved(settings)}")

    return dataset_progress_schedule


def _rows(counts: Mapping[str, int]) -> list[str]:
    return [f"| {kind} | {count} |" for kind, count in counts.items()]


def _what_moved(settings: Settings) -> str:
    """Changes whenever anything worked, was published, tried again or left out, or the catalogue grew."""
    state = settings.state_directory
    watched = [catalog_path(settings.home), state / "workers", state / "devices_left_out.json"]
    watched += [state / "attempts" / "attempts.json", state / "cancels" / "cancels.json"]
    for directory in (settings.descriptions_directory, settings.embeddings_directory):
        watched += [directory, directory / ".manifest", directory / ".journal"]
    seen = "".join(f"{path.name} {_changed_at(path)}\n" for path in watched)
    return hashlib.sha256(seen.encode()).hexdigest()[:16]


def _changed_at(path: Path) -> int | None:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return None
