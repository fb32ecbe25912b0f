"""The timeline of a rehearsal as a picture: devices at work, faults, and properties published over time."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vlm_assets.rehearsal.rehearse import Rehearsal

_DAY = 86_400.0
_COLOURS = {
    "published": "#009e73",
    "verified": "#56b4e9",
    "failed": "#d55e00",
    "killed": "#cc79a7",
    "interrupted": "#f0c842",
}
_INK = "#262a30"


def draw_timeline(found: Rehearsal) -> bytes:
    """The picture as PNG. Days since the start from left to right; a line for each device."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(
        figsize=(12, 4.2 + 0.22 * found.devices), dpi=100, facecolor="#fcfbf8", layout="constrained"
    )
    FigureCanvasAgg(figure)
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=[2, max(1.0, 0.16 * found.devices)])
    start = min((one.start for one in found.spans), default=0.0)
    published = [((at - start) / _DAY, rows / 1000) for at, rows in found.progress]
    above.plot(*zip((0.0, 0.0), *published, strict=True), color=_COLOURS["published"], linewidth=2)
    above.plot((0, found.days_planned), (0, found.properties / 1000), color="#74787e", linestyle=":")
    above.set_ylabel("thousand properties published")
    above.set_title(
        f"Rehearsal, seed {found.seed}: {found.lost} lost, {found.doubled} doubled, {found.recomputed:,}"
        f" recomputed; {found.days_simulated:.1f} days, {found.days_planned:.1f} without faults (dotted)",
        loc="left", color=_INK,
    )  # fmt: skip
    for fault in found.struck:
        for axes in (above, below):
            axes.axvspan(
                fault.at / _DAY,
                (fault.at + max(fault.seconds, 600)) / _DAY,
                color="#d55e00",
                alpha=0.15,
                lw=0,
            )
    devices = sorted({one.device for one in found.spans})
    for how, colour in _COLOURS.items():
        for number, device in enumerate(devices):
            bars = [
                ((one.start - start) / _DAY, (one.stop - one.start) / _DAY)
                for one in found.spans
                if one.device == device and one.how == how
            ]
            below.broken_barh(bars, (number - 0.4, 0.8), color=colour, label=how if not number else None)
    below.set_yticks(range(len(devices)), devices, size=8)
    below.set_xlabel("days")
    figure.legend(*below.get_legend_handles_labels(), loc="outside lower left", ncols=6, fontsize=8)
    stream = io.BytesIO()
    figure.savefig(stream, format="png")
    return stream.getvalue()
