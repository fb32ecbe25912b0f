"""What Dagster's pages say of the assets: columns, place, owners, tags, kinds."""

import json
from enum import Enum
from typing import Literal

import dagster as dg
import pydantic
import pytest

from vlm_assets.assets import asset_metadata
from vlm_assets.assets.asset_metadata import table_metadata
from vlm_assets.assets.description_work import description_rows
from vlm_assets.assets.property_descriptions import build_described_assets
from vlm_assets.assets.property_embeddings import embedding_rows
from vlm_assets.config.question_sets import QuestionSet
from vlm_assets.config.settings import load_settings
from vlm_assets.home_definitions import build_defs
from vlm_catalog.catalog_file import SCHEMA
from vlm_engine.schema import DescriptionSchema, load_schema


class Heating(Enum):
    """One field of a schema."""

    GAS = "gas"
    NONE = "none"


class Room(pydantic.BaseModel):
    """An object in a schema."""

    kind: Literal["kitchen", "bath"] = pydantic.Field(description="What it is for.")
    windows: int | None = pydantic.Field(ge=0, description="Seen from inside.")


class House(pydantic.BaseModel):
    """A schema of nested fields."""

    heating: Heating = pydantic.Field(description="How it is heated.")
    rooms: list[Room] = pydantic.Field(description="Rooms that are seen.")
    remarks: list[str]
    porch: Room | None


def columns_of(settings, name):
    spec = next(
        spec for spec in build_defs(settings).resolve_all_asset_specs() if spec.key == dg.AssetKey(name)
    )
    return {column.name: column for column in spec.metadata["dagster/column_schema"].columns}


def test_every_column_has_its_meaning_and_no_other():
    """A column that is added is explained, and one that is gone is explained no more."""
    default = load_schema("vlm_assets.config.property_description:PropertyDescription")
    assert set(asset_metadata.CATALOG) == set(SCHEMA.names)
    assert set(asset_metadata.DESCRIPTIONS) == set(description_rows(default.arrow_type).names)
    assert set(asset_metadata.EMBEDDINGS) == set(embedding_rows(8).names)


def test_the_fields_of_the_schema_are_columns_with_its_own_words(tmp_path):
    """Nested ones too; the limits of a value stand beside it."""
    schema = DescriptionSchema(House)
    rows = description_rows(schema.arrow_type)
    settings = load_settings(home=tmp_path)
    metadata = table_metadata(settings, "a", rows, asset_metadata.DESCRIPTIONS, description=schema)
    columns = {column.name: column for column in metadata["dagster/column_schema"].columns}
    fields = {
        name.removeprefix("description."): (column.type, column.description, column.constraints.other)
        for name, column in columns.items()
        if name.startswith("description.")
    }
    kind = ("string", "What it is for.", ["one of kitchen, bath"])
    windows = ("int64", "Seen from inside.", ["0 or more"])
    assert fields == {
        "heating": ("string", "How it is heated.", ["one of gas, none"]),
        "rooms": ("list<struct>", "Rooms that are seen.", []),
        "rooms[].kind": kind,
        "rooms[].windows": windows,
        "remarks": ("list<string>", None, []),
        "porch": ("struct", "An object in a schema.", []),
        "porch.kind": kind,
        "porch.windows": windows,
    }
    assert columns["property_id"].constraints.unique
    assert not columns["status"].constraints.nullable
    assert metadata["dagster/uri"] == (tmp_path / "a").as_uri()


def test_definitions_have_columns_owners_tags_and_kinds(tmp_path):
    """Who looks at an asset in Dagster's catalogue sees whose it is and what is in it, before any run."""
    settings = load_settings(home=tmp_path, owners="team:listings a@example.org", tags="tier=gold")
    assert columns_of(settings, "property_descriptions")["description.roof"].constraints.other == [
        "one of flat, gable, hip"
    ]
    assert columns_of(settings, "property_embeddings")["embedding"].type == "list<float>"
    assert columns_of(settings, "property_catalog")["image_uris"].type == "list<string>"
    specs = list(build_defs(settings).resolve_all_asset_specs())
    assert len(specs) > 5
    for spec in specs:
        assert spec.owners == ["team:listings", "a@example.org"], spec.key
        assert spec.tags["tier"] == "gold", spec.key
        assert spec.kinds, spec.key


@pytest.mark.parametrize("schema", ["no_such_module:Home", "json:JSONDecoder"])
def test_a_schema_that_cannot_be_used_leaves_the_definitions_loadable(tmp_path, schema):
    """The pages are there, and a run says what is wrong."""
    defs = build_defs(load_settings(home=tmp_path, description_schema=schema))
    dg.Definitions.validate_loadable(defs)
    assert json.dumps([str(spec.key) for spec in defs.resolve_all_asset_specs()])


def test_a_question_set_is_an_asset_of_its_own_with_its_schema_and_its_model(tmp_path):
    """The same code makes it: it names no asset, schema or model but the set's."""
    settings = load_settings(home=tmp_path)
    own = settings.model_copy(update={"description_schema": "tests.support.sure_answers:House"})
    asked = QuestionSet(settings.layout.asset("property_condition"), own, "its_model")
    made = build_described_assets(settings, [asked], dg.StaticPartitionsDefinition(["k"]), upstream="listed")
    key = dg.AssetKey("property_condition")
    columns = {column.name for column in made.metadata_by_key[key]["dagster/column_schema"].columns}
    of_schema = {f"description.{field.name}" for field in load_schema(own.description_schema).arrow_type}
    assert {name for name in columns if name.startswith("description.")} == of_schema
    assert made.metadata_by_key[key]["dagster/uri"].endswith("/property_condition")
    assert made.asset_deps[key] == {dg.AssetKey("listed")}
    assert made.required_resource_keys >= {"gpu", "its_model"}
    assert "vision_language_model" not in made.required_resource_keys
    assert {spec.asset_key for spec in made.check_specs} == {key}
