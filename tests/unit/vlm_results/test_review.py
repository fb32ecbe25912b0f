"""Verdicts of a review: each is kept at once, none is lost or torn, and they give each field's accuracy."""

import json
import signal
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from functools import partial

import pytest
from PIL import Image
from starlette.testclient import TestClient
from typer.testing import CliRunner

from faults.file_operations import FileOperations
from vlm_assets.assets.truth import REVIEWS, TruthError, read_truth, verdicts
from vlm_assets.commands.main import app
from vlm_assets.config.settings import load_settings
from vlm_assets.services.command_error import CommandError
from vlm_catalog.catalog import Catalog
from vlm_catalog.ingest import ingest
from vlm_durable.files.lock_files import acquire_lock
from vlm_durable.files.sealed_json import FormatVersionError
from vlm_results import review, review_page
from vlm_results.quality import Quality, Suspicion
from vlm_results.review import (
    Reviewed,
    VerdictError,
    accuracy,
    append_verdict,
    draw_sample,
    forget_verdicts,
    published_answers,
    take_verdicts,
    verdict_of,
)
from vlm_training.training_data import training_samples
from vlm_training.training_plan import TrainingError
from vlm_training.variants import Variant

HOUSE = Reviewed("p1", "k", 1, "a", {"floors": 2, "has_pool": False, "kind": "villa"})
PUBLISHED = dict.fromkeys(("p1", "p2"), HOUSE.answers)


@pytest.fixture
def settings_with_images(tmp_path):
    """A home with one property, p1, that has an image."""
    (tmp_path / "images" / "p1").mkdir(parents=True)
    Image.new("RGB", (8, 8)).save(tmp_path / "images" / "p1" / "1.jpg")
    settings = load_settings(home=tmp_path / "home")
    ingest(tmp_path / "images", settings.home, close=True)
    return settings


APPEND = """
import sys
from pathlib import Path
from vlm_results.review import Reviewed, append_verdict, verdict_of
home, name = Path(sys.argv[1]), sys.argv[2]
for number in range(1_000_000):
    one = Reviewed(f"{name}-{number}", "k", number, "a", {"floors": 2})
    append_verdict(home, verdict_of(one, right=["floors"], wrong=[], corrections={}))
    print(f"{name}-{number}", flush=True)
"""


def say(home, property_id="p1", right=(), wrong=(), **corrections):
    house = Reviewed(property_id, "k", 1, HOUSE.answer, HOUSE.description)
    append_verdict(home, verdict_of(house, right=right, wrong=wrong, corrections=corrections))


def test_the_latest_verdict_counts_and_earlier_ones_stay(tmp_path):
    """A second thought replaces the first in every figure; the file keeps both."""
    say(tmp_path, right=["floors", "kind"])
    say(tmp_path, right=["kind"], wrong=["floors"], floors=3)
    say(tmp_path, "p2", right=["floors"])
    assert {name: (one.share, one.total) for name, one in accuracy(tmp_path, PUBLISHED).fields.items()} == {
        "floors": (0.5, 2), "kind": (1.0, 1),
    }  # fmt: skip
    assert verdicts(tmp_path)["p1"].true_fields == {"kind": "villa", "floors": 3}
    assert len((tmp_path / REVIEWS).read_bytes().splitlines()) == 3


def test_what_was_judged_for_being_suspicious_does_not_count_as_drawn(tmp_path):
    """Suspicious answers are wrong more often than others: the accuracy of all would look too low."""
    say(tmp_path, right=["floors"])
    odd = replace(HOUSE, property_id="p2", why="In k, floors is 9.", weight=0.0, by_chance=False)
    append_verdict(tmp_path, verdict_of(odd, right=[], wrong=["floors"], corrections={}))
    assert accuracy(tmp_path, PUBLISHED).fields["floors"].total == 1
    assert verdicts(tmp_path)["p2"].wrong == ("floors",)


