"""The outside of an example property: building, roof, garage, street. No gardens and no rooms."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Final

from examples.canvas import GROUND, Canvas, Color, darker, lighter, mix
from examples.facades import draw_storey, draw_window
from examples.plants import bush, tree
from vlm_assets.config.property_description import PropertyDescription

_FACADES: Final[dict[str, tuple[Color, ...]]] = {
    "brick": ((172, 80, 60), (160, 72, 58), (184, 92, 68)),
    "render": ((240, 234, 222), (242, 226, 198), (226, 233, 234), (243, 219, 208)),
    "stone": ((144, 142, 136), (134, 136, 136), (152, 148, 136)),
    "timber": ((196, 148, 86), (184, 136, 76), (206, 160, 100)),
}
_ROOFS: Final[tuple[Color, ...]] = ((82, 88, 100), (146, 76, 56), (98, 78, 68), (70, 72, 80))
_DOORS: Final[tuple[Color, ...]] = ((60, 82, 92), (130, 50, 46), (52, 84, 66), (44, 54, 84), (90, 66, 48))
_SKIES: Final[tuple[tuple[Color, Color], ...]] = (
    ((96, 158, 214), (216, 234, 244)),
    ((122, 172, 216), (244, 236, 220)),
    ((150, 176, 198), (226, 230, 232)),
    ((88, 144, 206), (250, 222, 196)),
)
_DUSK: Final[tuple[Color, Color]] = ((70, 88, 140), (246, 190, 150))


@dataclass(frozen=True)
class Exterior:
    """What all photos of one building share beyond its description."""

    wall: Color
    roof: Color
    door: Color
    neighbours: tuple[Color, Color]
    width: float
    sky: tuple[Color, Color]

    @staticmethod
    def draw(truth: PropertyDescription, rng: random.Random) -> Exterior:
        """Colours and width as they vary between properties of one description."""
        walls = [color for colors in _FACADES.values() for color in colors]
        jitter = rng.uniform(-0.06, 0.06)
        wall = rng.choice(_FACADES[truth.facade_material])
        wall = lighter(wall, jitter) if jitter > 0 else darker(wall, -jitter)
        return Exterior(
            wall=wall,
            roof=rng.choice(_ROOFS),
            door=rng.choice(_DOORS),
            neighbours=(
                mix(rng.choice(walls), (190, 190, 190), 0.45),
                mix(rng.choice(walls), (190, 190, 190), 0.45),
            ),
            width=_WIDTHS[truth.building_type] * rng.uniform(0.95, 1.06),
            sky=rng.choice(_SKIES),
        )


_WIDTHS: Final = {
    "apartment_block": 152.0,
    "terraced_house": 96.0,
    "detached_house": 132.0,
    "bungalow": 186.0,
    "cottage": 112.0,
    "villa": 172.0,
}
_STOREYS: Final = {
    "apartment_block": 28.0,
    "terraced_house": 33.0,
    "detached_house": 34.0,
    "bungalow": 37.0,
    "cottage": 31.0,
    "villa": 35.0,
}
_GARAGES: Final = {"none": 0.0, "single": 46.0, "double": 84.0}


def draw_sky(canvas: Canvas, sky: tuple[Color, Color], rng: random.Random, *, dusk: bool = False) -> None:
    """Sky, sun or last light, clouds, a far line of trees."""
    top, bottom = _DUSK if dusk else sky
    canvas.gradient(0, 0, 320, 200, top, bottom)
    canvas.glow(rng.uniform(20, 300), rng.uniform(60, 150) if dusk else 30, 90, 70, (255, 244, 214), 0.55)
    for _ in range(rng.randint(2, 4)):
        x, y, size = rng.uniform(0, 320), rng.uniform(14, 80), rng.uniform(16, 34)
        for dx, dy, part in ((-0.8, 0.1, 0.6), (0, -0.1, 0.9), (0.7, 0.14, 0.9)):
            canvas.glow(
                x + dx * size, y + dy * size, size * part * 1.5, size * part * 0.6, (255, 255, 255), 0.6
            )
    far = mix((104, 134, 122), bottom, 0.45)
    x = -20.0
    while x < 330:
        size = rng.uniform(18, 34)
        canvas.oval(x, 190, size, size * 0.9, far)
        x += size * 1.1


def draw_street(
    canvas: Canvas, truth: PropertyDescription, look: Exterior, rng: random.Random, *, dusk: bool
) -> None:
    """The building from the street; at dusk its windows are lit."""
    draw_sky(canvas, look.sky, rng, dusk=dusk)
    terraced = truth.building_type == "terraced_house"
    garage = _GARAGES[truth.garage]
    left = (320 - look.width - garage) / 2 + rng.uniform(-10, 10)
    if not terraced:
        for _ in range(3):
            tree(
                canvas,
                rng.choice((rng.uniform(0, 40), rng.uniform(280, 320))),
                GROUND,
                rng.uniform(60, 110),
                rng,
            )
    canvas.gradient(0, GROUND - 1, 320, 50, (138, 164, 98), (104, 136, 74))
    if terraced:
        for side, color in enumerate(look.neighbours):
            _neighbour(canvas, left - 100 if side == 0 else left + look.width, truth.floors, color, look)
    draw_building(canvas, truth, look, left, rng, dusk=dusk, terraced=terraced)
    if garage:
        _garage(canvas, left + look.width, garage, look)
    door = left + look.width * 0.5
    canvas.poly([(door - 8, GROUND), (door + 8, GROUND), (door + 22, 224), (door - 22, 224)], (196, 186, 170))
    for x in (left + 8, left + look.width * 0.28, left + look.width * 0.74):
        bush(canvas, x + rng.uniform(-5, 5), GROUND + 5, rng.uniform(6, 10), rng)
    canvas.gradient(0, 222, 320, 18, (190, 186, 180), (150, 148, 146))
    canvas.rect(0, 222, 320, 1.6, (222, 218, 210))


def draw_rear(canvas: Canvas, truth: PropertyDescription, look: Exterior, rng: random.Random) -> None:
    """The building from its garden, further away; the garden itself is not drawn here."""
    draw_sky(canvas.within(0, 0, 1), look.sky, rng)
    part = canvas.within(rng.uniform(56, 74), 24, 0.64)
    draw_building(part, truth, look, (320 - look.width) / 2, rng, dusk=False, terraced=False)
    for x in (-46.0, 366.0):
        tree(part, x + rng.uniform(-24, 24), GROUND, rng.uniform(80, 130), rng)


def draw_building(
    canvas: Canvas,
    truth: PropertyDescription,
    look: Exterior,
    left: float,
    rng: random.Random,
    *,
    dusk: bool,
    terraced: bool,
) -> None:
    """Walls, windows, door and roof, standing on the ground line from ``left``."""
    width, storey = look.width, _STOREYS[truth.building_type]
    height = storey * truth.floors
    top = GROUND - height
    canvas.glow(left + width / 2, GROUND + 2, width * 0.62, 12, (40, 52, 40), 0.5)
    if not terraced:
        side = darker(look.wall, 0.34)
        far = left - 20
        canvas.poly([(left, GROUND), (left, top), (far, top + 7), (far, GROUND - 6)], side)
        for floor in range(truth.floors):
            y = top + storey * floor + storey * 0.34
            canvas.poly(
                [(left - 6, y + 2), (left - 14, y + 4), (left - 14, y + 15), (left - 6, y + 15)],
                (96, 118, 134),
            )
    _wall(canvas, truth.facade_material, look.wall, left, top, width, height, rng)
    _roof(canvas, truth, look, left, top, width, side=not terraced)
    for floor in range(truth.floors):
        draw_storey(
            canvas,
            truth.building_type,
            look.roof,
            look.door,
            left,
            top + storey * floor,
            width,
            storey,
            floor == truth.floors - 1,
            dusk,
            rng,
        )
    if truth.building_type == "cottage" and truth.roof != "flat":
        canvas.rect(left + width * 0.74, top - 42, 11, 30, darker(look.wall, 0.2))
        canvas.rect(left + width * 0.74 - 2, top - 44, 15, 4, darker(look.wall, 0.4))


def _wall(
    canvas: Canvas,
    material: str,
    color: Color,
    x: float,
    y: float,
    width: float,
    height: float,
    rng: random.Random,
) -> None:
    canvas.gradient(x, y, width, height, lighter(color, 0.06), darker(color, 0.1))
    dark, light = darker(color, 0.3), lighter(color, 0.35)
    if material == "brick":
        rows = int(height / 4.4)
        for row in range(1, rows + 1):
            canvas.line((x, y + row * 4.4), (x + width, y + row * 4.4), light, 0.8, 0.5)
            if canvas.fine:
                for column in range(int(width / 9)):
                    joint = x + column * 9 + (row % 2) * 4.5
                    canvas.line((joint, y + row * 4.4 - 4.4), (joint, y + row * 4.4), light, 0.7, 0.42)
    elif material == "stone":
        for row in range(int(height / 9)):
            at = x + (row % 2) * 6.0
            while at < x + width - 4:
                block = min(rng.uniform(11, 19), x + width - at)
                shade = rng.uniform(-0.2, 0.2)
                tone = lighter(color, shade) if shade > 0 else darker(color, -shade)
                canvas.rect(at + 0.7, y + row * 9 + 0.7, block - 1.2, 7.8, tone)
                at += block
    elif material == "timber":
        for plank in range(int(width / 8) + 1):
            at = x + plank * 8
            if plank % 2:
                canvas.rect(at, y, min(8.0, x + width - at), height, dark, rng.uniform(0.15, 0.4))
            canvas.line((at, y), (at, y + height), dark, 1.0, 0.8)
    else:
        canvas.rect(x, y + height - 7, width, 7, darker(color, 0.18))
        canvas.line((x, y + height * 0.5), (x + width, y + height * 0.5), light, 1.2, 0.5)


def _roof(
    canvas: Canvas,
    truth: PropertyDescription,
    look: Exterior,
    left: float,
    top: float,
    width: float,
    *,
    side: bool,
) -> None:
    right, color = left + width, look.roof
    if truth.roof == "flat":
        canvas.rect(left - 5, top - 7, width + 10, 8, darker(color, 0.1))
        canvas.rect(left - 5, top - 7, width + 10, 2, lighter(color, 0.4))
        if side:
            canvas.poly(
                [(left - 5, top - 7), (left - 24, top), (left - 24, top + 7), (left - 5, top + 1)],
                darker(color, 0.4),
            )
        panels = [(left + width * 0.12 + step * 29, top - 7) for step in range(3)]
        if truth.has_solar_panels:
            for x, y in panels:
                _panel(canvas, x, y, 25, 20)
        return
    rise = min(48.0, width * 0.42)
    inset = width * 0.5 if truth.roof == "gable" else width * 0.15
    apex_left, apex_right, ridge = left + inset, right - inset, top - rise
    if side:
        canvas.poly(
            [(left - 7, top + 3), (apex_left, ridge), (apex_left - 14, ridge + 5), (left - 26, top + 9)],
            darker(color, 0.42),
        )
    shape = [(left - 7, top + 3), (apex_left, ridge), (apex_right, ridge), (right + 7, top + 3)]
    canvas.poly(shape, color)
    for row in range(1, 8):
        y = ridge + (rise + 3) * row / 8
        reach = (inset + 7) * row / 8
        canvas.line((apex_left - reach, y), (apex_right + reach, y), darker(color, 0.4), 1.0, 0.55)
    canvas.line(shape[0], shape[1], lighter(color, 0.3), 2.0)
    canvas.line(shape[2], shape[3], lighter(color, 0.2), 2.0)
    canvas.rect(left - 7, top + 1, width + 14, 3, lighter(color, 0.55))
    if truth.has_solar_panels:
        wide = min(23.0, width * 0.17)
        for step in (-1.5, -0.5, 0.5):
            _panel(canvas, (left + right) / 2 + step * (wide + 2), top - 2, wide, 21)


def _panel(canvas: Canvas, x: float, base: float, width: float, height: float) -> None:
    slope = [(x, base), (x + 2.5, base - height), (x + width + 2.5, base - height), (x + width, base)]
    canvas.poly(slope, (30, 66, 168))
    canvas.poly(
        [(x + 4, base - height), (x + width * 0.6, base - height), (x + 5, base - 3)], (112, 164, 240), 0.6
    )
    for start, end in (
        (slope[0], slope[1]),
        (slope[1], slope[2]),
        (slope[2], slope[3]),
        (slope[3], slope[0]),
    ):
        canvas.line(start, end, (226, 232, 240), 1.2)
    canvas.line((x + 1, base - height / 2), (x + width + 1, base - height / 2), (226, 232, 240), 0.8)
    canvas.line((x + width / 2, base), (x + width / 2 + 2, base - height), (226, 232, 240), 0.8)


def _garage(canvas: Canvas, left: float, width: float, look: Exterior) -> None:
    top = GROUND - 38
    canvas.gradient(
        left, top, width, 38, mix(look.wall, (200, 198, 192), 0.35), mix(look.wall, (160, 158, 152), 0.35)
    )
    canvas.rect(left - 1, top - 4, width + 4, 5, darker(look.roof, 0.15))
    doors = 2 if width > 60 else 1
    for door in range(doors):
        x = left + 5 + door * 39
        canvas.rect(x - 1.5, top + 7, 37, 31, darker(look.wall, 0.45))
        canvas.gradient(x, top + 8, 34, 30, (244, 244, 242), (206, 208, 210))
        for row in range(1, 5):
            canvas.line((x, top + 8 + row * 6), (x + 34, top + 8 + row * 6), (150, 154, 158), 1.0, 0.8)
    canvas.poly(
        [(left + 2, GROUND), (left + width - 2, GROUND), (left + width + 14, 224), (left - 4, 224)],
        (172, 168, 164),
    )


def _neighbour(canvas: Canvas, left: float, floors: int, color: Color, look: Exterior) -> None:
    """The house next door of a terrace: paler, and its storeys are not in line with ours."""
    storey = 31.0
    top = GROUND - storey * max(2, floors) + 6
    canvas.gradient(left, top, 100, GROUND - top, lighter(color, 0.08), darker(color, 0.12))
    canvas.rect(left, top - 6, 100, 8, mix(look.roof, (150, 150, 150), 0.4))
    for floor in range(max(2, floors)):
        for x in (left + 14, left + 62):
            draw_window(canvas, x, top + 8 + floor * storey, 22, 17, lit=False)
    canvas.line((left, top), (left, GROUND), darker(color, 0.4), 1.5)
    canvas.line((left + 100, top), (left + 100, GROUND), darker(color, 0.4), 1.5)
