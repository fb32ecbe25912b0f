"""vlm_assets/commands/intake.py: the example comes from a checkout, and goes into a home of its own."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.support.command_line import run_command
from tests.support.listings import write_listing
from vlm_assets.assets.fingerprint import Meanings
from vlm_assets.commands import intake
from vlm_assets.commands.main import app
from vlm_assets.config.settings import load_settings
from vlm_assets.services.status import read_status
from vlm_catalog.catalog import Catalog
from vlm_catalog.ingest import IngestBusyError, ingest, only_ingest


@pytest.mark.parametrize("words", [["demo"], ["demo", "--no-run"]])
def test_an_installed_package_says_that_the_example_needs_a_checkout(words, monkeypatch, tmp_path):
    """A wheel has no examples folder: a sentence says so, and what to do; nothing is made."""
    monkeypatch.setattr(intake, "_FOLDER", tmp_path / "nothing")
    monkeypatch.setenv("VLM_ASSETS_HOME", str(tmp_path / "home"))
    with pytest.raises(intake.CommandError, match=r"part of a checkout.*VLM_ASSETS_SOURCE"):
        CliRunner().invoke(app, words, catch_exceptions=False)
    assert not (tmp_path / "home").exists()


def test_the_example_is_found_from_any_working_directory(tmp_path):
    """`examples` is not installed, so the command looks for it beside the package."""
    program = "from vlm_assets.commands.main import main; main()"
    command = [sys.executable, "-c", program, "demo", "--no-run", "--properties", "2"]
    environment = {**os.environ, "VLM_ASSETS_HOME": str(tmp_path / "home"), "PYTHONSAFEPATH": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert [len(one) for one in Catalog.open(tmp_path / "home").ranges] == [2]


def test_the_example_does_not_mix_with_own_properties(tmp_path):
    """A home that describes a person's images gets no rendered ones, and keeps no trace of the attempt."""
    ingest(write_listing(tmp_path / "list.jsonl", {"p": ["p.jpg"]}), tmp_path / "home")
    with pytest.raises(intake.CommandError, match="--home DIR"):
        run_command(tmp_path / "home", "demo", "--no-run")
    assert not (tmp_path / "home" / "example").exists()


def test_an_ingest_as_json(tmp_path) -> None:
    """Counts and partitions are values, and what a person would read is there as sentences."""
    listing = write_listing(tmp_path / "listing.jsonl", {f"p{n}": ["a.jpg"] for n in range(5)})
    done = run_command(tmp_path / "home", "ingest", str(listing), "--range-size", "2", "--json")
    told = json.loads(done.stdout)
    assert (told["new"], told["rows"], told["waiting"]) == (5, 5, 1)
    assert told["new_ranges"] == ["000000000-000000001", "000000002-000000003"]
    assert any("new partitions" in sentence for sentence in told["sentences"])
    assert "name the partition size with which" in told["sentences"][-1]


@pytest.fixture
def update(dataset, tmp_path, monkeypatch):
    """The words of an update of a published home: the images of one of its nine properties are new."""
    monkeypatch.setenv("VLM_ASSETS_MODEL", "example")
    (tmp_path / "new.jpg").write_bytes(b"not a picture, but there")
    listing = write_listing(tmp_path / "an update.jsonl", {"p7": ["new.jpg"]})
    return ["ingest", str(listing), "--home", str(dataset.settings.home), "--update"]


def images_of(dataset) -> tuple[str, ...]:
    return dataset.catalog.find("p7").image_uris


def test_an_update_says_what_it_costs_before_it_changes_anything(dataset, update) -> None:
    """Without a terminal it is refused with the whole command, which does it and leaves what was said."""
    before = dataset.catalog.path.read_bytes()
    refused = CliRunner().invoke(app, update)
    assert refused.exit_code == 1
    for sentence in (
        "1 partition is stale, made with other settings or images than now. To be made anew: ",
        "What changed: images of ",
        "at the measured rate",
        "The old answers stay readable",
    ):
        assert sentence in refused.output
    assert dataset.catalog.path.read_bytes() == before
    (suggested,) = re.findall(r"Nothing was changed. To do it: `vlm-assets (.*)`\.", refused.output)
    done = CliRunner().invoke(app, shlex.split(suggested), catch_exceptions=False)
    assert done.exit_code == 0
    assert done.output.index("1 partition is stale") < done.output.index("The catalogue now holds")
    assert images_of(dataset) == ("new.jpg",)
    status = read_status(dataset.settings, dataset.catalog)
    assert all(sentence in refused.output for sentence in status.stale.sentences()), "what status says then"
    again = CliRunner().invoke(app, update)
    assert (again.exit_code, "stale" in again.output) == (0, False), "nothing is left to take"


