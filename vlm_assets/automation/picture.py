"""The progress picture: every partition as a cell, properties described over time, devices side by side.

This module only draws. ``vlm_assets/automation/dataset_progress.py`` collects what is drawn.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from textwrap import shorten, wrap
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from vlm_assets.assets.partition_state import State
from vlm_assets.services.status import DeviceStatus, PartitionStatus
from vlm_durable.state.rate import Stretch
from vlm_durable.wording import counted, duration
from vlm_engine.devices.find import members

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MOST_BARS = 72
_FEWEST_BARS = 22
"""The axis has room for this many bars at least: wider bars look like a fault."""

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
    work = [(stretch, max(stretch.last, stretch.first + 1.0)) for stretch in stretches if stretch.rows]
    if not work:
        return Throughput(0.0, _WIDTHS[0], {})
    first, last = min(stretch.first for stretch, _ in work), max(end for _, end in work)
    width = next((seconds for seconds in _WIDTHS if (last - first) / seconds < MOST_BARS - 1), _WIDTHS[-1])
    start = first // width * width
    edges = start + width * np.arange(int((last - start) // width) + 2)
    bars: dict[str, Any] = {}
    for stretch, end in sorted(work, key=lambda stretch_and_end: stretch_and_end[0].device):
        rows = stretch.rows * np.diff(np.clip(edges, stretch.first, end)) / (end - stretch.first)
        bars[stretch.device] = bars.get(stretch.device, 0.0) + rows
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
"""The colours of partitions, which colour-blind people tell apart. A device with a trouble has the colour of
failed ones."""

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


_MOST_DEVICES = 16
"""The most devices that have a line each. With more of them, each node of a cluster has one line for all."""

_LINE_HEIGHT, _NODE_HEIGHT = 26, 17
_LONGEST_NOTE = 34


@dataclass(frozen=True)
class _Line:
    """A line of the panel of devices: a device, or a node with all of its devices. wrong: its trouble."""

    id: str
    name: str
    rate: float | None
    note: str
    wrong: str


def _lines(devices: Sequence[DeviceStatus]) -> list[_Line]:
    """A line for each device; with many devices in a cluster, a line for each node."""
    if len(devices) <= _MOST_DEVICES:
        return [_line(device) for device in devices]
    nodes: dict[str, list[DeviceStatus]] = {}
    for device in devices:
        nodes.setdefault(device.node or device.id, []).append(device)
    return [_line_of_node(name, members_of_node) for name, members_of_node in nodes.items()]


def _line(device: DeviceStatus) -> _Line:
    name = device.id if len(device.id) <= 20 else f"{(device.node or device.id)[:10]}…{device.id[-8:]}"
    wrong = "left out" if device.left_out is not None else _in_short(device)
    if not wrong and not device.is_here:
        wrong = "not here now"
    return _Line(device.id, name, device.properties_per_second, _degrees(device.temperature), wrong)


def _line_of_node(name: str, devices: Sequence[DeviceStatus]) -> _Line:
    if [device.id for device in devices] == [name]:
        return _line(devices[0])
    rates = [device.properties_per_second for device in devices if device.properties_per_second is not None]
    heat = max((device.temperature for device in devices if device.temperature is not None), default=None)
    wrongs = [_line(device).wrong for device in devices]
    counts = [f"{wrongs.count(why)} of {len(devices)} {why}" for why in dict.fromkeys(wrongs) if why]
    # A trouble that all devices have is the node's: it is silent, or paused.
    wrong = wrongs[0] if len(set(wrongs)) == 1 else ", ".join(counts)
    return _Line(name, name, sum(rates) if rates else None, _degrees(heat), wrong)


def _degrees(temperature: int | None) -> str:
    return "" if temperature is None else f"{temperature} °C"


def _in_short(device: DeviceStatus) -> str:
    """The beginning of a device's trouble, without the names that the line shows anyway."""
    names = "|".join(map(re.escape, (*members(device.id), f"the node {device.node}")))
    trouble = re.sub(f"^({names}) (is )?", "", device.trouble)
    return re.split(r" \(|[:;] ", trouble, maxsplit=1)[0]


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

    lines = _lines(devices)
    if len(lines) < len(devices):
        node_of = {device.id: device.node for device in devices if device.node is not None}
        stretches = [
            replace(stretch, device=node_of.get(stretch.device, stretch.device)) for stretch in stretches
        ]
    done = throughput(stretches)
    cells = {
        asset: [partition for partition in partitions if partition.asset == asset]
        for asset in dict.fromkeys(partition.asset for partition in partitions)
    }
    grids = {asset: _drawn(cells_of_asset) for asset, cells_of_asset in cells.items()}
    banner = wrap(paused, 105, max_lines=4) if paused else []
    heights = [18 * len(banner) + 16] * bool(banner) + [len(image) for image in grids.values()]
    heights += [120, (_LINE_HEIGHT if len(lines) <= _MOST_DEVICES else _NODE_HEIGHT) * max(1, len(lines))]
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
        text = "\n".join(banner)
        axes.text(0.015, 0.5, text, size=10, color=_INK, va="center", linespacing=1.3, parse_math=False)
    for axes, (asset, cells_of_asset) in zip(panels, cells.items(), strict=False):
        finished = sum(1 for partition in cells_of_asset if STYLES[partition.state] == DONE)
        shares = [partition.usable_rows / partition.expected for partition in cells_of_asset]
        share = sum(shares) / len(shares)
        partitions_done = f"{finished:,} of {counted(len(cells_of_asset), 'partitions')} done"
        _entitle(axes, asset, f"{partitions_done}  ·  {share:.1%} of the properties")
    names = dict.fromkeys((*(line.id for line in lines), *done.bars))
    colours = {name: _DEVICE_COLOURS[n % len(_DEVICE_COLOURS)] for n, name in enumerate(names)}
    _draw_throughput(panels[-2], done, colours)
    _draw_devices(panels[-1], lines, colours)
    figure.draw_without_rendering()
    for axes, image in zip(panels, grids.values(), strict=False):
        # Pixel by pixel: scaled, the gaps between cells would differ.
        box = axes.get_window_extent()
        figure.figimage(image, min(box.x0, WIDTH - 4 - image.shape[1]), box.y1 - len(image))
    canvas.draw()
    return _png(np.asarray(canvas.buffer_rgba())[:, :, :3])


