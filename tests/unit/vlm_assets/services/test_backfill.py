"""Which partitions and assets a backfill launches, what it goes on with, its progress, and how it ended."""

from dataclasses import replace

from dagster import AssetCheckEvaluation, AssetCheckSeverity, AssetKey, DagsterRunStatus

from resources.dagster_names import FAILURE_REASON, NEVER_STARTED
from sensors.dagster_internals.runs import LaunchedBackfill
from tests.support.backfills import LaunchedKeys, LaunchesOfAssets, of_assets, with_backfills
from vlm_assets.config.questions_file import QuestionsFile
from vlm_assets.services.backfill import (
    Backfill,
    BackfillSummary,
    failed_keys,
    stale_options,
    summarize,
    with_stale,
)
from vlm_assets.services.status import read_status
from vlm_assets.webserver.api import STALE

ASSETS = ("property_descriptions", "property_embeddings")


def test_who_names_a_refused_partition_has_its_failed_properties_tried_again(empty, commit, refuse):
    """Its refusal says to do that; without it the run would be refused again. Others start as ever."""
    first, second, _ = empty.keys
    commit(empty.settings, first, 3)
    refuse(empty.settings, first)
    launched = []
    api = LaunchedKeys()
    api.launch_backfill = lambda assets, keys, *, run_config, **_: launched.append((keys, run_config)) or "b"
    for retry_failed, expected in ((True, {first: True, second: None}), (False, {first: None, second: None})):
        launched.clear()
        Backfill(api, with_backfills(), empty.settings, [first, second], retry_failed=retry_failed).begin()
        asked = {
            key: config["ops"][ASSETS[0]]["config"].get("retry_failed")
            for keys, config in launched
            for key in keys
        }
        assert asked == expected


def test_an_unfinished_backfill_makes_stale_partitions_anew_only_as_was_agreed(dataset):
    """One under other settings is no answer to --stale, and one that goes on all the same is named."""
    third = dataset.keys[2]
    dataset.replace_images("p7")
    agreed = read_status(dataset.settings, dataset.catalog).stale.settings
    options = " ".join(dict.fromkeys(stale_options(ASSETS, agreed, stale_too=True).values()))
    for stale_too, before, launches in (
        (True, options, []),
        (True, "other settings", [third]),
        (True, None, [third]),
        (False, options, []),
        (False, "keep", []),
    ):
        api, tags = LaunchedKeys(), {} if before is None else {STALE: before}
        dagster = with_backfills(LaunchedBackfill("b0", True, {ASSETS[0]: frozenset([third])}, tags=tags))
        said = Backfill(api, dagster, dataset.settings, dataset.keys, stale_too=stale_too).begin()
        assert api.keys == launches, (stale_too, before)
        assert ("and goes on with that" in said) == (not stale_too and before != "keep"), said


def test_a_set_that_a_backfill_under_way_knows_nothing_of_is_launched_beside_it(
    dataset, tmp_path, monkeypatch
):
    """The backfill of before the set was added would end, and leave the set unasked."""
    (tmp_path / "gate_schema.py").write_text(
        "import pydantic\nclass Gate(pydantic.BaseModel):\n    has_gate: bool\n"
    )
    (tmp_path / "questions.yaml").write_text("gate:\n  schema: gate_schema:Gate\n")
    monkeypatch.syspath_prepend(tmp_path)
    questions = QuestionsFile.read(tmp_path / "questions.yaml")
    settings = dataset.settings.model_copy(update={"questions": questions})
    first, second = dataset.keys[:2]
    for unfinished, launches in (
        ({}, [(("property_gate",), [first, second])]),
        ({ASSETS[0]: [first, second]}, [(("property_gate",), [first, second])]),
        ({ASSETS[0]: [first, second], "property_gate": [second]}, [(("property_gate",), [first])]),
        ({ASSETS[0]: [first, second], "property_gate": [first, second]}, []),
        # The one of before the set has ended.
        ({"property_gate": [first, second]}, []),
        ({"property_gate": [second]}, [(("property_gate",), [first])]),
    ):
        api = LaunchesOfAssets()
        backfill = Backfill(api, of_assets(unfinished), settings, [first, second])
        backfill.begin()
        assert api.launched == launches, unfinished
        assert set(backfill.followed) >= {f"b of {asset}" for asset in unfinished}
    # What is complete is not launched, but for what follows what is made anew.
    dataset.descriptions.path(first).unlink()
    api = LaunchesOfAssets()
    Backfill(api, with_backfills(), settings, [first, second]).begin()
    assert api.launched == [((*ASSETS, "property_gate"), [first]), (("property_gate",), [second])]


def test_a_run_holds_to_the_settings_that_a_person_agreed_to(dataset):
    """Each launch says what its runs do with stale partitions, beside what else they are asked."""
    kept = with_stale(dataset.settings, {"ops": {"a": {"config": {"accept_failed": True}}}}, {"a": "keep"})
    assert kept == {"ops": {"a": {"config": {"accept_failed": True, "stale": "keep"}}}}
    known = {ASSETS[0]: "d1"}
    assert list(stale_options(ASSETS, known, stale_too=True).values()) == ["d1", "anew"]
    assert set(stale_options(ASSETS, known, stale_too=False).values()) == {"keep"}


