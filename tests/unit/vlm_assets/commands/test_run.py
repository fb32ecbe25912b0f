"""What ``publish`` says and ``run`` chooses before a launch, and how a backfill is followed to its end."""

import io
import sqlite3
from dataclasses import replace
from unittest.mock import Mock

import pyarrow as pa
import pytest
from dagster import AssetCheckEvaluation, AssetCheckSeverity, AssetKey, DagsterRunStatus
from rich.console import Console
from sqlalchemy.exc import OperationalError
from typer.testing import CliRunner

from faults.rehearsal.dagster_in_memory import DagsterInMemory, SimulatedClock
from resources.dagster_names import FAILURE_REASON, NEVER_STARTED
from sensors.dagster_internals.runs import LaunchedBackfill
from tests.support.journals import open_journal
from vlm_assets.assets.fingerprint import Meaning, Meanings
from vlm_assets.commands import run as run_module
from vlm_assets.commands.main import app
from vlm_assets.commands.run import Patience, ProgressLine, _follow, _wait_for, show_summary
from vlm_assets.config.questions_file import QuestionsFile
from vlm_assets.services.backfill import (
    Backfill,
    BackfillSummary,
    failed_keys,
    stale_options,
    summarize,
    with_stale,
)
from vlm_assets.services.command_error import CommandError
from vlm_assets.services.expected_cost import SetProgress
from vlm_assets.services.forecast import ForecastAndRun
from vlm_assets.services.status import read_status
from vlm_assets.webserver.api import STALE, DagsterApi, DagsterApiError, DagsterUnreachableError
from vlm_assets.webserver.home import note_address, only_dagster
from vlm_assets.webserver.process_group import ProcessEndedError
from vlm_durable.state.rate import Rate

ASSETS = ("property_descriptions", "property_embeddings")

ROWS = pa.schema(
    [
        ("property_id", pa.string()),
        ("ordinal", pa.int64()),
        ("status", pa.string()),
        ("error_kind", pa.string()),
        ("error", pa.string()),
        ("tries", pa.int32()),
    ]
)


def accept_failed(dataset, *arguments):
    words = ["run", dataset.keys[0], "--accept-failed", "--home", str(dataset.settings.home)]
    return CliRunner().invoke(app, [*words, *arguments])


@pytest.fixture
def refused(empty, refuse):
    """The first of the three ranges is finished and not published: two of three properties failed."""
    paths = empty.settings.descriptions.partition(empty.keys[0])
    failed = {"status": "failed", "error_kind": "io_error", "error": "the disk is bad", "tries": 1}
    ok = {"status": "ok", "error_kind": None, "error": None, "tries": 1}
    first = [{"property_id": f"p{n}", "ordinal": n, **(ok if n == 0 else failed)} for n in range(3)]
    with open_journal(paths, "g", ["p0", "p1", "p2"], schema=ROWS) as journal:
        journal.submit(pa.Table.from_pylist(first, schema=ROWS))
        journal.flush()
        journal.submit(pa.Table.from_pylist([{**first[1], "tries": 2, "error": "still bad"}], schema=ROWS))
    refuse(empty.settings, empty.keys[0])
    return empty


def test_the_failed_rows_are_named_and_without_a_yes_nothing_is_published(refused):
    """How many, of which kinds, and the first with the reason of its last try; only --yes accepts."""
    said = accept_failed(refused)
    assert said.exit_code == 1
    assert "2 of 3 properties failed (2 io_error). First: p1: io_error: still bad." in said.output
    assert "Nothing was changed" in said.output and "--yes" in said.output
    assert not refused.settings.descriptions.partition(refused.keys[0]).published.exists()


def test_who_names_a_refused_partition_has_its_failed_properties_tried_again(refused):
    """Its refusal says to do that; without it the run would be refused again. Others start as ever."""
    first, second, _ = refused.keys
    launched = []
    api = LaunchedKeys()
    api.launch_backfill = lambda assets, keys, *, run_config, **_: launched.append((keys, run_config)) or "b"
    for retry_failed, expected in ((True, {first: True, second: None}), (False, {first: None, second: None})):
        launched.clear()
        Backfill(api, with_backfills(), refused.settings, [first, second], retry_failed=retry_failed).begin()
        asked = {
            key: config["ops"][ASSETS[0]]["config"].get("retry_failed")
            for keys, config in launched
            for key in keys
        }
        assert asked == expected


