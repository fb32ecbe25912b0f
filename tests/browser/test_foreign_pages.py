"""Pages of another origin, and requests of a program, against the Dagster that we serve."""

from __future__ import annotations

import json
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator

import dagster as dg
import pytest
from playwright.sync_api import Browser, Page, expect

from tests.support.http_stub import serving
from vlm_assets.config.resource_settings import build_resources
from vlm_assets.config.settings import load_settings

LAUNCHED_BY_THE_DAEMON = {"dagster/schedule_name", "dagster/sensor_name"}
ATTEMPTS = """async ([base, mutation]) => {
    const text = JSON.stringify({query: mutation});
    const asked = base + "/graphql?query=" + encodeURIComponent(mutation);
    const report = base + "/report_asset_materialization/property_catalog";
    const post = {method: "POST", body: text};
    const form = kind => Object.assign({mode: "no-cors", headers: {"Content-Type": kind}}, post);
    const frame = (attributes) => new Promise(done => {
        const one = document.createElement("iframe");
        Object.entries(attributes).forEach(([name, value]) => one.setAttribute(name, value));
        one.onload = () => done("loaded");
        document.body.append(one);
    });
    const sandboxed = () => new Promise(done => {
        window.addEventListener("message", event => done(event.data), {once: true});
        const options = {headers: {"Content-Type": "application/json"}, ...post};
        const asking = `fetch(${JSON.stringify(base + "/graphql")}, ${JSON.stringify(options)})`;
        const told = text => `() => parent.postMessage(${JSON.stringify(text)}, "*")`;
        const script = `${asking}.then(${told("answered")}, ${told("refused")})`;
        frame({srcdoc: `<script>${script}</scr` + "ipt>", sandbox: "allow-scripts allow-forms"});
    });
    const image = () => new Promise(done => {
        const one = new Image();
        one.onload = () => done("loaded");
        one.onerror = () => done("refused");
        one.src = asked;
    });
    const socket = () => new Promise(done => {
        const one = new WebSocket(base.replace("http", "ws") + "/graphql", "graphql-ws");
        one.onopen = () => done("open");
        one.onerror = () => done("refused");
    });
    const tries = {
        beacon: async () => navigator.sendBeacon(asked, text),
        json: () => fetch(base + "/graphql", {...post, headers: {"Content-Type": "application/json"}}),
        text: () => fetch(base + "/graphql", form("text/plain")),
        disguised: () => fetch(base + "/graphql", form("text/plain; application/json")),
        get: () => fetch(asked, {mode: "no-cors"}),
        post: () => fetch(asked, {mode: "no-cors", method: "POST"}),
        report: () => fetch(report, {mode: "no-cors", method: "POST"}),
        frame: () => frame({src: asked}),
        sandboxed: sandboxed,
        image: image,
        socket: socket,
    };
    const said = {};
    for (const [name, attempt] of Object.entries(tries)) {
        try {
            const answer = await attempt();
            said[name] = answer instanceof Response ? `${answer.type} ${answer.status}` : String(answer);
        } catch (error) {
            said[name] = "refused";
        }
    }
    return said;
}"""


@pytest.fixture
def mutation(desk) -> str:
    """Asks for a backfill, which would show."""
    return (
        'mutation{launchPartitionBackfill(backfillParams:{assetSelection:[{path:["property_descriptions"]}],'
        f'partitionNames:["{desk.keys[0]}"],title:"not asked for"}}){{__typename}}}}'
    )


@pytest.fixture
def nothing_happened(desk) -> Iterator[None]:
    """After the test there is no backfill, run or event that was not there before.

    The daemon may launch runs meanwhile: those that name their schedule or sensor are its own.
    """

    def traces(instance: dg.DagsterInstance) -> tuple[set[str], set[str], int]:
        catalog = instance.fetch_materializations(dg.AssetKey("property_catalog"), limit=100)
        launched = {run.run_id for run in instance.get_runs() if not LAUNCHED_BY_THE_DAEMON & run.tags.keys()}
        return {one.backfill_id for one in instance.get_backfills()}, launched, len(catalog.records)

    with dg.DagsterInstance.from_config(str(desk.home / "dagster")) as instance:
        before = traces(instance)
        yield
        assert traces(instance) == before


@pytest.fixture
def foreign_page(browser: Browser) -> Iterator[Page]:
    """A page of http://evil.example, whose name resolves to this machine for every port, Dagster's too."""
    with serving(lambda request: request.respond(200, b"<body>Kittens</body>", kind="text/html")) as port:
        page = browser.new_page()
        page.goto(f"http://evil.example:{port}/")
        yield page
        page.close()


@pytest.mark.usefixtures("nothing_happened")
def test_a_page_of_another_origin_changes_nothing_and_reads_nothing(
    desk, mutation, foreign_page: Page
) -> None:
    """A web site in the operator's browser launches nothing, under no name of this machine."""
    port = desk.server.address.rpartition(":")[2]
    for host in ("127.0.0.1", "localhost", "evil.example"):
        said = foreign_page.evaluate(ATTEMPTS, [f"http://{host}:{port}", mutation])
        refused = {said[name] for name in ("json", "sandboxed", "image", "socket")}
        assert refused == {"refused"}, said
        # An opaque answer tells nothing; that it did nothing is what the fixture looks at.
        assert all(said[name] == "opaque 0" for name in ("text", "disguised", "get", "post", "report")), said


