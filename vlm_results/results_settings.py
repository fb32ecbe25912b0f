"""Settings that this extension alone asks for."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

from pydantic import Field, SecretStr, field_validator
from pydantic_settings import NoDecode

from vlm_assets.config.settings import AbsolutePath, Settings
from vlm_durable.mirror.bucket import Place, S3Folder, place_of


class ResultsSettings(Settings):
    """All settings, with what is right of answers, what is promised of them, and the Iceberg table."""

    truth: AbsolutePath | None = None
    """What is right of some properties (CSV, JSONL or parquet with property_id and fields): dataset_quality
    says how far the descriptions agree."""
    guarantee: str = ""
    """Shares of right answers, as FIELD>=SHARE with commas between, such as 'roof>=0.95, has_pool>=0.98':
    search, export and explore show null for answers of these fields that are not sure enough, with the raw
    answer beside (docs/confidence.md). Default: every answer is shown."""
    guarantee_risk: Annotated[float, Field(gt=0.0, le=0.5)] = 0.05
    """Chance that any of these fields has fewer right answers than the guarantee says."""
    table: Annotated[Path | S3Folder | None, NoDecode] = None
    """Folder of described_properties, an Iceberg table of all rows; of several machines one that all reach.
    Or s3://BUCKET/PREFIX, with a catalogue in Postgres. Default: described_properties in the home."""
    table_catalog: SecretStr | None = None
    """Postgres that keeps the catalogue of the Iceberg table, as STATE_URL. Default: that of STATE_URL, else
    SQLite beside the table. Secret."""

    @field_validator("table", mode="before")
    @classmethod
    def _table_on_disk_or_s3(cls, place: object) -> object:
        return place_of(place) if isinstance(place, str) else place

    @field_validator("table")
    @classmethod
    def _table_absolute(cls, place: Place | None) -> Place | None:
        return cls._absolute(place)

    @field_validator("guarantee")
    @classmethod
    def _shares_by_field(cls, guarantee: str) -> str:
        for part in guarantee.split(",") if guarantee.strip() else ():
            match = re.fullmatch(r"\s*(\w+)\s*>=\s*(0?\.\d+)\s*", part)
            if match is None or not 0 < float(match[2]) < 1:
                raise ValueError(f"{part!r} is no promise: write FIELD>=SHARE, with a share below 1")
        if len({part.split(">=")[0].strip() for part in guarantee.split(",")}) <= guarantee.count(","):
            raise ValueError("a field is named twice")
        return guarantee

    @property
    def described_table(self) -> Place:
        """The folder of the Iceberg table, whether there is one or not."""
        return self.table or self.home / "described_properties"

    @property
    def guarantee_targets(self) -> dict[str, float]:
        """The promised share of right answers, by field."""
        pairs = (part.split(">=") for part in self.guarantee.split(",") if part.strip())
        return {field.strip(): float(share) for field, share in pairs}

    @field_validator("table_catalog")
    @classmethod
    def _with_its_driver_too(cls, url: SecretStr | None) -> SecretStr | None:
        return cls._with_its_driver(url)
