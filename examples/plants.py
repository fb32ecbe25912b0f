"""Trees, bushes, flowers and pots for the photos of an example property."""

from __future__ import annotations

import random
from typing import Final

from examples.canvas import Canvas, Color, darker, lighter

_GREENS: Final[tuple[Color, ...]] = ((84, 128, 66), (98, 142, 74), (72, 114, 70), (112, 146, 66))
BLOSSOMS: Final[tuple[Color, ...]] = (
    (232, 84, 110),
    (250, 206, 72),
    (176, 104, 206),
    (252, 250, 244),
    (240, 130, 62),
    (238, 138, 176),
)


def tree(canvas: Canvas, x: float, ground: float, height: float, rng: random.Random) -> None:
    """A tree with a lit and a shaded side to its crown."""
    green, crown = rng.choice(_GREENS), height * 0.33
    canvas.poly(
        [
            (x - 3, ground),
            (x + 3, ground),
            (x + 1.6, ground - height * 0.6),
            (x - 1.6, ground - height * 0.6),
        ],
        (104, 82, 62),
    )
    middle = ground - height * 0.66
    canvas.oval(x, middle, crown, crown * 0.95, darker(green, 0.22))
    for step in range(7):
        spread = step / 6
        dx, dy = rng.uniform(-0.6, 0.6) * crown, rng.uniform(-0.7, 0.5) * crown
        tone = lighter(green, 0.16 * spread)
        canvas.oval(x + dx - crown * 0.12, middle + dy - crown * 0.1, crown * 0.45, crown * 0.4, tone, 0.8)


def bush(canvas: Canvas, x: float, ground: float, size: float, rng: random.Random) -> None:
    """A low round shrub."""
    green = rng.choice(_GREENS)
    canvas.oval(x, ground - size * 0.5, size * 1.1, size * 0.8, darker(green, 0.25))
    canvas.oval(x - size * 0.3, ground - size * 0.7, size * 0.7, size * 0.55, green)
    canvas.oval(x + size * 0.35, ground - size * 0.75, size * 0.5, size * 0.4, lighter(green, 0.15))


def pot(canvas: Canvas, x: float, ground: float, size: float, rng: random.Random) -> None:
    """A plant in a pot."""
    canvas.poly(
        [
            (x - size * 0.4, ground - size * 0.7),
            (x + size * 0.4, ground - size * 0.7),
            (x + size * 0.28, ground),
            (x - size * 0.28, ground),
        ],
        rng.choice(((186, 108, 78), (214, 208, 198), (86, 92, 100))),
    )
    green = rng.choice(_GREENS)
    for step in range(7):
        angle = (step - 3) * 0.3
        tip = (x + angle * size * 1.1, ground - size * (1.9 - abs(angle) * 0.5))
        canvas.poly(
            [(x - 1, ground - size * 0.7), tip, (x + 2.2, ground - size * 0.7)], lighter(green, 0.05 * step)
        )
