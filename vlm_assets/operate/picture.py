"""The progress picture: every partition as a cell, properties described over time, devices side by side.

This module only draws. ``automation/dataset_progress.py`` collects what is drawn.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import Enum
from textwrap import wrap
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from vlm_assets.assets.published_rows import Stretch

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.backends.backend_agg import FigureCanvasAgg

MOST_BARS = 72
_WIDTHS = (10, 60, 300, 600, 1800, 3600, 6 * 3600, 24 * 3600, 7 * 24 * 3600)


@dataclass(frozen=True)
class Throughput:
    """Properties of each device, by its id, in bars of ``width`` seconds from ``start`` (unix seconds)."""

    start: float
    width: int
    bars: Mapping[str, npt.NDArray[np.float64]]


def throughput(stretches: Iterable[Stretch]) -> Throughput:
    """Bars over all the time in which something was described, ``MOST_BARS`` at most.

    The rows of a stretch are spread evenly over its time.
    """
    work = [(one, max(one.last, one.first + 1.0)) for one in stretches if one.rows]
    if not work:
        return Throughput(0.0, _WIDTHS[0], {})
    first, last = min(one.first for one, _ in work), max(end for _, end in work)
    width = next((one for one in _WIDTHS if (last - first) / one < MOST_BARS - 1), _WIDTHS[-1])
    start = first // width * width
    edges = start + width * np.arange(int((last - start) // width) + 2)
    bars: dict[str, Any] = {}
    for one, end in sorted(work, key=lambda of: of[0].device):
        rows = one.rows * np.diff(np.clip(edges, one.first, end)) / (end - one.first)
        bars[one.device] = bars.get(one.device, 0.0) + rows
    return Throughput(start, width, bars)


WIDTH = 920
"""Pixels. The UI shows the picture in a dialog of about this width."""

_DPI = 100
_MARGIN = 26
_INSIDE = WIDTH - 2 * _MARGIN
_GAP = 14
_HEADING = 30
_GRID_HEIGHT = 190
_CHART_HEIGHT = 120
_BAR_HEIGHT = 26
_LEFT_OF_CHART, _LEFT_OF_DEVICES, _RIGHT_OF_DEVICES = 40, 170, 190
_MOST_BAR_WIDTH = 36
_LARGEST_CELL = 26
_MARKED_CELL = 9
"""Pixels of the smallest cell that shows its share and a mark."""

_BANNER_LETTERS, _BANNER_LINES, _BANNER_PITCH = 105, 4, 18

_CARD = "#fcfbf8"
"""The picture brings its own background, so that it reads on a light page and on a dark one."""
_INK = "#262a30"
_FAINT = "#74787e"
_LINE = "#dedcd6"
_COLOURS_KEPT = 40


class CellStyle(Enum):
    """How a partition looks: its name in the legend and its colour. Colour-blind people tell them apart."""

    DONE = ("done", "#009e73")
    RUNNING = ("running", "#56b4e9")
    INTERRUPTED = ("interrupted", "#f0c842")
    FAILED = ("failed", "#d55e00")
    NOT_STARTED = ("not started", "#dbd9d3")

    @property
    def colour(self) -> str:
        """As ``#rrggbb``."""
        return self.value[1]


@dataclass(frozen=True)
class Cell:
    """One partition. share: how much of it is done, 0 to 1."""

    style: CellStyle
    share: float


@dataclass(frozen=True)
class DeviceBar:
    """One device: its properties per second, None if unknown. note: shown behind it."""

    name: str
    rate: float | None
    note: str | None = None


_DEVICE_COLOURS = ("#0072b2", "#e69f00", "#cc79a7", "#5c544c", "#56b4e9", "#009e73", "#949494", "#d55e00")


