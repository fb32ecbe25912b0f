"""Requests for properties in a person's words, each with what must be true of a property that answers it.

What lives here: the phrases that the example's embedder learns from, and the requests that it is measured
by. What does not: the learning (embedder_training.py), the measuring (``benchmarks/search_quality.py``).
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from vlm_assets.config.property_description import PropertyDescription

_NUMBERS: Final = ("one", "two", "three", "four", "five")

BUILDINGS: Final[Mapping[str, tuple[str, ...]]] = {
    "apartment_block": ("apartment block", "block of flats", "apartment building", "apartments", "flats"),
    "terraced_house": ("terraced house", "terrace house", "row house", "townhouse", "terraced home"),
    "detached_house": ("detached house", "detached home", "detached family house", "free-standing house"),
    "bungalow": ("bungalow",),
    "cottage": ("cottage", "country cottage"),
    "villa": ("villa", "mansion"),
}
"""Nouns for each building."""

WALLS: Final[Mapping[str, tuple[str, ...]]] = {
    "brick": ("brick", "red brick", "brick-built", "brick walled"),
    "render": ("rendered", "plastered", "stucco", "render"),
    "stone": ("stone", "stone-built", "stone walled", "natural stone"),
    "timber": ("timber", "wooden", "wood-clad", "timber-clad", "timber-framed"),
}
"""Adjectives for each material of the outer wall."""

_PARTS: Final[Mapping[str, Mapping[Any, tuple[str, ...]]]] = {
    "roof": {
        "flat": ("a flat roof", "flat roof"),
        "gable": ("a gable roof", "a gabled roof", "gables"),
        "hip": ("a hip roof", "a hipped roof"),
    },
    "garage": {
        "none": ("no garage",),
        "single": ("a single garage", "a garage for one car", "a one-car garage"),
        "double": ("a double garage", "a garage for two cars", "a two-car garage", "room for two cars"),
    },
    "garden": {
        "lawn": ("a lawn", "a grass garden", "grass outside", "a garden with a lawn"),
        "flower_beds": ("flower beds", "flowers", "a flower garden", "a garden full of flowers"),
        "patio": ("a patio", "a paved garden", "a paved patio", "paving outside"),
        "woodland": ("old trees", "woodland", "trees in the garden", "a wooded garden"),
    },
    "has_solar_panels": {True: ("solar panels", "solar power", "photovoltaic panels", "panels on the roof")},
    "has_pool": {True: ("a pool", "a swimming pool", "pool", "somewhere to swim")},
    "has_fireplace": {True: ("a fireplace", "an open fire", "fireplace", "a hearth")},
    "kitchen": {
        "white": ("a white kitchen", "a kitchen in white", "white kitchen cupboards"),
        "oak": ("an oak kitchen", "a kitchen in oak", "oak kitchen fronts"),
        "navy": ("a navy kitchen", "a kitchen in navy", "a dark blue kitchen", "a navy blue kitchen"),
        "sage": ("a sage kitchen", "a kitchen in sage", "a green kitchen", "a sage green kitchen"),
    },
    "living_floor": {
        "parquet": ("parquet", "parquet floors", "wooden floors", "a parquet floor"),
        "tile": ("tiles", "tiled floors", "a tiled living room", "tile floors"),
        "carpet": ("carpet", "carpets", "a carpeted living room", "carpeted floors"),
    },
    "bathroom": {
        "bath": ("a bathtub and no shower", "only a bath"),
        "shower": ("a shower and no bath", "only a shower"),
        "bath_and_shower": ("a bath and a shower", "both bath and shower", "a bathroom with bath and shower"),
    },
}
"""What stands after "with", for each value that has words."""

_WIDER: Final[Mapping[str, tuple[tuple[tuple[Any, ...], tuple[str, ...]], ...]]] = {
    "garage": ((("single", "double"), ("a garage", "garage", "somewhere to park a car")),),
    "bathroom": (
        (("bath", "bath_and_shower"), ("a bath", "a bathtub", "bath")),
        (("shower", "bath_and_shower"), ("a shower", "shower")),
    ),
}
"""Words for more than one value of a field."""

_NOUNS: Final = ("property", "home", "place", "building", "house")
_OPENINGS: Final = (
    "",
    "",
    "",
    "",
    "a ",
    "a ",
    "the ",
    "looking for a ",
    "find a ",
    "i want a ",
    "show me a ",
)
_JOINS: Final = (" with ", " with ", " with ", " that has ", " and ", ", ", " having ")
_WITH: Final = tuple(_PARTS)


@dataclass(frozen=True)
class Request:
    """Words, and of each field that they name, the values that answer them."""

    text: str
    wanted: Mapping[str, tuple[Any, ...]]

    def unmet(self, truth: Mapping[str, Any]) -> int:
        """How many of the named fields have another value in this property."""
        return sum(truth[name] not in values for name, values in self.wanted.items())


_GARAGE: Final = ("single", "double")
_BATH: Final = ("bath", "bath_and_shower")

HELD_OUT: Final = tuple(
    Request(text, {name: value if isinstance(value, tuple) else (value,) for name, value in wanted.items()})
    for text, wanted in (
        ("a stone cottage", {"facade_material": "stone", "building_type": "cottage"}),
        ("stone cottages", {"facade_material": "stone", "building_type": "cottage"}),
        ("brick bungalow", {"facade_material": "brick", "building_type": "bungalow"}),
        ("cottage with flower beds", {"building_type": "cottage", "garden": "flower_beds"}),
        ("villa with a swimming pool", {"building_type": "villa", "has_pool": True}),
        ("somewhere with a pool and a fireplace", {"has_pool": True, "has_fireplace": True}),
        ("terraced house in brick", {"building_type": "terraced_house", "facade_material": "brick"}),
        (
            "timber bungalow with a garage",
            {"building_type": "bungalow", "facade_material": "timber", "garage": _GARAGE},
        ),
        ("any home with solar panels", {"has_solar_panels": True}),
        ("a double garage", {"garage": "double"}),
        ("an apartment block with five floors", {"building_type": "apartment_block", "floors": 5}),
        ("block of flats, shower only", {"building_type": "apartment_block", "bathroom": "shower"}),
        ("kitchen in navy", {"kitchen": "navy"}),
        ("sage kitchen and carpet", {"kitchen": "sage", "living_floor": "carpet"}),
        ("oak kitchen with parquet floors", {"kitchen": "oak", "living_floor": "parquet"}),
        ("old trees around the villa", {"garden": "woodland", "building_type": "villa"}),
        ("a patio and a white kitchen", {"garden": "patio", "kitchen": "white"}),
        ("detached house with a lawn", {"building_type": "detached_house", "garden": "lawn"}),
        ("cottage with an open fire", {"building_type": "cottage", "has_fireplace": True}),
        ("rendered villa", {"facade_material": "render", "building_type": "villa"}),
        ("wooden bungalow", {"facade_material": "timber", "building_type": "bungalow"}),
        ("brick house with hipped roof", {"facade_material": "brick", "roof": "hip"}),
        ("stone building with a gable roof", {"facade_material": "stone", "roof": "gable"}),
        ("townhouse with a fireplace", {"building_type": "terraced_house", "has_fireplace": True}),
        ("row house with three floors", {"building_type": "terraced_house", "floors": 3}),
        ("bungalow, sage green kitchen", {"building_type": "bungalow", "kitchen": "sage"}),
        (
            "detached house with both bath and shower",
            {"building_type": "detached_house", "bathroom": "bath_and_shower"},
        ),
        ("a place with a bathtub and parquet", {"bathroom": _BATH, "living_floor": "parquet"}),
        ("one floor, timber walls", {"floors": 1, "facade_material": "timber"}),
        ("flat roof and tiled floors", {"roof": "flat", "living_floor": "tile"}),
    )
)  # fmt: skip
"""Written by hand, to measure searches by. None of them is drawn."""

_HELD_OUT_TEXTS: Final = frozenset(request.text for request in HELD_OUT)


def draw_request(truth: PropertyDescription, rng: random.Random) -> Request:
    """A request that this property answers, of one to five of its fields."""
    fields = truth.model_dump()
    wanted: dict[str, tuple[Any, ...]] = {}
    before = ""
    if rng.random() < 0.4:
        wanted["facade_material"] = (truth.facade_material,)
        before = rng.choice(WALLS[truth.facade_material]) + " "
    if rng.random() < 0.2:
        wanted["floors"] = (truth.floors,)
        number = rng.choice((str(truth.floors), _NUMBERS[truth.floors - 1]))
        before = f"{number}{rng.choice((' floor ', '-storey ', ' storey ', '-floor '))}{before}"
    noun = rng.choice(_NOUNS)
    if rng.random() < 0.6:
        wanted["building_type"] = (truth.building_type,)
        noun = rng.choice(BUILDINGS[truth.building_type])
    parts = []
    for name in rng.sample(_WITH, rng.choice((0, 1, 1, 2, 2, 3))):
        wider = [one for one in _WIDER.get(name, ()) if fields[name] in one[0]]
        if wider and rng.random() < 0.6:
            values, phrases = rng.choice(wider)
        else:
            values, phrases = (fields[name],), _PARTS[name].get(fields[name], ())
        if phrases:
            wanted[name] = values
            parts.append(rng.choice(phrases))
    if rng.random() < 0.1:
        wanted["floors"] = (truth.floors,)
        number = rng.choice((str(truth.floors), _NUMBERS[truth.floors - 1]))
        parts.append(f"{number} {'floor' if truth.floors == 1 else rng.choice(('floors', 'storeys'))}")
    if not wanted:
        return draw_request(truth, rng)
    text = rng.choice(_OPENINGS) + before + noun
    if parts:
        text += rng.choice(_JOINS) + rng.choice((", ", " and ", " with ")).join(parts)
    if rng.random() < 0.15:
        text = " ".join(parts) if parts and len(wanted) == len(parts) else text
    if text.strip() in _HELD_OUT_TEXTS:
        return draw_request(truth, rng)
    return Request(text, wanted)
