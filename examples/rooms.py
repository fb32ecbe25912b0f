"""The rooms of example properties: living room, kitchen, bedroom, bathroom."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Final

from examples.canvas import Canvas, Color, darker, lighter, mix
from examples.plants import pot
from vlm_assets.config.property_description import PropertyDescription

_WALLS: Final[tuple[Color, ...]] = (
    (238, 232, 222),
    (226, 230, 232),
    (240, 228, 208),
    (222, 228, 216),
    (236, 222, 216),
)
_FABRICS: Final[tuple[Color, ...]] = (
    (96, 116, 138),
    (186, 170, 146),
    (120, 134, 110),
    (176, 112, 92),
    (132, 120, 140),
    (212, 206, 196),
)
_KITCHENS: Final[dict[str, Color]] = {
    "white": (246, 246, 243),
    "oak": (204, 154, 94),
    "navy": (42, 60, 106),
    "sage": (150, 178, 142),
}
_PARQUETS: Final[tuple[Color, ...]] = ((190, 134, 80), (170, 114, 66), (204, 150, 96))
_TILES: Final[tuple[Color, ...]] = ((226, 226, 222), (232, 226, 214), (214, 220, 222))
_CARPETS: Final[tuple[Color, ...]] = ((122, 126, 150), (134, 118, 138), (104, 124, 138), (142, 128, 132))
_WOOD: Final[Color] = (150, 112, 78)

# The back wall of every room, in photo units.
_LEFT, _TOP, _RIGHT, _FLOOR = 48.0, 34.0, 272.0, 158.0


@dataclass(frozen=True)
class Interior:
    """What all rooms of one property share beyond its description."""

    wall: Color
    fabric: Color
    accent: Color
    floor: Color

    @staticmethod
    def draw(truth: PropertyDescription, rng: random.Random) -> Interior:
        """Colours as they vary between properties of one description."""
        floors = {"parquet": _PARQUETS, "tile": _TILES, "carpet": _CARPETS}[truth.living_floor]
        return Interior(rng.choice(_WALLS), rng.choice(_FABRICS), rng.choice(_FABRICS), rng.choice(floors))


def _shell(canvas: Canvas, wall: Color, floor: Color, rng: random.Random) -> None:
    """Ceiling, three walls and a plain floor, with daylight from one side."""
    canvas.rect(0, 0, 320, 240, lighter(wall, 0.55))
    canvas.poly([(0, 0), (_LEFT, _TOP), (_LEFT, _FLOOR), (0, 214)], darker(wall, 0.12))
    canvas.poly([(320, 0), (_RIGHT, _TOP), (_RIGHT, _FLOOR), (320, 214)], darker(wall, 0.06))
    canvas.gradient(_LEFT, _TOP, _RIGHT - _LEFT, _FLOOR - _TOP, lighter(wall, 0.1), darker(wall, 0.05))
    canvas.poly([(_LEFT, _FLOOR), (_RIGHT, _FLOOR), (330, 220), (330, 240), (-10, 240), (-10, 220)], floor)
    canvas.rect(_LEFT, _FLOOR - 4, _RIGHT - _LEFT, 4, lighter(wall, 0.7))
    canvas.glow(rng.uniform(120, 200), 20, 110, 40, (255, 250, 236), 0.6)


def _covering(canvas: Canvas, kind: str, color: Color, rng: random.Random) -> None:
    """Planks, tiles or pile on the floor of ``_shell``."""
    rows = [_FLOOR + (240 - _FLOOR) * (step / 6) ** 1.5 for step in range(7)]
    if kind == "parquet":
        for plank in range(-9, 9):
            near, far = 160 + plank * 42, 160 + plank * 21
            if rng.random() < 0.55:
                tone = darker(color, 0.22) if rng.random() < 0.5 else lighter(color, 0.18)
                canvas.poly([(far, _FLOOR), (far + 21, _FLOOR), (near + 42, 240), (near, 240)], tone, 0.55)
            canvas.line((far, _FLOOR), (near, 240), darker(color, 0.5), 1.2, 0.8)
    elif kind == "tile":
        for column in range(-7, 8):
            canvas.line((160 + column * 26, _FLOOR), (160 + column * 54, 240), darker(color, 0.36), 2.0, 0.9)
        for y in rows[1:]:
            canvas.line((0, y), (320, y), darker(color, 0.36), 2.0, 0.9)
        canvas.glow(160, 206, 120, 26, (255, 255, 255), 0.5)
    else:
        for _ in range(10):
            x, y = rng.uniform(0, 320), rng.uniform(_FLOOR + 4, 240)
            canvas.glow(x, y, 16, 4, lighter(color, 0.3), 0.3)
    # Only the part below the walls is floor: the side walls cover what lines drew across them.


def _side_walls(canvas: Canvas, wall: Color) -> None:
    canvas.poly([(0, 0), (_LEFT, _TOP), (_LEFT, _FLOOR), (0, 208)], darker(wall, 0.12))
    canvas.poly([(320, 0), (_RIGHT, _TOP), (_RIGHT, _FLOOR), (320, 208)], darker(wall, 0.06))


def _window(
    canvas: Canvas, x: float, y: float, width: float, height: float, *, curtain: Color | None
) -> None:
    canvas.rect(x - 3, y - 3, width + 6, height + 6, (250, 250, 247))
    canvas.gradient(x, y, width, height * 0.7, (166, 206, 236), (226, 240, 246))
    canvas.gradient(x, y + height * 0.62, width, height * 0.38, (152, 184, 122), (118, 156, 92))
    canvas.line((x + width / 2, y), (x + width / 2, y + height), (250, 250, 247), 2.4)
    canvas.line((x, y + height * 0.4), (x + width, y + height * 0.4), (250, 250, 247), 2.0)
    canvas.glow(x + width / 2, y + height / 2, width, height, (255, 252, 240), 0.35)
    if curtain is not None:
        canvas.rect(x - 14, y - 8, width + 28, 2.4, (110, 96, 84))
        for side in (x - 13, x + width):
            canvas.gradient(side, y - 6, 13, height + 22, lighter(curtain, 0.2), curtain)
            for fold in (3, 7, 11):
                canvas.line(
                    (side + fold, y - 6), (side + fold, y + height + 16), darker(curtain, 0.25), 1.0, 0.6
                )


def _picture(canvas: Canvas, x: float, y: float, width: float, height: float, rng: random.Random) -> None:
    canvas.rect(
        x - 2, y - 2, width + 4, height + 4, rng.choice(((70, 62, 56), (214, 190, 142), (250, 248, 244)))
    )
    canvas.gradient(x, y, width, height, rng.choice(_FABRICS), rng.choice(((232, 206, 170), (206, 216, 222))))
    canvas.oval(x + width * 0.65, y + height * 0.35, height * 0.14, height * 0.14, (250, 236, 196))
    canvas.poly(
        [(x, y + height), (x + width * 0.4, y + height * 0.5), (x + width * 0.8, y + height)], (104, 122, 112)
    )


def _lamp(canvas: Canvas, x: float, ground: float, height: float) -> None:
    canvas.glow(x, ground - height, 34, 30, (255, 232, 176), 0.55)
    canvas.rect(x - 0.9, ground - height, 1.8, height, (84, 78, 72))
    canvas.rect(x - 6, ground - 2, 12, 2, (84, 78, 72))
    canvas.poly(
        [
            (x - 6, ground - height - 8),
            (x + 6, ground - height - 8),
            (x + 11, ground - height + 7),
            (x - 11, ground - height + 7),
        ],
        (252, 236, 200),
    )


def _sofa(canvas: Canvas, x: float, y: float, width: float, color: Color, cushion: Color) -> None:
    canvas.glow(x + width / 2, y + 3, width * 0.62, 9, (30, 26, 24), 0.55)
    canvas.rounded(x, y - 42, width, 34, 6, darker(color, 0.08))
    half = (width - 24) / 2
    for seat in (x + 12, x + 12 + half):
        canvas.rounded(seat + 1, y - 25, half - 2, 14, 3, lighter(color, 0.16))
    canvas.rounded(x, y - 30, 13, 29, 5, darker(color, 0.14))
    canvas.rounded(x + width - 13, y - 30, 13, 29, 5, darker(color, 0.14))
    canvas.rect(x + 6, y - 12, width - 12, 10, color)
    canvas.rounded(x + 16, y - 38, 17, 15, 4, cushion)
    canvas.rounded(x + width - 34, y - 38, 17, 15, 4, lighter(cushion, 0.25))


def _fireplace(canvas: Canvas, x: float, rng: random.Random) -> None:
    """A chimney breast with a mantel and a fire, standing on the floor line around ``x``."""
    stone = rng.choice(((246, 244, 238), (176, 166, 154), (150, 74, 58)))
    canvas.rect(x - 34, _TOP, 68, _FLOOR - _TOP, mix(stone, (236, 232, 224), 0.55))
    canvas.rect(x - 38, _FLOOR - 66, 76, 6, darker(stone, 0.12))
    canvas.gradient(x - 33, _FLOOR - 60, 66, 60, lighter(stone, 0.12), darker(stone, 0.12))
    canvas.rect(x - 22, _FLOOR - 46, 44, 46, (30, 24, 24))
    canvas.glow(x, _FLOOR - 14, 32, 30, (255, 132, 30), 0.95)
    for dx, tall in ((-11, 22), (-4, 31), (5, 27), (12, 19)):
        canvas.poly(
            [(x + dx - 6, _FLOOR - 5), (x + dx, _FLOOR - 5 - tall), (x + dx + 6, _FLOOR - 5)], (255, 150, 34)
        )
        canvas.poly(
            [(x + dx - 3, _FLOOR - 5), (x + dx, _FLOOR - 5 - tall * 0.6), (x + dx + 3, _FLOOR - 5)],
            (255, 224, 112),
        )
    canvas.rect(x - 17, _FLOOR - 7, 34, 5, (74, 50, 38))
    canvas.glow(x, _FLOOR + 12, 62, 22, (255, 170, 80), 0.4)
    for dx in (-26, 20):
        canvas.rect(x + dx, _FLOOR - 74, 5, 8, rng.choice(_FABRICS))


def _shelf(canvas: Canvas, x: float, rng: random.Random) -> None:
    canvas.rect(x - 30, _FLOOR - 86, 60, 86, darker(_WOOD, 0.1))
    for row in range(4):
        y = _FLOOR - 83 + row * 21
        canvas.rect(x - 27, y, 54, 18, darker(_WOOD, 0.45))
        at = x - 26
        while at < x + 18:
            width = rng.uniform(4, 8)
            tall = rng.uniform(10, 16)
            canvas.rect(at, y + 18 - tall, width - 1, tall, rng.choice((*_FABRICS, (80, 60, 56))))
            at += width


def _sideboard(canvas: Canvas, x: float, rng: random.Random) -> None:
    canvas.rect(x - 38, _FLOOR - 24, 76, 22, lighter(_WOOD, 0.1))
    canvas.line((x, _FLOOR - 24), (x, _FLOOR - 2), darker(_WOOD, 0.4), 1.2)
    canvas.rect(x - 30, _FLOOR - 66, 60, 36, (36, 40, 46))
    canvas.poly(
        [(x - 28, _FLOOR - 32), (x + 4, _FLOOR - 64), (x + 18, _FLOOR - 64), (x - 14, _FLOOR - 32)],
        (92, 104, 118),
        0.6,
    )
    pot(canvas, x + 44, _FLOOR + 4, 12, rng)


def draw_living_room(canvas: Canvas, truth: PropertyDescription, look: Interior, rng: random.Random) -> None:
    """The living room: floor covering, fireplace or what stands in its place, sofa."""
    _shell(canvas, look.wall, look.floor, rng)
    _covering(canvas, truth.living_floor, look.floor, rng)
    _side_walls(canvas, look.wall)
    feature = rng.choice((102.0, 112.0))
    if truth.has_fireplace:
        _fireplace(canvas, feature, rng)
        _picture(canvas, feature - 17, _TOP + 12, 34, 26, rng)
    else:
        rng.choice((_shelf, _sideboard))(canvas, feature, rng)
    _window(canvas, 184, 52, 58, 62, curtain=look.accent)
    _lamp(canvas, 262, _FLOOR + 8, 78)
    _sofa(
        canvas, rng.uniform(164, 186), rng.uniform(194, 204), rng.uniform(104, 124), look.fabric, look.accent
    )
    x, y = rng.uniform(92, 116), rng.uniform(206, 214)
    canvas.glow(x + 24, y + 14, 38, 7, (30, 26, 24), 0.5)
    canvas.poly([(x, y), (x + 48, y), (x + 54, y + 8), (x - 6, y + 8)], lighter(_WOOD, 0.2))
    for leg in (x - 4, x + 50):
        canvas.rect(leg, y + 8, 2.4, 10, darker(_WOOD, 0.3))
    canvas.oval(x + 24, y + 1, 5, 4, rng.choice(_FABRICS))
    if rng.random() < 0.6:
        pot(canvas, 30, 206, 20, rng)


def _fronts(
    canvas: Canvas, x: float, y: float, width: float, height: float, count: int, color: Color
) -> None:
    canvas.gradient(x, y, width, height, lighter(color, 0.08), darker(color, 0.08))
    step = width / count
    for front in range(count):
        at = x + front * step
        canvas.line((at, y), (at, y + height), darker(color, 0.4), 1.2, 0.8)
        canvas.rect(at + step * 0.4, y + 3, step * 0.2, 1.6, (190, 172, 132))


def draw_kitchen(
    canvas: Canvas, truth: PropertyDescription, look: Interior, rng: random.Random, *, island: bool
) -> None:
    """The kitchen; with an island and stools it is the dining corner's view."""
    color = _KITCHENS[truth.kitchen]
    wall = mix(look.wall, (226, 214, 204), 0.5)
    _shell(canvas, wall, (176, 166, 154), rng)
    canvas.glow(160, 206, 150, 30, (214, 204, 190), 0.7)
    splash = rng.choice(((206, 214, 214), (220, 210, 196), (196, 204, 198)))
    canvas.rect(_LEFT, 92, _RIGHT - _LEFT, 28, splash)
    for column in range(15):
        canvas.line((_LEFT + column * 15, 92), (_LEFT + column * 15, 120), lighter(splash, 0.5), 1.0, 0.7)
    _fronts(canvas, _LEFT, 48, 76, 40, 3, color)
    _fronts(canvas, 206, 48, _RIGHT - 206, 40, 3, color)
    if rng.random() < 0.5:
        canvas.poly([(140, 84), (186, 84), (174, 66), (152, 66)], (150, 154, 158))
        canvas.rect(156, _TOP, 14, 32, (168, 172, 176))
    else:
        _window(canvas, 134, 50, 58, 40, curtain=None)
    _fronts(canvas, _LEFT, 124, _RIGHT - _LEFT, 40, 7, color)
    canvas.poly([(0, 142), (_LEFT, 121), (_LEFT, 164), (0, 216)], darker(color, 0.14))
    canvas.poly([(0, 136), (_LEFT, 118), (_LEFT, 123), (0, 143)], (232, 230, 226))
    canvas.rect(_LEFT, 118, _RIGHT - _LEFT, 6, rng.choice(((236, 234, 230), (74, 74, 78), (208, 196, 180))))
    canvas.rect(144, 126, 38, 30, (52, 56, 62))
    canvas.rect(148, 134, 30, 17, (94, 102, 112))
    canvas.rect(224, 112, 3, 7, (180, 184, 188))
    canvas.oval(88, 113, 8, 5, rng.choice(((232, 150, 62), (204, 72, 62), (222, 206, 92))))
    pot(canvas, 252, 119, 8, rng)
    if island:
        canvas.glow(168, 222, 110, 16, (40, 34, 30), 0.45)
        _fronts(canvas, 84, 178, 168, 46, 4, color)
        canvas.rect(76, 170, 184, 9, (240, 238, 234))
        for x in (108.0, 158.0, 208.0):
            canvas.rect(x, 196, 20, 5, _WOOD)
            canvas.rect(x + 2, 200, 2, 36, (70, 66, 64))
            canvas.rect(x + 16, 200, 2, 36, (70, 66, 64))
        for x in (116.0, 168.0, 220.0):
            canvas.line((x, 0), (x, 26), (80, 76, 72), 1.2)
            canvas.oval(x, 30, 9, 7, (60, 62, 66))
            canvas.glow(x, 38, 18, 16, (255, 236, 180), 0.7)


