"""Question sets of one model that a run asks of one partition: together, and each published by itself."""

import json
from collections.abc import Callable

import pyarrow.parquet as pq
import pytest

from resources.vision_language_model import VisionLanguageModel
from tests.support.desks import KEY, Desk
from tests.support.homes import Condition
from tests.support.scripted_models import ScriptedEngine
from vlm_assets.config.settings import load_settings
from vlm_engine.protocol import Answer

DESCRIPTIONS, CONDITION = "property_descriptions", "property_condition"


class JoinedEngine(ScriptedEngine):
    """Answers in the schemas that it is asked in. asked: the set and the properties of each question."""

    def __init__(self, source, schemas):
        super().__init__(source, None)
        self.sets = [
            CONDITION if "wear" in schema.json_schema["properties"] else DESCRIPTIONS for schema in schemas
        ]
        self.asked: list[tuple[str, tuple[str, ...]]] = []
        self.ailing: dict[str, set[str]] = {DESCRIPTIONS: set(), CONDITION: set()}
        self.when_asked: Callable[[str], None] = lambda property_id: None

    def describe(self, batch, *, attempt):
        asset, ids = self.sets[attempt.question], tuple(loaded.property_id for loaded in batch)
        if self.ailing[asset].intersection(ids):
            raise RuntimeError("the driver is in trouble")
        self.asked.append((asset, ids))
        for property_id in ids:
            self.when_asked(property_id)
        if asset == DESCRIPTIONS:
            return super().describe(batch, attempt=attempt)
        return [Answer(json.dumps({"wear": "little", "needs_paint": False}), "stop", 8, 10) for _ in batch]

    def asked_of(self, asset):
        """Every property that the set asked about, in order."""
        return [property_id for set_, ids in self.asked if set_ == asset for property_id in ids]


@pytest.fixture
def engines(monkeypatch):
    """The engines that were loaded, one after another; ``prepare`` of the list is called with each."""
    loaded = Loaded()

    def load(model, device, *, schema, prompt, further=()):
        engine = JoinedEngine(model.source, [schema, *(question.schema for question in further)])
        loaded.append(engine)
        loaded.prepare(engine)
        return engine

    monkeypatch.setattr(VisionLanguageModel, "load", load)
    return loaded


class Loaded(list):
    """Engines, and what is done to each when it is loaded."""

    prepare = staticmethod(lambda engine: None)


@pytest.fixture
def both(desk, tmp_path) -> Desk:
    """The desk with a second question set."""
    file = tmp_path / "questions.yaml"
    file.write_text(f"condition:\n  schema: {Condition.__module__}:{Condition.__name__}\n")
    given = {"home": desk.settings.home, "devices": "cpu:1", "batch_size": 4, "decode_workers": 1}
    return Desk(load_settings(**given, questions=file), desk.instance)


def file_of(desk, asset):
    return desk.settings.layout.asset(asset).partition(KEY).published


def ids_in(desk, asset):
    return pq.read_table(file_of(desk, asset))["property_id"].to_pylist()


def materialized(done):
    """The assets that a run has published, in its order."""
    events = [event for event in done.result.all_events if event.is_step_materialization]
    return [event.asset_key.to_user_string() for event in events]


def test_two_sets_of_a_run_are_asked_together_and_both_published(both, engines):
    """One device, one model: the questions of a batch come one after another, each row into its own file."""
    done = both.materialize(DESCRIPTIONS, CONDITION)
    assert done.success, done.failure
    (engine,) = engines
    assert [asset for asset, _ in engine.asked] == [DESCRIPTIONS, CONDITION] * 2
    assert engine.asked[0][1] == engine.asked[1][1]
    assert materialized(done) == [DESCRIPTIONS, CONDITION]
    ids = ids_in(both, DESCRIPTIONS)
    assert ids_in(both, CONDITION) == ids
    assert sorted(engine.asked_of(CONDITION)) == sorted(ids)
    assert set(pq.read_table(file_of(both, CONDITION))["description"].to_pylist()[0]) == {
        "wear",
        "needs_paint",
    }
    assert both.materialize(DESCRIPTIONS, CONDITION).success
    assert len(engines) == 1, "both are complete"
