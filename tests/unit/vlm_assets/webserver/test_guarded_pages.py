"""The guard: what reaches the pages behind it, header by header."""

import pytest
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route, WebSocketRoute
from starlette.testclient import TestClient
from starlette.websockets import WebSocketDisconnect

from vlm_assets.webserver.guarded_pages import WebGuard

OURS = "localhost:3000"
JSON = {"content-type": "application/json"}
LINK = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate", "sec-fetch-dest": "document"}


async def answer(request):
    return PlainTextResponse("reached")


async def answer_socket(socket):
    await socket.accept()
    await socket.send_text("reached")
    await socket.close()


@pytest.fixture
def client():
    app = Starlette(
        routes=[
            WebSocketRoute("/graphql", answer_socket),
            Route("/{path:path}", answer, methods=["GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS"]),
        ]
    )
    guarded = WebGuard(
        app, allowed_hosts=["Pages.Example"], posted=["/graphql"], with_header=["/report_asset_"]
    )
    return TestClient(guarded, follow_redirects=False)


def ask(client, method="GET", path="/runs", host=OURS, **headers):
    sent = {"host": host, **{name.replace("_", "-"): value for name, value in headers.items()}}
    return client.request(method, path, headers=sent)


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost", 200),
        ("LOCALHOST:3000", 200),
        ("localhost.:3000", 200),
        ("127.0.0.1:9", 200),
        ("127.8.9.10:3000", 200),
        ("[::1]:3000", 200),
        ("pages.example", 200),
        ("pages.example:8443", 200),
        ("evil.example", 403),
        ("localhost.evil.example", 403),
        ("evil.pages.example", 403),
        ("10.0.0.1:3000", 403),
        ("0.0.0.0:3000", 403),
        ("[::]:3000", 403),
        ("127.1", 403),
        ("localhost:3000@evil.example", 403),
        ("localhost, evil.example", 403),
        ("", 403),
    ],
)
def test_only_loopback_names_and_allowed_hosts_are_answered(client, host, status):
    """A site whose name resolves to 127.0.0.1 is no page of ours."""
    assert ask(client, host=host).status_code == status
    assert ask(client, "POST", "/graphql", host=host, **JSON).status_code == status


def test_two_hosts_are_none(client):
    """Nobody picks the header that suits the guard."""
    sent = [("host", OURS), ("host", "evil.example")]
    assert client.request("GET", "/runs", headers=sent).status_code == 403


FOREIGN = [
    "https://evil.example",
    "http://localhost:3001",
    "http://localhost",
    "http://127.0.0.1:3000",
    "http://localhost:3000.evil.example",
    "null",
    "file://",
    "",
]


@pytest.mark.parametrize("origin", FOREIGN)
def test_a_foreign_origin_is_refused(client, origin):
    """Neither another site, nor another port of this machine, nor a page without an origin."""
    assert ask(client, "POST", "/graphql", origin=origin, **JSON).status_code == 403
    assert ask(client, origin=origin).status_code == 403
    with (
        pytest.raises(WebSocketDisconnect),
        client.websocket_connect("/graphql", headers={"host": OURS, "origin": origin}),
    ):
        pass


def test_our_own_page_asks_and_subscribes(client):
    """The UI works, also behind a proxy that speaks TLS."""
    for origin in (f"http://{OURS}", f"https://{OURS}"):
        own = {"origin": origin, "sec_fetch_site": "same-origin", "sec_fetch_mode": "cors"}
        assert ask(client, "POST", "/graphql", **own, **JSON).text == "reached"
        with client.websocket_connect("/graphql", headers={"host": OURS, "origin": origin}) as socket:
            assert socket.receive_text() == "reached"


def test_a_program_without_a_browser_asks(client):
    """What our own commands send has neither Origin nor Sec-Fetch-Site."""
    assert ask(client, "POST", "/graphql", **JSON).text == "reached"
    assert ask(client).text == "reached"


@pytest.mark.parametrize("site", ["cross-site", "same-site"])
def test_another_site_may_link_to_a_page_and_nothing_else(client, site):
    """A link in a mail opens; an image, a frame, a script or a form of another site does not."""
    link = {name.replace("-", "_"): value for name, value in (LINK | {"sec-fetch-site": site}).items()}
    assert ask(client, **link).text == "reached"
    assert ask(client, **link | {"sec_fetch_dest": "iframe"}).status_code == 403
    assert ask(client, **link | {"sec_fetch_mode": "no-cors", "sec_fetch_dest": "image"}).status_code == 403
    assert ask(client, "POST", **link, **JSON).status_code == 403
    with (
        pytest.raises(WebSocketDisconnect),
        client.websocket_connect("/graphql", headers={"host": OURS, "sec-fetch-site": site}),
    ):
        pass


@pytest.mark.parametrize("method", ["GET", "HEAD", "OPTIONS", "PUT"])
@pytest.mark.parametrize("path", ["/graphql", "/graphql/", "/graphql?query=mutation{x}"])
def test_graphql_is_posted(client, method, path):
    """A link runs no mutation."""
    assert ask(client, method, path, **JSON).status_code == 405


@pytest.mark.parametrize(
    "media_type",
    ["text/plain", "application/graphql", "text/plain; application/json", "application/jsonp", ""],
)
@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE"])
def test_a_change_is_json(client, method, media_type):
    """A form of another site sends no JSON, and its script only after a preflight request."""
    path = "/graphql" if method == "POST" else "/else"
    assert ask(client, method, path, content_type=media_type).status_code == 415
    assert ask(client, method, path).status_code == 415
    assert ask(client, method, path, content_type="Application/JSON; charset=utf-8").text == "reached"


@pytest.mark.parametrize("kind", ["materialization", "check", "observation"])
def test_a_report_needs_our_header(client, kind):
    """Nobody reports an event of an asset by the way."""
    path = f"/report_asset_{kind}/property_descriptions"
    assert ask(client, "POST", path, **JSON).status_code == 403
    assert ask(client, "POST", path, x_vlm_assets="1", **JSON).text == "reached"


def test_no_preflight_request_is_granted(client):
    """A foreign script that asks whether it may send JSON is told no."""
    asked = {"origin": "https://evil.example", "access_control_request_method": "POST"}
    refused = ask(client, "OPTIONS", "/graphql", **asked)
    assert refused.status_code == 403
    assert not [name for name in refused.headers if name.startswith("access-control")]


def test_no_other_site_frames_a_page(client):
    """A click on something else is no click on a button of ours."""
    assert ask(client).headers["x-frame-options"] == "SAMEORIGIN"


def test_a_refusal_says_what_to_set(client):
    """A person behind a proxy reads which setting is missing."""
    assert "VLM_ASSETS_ALLOWED_HOSTS" in ask(client, host="box.example").text


def test_who_asks_for_no_page_is_led_to_the_first_one():
    """Dagster's own first page is an empty timeline on a new home. A foreign host is led nowhere."""
    app = Starlette(routes=[Route("/{path:path}", answer)])
    client = TestClient(WebGuard(app, first_page="/assets/progress"), follow_redirects=False)
    led = ask(client, path="/")
    assert (led.status_code, led.headers["location"]) == (302, "/assets/progress")
    assert led.headers["x-frame-options"] == "SAMEORIGIN"
    assert ask(client, path="/runs").status_code == 200
    assert ask(client, path="/", host="evil.example").status_code == 403