def test_a_verdict_counts_for_the_answer_that_it_was_given_for_and_for_no_other(dataset, monkeypatch):
    """A new model's accuracy has no verdicts on the old one's answers, though it says the same of some.

    They stay in the file. Nor does one count on an answer that was computed again and is another.
    """
    monkeypatch.setattr(review_page, "thumbnails", lambda _, uris, **__: [[None] * len(uris[0])])
    settings, catalog = dataset.settings, dataset.catalog
    drawn = draw_sample(settings, catalog, count=50, seed=4, suspicious=False)
    for one in drawn:
        append_verdict(settings.home, verdict_of(one, right=["floors"], wrong=[], corrections={}))

    def counted():
        found = accuracy(settings.home, published_answers(settings, catalog))
        return found.fields["floors"].total, found.replaced

    assert counted() == (len(drawn), 0)
    of_first = sum(one.key == dataset.keys[0] for one in drawn)
    dataset.describe(dataset.keys[0], settings="another model")
    assert counted() == (len(drawn) - of_first, of_first)
    page = TestClient(review_page.review_app(settings, catalog, drawn)).get("/property/0").json()
    assert page["marks"] == {"floors": "right"}
    (settings.home / REVIEWS).rename(settings.home / "aside")
    again = draw_sample(settings, catalog, count=50, seed=4, suspicious=False)
    (settings.home / "aside").rename(settings.home / REVIEWS)
    page = TestClient(review_page.review_app(settings, catalog, again))
    shown = [page.get(f"/property/{number}").json() for number in range(len(again))]
    assert [bool(one["marks"]) for one in shown] == [one.key != dataset.keys[0] for one in again]
    assert {one["reviewed"] for one in shown} == {len(drawn) - of_first}
    pool = {"floors": 2, "has_pool": True}
    dataset.describe(dataset.keys[2], lambda rows: [{**row, "description": pool} for row in rows])
    of_last = sum(one.key == dataset.keys[2] for one in drawn)
    assert counted() == (len(drawn) - of_first - of_last, of_first + of_last)
    assert len(verdicts(settings.home)) == len(drawn)


@pytest.mark.parametrize(
    ("right", "wrong", "corrections"),
    [(["garden"], [], {}), (["floors"], ["floors"], {}), (["floors"], [], {"floors": 3})],
)
def test_a_verdict_that_cannot_be_is_refused(right, wrong, corrections):
    """A field that is not there, right and wrong at once, or corrected though it is right."""
    with pytest.raises(VerdictError):
        verdict_of(HOUSE, right=right, wrong=wrong, corrections=corrections)


def test_what_two_killed_processes_were_told_is_kept_is_kept(tmp_path):
    """Two pages append at once and are killed: each verdict that was acknowledged is there, whole."""
    processes = [
        subprocess.Popen([sys.executable, "-c", APPEND, tmp_path, name], stdout=subprocess.PIPE, text=True)
        for name in ("a", "b")
    ]
    said = [[process.stdout.readline().strip() for _ in range(20)] for process in processes]
    for process, told in zip(processes, said, strict=True):
        process.send_signal(signal.SIGKILL)
        told += [line.strip() for line in process.stdout if line.endswith("\n")]
        process.wait()
    assert {one for told in said for one in told} <= verdicts(tmp_path).keys()


def test_a_torn_line_spoils_no_other(tmp_path):
    """What a power cut left of a line was not acknowledged: it is cut off, and the next one is whole."""
    say(tmp_path)
    with (tmp_path / REVIEWS).open("ab") as file:
        file.write(b'{"property_id": "p9", "at"')
    assert verdicts(tmp_path).keys() == {"p1"}
    say(tmp_path, "p2")
    assert verdicts(tmp_path).keys() == {"p1", "p2"}
    for line in (tmp_path / REVIEWS).read_text().splitlines():
        json.loads(line)


def test_the_name_of_the_file_is_durable_with_each_verdict(tmp_path):
    """Who made the file may have been killed before its name was durable: the next verdict makes it so."""
    (tmp_path / REVIEWS).touch()
    with FileOperations(tmp_path).watched() as operations:
        say(tmp_path)
    done = [str(one) for one in operations.log]
    written = done.index(f"write {REVIEWS}")
    assert written < done.index(f"fsync {REVIEWS}") < done.index("fsync_directory .", written)


def test_a_line_that_does_not_read_is_named(tmp_path):
    """Nothing unreadable counts as nothing: a person is told which line."""
    say(tmp_path)
    with (tmp_path / REVIEWS).open("ab") as file:
        file.write(b"not JSON\n")
    with pytest.raises(TruthError, match="line 2"):
        accuracy(tmp_path, PUBLISHED)


