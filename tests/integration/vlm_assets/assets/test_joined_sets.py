"""Question sets of one model that a run asks of one partition: together, and each published by itself."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import dagster as dg
import pyarrow.parquet as pq
import pytest

from resources.gpu import GpuResource
from resources.vision_language_model import VisionLanguageModel
from sensors.dagster_internals.events import DagsterFacts
from tests.support.desks import KEY, Desk, settings_of
from tests.support.homes import Condition
from tests.support.scripted_models import ScriptedEngine
from tests.support.waiting import wait_until
from vlm_assets.assets.partition import MOST_TRIES
from vlm_assets.assets.partition_state import State
from vlm_assets.automation.retries import build_failed_partitions
from vlm_assets.config.resource_settings import build_gpu, control_state
from vlm_assets.config.settings import CHECKOUT
from vlm_assets.home_definitions import build_defs
from vlm_assets.services.status import read_status
from vlm_catalog.catalog import Catalog
from vlm_catalog.ingest import ingest
from vlm_durable.journal.high_water_mark import read_marks
from vlm_durable.journal.journal import Journal
from vlm_durable.state.pause import pause, resume
from vlm_durable.state.workers import Phase, Workers
from vlm_engine.devices.leases import Lease, NoDeviceFreeError
from vlm_engine.devices.left_out import ImpossibleResultError
from vlm_engine.ladder import AnswerGuard, GarbageOutputError
from vlm_engine.protocol import Answer

DESCRIPTIONS, CONDITION = "property_descriptions", "property_condition"
EMBEDDINGS = "property_embeddings"


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
def engines(monkeypatch, scripted_engine):
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
def questions(tmp_path) -> Path:
    """A file that names a second question set."""
    file = tmp_path / "questions.yaml"
    file.write_text(f"condition:\n  schema: {Condition.__module__}:{Condition.__name__}\n")
    return file


@pytest.fixture
def both(desk, questions) -> Desk:
    """The desk with the second question set."""
    return Desk(settings_of(desk.settings.home, questions=questions), desk.instance)


def file_of(desk, asset, key=KEY):
    return desk.settings.layout.asset(asset).partition(key).published


def ids_in(desk, asset):
    return pq.read_table(file_of(desk, asset))["property_id"].to_pylist()


def materialized(done):
    """The assets that a run has published, in its order."""
    events = [event for event in done.result.all_events if event.is_step_materialization]
    return [event.asset_key.to_user_string() for event in events]


def test_two_sets_of_a_run_are_asked_together_and_both_published(both, engines):
    """One device, one model: the questions of a batch come one after another, each row into its own file."""
    workers, living = Workers(control_state(both.settings)), []

    def look(engine):
        engine.when_asked = lambda property_id: living.append(workers.living())

    engines.prepare = look
    done = both.materialize(DESCRIPTIONS, CONDITION)
    assert done.success, done.failure
    (engine,) = engines
    assert [asset for asset, _ in engine.asked] == [DESCRIPTIONS, CONDITION] * 2
    assert engine.asked[0][1] == engine.asked[1][1]
    for seen in living:
        assert {worker.asset: worker.phase for worker in seen} == dict.fromkeys(
            (DESCRIPTIONS, CONDITION), Phase.WORKING
        )
        assert len({worker.device for worker in seen}) == 1
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


def test_a_run_that_selects_one_set_asks_that_one_alone(both, engines):
    """The other keeps its partition as it is, whatever comes first in the file."""
    done = both.materialize(CONDITION)
    assert done.success, done.failure
    assert {asset for asset, _ in engines[0].asked} == {CONDITION}
    assert engines[0].sets == [CONDITION], "no question is prepared that nobody asks"
    assert materialized(done) == [CONDITION]
    assert not file_of(both, DESCRIPTIONS).exists()


def test_a_set_that_comes_later_costs_what_it_costs_alone(desk, both, engines):
    """The first is complete: it is verified, not a byte of it changes, and it is asked nothing."""
    assert desk.materialize().success
    before = file_of(desk, DESCRIPTIONS).read_bytes()
    done = both.materialize(DESCRIPTIONS, CONDITION)
    assert done.success, done.failure
    assert engines[1].sets == [CONDITION]
    assert file_of(both, DESCRIPTIONS).read_bytes() == before
    assert ids_in(both, CONDITION) == ids_in(both, DESCRIPTIONS)


@pytest.mark.parametrize(("refused", "other"), [(DESCRIPTIONS, CONDITION), (CONDITION, DESCRIPTIONS)])
def test_a_refused_set_keeps_no_other_from_being_published(both, engines, refused, other):
    """The run fails and names it; the next one tries its failed rows again, and asks the other nothing."""
    ailing = {"ids": set()}

    def ail(engine):
        ids = ailing["ids"] or set(sorted_ids(both)[:3])
        engine.ailing[refused] = ids

    engines.prepare = ail
    done = both.materialize(DESCRIPTIONS, CONDITION)
    assert not done.success
    assert f"of {refused} is not published" in done.failure
    assert materialized(done) == [other]
    failing = [
        one.asset_key.to_user_string()
        for one in done.result.get_asset_check_evaluations()
        if not one.passed and one.severity is dg.AssetCheckSeverity.ERROR and one.check_name == "failed_share"
    ]
    assert failing == [refused]
    engines.prepare = lambda engine: None
    again = both.materialize(DESCRIPTIONS, CONDITION)
    assert again.success, again.failure
    assert {asset for asset, _ in engines[-1].asked} == {refused}
    assert len(engines[-1].asked_of(refused)) == 3


def sorted_ids(desk):
    """The properties of the first range."""
    catalog = Catalog.open(desk.settings.home)
    return catalog.slice(catalog.ranges[0])["property_id"].to_pylist()


@pytest.fixture
def spoil(monkeypatch):
    """Has the first answers of a set be garbage."""

    def garbage_of(asset, why=None):
        count = AnswerGuard.count

        def stop(guard, described):
            count(guard, described)
            if described and ("wear" in (described[0].description or {})) == (asset == CONDITION):
                raise GarbageOutputError("most answers are no descriptions") from why

        monkeypatch.setattr(AnswerGuard, "count", stop)

    return garbage_of


@pytest.mark.parametrize("failing", [DESCRIPTIONS, CONDITION])
def test_a_set_that_is_stopped_half_way_is_asked_no_more_and_the_other_goes_on(both, engines, failing, spoil):
    """Garbage of one question is a fault of its schema or prompt: the other's rows are right."""
    spoil(failing)
    done = both.materialize(DESCRIPTIONS, CONDITION)
    assert not done.success
    assert "most answers are no descriptions" in done.failure
    (other,) = {DESCRIPTIONS, CONDITION} - {failing}
    assert materialized(done) == [other]
    assert len(engines[0].asked_of(failing)) == 4


