"""The photos of an example property, with known truth: which views there are and what each of them shows.

What lives here: the list of views, the choice of light and the rendering of one photo. What does not: how a
thing is drawn (buildings.py, gardens.py, rooms.py) and which files hold the photos (rendered_properties.py).
The same (purpose, seed, index) gives the same photos on every machine with the same Pillow.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from PIL import ExifTags, Image

from examples.buildings import Exterior, draw_rear, draw_sky, draw_street
from examples.canvas import Canvas, Light, develop
from examples.gardens import draw_backdrop, draw_garden
from examples.rooms import Interior, draw_bathroom, draw_bedroom, draw_kitchen, draw_living_room
from examples.truth import Purpose, draw_truth, property_random
from vlm_assets.config.property_description import PropertyDescription

PHOTO_SIZE: Final = (320, 240)
"""Width and height of a rendered photo, in pixels."""

_OUTSIDE = ("building_type", "facade_material", "roof", "floors", "garage", "has_solar_panels")

VISIBLE: Final[Mapping[str, tuple[str, ...]]] = {
    "street": _OUTSIDE,
    "street_at_dusk": _OUTSIDE,
    "rear": ("garden", "has_pool"),
    "garden": ("garden", "has_pool"),
    "living_room": ("living_floor", "has_fireplace"),
    "living_room_again": ("living_floor", "has_fireplace"),
    "kitchen": ("kitchen",),
    "dining": ("kitchen",),
    "bedroom": (),
    "bathroom": ("bathroom",),
}
"""Views in the order of a property's photos, each with the fields that it shows."""

VIEWS: Final = tuple(VISIBLE)


@dataclass(frozen=True)
class Property:
    """One example property: what is true of it, what all its photos share, which views it has."""

    purpose: Purpose
    seed: int
    index: int
    truth: PropertyDescription
    exterior: Exterior
    interior: Interior
    views: tuple[str, ...]


def draw_property(purpose: Purpose, seed: int, index: int) -> Property:
    """Property ``index`` of ``seed``: nine photos, or ten with the dining corner."""
    truth = draw_truth(purpose, seed, index)
    rng = property_random(purpose, seed, index, "look")
    views = VIEWS if rng.random() < 0.5 else tuple(view for view in VIEWS if view != "dining")
    return Property(purpose, seed, index, truth, Exterior.draw(truth, rng), Interior.draw(truth, rng), views)


def render(
    home: Property, view: str, *, size: tuple[int, int] = PHOTO_SIZE, scale: float | None = None
) -> Image.Image:
    """One photo, RGB, ``size`` (width, height) pixels.

    ``scale`` is the resolution of the drawing in pixels a photo unit (320 units across); by default one and a
    half times that of the photo, so that edges come out smooth.
    """
    rng = property_random(home.purpose, home.seed, home.index, view)
    canvas = Canvas(size[0] * 1.5 / 320 if scale is None else scale)
    dusk = view == "street_at_dusk"
    light = Light.draw(rng, dusk=dusk)
    truth, outside, inside = home.truth, home.exterior, home.interior
    if view in ("street", "street_at_dusk"):
        draw_street(canvas, truth, outside, rng, dusk=dusk)
    elif view == "rear":
        draw_rear(canvas, truth, outside, rng)
        draw_garden(canvas, truth, rng, horizon=146, far=True)
    elif view == "garden":
        horizon = rng.uniform(96, 112)
        draw_sky(canvas, outside.sky, rng)
        draw_backdrop(canvas, rng, horizon)
        draw_garden(canvas, truth, rng, horizon=horizon, far=False)
    elif view in ("living_room", "living_room_again"):
        draw_living_room(canvas, truth, inside, rng)
    elif view in ("kitchen", "dining"):
        draw_kitchen(canvas, truth, inside, rng, island=view == "dining")
    elif view == "bedroom":
        draw_bedroom(canvas, inside, rng)
    else:
        draw_bathroom(canvas, truth, inside, rng)
    return develop(canvas, light, size)


def encode_photo(photo: Image.Image, *, orientation: int | None = None) -> bytes:
    """The photo as JPEG bytes; with an EXIF orientation tag where one is given."""
    exif = Image.Exif()
    if orientation is not None:
        exif[ExifTags.Base.Orientation] = orientation
    stream = io.BytesIO()
    photo.save(stream, "JPEG", quality=86, exif=exif.tobytes() if orientation is not None else b"")
    return stream.getvalue()
