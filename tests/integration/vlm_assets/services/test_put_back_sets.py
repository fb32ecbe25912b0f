"""A question set that leaves the file and comes back is what it was, and touches no row of another."""

import json
from collections.abc import Callable
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from resources.vision_language_model import VisionLanguageModel
from tests.support.desks import KEY, Desk, settings_of
from tests.support.homes import Condition
from tests.support.scripted_models import ScriptedEngine
from vlm_assets.assets.partition_state import State
from vlm_assets.config.settings import Settings
from vlm_assets.services.home_audit import audit
from vlm_assets.services.withdrawal import prepare_withdrawal, withdraw
from vlm_catalog.catalog import Catalog
from vlm_catalog.catalog_file import is_tombstone
from vlm_engine.protocol import Answer

CONDITION = "property_condition"


class ConditionEngine(ScriptedEngine):
    """Answers what the set ``condition`` asks."""

    def describe(self, batch, *, attempt):
        text = json.dumps({"wear": "little", "needs_paint": False})
        return [Answer(text, "stop", 8, 10) for _ in batch]


@pytest.fixture
def answered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every model in this process is a scripted one, which answers in the schema that it is asked in."""

    def load(model, device, *, schema, prompt, further=()):
        return (ConditionEngine if "wear" in schema.json_schema["properties"] else ScriptedEngine)(
            model.source, None
        )

    monkeypatch.setattr(VisionLanguageModel, "load", load)


@pytest.fixture
def named(desk: Desk, tmp_path: Path) -> Callable[..., Settings]:
    """The settings of the desk's home, whose file of questions names the set ``condition`` or not."""
    file = tmp_path / "questions.yaml"
    file.write_text(f"condition:\n  schema: {Condition.__module__}:{Condition.__name__}\n")
    return lambda named: settings_of(desk.settings.home, questions=file if named else None)


def published(home: Path) -> dict[str, bytes]:
    """The published files of all assets and their versions and records, by name."""
    folders = [*home.glob("property_*"), home / ".versions"]
    paths = (path for folder in folders for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(home)): path.read_bytes() for path in paths}


@pytest.mark.usefixtures("answered")
def test_a_set_that_is_put_back_is_complete_and_nothing_is_computed(desk, named, no_device):
    """Asked, removed and put back unchanged: no row of any set changes, with a withdrawal in between too."""
    settings = named(True)
    assert desk.materialize().success
    made = Desk(settings, desk.instance).materialize(CONDITION)
    assert made.success, made.failure
    before = published(settings.home)
    catalog = Catalog.open(settings.home)

    without = named(False)
    verified = Desk(without, desk.instance).materialize(gpu=no_device)
    assert verified.success, verified.failure
    assert audit(without, catalog, deep=True).ok
    assert published(settings.home) == before

    def put_back() -> None:
        again = Desk(settings, desk.instance).materialize(CONDITION, gpu=no_device)
        assert again.success, again.failure
        found = audit(settings, Catalog.open(settings.home), deep=True)
        assert found.findings == ()
        assert found.partitions_in(CONDITION, State.DONE) == 1

    put_back()
    assert published(settings.home) == before
    gone = catalog.slice(catalog.ranges[0])["property_id"].to_pylist()[2]
    list(withdraw(without, prepare_withdrawal(without, [gone])))
    file = settings.layout.asset(CONDITION).partition(KEY).published
    assert [is_tombstone(one) for one in pq.read_table(file)["property_id"].to_pylist()].count(True) == 1
    put_back()
