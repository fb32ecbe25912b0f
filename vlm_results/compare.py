"""Compare models, prompts, schemas or processor options on the same sample of properties.

How far they agree with a truth file or with each other, and the page with the images where they disagree.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any, Final

import typer
from rich.markup import escape
from rich.table import Table

from vlm_assets.assets.truth import Descriptions, TruthError, read_truth
from vlm_assets.catalog.catalog import Catalog
from vlm_assets.commands.html_page import Card, page, thumbnails, write_page
from vlm_assets.commands.measurement import Trial, run_trial, sample
from vlm_assets.commands.terminal import (
    AsJson,
    CommandError,
    Home,
    TerminalConsole,
    app,
    chosen_settings,
    say,
    say_as_json,
    visible_line,
)
from vlm_assets.config.engine_choice import require_models
from vlm_assets.config.resource_settings import build_gpu, build_vision_language_model
from vlm_assets.config.settings import Settings, load_settings
from vlm_durable.wording import counted, duration
from vlm_engine.ladder import Described
from vlm_engine.schema import load_schema, same
from vlm_results.intervals import Difference, Share, mean_share, paired_difference, wilson

_SHOWN: Final = 40
_IMAGES: Final = 6
_HEIGHT: Final = 120


@dataclass(frozen=True)
class Contender:
    """What is compared: a name for people, and settings."""

    name: str
    settings: Settings

    @property
    def fields(self) -> frozenset[str]:
        """What its schema asks for. Raises SchemaError."""
        return frozenset(load_schema(self.settings.description_schema).json_schema.get("properties", ()))


@dataclass(frozen=True)
class Result:
    """How one variant did.

    failed: properties without a description; invalid: whose first answer was none. overall: of all fields
    that it was asked for, a failed property having all of them wrong. with_itself: asked twice, or None.
    """

    name: str
    model: str
    failed: Share
    invalid: Share
    prompt_tokens: float
    output_tokens: float
    properties_per_second: float
    days: float
    cost: float | None
    overall: Share | None
    fields: Mapping[str, Share] = field(default_factory=dict)
    with_itself: Share | None = None


@dataclass(frozen=True)
class Pair:
    """Two variants, by the fields that both were asked for.

    agreement: how often they agree. better_by: how much better the first is by the truth, if there is one.
    """

    first: str
    second: str
    agreement: Share
    fields: Mapping[str, Share]
    better_by: Difference | None


@dataclass(frozen=True)
class Comparison:
    """All of it. disagreements: ids of properties on which they differ, most different first.

    differences: of each of these, the fields in which they differ, with what each variant said.
    """

    sample: int
    truth: str | None
    results: tuple[Result, ...]
    pairs: tuple[Pair, ...]
    disagreements: tuple[str, ...]
    differences: Mapping[str, Mapping[str, Mapping[str, Any]]] = field(repr=False, default_factory=dict)
    truths: Descriptions = field(repr=False, default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """Numbers and ids, without the descriptions."""
        content = asdict(self)
        del content["differences"], content["truths"]
        return content


def compare(
    variants: Sequence[Contender],
    catalog: Catalog,
    *,
    limit: int,
    truth: Path | None = None,
    twice: bool = False,
    price_per_hour: float | None = None,
    tell: Callable[[str], None] = lambda said: None,
) -> Comparison:
    """Describe a sample under each variant and hold the answers against the truth, or against each other.

    Variants of one name are told apart by a number: the same one twice says how far it agrees with itself.
    Raises CommandError, TruthError, SchemaError, and what ``run_trial`` raises.
    """
    if len(variants) < 2:
        raise CommandError("One variant alone: name at least two, such as --model A --model B.")
    names = [one.name for one in variants]
    again = [names[:number].count(name) + 1 for number, name in enumerate(names)]
    variants = [
        replace(one, name=f"{one.name} ({time})") if time > 1 else one
        for one, time in zip(variants, again, strict=True)
    ]
    asked = {one.name: one.fields for one in variants}
    known = None if truth is None else read_truth(truth)
    ids = sample(catalog, limit, known)["property_id"].to_pylist()
    if not ids:
        raise TruthError(f"{truth} knows no property of the catalogue: are its ids those of the catalogue?")
    truths: Descriptions = {} if known is None else {one: known[one] for one in ids}
    descriptions: dict[str, Descriptions] = {}
    trials: dict[str, tuple[Trial, Descriptions | None]] = {}
    for one in variants:
        tell(f"{one.name}: {counted(len(ids), 'properties')} ...")
        first = _tried(one, catalog, limit, known)
        second = _of(_tried(one, catalog, limit, known).described) if twice else None
        descriptions[one.name] = _of(first.described)
        trials[one.name] = first, second
    truths = _of_fields(truths, descriptions, truth)
    results = [
        _result(one, *trials[one.name], descriptions[one.name], truths, price_per_hour) for one in variants
    ]
    pairs = [_pair(one, other, descriptions, truths) for one, other in itertools.combinations(variants, 2)]
    differing = {one: _differing(one, descriptions, asked) for one in ids}
    differences = {one: differing[one] for one in sorted(ids, key=lambda one: -len(differing[one]))}
    differences = {one: fields for one, fields in differences.items() if fields}
    where = None if truth is None else str(truth)
    return Comparison(len(ids), where, tuple(results), tuple(pairs), tuple(differences), differences, truths)


def _of_fields(truths: Descriptions, said: Mapping[str, Descriptions], path: Path | None) -> Descriptions:
    """The truth of fields that some description has; other columns are no fields. Raises TruthError."""
    keys = {key for one in said.values() for answer in one.values() for key in answer or {}}
    found = {
        name: {key: one for key, one in (fields or {}).items() if key in keys}
        for name, fields in truths.items()
    }
    if truths and keys and not any(found.values()):
        raise TruthError(
            f"{path} has no column that is a field of the descriptions: {', '.join(sorted(keys))}."
        )
    return found


def _tried(one: Contender, catalog: Catalog, limit: int, known: Collection[str] | None) -> Trial:
    model, gpu, name = (
        build_vision_language_model(one.settings),
        build_gpu(one.settings),
        f"the sample with {one.name}",
    )
    return run_trial(one.settings, catalog, gpu, model, limit=limit, among=known, name=name)


def _of(described: Sequence[Described]) -> Descriptions:
    return {one.property_id: one.description for one in described}


def _result(
    variant: Contender,
    trial: Trial,
    again: Descriptions | None,
    said: Descriptions,
    truths: Descriptions,
    price_per_hour: float | None,
) -> Result:
    described, count = trial.described, len(trial.described)
    asked = [one for one in described if one.attempts]
    judged = _judged(said, truths, variant.fields)
    alike = None if again is None else _judged(said, again, variant.fields)
    cost = None if price_per_hour is None else trial.days * 24 * trial.devices * price_per_hour
    return Result(
        name=variant.name,
        model=variant.settings.model or "at an address",
        failed=wilson(sum(one.description is None for one in described), count),
        invalid=wilson(sum(one.attempts > 1 or one.description is None for one in asked), len(asked)),
        prompt_tokens=fmean([one.prompt_tokens / one.attempts for one in asked] or [0.0]),
        output_tokens=fmean([one.output_tokens for one in asked] or [0.0]),
        properties_per_second=trial.properties_per_second,
        days=trial.days,
        cost=cost,
        overall=_mean_share(judged) if truths else None,
        fields=_by_field(judged),
        with_itself=None if alike is None else _mean_share(alike),
    )


def _pair(
    first: Contender, second: Contender, said: Mapping[str, Descriptions], truths: Descriptions
) -> Pair:
    one, other, both = said[first.name], said[second.name], first.fields & second.fields
    better = None
    if truths:
        of_one, of_other = (_shares(_judged(said, truths, both)) for said in (one, other))
        names = sorted(of_one.keys() & of_other.keys())
        better = paired_difference([of_one[name] for name in names], [of_other[name] for name in names])
    alike = _judged(one, other, both)
    return Pair(first.name, second.name, _mean_share(alike), _by_field(alike), better)


def _judged(said: Descriptions, right: Descriptions, fields: Collection[str]) -> dict[str, dict[str, bool]]:
    """For each property, which of its fields are right; fields whose truth is not known are left out."""
    return {
        name: {
            key: same((said[name] or {}).get(key), value)
            for key, value in (expected or {}).items()
            if key in fields and value is not None
        }
        for name, expected in right.items()
        if name in said
    }


def _by_field(judged: Mapping[str, Mapping[str, bool]]) -> dict[str, Share]:
    """Of each field, how often it is as it should be, over the properties for which that is known."""
    counts: dict[str, list[bool]] = {}
    for fields in judged.values():
        for key, is_right in fields.items():
            counts.setdefault(key, []).append(is_right)
    return {key: wilson(sum(found), len(found)) for key, found in counts.items()}


def _shares(judged: Mapping[str, Mapping[str, bool]]) -> dict[str, float]:
    """Of each property, the share of its known fields that are as they should be."""
    return {name: fmean(fields.values()) for name, fields in judged.items() if fields}


def _mean_share(judged: Mapping[str, Mapping[str, bool]]) -> Share:
    return mean_share(list(_shares(judged).values()))


def _differing(
    name: str, said: Mapping[str, Descriptions], asked: Mapping[str, frozenset[str]]
) -> dict[str, dict[str, Any]]:
    """The fields in which variants that were asked for them differ, with what each said."""
    keys = dict.fromkeys(key for one in said.values() for key in one.get(name) or {})
    found = {}
    for key in keys:
        answers = {one: (of.get(name) or {}).get(key) for one, of in said.items() if key in asked[one]}
        first, *others = answers.values()
        if not all(same(first, other) for other in others):
            found[key] = answers
    return found


def tables(found: Comparison) -> list[tuple[str, list[str], list[list[str]]]]:
    """The numbers, for the terminal and the page: caption, head and rows of each table."""
    names = [one.name for one in found.results]
    numbers = [
        ("agrees with the truth", [_sentence(one.overall) for one in found.results]),
        ("agrees with itself, asked twice", [_sentence(one.with_itself) for one in found.results]),
        ("failed", [one.failed.sentence() for one in found.results]),
        ("first answer invalid", [one.invalid.sentence() for one in found.results]),
        ("prompt tokens", [f"{one.prompt_tokens:,.0f}" for one in found.results]),
        ("answer tokens", [f"{one.output_tokens:,.0f}" for one in found.results]),
        ("properties/s a device", [f"{one.properties_per_second:.3g}" for one in found.results]),
        ("time for all", [duration(86_400 * one.days) for one in found.results]),
        ("cost for all", ["" if one.cost is None else f"{one.cost:,.2f}" for one in found.results]),
    ]  # fmt: skip
    shown = [("Side by side", ["", *names], [[name, *cells] for name, cells in numbers if any(cells)])]
    if keys := list(dict.fromkeys(key for one in found.results for key in one.fields)):
        rows = [
            [key, *(one.fields[key].sentence() if key in one.fields else "" for one in found.results)]
            for key in keys
        ]
        shown.append(("Fields that are right", ["", *names], rows))
    pairs = []
    for one in found.pairs:
        better = "" if one.better_by is None else one.better_by.sentence()
        pairs.append([f"{one.first} and {one.second}", one.agreement.sentence(), better])
    return [*shown, ("Agreement", ["", "fields alike", "first better by"], pairs)]


def _sentence(share: Share | None) -> str:
    return "" if share is None else share.sentence()


def _cards(catalog: Catalog, found: Comparison) -> list[Card]:
    """The images beside the answers where they disagree."""
    shown = found.disagreements[:_SHOWN]
    rows = [catalog.find(name) for name in shown]
    uris = [() if row is None else row.image_uris for row in rows]
    images = thumbnails(catalog, (one[:_IMAGES] for one in uris), height=_HEIGHT)
    cards = []
    for name, files, named in zip(shown, images, uris, strict=True):
        known = found.truths.get(name) or {}
        names = [one.name for one in found.results]
        columns = [*names, *(["truth"] if known else [])]
        values = {
            key: [*(answers.get(one, "not asked") for one in names), *([known.get(key, "")] if known else [])]
            for key, answers in found.differences[name].items()
        }
        cards.append(
            Card(
                name,
                counted(len(values), "fields differ", "field differs"),
                files,
                values,
                columns,
                uris=named[:_IMAGES],
                of=len(named),
            )
        )
    return cards


_EXAMPLES = """\b
vlm-assets compare --model A --model B --truth truth.csv --html compared.html
vlm-assets compare --prompt 'Describe the house.' --limit 100 --twice"""

Many = list[str] | None


@app.command("compare", epilog=_EXAMPLES)
def compare_command(
    home: Home = None,
    model: Annotated[Many, typer.Option(help="A model's folder or hub id; repeat it.")] = None,
    prompt: Annotated[Many, typer.Option(help="Another prompt; repeat it.")] = None,
    schema: Annotated[Many, typer.Option(help="Another schema, as module:Class; repeat it.")] = None,
    processor_options: Annotated[
        Many, typer.Option(help="Other processor options, as JSON; repeat it.")
    ] = None,
    truth: Annotated[
        Path | None, typer.Option(help="CSV or parquet with ids and true fields, or HOME/review.jsonl.")
    ] = None,
    limit: Annotated[int, typer.Option(min=1, help="Properties to describe with each.")] = 50,
    twice: Annotated[
        bool, typer.Option("--twice", help="Ask each twice: does it agree with itself?")
    ] = False,
    price_per_hour: Annotated[float | None, typer.Option(min=0.0, help="Of one device.")] = None,
    html: Annotated[Path | None, typer.Option(help="Write a page with images to this file.")] = None,
    as_json: AsJson = False,
) -> None:
    """Compare models, prompts or schemas on the same sample.

    Describes the same sample with each variant of model, prompt, schema or processor options.
    Each option's value is a variant of the settings; a single one is compared with the settings as they are.
    No row is written. Intervals are 95%.
    """
    current = chosen_settings(home)
    catalog = Catalog.open(current.home)
    given = {
        "model": model,
        "prompt": prompt,
        "description_schema": schema,
        "processor_options": processor_options,
    }
    asked = [(name, one) for name, values in given.items() for one in values or []]
    variants = [
        Contender(
            f"{name.removeprefix('description_')} {one}" if name != "model" else one,
            load_settings(**{name: one}),
        )
        for name, one in asked
    ]
    if len(variants) == 1 or not model:
        variants.insert(0, Contender("as set", current))
    for variant in variants:
        require_models(variant.settings)
    found = compare(
        variants,
        catalog,
        limit=limit,
        truth=truth,
        twice=twice,
        price_per_hour=price_per_hour,
        tell=(lambda said: None) if as_json else lambda said: say(visible_line(said)),
    )
    if html is not None:
        title = (
            f"{' against '.join(one.name for one in found.results)}: {counted(found.sample, 'properties')}"
        )
        write_page(html, page(title, _cards(catalog, found), tables=tables(found)))
    if as_json:
        say_as_json(found.as_json())
        return
    for caption, head, rows in tables(found):
        table = Table(*map(escape, head), title=caption)
        for row in rows:
            table.add_row(*map(escape, row))
        TerminalConsole().print(table)
    say(f"They differ on {len(found.disagreements)} of {counted(found.sample, 'properties')}.")
    if html is not None:
        say(f"Page: {html}")
