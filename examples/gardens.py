"""The gardens of example properties: lawn, flower beds, patio, woodland; with or without a pool."""

from __future__ import annotations

import random

from examples.canvas import Canvas, darker, lighter, mix
from examples.plants import BLOSSOMS, bush, pot, tree
from vlm_assets.config.property_description import PropertyDescription


def draw_garden(
    canvas: Canvas, truth: PropertyDescription, rng: random.Random, *, horizon: float, far: bool
) -> None:
    """The garden from ``horizon`` down; ``far`` leaves the view of the house behind it open."""
    depth = 240 - horizon
    if truth.garden == "woodland":
        _woodland(canvas, rng, horizon, depth, far)
    elif truth.garden == "patio":
        _patio(canvas, rng, horizon, depth)
    else:
        _lawn(canvas, rng, horizon, depth)
        if truth.garden == "flower_beds":
            _flower_beds(canvas, rng, horizon, depth)
        else:
            bush(canvas, rng.uniform(10, 60), horizon + 8, 15, rng)
            _bench(canvas, rng.uniform(60, 110), horizon + depth * 0.34)
    if truth.has_pool:
        _pool(canvas, rng, horizon, depth)


def draw_backdrop(canvas: Canvas, rng: random.Random, horizon: float) -> None:
    """What closes a garden off: a fence or a hedge, and trees beyond."""
    for x in range(-10, 340, 46):
        tree(canvas, x + rng.uniform(-14, 14), horizon + 6, rng.uniform(58, 96), rng)
    if rng.random() < 0.5:
        wood = rng.choice(((158, 128, 96), (128, 116, 104), (206, 200, 190)))
        canvas.gradient(0, horizon - 26, 320, 27, lighter(wood, 0.1), darker(wood, 0.15))
        for x in range(0, 320, 9):
            canvas.line((x, horizon - 26), (x, horizon), darker(wood, 0.4), 1.0, 0.7)
    else:
        canvas.gradient(0, horizon - 24, 320, 25, (96, 134, 72), (62, 98, 56))
        for x in range(0, 320, 11):
            canvas.oval(x + rng.uniform(-3, 3), horizon - 22 + rng.uniform(-2, 2), 8, 6, (106, 146, 78), 0.8)


def _lawn(canvas: Canvas, rng: random.Random, horizon: float, depth: float) -> None:
    canvas.gradient(0, horizon, 320, depth, (146, 184, 92), (94, 148, 62))
    middle = rng.uniform(120, 200)
    for stripe in range(-5, 6, 2):
        canvas.poly(
            [
                (middle + stripe * 15, horizon),
                (middle + (stripe + 1) * 15, horizon),
                (middle + (stripe + 1) * 52, 240),
                (middle + stripe * 52, 240),
            ],
            (178, 212, 112),
            0.28,
        )


def _flower_beds(canvas: Canvas, rng: random.Random, horizon: float, depth: float) -> None:
    for upper, lower in ((0.03, 0.24), (0.42, 0.84)):
        top, bottom = horizon + depth * upper, horizon + depth * lower
        canvas.poly([(0, top), (320, top), (320, bottom), (0, bottom)], (84, 96, 54))
        size = 2.4 + 3.4 * lower
        rows = max(2, int((bottom - top) / (size * 1.5)))
        for row in range(rows):
            y = top + (row + 0.5) * (bottom - top) / rows
            color = rng.choice(BLOSSOMS)
            for column in range(int(320 / (size * 2.5)) + 1):
                if rng.random() < 0.12:
                    color = rng.choice(BLOSSOMS)
                x = column * size * 2.5 + rng.uniform(-size, size)
                canvas.oval(x, y + rng.uniform(-size, size) * 0.6, size, size * 0.85, color)
                if canvas.fine:
                    canvas.oval(x, y, size * 0.3, size * 0.3, (250, 226, 120))


