"""The commands audit, repair and prune: what a person reads, what a script gets, nothing without a yes."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner, Result

from vlm_assets.cli.main import app

FIRST, SECOND = "000000000-000000002", "000000003-000000005"


@pytest.fixture
def call(dataset, monkeypatch: pytest.MonkeyPatch):
    """Runs a command on the home, as a script does: there is no terminal to ask on."""
    monkeypatch.setenv("VLM_ASSETS_HOME", str(dataset.settings.home))
    monkeypatch.setenv("VLM_ASSETS_DEVICES", "cpu:1")

    def run(*arguments: str) -> Result:
        return CliRunner().invoke(app, list(arguments), catch_exceptions=False)

    return run


def test_exit_codes_of_the_audit(dataset, call):
    """0 for a sound dataset, also an unfinished one; 1 as soon as anything is wrong."""
    assert call("audit").exit_code == 0
    dataset.descriptions.path(FIRST).unlink()
    done = call("audit")
    assert done.exit_code == 1
    assert FIRST in done.output and "missing" in done.output
    assert "vlm-assets repair" in done.output


def test_audit_as_json(dataset, call):
    """What a script reads is JSON and nothing else, whatever the verdict."""
    dataset.copy_of(FIRST).unlink()
    done = call("audit", "--json", "--deep")
    assert done.exit_code == 1
    assert json.loads(done.stdout)["deep"] is True


def test_repair_asks_before_it_changes_anything(dataset, call):
    """Without a terminal and without --yes it lists, changes nothing and ends with 1."""
    dataset.descriptions.path(FIRST).unlink()
    done = call("repair")
    assert done.exit_code == 1
    assert "restore" in done.output and "--yes" in done.output
    assert not dataset.descriptions.path(FIRST).exists()


def test_repair_restores_at_once(dataset, call):
    """With --yes a damaged file is back, and there is nothing left to repair."""
    dataset.descriptions.path(FIRST).write_bytes(b"")
    done = call("repair", "--yes")
    assert done.exit_code == 0, done.output
    assert call("audit", "--deep").exit_code == 0
    assert "Nothing to repair" in call("repair").output


def test_repair_without_dagster_names_the_commands(dataset, call):
    """What must be computed where no Dagster runs is not silently left: the commands are shown, and 1."""
    dataset.descriptions.path(FIRST).unlink()
    dataset.copy_of(FIRST).unlink()
    done = call("repair", "--yes")
    assert done.exit_code == 1
    assert "dagster asset materialize" in done.output
    assert '"recompute": true' in done.output


def test_one_repair_that_fails_does_not_stop_the_others(dataset, call):
    """A partition that cannot be put right is named, and the next one is put right all the same."""
    for key in (FIRST, SECOND):
        dataset.descriptions.path(key).unlink()
    first = dataset.descriptions.path(FIRST)
    # A folder under the file's name: it cannot be replaced, and it is nobody's to remove.
    first.mkdir()
    done = call("repair", "--yes")
    assert done.exit_code == 1
    assert FIRST in done.output
    assert dataset.descriptions.path(SECOND).is_file()
    assert first.is_dir()


def test_prune_asks_before_it_removes(dataset, call):
    """Prune lists by kind with sizes; only --yes removes."""
    dataset.describe(FIRST, text="a villa")
    dataset.embed(FIRST)
    done = call("prune")
    assert done.exit_code == 1
    assert "2 x earlier version" in done.output
    assert dataset.copy_of(FIRST, 1).exists()
    assert call("prune", "--yes").exit_code == 0
    assert not dataset.copy_of(FIRST, 1).exists()
    assert "Nothing to prune" in call("prune").output


def test_a_home_without_a_catalogue(tmp_path, call):
    """There is nothing to audit without a catalogue, and the message says how to make one."""
    from vlm_assets.catalog.catalog import CatalogMissingError

    for command in ("audit", "repair", "prune"):
        with pytest.raises(CatalogMissingError, match="vlm-assets ingest"):
            call(command, "--home", str(tmp_path / "nothing"))