def draw_bedroom(canvas: Canvas, look: Interior, rng: random.Random) -> None:
    """A bedroom: it shows none of the described fields."""
    wall = mix(look.wall, look.accent, 0.18)
    floor = rng.choice(((178, 138, 98), (188, 178, 168), (160, 124, 92)))
    _shell(canvas, wall, floor, rng)
    _side_walls(canvas, wall)
    _window(canvas, 196, 54, 52, 58, curtain=look.fabric)
    _picture(canvas, 92, 54, 46, 28, rng)
    x = rng.uniform(64, 78)
    canvas.glow(x + 58, 214, 92, 18, (30, 26, 24), 0.45)
    canvas.rounded(x, 104, 112, 64, 6, rng.choice((_WOOD, darker(look.accent, 0.2), (206, 196, 182))))
    canvas.poly([(x + 2, 146), (x + 110, 146), (x + 124, 218), (x - 14, 218)], (248, 246, 242))
    canvas.poly([(x - 2, 166), (x + 114, 166), (x + 125, 222), (x - 15, 222)], look.fabric)
    canvas.poly([(x - 1, 162), (x + 113, 162), (x + 115, 172), (x - 3, 172)], lighter(look.fabric, 0.4))
    for pillow in (x + 10, x + 60):
        canvas.rounded(pillow, 134, 42, 20, 7, (252, 252, 250))
    for table in (x - 24, x + 118):
        canvas.rect(table, 150, 20, 24, _WOOD)
        canvas.glow(table + 10, 130, 24, 22, (255, 232, 176), 0.6)
        canvas.poly(
            [(table + 4, 126), (table + 16, 126), (table + 19, 138), (table + 1, 138)], (252, 238, 208)
        )
        canvas.rect(table + 9, 138, 2, 12, (90, 84, 78))


