"""Calibration: curves that say how often answers of a confidence are right, kept with what taught them.

The file ``HOME/.state/calibration.json`` holds them. Raw confidences stay as they are in the rows.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import cached_property
from typing import Any, Final

import numpy as np

from vlm_assets.config.settings import Settings
from vlm_durable.files.sealed_json import BrokenSealError, read_sealed, set_aside_damaged, write_sealed
from vlm_results.confidence_statistics import Bin, Curve, cross_calibrated, reliability
from vlm_results.labels import FieldLabels, Judged, teaching_labels
from vlm_results.quality import Quality

_log: Final = logging.getLogger(__name__)

_FILE: Final = "calibration.json"

_ARRAYS: Final = ("confidences", "right", "weights")

LEAST_LABELS: Final = 50
"""With fewer labels of a field a curve would say more of chance than of the model."""


@dataclass(frozen=True, eq=False)
class Calibration:
    """The curve of a field, for answers that were made with the same settings.

    version: counts up from 1 as the labels change. learned_at: when this version came to be.
    """

    made_with: str
    field: str
    version: int
    learned_at: str
    labels: FieldLabels
    curve: Curve

    @cached_property
    def before(self) -> list[Bin]:
        """The reliability of the raw confidences."""
        return reliability(self.labels.confidences, self.labels.right, self.labels.weights)

    @cached_property
    def after(self) -> list[Bin]:
        """The reliability of calibrated confidences, by curves that did not see the label."""
        labels = self.labels
        calibrated = cross_calibrated(labels.confidences, labels.right, labels.weights)
        return reliability(calibrated, labels.right, labels.weights)


def learn_curves(
    settings: Settings,
    quality: Quality,
    judged: Mapping[str, Sequence[Judged]],
    *,
    report: Callable[[str], None] = _log.warning,
) -> list[Calibration]:
    """Learn the curve of each field with enough labels, and keep those that are new. Raises OSError.

    Only for answers that are published: curves of others are dropped. report: is told where the curves before
    are damaged.
    """
    path = settings.state_directory / _FILE
    if damage := set_aside_damaged(path, settings.descriptions.quarantine):
        report(f"{damage} Its curves are learned anew, from version 1.")
    kept = {(curve.made_with, curve.field): curve for curve in read_curves(settings)}
    calibrations = []
    for made_with, fields in quality.confidences.items():
        for field in fields:
            labels = teaching_labels(judged.get(made_with, ()), field)
            before = kept.get((made_with, field))
            if before is not None and before.labels.digest == labels.digest:
                calibrations.append(before)
            elif len(labels) >= LEAST_LABELS:
                curve = Curve.fit(labels.confidences, labels.right, labels.weights)
                version = 1 if before is None else before.version + 1
                now = datetime.now(UTC).isoformat(timespec="seconds")
                calibrations.append(Calibration(made_with, field, version, now, labels, curve))
    if calibrations != list(kept.values()):  # A curve that stays is the object that was read.
        write_sealed(path, {"curves": [_as_json(calibration) for calibration in calibrations]})
    return calibrations


def read_curves(settings: Settings) -> list[Calibration]:
    """The curves that are kept; none of a damaged file. Raises FormatVersionError, OSError."""
    with contextlib.suppress(FileNotFoundError, BrokenSealError):
        content = read_sealed(settings.state_directory / _FILE)
        return [_from_json(curve) for curve in content["curves"]]
    return []


def _as_json(calibration: Calibration) -> dict[str, Any]:
    arrays = {name: getattr(calibration.labels, name).tolist() for name in _ARRAYS}
    labels = {**arrays, "digest": calibration.labels.digest}
    kept = {field.name: getattr(calibration, field.name) for field in dataclasses.fields(calibration)}
    return {**kept, "curve": asdict(calibration.curve), "labels": labels}


def _from_json(content: Mapping[str, Any]) -> Calibration:
    kept = content["labels"]
    arrays: dict[str, Any] = {name: np.array(kept[name]) for name in _ARRAYS}
    labels = FieldLabels(**arrays, digest=kept["digest"])
    curve = Curve(**{name: tuple(values) for name, values in content["curve"].items()})
    return Calibration(**{**content, "labels": labels, "curve": curve})
