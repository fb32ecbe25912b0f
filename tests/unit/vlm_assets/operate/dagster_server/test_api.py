"""What a person reads of the Dagster that is to see new ranges."""

import httpx2
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
        raise httpx2.RemoteProtocolError("peer closed connection without sending complete message body")

    monkeypatch.setattr(httpx2, "post", breaks_off)
    with pytest.raises(api.DagsterUnreachableError):
        api.DagsterApi("http://127.0.0.1:1").ask("{}")
