"""``vlm-assets repair``: nothing is changed without a yes."""

from __future__ import annotations

import json

FIRST, SECOND = "000000000-000000002", "000000003-000000005"


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


def test_repair_as_json_changes_nothing_without_a_yes(dataset, call):
    """A script reads what is wrong and what would be done; with --yes it reads what was done."""
    dataset.descriptions.path(FIRST).unlink()
    done = call("repair", "--json")
    told = json.loads(done.stdout)
    assert (done.exit_code, told["right"], told["done"], told["said"]) == (1, False, False, [])
    assert [(one["key"], one["way"]) for one in told["repairs"]] == [(FIRST, "RESTORE")]
    assert not dataset.descriptions.path(FIRST).exists()
    done = call("repair", "--json", "--yes")
    assert (done.exit_code, json.loads(done.stdout)["right"]) == (0, True)
    assert dataset.descriptions.path(FIRST).exists()
    done = call("repair", "--json")
    assert (done.exit_code, json.loads(done.stdout)["repairs"]) == (0, [])
