"""Failed rows of a transient kind are tried three times; rows whose inputs did not change are kept."""

import os
import signal

import pyarrow.parquet as pq
import pytest
from dagster import DagsterExecutionInterruptedError

from resources.dagster_names import NEEDS_PERSON, is_tagged
from resources.vision_language_model import VisionLanguageModel
from tests.support.listings import read_source, write_listing
from vlm_assets.assets.description_work import DescriptionWork
from vlm_assets.commands.property_view import lines, read_property
from vlm_assets.config.resource_settings import build_vision_language_model, control_state
from vlm_catalog.catalog import Catalog
from vlm_catalog.ingest import ingest
from vlm_durable.journal.journal import Journal
from vlm_durable.versions.published import PublishedPartitions
from vlm_engine import batches
from vlm_engine.batches import BEGUN, BatchSize, Measured, MeasuredSizes

KEY = "000000000-000000007"

pytestmark = pytest.mark.usefixtures("scripted_engine")

ailing: set[str] = set()
"""Properties at which the engine raises."""
ails_once: set[str] = set()
"""Properties at which the engine raises until it was asked for one of them alone."""
described: list[str] = []
"""Every property that the engine was asked for, in order."""
together: list[int] = []
"""How many properties each question was about."""
interrupted_at: set[str] = set()
"""Properties at which the run is ended from outside."""
terminated_at: set[str] = set()
"""Properties at which the run gets SIGTERM."""


class AilingModel(VisionLanguageModel):
    """A model that raises for some properties as a driver in trouble does."""

    def load(self, device, **how):
        engine = super().load(device, **how)
        whole = engine.describe

        def describe(batch, *, attempt):
            asked = {one.property_id for one in batch}
            if asked & interrupted_at:
                raise DagsterExecutionInterruptedError("told to end")
            if asked & terminated_at:
                os.kill(os.getpid(), signal.SIGTERM)
            if asked & (ailing | ails_once):
                if len(batch) == 1:
                    ails_once.difference_update(asked)
                raise RuntimeError("the driver is in trouble")
            described.extend(one.property_id for one in batch)
            together.append(len(batch))
            return whole(batch, attempt=attempt)

        engine.describe = describe
        return engine


@pytest.fixture
def ids(desk):
    """The properties of the first range; none is in trouble yet."""
    for told in (ailing, ails_once, interrupted_at, terminated_at, described):
        told.clear()
    catalog = Catalog.open(desk.settings.home)
    return catalog.slice(catalog.ranges[0])["property_id"].to_pylist()


@pytest.fixture
def materialize(desk):
    """A materialization with the model that can be put into trouble; gives what it did."""
    model = AilingModel(**vars(build_vision_language_model(desk.settings)))

    def run(config=None, **more):
        described.clear()
        together.clear()
        return desk.materialize(config=config, vision_language_model=model, **more)

    return run


@pytest.fixture
def work(desk):
    """The work of the first range."""
    catalog, model = Catalog.open(desk.settings.home), build_vision_language_model(desk.settings)
    return DescriptionWork.for_range(desk.settings, catalog, catalog.ranges[0], model)


def journal_files(desk):
    """The segments of the partition's work under way."""
    return desk.paths.journals.glob("*/segment-*")


def needs_person(desk, done):
    """Whether the run was tagged as one that another start would only repeat."""
    run_id = done.result.run_id
    value = desk.instance.get_run_by_id(run_id).tags.get(NEEDS_PERSON)
    return is_tagged(value, run_id, ["property_descriptions"])


def tries(table):
    """How often each property was tried, by its id, where that is more than once."""
    return {row["property_id"]: row["tries"] for row in table.to_pylist() if row["tries"] > 1}


def test_a_failed_row_that_comes_right_is_published_as_such(desk, ids, materialize):
    """What fails once for a reason that may pass is tried again in the same run, after all others."""
    ails_once.add(ids[2])
    done = materialize()
    assert done.success, done.failure
    table = pq.read_table(desk.file)
    assert table["property_id"].to_pylist() == ids
    assert table["status"].to_pylist()[2] == "ok"
    assert tries(table) == {ids[2]: 2}
    assert described[-1] == ids[2]
    assert sorted(described) == sorted(ids)


def test_a_row_that_fails_three_times_is_published_as_failed(desk, ids, materialize):
    """The row says how often it was tried; a published partition is not tried again."""
    ailing.add(ids[0])
    assert materialize().success
    table = pq.read_table(desk.file)
    assert tries(table) == {ids[0]: 3}
    assert table["error_kind"].to_pylist()[0] == "engine_error"
    ailing.clear()
    assert materialize().success
    assert described == [], "only a person asks for more: retry_failed"
    assert materialize({"retry_failed": True}).success
    assert described == [ids[0]]


def test_an_answer_that_comes_out_the_same_is_not_tried_again(desk, ids):
    """A permanent kind is done at its first try: seeds derive from the property and the attempt."""
    done = desk.changed(max_new_tokens=8, failed_share=1.0).materialize()
    assert not done.success
    assert "truncated" in done.failure
    found = [row for path in journal_files(desk) for row in pq.read_table(path).to_pylist()]
    assert {row["tries"] for row in found if row["error_kind"] == "truncated"} == {1}
    assert needs_person(desk, done)