@pytest.mark.parametrize(
    ("arguments", "retries"),
    [((), False), (("000000000-000000003",), True), (("--failed",), True), (("--stale",), False)],
)
def test_failed_properties_are_tried_again_only_where_a_person_asks(empty, monkeypatch, arguments, retries):
    """By the key, or with --failed; the plain command keeps them as they are."""
    monkeypatch.setattr(run_module, "require_models", lambda settings: None)
    monkeypatch.setattr(
        run_module, "run_partitions", lambda settings, *, retry_failed, **_: print(retry_failed) or 0
    )
    named = [empty.keys[0] if word[0].isdigit() else word for word in arguments]
    done = CliRunner().invoke(app, ["run", "--home", str(empty.settings.home), *named])
    assert done.output.splitlines()[-1] == str(retries)


def test_what_is_published_already_is_left_alone(dataset):
    """There is nothing to accept."""
    said = accept_failed(dataset, "--yes")
    assert said.exit_code == 0
    assert "published. Nothing was done." in said.output


def summary_of(dataset) -> tuple[bool, str]:
    status = read_status(dataset.settings, dataset.catalog)
    found = BackfillSummary(dataset.keys, status.keys_left(), ((), 0), status, [], None)
    console = Console(file=io.StringIO(), width=200)
    show_summary(console, found)
    return found.ok, console.file.getvalue()


def test_the_summary_counts_what_status_calls_complete(dataset) -> None:
    """A partition whose file is gone is not complete, whatever Dagster shows: the exit code says so."""
    ok, said = summary_of(dataset)
    count = len(dataset.keys)
    assert ok, said
    assert f"{count} of {count} partitions are complete." in said
    dataset.descriptions.path(dataset.keys[0]).unlink()
    ok, said = summary_of(dataset)
    assert not ok
    assert f"{count - 1} of {count} partitions are complete." in said


def with_backfills(*backfills):
    """A Dagster without runs."""
    dagster = DagsterInMemory(SimulatedClock())
    dagster.backfills.extend(backfills)
    return dagster


def of_assets(unfinished):
    """Such a Dagster with unfinished backfills, by asset."""
    return with_backfills(
        *(
            LaunchedBackfill(f"b of {asset}", True, {asset: frozenset(keys)})
            for asset, keys in unfinished.items()
        )
    )


class LaunchedKeys(DagsterApi):
    """Notes the last keys that were to be launched, and what becomes of stale ones."""

    def __init__(self):
        super().__init__("http://127.0.0.1:9", None)
        self.keys = []
        self.stale = {}

    def launch_backfill(self, assets, keys, *, run_config, **_):
        self.keys = list(keys)
        self.stale = {asset: run_config["ops"][asset]["config"]["stale"] for asset in assets}
        return "b"


@pytest.fixture
def launched_by(dataset, monkeypatch):
    """Runs `run` with some arguments where the third range alone is stale; gives its output and launches."""
    dataset.replace_images("p7")
    monkeypatch.setattr(run_module, "require_models", lambda settings: None)
    monkeypatch.setenv("VLM_ASSETS_MODEL", "example")

    def launched(*arguments):
        api = LaunchedKeys()

        def run_partitions(settings, *, keys, stale_too, **_):
            dagster = with_backfills()
            chosen = dataset.keys if keys is None else keys(dagster)
            print(Backfill(api, dagster, settings, chosen, stale_too=stale_too).begin())
            return 0

        monkeypatch.setattr(run_module, "run_partitions", run_partitions)
        asked = ["run", "--home", str(dataset.settings.home), *arguments]
        return CliRunner().invoke(app, asked), api.keys

    return launched


def test_a_stale_partition_is_made_anew_only_where_a_person_asks(launched_by, dataset):
    """Named by its key, or with --stale; finished work is never computed again by the plain command."""
    first, _, third = dataset.keys
    for arguments, keys in (((), []), ((first,), []), ((third,), [third]), (("--stale",), [third])):
        done, launched = launched_by(*arguments)
        assert done.exit_code == 0, done.output
        assert launched == keys, arguments
        assert ("Nothing to do" in done.output) == (not keys)


