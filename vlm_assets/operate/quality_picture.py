"""The quality picture: for each field what the descriptions say, over the whole and over time.

This module only draws. ``quality.py`` has what is drawn.
"""

from __future__ import annotations

import io
from collections import Counter

from vlm_assets.operate.quality import FieldSummary, PartitionSummary, Quality

_MOST_VALUES, _MOST_STEPS = 7, 40
_COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#f0e442", "#b8b5ae")
_INK, _FAINT, _CARD = "#262a30", "#74787e", "#fcfbf8"


def quality_picture(quality: Quality) -> bytes | None:
    """The picture as PNG; None where no field has values to draw. Time goes from left to right."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    drawn = {name: one for name, one in quality.fields.items() if one.kind != "texts" and one.counts}
    if not drawn:
        return None
    rows = len(drawn)
    figure = Figure(figsize=(9.2, 0.5 + 0.62 * rows), dpi=100, facecolor=_CARD, layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(rows, 2, width_ratios=[1, 1.15], squeeze=False)
    steps = _steps(quality)
    for (whole, over_time), (name, one) in zip(grid, drawn.items(), strict=True):
        values = _values(one)
        left = 0.0
        for number, value in enumerate(values):
            share = _share(Counter(one.counts), value, values)
            whole.barh(0, share, left=left, color=_COLOURS[number])
            if share > 0.09:
                whole.text(left + share / 2, 0, value[:14], ha="center", va="center", size=6.5, color="white")
            left += share
        said = [_counted(step, name) for step in steps]
        shares = [[_share(counts, value, values) for counts in said] for value in values]
        over_time.stackplot(range(len(said)), shares, colors=_COLOURS, step="mid")
        for axes in (whole, over_time):
            axes.set(xticks=[], yticks=[], facecolor="none")
            axes.spines[:].set_visible(False)
        whole.set_ylabel(name, rotation=0, ha="right", va="center", size=8, color=_INK)
        whole.set_xlim(0, 1)
        over_time.set(ylim=(0, 1), xlim=(0, max(1, len(said) - 1)))
    grid[0][0].set_title("all descriptions", size=8, color=_FAINT)
    grid[0][1].set_title("in the order of their publication", size=8, color=_FAINT)
    stream = io.BytesIO()
    figure.savefig(stream, format="png")
    return stream.getvalue()


def _steps(quality: Quality) -> list[list[PartitionSummary]]:
    """The partitions as they were published, in groups of equal size."""
    ordered = sorted(quality.partitions, key=lambda one: (one.published_at, one.key))
    size = -(-len(ordered) // _MOST_STEPS) or 1
    return [ordered[start : start + size] for start in range(0, len(ordered), size)]


def _counted(step: list[PartitionSummary], name: str) -> Counter[str]:
    counted: Counter[str] = Counter()
    for one in step:
        if name in one.fields:
            counted.update(one.fields[name].counts)
    return counted


def _values(one: FieldSummary) -> list[str]:
    """The most frequent values, and what stands for all others."""
    values = list(one.counts)
    if one.kind == "numbers":
        values = sorted(values, key=float)
    frequent = set(list(one.counts)[:_MOST_VALUES])
    return [value for value in values if value in frequent] + (
        ["others"] if len(values) > _MOST_VALUES else []
    )


def _share(counts: Counter[str], value: str, values: list[str]) -> float:
    count = counts[value]
    if value == "others" and value not in counts:
        count = counts.total() - sum(counts[one] for one in values)
    return count / max(1, counts.total())
