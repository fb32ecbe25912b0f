"""The progress picture: every partition as a cell, properties described over time, devices side by side.

This module only draws. ``automation/dataset_progress.py`` collects what is drawn.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from textwrap import wrap
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from vlm_assets.assets.partition_state import State
from vlm_assets.assets.published_rows import Stretch
from vlm_assets.operate.status import DeviceStatus, PartitionStatus
from vlm_assets.operate.terminal import duration

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MOST_BARS = 72
_FEWEST_BARS = 22
"""Wider bars than those of so many look like a fault."""

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
_INSIDE = WIDTH - 60
_GRID_HEIGHT = 190
_LARGEST_CELL = 26
_MARKED_CELL = 9
"""Pixels of the smallest cell that shows its share and a mark."""

_CARD = "#fcfbf8"
"""The picture brings its own background, so that it reads on a light page and on a dark one."""
_INK = "#262a30"
_FAINT = "#74787e"
_LINE = "#dedcd6"
_COLOURS_KEPT = 32

DONE, RUNNING, INTERRUPTED, FAILED, NOT_STARTED = "#009e73", "#56b4e9", "#f0c842", "#d55e00", "#dbd9d3"
"""How partitions look. Colour-blind people tell them apart."""

LEGEND = dict(
    zip(
        (DONE, RUNNING, INTERRUPTED, FAILED, NOT_STARTED),
        ("done", "running", "interrupted", "failed", "not started"),
        strict=True,
    )
)

STYLES: Mapping[State, str] = {
    State.DONE: DONE,
    State.STALE: DONE,
    State.RUNNING: RUNNING,
    State.INTERRUPTED: INTERRUPTED,
    State.CANCELLED: INTERRUPTED,
    State.FAILED: FAILED,
    State.GIVEN_UP: FAILED,
    State.REFUSED: FAILED,
    State.DAMAGED: FAILED,
    State.LOST: FAILED,
    State.NOT_STARTED: NOT_STARTED,
}

_DEVICE_COLOURS = ("#0072b2", "#e69f00", "#cc79a7", "#5c544c", "#56b4e9", "#009e73", "#949494", "#d55e00")


def progress_picture(
    partitions: Sequence[PartitionStatus],
    devices: Sequence[DeviceStatus],
    stretches: Iterable[Stretch],
    *,
    paused: str | None = None,
) -> bytes:
    """Draw a PNG of a few kilobytes: Dagster's event log keeps every picture.

    partitions: of all assets, each asset's in the order of the catalogue. paused: the sentence that says
    since when and why nothing runs.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    done = throughput(stretches)
    cells = {
        asset: [one for one in partitions if one.asset == asset]
        for asset in dict.fromkeys(one.asset for one in partitions)
    }
    grids = {asset: _drawn(some) for asset, some in cells.items()}
    banner = wrap(paused, 105, max_lines=4) if paused else []
    heights = [18 * len(banner) + 16] * bool(banner) + [len(image) for image in grids.values()]
    heights += [120, 26 * max(1, len(devices))]
    height = sum(heights) + 42 * len(heights) + 40
    figure = Figure(figsize=(WIDTH / _DPI, height / _DPI), dpi=_DPI, facecolor=_CARD, layout="constrained")
    canvas = FigureCanvasAgg(figure)
    figure.legend(
        handles=[Patch(color=colour, label=name) for colour, name in LEGEND.items()],
        ncols=len(LEGEND), loc="outside upper left", frameon=False, fontsize=9, labelcolor=_INK,
    )  # fmt: skip
    panels = list(figure.subplots(len(heights), 1, height_ratios=heights, squeeze=False)[:, 0])
    for axes in panels:
        axes.set(xticks=[], yticks=[], facecolor="none")
        axes.spines[:].set_visible(False)
        axes.tick_params(labelsize=8, labelcolor=_FAINT, color=_LINE, length=3)
    if banner:
        axes = panels.pop(0)
        axes.set(facecolor=INTERRUPTED)
        axes.text(0.015, 0.5, "\n".join(banner), size=10, color=_INK, va="center", linespacing=1.3)
    for axes, (asset, some) in zip(panels, cells.items(), strict=False):
        finished = sum(1 for one in some if STYLES[one.state] == DONE)
        share = sum(one.usable_rows / one.expected for one in some) / len(some)
        said = f"{finished:,} of {len(some):,} partitions done  ·  {share:.1%} of the properties"
        _entitle(axes, asset, said)
    names = dict.fromkeys((*(one.id for one in devices), *done.bars))
    colours = {name: _DEVICE_COLOURS[n % len(_DEVICE_COLOURS)] for n, name in enumerate(names)}
    _draw_throughput(panels[-2], done, colours)
    _draw_devices(panels[-1], devices, colours)
    figure.draw_without_rendering()
    for axes, image in zip(panels, grids.values(), strict=False):
        # Pixel by pixel: scaled, the gaps between cells would differ.
        box = axes.get_window_extent()
        figure.figimage(image, min(box.x0, WIDTH - 4 - image.shape[1]), box.y1 - len(image))
    canvas.draw()
    return _png(np.asarray(canvas.buffer_rgba())[:, :, :3])


