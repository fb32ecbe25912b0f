"""The page of a review: images beside the answer, a verdict on each field. Loopback only.

The page shows everything as text, never as markup, and images are made small in a worker. ``review.py``
draws the sample and keeps the verdicts.
"""

from __future__ import annotations

import contextlib
import json
from base64 import b64encode
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from pydantic import BaseModel

from vlm_assets.assets.shown_confidence import BANDS, LEGEND, shown_confidence
from vlm_assets.assets.truth import REVIEWS, TruthError, verdicts
from vlm_assets.commands.html_page import thumbnails
from vlm_assets.commands.terminal import AsJson, Home, Port, app, chosen_settings, say, say_as_json
from vlm_assets.config.settings import Settings
from vlm_assets.services.command_error import CommandError
from vlm_assets.webserver.server import serve_page
from vlm_catalog.catalog import Catalog, CatalogError
from vlm_durable.files.sealed_json import FormatVersionError
from vlm_durable.wording import counted
from vlm_results.certification import certify_published
from vlm_results.review import (
    PublishedAnswers,
    Reviewed,
    VerdictError,
    accuracy,
    append_verdict,
    draw_sample,
    draw_unsure,
    judged_fields,
    published_answers,
    take_verdicts,
    typed_fields,
    verdict_of,
)

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response

_HERE = Path(__file__).parent
_HEIGHT = 260
_LARGEST_VERDICT = 1 << 20
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'unsafe-inline'; img-src data:; connect-src 'self';"
    " base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


def review_app(settings: Settings, catalog: Catalog, sample: Sequence[Reviewed]) -> Starlette:
    """The page and its requests: ``/property/N``, and ``/verdict/N`` by POST. N counts from 0."""
    from starlette.applications import Starlette
    from starlette.concurrency import run_in_threadpool
    from starlette.responses import FileResponse, JSONResponse, PlainTextResponse
    from starlette.routing import Route

    headers = {"content-security-policy": _POLICY, "cache-control": "no-store"}
    answers = published_answers(settings, catalog)
    answers |= {reviewed.property_id: reviewed.answers for reviewed in sample}

    def number_of(request: Request) -> int | None:
        number: int = request.path_params["number"]
        return number if number < len(sample) else None

    async def page(request: Request) -> Response:
        return FileResponse(_HERE / "review.html", headers=headers)

    async def script(request: Request) -> Response:
        return FileResponse(_HERE / "review.js", headers=headers)

    async def shown(request: Request) -> Response:
        number = number_of(request)
        if number is None:
            return PlainTextResponse("There is no such property in the sample.", 404)
        try:
            content = await run_in_threadpool(_page_content, settings, catalog, sample, number, answers)
        except (TruthError, FormatVersionError, OSError) as error:
            return PlainTextResponse(str(error), 500)
        return JSONResponse(content, headers=headers)

    async def judged(request: Request) -> Response:
        number = number_of(request)
        body = await _body(request)
        if number is None or body is None:
            return PlainTextResponse("This is no verdict on a property of the sample.", 400)
        try:
            reviewed = sample[number]
            corrections = typed_fields(reviewed, body.corrections)
            verdict = verdict_of(reviewed, right=body.right, wrong=body.wrong, corrections=corrections)
            await run_in_threadpool(append_verdict, settings.home, verdict)
        except VerdictError as error:
            return PlainTextResponse(f"This is no verdict: {error}", 400)
        except (CommandError, CatalogError, OSError) as error:
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


class _Judged(BaseModel):
    right: list[str]
    wrong: list[str]
    corrections: dict[str, str]


async def _body(request: Request) -> _Judged | None:
    data = bytearray()
    async for part in request.stream():
        data += part
        if len(data) > _LARGEST_VERDICT:
            return None
    with contextlib.suppress(ValueError):
        return _Judged.model_validate_json(bytes(data))
    return None


