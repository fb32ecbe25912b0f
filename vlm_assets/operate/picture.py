"""The progress picture: every partition as a cell, properties described over time, devices side by side.

This module only draws. ``automation/dataset_progress.py`` collects what is drawn.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import Enum
from itertools import pairwise
from textwrap import wrap
from typing import TYPE_CHECKING

from PIL import Image

from vlm_assets.assets.published_rows import Stretch

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST_BARS = 72
_WIDTHS = (10, 60, 300, 600, 1800, 3600, 6 * 3600, 24 * 3600, 7 * 24 * 3600)


@dataclass(frozen=True)
class Throughput:
    """Bars from ``start`` (unix seconds), each of ``width`` seconds: properties of each device by its id."""

    start: float
    width: int
    bars: tuple[dict[str, float], ...]

    @property
    def devices(self) -> list[str]:
        """The devices that described anything, sorted."""
        return sorted({device for bar in self.bars for device in bar})

    @property
    def highest(self) -> float:
        """Properties in the highest bar."""
        return max((sum(bar.values()) for bar in self.bars), default=0.0)


def throughput(stretches: Iterable[Stretch]) -> Throughput:
    """Bars over all the time in which something was described, ``MOST_BARS`` at most."""
    work = [one for one in stretches if one.rows]
    if not work:
        return Throughput(0.0, _WIDTHS[0], ())
    first, last = min(one.first for one in work), max(one.last for one in work)
    width = next((one for one in _WIDTHS if (last - first) / one < MOST_BARS - 1), _WIDTHS[-1])
    start = first // width * width
    bars: list[dict[str, float]] = [{} for _ in range(int((last - start) // width) + 1)]
    for one in work:
        for number, rows in _shares(one, start, width):
            bars[number][one.device] = bars[number].get(one.device, 0.0) + rows
    return Throughput(start, width, tuple(bars))


def _shares(one: Stretch, start: float, width: int) -> Iterable[tuple[int, float]]:
    """Its rows by bar, spread evenly over its time."""
    begin, end = int((one.first - start) // width), int((one.last - start) // width)
    if begin == end:
        return [(begin, float(one.rows))]
    rate = one.rows / (one.last - one.first)
    edges = [one.first, *(start + width * number for number in range(begin + 1, end + 1)), one.last]
    return [(begin + number, rate * (right - left)) for number, (left, right) in enumerate(pairwise(edges))]


WIDTH = 920
"""Pixels. The UI shows the picture in a dialog of about this width."""

_DPI = 100
_MARGIN = 26
_INSIDE = WIDTH - 2 * _MARGIN
_GRID_HEIGHT = 190
_CHART_HEIGHT = 120
_BAR_HEIGHT = 26
_LEGEND_WIDTH = 110
_NAME_WIDTH = 170
_MOST_BAR_WIDTH = 36
_LARGEST_CELL = 26
_MARKED_CELL = 12
"""Pixels of the smallest cell that shows its share and a mark."""

_BANNER_LETTERS, _BANNER_LINES, _BANNER_PITCH = 105, 4, 18

_CARD = "#fcfbf8"
"""The picture brings its own background, so that it reads on a light page and on a dark one."""
_INK = "#262a30"
_FAINT = "#74787e"
_LINE = "#dedcd6"


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
    banner = wrap(paused, _BANNER_LETTERS, max_lines=_BANNER_LINES) if paused else []
    page = _Page(_height(grids, devices, banner))
    if banner:
        _draw_banner(page, banner)
    _draw_legend(page)
    for title, cells in grids.items():
        _draw_grid(page, title, cells)
    names = dict.fromkeys((*(one.name for one in devices), *done.devices))
    colours = {name: _DEVICE_COLOURS[n % len(_DEVICE_COLOURS)] for n, name in enumerate(names)}
    _draw_throughput(page, done, colours)
    _draw_devices(page, devices, colours)
    return page.png()


def _cell_size(count: int) -> tuple[int, int]:
    """The distance from one cell to the next in pixels, and cells a line, so that all cells fit."""
    for pitch in range(_LARGEST_CELL, 1, -1):
        columns = _INSIDE // pitch
        if -(-count // columns) * pitch <= _GRID_HEIGHT:
            return pitch, columns
    return 2, _INSIDE // 2


def _grid_height(count: int) -> int:
    pitch, columns = _cell_size(count)
    return -(-count // columns) * pitch


def _height(grids: Mapping[str, Sequence[Cell]], devices: Sequence[DeviceBar], banner: Sequence[str]) -> int:
    height = 2 * _MARGIN + 34 + sum(44 + _grid_height(len(cells)) for cells in grids.values())
    height += 30 + _CHART_HEIGHT + 40 + 30 + _BAR_HEIGHT * max(1, len(devices))
    return height + (len(banner) * _BANNER_PITCH + 34 if banner else 0)


class _Page:
    """A figure that is filled from top to bottom, in pixels."""

    def __init__(self, height: int) -> None:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

        self.figure: Figure = Figure(figsize=(WIDTH / _DPI, height / _DPI), dpi=_DPI, facecolor=_CARD)
        self._canvas = FigureCanvasAgg(self.figure)
        self._height = height
        self.y = _MARGIN

    def panel(self, height: int, *, left: int = _MARGIN, width: int = _INSIDE) -> Axes:
        """Axes over the next ``height`` pixels, without ticks or frame, in pixels from the top left."""
        box = (left / WIDTH, 1 - (self.y + height) / self._height, width / WIDTH, height / self._height)
        axes = self.figure.add_axes(box)
        axes.set(xlim=(0, width), ylim=(height, 0), xticks=[], yticks=[], facecolor="none")
        axes.spines[:].set_visible(False)
        self.y += height
        return axes

    def heading(self, title: str, note: str) -> None:
        """A title, and beside it what is worth saying in figures."""
        axes = self.panel(30)
        said = axes.text(0, 12, title, size=10.5, weight="bold", color=_INK, va="center")
        axes.annotate(
            note, (1, 0.5), xycoords=said, xytext=(10, 0), textcoords="offset points", va="center",
            size=9, color=_FAINT,
        )  # fmt: skip

    def png(self) -> bytes:
        """The finished picture, in a palette of its most frequent colours: a third of the bytes."""
        import numpy as np

        self._canvas.draw()
        pixels = np.asarray(self._canvas.buffer_rgba())[:, :, :3]
        codes = pixels.astype(np.uint32) @ np.array([65536, 256, 1], np.uint32)
        _, first, where, counts = np.unique(codes, return_index=True, return_inverse=True, return_counts=True)
        found = pixels.reshape(-1, 3)[first]
        exact = np.array([_rgb(colour) for colour in (*(one.colour for one in CellStyle), *_DEVICE_COLOURS)])
        palette = np.concatenate([exact, found[np.argsort(-counts)[:64]]])
        distances = np.abs(found[:, None].astype(int) - palette[None]).sum(axis=2)
        nearest = distances.argmin(axis=1).astype(np.uint8)
        image = Image.fromarray(nearest[where].reshape(codes.shape), "P")
        image.putpalette(palette.astype(np.uint8).tobytes())
        stream = io.BytesIO()
        image.save(stream, "PNG", optimize=True)
        return stream.getvalue()


def _rgb(colour: str) -> list[int]:
    return list(bytes.fromhex(colour.removeprefix("#")))


def _draw_banner(page: _Page, lines: Sequence[str]) -> None:
    axes = page.panel(len(lines) * _BANNER_PITCH + 20)
    axes.set_facecolor(CellStyle.INTERRUPTED.colour)
    for number, line in enumerate(lines):
        axes.text(14, 10 + (number + 0.5) * _BANNER_PITCH, line, size=10, color=_INK, va="center")
    page.y += 14


def _draw_legend(page: _Page) -> None:
    axes = page.panel(20)
    for number, style in enumerate(CellStyle):
        x = number * _LEGEND_WIDTH
        _fill(axes, [(x, 4, 12, 12)], style.colour)
        if style is CellStyle.FAILED:
            _cross(axes, x, 4, 12)
        axes.text(x + 18, 10, style.value[0], size=9, color=_INK, va="center")
    page.y += 14


def _draw_grid(page: _Page, title: str, cells: Sequence[Cell]) -> None:
    done = sum(1 for cell in cells if cell.style is CellStyle.DONE)
    share = sum(cell.share for cell in cells) / len(cells) if cells else 0.0
    page.heading(title, f"{done:,} of {len(cells):,} partitions done  ·  {share:.1%} of the properties")
    pitch, columns = _cell_size(len(cells))
    size = pitch - (3 if pitch >= _MARKED_CELL else 1 if pitch > 3 else 0)
    axes = page.panel(max(1, _grid_height(len(cells))))
    boxes: dict[str, list[tuple[float, float, float, float]]] = {style.colour: [] for style in CellStyle}
    for number, cell in enumerate(cells):
        line, column = divmod(number, columns)
        x, y = column * pitch, line * pitch
        if cell.style in (CellStyle.RUNNING, CellStyle.INTERRUPTED) and size >= _MARKED_CELL - 3:
            # A frame in the cell's colour, filled from the bottom as far as the partition is done.
            filled = round((size - 4) * min(1.0, cell.share))
            boxes[cell.style.colour] += [(x, y, size, 2), (x, y, 2, size), (x + size - 2, y, 2, size)]
            boxes[cell.style.colour] += [(x, y + size - 2 - filled, size, filled + 2)]
            boxes[CellStyle.NOT_STARTED.colour] += [(x + 2, y + 2, size - 4, size - 4 - filled)]
        else:
            boxes[cell.style.colour].append((x, y, size, size))
        if cell.style is CellStyle.FAILED and size >= _MARKED_CELL - 3:
            _cross(axes, x, y, size)
    for colour, filled_boxes in boxes.items():
        _fill(axes, filled_boxes, colour)
    page.y += 14


def _fill(axes: Axes, boxes: Sequence[tuple[float, float, float, float]], colour: str) -> None:
    """Fill boxes (left, top, width, height in pixels), with sharp edges."""
    from matplotlib.collections import PolyCollection

    corners = [[(x, y), (x + w, y), (x + w, y + h), (x, y + h)] for x, y, w, h in boxes]
    axes.add_collection(PolyCollection(corners, facecolors=colour, edgecolors="none", antialiaseds=False))


def _cross(axes: Axes, x: float, y: float, size: float) -> None:
    near, far = size * 0.28, size * 0.72
    for ends in ((near, far), (far, near)):
        axes.plot((x + near, x + far), (y + ends[0], y + ends[1]), color="white", linewidth=1.3, zorder=3)


def _draw_throughput(page: _Page, done: Throughput, colours: Mapping[str, str]) -> None:
    highest = done.highest / done.width
    page.heading(
        "Properties described over time",
        f"up to {highest:.3g} a second, in steps of {_span(done.width)}" if done.bars else "none yet",
    )
    axes = page.panel(_CHART_HEIGHT, left=_MARGIN + 40, width=_INSIDE - 40)
    axes.spines["bottom"].set(visible=True, color=_LINE)
    page.y += 40
    if not done.bars:
        return
    from matplotlib import dates
    from matplotlib.ticker import MaxNLocator

    zone = datetime.fromtimestamp(done.start).astimezone().tzinfo
    at = [
        dates.date2num(datetime.fromtimestamp(done.start + done.width * number, zone))
        for number in range(len(done.bars))
    ]
    one = done.width / 86_400
    level = [0.0] * len(done.bars)
    for device in done.devices:
        tall = [bar.get(device, 0.0) / done.width for bar in done.bars]
        axes.bar(
            at, tall, width=one * 0.86, bottom=level, align="edge", color=colours[device], antialiased=False
        )
        level = [low + more for low, more in zip(level, tall, strict=True)]
    least_bars = (_INSIDE - 40) // _MOST_BAR_WIDTH
    axes.set(xlim=(at[0], at[0] + one * max(len(at), least_bars)), ylim=(0, highest * 1.08 or 1.0))
    places = dates.AutoDateLocator(tz=zone, minticks=3, maxticks=8)
    axes.xaxis.set_major_locator(places)
    axes.xaxis.set_major_formatter(dates.ConciseDateFormatter(places, tz=zone))
    axes.xaxis.get_offset_text().set(size=8, color=_FAINT)
    axes.yaxis.set_major_locator(MaxNLocator(3))
    axes.tick_params(labelsize=8, labelcolor=_FAINT, color=_LINE, length=3)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="y", color=_LINE, linewidth=0.8)
    axes.set_axisbelow(True)


def _span(seconds: int) -> str:
    for unit, length in (("week", 604_800), ("day", 86_400), ("hour", 3600), ("minute", 60), ("second", 1)):
        if seconds >= length:
            count = seconds // length
            return f"{count} {unit}{'s' if count > 1 else ''}"
    return f"{seconds} s"


def _draw_devices(page: _Page, devices: Sequence[DeviceBar], colours: Mapping[str, str]) -> None:
    page.heading("Devices, properties a second", "" if devices else "none is known yet")
    axes = page.panel(_BAR_HEIGHT * max(1, len(devices)))
    highest = max((one.rate or 0.0 for one in devices), default=0.0) or 1.0
    room = _INSIDE - _NAME_WIDTH - 190
    for number, one in enumerate(devices):
        middle = (number + 0.5) * _BAR_HEIGHT
        axes.text(0, middle, _shortened(one.name), size=9, color=_INK, va="center")
        _fill(axes, [(_NAME_WIDTH, middle - 7, room, 14)], "#f1efea")
        _fill(axes, [(_NAME_WIDTH, middle - 7, room * (one.rate or 0.0) / highest, 14)], colours[one.name])
        axes.text(_NAME_WIDTH + room + 14, middle, _figures(one), size=9, color=_FAINT, va="center")


def _shortened(name: str) -> str:
    return name if len(name) <= 20 else f"{name[:10]}…{name[-8:]}"


def _figures(one: DeviceBar) -> str:
    rate = "no figure yet" if one.rate is None else f"{one.rate:.2f}"
    return f"{rate},  {one.note}" if one.note else rate
