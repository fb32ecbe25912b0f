"""Failed rows of a transient kind are computed again, three times each; all other rows are kept."""

import pyarrow.parquet as pq
import pytest
from dagster import DagsterExecutionInterruptedError

from resources.engine.resource import VisionLanguageModel
from resources.state.row_retries import RowRetriesFile
from vlm_assets.assets.descriptions import DescriptionWork
from vlm_assets.catalog.catalog import Catalog
from vlm_assets.operate.property_view import view_property
from vlm_assets.resource_settings import build_vision_language_model

KEY = "000000000-000000007"
AGAIN = {"retry_transient": True}

ailing: set[str] = set()
"""Properties at which the engine raises."""
described: list[str] = []
"""Every property that the engine was asked for, in order."""
interrupted_at: set[str] = set()
"""Properties at which the run is ended from outside."""


class AilingModel(VisionLanguageModel):
    """The real model, which raises for some properties as a driver in trouble does."""

    def load(self, device, **how):
        engine = super().load(device, **how)
        whole = engine.describe

        def describe(batch, *, attempt):
            asked = {one.property_id for one in batch}
            if asked & interrupted_at:
                raise DagsterExecutionInterruptedError("told to end")
            if asked & ailing:
                raise RuntimeError("the driver is in trouble")
            described.extend(one.property_id for one in batch)
            return whole(batch, attempt=attempt)

        engine.describe = describe
        return engine


@pytest.fixture
def ids(desk):
    """The properties of the first range; none is in trouble yet."""
    for told in (ailing, interrupted_at, described):
        told.clear()
    catalog = Catalog.open(desk.settings.home)
    return catalog.slice(catalog.ranges[0])["property_id"].to_pylist()


@pytest.fixture
def materialize(desk):
    """A materialization with the model that can be put into trouble; gives what it did."""
    model = AilingModel(**vars(build_vision_language_model(desk.settings)))

    def run(config=None):
        described.clear()
        return desk.materialize(config=config, vision_language_model=model)

    return run


def standing(desk):
    return RowRetriesFile(desk.settings.state_directory, "property_descriptions", KEY).read()


def test_a_round_computes_the_failed_rows_and_keeps_the_others(desk, ids, materialize):
    """Once the trouble is over, a retry asks the model for nothing but what had failed of it."""
    ailing.update(ids[:3])
    refused = materialize()
    assert not refused.success
    assert standing(desk).refusal.curable == 3
    # What the check tells a person to look at, though nothing is published.
    shown = "\n".join(view_property(desk.settings, Catalog.open(desk.settings.home), ids[0]))
    assert "Committed and not published, in " in shown
    assert "Error engine_error: " in shown
    assert "the driver is in trouble" in shown
    ailing.clear()
    done = materialize(AGAIN)
    assert done.success, done.failure
    assert set(described) == set(ids[:3])
    assert done.published[0].metadata["kept rows"].value == 5
    assert pq.read_table(desk.file)["property_id"].to_pylist() == ids
    assert standing(desk) is None, "published: nothing is to be tried again"


def test_a_row_is_tried_three_times_and_then_left_to_a_person(desk, ids, materialize):
    """The count is on disk before the row is tried; a fourth round computes nothing."""
    ailing.update(ids[:3])
    materialize()
    for tried in (1, 2, 3):
        assert not materialize(AGAIN).success
        assert described == []
        assert set(standing(desk).tries.values()) == {tried}
    refusal = standing(desk).refusal
    assert (refusal.curable, dict(refusal.left)) == (0, {"engine_error": 3})
    ailing.clear()
    assert not materialize(AGAIN).success
    assert described == [], "only a person asks for more: retry_failed"
    assert materialize({"retry_failed": True}).success


def test_an_interrupted_round_is_gone_on_with(desk, ids, materialize):
    """Whoever starts the partition next, with options or without, ends the round that was begun."""
    ailing.update(ids[:3])
    materialize()
    begun = standing(desk)
    ailing.clear()
    interrupted_at.update(ids[:3])
    assert not materialize(AGAIN).success
    assert standing(desk).generation != begun.generation
    assert set(standing(desk).tries.values()) == {1}
    interrupted_at.clear()
    done = materialize()
    assert done.success, done.failure
    assert set(described) == set(ids[:3])


def test_a_refused_recomputation_is_gone_on_with_beside_what_is_published(desk, ids, materialize):
    """A retry of it computes its failed rows, and never passes the old file off as the new one."""
    assert materialize().success
    ailing.update(ids[:3])
    assert not materialize({"recompute": True}).success
    ailing.clear()
    done = materialize(AGAIN)
    assert done.success, done.failure
    assert set(described) == set(ids[:3])
    assert done.published[0].metadata["kept rows"].value == 5
    assert standing(desk) is None
    assert materialize(AGAIN).success
    assert described == [], "what is published now is the recomputation"


@pytest.mark.parametrize("option", ["retry_failed", "recompute"])
def test_work_that_an_option_began_is_gone_on_with_without_it(desk, ids, materialize, option):
    """Where nothing is published yet, what is finished of the same meaning is not computed a second time."""
    catalog = Catalog.open(desk.settings.home)
    model = build_vision_language_model(desk.settings)
    work = DescriptionWork.of(desk.settings, catalog, catalog.ranges[0], model)
    interrupted_at.update(one.property_id for one in work.plan(frozenset())[1])
    assert not materialize({option: True}).success
    finished = set(described)
    assert len(finished) == 4
    interrupted_at.clear()
    done = materialize()
    assert done.success, done.failure
    assert set(described) == set(ids) - finished
    assert pq.read_table(desk.file)["property_id"].to_pylist() == ids
    assert materialize().success
    assert described == []
