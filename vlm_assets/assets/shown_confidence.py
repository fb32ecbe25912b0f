"""How people are shown a confidence: the number as it is stored, and beside it a colour, never alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True)
class Band:
    """Confidences that are shown alike."""

    least: float
    text: str
    colour: str


BANDS: Final = (
    Band(0.95, "0.95 and more", "#0072b2"),
    Band(0.8, "0.80 to 0.94", "#e69f00"),
    Band(0.0, "below 0.80", "#d55e00"),
)
"""The surest first; colours that colour-blind people tell apart (Okabe and Ito)."""

LEGEND: Final = "How sure the model was of each answer, as it says itself (raw confidence)"


@dataclass(frozen=True)
class ShownConfidence:
    """A confidence for people: its number with two digits, and the band of that number."""

    number: str
    band: Band


def shown_confidence(confidence: object) -> ShownConfidence | None:
    """None where nothing is known of the answer: no number, or a nested object, which has none of its own."""
    if not isinstance(confidence, float):
        return None
    number = f"{confidence:.2f}"
    return ShownConfidence(number, next(band for band in BANDS if float(number) >= band.least))