def _entitle(axes: Axes, title: str, said: str) -> None:
    axes.set_title(title, loc="left", size=10.5, weight="bold", color=_INK)
    axes.set_title(said, loc="right", size=9, color=_FAINT)


def _drawn(cells: Sequence[PartitionStatus]) -> npt.NDArray[np.uint8]:
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
        style = STYLES[cell.state]
        box[:] = _rgb(style)
        if size < _MARKED_CELL:
            continue
        if style in (RUNNING, INTERRUPTED):
            # A frame in the cell's colour, filled from the bottom as far as the partition is done.
            empty = round((size - 4) * (1.0 - min(1.0, cell.usable_rows / cell.expected)))
            box[2 : 2 + empty, 2:-2] = _rgb(NOT_STARTED)
        elif style == FAILED:
            for at in range(size * 7 // 25, size - size * 7 // 25):
                box[at, at : at + 2] = box[at, size - 2 - at : size - at] = 255
    return image


def _rgb(colour: str) -> list[int]:
    return list(bytes.fromhex(colour.removeprefix("#")))


def _draw_throughput(axes: Axes, done: Throughput, colours: Mapping[str, str]) -> None:
    from matplotlib import dates
    from matplotlib.ticker import MaxNLocator

    title = "Properties described over time"
    axes.spines["bottom"].set(visible=True, color=_LINE)
    if not done.bars:
        _entitle(axes, title, "none yet")
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
    highest = float(level.max())
    _entitle(axes, title, f"up to {highest:.3g} a second, in steps of {duration(done.width)}")
    axes.set(xlim=(at[0], at[0] + one * max(len(at), _FEWEST_BARS)), ylim=(0, highest * 1.08 or 1.0))
    places = dates.AutoDateLocator(tz=zone, minticks=3, maxticks=8)
    axes.xaxis.set(major_locator=places, major_formatter=dates.ConciseDateFormatter(places, tz=zone))
    axes.xaxis.get_offset_text().set(size=8, color=_FAINT)
    axes.yaxis.set_major_locator(MaxNLocator(3))
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="y", color=_LINE, linewidth=0.8)
    axes.set_axisbelow(True)


def _draw_devices(axes: Axes, devices: Sequence[DeviceStatus], colours: Mapping[str, str]) -> None:
    _entitle(axes, "Devices, properties a second", "" if devices else "none is known yet")
    rates = [one.properties_per_second or 0.0 for one in devices]
    highest = max(rates, default=0.0) or 1.0
    places = range(len(devices))
    axes.barh(places, [highest] * len(devices), height=0.55, color="#f1efea")
    axes.barh(places, rates, height=0.55, color=[colours[one.id] for one in devices], antialiased=False)
    for place, one in zip(places, devices, strict=True):
        rate = one.properties_per_second
        said = "no figure yet" if rate is None else f"{rate:.2f}"
        note = "left out" if one.left_out is not None else "" if one.is_here else "not here now"
        said = f"{said},  {note}" if note else said
        axes.text(highest * 1.02, place, said, size=9, color=_FAINT, va="center")
        name = one.id if len(one.id) <= 20 else f"{(one.node or one.id)[:10]}…{one.id[-8:]}"
        axes.text(highest * -0.28, place, name, size=9, color=_INK, va="center")
    axes.set(xlim=(highest * -0.28, highest * 1.35), ylim=(max(1, len(devices)) - 0.5, -0.5))


def _png(pixels: npt.NDArray[np.uint8]) -> bytes:
    """The finished picture, in a palette of its most frequent colours: a third of the bytes."""
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