def _page_content(
    settings: Settings,
    catalog: Catalog,
    sample: Sequence[Reviewed],
    number: int,
    answers: PublishedAnswers,
) -> dict[str, object]:
    """The property with this number, and the verdict on it, as the page's script reads them."""
    reviewed = sample[number]
    kept = verdicts(settings.home)
    judged = {name: fields for name in kept if (fields := judged_fields(kept[name], answers))}
    marks: dict[str, str] = {}
    corrections: dict[str, str] = {}
    if current_fields := judged.get(reviewed.property_id):
        verdict = kept[reviewed.property_id]
        marks = dict.fromkeys(current_fields.intersection(verdict.right), "right")
        wrong = current_fields.intersection(verdict.wrong)
        marks |= dict.fromkeys(wrong, "wrong")
        true_fields = verdict.true_fields.items()
        corrections = {name: _as_text(value) for name, value in true_fields if name in wrong}
    row = catalog.find(reviewed.property_id)
    uris: Sequence[str] = () if row is None else row.image_uris
    images = thumbnails(catalog, [uris], height=_HEIGHT)[0] if uris else []
    return {
        "number": number,
        "total": len(sample),
        "reviewed": sum(drawn.property_id in judged for drawn in sample),
        "property_id": reviewed.property_id,
        "why": reviewed.why,
        "images": [
            {"uri": uri, "data": image and f"data:image/jpeg;base64,{b64encode(image).decode()}"}
            for uri, image in zip(uris, images, strict=True)
        ],
        "fields": [
            {"name": name, "value": _as_text(value), "sure": _sure(reviewed.confidence.get(name))}
            for name, value in reviewed.description.items()
        ],
        "legend": {"text": LEGEND, "bands": [asdict(band) for band in BANDS]},
        "marks": marks,
        "corrections": corrections,
        "accuracy": [
            f"{name} {share.sentence()} of {share.total}"
            for name, share in accuracy(settings.home, answers).fields.items()
        ],
    }


def _sure(confidence: object) -> dict[str, str] | None:
    shown = shown_confidence(confidence)
    return None if shown is None else {"text": shown.number, "colour": shown.band.colour}


def _as_text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


_EXAMPLES = """\b
vlm-assets review --sample 200
vlm-assets review --sample 100 --suspicious
vlm-assets review --sample 100 --unsure
vlm-assets review --json                  what was found right so far
vlm-assets review --verdicts FILE         take over what was judged elsewhere"""


@app.command("review", epilog=_EXAMPLES)
def review_command(
    home: Home = None,
    sample: Annotated[int, typer.Option(min=1, max=10_000, help="Properties to look at, at most.")] = 200,
    seed: Annotated[int, typer.Option(help="Draws the sample; the same seed draws the same.")] = 1,
    suspicious: Annotated[
        bool, typer.Option("--suspicious", help="Those first that dataset_quality finds odd.")
    ] = False,
    unsure: Annotated[
        bool, typer.Option("--unsure", help="Half of them where a label teaches most, half by chance.")
    ] = False,
    verdicts_file: Annotated[
        Path | None,
        typer.Option(
            "--verdicts",
            metavar="FILE",
            help="JSON lines with property_id, answer (of an export) and description: the right fields.",
        ),
    ] = None,
    port: Port = 3200,
    as_json: AsJson = False,
) -> None:
    """Mark fields of a sample right or wrong, on a page in a browser.

    You mark fields by keyboard or mouse; verdicts are kept in HOME/review.jsonl.
    With --json: no page, but how often each field is right so far, with a 95% interval. A verdict counts as
    long as the answer that it was given for is the published one.
    With --verdicts: no page either. A field as it is published is right, another one is corrected.
    """
    if suspicious and unsure:
        raise typer.BadParameter("Give --suspicious or --unsure: they draw in two ways.")
    current = chosen_settings(home)
    catalog = Catalog.open(current.home)
    if verdicts_file is not None:
        taken = take_verdicts(current, catalog, verdicts_file)
        if as_json:
            say_as_json(asdict(taken))
            return
        say(f"{counted(taken.kept, 'verdicts')} kept in {current.home / REVIEWS}.", fg="green")
        if taken.known:
            say(f"{taken.known} were kept before.")
        if taken.replaced:
            say(f"{taken.replaced} are of answers that are published no more, and were not taken.")
        _say_promises(current, catalog)
        return
    # Read before the page opens: a damaged line is reported before a person begins.
    right = accuracy(current.home, published_answers(current, catalog))
    if as_json:
        say_as_json({name: asdict(share) for name, share in right.fields.items()})
        return
    if unsure:
        drawn = draw_unsure(current, catalog, count=sample, seed=seed)
    else:
        drawn = draw_sample(current, catalog, count=sample, seed=seed, suspicious=suspicious)

    def ready(address: str) -> None:
        say(f"{counted(len(drawn), 'properties')}: {address} (Ctrl-C ends it; each verdict is kept at once)")

    page = review_app(current, catalog, drawn)
    serve_page(page, allowed_hosts=current.hosts, port=port, ready=ready)
    right = accuracy(current.home, published_answers(current, catalog))
    for name, share in right.fields.items():
        say(f"{name}: right in {share.sentence()} of {share.total}")
    if right.note:
        say(right.note)
    _say_promises(current, catalog)


def _say_promises(settings: Settings, catalog: Catalog) -> None:
    """What the labels show of each promised field, and how many are missing."""
    for promise in certify_published(settings, catalog, report=say):
        say(promise.sentence())
