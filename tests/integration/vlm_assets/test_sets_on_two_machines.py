"""A question set on two machines over one real S3 store: either goes on where the other one published."""

import io
import json
import re
from dataclasses import replace
from typing import ClassVar

import pyarrow.parquet as pq
import pytest

from resources.text_embedding import TextEmbeddingModel
from resources.vision_language_model import VisionLanguageModel
from tests.support.desks import KEY, settings_of
from tests.support.homes import Condition
from tests.support.scripted_models import ScriptedEmbedder, ScriptedEngine
from vlm_assets.assets.partition import NOT_ASKED, OK
from vlm_assets.assets.partition_state import PartitionStates, State
from vlm_assets.services.home_audit import audit
from vlm_assets.services.pruning import delete_set, removed_set
from vlm_assets.services.withdrawal import prepare_withdrawal, withdraw
from vlm_catalog.catalog import Catalog
from vlm_catalog.stored_catalog import pull_catalog
from vlm_engine.protocol import Answer, EngineLostError

DESCRIPTIONS, CONDITION = "property_descriptions", "property_condition"


class Asked(ScriptedEngine):
    """Says how many floors a property has, or how worn it is. asked: the properties of the set, in order."""

    floors: ClassVar[dict[str, int]] = {}
    asked: ClassVar[list[str]] = []
    lost_after: ClassVar[int] = 1_000

    def __init__(self, source, schema):
        super().__init__(source, None)
        self.is_set = "wear" in schema.json_schema["properties"]

    def describe(self, batch, *, attempt):
        ids = [loaded.property_id for loaded in batch]
        if not self.is_set:
            answers = [json.loads(answer.text) for answer in super().describe(batch, attempt=attempt)]
            return [
                Answer(json.dumps({**answer, "floors": Asked.floors.get(of, 2)}), "stop", 8, 9)
                for of, answer in zip(ids, answers, strict=True)
            ]
        if len(Asked.asked) + len(ids) > Asked.lost_after:
            raise EngineLostError("the device is lost")
        Asked.asked.extend(ids)
        return [Answer(json.dumps({"wear": f"of {of}", "needs_paint": False}), "stop", 8, 9) for of in ids]


def load(model, device, *, schema, prompt, further=()):
    return Asked(model.source, schema)


@pytest.fixture
def asking(machines, tmp_path, monkeypatch):
    """Two machines with a set that is asked of tall properties. All but the last two of the range are."""
    monkeypatch.setattr(VisionLanguageModel, "load", load)
    monkeypatch.setattr(TextEmbeddingModel, "load", lambda model, device: ScriptedEmbedder(model))
    file = tmp_path / "questions.yaml"
    file.write_text(
        f"condition:\n  schema: {Condition.__module__}:{Condition.__name__}\n  where: floors > 3\n"
    )
    store = machines[0].settings.store
    pull_catalog(machines[0].settings.home, store)
    catalog = Catalog.open(machines[0].settings.home)
    ids = catalog.slice(catalog.ranges[0])["property_id"].to_pylist()
    monkeypatch.setattr(Asked, "floors", dict.fromkeys(ids[:6], 4))
    monkeypatch.setattr(Asked, "asked", [])
    monkeypatch.setattr(Asked, "lost_after", 1_000)

    return *(changed(machine, questions=file) for machine in machines), ids


def changed(desk, *, questions):
    """The same machine with this file of sets, or without one."""
    kept = {name: getattr(desk.settings, name) for name in ("store", "device_wait_seconds")}
    settings = settings_of(desk.settings.home, questions=questions)
    return replace(desk, settings=settings.model_copy(update=kept))


def done(desk, *assets):
    made = desk.materialize(*assets)
    assert made.success, made.failure
    return made


def file_of(desk):
    return desk.settings.layout.asset(CONDITION).partition(KEY).published


def rows_of(desk):
    rows = pq.read_table(file_of(desk)).to_pylist()
    return {row["property_id"]: (row["status"], (row["description"] or {}).get("wear")) for row in rows}


