"""The versions that Dagster compares to call a partition stale: they follow from fingerprint and texts.

``partition_state.py`` decides whether a partition is stale. With these versions Dagster never says so of one
that is called done there. What Dagster cannot express is listed in docs/dagster.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import dagster as dg

from resources.dagster_names import DagsterNames
from vlm_assets.assets.fingerprint import (
    OF_THE_PARTITION,
    TEXTS,
    description_parts,
    embedding_parts,
    settings_digest,
)
from vlm_assets.config.resource_settings import build_text_embedding_model, build_vision_language_model
from vlm_assets.config.settings import Settings
from vlm_catalog.ranges import DESCRIPTIONS
from vlm_durable.versions.partition_files import PublishedRecord
from vlm_engine.model_source import noted_revision
from vlm_engine.protocol import EngineError

CATALOG_VERSION: Final = dg.DataVersion("INITIAL")
"""The data version of every catalogue: a partition depends on its own rows of it, and Dagster would compare
the whole. An event without a version counts as this one, such as what the command line reports."""

_CODE, _DATA = "dagster/code_version", "dagster/data_version"
_INPUT_DATA, _INPUT_EVENT = "dagster/input_data_version", "dagster/input_event_pointer"


def description_code_version(settings: Settings) -> str | None:
    """The digest of all settings that decide a description; None where it is not known at once.

    While the definitions load, no model server and no hub is asked and no large file is hashed. Dagster
    compares nothing where it is None.
    """
    model = build_vision_language_model(settings)
    try:
        revision = model.noted_revision()
        return revision and settings_digest(description_parts(settings, model, revision=revision))
    except (EngineError, ValueError, OSError):
        return None  # A run says what is wrong.


def embedding_code_version(settings: Settings) -> str | None:
    """The digest of all settings that decide a vector; None as for a description."""
    model = build_text_embedding_model(settings)
    try:
        revision = noted_revision(model.source)
        return revision and settings_digest(embedding_parts(model, revision=revision))
    except (EngineError, ValueError, OSError):
        return None


def version_tags(record: PublishedRecord, parts: Mapping[str, str]) -> dict[str, str]:
    """The tags of a materialization: the version of the settings that made its rows, and of the rows.

    The rows' version changes where what is made from them would change: for descriptions, with the texts to
    embed. parts: of the fingerprint now, empty where unknown. A record may lack a part that newer versions
    have.
    """
    made_with = {
        name: part for name, part in record.metadata.get("parts", {}).items() if name not in OF_THE_PARTITION
    }
    is_current = bool(parts) and all(parts.get(name, part) == part for name, part in made_with.items())
    return {
        _CODE: settings_digest(parts if is_current else made_with),
        _DATA: str(record.metadata.get(TEXTS, record.fingerprint)),
    }


def tags_of_found(
    record: PublishedRecord, parts: Mapping[str, str], names: DagsterNames, *, newest_event: int
) -> dict[str, str]:
    """The tags of a published partition that Dagster's database does not know: as a run would have made them.

    newest_event: the id of Dagster's latest event, which the descriptions that were embedded precede.
    """
    texts = record.metadata.get("parts", {}).get(TEXTS)
    asset, version = ("property_catalog", CATALOG_VERSION.value) if texts is None else (DESCRIPTIONS, texts)
    upstream = names.key(asset).to_user_string()
    return {
        **version_tags(record, parts),
        f"{_INPUT_DATA}/{upstream}": version,
        f"{_INPUT_EVENT}/{upstream}": str(newest_event),
    }
