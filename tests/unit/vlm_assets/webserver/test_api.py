"""What a command asks of a Dagster: of its own home's alone, and what a person reads where that fails."""

import contextlib
import socket
import threading

import httpx2
import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.responses import JSONResponse, PlainTextResponse
from starlette.routing import Route

from vlm_assets.webserver import api
from vlm_assets.webserver.guarded_pages import WebGuard
from vlm_assets.webserver.home import home_id, only_dagster


@pytest.fixture
def dagster_homes(tmp_path):
    """Two Dagster homes, each of which ran once."""
    homes = tmp_path / "ours", tmp_path / "other"
    for dagster_home in homes:
        dagster_home.mkdir()
        with only_dagster(dagster_home, wait_seconds=0.0):
            pass
    return homes


@contextlib.contextmanager
def pages(app):
    """The address of an application that is served until the block ends."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        server = uvicorn.Server(uvicorn.Config(app, log_level="error"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
        thread.start()
        try:
            yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join()


def dagster_pages(asked):
    """An application that answers like Dagster's pages, and notes what it is asked to do."""

    async def server_info(request):
        return JSONResponse({"dagster_version": "1.13.27"})

    async def graphql(request):
        asked.append(await request.json())
        return JSONResponse({"data": {"reached": True}})

    return Starlette(
        routes=[Route("/server_info", server_info), Route("/graphql", graphql, methods=["POST"])]
    )


def test_the_dagster_of_this_home_is_asked(dagster_homes):
    """The id of the home is the same for who serves and who asks, and after a restart."""
    asked = []
    ours, _ = dagster_homes
    guarded = WebGuard(dagster_pages(asked), home_id=home_id(ours))
    with only_dagster(ours, wait_seconds=0.0), pages(guarded) as address:
        assert api.DagsterApi(address, ours).ask("{reached}") == {"reached": True}
    assert len(asked) == 1


@pytest.mark.parametrize("has_guard", [True, False])
def test_the_dagster_of_another_home_is_asked_nothing(dagster_homes, has_guard):
    """A backfill of this home never goes into another home's database, whoever took the port."""
    asked = []
    ours, other = dagster_homes
    app = dagster_pages(asked)
    with pages(WebGuard(app, home_id=home_id(other)) if has_guard else app) as address:
        with pytest.raises(api.OtherHomeError, match=r"Nothing was asked.*--port"):
            api.DagsterApi(address, ours).ask("mutation{launch}")
        assert asked == []


def test_pages_refuse_a_command_of_another_home(dagster_homes):
    """The server looks too: a port may change hands between a command's question and its request."""
    asked = []
    ours, other = dagster_homes
    with pages(WebGuard(dagster_pages(asked), home_id=home_id(other))) as address:
        sent = {api.HOME_HEADER: home_id(ours)}
        answer = httpx2.post(f"{address}/graphql", json={}, headers=sent, trust_env=False)
    assert answer.status_code == 421
    assert asked == []


POSTGRES_AWAY = (
    "(psycopg2.OperationalError) connection refused\n\tIs the server running?\n(Background on this)"
)


@pytest.mark.parametrize(
    ("status", "answer"),
    [
        (500, JSONResponse({"error": POSTGRES_AWAY})),
        (500, PlainTextResponse("Internal Server Error")),
        (200, PlainTextResponse("<html>")),
        (200, JSONResponse(["not", "an", "answer"])),
        (200, JSONResponse({"errors": [{"message": POSTGRES_AWAY}, {"message": POSTGRES_AWAY}]})),
        (
            200,
            JSONResponse(
                {"data": {"reloadWorkspace": {"__typename": "PythonError", "message": POSTGRES_AWAY}}}
            ),
        ),
    ],
)
def test_a_dagster_that_cannot_answer_this_time_says_so_in_one_line(dagster_homes, status, answer):
    """Its database is away: no traceback and no JSON for a person, and whoever follows asks again."""
    ours, _ = dagster_homes
    answer.status_code = status

    async def says(request):
        return answer

    app = Starlette(routes=[Route("/{path:path}", says, methods=["GET", "POST"])])
    guarded = WebGuard(app, home_id=home_id(ours))
    with pages(guarded) as address, pytest.raises(api.DagsterUnreachableError) as raised:
        api.DagsterApi(address, ours).reload_definitions()
    assert "\n" not in str(raised.value)
    assert "Background" not in str(raised.value)


def test_a_request_that_dagster_refuses_is_not_asked_again(dagster_homes):
    """It would be refused for ever."""
    ours, _ = dagster_homes
    refusing = WebGuard(dagster_pages([]), home_id=home_id(ours), with_header=["/graphql"])
    with pages(refusing) as address, pytest.raises(api.DagsterApiError, match="X-Vlm-Assets") as raised:
        api.DagsterApi(address, ours).ask("{}")
    assert not isinstance(raised.value, api.DagsterUnreachableError)


def test_a_dagster_that_does_not_answer_is_told_in_sentences(monkeypatch, dagster_homes):
    """Dagster's own reason, and then what to do, each a sentence."""
    monkeypatch.setattr(api, "running_address", lambda _: "http://127.0.0.1:1")
    said = api.reload_running(dagster_homes[0])
    assert "did not take the new ranges: Dagster does not answer" in said
    assert said.endswith(". Try Deployment > Reload there.")


def test_an_answer_that_breaks_off_is_a_dagster_that_does_not_answer(monkeypatch, dagster_homes):
    """Pages that are restarted in the middle of an answer end no backfill that somebody follows."""

    def breaks_off(*_, **__):
        raise httpx2.RemoteProtocolError("peer closed connection without sending complete message body")

    monkeypatch.setattr(httpx2.Client, "get", breaks_off)
    with pytest.raises(api.DagsterUnreachableError):
        api.DagsterApi("http://127.0.0.1:1", dagster_homes[0]).ask("{}")
