"""What ``run`` chooses and says before a launch, and how it shows a backfill and its end."""

import io

import pyarrow as pa
import pytest
from rich.console import Console
from typer.testing import CliRunner

from tests.support.backfills import LaunchedKeys, with_backfills
from tests.support.journals import open_journal
from vlm_assets.assets.fingerprint import Meaning, Meanings
from vlm_assets.commands import run as run_module
from vlm_assets.commands.main import app
from vlm_assets.commands.run import BackfillLines, show_end
from vlm_assets.services.backfill import Backfill, BackfillProgress, BackfillSummary
from vlm_assets.services.forecast import ForecastAndRun
from vlm_assets.services.status import read_status

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


def end_of(dataset) -> tuple[int, str]:
    """The exit code of `run`, and what it says at its end."""
    status = read_status(dataset.settings, dataset.catalog)
    summary = BackfillSummary(dataset.keys, status.keys_left(), ((), 0), status, [])
    console = Console(file=io.StringIO(), width=200)
    return show_end(console, dataset.settings, summary), console.file.getvalue()


def test_the_summary_counts_what_status_calls_complete(dataset) -> None:
    """A partition whose file is gone is not complete, whatever Dagster shows: the exit code says so."""
    code, said = end_of(dataset)
    count = len(dataset.keys)
    assert code == 0, said
    assert f"{count} of {count} partitions are complete." in said
    dataset.descriptions.path(dataset.keys[0]).unlink()
    code, said = end_of(dataset)
    assert code == 1
    assert f"{count - 1} of {count} partitions are complete." in said


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
    _, said = end_of(two_sets)
    assert f"property_condition: {compared.sentence()}" in said


def test_a_run_that_never_started_is_counted_beside_those_that_failed():
    """A busy machine let it wait in vain, and it is started again: the progress does not call it failed."""
    console = Console(file=io.StringIO(), width=100)
    now = BackfillProgress(frozenset("c"), frozenset(), frozenset("b"), 0, never_started=frozenset("a"))
    with BackfillLines(console).progress(3) as show:
        show(now)
    assert "1/3 partitions, 0 running, 1 failed, 1 not started;" in console.file.getvalue()