def test_failed_partitions_alone_leave_stale_ones_and_say_so(launched_by):
    """Who asks for what failed learns that stale partitions are not among it, and how they are made anew."""
    done, launched = launched_by("--failed")
    assert launched == []
    assert "1 stale partition stays as it is." in done.output
    assert "`vlm-assets run --stale" in done.output


def test_run_says_what_stale_partitions_take_and_asks(launched_by, dataset, monkeypatch):
    """Without a terminal and after a no they stay; after a yes they are made anew. Why is said first."""
    third = dataset.keys[2]
    for answer, launches in ((None, []), (False, []), (True, [third])):
        if answer is not None:
            monkeypatch.setattr(run_module, "answered_yes", lambda question, answer=answer: answer)
        done, launched = launched_by()
        assert launched == launches, answer
        assert "1 partition is stale" in done.output
        assert "What changed: images of " in done.output
        assert "at the measured rate" in done.output
        assert "stay readable until the new ones" in done.output
        assert ("`vlm-assets run --stale" in done.output) == (not launches)


def test_an_unfinished_backfill_makes_stale_partitions_anew_only_as_was_agreed(dataset, launched_by):
    """One under other settings is no answer to --stale, and one that goes on all the same is named."""
    third = dataset.keys[2]
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


class LaunchesOfAssets(DagsterApi):
    """Notes all that it is asked to launch."""

    def __init__(self):
        super().__init__("http://127.0.0.1:9", None)
        self.launched = []

    def launch_backfill(self, assets, keys, **_):
        self.launched.append((tuple(assets), list(keys)))
        return "new"


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


def test_a_set_with_a_condition_waits_for_the_backfill_that_makes_what_it_looks_at(
    dataset, tmp_path, monkeypatch
):
    """Launched beside it, a run of each partition would fail. It is launched when that one has ended."""
    (tmp_path / "tall_schema.py").write_text(
        "import pydantic\nclass Tall(pydantic.BaseModel):\n    has_lift: bool\n"
    )
    file = tmp_path / "questions.yaml"
    file.write_text("tall:\n  schema: tall_schema:Tall\n  where: floors > 3\n")
    monkeypatch.syspath_prepend(tmp_path)
    settings = dataset.settings.model_copy(update={"questions": QuestionsFile.read(file)})
    first, second = dataset.keys[:2]
    dataset.descriptions.path(second).unlink()
    api, dagster = LaunchesOfAssets(), of_assets({ASSETS[0]: [first, second]})
    backfill = Backfill(api, dagster, settings, [first, second])
    backfill.begin()
    assert (api.launched, backfill.deferred) == ([(("property_tall",), [first])], True)
    monkeypatch.setattr("vlm_assets.commands.run._watch", lambda work, patience: dagster.backfills.clear())
    monkeypatch.setattr("vlm_assets.commands.run.summarize", lambda work, accuracy: None)
    monkeypatch.setattr("vlm_assets.commands.run.show_summary", lambda console, summary: None)
    api.launched.clear()
    _follow(backfill, lambda: None, Patience(Console(file=io.StringIO()), lambda _: None))
    assert api.launched == [
        (("property_tall",), [first]),
        (("property_tall",), [first]),
        ((*ASSETS, "property_tall"), [second]),
    ]


def test_a_run_holds_to_the_settings_that_a_person_agreed_to(dataset, launched_by):
    """Each launch says what its runs do with stale partitions, beside what else they are asked."""
    kept = with_stale(dataset.settings, {"ops": {"a": {"config": {"accept_failed": True}}}}, {"a": "keep"})
    assert kept == {"ops": {"a": {"config": {"accept_failed": True, "stale": "keep"}}}}
    known = {ASSETS[0]: "d1"}
    assert list(stale_options(ASSETS, known, stale_too=True).values()) == ["d1", "anew"]
    assert set(stale_options(ASSETS, known, stale_too=False).values()) == {"keep"}


def test_a_stale_partition_that_was_named_is_not_complete(dataset, launched_by):
    """The exit code and the summary of `run KEY` count it as left over until it is made anew."""
    third = dataset.keys[2]
    status = read_status(dataset.settings, dataset.catalog)
    left = status.keys_left(stale_too=True)
    assert (left, status.keys_left()) == ({third}, frozenset())
    assert not BackfillSummary([third], left, [], status, [], None).ok