def test_where_too_many_fail_the_tries_are_kept_for_later(desk, ids, materialize):
    """A refused partition is tried again by the schedule: what had failed of it, and nothing else."""
    ailing.update(ids[:3])
    refused = materialize()
    assert not refused.success
    assert not needs_person(desk, refused)
    # What the check tells a person to look at, though nothing is published.
    shown = "\n".join(lines(read_property(desk.settings, Catalog.open(desk.settings.home), ids[0])))
    assert "Committed and not published, in " in shown
    assert "Error engine_error: " in shown
    assert "the driver is in trouble" in shown
    ailing.clear()
    done = materialize()
    assert done.success, done.failure
    assert sorted(described) == sorted(ids[:3])
    assert done.published[0].metadata["restored rows"].value == 8
    table = pq.read_table(desk.file)
    assert table["property_id"].to_pylist() == ids
    assert tries(table) == dict.fromkeys(ids[:3], 2)


def test_a_row_is_tried_three_times_and_then_left_to_a_person(desk, ids, materialize):
    """One try a run where too many fail; after the third the schedule stops, and a start computes nothing."""
    ailing.update(ids[:3])
    assert not needs_person(desk, materialize())
    assert not needs_person(desk, materialize())
    last = materialize()
    assert needs_person(desk, last)
    assert "3 engine_error" in last.failure
    ailing.clear()
    assert not materialize().success
    assert described == [], "only a person asks for more: retry_failed"
    assert materialize({"retry_failed": True}).success
    assert sorted(described) == sorted(ids[:3])


def test_an_interrupted_round_is_gone_on_with(desk, ids, materialize):
    """Whoever starts the partition next computes what the round had not, and no more."""
    ailing.update(ids[:3])
    assert not materialize().success
    ailing.clear()
    interrupted_at.update(ids[:3])
    assert not materialize().success
    interrupted_at.clear()
    done = materialize()
    assert done.success, done.failure
    assert sorted(described) == sorted(ids[:3])
    assert tries(pq.read_table(desk.file)) == dict.fromkeys(ids[:3], 2)


@pytest.mark.published("property_descriptions")
def test_a_refused_recomputation_is_gone_on_with_beside_what_is_published(desk, ids, materialize):
    """The retry of its run computes what failed of it; a plain start verifies the old file and stays away."""
    old = pq.read_table(desk.file)
    ailing.update(ids[:3])
    refused = materialize({"recompute": True})
    assert not refused.success
    assert not needs_person(desk, refused)
    ailing.clear()
    assert materialize().success
    assert described == []
    assert pq.read_table(desk.file).equals(old)
    done = materialize({"recompute": True}, tags={"dagster/root_run_id": refused.result.run_id})
    assert done.success, done.failure
    assert sorted(described) == sorted(ids[:3])
    assert tries(pq.read_table(desk.file)) == dict.fromkeys(ids[:3], 2)


def take_last_image(desk, listing, property_id):
    """The catalogue names one image fewer of a property."""
    images = read_source(listing)
    images[property_id].pop()
    changed = write_listing(listing.with_name("changed.jsonl"), images)
    ingest(changed, desk.settings.home, range_size=8, update=True)


def test_a_changed_image_list_costs_one_property(desk, ids, materialize, listing, tmp_path):
    """A new generation adopts every row whose own inputs are what they were, failed ones too."""
    ailing.add(ids[7])
    assert materialize().success
    ailing.clear()
    before = pq.read_table(desk.file).to_pylist()
    take_last_image(desk, listing, ids[3])
    done = materialize()
    assert done.success, done.failure
    assert described == [ids[3]]
    assert done.published[0].metadata["kept rows"].value == 7
    after = pq.read_table(desk.file).to_pylist()
    record = PublishedPartitions(desk.settings.descriptions).record(KEY)
    assert {row["fingerprint"] for row in after} == {record.fingerprint}
    assert {row["property_id"] for row in before} == {row["property_id"] for row in after}
    kept = [{**row, "fingerprint": None} for row in after if row["property_id"] != ids[3]]
    assert kept == [{**row, "fingerprint": None} for row in before if row["property_id"] != ids[3]]


@pytest.mark.published("property_descriptions")
def test_other_settings_adopt_nothing(desk, ids, materialize):
    """What decides the meaning of a row is in its digest: another prompt, another row."""
    model = AilingModel(**vars(build_vision_language_model(desk.settings)))
    described.clear()
    assert desk.changed(prompt="Describe the property.").materialize(vision_language_model=model).success
    assert sorted(described) == sorted(ids)