def test_a_file_of_the_previous_format_is_read_and_one_of_a_newer_one_is_refused(tmp_path):
    """What is right of a property stays known, but which answer was judged is not: it gives no accuracy.

    What a newer version says is not guessed at.
    """
    say(tmp_path, right=["kind"])
    path = tmp_path / REVIEWS
    said = json.loads(path.read_bytes())
    assert (said.pop("format"), said.pop("answer")) == (2, "a")
    path.write_text(json.dumps({**said, "format": 1, "fingerprint": "f"}) + "\n")
    assert read_truth(path) == {"p1": {"kind": "villa"}}
    assert accuracy(tmp_path, PUBLISHED).replaced == 1
    path.write_text(json.dumps({**said, "format": 3}) + "\n")
    with pytest.raises(FormatVersionError, match="has format 3 and this version reads 2"):
        verdicts(tmp_path)


def test_verdicts_on_withdrawn_properties_are_removed(tmp_path):
    """Nothing that was said of a withdrawn property stays; what is said of others does."""
    say(tmp_path, "p1", right=["kind"])
    say(tmp_path, "p2", right=["kind"])
    say(tmp_path, "p1", wrong=["kind"])
    assert forget_verdicts(tmp_path, {"p1"}) == 2
    assert verdicts(tmp_path).keys() == {"p2"}
    assert b"p1" not in (tmp_path / REVIEWS).read_bytes()
    assert [path for path in tmp_path.rglob("*") if path.is_file() and b"p1" in path.read_bytes()] == []


def test_no_verdict_on_a_withdrawn_property_is_kept(dataset, tmp_path, monkeypatch):
    """Neither of a page that was open before the withdrawal, nor of a file that is taken over beside it."""
    settings, catalog = dataset.settings, dataset.catalog
    kept, path = settings.home / REVIEWS, tmp_path / "verdicts.jsonl"
    drawn = {
        reviewed.property_id: reviewed
        for reviewed in draw_sample(settings, catalog, count=50, seed=1, suspicious=False)
    }
    lines = [
        {"property_id": name, "answer": drawn[name].answer, "description": {"floors": 2}}
        for name in ("p0", "p5", "p8")
    ]
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    page = TestClient(review_page.review_app(settings, catalog, [drawn["p5"]]))

    def append_beside(home, verdict):
        if verdict.property_id == "p5":
            dataset.withdraw("p5")
        append_verdict(home, verdict)

    with monkeypatch.context() as beside:
        beside.setattr(review, "append_verdict", append_beside)
        with pytest.raises(CommandError, match=r"was withdrawn, .* do it again for the others"):
            take_verdicts(settings, catalog, path)
    answer = page.post("/verdict/0", json={"right": ["floors"], "wrong": [], "corrections": {}})
    assert (answer.status_code, "The property was withdrawn" in answer.text) == (500, True)
    take_verdicts(settings, dataset.catalog, path)
    assert verdicts(settings.home).keys() == {"p0", "p8"}
    assert b"p5" not in kept.read_bytes()


def test_a_stopped_process_with_the_lock_is_named_and_waited_for_no_longer(
    tmp_path, settings_with_images, monkeypatch
):
    """Neither a verdict nor a withdrawal waits without end; the page says so, and nothing is changed."""
    monkeypatch.setattr(review, "_LOCK_SECONDS", 0.2)
    home = settings_with_images.home
    say(home)
    sample = [replace(HOUSE, property_id="p1")]
    page = TestClient(review_page.review_app(settings_with_images, Catalog.open(home), sample))
    before = (home / REVIEWS).read_bytes()
    judged = {"right": [], "wrong": [], "corrections": {}}
    lock = acquire_lock(home / ".state" / "review.lock")
    try:
        with pytest.raises(CommandError, match=r"review\.jsonl is in use by a process"):
            say(home, "p2")
        with pytest.raises(CommandError, match=r"`fuser .*review\.lock` names it"):
            forget_verdicts(home, {"p1"})
        answer = page.post("/verdict/0", json=judged)
        assert (answer.status_code, "`fuser " in answer.text) == (500, True)
    finally:
        lock.close()
    assert (home / REVIEWS).read_bytes() == before
    assert page.post("/verdict/0", json={"right": [], "wrong": [], "corrections": {}}).json() == {
        "kept": True
    }


def test_the_sample_is_drawn_of_what_is_published_and_the_same_again(dataset):
    """Ok rows of published partitions, each once; the same seed draws the same."""
    drawn = draw_sample(dataset.settings, dataset.catalog, count=50, seed=4, suspicious=False)
    ids = [one.property_id for one in drawn]
    assert len(set(ids)) == len(ids) > 3
    assert "p4" not in ids, "it could not be described"
    assert drawn == draw_sample(dataset.settings, dataset.catalog, count=50, seed=4, suspicious=False)