def test_what_is_stale_is_not_guessed_at(dataset, launched_by, monkeypatch):
    """Where the model cannot be asked what it is, --stale launches nothing, says why, and fails."""

    def unknown():
        raise ValueError("the server does not answer")

    meanings = Meanings(dict.fromkeys(("property_descriptions", "property_embeddings"), Meaning(unknown)))
    monkeypatch.setattr(Meanings, "from_settings", lambda _: meanings)
    dataset.describe(dataset.keys[2], text="made of the new image")
    dataset.embed(dataset.keys[2])
    done, launched = launched_by("--stale")
    assert (done.exit_code, launched) == (1, [])
    assert "the server does not answer" in done.stderr


class Faltering(DagsterInMemory):
    """Dagster whose database is away at each first question of a kind."""

    def __init__(self):
        super().__init__(SimulatedClock())
        self.asked = set()

    def falters(self, question):
        if question not in self.asked:
            self.asked.add(question)
            raise OperationalError("SELECT 1", {}, Exception("connection refused\nIs the server running?"))

    def unfinished_backfills(self, assets):
        self.falters("unfinished")
        return super().unfinished_backfills(assets)

    def newest_event(self):
        self.falters("events")
        return super().newest_event()

    def runs_in(self, statuses):
        self.falters("runs")
        return super().runs_in(statuses)

    def backfill(self, backfill_id):
        self.falters("backfill")
        return super().backfill(backfill_id)

    def latest_results(self, assets=None, *, passed=False):
        if "backfill" in self.asked:
            self.falters("checks")
        return super().latest_results(assets, passed=passed)


class FalteringApi(DagsterApi):
    """Launches a backfill that ends at once. The first request is not answered."""

    def __init__(self, dagster, times=0):
        super().__init__("http://127.0.0.1:9", None)
        self.dagster = dagster
        self.times = times
        self.launched = []

    def launch_backfill(self, assets, keys, **_):
        if isinstance(self.dagster, Faltering) and "launch" not in self.dagster.asked:
            self.dagster.asked.add("launch")
            raise DagsterUnreachableError("Dagster could not answer: (psycopg2.OperationalError) refused")
        self.launched.append(keys)
        error = "Targeted partitions have been removed" if len(self.launched) <= self.times else None
        self.dagster.backfills[:] = [LaunchedBackfill("b1", unfinished=False, error=error)]
        return "b1"


def test_a_backfill_is_followed_to_its_end_though_answers_fail(dataset):
    """Dagster's database is away for a moment: nothing ends, and a person reads one sentence each time."""
    dataset.descriptions.path(dataset.keys[0]).unlink()
    dagster = Faltering()
    api = FalteringApi(dagster)
    console = Console(file=io.StringIO(), width=200)
    waited = []
    work = Backfill(api, dagster, dataset.settings, dataset.keys)
    summary = _follow(work, lambda: None, Patience(console, waited.append))
    assert api.launched == [[dataset.keys[0]]]
    assert not summary.ok, "its file is still gone"
    said = console.file.getvalue()
    assert "refused. Runs go on meanwhile; asking again until there is an answer." in said
    assert "SELECT" not in said and "server running" not in said
    assert said.count("asking again") == said.count("There are answers again.") == 3, "once an outage"
    assert len(waited) == len(dagster.asked) == 6


def from_database(why, code=None):
    """What SQLAlchemy raises, and what Dagster raises from it after some tries to reach Postgres."""
    reason = sqlite3.OperationalError(why)
    if code is not None:
        reason.sqlite_errorcode = code
    error, of_dagster = OperationalError("SELECT 1", {}, reason), RuntimeError("too many retries")
    of_dagster.__cause__ = error
    return error, of_dagster


