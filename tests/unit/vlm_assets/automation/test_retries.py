"""What the re-materialization is told of our assets is what lies on disk."""

from dataclasses import replace

import pytest

from faults.rehearsal.dagster_in_memory import DagsterInMemory, SimulatedClock
from vlm_assets.assets import fingerprint
from vlm_assets.assets.partition_state import PartitionStates
from vlm_assets.automation.retries import (
    RETRY_RUNS,
    _Files,
    build_failed_partitions,
    decides_on_stale,
    retry_config,
)
from vlm_assets.config.question_sets import config_of_runs, options_of
from vlm_assets.config.resource_settings import build_gpu
from vlm_catalog.ranges import DESCRIPTIONS, EMBEDDINGS
from vlm_durable.journal.high_water_mark import HighWaterMark, write_mark


@pytest.fixture
def files(dataset):
    return _Files(dataset.settings)


def test_a_missing_file_is_seen_and_only_where_one_should_be(dataset, files):
    """One look at the folder, whatever the number of partitions."""
    first, second, third = dataset.keys
    assert files.missing(DESCRIPTIONS, dataset.keys) == []
    dataset.settings.descriptions.partition(second).published.unlink()
    assert files.missing(DESCRIPTIONS, dataset.keys) == [second]
    assert files.missing(DESCRIPTIONS, [first, third]) == []


def test_work_without_a_published_file_is_interrupted(dataset, files):
    """A journal beside a published file is a leftover, which prune removes; without one it is work."""
    first, second, _ = dataset.keys
    for key in (first, second):
        dataset.settings.descriptions.partition(key).journals.mkdir(parents=True)
    dataset.settings.descriptions.partition(second).published.unlink()
    assert files.interrupted(DESCRIPTIONS) == [second]
    assert files.interrupted(EMBEDDINGS) == []


def test_rows_grow_with_every_row_of_any_generation(dataset, files):
    """A round in which nothing new came is told from one that got on."""
    key = dataset.keys[0]
    marks = dataset.settings.state_directory / "high_water_marks"
    counted = []
    for asset, generation, rows in (
        (DESCRIPTIONS, "g", 2),
        (DESCRIPTIONS, "g-again", 1),
        (EMBEDDINGS, "e", 3),
    ):
        folder = marks / asset / key
        folder.mkdir(parents=True, exist_ok=True)
        write_mark(folder / f"{generation}.json", HighWaterMark(key, generation, rows, 1, 1, None))
        counted.append(files.rows(key))
    assert counted == [2, 3, 6]


@pytest.mark.parametrize(
    ("changed", "waits"),
    [
        ((fingerprint.CATALOGUE_SLICE, fingerprint.LOOKED_AT), False),
        ((fingerprint.LOOKED_AT, fingerprint.WHERE), True),
        ((fingerprint.CATALOGUE_SLICE,), True),
    ],
)
def test_a_set_that_follows_other_answers_waits_for_no_person(dataset, files, monkeypatch, changed, waits):
    """A run would make it anew without asking, so it is tried again; under another condition it would not."""
    read = PartitionStates.read
    monkeypatch.setattr(
        PartitionStates, "read", lambda states, *of: replace(read(states, *of), changed=changed)
    )
    assert files.is_stale(DESCRIPTIONS, dataset.keys[0]) is waits


def test_what_was_made_under_other_settings_is_stale(dataset, files, monkeypatch):
    """Its file is not put right by computing all of it anew: that is a person's choice."""
    key = dataset.keys[0]
    assert not files.is_stale(DESCRIPTIONS, key)
    monkeypatch.setattr(fingerprint, "description_parts", lambda *_: {"maker": "another"})
    monkeypatch.setattr(fingerprint, "embedding_parts", lambda *_: {"embedder": "another"})
    files = _Files(dataset.settings)
    assert files.is_stale(DESCRIPTIONS, key)
    assert files.is_stale(EMBEDDINGS, key)
    paths = dataset.settings.descriptions.partition(key)
    paths.record.unlink()
    paths.record_copy.unlink()
    dataset.descriptions.set_aside(key)
    assert not files.is_stale(DESCRIPTIONS, key), "nothing is recorded as published"


def test_work_that_is_begun_under_the_settings_of_now_goes_on(dataset, files, monkeypatch):
    """A person wanted it: what is stale is tried again there, and nowhere else."""
    key = dataset.keys[0]
    monkeypatch.setattr(fingerprint, "description_parts", lambda *_: {"maker": "another"})
    files = _Files(dataset.settings)
    assert files.is_stale(DESCRIPTIONS, key)
    now = files._states().read(DESCRIPTIONS, key).fingerprint_now
    dataset.settings.descriptions.partition(key).journal(now).mkdir(parents=True)
    assert not files.is_stale(DESCRIPTIONS, key)


