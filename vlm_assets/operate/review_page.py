"""The page of a review: images beside the answer, and a verdict on each field by keyboard. Loopback only.

Everything that is shown is set as text, never as markup, and images are made small in a worker. ``review.py``
draws the sample and keeps the verdicts.
"""

from __future__ import annotations

import contextlib
import json
from base64 import b64encode
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from resources.storage.sealed_json import FormatVersionError
from vlm_assets.assets.truth import TruthError, verdicts
from vlm_assets.catalog.catalog import Catalog
from vlm_assets.config.settings import Settings
from vlm_assets.operate.dagster_server.server import serve_page
from vlm_assets.operate.html_page import thumbnails
from vlm_assets.operate.review import (
    Reviewed,
    VerdictError,
    accuracy,
    draw_sample,
    keep,
    published_answers,
    verdict_of,
)
from vlm_assets.operate.terminal import AsJson, Home, Port, app, chosen_settings, say, say_as_json

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response

_HEIGHT = 260
_LARGEST_VERDICT = 1 << 20
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'unsafe-inline'; img-src data:; connect-src 'self';"
    " base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)

_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>Review</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<style>
:root { color-scheme: light dark }
body { font: 15px/1.5 system-ui, sans-serif; margin: 1.2rem auto; max-width: 80rem; padding: 0 1rem }
h1 { font-size: 1.15rem; margin: 0 0 .2rem; overflow-wrap: anywhere }
.note { opacity: .65; margin: 0 0 .8rem }
main { display: grid; grid-template-columns: 1fr minmax(22rem, 28rem); gap: 1.2rem; align-items: start }
@media (max-width: 60rem) { main { grid-template-columns: 1fr } }
#images { display: flex; flex-wrap: wrap; gap: 5px }
#images img, .gone { height: 150px; border-radius: 3px } .gone { width: 150px; background: #8884 }
table { border-collapse: collapse; width: 100% } td { padding: .2rem .6rem; vertical-align: top }
td:first-child { opacity: .7; white-space: nowrap } td:last-child { width: 4rem; text-align: right }
tr.at { outline: 2px solid #4a90d9 } tr.right { background: #2e9e5b33 } tr.wrong { background: #d55e0033 }
kbd { border: 1px solid #8886; border-radius: 3px; padding: 0 .35em; font-size: .85em }
#accuracy { margin-top: 1.2rem; opacity: .75; font-size: .9em } [role=alert] { color: #d55e00 }
</style></head><body>
<h1 id="title">…</h1><p class="note" id="note"></p><p role="alert" id="trouble"></p>
<main><div id="images"></div><div><table id="fields"></table>
<p><kbd>↑</kbd> <kbd>↓</kbd> field, <kbd>r</kbd> right, <kbd>w</kbd> wrong,
<kbd>c</kbd> wrong, and what is right, <kbd>a</kbd> all others right,
<kbd>Enter</kbd> keep and go on, <kbd>s</kbd> skip, <kbd>b</kbd> back</p>
<div id="accuracy"></div></div></main>
<script src="/review.js"></script></body></html>
"""

_SCRIPT = """
"use strict";
const at = name => document.getElementById(name);
let number = 0, shown = null, field = 0, marks = {}, corrections = {};

async function ask(path, body) {
  const answer = await fetch(path, body === undefined ? {} : {
    method: "POST", headers: {"content-type": "application/json"}, body: JSON.stringify(body)});
  if (!answer.ok) throw new Error(await answer.text());
  return answer.json();
}
function element(name, text, kind) {
  const made = document.createElement(name);
  if (text !== undefined) made.textContent = text;
  if (kind) made.className = kind;
  return made;
}
function draw() {
  at("title").textContent = shown.property_id;
  at("note").textContent = `${shown.number + 1} of ${shown.of}, ${shown.reviewed} reviewed` +
    (shown.why ? `. ${shown.why}` : "");
  at("images").replaceChildren(...shown.images.map(one => {
    if (one === null) return element("div", "", "gone");
    const image = element("img"); image.src = one; image.alt = ""; return image; }));
  at("fields").replaceChildren(...shown.fields.map(([name, value], row) => {
    const line = element("tr", undefined, [marks[name] || "", row === field ? "at" : ""].join(" "));
    const said = name in corrections ? `${value} → ${corrections[name]}` : value;
    line.append(element("td", name), element("td", said), element("td", marks[name] || ""));
    line.addEventListener("click", () => { field = row; draw(); });
    return line; }));
  at("accuracy").textContent = shown.accuracy.join(" · ");
}
async function show(wanted) {
  shown = await ask(`/property/${wanted}`);
  number = shown.number; field = 0; marks = shown.marks; corrections = shown.corrections;
  draw();
}
function mark(kind) {
  const name = shown.fields[field][0];
  marks[name] = kind; delete corrections[name];
  field = Math.min(field + 1, shown.fields.length - 1);
}
async function press(key) {
  if (!shown) return;
  if (key === "ArrowDown") field = Math.min(field + 1, shown.fields.length - 1);
  else if (key === "ArrowUp") field = Math.max(field - 1, 0);
  else if (key === "r") mark("right");
  else if (key === "w") mark("wrong");
  else if (key === "a") shown.fields.forEach(([name]) => { marks[name] = marks[name] || "right"; });
  else if (key === "c") {
    const name = shown.fields[field][0], said = window.prompt(`What is right for ${name}?`);
    if (said !== null) { mark("wrong"); corrections[name] = said; }
  }
  else if (key === "s") return show(Math.min(number + 1, shown.of - 1));
  else if (key === "b") return show(Math.max(number - 1, 0));
  else if (key === "Enter") {
    const of = kind => Object.keys(marks).filter(name => marks[name] === kind);
    await ask(`/verdict/${number}`, {right: of("right"), wrong: of("wrong"), corrections});
    return show(Math.min(number + 1, shown.of - 1));
  }
  draw();
}
document.addEventListener("keydown", event => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  if (["ArrowDown", "ArrowUp", "Enter"].includes(event.key)) event.preventDefault();
  press(event.key).then(() => { at("trouble").textContent = ""; },
    error => { at("trouble").textContent = error.message; });
});
show(0).catch(error => { at("trouble").textContent = error.message; });
"""


def review_app(settings: Settings, catalog: Catalog, sample: Sequence[Reviewed]) -> Starlette:
    """The page and what it asks: ``/property/N``, and ``/verdict/N`` by POST. N: of the sample, from 0."""
    from starlette.applications import Starlette
    from starlette.concurrency import run_in_threadpool
    from starlette.responses import JSONResponse, PlainTextResponse, Response
    from starlette.routing import Route

    headers = {"content-security-policy": _POLICY, "cache-control": "no-store"}
    answers = {**published_answers(settings, catalog), **{one.property_id: one.answer for one in sample}}

    def at(request: Request) -> int | None:
        number: int = request.path_params["number"]
        return number if number < len(sample) else None

    async def page(request: Request) -> Response:
        return Response(_PAGE, media_type="text/html", headers=headers)

    async def script(request: Request) -> Response:
        return Response(_SCRIPT, media_type="text/javascript", headers=headers)

    async def shown(request: Request) -> Response:
        number = at(request)
        if number is None:
            return PlainTextResponse("There is no such property in the sample.", 404)
        try:
            found = await run_in_threadpool(_shown, settings, catalog, sample, number, answers)
        except (TruthError, FormatVersionError, OSError) as error:
            return PlainTextResponse(str(error), 500)
        return JSONResponse(found, headers=headers)

    async def judged(request: Request) -> Response:
        number = at(request)
        body = await _body(request)
        if number is None or body is None:
            return PlainTextResponse("This is no verdict on a property of the sample.", 400)
        try:
            one = sample[number]
            verdict = verdict_of(
                one, right=body["right"], wrong=body["wrong"], corrections=_typed(one, body["corrections"])
            )
            await run_in_threadpool(keep, settings.home, verdict)
        except (VerdictError, KeyError, TypeError, AttributeError) as error:
            return PlainTextResponse(f"This is no verdict: {error}", 400)
        except OSError as error:
            return PlainTextResponse(f"The verdict is not kept: {error}", 500)
        return JSONResponse({"kept": True})

    return Starlette(
        routes=[
            Route("/", page),
            Route("/review.js", script),
            Route("/property/{number:int}", shown),
            Route("/verdict/{number:int}", judged, methods=["POST"]),
        ]
    )


async def _body(request: Request) -> dict[str, Any] | None:
    data = bytearray()
    async for part in request.stream():
        data += part
        if len(data) > _LARGEST_VERDICT:
            return None
    with contextlib.suppress(ValueError):
        body = json.loads(data)
        return body if isinstance(body, dict) else None
    return None


def _shown(
    settings: Settings,
    catalog: Catalog,
    sample: Sequence[Reviewed],
    number: int,
    answers: Mapping[str, str],
) -> dict[str, object]:
    one = sample[number]
    known = {name: said for name, said in verdicts(settings.home).items() if said.answer == answers.get(name)}
    before = known.get(one.property_id)
    row = catalog.find(one.property_id)
    images = [] if row is None else thumbnails(catalog, [row.image_uris], height=_HEIGHT)[0]
    marks: dict[str, str] = {}
    if before is not None:
        marks = dict.fromkeys(before.right, "right") | dict.fromkeys(before.wrong, "wrong")
    return {
        "number": number,
        "of": len(sample),
        "reviewed": sum(each.property_id in known for each in sample),
        "property_id": one.property_id,
        "why": one.why,
        "images": [image and f"data:image/jpeg;base64,{b64encode(image).decode()}" for image in images],
        "fields": [[name, _said(value)] for name, value in one.description.items()],
        "marks": marks,
        "corrections": {}
        if before is None
        else {name: _said(before.known[name]) for name in before.wrong if name in before.known},
        "accuracy": [
            f"{name} {share.sentence()} of {share.of}"
            for name, share in accuracy(settings.home, answers).fields.items()
        ],
    }


def _said(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def _typed(one: Reviewed, corrections: dict[str, str]) -> dict[str, Any]:
    """What was typed, as the kind of value that the answer has: true, 3 or null are no texts there."""
    typed: dict[str, Any] = {}
    for name, said in corrections.items():
        typed[name] = said
        if not isinstance(one.description.get(name), str):
            with contextlib.suppress(ValueError):
                typed[name] = json.loads(said)
    return typed


_EXAMPLES = """\b
vlm-assets review --sample 200
vlm-assets review --sample 100 --suspicious
vlm-assets review --json                  what was found right so far"""


@app.command("review", epilog=_EXAMPLES)
def review_command(
    home: Home = None,
    sample: Annotated[int, typer.Option(min=1, max=10_000, help="Properties to look at, at most.")] = 200,
    seed: Annotated[int, typer.Option(help="Draws the sample; the same seed draws the same.")] = 1,
    suspicious: Annotated[
        bool, typer.Option("--suspicious", help="Those first that dataset_quality finds odd.")
    ] = False,
    port: Port = 3200,
    as_json: AsJson = False,
) -> None:
    """Mark fields of a sample right or wrong, on a page in a browser.

    You mark fields by keyboard; verdicts are kept in HOME/review.jsonl.
    With --json: no page, but how often each field is right so far, with a 95% interval. A verdict counts as
    long as the answer that it was given for is the published one.
    """
    current = chosen_settings(home)
    catalog = Catalog.open(current.home)
    # A line that does not read is said before a person begins.
    right = accuracy(current.home, published_answers(current, catalog))
    if as_json:
        say_as_json({name: asdict(share) for name, share in right.fields.items()})
        return
    drawn = draw_sample(current, catalog, count=sample, seed=seed, suspicious=suspicious)

    def ready(address: str) -> None:
        say(f"{len(drawn)} properties: {address} (Ctrl-C ends it; each verdict is kept at once)")

    page = review_app(current, catalog, drawn)
    serve_page(page, allowed_hosts=current.hosts, port=port, ready=ready)
    right = accuracy(current.home, published_answers(current, catalog))
    for name, share in right.fields.items():
        say(f"{name}: right in {share.sentence()} of {share.of}")
    if right.note:
        say(right.note)