@pytest.mark.parametrize("failing", [DESCRIPTIONS, CONDITION])
def test_answers_that_no_device_may_give_are_held_against_it_whichever_set_has_them(
    both, engines, failing, spoil
):
    """The other's answers are of that device too: the work ends for both, and the device is noted."""
    spoil(failing, ImpossibleResultError("The model computed NaN or infinity for all properties"))
    done = both.materialize(DESCRIPTIONS, CONDITION)
    assert not done.success
    assert materialized(done) == []
    (record,) = build_gpu(both.settings).left_out_devices().records().values()
    (failure,) = record.failures
    assert "NaN or infinity" in failure.why


def test_a_set_that_needs_a_person_keeps_the_embeddings_of_its_run_from_nobody(both, engines, spoil):
    """Dagster skips what follows a failed op: the schedule launches it by itself, without the set."""
    spoil(CONDITION)
    done = both.materialize(DESCRIPTIONS, CONDITION, EMBEDDINGS)
    assert not done.success
    assert materialized(done) == [DESCRIPTIONS]
    schedule = build_failed_partitions(both.settings, [KEY])
    later = time.time() + 3600
    (launch,) = schedule.tick(DagsterFacts(both.instance), tick="tick", now=later).launches
    assert launch.assets == (EMBEDDINGS,)
    embedded = both.materialize(*launch.assets)
    assert embedded.success, embedded.failure
    assert materialized(embedded) == [EMBEDDINGS]
    assert schedule.tick(DagsterFacts(both.instance), tick="next", now=later + 3600).launches == ()
    states = read_status(both.settings, Catalog.open(both.settings.home)).partitions
    assert {one.asset: one.state for one in states if one.key == KEY} == {
        DESCRIPTIONS: State.DONE,
        CONDITION: State.GIVEN_UP,
        EMBEDDINGS: State.DONE,
    }


def test_an_outage_that_ends_a_run_is_no_attempt_at_any_of_its_assets(both, engines, monkeypatch):
    """No device came free: nothing is said of either set, nor of the embeddings that were skipped."""

    def none_free(gpu, **_):
        raise NoDeviceFreeError("no device is free")

    monkeypatch.setattr(GpuResource, "lease", none_free)
    done = both.materialize(DESCRIPTIONS, CONDITION, EMBEDDINGS)
    assert not done.success
    run_id = done.result.run_id
    run = DagsterFacts(both.instance).run_states([run_id])[run_id]
    assert run.interruption_of((DESCRIPTIONS, CONDITION, EMBEDDINGS)) == "no attempt"
    assert not run.needs_person_for([CONDITION])


