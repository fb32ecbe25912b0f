"""What a description of a property says: the default schema, which a user may replace with their own.

The words that explain the fields become the prompt and the JSON schema of guided decoding.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

BuildingType = Literal["apartment_block", "terraced_house", "detached_house", "bungalow", "cottage", "villa"]
FacadeMaterial = Literal["brick", "render", "stone", "timber"]
Roof = Literal["flat", "gable", "hip"]
Garage = Literal["none", "single", "double"]
Garden = Literal["lawn", "flower_beds", "patio", "woodland"]
Kitchen = Literal["white", "oak", "navy", "sage"]
LivingFloor = Literal["parquet", "tile", "carpet"]
Bathroom = Literal["bath", "shower", "bath_and_shower"]


class PropertyDescription(BaseModel):
    """One property, described from all of its images together."""

    model_config = ConfigDict(extra="forbid")

    building_type: BuildingType = Field(description="Kind of building, judged from its outside.")
    facade_material: FacadeMaterial = Field(description="What most of the outer wall is made of.")
    roof: Roof = Field(
        description="Shape of the main roof: flat, gable (triangular end) or hip (slopes on all sides)."
    )
    floors: int = Field(ge=1, le=5, description="Number of storeys, the ground floor included.")
    garage: Garage = Field(description="Garage beside the building: none, one door or two.")
    has_solar_panels: bool = Field(description="Whether solar panels stand on the roof.")
    garden: Garden = Field(description="What most of the garden is: lawn, flower beds, paved patio or trees.")
    has_pool: bool = Field(description="Whether there is a swimming pool.")
    kitchen: Kitchen = Field(description="Colour of the kitchen fronts.")
    living_floor: LivingFloor = Field(description="Floor covering of the living room.")
    has_fireplace: bool = Field(description="Whether the living room has a fireplace.")
    bathroom: Bathroom = Field(description="What the bathroom is fitted with: bath, shower or both.")
    summary: str = Field(
        max_length=300,
        description="One or two sentences that a buyer would read first, without superlatives.",
    )