def _entitle(axes: Axes, title: str, subtitle: str) -> None:
    axes.set_title(title, loc="left", size=10.5, weight="bold", color=_INK)
    axes.set_title(subtitle, loc="right", size=9, color=_FAINT)


def _drawn(cells: Sequence[PartitionStatus]) -> npt.NDArray[np.uint8]:
    """The cells as pixels [height, width, 3], line by line, as large as fits."""
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
    bar_days, level = done.width / 86_400, np.zeros(len(next(iter(done.bars.values()))))
    at = dates.date2num(datetime.fromtimestamp(done.start, zone)) + bar_days * np.arange(len(level))
    for device, rows in done.bars.items():
        tall = rows / done.width
        axes.bar(
            at,
            tall,
            width=bar_days * 0.86,
            bottom=level,
            align="edge",
            color=colours[device],
            antialiased=False,
        )
        level += tall
    highest = float(level.max())
    _entitle(axes, title, f"up to {highest:.3g} a second, in steps of {duration(done.width)}")
    axes.set(xlim=(at[0], at[0] + bar_days * max(len(at), _FEWEST_BARS)), ylim=(0, highest * 1.08 or 1.0))
    places = dates.AutoDateLocator(tz=zone, minticks=3, maxticks=8)
    axes.xaxis.set(major_locator=places, major_formatter=dates.ConciseDateFormatter(places, tz=zone))
    axes.xaxis.get_offset_text().set(size=8, color=_FAINT)
    axes.yaxis.set_major_locator(MaxNLocator(3))
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="y", color=_LINE, linewidth=0.8)
    axes.set_axisbelow(True)


def _draw_devices(axes: Axes, lines: Sequence[_Line], colours: Mapping[str, str]) -> None:
    """A line for each: name, bar, figure, temperature, trouble. The longest bar is 1 wide."""
    _entitle(axes, "Devices, properties a second", "" if lines else "none is known yet")
    highest = max((line.rate or 0.0 for line in lines), default=0.0) or 1.0
    size = 9 if len(lines) <= _MOST_DEVICES else 8
    places = range(len(lines))
    rates = [(line.rate or 0.0) / highest for line in lines]
    axes.barh(places, [1.0] * len(lines), height=0.55, color="#f1efea")
    axes.barh(places, rates, height=0.55, color=[colours[line.id] for line in lines], antialiased=False)
    # matplotlib would read text between two dollar signs as a formula.
    plain: dict[str, Any] = {"size": size, "color": _INK, "va": "center", "parse_math": False}
    for place, line in zip(places, lines, strict=True):
        rate = "none yet" if line.rate is None else f"{line.rate:.2f}"
        axes.text(-0.42, place, line.name, **plain)
        axes.text(1.02, place, rate, size=size, color=_FAINT, va="center")
        axes.text(1.31, place, line.note, ha="right", **plain)
        if line.wrong:
            axes.plot([1.345], [place], marker="s", markersize=size - 3, color=FAILED, antialiased=False)
            wrong = shorten(line.wrong, _LONGEST_NOTE, placeholder="…")
            axes.text(1.37, place, wrong, **plain)
    right = 1.95 if any(line.note or line.wrong for line in lines) else 1.35
    axes.set(xlim=(-0.42, right), ylim=(max(1, len(lines)) - 0.5, -0.5))


def _png(pixels: npt.NDArray[np.uint8]) -> bytes:
    """The finished picture, in a palette of its most frequent colours: a third of the bytes."""
    codes = pixels.astype(np.uint32) @ np.array([65536, 256, 1], np.uint32)
    _, first, where, counts = np.unique(codes, return_index=True, return_inverse=True, return_counts=True)
    colours = pixels.reshape(-1, 3)[first]
    palette = colours[np.argsort(-counts)[:_COLOURS_KEPT]]
    nearest = np.abs(colours[:, None].astype(int) - palette[None]).sum(axis=2).argmin(axis=1).astype(np.uint8)
    image = Image.fromarray(nearest[where].reshape(codes.shape), "P")
    image.putpalette(palette.tobytes())
    stream = io.BytesIO()
    image.save(stream, "PNG", optimize=True)
    return stream.getvalue()