def test_a_journal_that_cannot_be_written_loses_no_row_of_the_other(both, engines, monkeypatch):
    """Its own disk or store is at fault. What it has committed stays."""
    submit = Journal.submit

    def submit_unless(journal, table):
        if "wear" in str(table.schema.field("description").type):
            raise OSError("the disk is full")
        submit(journal, table)

    monkeypatch.setattr(Journal, "submit", submit_unless)
    done = both.materialize(DESCRIPTIONS, CONDITION)
    assert not done.success
    assert "the disk is full" in done.failure
    assert materialized(done) == [DESCRIPTIONS]


def test_a_journal_that_cannot_be_read_keeps_no_other_set_from_being_published(both, engines, monkeypatch):
    """Which of its failed rows have a try left is not known: it is left out, and the other is asked."""
    engines.prepare = lambda engine: engine.ailing[CONDITION].update(sorted_ids(both)[:3])
    assert not both.materialize(CONDITION).success
    engines.prepare = lambda engine: None
    read_ordered = Journal.read_ordered

    def read_unless(journal):
        if journal.failed_tries:
            raise OSError("a segment cannot be read")
        return read_ordered(journal)

    monkeypatch.setattr(Journal, "read_ordered", read_unless)
    done = both.materialize(DESCRIPTIONS, CONDITION)
    assert not done.success
    assert "a segment cannot be read" in done.failure
    assert materialized(done) == [DESCRIPTIONS]


def test_a_set_of_another_model_is_an_op_of_its_own_and_finds_the_device_still_held(
    both, questions, engines, monkeypatch
):
    """A device that is given back between two steps of a run may be another's by the second."""
    questions.write_text(questions.read_text() + "  processor_options: {do_image_splitting: false}\n")
    desk = Desk(settings_of(both.settings.home, questions=questions), both.instance)
    released = []
    monkeypatch.setattr(Lease, "release", lambda lease: released.append(lease))
    job = build_defs(desk.settings).resolve_implicit_global_asset_job_def()

    def run(*assets, key):
        selected = [dg.AssetKey(asset) for asset in assets]
        assert job.execute_in_process(
            asset_selection=selected, partition_key=key, instance=desk.instance
        ).success

    run(DESCRIPTIONS, CONDITION, key=KEY)
    assert sorted(engine.sets for engine in engines) == [[CONDITION], [DESCRIPTIONS]]
    assert released == []
    run(DESCRIPTIONS, key="000000008-000000015")
    assert len(released) == 1, "nothing of this run computes after it"


def test_each_set_has_the_options_that_are_its_own(both, engines):
    """Computing one of them again computes no row of the other."""
    assert both.materialize(DESCRIPTIONS, CONDITION).success
    before = file_of(both, DESCRIPTIONS).read_bytes()
    done = both.materialize(DESCRIPTIONS, CONDITION, config={"recompute": True}, config_of=(CONDITION,))
    assert done.success, done.failure
    assert engines[-1].sets == [CONDITION]
    assert file_of(both, DESCRIPTIONS).read_bytes() == before


def test_a_set_that_only_waits_to_publish_does_not_stand_still_while_another_is_asked(both, engines):
    """Its rows are all committed and were refused. A heartbeat that says nothing for long ends the run."""

    def ail(engine):
        engine.ailing[DESCRIPTIONS] = set(sorted_ids(both)[:3])

    engines.prepare = ail
    for _ in range(MOST_TRIES):
        assert not both.materialize(DESCRIPTIONS).success
    workers, living = Workers(control_state(both.settings)), []
    engines.prepare = lambda engine: setattr(
        engine, "when_asked", lambda property_id: living.append(workers.living())
    )
    assert not both.materialize(DESCRIPTIONS, CONDITION).success
    assert engines[-1].sets == [CONDITION]
    assert {(worker.asset, worker.phase) for worker in living[-1]} == {
        (DESCRIPTIONS, Phase.WORKING),
        (CONDITION, Phase.WORKING),
    }


def test_a_pause_loses_no_row_of_a_batch_that_both_were_asked(both, engines):
    """Each set's rows are with its journal before one of them looks whether a pause stands."""
    state = control_state(both.settings)

    def pause_at_once(engine):
        engine.when_asked = lambda property_id: pause(state, "the power is cut", now=time.time())

    engines.prepare = pause_at_once
    assert not both.materialize(DESCRIPTIONS, CONDITION).success
    resume(state)
    assert [committed(both.settings, asset) for asset in (DESCRIPTIONS, CONDITION)] == [4, 4]