@pytest.mark.parametrize("answer", [False, True])
def test_an_update_is_asked_about_on_a_terminal(dataset, update, monkeypatch, answer: bool) -> None:
    """A no changes nothing, and another ingest may begin at once."""
    asked: list[str] = []

    def agreed(question: str, yes: bool) -> bool:
        asked.append(question)
        return answer

    monkeypatch.setattr(intake, "agreed", agreed)
    done = CliRunner().invoke(app, update)
    assert asked == ["Take them, so that 1 partition is stale?"]
    assert done.exit_code == (0 if answer else 1)
    assert images_of(dataset) == (("new.jpg",) if answer else ("7.jpg",))
    with only_ingest(dataset.settings.home, "another one"):
        pass


def test_an_update_beside_another_schema_tells_both_apart(dataset, update, monkeypatch) -> None:
    """All is stale by the schema already, so taking the images makes no partition stale that is not."""
    made_with = Meanings.from_settings(dataset.settings).of_asset(dataset.settings.descriptions.name)
    for key in dataset.keys:
        dataset.describe(key, settings="t", parts=made_with.parts)
    asked: list[str] = []
    monkeypatch.setattr(intake, "agreed", lambda question, yes: asked.append(question) or True)
    monkeypatch.setenv("VLM_ASSETS_DESCRIPTION_SCHEMA", "tests.support.sure_answers:House")
    done = CliRunner().invoke(app, update, catch_exceptions=False)
    assert asked == ["Take them?"]
    for sentence in (
        "1 partition is stale, made with other settings or images than now. To be made anew: 3 properties.",
        "What changed: schema: ",
        "What changed: images of 3 properties.",
        "Without these images 1 partition is stale too, by the settings: `vlm-assets status ",
    ):
        assert sentence in done.output
    other = load_settings(home=dataset.settings.home, model="example")
    work = read_status(other, Catalog.open(other.home)).stale
    assert (work.keys, work.properties) == (tuple(dataset.keys), 9)
    assert "What changed: images of 3 properties." in work.sentences()


@pytest.mark.parametrize("changes", [False, True])
def test_nobody_waits_for_the_one_who_is_asked(dataset, update, tmp_path, monkeypatch, changes: bool) -> None:
    """While a person thinks, another ingest may run. Then what was agreed to is of a former catalogue."""
    other = write_listing(tmp_path / "other.jsonl", {"p99" if changes else "p1": ["1.jpg"]})
    root = dataset.catalog.images.path

    def agreed(question: str, yes: bool) -> bool:
        ingest(other, dataset.settings.home, image_root=Path(root))
        return True

    monkeypatch.setattr(intake, "agreed", agreed)
    done = CliRunner().invoke(app, update)
    assert (type(done.exception) is IngestBusyError) is changes
    assert images_of(dataset) == (("7.jpg",) if changes else ("new.jpg",))
    assert dataset.catalog.rows == (10 if changes else 9)


def test_an_update_as_json_is_never_done_unasked(dataset, update) -> None:
    """A program says yes beforehand, and reads the cost among what is said."""
    with pytest.raises(intake.CommandError, match=r"1 partition is stale.*--json --yes`") as refused:
        CliRunner().invoke(app, [*update, "--json"], catch_exceptions=False)
    assert "Nothing was changed" in str(refused.value)
    assert images_of(dataset) == ("7.jpg",)
    done = CliRunner().invoke(app, [*update, "--json", "--yes"], catch_exceptions=False)
    told = json.loads(done.stdout)
    assert told["stale_ranges"] == dataset.keys[2:]
    assert any("1 partition is stale" in sentence for sentence in told["sentences"])
