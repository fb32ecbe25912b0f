"""vlm_assets/commands/intake.py: the example comes from a checkout, and goes into a home of its own."""

import json
import os
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from vlm_assets.catalog.catalog import Catalog
from vlm_assets.catalog.ingest import ingest
from vlm_assets.commands import intake
from vlm_assets.commands.main import app


@pytest.mark.parametrize("command", ["example", "demo"])
def test_an_installed_package_says_that_the_example_needs_a_checkout(command, monkeypatch, tmp_path):
    """A wheel has no examples folder: a sentence says so, and what to do; nothing is made."""
    monkeypatch.setattr(intake, "_FOLDER", tmp_path / "nothing")
    monkeypatch.setenv("VLM_ASSETS_HOME", str(tmp_path / "home"))
    with pytest.raises(intake.CommandError, match=r"part of a checkout.*VLM_ASSETS_SOURCE"):
        CliRunner().invoke(app, [command], catch_exceptions=False)
    assert not (tmp_path / "home").exists()


def test_the_example_is_found_from_any_working_directory(tmp_path):
    """`examples` is not installed, so the command looks for it beside the package."""
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            "from vlm_assets.commands.main import main; main()",
            "example",
            "--properties",
            "2",
        ],
        cwd=tmp_path,
        env={**os.environ, "VLM_ASSETS_HOME": str(tmp_path / "home"), "PYTHONSAFEPATH": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert [len(one) for one in Catalog.open(tmp_path / "home").ranges] == [2]


def test_the_example_does_not_mix_with_own_properties(tmp_path):
    """A home that describes a person's images gets no rendered ones, and keeps no trace of the attempt."""
    (tmp_path / "list.jsonl").write_text('{"property_id": "p", "images": ["p.jpg"]}\n')
    ingest(tmp_path / "list.jsonl", tmp_path / "home")
    with pytest.raises(intake.CommandError, match="--home DIR"):
        CliRunner().invoke(app, ["example", "--home", str(tmp_path / "home")], catch_exceptions=False)
    assert not (tmp_path / "home" / "example").exists()


def test_an_ingest_as_json(tmp_path) -> None:
    """Counts and partitions are values, and what a person would read is there as sentences."""
    listing = tmp_path / "listing.jsonl"
    listing.write_text(
        "".join(json.dumps({"property_id": f"p{n}", "images": ["a.jpg"]}) + "\n" for n in range(5))
    )
    arguments = ["ingest", str(listing), "--home", str(tmp_path / "home"), "--range-size", "2", "--json"]
    told = json.loads(CliRunner().invoke(app, arguments, catch_exceptions=False).stdout)
    assert (told["new"], told["rows"], told["waiting"]) == (5, 5, 1)
    assert told["new_ranges"] == ["000000000-000000001", "000000002-000000003"]
    assert any("new partitions" in sentence for sentence in told["said"])
    assert "name the --range-size with which" in told["said"][-1]