def progress_picture(
    grids: Mapping[str, Sequence[Cell]],
    done: Throughput,
    devices: Sequence[DeviceBar],
    *,
    paused: str | None = None,
) -> bytes:
    """Draw a PNG of a few kilobytes: Dagster's event log keeps every picture.

    grids: partitions in the order of the catalogue, by title. paused: the sentence that says since when and
    why nothing runs.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    banner = wrap(paused, _BANNER_LETTERS, max_lines=_BANNER_LINES) if paused else []
    drawn = {title: _drawn(cells) for title, cells in grids.items()}
    heights = [len(banner) * _BANNER_PITCH + 20 if banner else -_GAP, 20]
    heights += [_HEADING + len(image) for image in drawn.values()]
    heights += [_HEADING + _CHART_HEIGHT + 26, _HEADING + _BAR_HEIGHT * max(1, len(devices))]
    height = 2 * _MARGIN + sum(heights) + _GAP * (len(heights) - 1)
    figure = Figure(figsize=(WIDTH / _DPI, height / _DPI), dpi=_DPI, facecolor=_CARD)
    canvas = FigureCanvasAgg(figure)
    below = height - _MARGIN

    def panel(tall: int, title: str = "", note: str = "", *, left: int = 0) -> Axes:
        """Axes over the next ``tall`` pixels, with a heading and what is worth saying in figures above."""
        nonlocal below
        if title:
            at = figure.text(
                _MARGIN / WIDTH,
                (below - 12) / height,
                title,
                size=10.5,
                weight="bold",
                color=_INK,
                va="center",
            )
            figure.draw_without_rendering()
            right = at.get_window_extent().x1 + 14
            figure.text(right / WIDTH, (below - 12) / height, note, size=9, color=_FAINT, va="center")
            below -= _HEADING
        below -= tall
        place = ((_MARGIN + left) / WIDTH, below / height, (_INSIDE - left) / WIDTH, tall / height)
        below -= _GAP
        axes = figure.add_axes(place, facecolor="none")
        axes.spines[:].set_visible(False)
        axes.tick_params(labelsize=8, labelcolor=_FAINT, color=_LINE, length=3)
        return axes

    if banner:
        axes = panel(heights[0])
        axes.set(xticks=[], yticks=[], facecolor=CellStyle.INTERRUPTED.colour)
        axes.text(0.015, 0.5, "\n".join(banner), size=10, color=_INK, va="center", linespacing=1.3)
    _draw_legend(panel(heights[1]))
    for title, cells in grids.items():
        finished = sum(1 for cell in cells if cell.style is CellStyle.DONE)
        share = sum(cell.share for cell in cells) / len(cells) if cells else 0.0
        counts = f"{finished:,} of {len(cells):,} partitions done  ·  {share:.1%} of the properties"
        panel(len(drawn[title]), title, counts).set_axis_off()
        figure.figimage(drawn[title], _MARGIN, below + _GAP)
    names = dict.fromkeys((*(one.name for one in devices), *done.bars))
    colours = {name: _DEVICE_COLOURS[n % len(_DEVICE_COLOURS)] for n, name in enumerate(names)}
    highest = float(np.sum([*done.bars.values()], axis=0).max()) / done.width if done.bars else 0.0
    said = f"up to {highest:.3g} a second, in steps of {_span(done.width)}" if done.bars else "none yet"
    axes = panel(_CHART_HEIGHT, "Properties described over time", said, left=_LEFT_OF_CHART)
    _draw_throughput(axes, done, colours, highest)
    below -= 26
    said = "" if devices else "none is known yet"
    tall = _BAR_HEIGHT * max(1, len(devices))
    _draw_devices(panel(tall, "Devices, properties a second", said, left=_LEFT_OF_DEVICES), devices, colours)
    return _png(canvas)


def _drawn(cells: Sequence[Cell]) -> npt.NDArray[np.uint8]:
    """The cells as pixels [height, width, 3]: so large that all fit, line by line."""
    fitting = (
        size
        for size in range(_LARGEST_CELL, 1, -1)
        if -(-len(cells) // (_INSIDE // size)) * size <= _GRID_HEIGHT
    )
    pitch = next(fitting, 2)
    columns = _INSIDE // pitch
    size = pitch - (3 if pitch > _MARKED_CELL + 2 else 1 if pitch > 3 else 0)
    image = np.full((max(1, -(-len(cells) // columns)) * pitch, columns * pitch, 3), _rgb(_CARD), np.uint8)
    for number, cell in enumerate(cells):
        line, column = divmod(number, columns)
        box = image[line * pitch :, column * pitch :][:size, :size]
        box[:] = _rgb(cell.style.colour)
        if size < _MARKED_CELL:
            continue
        if cell.style in (CellStyle.RUNNING, CellStyle.INTERRUPTED):
            # A frame in the cell's colour, filled from the bottom as far as the partition is done.
            empty = round((size - 4) * (1.0 - min(1.0, cell.share)))
            box[2 : 2 + empty, 2:-2] = _rgb(CellStyle.NOT_STARTED.colour)
        elif cell.style is CellStyle.FAILED:
            for at in range(size * 7 // 25, size - size * 7 // 25):
                box[at, at : at + 2] = box[at, size - 2 - at : size - at] = 255
    return image


def _rgb(colour: str) -> list[int]:
    return list(bytes.fromhex(colour.removeprefix("#")))


def _draw_legend(axes: Axes) -> None:
    from matplotlib.patches import Patch

    axes.set_axis_off()
    axes.legend(
        handles=[Patch(color=style.colour, label=style.value[0]) for style in CellStyle],
        ncols=len(CellStyle), loc="center left", frameon=False, fontsize=9, labelcolor=_INK,
        borderpad=0, borderaxespad=0, handlelength=1.2, handleheight=1.2,
    )  # fmt: skip


def _draw_throughput(axes: Axes, done: Throughput, colours: Mapping[str, str], highest: float) -> None:
    from matplotlib import dates
    from matplotlib.ticker import MaxNLocator

    axes.spines["bottom"].set(visible=True, color=_LINE)
    if not done.bars:
        axes.set(xticks=[], yticks=[])
        return
    zone = datetime.fromtimestamp(done.start).astimezone().tzinfo
    one, level = done.width / 86_400, np.zeros(len(next(iter(done.bars.values()))))
    at = dates.date2num(datetime.fromtimestamp(done.start, zone)) + one * np.arange(len(level))
    for device, rows in done.bars.items():
        tall = rows / done.width
        axes.bar(
            at, tall, width=one * 0.86, bottom=level, align="edge", color=colours[device], antialiased=False
        )
        level += tall
    shown = max(len(at), (_INSIDE - _LEFT_OF_CHART) // _MOST_BAR_WIDTH)
    axes.set(xlim=(at[0], at[0] + one * shown), ylim=(0, highest * 1.08 or 1.0))
    places = dates.AutoDateLocator(tz=zone, minticks=3, maxticks=8)
    axes.xaxis.set(major_locator=places, major_formatter=dates.ConciseDateFormatter(places, tz=zone))
    axes.xaxis.get_offset_text().set(size=8, color=_FAINT)
    axes.yaxis.set_major_locator(MaxNLocator(3))
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="y", color=_LINE, linewidth=0.8)
    axes.set_axisbelow(True)


def _draw_devices(axes: Axes, devices: Sequence[DeviceBar], colours: Mapping[str, str]) -> None:
    rates = [one.rate or 0.0 for one in devices]
    highest = max(rates, default=0.0) or 1.0
    places = range(len(devices))
    axes.barh(places, [highest] * len(devices), height=0.55, color="#f1efea")
    axes.barh(places, rates, height=0.55, color=[colours[one.name] for one in devices], antialiased=False)
    for place, one in zip(places, devices, strict=True):
        rate = "no figure yet" if one.rate is None else f"{one.rate:.2f}"
        said = f"{rate},  {one.note}" if one.note else rate
        axes.text(highest * 1.02, place, said, size=9, color=_FAINT, va="center")
    wide = _INSIDE - _LEFT_OF_DEVICES
    axes.set(
        xlim=(0, highest * wide / (wide - _RIGHT_OF_DEVICES)),
        ylim=(max(1, len(devices)) - 0.5, -0.5),
        xticks=[],
    )
    names = [
        name if len(name) <= 20 else f"{name[:10]}…{name[-8:]}" for name in (one.name for one in devices)
    ]
    axes.set_yticks(places, names, size=9, color=_INK)
    axes.tick_params(axis="y", length=0)


def _png(canvas: FigureCanvasAgg) -> bytes:
    """The finished picture, in a palette of its most frequent colours: a third of the bytes."""
    canvas.draw()
    pixels = np.asarray(canvas.buffer_rgba())[:, :, :3]
    codes = pixels.astype(np.uint32) @ np.array([65536, 256, 1], np.uint32)
    _, first, where, counts = np.unique(codes, return_index=True, return_inverse=True, return_counts=True)
    found = pixels.reshape(-1, 3)[first]
    palette = found[np.argsort(-counts)[:_COLOURS_KEPT]]
    nearest = np.abs(found[:, None].astype(int) - palette[None]).sum(axis=2).argmin(axis=1).astype(np.uint8)
    image = Image.fromarray(nearest[where].reshape(codes.shape), "P")
    image.putpalette(palette.tobytes())
    stream = io.BytesIO()
    image.save(stream, "PNG", optimize=True)
    return stream.getvalue()


def _span(seconds: int) -> str:
    for unit, length in (("week", 604_800), ("day", 86_400), ("hour", 3600), ("minute", 60), ("second", 1)):
        if seconds >= length:
            count = seconds // length
            return f"{count} {unit}{'s' if count > 1 else ''}"
    return f"{seconds} s"
