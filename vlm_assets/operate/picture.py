"""The picture of a dataset's progress: every partition as a cell, described properties over time, devices.

What lives here: drawing, with Pillow, on a card of its own that reads on a light page and on a dark one. The
colours are Okabe and Ito's, which colour-blind people tell apart. What does not: what is drawn.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import Enum
from textwrap import wrap

from PIL import Image, ImageDraw, ImageFont

from vlm_assets.operate.throughput import Throughput

WIDTH = 920
_MARGIN = 24
_INSIDE = WIDTH - 2 * _MARGIN
_GRID_HEIGHT = 190
_CHART_HEIGHT = 110
_LARGEST_CELL = 26
_MARKED_CELL = 12
"""Smaller cells show neither how far they are nor a mark."""

_BANNER_LETTERS, _BANNER_LINES, _BANNER_PITCH = 95, 4, 20

_CARD = (252, 251, 248)
_INK = (38, 42, 48)
_FAINT = (116, 120, 126)
_LINE = (222, 220, 214)


class Look(Enum):
    """How a partition looks: name and colour in the legend, in its order."""

    DONE = ("done", (0, 158, 115))
    RUNNING = ("running", (86, 180, 233))
    INTERRUPTED = ("interrupted", (240, 200, 66))
    FAILED = ("failed", (213, 94, 0))
    NOT_STARTED = ("not started", (219, 217, 211))

    @property
    def colour(self) -> tuple[int, int, int]:
        """Red, green, blue."""
        return self.value[1]


@dataclass(frozen=True)
class Cell:
    """One partition. share: how much of it is done, 0 to 1."""

    look: Look
    share: float


@dataclass(frozen=True)
class DeviceBar:
    """One device: its properties a second so far and now, None where not known. note: instead of now."""

    name: str
    so_far: float | None
    now: float | None
    note: str | None = None


_DEVICE_COLOURS = (
    (0, 114, 178),
    (230, 159, 0),
    (204, 121, 167),
    (92, 84, 76),
    (86, 180, 233),
    (0, 158, 115),
    (148, 148, 148),
    (213, 94, 0),
)


def progress_picture(
    grids: Mapping[str, Sequence[Cell]],
    done: Throughput,
    devices: Sequence[DeviceBar],
    *,
    paused: str | None = None,
) -> bytes:
    """A PNG of a few kilobytes. grids: by title, partitions in the order of the catalogue.

    paused: the sentence that says since when and why everything stands still.
    """
    banner = wrap(paused, _BANNER_LETTERS, max_lines=_BANNER_LINES) if paused else []
    canvas = _Canvas(_height(grids, devices) + _banner_height(banner))
    canvas.banner(banner)
    canvas.legend()
    for title, cells in grids.items():
        canvas.grid(title, cells)
    colours = {
        name: _DEVICE_COLOURS[number % len(_DEVICE_COLOURS)]
        for number, name in enumerate(dict.fromkeys((*(one.name for one in devices), *done.devices)))
    }
    canvas.chart(done, colours)
    canvas.devices(devices, colours)
    return canvas.png()


def _cell_size(count: int) -> tuple[int, int]:
    """Pixels from one cell to the next, and cells a line, so that all of them fit."""
    for pitch in range(_LARGEST_CELL, 1, -1):
        columns = _INSIDE // pitch
        if -(-count // columns) * pitch <= _GRID_HEIGHT:
            return pitch, columns
    return 2, _INSIDE // 2


def _banner_height(lines: Sequence[str]) -> int:
    return len(lines) * _BANNER_PITCH + 28 if lines else 0


def _height(grids: Mapping[str, Sequence[Cell]], devices: Sequence[DeviceBar]) -> int:
    height = 2 * _MARGIN + 24
    for cells in grids.values():
        pitch, columns = _cell_size(len(cells))
        height += 40 + -(-len(cells) // columns) * pitch
    return height + _CHART_HEIGHT + 66 + 22 * max(1, len(devices)) + 22


class _Canvas:
    """What is drawn so far, and where the next part begins."""

    def __init__(self, height: int) -> None:
        self._image = Image.new("RGB", (WIDTH, height), _CARD)
        self._draw = ImageDraw.Draw(self._image)
        self._text = ImageFont.load_default(13)
        self._title = ImageFont.load_default(15)
        self._y = _MARGIN

    def png(self) -> bytes:
        stream = io.BytesIO()
        # A palette: the same to the eye, in a third of the bytes that the event log keeps for ever.
        reduced = self._image.quantize(palette=_palette(), dither=Image.Dither.NONE)
        reduced.save(stream, "PNG", optimize=True)
        return stream.getvalue()

    def banner(self, lines: Sequence[str]) -> None:
        """What a person must read first; nothing where there are no lines."""
        if not lines:
            return
        tall = _banner_height(lines)
        box = (_MARGIN, self._y, WIDTH - _MARGIN, self._y + tall - 14)
        self._draw.rectangle(box, fill=Look.INTERRUPTED.colour)
        for number, line in enumerate(lines):
            self._say(_MARGIN + 10, self._y + 8 + number * _BANNER_PITCH, line, self._title)
        self._y += tall

    def legend(self) -> None:
        x = float(_MARGIN)
        for look in Look:
            self._draw.rectangle((x, self._y + 2, x + 12, self._y + 14), fill=look.colour)
            self._mark(look, x, self._y + 2, 13)
            x = self._say(x + 18, self._y, look.value[0]) + 22
        self._y += 24

    def grid(self, title: str, cells: Sequence[Cell]) -> None:
        done = sum(1 for cell in cells if cell.look is Look.DONE)
        share = sum(cell.share for cell in cells) / len(cells) if cells else 0.0
        self._y += 8
        end = self._say(_MARGIN, self._y, title, self._title)
        self._say(end + 10, self._y + 2, f"{done} of {len(cells)} partitions, {share:.1%}", colour=_FAINT)
        self._y += 24
        pitch, columns = _cell_size(len(cells))
        size = pitch - (2 if pitch >= _MARKED_CELL else 1 if pitch > 3 else 0)
        for number, cell in enumerate(cells):
            line, column = divmod(number, columns)
            self._cell(cell, _MARGIN + column * pitch, self._y + line * pitch, size)
        self._y += -(-len(cells) // columns) * pitch + 8

    def _cell(self, cell: Cell, x: int, y: int, size: int) -> None:
        box = (x, y, x + size - 1, y + size - 1)
        under_way = cell.look in (Look.RUNNING, Look.INTERRUPTED)
        if under_way and size >= _MARKED_CELL - 2:
            # Filled from the bottom, as far as it is done; the frame says what it is at 0%.
            self._draw.rectangle(box, fill=Look.NOT_STARTED.colour)
            top = y + size - max(1, round(size * cell.share))
            self._draw.rectangle((x, top, x + size - 1, y + size - 1), fill=cell.look.colour)
            self._draw.rectangle(box, outline=cell.look.colour, width=2)
        else:
            self._draw.rectangle(box, fill=cell.look.colour)
        self._mark(cell.look, x, y, size)

    def _mark(self, look: Look, x: float, y: float, size: int) -> None:
        if look is Look.FAILED and size >= _MARKED_CELL - 2:
            inset = max(2, size // 4)
            left, top, right, bottom = x + inset, y + inset, x + size - 1 - inset, y + size - 1 - inset
            self._draw.line((left, top, right, bottom), fill="white", width=2)
            self._draw.line((left, bottom, right, top), fill="white", width=2)

    def chart(self, done: Throughput, colours: Mapping[str, tuple[int, int, int]]) -> None:
        self._y += 8
        end = self._say(_MARGIN, self._y, "properties described over time", self._title)
        if not done.bars:
            self._say(end + 10, self._y + 2, "nothing is published yet", colour=_FAINT)
        else:
            rate = f"highest bar: {done.highest / done.width:.3g} a second"
            self._say(end + 10, self._y + 2, rate, colour=_FAINT)
        self._y += 26
        bottom = self._y + _CHART_HEIGHT
        pitch = min(40.0, _INSIDE / max(1, len(done.bars)))
        for number, bar in enumerate(done.bars):
            level = float(bottom)
            left = _MARGIN + number * pitch
            for device in done.devices:
                tall = _CHART_HEIGHT * bar.get(device, 0.0) / done.highest
                if tall >= 0.5:
                    right = left + max(1.0, pitch - 2)
                    self._draw.rectangle((left, level - tall, right, level - 1), fill=colours[device])
                level -= tall
        self._draw.line((_MARGIN, bottom, WIDTH - _MARGIN, bottom), fill=_LINE)
        if done.bars:
            last = _MARGIN + len(done.bars) * pitch
            self._say(_MARGIN, bottom + 4, _moment(done.start), colour=_FAINT)
            until = _moment(done.start + len(done.bars) * done.width)
            width = self._draw.textlength(until, self._text)
            if last - width > _MARGIN + 180:
                self._say(last - width, bottom + 4, until, colour=_FAINT)
        self._y = bottom + 24

    def devices(self, devices: Sequence[DeviceBar], colours: Mapping[str, tuple[int, int, int]]) -> None:
        self._y += 8
        self._say(_MARGIN, self._y, "devices side by side, properties a second", self._title)
        self._y += 26
        highest = max((max(one.so_far or 0.0, one.now or 0.0) for one in devices), default=0.0) or 1.0
        name_width, room = 230, _INSIDE - 230 - 200
        for one in devices:
            self._say(_MARGIN, self._y, _shortened(one.name))
            left = _MARGIN + name_width
            long = room * (one.so_far or 0.0) / highest
            if long:
                self._draw.rectangle((left, self._y + 2, left + long, self._y + 13), fill=colours[one.name])
            if one.now:
                at = left + room * one.now / highest
                self._draw.line((at, self._y - 1, at, self._y + 16), fill=_INK, width=2)
            self._say(left + room + 12, self._y, _figures(one), colour=_FAINT)
            self._y += 22
        if not devices:
            self._say(_MARGIN, self._y, "none is known", colour=_FAINT)

    def _say(
        self,
        x: float,
        y: float,
        text: str,
        font: ImageFont.ImageFont | ImageFont.FreeTypeFont | None = None,
        *,
        colour: tuple[int, int, int] = _INK,
    ) -> float:
        """Write; gives where the text ends."""
        self._draw.text((x, y), text, fill=colour, font=font or self._text)
        return x + self._draw.textlength(text, font or self._text)


def _palette() -> Image.Image:
    """The colours that are drawn with, and those between the texts' and the card's, for smooth letters."""
    colours: list[tuple[int, ...]] = [
        _CARD,
        _LINE,
        (255, 255, 255),
        *(look.colour for look in Look),
        *_DEVICE_COLOURS,
    ]
    for text in (_INK, _FAINT):
        for step in range(16):
            colours.append(
                tuple(round(ink + (card - ink) * step / 15) for ink, card in zip(text, _CARD, strict=True))
            )
    palette = Image.new("P", (1, 1))
    palette.putpalette([channel for colour in colours for channel in colour])
    return palette


def _moment(at: float) -> str:
    return datetime.fromtimestamp(at).astimezone().strftime("%d %b %Y %H:%M")


def _shortened(name: str) -> str:
    return name if len(name) <= 30 else f"{name[:18]}...{name[-9:]}"


def _figures(one: DeviceBar) -> str:
    so_far = "no figure yet" if one.so_far is None else f"{one.so_far:.2f} so far"
    now = one.note if one.now is None else f"{one.now:.2f} now"
    return f"{so_far}, {now}" if now else so_far
