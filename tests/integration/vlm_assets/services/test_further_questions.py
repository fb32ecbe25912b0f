"""One more question becomes a set of its own, and no published row changes."""

import pytest

from vlm_assets.assets.partition_state import PartitionStates, State
from vlm_assets.config.questions_file import QuestionsFile
from vlm_assets.config.settings import Settings, SettingsError
from vlm_assets.services.further_questions import add_questions
from vlm_catalog.catalog import Catalog
from vlm_engine.schema import load_schema

OWN = Settings.model_fields["description_schema"].default

LARGER = """
from pydantic import ConfigDict, Field, create_model
from vlm_assets.config.property_description import PropertyDescription as Asked

fields = {name: (field.annotation, field) for name, field in Asked.model_fields.items()}
Larger = create_model(
    "PropertyDescription", __doc__=Asked.__doc__, __config__=Asked.model_config, **fields,
    has_ramp=(bool, Field(description="Whether a ramp leads to the door.")),
)
changed = fields | {"roof": (str, Field(description="Another question."))}
Other = create_model("Other", **changed, has_ramp=(bool, Field(description="Whether there is a ramp.")))
"""


@pytest.fixture
def larger(desk, tmp_path, monkeypatch):
    """A published home whose schema got one more field."""
    (tmp_path / "larger_schema.py").write_text(LARGER)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return desk.settings.model_copy(update={"description_schema": "larger_schema:Larger"})


def state_of(settings):
    catalog = Catalog.open(settings.home)
    return PartitionStates(settings, catalog).read("property_descriptions", catalog.ranges[0].key).state


@pytest.mark.published("property_descriptions")
def test_new_fields_become_a_set_and_finished_rows_stay(larger):
    """25 days are not paid a second time for one more field."""
    assert state_of(larger) is State.STALE
    added = add_questions(larger, "access")
    assert added.fields == ("has_ramp",)
    kept = added.unset["DESCRIPTION_SCHEMA"]
    assert load_schema(kept).digest == load_schema(OWN).digest
    assert state_of(larger.model_copy(update={"description_schema": kept})) is State.DONE
    ((name, asked),) = QuestionsFile.read(added.file).sets
    assert (name, asked.description_schema) == ("access", "larger_schema:Larger[has_ramp]")


@pytest.mark.published("property_descriptions")
def test_a_schema_that_changed_otherwise_too_is_not_split(larger, tmp_path):
    """The fields that are kept must be those of the published rows, word by word."""
    changed = larger.model_copy(update={"description_schema": "larger_schema:Other"})
    with pytest.raises(SettingsError, match=r"differs .* in more than new fields"):
        add_questions(changed, "access")
    assert not (tmp_path / "questions.yaml").exists()


def test_a_set_is_added_to_what_the_file_has(larger, tmp_path):
    """The file is a person's: what stands in it stays, comments too."""
    before = "# ours\ncondition:\n  schema: larger_schema:Larger[has_ramp]  # steep?\n"
    file = tmp_path / "questions.yaml"
    file.write_text(before)
    settings = larger.model_copy(update={"questions": QuestionsFile.read(file), "description_schema": OWN})
    with pytest.raises(SettingsError, match="has_ramp, and so has the set condition"):
        add_questions(settings, "access", schema="larger_schema:Larger[has_ramp]")
    assert file.read_text() == before
    with pytest.raises(SettingsError, match=r"'condition' stands twice.*Nothing was changed"):
        add_questions(settings, "condition", schema="larger_schema:Larger[has_ramp]")
    assert file.read_text() == before
    (tmp_path / "steps_schema.py").write_text(
        "from pydantic import BaseModel\nclass Steps(BaseModel):\n    steps: int\n"
    )
    add_questions(settings, "steps", schema="steps_schema:Steps", prompt="How many steps?")
    assert file.read_text().startswith(before)
    assert dict(QuestionsFile.read(file).sets)["steps"].prompt == "How many steps?"


def test_nothing_published_needs_a_schema(larger):
    """Without rows there is nothing to compare with, and the command says what to give."""
    with pytest.raises(SettingsError, match=r"Nothing is published yet.*--schema MODULE:CLASS"):
        add_questions(larger, "access")