KEPT = {"ops": {DESCRIPTIONS: {"config": {"stale": "keep"}}, EMBEDDINGS: {"config": {}}}}
ANEW = {"ops": {DESCRIPTIONS: {"config": {"recompute": True}}}}


@pytest.mark.parametrize(
    ("assets", "before", "config", "goes_on"),
    [
        ([EMBEDDINGS], {}, {}, False),
        ([DESCRIPTIONS, EMBEDDINGS], KEPT, KEPT, False),
        ([DESCRIPTIONS, EMBEDDINGS], ANEW, {"ops": {**ANEW["ops"], EMBEDDINGS: {"config": {}}}}, True),
        ([EMBEDDINGS], ANEW, None, False),
    ],
    ids=["nothing was asked", "what is stale is kept", "a recomputation stays one", "it is published"],
)
def test_what_a_person_asked_of_the_run_before_is_asked_of_the_next(dataset, assets, before, config, goes_on):
    """A retry makes nothing anew that was to be kept, and goes on with a recomputation that was cut short."""
    retried = retry_config(dataset.settings, dataset.keys[0], assets, before)
    assert retried[1] is goes_on
    assert config is None or retried[0] == config


def test_a_run_config_decides_on_the_stale_partitions_of_its_own_asset(dataset):
    """What another asset was told, and a recomputation, say nothing of it."""
    for asset, before, decides in (
        (DESCRIPTIONS, KEPT, True),
        (EMBEDDINGS, KEPT, False),
        (DESCRIPTIONS, ANEW, False),
    ):
        assert decides_on_stale(dataset.settings, asset, before) is decides


def test_a_stale_set_beside_what_is_wrong_is_left_to_a_person(two_sets, monkeypatch):
    """The schedule tries the descriptions again: nobody agreed that the set is made anew with them."""
    settings, key = two_sets.settings, two_sets.keys[0]
    (condition,) = settings.questions.assets
    assets = (DESCRIPTIONS, EMBEDDINGS, condition)
    assert retry_config(settings, key, assets, {}) == ({}, False), "nothing is stale"
    monkeypatch.setattr(
        fingerprint,
        "description_parts",
        lambda of, _: {"maker": "another"} if of.descriptions.name == condition else {},
    )
    for before in ({}, config_of_runs(settings, {DESCRIPTIONS: {"recompute": True}})):
        config, _ = retry_config(settings, key, assets, before)
        assert options_of(settings, config, condition).get("stale") == "keep"
        assert "stale" not in options_of(settings, config, DESCRIPTIONS)
        assert not options_of(settings, config, EMBEDDINGS)
    asked = config_of_runs(settings, {DESCRIPTIONS: {}, condition: {"stale": "anew"}})
    assert options_of(settings, retry_config(settings, key, assets, asked)[0], condition) == {"stale": "anew"}
    assert retry_config(settings, key, [condition], {}) == ({}, False), "what is wrong is decided on before"


def test_the_settings_reach_the_schedule(dataset):
    """The back-off is the setting's."""
    settings = dataset.settings.model_copy(update={"retry_minutes": 2.0})
    made = build_failed_partitions(settings, dataset.keys)
    assert (made.cap, made.policy.attempts, made.policy.backoff_seconds) == (RETRY_RUNS, 5, 120.0)
    assert made.watched.keys == frozenset(dataset.keys)


def test_the_schedule_knows_that_no_device_is_left(dataset):
    """From the file of the devices left out; a driver that does not answer is told elsewhere."""
    settings = dataset.settings.model_copy(update={"devices": "cpu:1"})
    left_out = build_gpu(settings).left_out_devices()
    dagster = DagsterInMemory(SimulatedClock())

    def sentence(devices):
        of_devices = settings.model_copy(update={"devices": devices})
        return build_failed_partitions(of_devices, dataset.keys).tick(dagster, tick="1", now=0.0).sentence

    assert "left out" not in sentence("cpu:1")
    for occurrence in "12":
        left_out.note_failure("cpu-0", occurrence=occurrence, why="It is lost.")
    assert sentence("cpu:1").startswith("Nothing is started")
    assert "--take-back cpu-0" in sentence("cpu:1")
    assert "left out" not in sentence("7")
    left_out.take_back("cpu-0")
    assert "left out" not in sentence("cpu:1")
