"""The state of each variant of ``description_model``, read from the disk: Dagster need not run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

from vlm_assets.config.resource_settings import control_state
from vlm_assets.config.settings import Settings
from vlm_durable.files.layout import PartitionPaths
from vlm_durable.files.sealed_json import FormatVersionError
from vlm_durable.state.rate import Rate
from vlm_durable.state.workers import Workers
from vlm_durable.versions.versioned_object import PublishedError
from vlm_durable.wording import counted
from vlm_training.checkpoints import newest_state
from vlm_training.description_model import begun_parts, changed_settings
from vlm_training.published_model import ASSET, PublishedModel
from vlm_training.rank import PLAN
from vlm_training.variants import Variant, read_variants


@dataclass(frozen=True)
class VariantStatus:
    """The state of a variant. step, steps: finished steps, and all. epoch, epochs: passes over the data.

    metric: of the finished model, or the best so far. seconds_left: at the pace so far; None if unknown.
    turn: 1 runs first; None if the variant does not wait. note: why it is refused, or what begins anew
    because the plan changed. Other data under the same name is noticed only by the next run.
    """

    name: str
    state: Literal["done", "running", "interrupted", "never started", "plan changed", "refused"]
    step: int = 0
    steps: int | None = None
    epoch: int = 0
    epochs: int | None = None
    metric: float | None = None
    seconds_left: float | None = None
    turn: int | None = None
    note: str = ""

    @property
    def percent(self) -> float:
        """The share of steps that are finished."""
        if self.state == "done":
            return 100.0
        return 100.0 * self.step / self.steps if self.steps else 0.0

    def time_left(self) -> str:
        """``seconds_left`` for a person."""
        if self.state == "done":
            return ""
        return (
            "unknown yet" if self.seconds_left is None else str(timedelta(seconds=round(self.seconds_left)))
        )

    def sentence(self) -> str:
        """The state for a person."""
        if self.state == "done":
            return f"done (metric {self.metric:.4f})" if self.metric is not None else "done"
        if self.state == "never started":
            return self.state
        if self.state in ("refused", "plan changed"):
            return f"{self.state}: {self.note}"
        progress = f"{self.state} at epoch {self.epoch} of {self.epochs} ({self.percent:.1f}%)"
        return progress if self.metric is None else f"{progress}, metric {self.metric:.4f} so far"


def variant_status(settings: Settings) -> tuple[VariantStatus, ...]:
    """Every variant: what runs, what waits (nearest to done first), the others. Raises SettingsError."""
    running = {
        worker.partition for worker in Workers(control_state(settings)).living() if worker.asset == ASSET
    }
    statuses = [
        _status(settings, name, variant, is_running=name in running)
        for name, variant in read_variants(settings).items()
    ]
    waiting = [
        status for status in statuses if status.state in ("interrupted", "never started", "plan changed")
    ]
    waiting.sort(key=lambda status: (-status.percent, status.seconds_left or 0.0))
    turns = [replace(status, turn=turn) for turn, status in enumerate(waiting, start=1)]
    by_state = {
        state: [status for status in statuses if status.state == state]
        for state in ("running", "refused", "done")
    }
    return (*by_state["running"], *turns, *by_state["refused"], *by_state["done"])


def _status(settings: Settings, name: str, variant: Variant, *, is_running: bool) -> VariantStatus:
    model = PublishedModel(settings.layout.asset(ASSET), name)
    try:
        record = model.record
    except (FormatVersionError, PublishedError, OSError) as error:
        return VariantStatus(name, "refused", note=str(error))
    folder = _begun(model.paths, None if record is None else str(record["fingerprint"]))
    if not is_running:
        begun = [] if folder is None else changed_settings(begun_parts(folder), settings, variant)
        published = [] if record is None else changed_settings(record.get("parts", {}), settings, variant)
        if record is not None and begun and not published:
            folder = None  # The plan is that of the published model again.
        elif changed := begun or (published if folder is None else []):
            return _begins_anew(name, variant, folder, changed, record)
    if folder is None and record is not None and not is_running:
        return VariantStatus(name, "done", step=record["step"], steps=record["step"], metric=record["metric"])
    state: dict[str, Any] = (newest_state(folder / "checkpoints") if folder else None) or {}
    step, count = state.get("step", 0), state.get("count", 0)
    if not is_running and not state:
        return VariantStatus(name, "never started", steps=variant.steps)
    steps, epochs = variant.steps, None
    if count:
        samples = (variant.steps or 0) * variant.batch or (variant.epochs or 0) * count
        steps, epochs = steps or -(-round(samples) // variant.batch), -(-round(samples) // count)
    return VariantStatus(
        name,
        "running" if is_running else "interrupted",
        step=step,
        steps=steps,
        epoch=state["consumed"] // count + 1 if count else 0,
        epochs=epochs,
        metric=state.get("best"),
        seconds_left=Rate(step, state["seconds"]).seconds_left([steps - step]) if steps and step else None,
    )


def _begins_anew(
    name: str, variant: Variant, folder: Path | None, changed: list[str], record: Mapping[str, Any] | None
) -> VariantStatus:
    """The status of a variant whose plan changed. folder: of the training under the earlier plan."""
    notes = [f"{', '.join(changed)}. The next run begins anew at step 0"]
    if folder is not None:
        step = (newest_state(folder / "checkpoints") or {}).get("step", 0)
        notes.append(f"{counted(step, 'steps are', 'step is')} left behind in {folder}")
    if record is not None:
        notes.append("the published model stays until the new one is complete")
    return VariantStatus(name, "plan changed", steps=variant.steps, note="; ".join(notes))


def _begun(paths: PartitionPaths, published: str | None) -> Path | None:
    """The folder of the training that was started last and is not published."""
    if not paths.journals.is_dir():
        return None
    begun = [
        folder
        for folder in paths.journals.iterdir()
        if folder.name != published and (folder / PLAN).is_file()
    ]
    return max(begun, key=lambda folder: (folder / PLAN).stat().st_mtime, default=None)