def test_a_stale_partition_that_was_named_is_not_complete(dataset):
    """The exit code and the summary of `run KEY` count it as left over until it is made anew."""
    third = dataset.keys[2]
    dataset.replace_images("p7")
    status = read_status(dataset.settings, dataset.catalog)
    left = status.keys_left(stale_too=True)
    assert (left, status.keys_left()) == ({third}, frozenset())
    assert not BackfillSummary([third], left, [], status, []).ok


def test_what_an_unfinished_backfill_makes_of_one_asset_alone_is_launched_for_the_others(empty):
    """Dagster's re-execution may have other partitions of each asset: none is taken for under way."""
    first, second, _ = empty.keys
    api, launched = LaunchedKeys(), []
    api.launch_backfill = lambda assets, keys, **_: launched.append((tuple(assets), keys)) or "b1"
    made = {ASSETS[0]: frozenset([first]), ASSETS[1]: frozenset([first, second])}
    work = Backfill(api, with_backfills(LaunchedBackfill("b0", True, made)), empty.settings, [first, second])
    work.begin()
    assert launched == [((ASSETS[0],), [second])]
    assert work.followed == ["b0", "b1"]


def test_a_run_that_never_started_is_no_failure_of_its_partition(dataset):
    """A busy machine let it wait in vain, and it is started again: the progress does not call it failed."""
    first, second, third = dataset.keys
    late, failed = {FAILURE_REASON: NEVER_STARTED}, {FAILURE_REASON: "STEP_FAILURE"}
    dagster = with_backfills()
    for asset in ASSETS:  # once, before its run failed
        dagster.materialize(asset, second)
    for key, tags in ((second, late), (first, failed), (first, late), (second, failed)):
        run = dagster.launch(key, ASSETS)
        dagster.change(run, DagsterRunStatus.FAILURE, **tags)
    for asset in ASSETS:
        dagster.materialize(asset, third)
    now = Backfill(LaunchedKeys(), dagster, dataset.settings, dataset.keys).progress()
    assert (now.done, now.failed, now.never_started) == ({third}, {second}, {first})


def test_failed_partitions_are_those_of_runs_and_of_files(dataset):
    """`run --failed` takes what no file tells: an asset whose latest run failed, until one ends well."""
    first, second, third = dataset.keys
    dagster, status = with_backfills(), read_status(dataset.settings, dataset.catalog)
    for key in (first, second, third):
        dagster.change(dagster.launch(key, ASSETS), DagsterRunStatus.FAILURE)
    again = dagster.launch(second, ASSETS)
    for asset in ASSETS:
        dagster.materialize(asset, second, again)
    dagster.materialize(ASSETS[0], third)
    assert failed_keys(dataset.settings.home, status, dagster) == [first, third]
    dataset.descriptions.path(second).unlink()
    status = read_status(dataset.settings, dataset.catalog)
    assert second in failed_keys(dataset.settings.home, status, dagster)


def test_what_is_made_again_is_not_done_before_its_run(dataset):
    """Dagster still shows as made what is about to be made anew: it is done once its run was seen."""
    first, second, third = dataset.keys
    dagster = with_backfills()

    def make(key, run=""):
        for asset in ASSETS:
            dagster.materialize(asset, key, run)

    for key in dataset.keys:
        make(key)
    again = frozenset([first, second])
    work = Backfill(LaunchedKeys(), dagster, dataset.settings, dataset.keys, made_again=again)
    assert work.progress().done == {third}
    run = dagster.launch(first, ASSETS)
    now = work.progress()
    assert (now.done, now.under_way, now.runs) == ({third}, {first}, 1)
    make(first, run)
    assert work.progress().done == {first, third}
    # An asset that a cancelled run did not make is as it was.
    dagster.change(dagster.launch(second, ASSETS), DagsterRunStatus.CANCELED)
    assert work.progress().done == {first, third}
    run = dagster.launch(second, ASSETS)
    assert work.progress().done == {first, third}
    dagster.change(run, DagsterRunStatus.CANCELED)
    assert work.progress().done == {first, second, third}


def test_the_summary_tells_the_checks_that_stand(dataset):
    """As the retry schedule reads them: not that of a check that the partition was made again without."""
    first, second, _ = dataset.keys
    dagster = with_backfills()

    def fails(check, key, **severity):
        asset = AssetKey(ASSETS[0])
        dagster.report_evaluation(
            AssetCheckEvaluation(asset, check, passed=False, metadata={}, partition=key, **severity)
        )

    fails("gone", first)
    dagster.materialize(ASSETS[0], first)
    fails("warned", first, severity=AssetCheckSeverity.WARN)
    fails("refused", second)
    work = Backfill(LaunchedKeys(), dagster, dataset.settings, [first, second])
    summary = summarize(work)
    assert {(result.check, result.partition) for result in summary.failing} == {
        ("warned", first),
        ("refused", second),
    }
    assert not summary.ok
    assert replace(summary, failing=summary.failing[:1]).ok == (summary.failing[0].severity == "WARN")