def test_each_failure_of_a_run_is_told(both, engines, monkeypatch):
    """The run ends with the first; of the second a person reads in its log."""
    count = AnswerGuard.count

    def stop(guard, described):
        count(guard, described)
        if described:
            raise GarbageOutputError(f"garbage of {sorted(described[0].description or {})}")

    monkeypatch.setattr(AnswerGuard, "count", stop)
    done = both.materialize(DESCRIPTIONS, CONDITION)
    second = "garbage of ['needs_paint', 'wear']"
    assert second not in done.failure
    said = [entry.user_message for entry in both.instance.all_logs(done.result.run_id)]
    assert f"{CONDITION} failed too: {second}" in said


def committed(settings, asset):
    """The rows that an asset's high-water mark promises."""
    marks = settings.state_directory / "high_water_marks" / asset / KEY
    return max((mark.rows for mark in read_marks(marks, KEY)), default=0)


def die_when_both_have_committed(home, questions):
    """Describe both sets, and be killed while the second batch is with the engine."""
    settings = settings_of(home, questions=questions, commit_seconds=0.05)
    loads = Loaded()

    def load(model, device, *, schema, prompt, further=()):
        engine = JoinedEngine(model.source, [schema, *(question.schema for question in further)])
        engine.when_asked = lambda property_id: kill_once_committed(engine)
        loads.append(engine)
        return engine

    def kill_once_committed(engine):
        if len(engine.asked) == 4:
            wait_until(lambda: {committed(settings, asset) for asset in (DESCRIPTIONS, CONDITION)} == {4})
            os.kill(os.getpid(), signal.SIGKILL)

    VisionLanguageModel.load = load
    Desk(settings).materialize(DESCRIPTIONS, CONDITION)


def test_what_both_have_committed_survives_a_kill(both, engines, questions):
    """A killed process asks no property twice that is committed, of either set, and every row is whole."""
    home = both.settings.home
    child = subprocess.run(
        [
            sys.executable,
            "-c",
            f"from {__name__} import die_when_both_have_committed as die; from pathlib import Path;"
            f" die(Path({str(home)!r}), Path({str(questions)!r}))",
        ],
        env={**os.environ, "PYTHONPATH": str(CHECKOUT)},
        check=False,
        capture_output=True,
        text=True,
    )
    assert child.returncode == -signal.SIGKILL, child.stderr[-2000:]
    kept = {}
    for asset in (DESCRIPTIONS, CONDITION):
        paths = both.settings.layout.asset(asset).partition(KEY).journals.glob("*/segment-*")
        kept[asset] = {row["property_id"]: row for path in paths for row in pq.read_table(path).to_pylist()}
        assert len(kept[asset]) == 4
    done = both.materialize(DESCRIPTIONS, CONDITION)
    assert done.success, done.failure
    for asset, rows in kept.items():
        published = {row["property_id"]: row for row in pq.read_table(file_of(both, asset)).to_pylist()}
        assert sorted(published) == sorted({*rows, *engines[0].asked_of(asset)})
        assert set(rows).isdisjoint(engines[0].asked_of(asset))
        assert {property_id: published[property_id] for property_id in rows} == rows


def test_images_are_looked_at_once_and_the_answers_are_those_of_each_alone(
    both, monkeypatch, tmp_path, listing
):
    """The example model, its looks counted: two sets together take as many as one, and answer alike."""
    looks = []
    load = VisionLanguageModel.load

    def counted(model, device, **how):
        engine = load(model, device, **how)
        vision = next(
            module for name, module in engine._model.named_modules() if name.endswith("vision_model")
        )
        vision.register_forward_pre_hook(lambda *_: looks.append(1))
        return engine

    monkeypatch.setattr(VisionLanguageModel, "load", counted)
    key, counts = "000000000-000000002", []
    joined, alone = (both.changed(home=tmp_path / name) for name in ("joined", "alone"))
    for desk in (joined, alone):
        ingest(listing, desk.settings.home, range_size=3)
    for desk, *assets in ((joined, DESCRIPTIONS, CONDITION), (alone, DESCRIPTIONS), (alone, CONDITION)):
        looks.clear()
        done = desk.materialize(*assets, key=key)
        assert done.success, done.failure
        counts.append(len(looks))
    assert counts[0] == counts[1] == counts[2] > 0
    for asset in (DESCRIPTIONS, CONDITION):
        together, by_itself = (pq.read_table(file_of(desk, asset, key)) for desk in (joined, alone))
        for column in ("property_id", "status", "description", "images_used"):
            assert together[column].to_pylist() == by_itself[column].to_pylist(), (asset, column)
