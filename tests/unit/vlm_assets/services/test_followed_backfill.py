"""How a backfill is followed to its end: through outages, given up by Dagster, and when Dagster ends."""

import contextlib
import sqlite3
from unittest.mock import Mock

import pytest
from sqlalchemy.exc import OperationalError

from faults.rehearsal.dagster_in_memory import DagsterInMemory, SimulatedClock
from sensors.dagster_internals.runs import LaunchedBackfill
from tests.support.backfills import LaunchesOfAssets, of_assets, with_backfills
from vlm_assets.config.questions_file import QuestionsFile
from vlm_assets.services import followed_backfill
from vlm_assets.services.backfill import Backfill
from vlm_assets.services.command_error import CommandError
from vlm_assets.services.followed_backfill import Patience, follow, watch_from_outside
from vlm_assets.webserver.api import (
    CodeLocationError,
    DagsterApi,
    DagsterApiError,
    DagsterUnreachableError,
)
from vlm_assets.webserver.home import note_address, only_dagster
from vlm_assets.webserver.process_group import ProcessEndedError

ASSETS = ("property_descriptions", "property_embeddings")


class Sentences:
    """Shows a backfill to nobody, and keeps what it would show."""

    def __init__(self):
        self.said = []
        self.warned = []
        self.shown = []

    def say(self, sentence):
        self.said.append(sentence)

    def warn(self, sentence):
        self.warned.append(sentence)

    @contextlib.contextmanager
    def progress(self, partitions):
        yield self.shown.append


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
    monkeypatch.setattr(followed_backfill, "_watch", lambda work, patience: dagster.backfills.clear())
    monkeypatch.setattr(followed_backfill, "summarize", lambda work: None)
    api.launched.clear()
    follow(backfill, Patience(Sentences(), lambda _: None))
    assert api.launched == [
        (("property_tall",), [first]),
        (("property_tall",), [first]),
        ((*ASSETS, "property_tall"), [second]),
    ]


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
    view, waited = Sentences(), []
    work = Backfill(api, dagster, dataset.settings, dataset.keys)
    summary = follow(work, Patience(view, waited.append))
    assert api.launched == [[dataset.keys[0]]]
    assert not summary.ok, "its file is still gone"
    assert len(view.warned) == view.said.count("There are answers again.") == 3, "once an outage"
    for sentence in view.warned:
        assert sentence.endswith("refused. Runs go on meanwhile; asking again until there is an answer.")
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
    view, waited = Sentences(), []
    question = Mock(side_effect=[error, error, "an answer"])
    assert Patience(view, waited.append).ask(question) == "an answer"
    assert len(waited) == 2
    (said,) = view.warned
    assert "gave no answer: database is locked. Runs" in said or "refused the connection. Runs" in said
    assert "SELECT" not in said


def test_a_database_that_no_wait_mends_ends_the_command_with_a_sentence():
    """Tables of another version stay what they are."""
    for error in from_database("no such table: runs", sqlite3.SQLITE_ERROR):
        with pytest.raises(CommandError, match=r"no such table: runs\. .*dagster instance migrate"):
            Patience(Sentences(), pytest.fail).ask(Mock(side_effect=error))


@pytest.mark.parametrize(("times", "launches"), [(0, 1), (1, 2), (99, 5)])
def test_a_backfill_that_dagster_gave_up_is_launched_again(dataset, times, launches):
    """New ranges are run though Dagster's daemon reads them late; not for ever, and a person reads why."""
    dataset.descriptions.path(dataset.keys[0]).unlink()
    dagster = with_backfills()
    api = FalteringApi(dagster, times)
    view = Sentences()
    follow(Backfill(api, dagster, dataset.settings, dataset.keys), Patience(view, lambda _: None))
    assert api.launched == [[dataset.keys[0]]] * launches
    why = "Dagster gave up backfill b1: Targeted partitions have been removed"
    assert view.warned == [why] * min(times, launches)


def test_a_backfill_that_waits_for_definitions_which_do_not_load_says_so(dataset):
    """Dagster launches nothing of it meanwhile, and a person reads why, in one line."""
    dataset.descriptions.path(dataset.keys[0]).unlink()
    dagster = of_assets({ASSETS[0]: [dataset.keys[0]], ASSETS[1]: [dataset.keys[0]]})
    api, view = LaunchesOfAssets(), Sentences()
    trouble = CodeLocationError("The definitions do not load: the catalogue cannot be read\nStack trace")
    api.definitions_loaded = Mock(side_effect=[trouble, trouble, True])

    def end_when_loaded(seconds):
        if api.definitions_loaded.call_count == 3:
            dagster.backfills[:] = []

    follow(Backfill(api, dagster, dataset.settings, dataset.keys), Patience(view, end_when_loaded))
    (warned,) = view.warned
    assert warned.startswith("The definitions do not load: the catalogue cannot be read. Runs go on")
    assert "There are answers again." in view.said


def test_a_backfill_is_followed_no_longer_than_dagster_lives(dataset):
    """What was started ends: that is said, and nobody waits for ever."""
    dataset.descriptions.path(dataset.keys[0]).unlink()

    def ended(seconds):
        raise ProcessEndedError("webserver ended with exit code 1.")

    dagster = Faltering()
    work = Backfill(FalteringApi(dagster), dagster, dataset.settings, dataset.keys)
    with pytest.raises(ProcessEndedError):
        follow(work, Patience(Sentences(), ended))


def test_a_dagster_of_another_process_is_waited_for_as_long_as_it_runs(tmp_path):
    """Restarted, it is asked where it is now; ended, a person reads what to do."""
    api = DagsterApi("http://127.0.0.1:9", tmp_path)
    with only_dagster(tmp_path, wait_seconds=0.0):
        note_address(tmp_path, "http://127.0.0.1:10")
        watch_from_outside(api, 0.0)
    assert api.url == "http://127.0.0.1:10"
    with pytest.raises(DagsterApiError, match=r"has ended.*kept.*vlm-assets serve"):
        watch_from_outside(api, 0.0)