def test_the_condition_is_looked_up_in_what_another_machine_published(asking):
    """A machine that has nothing of the descriptions asks just those for which the condition holds."""
    first, second, ids = asking
    done(first, DESCRIPTIONS)
    done(second, CONDITION)
    assert sorted(Asked.asked) == sorted(ids[:6])
    answered = {of: (OK, f"of {of}") if of in ids[:6] else (NOT_ASKED, None) for of in ids}
    assert rows_of(second) == answered
    done(first, CONDITION)
    assert len(Asked.asked) == 6, "it is published: nobody is asked again"
    assert rows_of(first) == answered
    for desk in (first, second):
        catalog = Catalog.open(desk.settings.home)
        assert PartitionStates(desk.settings, catalog).read(CONDITION, KEY).state is State.DONE
        counted = audit(desk.settings, catalog, deep=True)
        assert counted.ok, counted.wrong


def test_another_machine_goes_on_with_a_set(asking, monkeypatch):
    """Answers that one machine had committed are restored from the store alone; nobody is asked twice."""
    first, second, ids = asking
    done(first, DESCRIPTIONS)
    monkeypatch.setattr(Asked, "lost_after", 4)
    assert "is lost" in first.materialize(CONDITION).failure
    before = list(Asked.asked)
    assert 0 < len(before) <= 4
    monkeypatch.setattr(Asked, "lost_after", 1_000)
    done(second, CONDITION)
    assert sorted(Asked.asked) == sorted(ids[:6])


def test_what_is_published_in_between_is_followed(asking, monkeypatch):
    """Another machine makes the descriptions anew meanwhile: the set's next run asks who is new alone."""
    first, second, ids = asking
    done(first, DESCRIPTIONS)
    meanwhile, describe = [], Asked.describe

    def describing(engine, batch, *, attempt):
        if engine.is_set and not meanwhile:
            meanwhile.append(ids[6])
            Asked.floors[ids[6]] = 4
            anew = second.materialize(DESCRIPTIONS, config={"recompute": True})
            assert anew.success, anew.failure
        return describe(engine, batch, attempt=attempt)

    monkeypatch.setattr(Asked, "describe", describing)
    done(first, CONDITION)
    done(first, CONDITION)
    assert sorted(Asked.asked) == sorted(ids[:7])


def test_a_machine_with_another_condition_is_refused(asking, tmp_path):
    """It would ask others than the store's machines do, so it asks nobody, and names what differs."""
    first, second, _ids = asking
    done(first, DESCRIPTIONS, CONDITION)
    before = len(Asked.asked)
    file = tmp_path / "questions.yaml"
    file.write_text(file.read_text().replace("floors > 3", "floors > 1"))
    refused = changed(second, questions=file).materialize(CONDITION)
    assert "property_condition" in refused.failure
    assert re.search(r"in where \(\w+ there, \w+ here\), so nothing was computed here", refused.failure)
    assert len(Asked.asked) == before


def test_a_withdrawn_property_leaves_the_set_on_every_machine(asking):
    """No answer of it stays in the store, nor on a machine that has taken the newest version."""
    first, second, ids = asking
    done(first, DESCRIPTIONS, CONDITION)
    done(second, CONDITION)
    list(withdraw(second.settings, prepare_withdrawal(second.settings, ids[:1])))
    store = first.settings.store
    pull_catalog(first.settings.home, store)
    done(first, CONDITION)
    names = [name for name, _ in store.names("") if name.startswith(("property_", ".versions/property_"))]
    files = [store.get(name, most=1 << 30) for name in names if name.endswith(".parquet")]
    assert len(files) >= 3
    for content in (*files, file_of(first).read_bytes(), file_of(second).read_bytes()):
        assert ids[0] not in pq.read_table(io.BytesIO(content))["property_id"].to_pylist()
    assert set(ids[1:]) < rows_of(first).keys() == rows_of(second).keys()


def test_a_set_that_is_removed_leaves_the_store(asking):
    """A machine that still has files of it fills nothing again; once they are removed too, it begins anew."""
    first, second, ids = asking
    done(first, DESCRIPTIONS, CONDITION)
    done(second, CONDITION)
    store = first.settings.store
    list(remove(second))
    assert [name for name, _ in store.names("") if CONDITION in name] == []
    assert "was the store emptied?" in first.materialize(CONDITION).failure
    list(remove(first))
    done(first, CONDITION)
    done(second, CONDITION)
    assert sorted(Asked.asked) == sorted(2 * ids[:6])


def remove(desk):
    settings = changed(desk, questions=None).settings
    return delete_set(settings, removed_set(settings, "condition"))
