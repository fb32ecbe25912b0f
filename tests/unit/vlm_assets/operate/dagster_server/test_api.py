"""What a person reads of the Dagster that is to see new ranges."""

import http.client
import urllib.request

import pytest

from vlm_assets.operate.dagster_server import api


def test_a_dagster_that_does_not_answer_is_told_in_sentences(monkeypatch, tmp_path):
    """Dagster's own reason, and then what to do, each a sentence."""
    monkeypatch.setattr(api, "running_address", lambda _: "http://127.0.0.1:1")
    said = api.reload_running(tmp_path)
    assert "did not take the new ranges: Dagster does not answer" in said
    assert said.endswith(". Try Deployment > Reload there.")


def test_an_answer_that_breaks_off_is_a_dagster_that_does_not_answer(monkeypatch):
    """Pages that are restarted in the middle of an answer end no backfill that somebody follows."""

    def breaks_off(*_, **__):
        raise http.client.IncompleteRead(b"")

    monkeypatch.setattr(urllib.request.OpenerDirector, "open", breaks_off)
    with pytest.raises(api.DagsterUnreachableError):
        api.DagsterApi("http://127.0.0.1:1").ask("{}")
