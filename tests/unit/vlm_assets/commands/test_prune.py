"""Prune takes what is needed no more, and nothing at all beside a partition that is not whole."""

from __future__ import annotations

import json

from typer.testing import CliRunner, Result

from vlm_assets.commands.main import app

FIRST, SECOND, THIRD = "000000000-000000002", "000000003-000000005", "000000006-000000008"


def test_prune_asks_before_it_removes(dataset, call):
    """Prune lists by kind with sizes; only --yes removes."""
    dataset.describe(FIRST, text="a villa")
    dataset.embed(FIRST)
    done = call("prune")
    assert done.exit_code == 0
    assert "2 x earlier version" in done.output
    assert dataset.copy_of(FIRST, 1).exists()
    assert call("prune", "--yes").exit_code == 0
    assert not dataset.copy_of(FIRST, 1).exists()
    assert "Nothing to prune" in call("prune").output


def test_prune_as_json_removes_nothing_without_a_yes(dataset, call):
    """A script reads what would go and how much that is."""
    dataset.describe(FIRST, text="a villa")
    dataset.embed(FIRST)
    told = json.loads(call("prune", "--json").stdout)
    assert [one["what"] for one in told["removals"]] == ["earlier version"] * 2
    assert told["bytes"] == sum(one["bytes"] for one in told["removals"]) > 0
    assert dataset.copy_of(FIRST, 1).exists()
    told = json.loads(call("prune", "--json", "--yes").stdout)
    assert told["done"] and len(told["sentences"]) >= 1
    assert not dataset.copy_of(FIRST, 1).exists()


def test_all_files_of_a_removed_set_are_deleted_when_a_person_says_so(two_sets, monkeypatch):
    """Not while settings name it, and not without a yes; all else stays, and the audit then says nothing."""
    home, name = two_sets.settings.home, "property_condition"

    def run(*words: str) -> Result:
        return CliRunner().invoke(app, [*words, "--home", str(home)])

    def files() -> dict[str, bytes]:
        return {str(path.relative_to(home)): path.read_bytes() for path in home.rglob("*.parquet")}

    before = files()
    monkeypatch.setenv("VLM_ASSETS_QUESTIONS", str(two_sets.settings.questions))
    refused = run("prune", "--set", "condition", "--yes")
    assert "Take the set condition out of the file of VLM_ASSETS_QUESTIONS first" in str(refused.exception)
    monkeypatch.delenv("VLM_ASSETS_QUESTIONS")
    (warning,) = json.loads(run("audit", "--json").stdout)["warnings"]
    assert f"`vlm-assets prune --set condition --home {home}`" in warning["next_step"]
    assert "Nothing was changed" in run("prune", "--set", "condition").output
    told = json.loads(run("prune", "--set", "condition", "--json").stdout)
    assert told == {"asset": name, "published": 2, "done": False, "sentences": []}
    assert files() == before
    assert run("prune", "--set", "condition", "--yes").exit_code == 0
    assert not [path for path in home.rglob("*") if name in path.parts]
    assert files() == {path: content for path, content in before.items() if name not in path}
    assert json.loads(run("audit", "--json").stdout)["warnings"] == []
    again = run("prune", "--set", "condition", "--yes")
    assert "There are no files of a question set 'condition'" in str(again.exception)