@pytest.mark.usefixtures("nothing_happened")
def test_a_site_that_takes_our_address_is_not_answered(desk, mutation, foreign_page: Page) -> None:
    """DNS rebinding: the browser holds the foreign page and ours for one origin."""
    port = desk.server.address.rpartition(":")[2]
    opened = foreign_page.goto(f"http://evil.example:{port}/runs")
    assert opened is not None
    assert opened.status == 403
    said = foreign_page.evaluate(ATTEMPTS, [f"http://evil.example:{port}", mutation])
    assert {said["json"], said["text"], said["get"]} == {"basic 403"}
    assert said["socket"] == "refused"


@pytest.mark.usefixtures("nothing_happened")
def test_a_link_of_another_site_opens_a_page_and_runs_no_mutation(desk, mutation, foreign_page: Page) -> None:
    """A person opens an alert's link in a mail; a link to GraphQL is refused."""
    link = "target => { const one = document.createElement('a'); one.href = target; one.click(); }"
    with foreign_page.expect_navigation() as opened:
        foreign_page.evaluate(link, f"{desk.server.address}/graphql?query={mutation}")
    assert opened.value.status == 405
    foreign_page.go_back()
    foreign_page.evaluate(link, f"{desk.server.address}/assets")
    expect(foreign_page.get_by_role("link", name="property_embeddings").first).to_be_visible()
    # That page is ours: it may subscribe to what it shows.
    subscribe = """() => new Promise(done => {
        const one = new WebSocket(location.origin.replace("http", "ws") + "/graphql", "graphql-ws");
        one.onopen = () => done("open");
        one.onerror = () => done("refused");
    })"""
    assert foreign_page.evaluate(subscribe) == "open"


def ask(desk, path: str, body: object = None, **headers: str) -> tuple[int, dict]:
    """What the pages answer a program: status and JSON."""
    sent = {"Content-Type": "application/json"} if body is not None else {}
    request = urllib.request.Request(
        desk.server.address + path,
        data=None if body is None else json.dumps(body).encode(),
        headers=sent | {name.replace("_", "-"): value for name, value in headers.items()},
    )
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, {}


@pytest.mark.usefixtures("nothing_happened")
def test_what_curl_did_is_refused(desk, mutation) -> None:
    """The requests of the trial: a foreign Host, a foreign Origin, GET, other content types, reports."""
    asked, host = {"query": mutation}, "evil.example"
    assert ask(desk, "/graphql", asked, Host=host)[0] == 403
    assert ask(desk, "/graphql", asked, Origin=f"https://{host}")[0] == 403
    assert ask(desk, f"/graphql?query={urllib.parse.quote(mutation)}")[0] == 405
    assert ask(desk, "/graphql", asked, Content_Type="text/plain")[0] == 415
    assert ask(desk, f"/graphql?query={urllib.parse.quote(mutation)}", {}, Content_Type="a/b")[0] == 415
    for kind in ("materialization", "check", "observation"):
        assert ask(desk, f"/report_asset_{kind}/property_catalog", {})[0] == 403
    assert ask(desk, "/server_info")[0] == 200


def test_a_report_with_our_header_is_taken(desk) -> None:
    """A program of the operator's own still reports events."""
    path = "/report_asset_observation/property_catalog"
    assert ask(desk, path, {"metadata": {"seen": 1}}, X_Vlm_Assets="1")[0] == 200


@pytest.mark.usefixtures("nothing_happened")
def test_a_launch_that_sets_a_resource_is_refused(desk) -> None:
    """launchRun with any field of any resource in its run config launches nothing."""
    launch = (
        "mutation($p: ExecutionParams!){launchRun(executionParams: $p){__typename"
        " ...on RunConfigValidationInvalid{errors{message}} ...on PythonError{message}}}"
    )
    selector = {
        "repositoryLocationName": "vlm_assets",
        "repositoryName": "__repository__",
        "jobName": "failed_partitions",
        "assetSelection": [{"path": ["property_descriptions"]}],
    }
    tags = [{"key": "dagster/partition", "value": desk.keys[0]}]
    for key, resource in build_resources(load_settings(home=desk.home)).items():
        config = {name: str(value) for name, value in vars(resource).items()}
        params = {
            "selector": selector,
            "runConfigData": {"resources": {key: {"config": config}}},
            "executionMetadata": {"tags": tags},
        }
        status, answer = ask(desk, "/graphql", {"query": launch, "variables": {"p": params}})
        assert status == 200
        refused = answer["data"]["launchRun"]
        assert refused["__typename"] == "RunConfigValidationInvalid", refused
        assert all(f"resources:{key}:config" in one["message"] for one in refused["errors"])
