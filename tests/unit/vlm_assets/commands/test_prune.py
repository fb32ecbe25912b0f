"""Prune takes what is needed no more, and nothing at all beside a partition that is not whole."""

from __future__ import annotations

import json

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
    assert told["done"] and len(told["said"]) >= 1
    assert not dataset.copy_of(FIRST, 1).exists()
