"""What is true of an example property: its fields, drawn from an archetype, and the sentence about them.

What lives here: the archetypes, how a property's fields are drawn from (seed, index), its summary. What does
not: how it looks (scenes.py). Fields lean on the archetype, as they do in life: a villa more often has a
pool, so neighbours in the space of descriptions are alike.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from vlm_assets.config.property_description import PropertyDescription

FREE_TEXT: Final = ("summary",)
"""Fields that have no single right value; the truth leaves them out."""

FIELDS: Final = tuple(name for name in PropertyDescription.model_fields if name not in FREE_TEXT)

RARE: Final[Mapping[str, Any]] = {
    "has_solar_panels": True,
    "has_pool": True,
    "has_fireplace": True,
    "garage": "double",
    "floors": 5,
}
"""Values that few properties have; each must be found where it is."""

Purpose = Literal["example", "training"]
"""Which stream of properties: an example property, whatever its seed, is never one that was trained on."""

_USUAL = 0.75
"""Share of the fields that are as the archetype has them; the others are drawn from all its values."""


@dataclass(frozen=True)
class Archetype:
    """One kind of property: its share, what is usual for it, how often it has what is rare."""

    share: float
    usual: Mapping[str, str]
    floors: tuple[int, ...]
    """Numbers of floors, each as often as it occurs among five or so."""
    garages: tuple[float, float]
    """Shares of properties with one garage door and with two."""
    rare: Mapping[str, float]


def _archetype(
    share: float, look: str, floors: tuple[int, ...], garages: tuple[float, float], rare: str
) -> Archetype:
    building, facade, roof, garden, kitchen, living, bathroom = look.split()
    usual = {
        "building_type": building,
        "facade_material": facade,
        "roof": roof,
        "garden": garden,
        "kitchen": kitchen,
        "living_floor": living,
        "bathroom": bathroom,
    }
    names = ("has_solar_panels", "has_pool", "has_fireplace")
    return Archetype(share, usual, floors, garages, dict(zip(names, map(float, rare.split()), strict=True)))


ARCHETYPES: Final = (
    # share; building, facade, roof, garden, kitchen, floor, bathroom; floors; garage 1/2; solar, pool, fire
    _archetype(
        0.21,
        "apartment_block render flat patio white tile shower",
        (4, 4, 4, 5, 3),
        (0.08, 0.02),
        "0.05 0.03 0.01",
    ),
    _archetype(
        0.20,
        "terraced_house brick gable flower_beds navy carpet bath",
        (3, 3, 3, 2),
        (0.06, 0.01),
        "0.05 0.01 0.16",
    ),
    _archetype(
        0.19,
        "detached_house brick hip lawn oak parquet bath_and_shower",
        (2, 2, 2, 2, 3),
        (0.60, 0.16),
        "0.20 0.05 0.08",
    ),
    _archetype(
        0.14, "bungalow timber hip lawn sage carpet shower", (1, 1, 1, 1, 2), (0.60, 0.06), "0.12 0.04 0.06"
    ),
    _archetype(
        0.14, "cottage stone gable flower_beds oak parquet bath", (2, 2, 2, 1), (0.08, 0.01), "0.03 0.01 0.30"
    ),
    _archetype(
        0.12,
        "villa render flat woodland white tile bath_and_shower",
        (2, 2, 2, 3, 1),
        (0.30, 0.30),
        "0.15 0.45 0.10",
    ),
)

_VALUES: Final[Mapping[str, tuple[str, ...]]] = {
    name: tuple(dict.fromkeys(kind.usual[name] for kind in ARCHETYPES)) for name in ARCHETYPES[0].usual
}


def property_random(purpose: Purpose, seed: int, index: int, part: str) -> random.Random:
    """The random numbers for one part ("truth", "look", …) of one property; the same on every machine."""
    return random.Random(f"{purpose}/{seed}/{index}/{part}")


def draw_truth(purpose: Purpose, seed: int, index: int) -> PropertyDescription:
    """The description that is true of property ``index`` of ``seed``."""
    rng = property_random(purpose, seed, index, "truth")
    kind = rng.choices(ARCHETYPES, [archetype.share for archetype in ARCHETYPES])[0]
    fields: dict[str, Any] = {
        name: value if rng.random() < _USUAL else rng.choice(_VALUES[name])
        for name, value in kind.usual.items()
    }
    # The building is the archetype's own: a bungalow of five floors would be another building.
    fields["building_type"] = kind.usual["building_type"]
    fields["floors"] = rng.choice(kind.floors)
    single, double = kind.garages
    fields["garage"] = rng.choices(("single", "double", "none"), (single, double, 1 - single - double))[0]
    for name, share in kind.rare.items():
        fields[name] = rng.random() < share
    return PropertyDescription(**fields, summary=summarize(fields))


_WORDS: Final[Mapping[str, str]] = {
    "apartment_block": "apartment block",
    "terraced_house": "terraced house",
    "detached_house": "detached house",
    "flower_beds": "flower beds",
    "bath_and_shower": "bath and shower",
    "parquet": "parquet floors",
    "tile": "tiled floors",
    "carpet": "carpet",
    "render": "rendered",
    "lawn": "a lawn",
    "patio": "a patio",
    "woodland": "old trees",
    "bath": "a bath",
    "shower": "a shower",
}


def summarize(fields: Mapping[str, Any]) -> str:
    """The sentence about a property: a function of its fields alone, so it is as true as they are."""

    def words(name: str) -> str:
        return _WORDS.get(fields[name], fields[name])

    floors = "one floor" if fields["floors"] == 1 else f"{fields['floors']} floors"
    text = (
        f"A {words('facade_material')} {words('building_type')} on {floors}, {words('garden')} outside; "
        f"{words('living_floor')}, a kitchen in {fields['kitchen']}, {words('bathroom')}."
    )
    extras = [
        text
        for present, text in (
            (fields["garage"] != "none", f"a {fields['garage']} garage"),
            (fields["has_pool"], "a pool"),
            (fields["has_fireplace"], "a fireplace"),
            (fields["has_solar_panels"], "solar panels"),
        )
        if present
    ]
    if extras:
        joined = extras[0] if len(extras) == 1 else f"{', '.join(extras[:-1])} and {extras[-1]}"
        text += f" With {joined}."
    return text


def known(description: PropertyDescription) -> dict[str, Any]:
    """The fields of a description that are right or wrong, in schema order."""
    return {name: getattr(description, name) for name in FIELDS}
