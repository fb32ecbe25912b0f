"""A further question set: what it asks, and where it is written down. No published row is touched.

Of a schema that has new fields, the new ones become a set of their own, and the answers of before stay.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import yaml

from vlm_assets.assets.changed_settings import field_kinds
from vlm_assets.assets.fingerprint import SETTINGS
from vlm_assets.config.questions_file import SET_PREFIX, QuestionsFile
from vlm_assets.config.settings import (
    PREFIX,
    Settings,
    SettingsError,
    find_modules_beside,
    refuse_wrong_sets,
)
from vlm_durable.commands import given_command
from vlm_durable.files.files import write_replacing
from vlm_durable.versions.partition_files import PublishedRecord
from vlm_durable.versions.published import PublishedPartitions
from vlm_durable.versions.versioned_object import RecordDamagedError
from vlm_engine.schema import load_schema, part_of_schema

_FILE = "questions.yaml"


@dataclass(frozen=True)
class FurtherQuestions:
    """A set that was written down. fields: that it asks for. unset: settings to set, with their values."""

    name: str
    file: Path
    fields: tuple[str, ...]
    unset: Mapping[str, str]

    @property
    def asset(self) -> str:
        """The name of its asset."""
        return SET_PREFIX + self.name


def add_questions(
    settings: Settings,
    name: str,
    *,
    schema: str | None = None,
    prompt: str | None = None,
    model: str | None = None,
) -> FurtherQuestions:
    """Write a set into the questions file, which is made in the working folder where there is none.

    schema: its fields; None: those that the descriptions' schema has and the published rows have not.
    Raises SettingsError, and then the file is as it was; SchemaError, OSError.
    """
    find_modules_beside(settings.questions)
    file = Path.cwd() / _FILE if settings.questions is None else settings.questions.path
    unset: dict[str, str] = {}
    if schema is None:
        unset["DESCRIPTION_SCHEMA"], schema = _split(settings)
    keys = {"schema": schema, "prompt": prompt, "model": model}
    given = {key: value for key, value in keys.items() if value is not None}
    before = b""
    with suppress(FileNotFoundError):
        before = file.read_bytes()
    text = yaml.safe_dump({name: given}, sort_keys=False, allow_unicode=True)
    content = b"\n".join(part for part in (before.rstrip(b"\n"), text.encode()) if part)
    try:
        questions = QuestionsFile.parse(file, content)
    except ValueError as error:
        raise SettingsError(f"{error}. Nothing was changed.") from error
    asked = settings.model_copy(
        update={
            "questions": questions,
            "description_schema": unset.get("DESCRIPTION_SCHEMA", settings.description_schema),
        }
    )
    refuse_wrong_sets(asked, questions)
    write_replacing(file, content)
    if settings.questions is None:
        unset["QUESTIONS"] = str(file)
    return FurtherQuestions(name, file, tuple(load_schema(schema).json_schema["properties"]), unset)


def _split(settings: Settings) -> tuple[str, str]:
    """The schema of the published rows, and that of the new fields. Raises SettingsError, SchemaError."""
    schema = settings.description_schema
    record = _newest_record(settings)
    before = record.metadata.get(SETTINGS, {}).get("schema") if record is not None else None
    give = f"Say what to ask: {given_command('--schema', 'MODULE:CLASS')}."
    if record is None or before is None:
        raise SettingsError(f"Nothing is published yet that a schema could be compared with. {give}")
    now = field_kinds(load_schema(schema).json_schema)
    asked = [field for field in now if "." not in field]
    added = [field for field in asked if field not in before]
    if not added:
        raise SettingsError(f"{schema} has no field that the published rows lack. {give}")
    kept = part_of_schema(schema, (field for field in asked if field in before))
    if load_schema(kept).digest != record.metadata["parts"].get("schema"):
        raise SettingsError(
            f"{schema} differs from the schema of the published rows in more than new fields, so it cannot"
            f" be split. Put the other fields back as they were. Or write a class of the new fields"
            f" ({', '.join(added)}) alone, and name it: {given_command('--schema', 'MODULE:CLASS')}."
        )
    return kept, part_of_schema(schema, added)


def _newest_record(settings: Settings) -> PublishedRecord | None:
    published = PublishedPartitions(settings.descriptions)
    records = []
    for key in settings.descriptions.recorded_keys():
        with suppress(RecordDamagedError):
            records.append(published.record(key))
    return max(
        (record for record in records if record is not None),
        key=lambda record: record.published_at,
        default=None,
    )


def lines_to_set(unset: Mapping[str, str]) -> list[str]:
    """The lines of ``.env`` that have the settings."""
    return [f"{PREFIX}{name}={shlex.quote(value)}" for name, value in unset.items()]
