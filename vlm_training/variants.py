"""The variants of ``description_model``: the file that ``VLM_ASSETS_VARIANTS`` names, read and validated.

``vlm_training/training_data.py`` has the data that a variant is trained on.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal, Self

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    PositiveFloat,
    PositiveInt,
    ValidationError,
    model_validator,
)

from vlm_assets.config.settings import EXAMPLE, EXAMPLE_MODEL, PREFIX, Settings, SettingsError
from vlm_durable.versions.versioned_object import unfit_key
from vlm_training.training_settings import TrainingSettings

_SETTING = f"{PREFIX}VARIANTS"


class Variant(BaseModel):
    """A variant. docs/training.md says what each name means."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    base: str
    data: str = "descriptions"
    partitions: tuple[str, ...] | None = None
    steps: PositiveInt | None = None
    epochs: PositiveFloat | None = None
    batch: PositiveInt = 8
    microbatches: PositiveInt | None = None
    learning_rate: PositiveFloat = 1e-4
    seed: int = 0
    method: Literal["full", "lora"] = "full"
    objective: str = "default"
    held_out: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.1
    evaluate: Annotated[int, Field(ge=0)] = 64
    patience: PositiveInt | None = None
    workers: Annotated[int, Field(ge=0, le=256)] = 0
    threads: PositiveInt = 1
    ranks: Annotated[int, Field(ge=1, le=64)] = 1
    checkpoint_seconds: PositiveFloat | None = None

    @model_validator(mode="after")
    def _steps_or_epochs(self) -> Self:
        if (self.steps is None) == (self.epochs is None):
            raise ValueError("give steps or epochs, one of them")
        if self.partitions is not None and self.data != "descriptions":
            raise ValueError("partitions are of descriptions alone")
        return self

    @property
    def base_model(self) -> str:
        """The base model's folder, hub id, or ``module:name``."""
        return str(EXAMPLE_MODEL) if self.base == EXAMPLE else self.base

    @property
    def parts(self) -> int:
        """Microbatches of a step: four, so that up to four ranks can share it."""
        return self.microbatches or min(4, self.batch)


def _fit_name(name: str) -> str:
    if problem := unfit_key(name):
        raise ValueError(f"{problem}. Rename it")
    return name


class _VariantsFile(BaseModel):
    model_config = ConfigDict(extra="forbid", coerce_numbers_to_str=True)

    variants: dict[Annotated[str, AfterValidator(_fit_name)], Variant]


def read_variants(settings: Settings) -> Mapping[str, Variant]:
    """The variants by name, in the order of the file; none without one. Raises SettingsError."""
    path = TrainingSettings.part_of(settings).variants
    if path is None:
        return {}
    try:
        return _VariantsFile.model_validate(yaml.safe_load(path.read_text())).variants
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise SettingsError(f"{_SETTING}={path} cannot be read: {' '.join(str(error).split())}") from error
    except ValidationError as error:
        problems = "; ".join(
            f"{'.'.join(map(str, problem['loc'])) or 'the file'}: {problem['msg']}"
            for problem in error.errors(include_url=False)
        )
        raise SettingsError(
            f"{_SETTING}={path}: {problems}. The file holds one object `variants`, with a name and the values"
            " of each variant below it; docs/training.md shows one."
        ) from error
