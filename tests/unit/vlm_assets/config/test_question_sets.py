"""Further question sets: a file of them is read whole or refused in one sentence, before anything runs."""

import pytest

from vlm_assets.config.question_sets import config_of_runs, options_of, question_sets
from vlm_assets.config.settings import SettingsError, load_settings

SCHEMAS = '''
from pydantic import BaseModel, Field

class Condition(BaseModel):
    """How well it is kept."""
    needs_paint: bool = Field(description="Whether the walls need paint")

class Access(BaseModel):
    """How one gets in."""
    has_ramp: bool = Field(description="Whether a ramp leads to the door")

class Counted(BaseModel):
    """A field that the descriptions have, of another type."""
    has_pool: int = Field(description="How many pools there are")

class Twice(BaseModel):
    """A field that the descriptions have."""
    has_pool: bool = Field(description="Whether there is a pool")
'''


@pytest.fixture
def load(tmp_path, monkeypatch):
    """Loads settings with questions of this text, whose schemas lie beside it."""
    (tmp_path / "schemas_of_sets.py").write_text(SCHEMAS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)

    def load(text, **values):
        (tmp_path / "questions.yaml").write_text(text)
        return load_settings(home=tmp_path / "home", questions="questions.yaml", **values)

    return load


A = "a:\n  schema: schemas_of_sets:Access\n"
REFUSED = {
    "a reserved name": (A.replace("a:", "catalog:"), "'catalog' is reserved"),
    "the name of the first set": ("descriptions:\n  schema: a:B\n", "'descriptions' is reserved"),
    "no name": ("Ramp Here:\n  schema: a:B\n", "'Ramp Here' is no name of a set"),
    "a set twice": (f"{A}{A}", "'a' stands twice, again in line 3"),
    "a key twice": (f"{A}  schema: a:C\n", "'schema' stands twice"),
    "a misspelt key": ("a:\n  schma: a:B\n", r"the set a, .*schema"),
    "a misspelt key that may be left out": (
        f"{A}  promt: Is there a ramp?\n",
        "the set a, promt: there is no such key; the keys are schema, prompt",
    ),
    "no mapping": ("a: schemas_of_sets:Access\n", "the set a says nothing"),
    "a list": ("[1]\n", "names no set"),
    "an empty file": ("", "names no set"),
    "no YAML": ("a: [\n", "is no YAML"),
    "code": ("a: !!python/object:os.system {}\n", "is no YAML"),
    "no such schema": ("a:\n  schema: schemas_of_sets:Nothing\n", "the set a: .*Nothing"),
    "a field of the descriptions": (A.replace("Access", "Twice"), "has_pool, and so has the set desc"),
    "a field of two sets": (f"{A}b{A[1:]}", "the set b has the field has_ramp, and so has the set a"),
    "fills what it does not ask": (f"{A}  fills: [has_pool]\n", "has_pool is to be filled, and the set a"),
    "fills what nobody asks": (f"{A}  fills: [has_ramp]\n", "has_ramp is to be filled, and no set above"),
    "fills with another type": (
        A.replace("Access", "Counted") + "  fills: [has_pool]\n",
        "fills: has_pool is of the type int64, and of bool in the set descriptions",
    ),
    "no model": (f"{A}  model: /no/such/folder\n", "the set a, model.*there is no folder /no/such/folder"),
    "no options": (f"{A}  processor_options: x\n", "the set a, processor_options.*give a JSON object"),
}


@pytest.mark.parametrize(("text", "refusal"), REFUSED.values(), ids=REFUSED)
def test_a_file_that_cannot_be_asked_is_refused_in_one_sentence(load, text, refusal):
    """A wrong set is refused at start: found after days it would have cost them."""
    with pytest.raises(SettingsError, match=refusal):
        load(text)


def test_a_file_that_is_not_there_or_too_large_is_refused(load, tmp_path):
    """A file that cannot be read whole is no file without sets."""
    with pytest.raises(SettingsError, match="is no file of question sets"):
        load("#" * (1 << 20) + "\n")
    (tmp_path / "questions.yaml").unlink()
    with pytest.raises(SettingsError, match="cannot be read: No such file"):
        load_settings(home=tmp_path / "home", questions="questions.yaml")


def test_a_set_has_its_own_schema_and_the_rest_from_the_home(load, tmp_path):
    """A set is asked with the home's settings, but for what the file says of it."""
    settings = load(
        "condition:\n  schema: schemas_of_sets:Condition\n"
        "access:\n  schema: schemas_of_sets:Access\n  prompt: Is there a ramp?\n"
        "  processor_options: {do_image_splitting: false}\n",
        prompt="Describe it.",
        max_images=3,
    )
    first, condition, access = question_sets(settings)
    assert first.settings is settings
    assert condition.asset.published == tmp_path / "home" / "property_condition"
    assert condition.settings.description_schema == "schemas_of_sets:Condition"
    assert question_sets(condition.settings) == (condition,), "its own settings know no other set"
    assert condition.settings.prompt is None, "the home's prompt asks for the home's schema"
    assert access.settings.prompt == "Is there a ramp?"
    assert {asked.settings.max_images for asked in (first, condition, access)} == {3}
    assert condition.model_key == first.model_key, "they may look at a property's images together"
    assert access.model_key != first.model_key, "its images are cut otherwise"


def test_a_set_may_ask_again_for_fields_that_it_fills(load):
    """A field stands in two sets where one of them is named as the better answer, and nowhere else."""
    settings = load("again:\n  schema: schemas_of_sets:Twice\n  fills: [has_pool]\n")
    assert [asked.fills for asked in question_sets(settings)] == [(), ("has_pool",)]


def test_sets_come_after_what_there_was(load):
    """Without a file everything is as it was; with one, its assets follow."""
    names = ["property_descriptions", "property_embeddings"]
    alone = load_settings()
    assert [asset.name for asset in alone.partitioned_assets] == names
    settings = load("access:\n  schema: schemas_of_sets:Access\n", embedding_model=None)
    assert [asset.name for asset in settings.partitioned_assets] == [*names, "property_access"]
    assert settings.computed_assets == ("property_descriptions", "property_access")


def test_what_one_set_of_an_op_is_asked_is_read_back_for_that_set_alone(load):
    """A retry goes on with what a person asked of one set, and asks the other nothing of it."""
    settings = load("access:\n  schema: schemas_of_sets:Access\n")
    options = {"property_descriptions": {"stale": "keep"}, "property_access": {"recompute": True}}
    config = config_of_runs(settings, options)
    assert {asset: dict(options_of(settings, config, asset)) for asset in options} == options
    of_all = {"ops": {"property_descriptions": {"config": {"stale": "keep"}}}}
    assert options_of(settings, of_all, "property_access") == {"stale": "keep"}


def test_a_set_with_a_model_needs_a_server_of_its_own(load):
    """A server at an address has one model: another that is asked for would silently be that one."""
    with pytest.raises(SettingsError, match="the set a names a model, and VLM_ASSETS_SERVER_URL a server"):
        load("a:\n  schema: schemas_of_sets:Access\n  model: example\n", server_url="http://127.0.0.1:9/v1")
