"""Drawing in photo units at any resolution: one photo is 320 by 240 units, whatever its size in pixels.

What lives here: shapes, gradients, glows, and how a drawing becomes a photo (light, crop, flip). What does
not: what is drawn. Thin lines fade rather than thicken at low resolution, so that a training image of 64
pixels has the colours that the full photo has once it is scaled down.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from PIL import Image, ImageDraw, ImageEnhance, ImageFilter

WIDTH, HEIGHT = 320.0, 240.0

GROUND = 192.0
"""Distance from the top of the photo to the line where a building stands."""

Color = tuple[int, int, int]
Point = tuple[float, float]


def mix(first: Color, second: Color, share: float) -> Color:
    """The colour ``share`` of the way from the first to the second."""
    return (
        round(first[0] + (second[0] - first[0]) * share),
        round(first[1] + (second[1] - first[1]) * share),
        round(first[2] + (second[2] - first[2]) * share),
    )


def lighter(color: Color, share: float) -> Color:
    """A colour mixed with white."""
    return mix(color, (255, 255, 255), share)


def darker(color: Color, share: float) -> Color:
    """A colour mixed with a cool near-black."""
    return mix(color, (18, 20, 30), share)


@lru_cache(maxsize=1)
def _vertical_ramp() -> Image.Image:
    return Image.linear_gradient("L").resize((1, 256))


@lru_cache(maxsize=64)
def _spot(opacity: float) -> Image.Image:
    fall = [opacity * max(0.0, 255 - value * 1.42) for value in range(256)]
    return Image.radial_gradient("L").resize((64, 64)).point(fall)


@lru_cache(maxsize=512)
def _exposed(percent: int) -> list[int]:
    """A table from a channel's value to the one it has in light of ``percent`` strength."""
    return [min(255, value * percent // 100) for value in range(256)]


@lru_cache(maxsize=16)
def _corner_shade(size: tuple[int, int]) -> Image.Image:
    return Image.radial_gradient("L").resize(size).point(lambda value: max(0, value - 110) // 3)


class Canvas:
    """A drawing surface, or a part of one that is moved and zoomed (see ``within``)."""

    def __init__(self, scale: float) -> None:
        self.image = Image.new("RGB", (round(WIDTH * scale), round(HEIGHT * scale)))
        # Mode RGBA on an RGB image: a fill's fourth value is its opacity.
        self._draw = ImageDraw.Draw(self.image, "RGBA")
        self._x, self._y, self._zoom = 0.0, 0.0, scale

    def within(self, x: float, y: float, zoom: float) -> Canvas:
        """The same surface with its origin at (x, y) and everything ``zoom`` times as large."""
        part = object.__new__(Canvas)
        part.image, part._draw = self.image, self._draw
        part._x, part._y = self._x + x * self._zoom, self._y + y * self._zoom
        part._zoom = self._zoom * zoom
        return part

    @property
    def fine(self) -> bool:
        """Whether detail under two units can be seen at all at this resolution."""
        return self._zoom > 0.8

    def _box(self, x: float, y: float, width: float, height: float) -> tuple[float, float, float, float]:
        left, top = self._x + x * self._zoom, self._y + y * self._zoom
        # Pillow counts the far edge in: one pixel less, and never less than one pixel.
        right = max(left, left + width * self._zoom - 1)
        bottom = max(top, top + height * self._zoom - 1)
        return left, top, right, bottom

    def rect(
        self, x: float, y: float, width: float, height: float, fill: Color, opacity: float = 1.0
    ) -> None:
        """A filled rectangle."""
        self._draw.rectangle(self._box(x, y, width, height), (*fill, round(255 * opacity)))

    def rounded(self, x: float, y: float, width: float, height: float, radius: float, fill: Color) -> None:
        """A filled rectangle with round corners."""
        self._draw.rounded_rectangle(self._box(x, y, width, height), radius * self._zoom, fill)

    def oval(self, x: float, y: float, rx: float, ry: float, fill: Color, opacity: float = 1.0) -> None:
        """A filled ellipse around (x, y)."""
        self._draw.ellipse(self._box(x - rx, y - ry, 2 * rx, 2 * ry), (*fill, round(255 * opacity)))

    def poly(self, points: Sequence[Point], fill: Color, opacity: float = 1.0) -> None:
        """A filled polygon."""
        placed = [(self._x + x * self._zoom, self._y + y * self._zoom) for x, y in points]
        self._draw.polygon(placed, (*fill, round(255 * opacity)))

    def line(self, start: Point, end: Point, fill: Color, width: float = 1.0, opacity: float = 1.0) -> None:
        """A straight line; under one pixel it fades instead of staying one pixel wide."""
        pixels = width * self._zoom
        shown = opacity * min(1.0, pixels)
        if shown < 0.02:
            return
        placed = [(self._x + x * self._zoom, self._y + y * self._zoom) for x, y in (start, end)]
        self._draw.line(placed, (*fill, round(255 * shown)), max(1, round(pixels)))

    def gradient(self, x: float, y: float, width: float, height: float, top: Color, bottom: Color) -> None:
        """A rectangle that runs from one colour to another, downwards."""
        left, upper, right, lower = (round(value) for value in self._box(x, y, width, height))
        size = (right - left + 1, lower - upper + 1)
        self._draw.rectangle((left, upper, right, lower), top)
        self.image.paste(bottom, (left, upper), _vertical_ramp().resize(size, Image.Resampling.BILINEAR))

    def glow(self, x: float, y: float, rx: float, ry: float, color: Color, opacity: float = 1.0) -> None:
        """A soft spot of light or shadow around (x, y)."""
        left, upper, right, lower = (round(value) for value in self._box(x - rx, y - ry, 2 * rx, 2 * ry))
        mask = _spot(opacity).resize((max(1, right - left), max(1, lower - upper)), Image.Resampling.BILINEAR)
        self.image.paste(color, (left, upper), mask)


@dataclass(frozen=True)
class Light:
    """How a photo was taken: colour of the light, brightness, framing."""

    red: float
    green: float
    blue: float
    brightness: float
    crop: tuple[float, float, float, float]
    """Left, upper, right, lower, as shares of the drawing."""
    mirrored: bool

    @staticmethod
    def draw(rng: random.Random, *, dusk: bool = False) -> Light:
        """A light and a framing as they vary between photos; ``dusk`` is blue and dim."""
        warmth = rng.uniform(-0.05, 0.06)
        left, upper = rng.uniform(0, 0.035), rng.uniform(0, 0.03)
        right, lower = 1 - rng.uniform(0, 0.035), 1 - rng.uniform(0, 0.03)
        red, blue, brightness = 1 + warmth, 1 - warmth, rng.uniform(0.9, 1.07)
        if dusk:
            red, blue, brightness = red * 0.9, blue * 1.1, brightness * 0.86
        return Light(red, 1.0, blue, brightness, (left, upper, right, lower), rng.random() < 0.5)


def develop(canvas: Canvas, light: Light, size: tuple[int, int]) -> Image.Image:
    """The photo: the drawing cropped, scaled to ``size`` (width, height), lit and shaded in the corners."""
    width, height = canvas.image.size
    left, upper, right, lower = light.crop
    photo = canvas.image.resize(
        size, Image.Resampling.HAMMING, box=(left * width, upper * height, right * width, lower * height)
    )
    if light.mirrored:
        photo = photo.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    channels = (light.red, light.green, light.blue)
    photo = photo.point(
        [level for part in channels for level in _exposed(round(100 * part * light.brightness))]
    )
    photo.paste((10, 12, 22), None, _corner_shade(size))
    return photo


def degraded(photo: Image.Image, measure: float) -> Image.Image:
    """The photo blurred and darkened by ``measure``: 0 not at all, 1 hardly recognisable."""
    width, height = photo.size
    # 20 photo units at most, also where a photo is squeezed to a square.
    blurred = photo.filter(ImageFilter.GaussianBlur((measure * width / 16, measure * height / 12)))
    return ImageEnhance.Brightness(blurred).enhance(1 - 0.6 * measure)