@pytest.mark.parametrize(
    "error",
    [
        *from_database("database is locked", sqlite3.SQLITE_BUSY),
        *from_database("server refused the connection\n\tIs the server running?"),
    ],
)
def test_a_database_that_is_away_is_waited_for_and_its_reason_is_told(error):
    """Whatever Dagster wraps it in, a person reads in one line why there is no answer."""
    console, waited = Console(file=io.StringIO(), width=200), []
    question = Mock(side_effect=[error, error, "an answer"])
    assert Patience(console, waited.append).ask(question) == "an answer"
    assert len(waited) == 2
    said = console.file.getvalue()
    assert "gave no answer: database is locked. Runs" in said or "refused the connection. Runs" in said
    assert "SELECT" not in said


def test_a_database_that_no_wait_mends_ends_the_command_with_a_sentence():
    """Tables of another version stay what they are."""
    for error in from_database("no such table: runs", sqlite3.SQLITE_ERROR):
        with pytest.raises(CommandError, match=r"no such table: runs\. .*dagster instance migrate"):
            Patience(Console(file=io.StringIO()), pytest.fail).ask(Mock(side_effect=error))


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


@pytest.mark.parametrize(("times", "launches"), [(0, 1), (1, 2), (99, 5)])
def test_a_backfill_that_dagster_gave_up_is_launched_again(dataset, times, launches):
    """New ranges are run though Dagster's daemon reads them late; not for ever, and a person reads why."""
    dataset.descriptions.path(dataset.keys[0]).unlink()
    dagster = with_backfills()
    api = FalteringApi(dagster, times)
    console = Console(file=io.StringIO(), width=200)
    work = Backfill(api, dagster, dataset.settings, dataset.keys)
    _follow(work, lambda: None, Patience(console, lambda _: None))
    assert api.launched == [[dataset.keys[0]]] * launches
    why = "Dagster gave up backfill b1: Targeted partitions have been removed"
    assert console.file.getvalue().count(why) == min(times, launches)


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
    console = Console(file=io.StringIO(), width=100)
    with ProgressLine(console, dataset.keys) as line:
        line.show(now, SetProgress(Rate(), {}))
    assert "1/3 partitions, 0 running, 1 failed, 1 not started;" in console.file.getvalue()


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
    summary = summarize(work, lambda: None)
    assert {(result.check, result.partition) for result in summary.failing} == {
        ("warned", first),
        ("refused", second),
    }
    assert not summary.ok
    assert replace(summary, failing=summary.failing[:1]).ok == (summary.failing[0].severity == "WARN")


def test_how_far_the_plan_of_each_set_was_off_is_said_at_the_end(two_sets, monkeypatch):
    """A set that was planned by itself is compared with its own run."""
    compared = ForecastAndRun(
        at=0.0, properties=9, devices=1, predicted=60.0, low=50.0, high=70.0, actual=64.0
    )
    monkeypatch.setattr(
        run_module,
        "compare_with_run",
        lambda settings: compared if settings.descriptions.name == "property_condition" else None,
    )
    console = Console(file=io.StringIO(), width=200)
    dagster = with_backfills()
    _follow(
        Backfill(FalteringApi(dagster), dagster, two_sets.settings, []),
        lambda: None,
        Patience(console, lambda _: None),
    )
    assert f"property_condition: {compared.sentence()}" in console.file.getvalue()


def test_a_backfill_is_followed_no_longer_than_dagster_lives(dataset):
    """What was started ends: that is said, and nobody waits for ever."""
    dataset.descriptions.path(dataset.keys[0]).unlink()

    def ended(seconds):
        raise ProcessEndedError("webserver ended with exit code 1.")

    dagster = Faltering()
    work = Backfill(FalteringApi(dagster), dagster, dataset.settings, dataset.keys)
    with pytest.raises(ProcessEndedError):
        _follow(work, lambda: None, Patience(Console(file=io.StringIO()), ended))


def test_a_dagster_of_another_process_is_waited_for_as_long_as_it_runs(tmp_path):
    """Restarted, it is asked where it is now; ended, a person reads what to do."""
    api = DagsterApi("http://127.0.0.1:9", tmp_path)
    with only_dagster(tmp_path, wait_seconds=0.0):
        note_address(tmp_path, "http://127.0.0.1:10")
        _wait_for(api, 0.0)
    assert api.url == "http://127.0.0.1:10"
    with pytest.raises(DagsterApiError, match=r"has ended.*kept.*vlm-assets serve"):
        _wait_for(api, 0.0)