def draw_bathroom(canvas: Canvas, truth: PropertyDescription, look: Interior, rng: random.Random) -> None:
    """The bathroom: a bath on one side, a shower on the other, or a cupboard and a radiator instead."""
    tile = rng.choice(((206, 222, 224), (226, 220, 210), (196, 212, 202), (216, 208, 212)))
    _shell(canvas, tile, rng.choice(((150, 152, 156), (178, 168, 156), (120, 126, 132))), rng)
    for column in range(15):
        canvas.line((_LEFT + column * 16, _TOP), (_LEFT + column * 16, _FLOOR), lighter(tile, 0.6), 1.0, 0.7)
    for row in range(8):
        canvas.line((_LEFT, _TOP + row * 16), (_RIGHT, _TOP + row * 16), lighter(tile, 0.6), 1.0, 0.7)
    canvas.glow(160, 60, 60, 44, (255, 250, 236), 0.5)
    canvas.rounded(138, 56, 46, 44, 5, (190, 210, 220))
    canvas.poly([(144, 98), (176, 58), (182, 58), (152, 98)], (236, 246, 250), 0.6)
    canvas.rect(134, 122, 54, 28, rng.choice((_WOOD, (92, 104, 116), (232, 230, 226))))
    canvas.rounded(132, 113, 58, 10, 4, (250, 250, 250))
    canvas.rect(159, 104, 3, 9, (176, 182, 188))
    if truth.bathroom in ("bath", "bath_and_shower"):
        canvas.glow(84, 214, 100, 14, (30, 32, 36), 0.5)
        canvas.rounded(4, 158, 142, 54, 20, (252, 252, 252))
        canvas.oval(75, 163, 66, 9, (206, 216, 222))
        canvas.oval(75, 165, 58, 6, (150, 204, 226))
        canvas.rect(20, 140, 3, 20, (180, 186, 192))
        canvas.rect(20, 140, 12, 3, (180, 186, 192))
    else:
        canvas.rect(54, 66, 44, 92, rng.choice((_WOOD, lighter(_WOOD, 0.3), (120, 126, 130))))
        canvas.line((76, 66), (76, 158), (70, 60, 52), 1.2)
    if truth.bathroom in ("shower", "bath_and_shower"):
        canvas.rect(204, 30, 76, 152, (150, 184, 202), 0.62)
        canvas.rect(204, 30, 3.5, 154, (84, 92, 100))
        canvas.rect(204, 28, 78, 3.5, (84, 92, 100))
        canvas.poly([(214, 180), (262, 36), (274, 36), (228, 180)], (240, 250, 254), 0.35)
        canvas.rect(246, 46, 2.4, 96, (222, 226, 230))
        canvas.rounded(230, 44, 34, 6, 3, (60, 66, 74))
        for drop in range(6):
            canvas.line((233 + drop * 5.5, 52), (231 + drop * 5.5, 96), (236, 248, 255), 1.2, 0.75)
        canvas.poly([(200, 182), (284, 182), (292, 190), (196, 190)], (236, 238, 240))
    else:
        canvas.rect(214, 80, 40, 2.4, (200, 204, 208))
        canvas.rect(218, 80, 32, 46, look.accent)
        canvas.rect(218, 116, 32, 4, lighter(look.accent, 0.5))
        pot(canvas, 258, 166, 18, rng)