def test_each_description_is_drawn_with_the_same_chance_however_many_of_its_partition_failed(dataset):
    """All drawn rows go into an exact test: a partition of few described ones must not count for more."""
    alone, *others = dataset.keys
    dataset.describe(alone, lambda rows: [rows[0], *({**row, "status": "failed"} for row in rows[1:])])
    drawn = Counter(
        one.key
        for seed in range(40)
        for one in draw_sample(dataset.settings, dataset.catalog, count=2, seed=seed, suspicious=False)
    )
    total = len(draw_sample(dataset.settings, dataset.catalog, count=50, seed=1, suspicious=False))
    assert set(drawn) == {alone, *others}
    assert drawn[alone] < 1.4 * 80 / total


def test_what_chance_drew_is_not_drawn_again_though_it_was_described_anew(dataset):
    """A model that learned from verdicts would be judged by what it learned. What was chosen may be drawn.

    Chosen properties are wrong more often: without them all others would look too good.
    """
    draw = partial(draw_sample, dataset.settings, dataset.catalog, seed=4, suspicious=False)
    first, *rest = draw(count=50)
    append_verdict(dataset.settings.home, verdict_of(first, right=["floors"], wrong=[], corrections={}))
    chosen = replace(rest[0], why="It is odd.", weight=0.0, by_chance=False)
    append_verdict(dataset.settings.home, verdict_of(chosen, right=["floors"], wrong=[], corrections={}))
    for key in dataset.keys:
        dataset.describe(key, settings="another model")
    assert {one.property_id for one in draw(count=50)} == {one.property_id for one in rest}
    for one in rest:
        append_verdict(dataset.settings.home, verdict_of(one, right=["floors"], wrong=[], corrections={}))
    with pytest.raises(CommandError, match="nothing left to draw"):
        draw(count=50)


def test_what_chance_drew_counts_though_it_is_suspicious(dataset, monkeypatch):
    """Were wrong answers left out for being odd, the rest would look better than it is."""
    draw = partial(draw_sample, dataset.settings, dataset.catalog, count=4, seed=4)
    drawn = draw(suspicious=False)
    known = {one.property_id for one in drawn}
    other = next(id_ for id_ in (f"p{n}" for n in range(9)) if id_ not in {*known, "p4"})
    odd = Suspicion("alike", "floors", "It is odd.", examples=(drawn[0].property_id, other))
    monkeypatch.setattr(review, "assess_quality", lambda *_: Quality((), {}, 0, {}, (odd,), ()))
    found = draw(suspicious=True)
    assert [(one.property_id, one.why) for one in found[:1]] == [(other, "It is odd.")]
    assert found[1:] == drawn[: len(found) - 1]


def test_a_line_that_does_not_read_is_said_before_a_person_begins_and_on_the_page(dataset, monkeypatch):
    """Nobody judges where nothing can be shown: they read which line to put right, no bare server error."""
    sample = draw_sample(dataset.settings, dataset.catalog, count=2, seed=4, suspicious=False)
    page = TestClient(review_page.review_app(dataset.settings, dataset.catalog, sample))
    say(dataset.settings.home)
    with (dataset.settings.home / REVIEWS).open("ab") as file:
        file.write(b"not JSON\n")
    answer = page.get("/property/0")
    assert answer.status_code == 500
    assert "line 2 does not read" in answer.text
    monkeypatch.setattr(review_page, "serve_page", pytest.fail)
    done = CliRunner().invoke(app, ["review", "--home", str(dataset.settings.home)])
    assert isinstance(done.exception, TruthError)


def test_training_reads_a_review_as_everything_else_does(settings_with_images):
    """The last verdict counts, a torn line is none, and what a newer version says is not guessed at."""
    home = settings_with_images.home
    variant = Variant(base="example", data="review", steps=1)
    say(home, "p1", right=["floors"])
    say(home, "p1", right=["kind"], wrong=["floors"])
    path = home / REVIEWS
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"property_id": "p1", "at"')
    (sample,), _ = training_samples(settings_with_images, variant)
    assert sample.target == {"kind": "villa"}
    assert read_truth(path) == {"p1": {"kind": "villa"}}
    path.write_bytes(whole.replace(b'"format": 2', b'"format": 3'))
    with pytest.raises(TrainingError, match="has format 3"):
        training_samples(settings_with_images, variant)
