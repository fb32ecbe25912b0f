"""A backup holds what the home holds, is brought up to date by what is new, and is never restored half."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def old_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was written a moment ago is trusted not to change within its own second."""
    monkeypatch.setattr("vlm_durable.files.seen_files._SETTLED_NS", 0)


def test_the_commands_say_what_is_in_it_and_what_is_restored(dataset, call, tmp_path) -> None:
    """Both end with a sentence; a refusal is one too."""
    made = call("backup", str(tmp_path / "backup"))
    assert made.exit_code == 0
    assert "the catalogue of 9 properties, 6 published files" in made.output
    done = call("restore", str(tmp_path / "backup"), "--home", str(tmp_path / "copy"))
    assert done.exit_code == 0, done.output
    assert "each as it was backed up" in done.output