def test_a_run_that_is_told_to_end_once_more_commits_all_the_same(desk, ids, materialize, monkeypatch):
    """Ray's SIGTERM at a cancel, then the node's or the sensor's: the second keeps no row from the disk."""
    close = Journal.close

    def told_again(journal):
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)
        close(journal)

    before = signal.getsignal(signal.SIGINT)
    monkeypatch.setattr(Journal, "close", told_again)
    terminated_at.add(ids[6])
    assert not materialize().success
    monkeypatch.undo()
    assert signal.getsignal(signal.SIGINT) is before, "the next run of this process can be interrupted"
    finished = set(described)
    assert 0 < len(finished) < 8
    terminated_at.clear()
    assert materialize().success
    assert set(described) == set(ids) - finished


def test_unfinished_work_of_a_former_image_list_is_adopted(desk, ids, materialize, listing):
    """Interrupted half way, then the catalogue is updated: finished rows are adopted from the old journal."""
    interrupted_at.add(ids[6])
    assert not materialize().success
    finished = set(described)
    assert 0 < len(finished) < 8
    interrupted_at.clear()
    take_last_image(desk, listing, sorted(finished)[0])
    done = materialize()
    assert done.success, done.failure
    assert set(described) == set(ids) - finished | {sorted(finished)[0]}


@pytest.mark.parametrize("option", ["retry_failed", "recompute"])
def test_work_that_an_option_began_is_gone_on_with_without_it(desk, ids, work, materialize, option):
    """Where nothing is published yet, what is finished of the same meaning is not computed a second time."""
    interrupted_at.update(one.property_id for one in planned(work)[1])
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


def test_a_partition_keeps_the_batches_that_it_began_with(desk, ids, work, materialize):
    """Batches found by themselves are fixed with the first rows: a resume has the same, whatever is known."""
    interrupted_at.update(one.property_id for one in planned(work)[1])
    assert not materialize().success
    assert together == [4]
    interrupted_at.clear()
    desk.settings = desk.settings.model_copy(update={"batch_size": 1})
    assert materialize().success
    assert together == [4]
    assert materialize(key="000000008-000000015").success
    assert set(together) == {1}


def planned(work, size=None):
    """The batches of the work, with a size that is not its settings'."""
    sizes = work.batch_sizes()
    sizes.size = size or sizes.size
    return sizes.plan(work.jobs, max_images=work.settings.max_images)


def sizes(done):
    """What the partition's page says of its batches."""
    return done.published[0].metadata["batches"].text


def test_a_size_at_which_a_run_ended_is_not_tried_again(desk, ids, work, materialize, monkeypatch):
    """No resume, no later partition: only a size whose batches are done is more than begun."""
    monkeypatch.setattr(DescriptionWork, "_measured_of", lambda self, device: ("a GPU", "a model"))
    fast = {1: Measured(1.0, 0.1)}
    measured = MeasuredSizes(control_state(desk.settings), "a GPU", "a model")
    measured.write(fast)
    size = BatchSize(desk.settings.batch_size, 1, tried=(2, 4))
    interrupted_at.update(one.property_id for one in planned(work, size)[1])
    assert not materialize().success
    assert len(described) == 1
    begun = fast | dict.fromkeys(size.tried, BEGUN)
    assert measured.read() == begun
    interrupted_at.clear()
    for done in (materialize(), materialize(key="000000008-000000015")):
        assert done.success, done.failure
        assert "tried" not in sizes(done)
    assert measured.read() | begun == measured.read()
    measured.write(dict.fromkeys(size.tried))
    done = materialize({"recompute": True})
    assert "tried: 2, 4" in sizes(done)
    assert BEGUN not in measured.read().values()


def test_a_resume_on_another_device_takes_that_ones_batches(desk, ids, work, materialize, monkeypatch):
    """A GPU's size is not used on a CPU slot, and none is tried with what is left."""
    on = ["a GPU"]
    monkeypatch.setattr(DescriptionWork, "_measured_of", lambda self, device: (on[0], "a model"))
    MeasuredSizes(control_state(desk.settings), "a GPU", "a model").write({10**6: Measured(1.0, 19.9)})
    MeasuredSizes(control_state(desk.settings), "a CPU slot", "a model").write({1: Measured(1.0, 0.1)})
    interrupted_at.update(one.property_id for one in planned(work, BatchSize(4, 10**6))[1])
    assert not materialize().success
    assert together == [4]
    interrupted_at.clear()
    on[0] = "a CPU slot"
    done = materialize()
    assert done.success, done.failure
    assert sizes(done).startswith("1 ")
    assert "tried" not in sizes(done)


def test_a_run_that_ends_later_leaves_the_sizes_that_it_measured(desk, ids, work, materialize, monkeypatch):
    """Most runs that end do so long after the sizes were tried: it is not held against these."""
    size = BatchSize(desk.settings.batch_size, 1, image=0, text=10, tried=(10,))
    monkeypatch.setattr(batches, "choose", lambda first, measured: size)
    monkeypatch.setattr(DescriptionWork, "_measured_of", lambda self, device: ("a GPU", "a model"))
    interrupted_at.update(one.property_id for one in planned(work, size)[3])
    assert not materialize().success
    assert MeasuredSizes(control_state(desk.settings), "a GPU", "a model").read()[10].held
