"""resources/engine/hub_pins.py: a push to a hub's branch changes nothing in a home that has begun."""

import pytest

from resources.engine.hub_pins import pinned_commit
from resources.engine.protocol import ModelLoadError
from resources.engine.transformers.model_loading import ModelSource, exact_revision

FIRST, SECOND = "1" * 40, "2" * 40


def never(name, revision):
    raise AssertionError("the hub was asked")


def test_a_branch_stays_what_it_was_at_first(tmp_path):
    """The hub is asked once a home; another branch, model or home has a commit of its own."""
    assert pinned_commit("owner/name", None, tmp_path, lambda *_: FIRST) == FIRST
    assert pinned_commit("owner/name", None, tmp_path, never) == FIRST
    assert pinned_commit("owner/name", "main", tmp_path, never) == FIRST
    assert pinned_commit("owner/name", "v2", tmp_path, lambda *_: SECOND) == SECOND
    assert pinned_commit("owner/other", None, tmp_path, lambda *_: SECOND) == SECOND


def test_a_commit_needs_no_hub(tmp_path):
    """A revision that is a commit is itself, online or not, and nothing is written."""
    assert pinned_commit("owner/name", FIRST, tmp_path / "records", never) == FIRST
    assert not (tmp_path / "records").exists()


def test_of_two_first_runs_one_decides(tmp_path):
    """A branch that moved between two first runs is one commit for both."""

    def overtaken(name, revision):
        pinned_commit(name, revision, tmp_path, lambda *_: FIRST)
        return SECOND

    assert pinned_commit("owner/name", None, tmp_path, overtaken) == FIRST


def test_a_damaged_note_stops_and_says_what_to_do(tmp_path):
    """Unreadable is not absent: the branch is not asked for again behind a person's back."""
    pinned_commit("owner/name", None, tmp_path, lambda *_: FIRST)
    (note,) = tmp_path.iterdir()
    note.write_bytes(note.read_bytes().replace(b"1" * 40, b"3" * 40))
    with pytest.raises(ModelLoadError, match="VLM_ASSETS_MODEL_REVISION"):
        pinned_commit("owner/name", None, tmp_path, never)


def test_a_source_with_records_is_pinned(tmp_path, monkeypatch):
    """What stands in rows and fingerprints is the pinned commit."""
    answers = iter([FIRST, SECOND])
    monkeypatch.setattr(
        "resources.engine.transformers.model_loading._hub_commit", lambda name, revision: next(answers)
    )
    source = ModelSource("owner/name", records=tmp_path)
    assert [exact_revision(source), exact_revision(source)] == [FIRST, FIRST]
