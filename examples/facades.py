"""Windows and doors of an example property's building: what one storey shows, by kind of building."""

from __future__ import annotations

import random
from typing import Final

from examples.canvas import GROUND, Canvas, Color, darker, lighter

_CLIMBERS: Final = ((74, 116, 62), (92, 138, 74), (206, 110, 130))


def draw_window(
    canvas: Canvas,
    x: float,
    y: float,
    width: float,
    height: float,
    *,
    lit: bool,
    bars: int = 1,
    frame: Color = (246, 246, 242),
) -> None:
    """A window with its frame and sill; ``bars`` divide it, ``lit`` is a lamp behind it."""
    canvas.rect(x - 1.6, y - 1.6, width + 3.2, height + 3.2, frame)
    if lit:
        canvas.gradient(x, y, width, height, (255, 226, 150), (244, 180, 92))
    else:
        canvas.gradient(x, y, width, height, (70, 96, 122), (150, 182, 202))
        canvas.poly(
            [(x, y + height), (x + width * 0.7, y), (x + width * 0.35, y), (x, y + height * 0.5)],
            (230, 240, 246),
            0.28,
        )
    for bar in range(1, bars + 1):
        at = x + width * bar / (bars + 1)
        canvas.line((at, y), (at, y + height), frame, 1.2)
    canvas.rect(x - 2.4, y + height + 1.4, width + 4.8, 1.8, darker(frame, 0.25))


def _door(canvas: Canvas, x: float, y: float, width: float, height: float, color: Color) -> None:
    canvas.rect(x - 2, y - 2, width + 4, height + 2, (240, 238, 232))
    canvas.gradient(x, y, width, height, lighter(color, 0.14), darker(color, 0.12))
    canvas.rect(x + width * 0.2, y + height * 0.12, width * 0.6, height * 0.28, (176, 204, 216))
    canvas.oval(x + width * 0.82, y + height * 0.56, 0.9, 0.9, (236, 206, 120))


def draw_storey(
    canvas: Canvas,
    building: str,
    roof: Color,
    door: Color,
    left: float,
    top: float,
    width: float,
    storey: float,
    ground: bool,
    dusk: bool,
    rng: random.Random,
) -> None:
    """One row of windows as this kind of building has them; on the ground floor the door."""
    middle = left + width / 2

    def lit() -> bool:
        return dusk and rng.random() < 0.7

    if building == "apartment_block":
        for column in range(4):
            x = left + width * (column + 0.5) / 4 - 9
            if ground and column in (1, 2):
                continue
            draw_window(canvas, x, top + 6, 18, 15, lit=lit(), bars=1)
            if not ground:
                canvas.rect(x - 5, top + 15, 28, 9, (84, 92, 102), 0.55)
                canvas.rect(x - 5, top + 14, 28, 1.8, (226, 230, 232))
                canvas.rect(x - 5, top + 24, 28, 2.4, (214, 214, 210))
        if ground:
            canvas.rect(middle - 26, top + 1, 52, 4, (90, 92, 98))
            draw_window(canvas, middle - 22, top + 7, 13, storey - 8, lit=dusk, bars=0, frame=(70, 74, 82))
            _door(canvas, middle - 7, top + 7, 14, storey - 7, door)
            draw_window(canvas, middle + 9, top + 7, 13, storey - 8, lit=dusk, bars=0, frame=(70, 74, 82))
    elif building == "terraced_house":
        if ground:
            _door(canvas, left + width * 0.7, top + 5, 15, storey - 5, door)
        else:
            draw_window(canvas, left + width * 0.66, top + 8, 18, 19, lit=lit())
        canvas.poly(
            [(left + 6, top + 3), (left + 54, top + 3), (left + 56, top + 7), (left + 4, top + 7)],
            (232, 230, 224),
        )
        for x, pane in ((left + 8, 9.0), (left + 20, 20.0), (left + 43, 9.0)):
            draw_window(canvas, x, top + 8, pane, 19, lit=lit(), bars=0)
        canvas.rect(left + 5, top + 29, 50, 3, (224, 222, 214))
    elif building == "detached_house":
        for x in (left + 13, left + width - 45):
            draw_window(canvas, x, top + 8, 32, 18, lit=lit(), bars=2)
        if ground:
            _door(canvas, middle - 8, top + 6, 16, storey - 6, door)
            canvas.poly([(middle - 22, top + 6), (middle, top - 9), (middle + 22, top + 6)], roof)
            for x in (middle - 19, middle + 15):
                canvas.rect(x, top + 6, 4, storey - 6, (244, 242, 236))
        else:
            draw_window(canvas, middle - 8, top + 8, 16, 18, lit=lit())
    elif building == "bungalow":
        for x in (left + 16, left + width - 60):
            draw_window(canvas, x, top + 10, 44, 16, lit=lit(), bars=2)
        if ground:
            _door(canvas, middle - 8, top + 8, 16, storey - 8, door)
            canvas.poly(
                [(left - 4, top + 5), (left + 6, top), (left + width - 6, top), (left + width + 4, top + 5)],
                lighter(roof, 0.25),
            )
            for step in range(6):
                canvas.rect(left + 2 + step * (width - 7) / 5, top + 5, 3, storey - 5, (240, 238, 230))
            canvas.rect(left, GROUND - 9, width * 0.42, 1.8, (240, 238, 230))
            canvas.rect(left + width * 0.58, GROUND - 9, width * 0.42, 1.8, (240, 238, 230))
    elif building == "cottage":
        for x in (left + 16, left + width - 32):
            draw_window(canvas, x, top + 9, 15, 14, lit=lit())
            for shutter in (x - 9, x + 17):
                canvas.rect(shutter, top + 8, 7, 17, door)
        if ground:
            _door(canvas, middle - 7, top + 7, 14, storey - 7, door)
        for _ in range(9):
            canvas.oval(
                left + rng.uniform(0, 8),
                top + rng.uniform(0, storey),
                rng.uniform(3, 5),
                rng.uniform(3, 5),
                rng.choice(_CLIMBERS),
            )
    else:
        draw_window(
            canvas, left + 8, top + 5, width * 0.56, storey - 9, lit=lit(), bars=4, frame=(58, 62, 70)
        )
        if ground:
            _door(canvas, left + width * 0.68, top + 6, 15, storey - 6, door)
            draw_window(
                canvas, left + width * 0.82, top + 8, 20, storey - 15, lit=lit(), bars=0, frame=(58, 62, 70)
            )
        else:
            draw_window(
                canvas, left + width * 0.7, top + 8, 42, storey - 15, lit=lit(), bars=1, frame=(58, 62, 70)
            )
            canvas.rect(left + 2, top + storey - 3, width * 0.62, 3.5, (226, 226, 222))