def _patio(canvas: Canvas, rng: random.Random, horizon: float, depth: float) -> None:
    stone = rng.choice(((206, 196, 180), (196, 194, 190), (214, 190, 164)))
    canvas.gradient(0, horizon, 320, depth, darker(stone, 0.08), lighter(stone, 0.12))
    for row in range(1, 7):
        y = horizon + depth * (row / 7) ** 1.7
        canvas.line((0, y), (320, y), darker(stone, 0.45), 1.6, 0.75)
    for column in range(-9, 10):
        canvas.line((160 + column * 20, horizon), (160 + column * 62, 240), darker(stone, 0.45), 1.5, 0.75)
    x, y = rng.uniform(70, 120), horizon + depth * 0.5
    shade = rng.choice(((214, 92, 74), (232, 214, 170), (70, 112, 132)))
    canvas.glow(x, y + 12, 54, 12, (60, 54, 50), 0.5)
    canvas.rect(x - 1.2, y - 50, 2.4, 58, (120, 100, 80))
    canvas.poly([(x - 40, y - 36), (x, y - 56), (x + 40, y - 36)], shade)
    canvas.poly([(x - 10, y - 36), (x, y - 56), (x + 10, y - 36)], lighter(shade, 0.3))
    canvas.rect(x - 24, y - 10, 48, 4, (146, 108, 74))
    for chair in (x - 36, x + 26):
        canvas.rect(chair, y - 16, 10, 3, (104, 82, 62))
        canvas.rect(chair, y - 16, 2, 24, (104, 82, 62))
        canvas.rect(chair + 8, y - 4, 2, 12, (104, 82, 62))
        canvas.rect(chair, y - 4, 10, 3, (104, 82, 62))
    for at in (18.0, 200.0, 300.0):
        pot(canvas, at + rng.uniform(-8, 8), horizon + 16, 13, rng)


def _woodland(canvas: Canvas, rng: random.Random, horizon: float, depth: float, far: bool) -> None:
    canvas.gradient(0, horizon, 320, depth, (62, 84, 48), (84, 92, 54))
    if not far:
        canvas.rect(0, horizon - 34, 320, 40, (50, 78, 50), 0.85)
    for _ in range(26):
        canvas.glow(
            rng.uniform(0, 320), rng.uniform(horizon, 240), rng.uniform(12, 26), 5, (190, 188, 110), 0.4
        )
    for layer in range(3):
        for _ in range(5):
            # Seen from afar, the trunks stand to both sides of the house.
            x = rng.choice((rng.uniform(0, 82), rng.uniform(238, 320))) if far else rng.uniform(0, 320)
            foot = horizon + depth * (0.08 + 0.22 * layer) + rng.uniform(-4, 4)
            thick = 3.5 + 2.6 * layer
            bark = rng.choice(((84, 66, 52), (104, 86, 68), (70, 58, 50)))
            canvas.poly(
                [(x - thick, foot), (x + thick, foot), (x + thick * 0.6, 0), (x - thick * 0.6, 0)], bark
            )
            canvas.poly(
                [(x - thick, foot), (x - thick * 0.3, foot), (x - thick * 0.2, 0), (x - thick * 0.6, 0)],
                lighter(bark, 0.25),
                0.6,
            )
    for _ in range(22):
        x, y = rng.uniform(0, 320), rng.uniform(-6, horizon * (0.12 if far else 0.45))
        green = rng.choice(((58, 92, 48), (74, 112, 54), (96, 132, 62)))
        canvas.oval(x, y, rng.uniform(16, 30), rng.uniform(9, 16), green, 0.85)
    for _ in range(9):
        bush(canvas, rng.uniform(0, 320), rng.uniform(horizon + 8, 226), rng.uniform(6, 11), rng)


def _pool(canvas: Canvas, rng: random.Random, horizon: float, depth: float) -> None:
    x, y = rng.uniform(150, 176), horizon + depth * rng.uniform(0.34, 0.42)
    wide, deep = rng.uniform(112, 132), depth * 0.4
    rim = [(x - 5, y - 4), (x + wide - 8, y - 4), (x + wide + 16, y + deep + 5), (x - 30, y + deep + 5)]
    canvas.poly(rim, (238, 232, 220))
    water = [(x, y), (x + wide - 14, y), (x + wide + 8, y + deep), (x - 21, y + deep)]
    canvas.poly(water, (58, 184, 214))
    canvas.poly(
        [(x, y), (x + wide - 14, y), (x + wide - 10, y + deep * 0.22), (x - 5, y + deep * 0.22)],
        (28, 134, 176),
    )
    for step in range(5):
        at = y + deep * (0.34 + 0.13 * step)
        start = x + rng.uniform(-8, wide * 0.6)
        canvas.line((start, at), (start + rng.uniform(14, 34), at), (214, 246, 252), 1.6, 0.85)
    canvas.rect(x + wide * 0.8, y - 14, 2, 20, (206, 210, 214))
    canvas.rect(x + wide * 0.88, y - 14, 2, 20, (206, 210, 214))


def _bench(canvas: Canvas, x: float, y: float) -> None:
    wood = mix((150, 112, 76), (120, 90, 66), 0.4)
    canvas.glow(x + 20, y + 13, 32, 6, (40, 60, 30), 0.6)
    for row in range(3):
        canvas.rect(x, y - 14 + row * 5, 40, 3, wood)
    canvas.rect(x - 2, y + 2, 44, 4, lighter(wood, 0.15))
    for leg in (x, x + 37):
        canvas.rect(leg, y + 4, 3, 9, darker(wood, 0.3))
