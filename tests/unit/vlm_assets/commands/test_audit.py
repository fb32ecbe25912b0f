"""The audit finds every kind of wrongness, names it, and is silent about a dataset that is whole."""

from __future__ import annotations

import json

import pytest

FIRST, SECOND, THIRD = "000000000-000000002", "000000003-000000005", "000000006-000000008"


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


def test_a_home_without_a_catalogue(tmp_path, call):
    """There is nothing to audit without a catalogue, and the message says how to make one."""
    from vlm_catalog.catalog import CatalogMissingError

    for command in ("audit", "repair", "prune"):
        with pytest.raises(CatalogMissingError, match="vlm-assets ingest"):
            call(command, "--home", str(tmp_path / "nothing"))
