"""Compare models, prompts, schemas or processor options on the same sample of properties.

What lives here: describing the sample under each, agreement with a truth file or with each other, intervals,
and the page with the images where they disagree. What does not: describing itself (``trial.py``).
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np

from resources.engine.ladder import Described
from resources.images.images import PropertyJob
from resources.images.thumbnails import make_thumbnails
from vlm_assets.catalog.catalog import Catalog
from vlm_assets.catalog.image_root import InvalidImagePathError
from vlm_assets.operate.html_page import Card, page
from vlm_assets.operate.trial import Trial, run_trial, sample
from vlm_assets.resource_settings import build_gpu, build_vision_language_model
from vlm_assets.settings import Settings
from vlm_assets.truth import Descriptions, Share, TruthError, read_truth, same, wilson

_DRAWS: Final = 2000
_SHOWN: Final = 40
_IMAGES: Final = 6
_HEIGHT: Final = 120


class NothingToCompareError(ValueError):
    """Fewer than two variants."""


@dataclass(frozen=True)
class Variant:
    """What is compared: a name for people, and settings."""

    name: str
    settings: Settings


@dataclass(frozen=True)
class Result:
    """How one variant did.

    failed: properties without a description; invalid: whose first answer was none. overall: of all fields
    that are compared, a failed property having all of them wrong; its interval comes from drawing properties,
    since the fields of one are not independent. with_itself: asked twice; None where it was asked once.
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
    """Two variants: how often they agree, and how much better the first is by the truth, if there is one."""

    first: str
    second: str
    agreement: Share
    fields: Mapping[str, Share]
    better_by: tuple[float, float, float] | None


@dataclass(frozen=True)
class Comparison:
    """All of it. disagreements: ids of properties on which they differ, most different first."""

    sample: int
    truth: str | None
    results: tuple[Result, ...]
    pairs: tuple[Pair, ...]
    disagreements: tuple[str, ...]
    descriptions: Mapping[str, Descriptions] = field(repr=False, default_factory=dict)
    truths: Descriptions = field(repr=False, default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """Numbers and ids, without the descriptions."""
        content = asdict(self)
        del content["descriptions"], content["truths"]
        return content


def compare(
    variants: Sequence[Variant],
    catalog: Catalog,
    *,
    limit: int,
    truth: Path | None = None,
    twice: bool = False,
    price_per_hour: float | None = None,
    tell: Callable[[str], None] = lambda said: None,
) -> Comparison:
    """Describe a sample under each variant and hold the answers against the truth, or against each other.

    Raises NothingToCompareError, TruthError, and what ``run_trial`` raises.
    """
    if len(variants) < 2:
        raise NothingToCompareError("One variant alone: name at least two, such as --model A --model B.")
    known = None if truth is None else read_truth(truth)
    ids = sample(catalog, limit, known)["property_id"].to_pylist()
    if not ids:
        raise TruthError(f"{truth} knows no property of the catalogue: are its ids those of the catalogue?")
    truths: Descriptions = {} if known is None else {one: known[one] for one in ids}
    descriptions: dict[str, Descriptions] = {}
    trials: dict[str, tuple[Trial, Descriptions | None]] = {}
    for one in variants:
        tell(f"{one.name}: {len(ids)} properties ...")
        first = _tried(one.settings, catalog, limit, known)
        second = _of(_tried(one.settings, catalog, limit, known).described) if twice else None
        descriptions[one.name] = _of(first.described)
        trials[one.name] = first, second
    truths = _of_fields(truths, descriptions, truth)
    results = [
        _result(one, *trials[one.name], descriptions[one.name], truths, price_per_hour) for one in variants
    ]
    pairs = [
        _pair(one.name, other.name, descriptions, truths)
        for one, other in itertools.combinations(variants, 2)
    ]
    differing = sorted(ids, key=lambda one: -_differences(one, descriptions))
    disagreements = tuple(one for one in differing if _differences(one, descriptions))
    return Comparison(
        len(ids),
        None if truth is None else str(truth),
        tuple(results),
        tuple(pairs),
        disagreements,
        descriptions,
        truths,
    )


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


def _tried(settings: Settings, catalog: Catalog, limit: int, known: Collection[str] | None) -> Trial:
    model = build_vision_language_model(settings)
    return run_trial(settings, catalog, build_gpu(settings), model, limit=limit, among=known)


def _of(described: Sequence[Described]) -> Descriptions:
    return {one.property_id: one.description for one in described}


def _result(
    variant: Variant,
    trial: Trial,
    again: Descriptions | None,
    said: Descriptions,
    truths: Descriptions,
    price_per_hour: float | None,
) -> Result:
    described, count = trial.described, len(trial.described)
    asked = [one for one in described if one.attempts]
    fields = {} if not truths else _by_field(said, truths)
    cost = None if price_per_hour is None else trial.days * 24 * trial.devices * price_per_hour
    return Result(
        name=variant.name,
        model=variant.settings.model or "at an address",
        failed=wilson(sum(one.description is None for one in described), count),
        invalid=wilson(sum(one.attempts > 1 or one.description is None for one in asked), len(asked)),
        prompt_tokens=_mean([one.prompt_tokens / max(1, one.attempts) for one in asked]),
        output_tokens=_mean([float(one.output_tokens) for one in asked]),
        properties_per_second=trial.properties_per_second,
        days=trial.days,
        cost=cost,
        overall=_drawn(_shares(said, truths)) if truths else None,
        fields=fields,
        with_itself=None if again is None else _drawn(_shares(said, again)),
    )


def _pair(first: str, second: str, said: Mapping[str, Descriptions], truths: Descriptions) -> Pair:
    one, other = said[first], said[second]
    better = None
    if truths:
        of_one, of_other = _shares(one, truths), _shares(other, truths)
        both = sorted(of_one.keys() & of_other.keys())
        better = _interval([of_one[name] - of_other[name] for name in both])
    return Pair(first, second, _drawn(_shares(one, other)), _by_field(one, other), better)


def _by_field(said: Descriptions, right: Descriptions) -> dict[str, Share]:
    """Of each field, how often it is as it should be, over the properties for which that is known."""
    counts: dict[str, list[bool]] = {}
    for name, expected in right.items():
        for key, value in (expected or {}).items():
            if name in said and value is not None:
                counts.setdefault(key, []).append(same((said[name] or {}).get(key), value))
    return {key: wilson(sum(found), len(found)) for key, found in counts.items()}


def _shares(said: Descriptions, right: Descriptions) -> dict[str, float]:
    """Of each property, the share of its known fields that are as they should be."""
    shares = {}
    for name, expected in right.items():
        known = {key: value for key, value in (expected or {}).items() if value is not None}
        if name in said and known:
            shares[name] = sum(same((said[name] or {}).get(key), one) for key, one in known.items()) / len(
                known
            )
    return shares


def _drawn(shares: Mapping[str, float]) -> Share:
    middle, low, high = _interval(list(shares.values()))
    return Share(middle, low, high, len(shares))


def _interval(values: Sequence[float]) -> tuple[float, float, float]:
    """The mean with a 95% interval from drawing the values anew (bootstrap, the same draws each time).

    Where all are alike, drawing says nothing: the interval is Wilson's.
    """
    if not values:
        return 0.0, 0.0, 1.0
    found = np.asarray(values)
    mean = float(found.mean())
    if float(found.std()) < 1e-12 and 0.0 <= mean <= 1.0:
        of_all = wilson(round(mean * len(values)), len(values))
        return mean, min(mean, of_all.low), max(mean, of_all.high)
    drawn = np.random.default_rng(0).choice(found, (_DRAWS, len(found))).mean(axis=1)
    low, high = np.percentile(drawn, [2.5, 97.5])
    return mean, float(low), float(high)


def _differences(name: str, said: Mapping[str, Descriptions]) -> int:
    answers = [one.get(name) for one in said.values()]
    keys = {key for answer in answers for key in (answer or {})}
    return sum(
        any(not same((answers[0] or {}).get(key), (answer or {}).get(key)) for answer in answers[1:])
        for key in keys
    )


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def comparison_page(catalog: Catalog, found: Comparison) -> str:
    """One HTML page: the numbers, and the images beside the answers where they disagree."""
    names = [one.name for one in found.results]
    numbers = [
        ("agrees with the truth", [_sentence(one.overall) for one in found.results]),
        ("agrees with itself, asked twice", [_sentence(one.with_itself) for one in found.results]),
        ("failed", [one.failed.sentence() for one in found.results]),
        ("first answer invalid", [one.invalid.sentence() for one in found.results]),
        ("prompt tokens", [f"{one.prompt_tokens:,.0f}" for one in found.results]),
        ("answer tokens", [f"{one.output_tokens:,.0f}" for one in found.results]),
        ("properties/s a device", [f"{one.properties_per_second:.3g}" for one in found.results]),
        ("days for all", [f"{one.days:.3g}" for one in found.results]),
        ("cost for all", ["" if one.cost is None else f"{one.cost:,.2f}" for one in found.results]),
    ]  # fmt: skip
    tables = [("Side by side", ["", *names], [[name, *cells] for name, cells in numbers if any(cells)])]
    keys = list(dict.fromkeys(key for one in found.results for key in one.fields))
    if keys:
        rows = [
            [key, *(one.fields[key].sentence() if key in one.fields else "" for one in found.results)]
            for key in keys
        ]
        tables.append(("Fields that are right", ["", *names], rows))
    pairs = [[f"{one.first} and {one.second}", one.agreement.sentence(), _better(one)] for one in found.pairs]
    tables.append(("Agreement", ["", "fields alike", "first better by"], pairs))
    return page(
        f"{' against '.join(names)}: {found.sample} properties", _cards(catalog, found), tables=tables
    )


def _sentence(share: Share | None) -> str:
    return "" if share is None else share.sentence()


def _better(pair: Pair) -> str:
    if pair.better_by is None:
        return ""
    return f"{pair.better_by[0]:+.1%} ({pair.better_by[1]:+.1%} to {pair.better_by[2]:+.1%})"


def _cards(catalog: Catalog, found: Comparison) -> list[Card]:
    shown = found.disagreements[:_SHOWN]
    jobs = []
    for name in shown:
        row = catalog.find(name)
        paths = []
        for uri in row.image_uris[:_IMAGES] if row is not None else ():
            try:
                paths.append(str(catalog.image_path(uri)))
            except InvalidImagePathError:
                continue  # It leads out of the root: it is not opened.
        jobs.append(PropertyJob(name, 0, tuple(paths)))
    images = make_thumbnails(jobs, height=_HEIGHT, fetch=catalog.images.fetch)
    cards = []
    for name, files in zip(shown, images, strict=True):
        answers = {one: said.get(name) or {} for one, said in found.descriptions.items()}
        known = found.truths.get(name) or {}
        keys = dict.fromkeys(key for answer in answers.values() for key in answer)
        values: dict[str, object] = {}
        for key in keys:
            first, *others = (answer.get(key) for answer in answers.values())
            if all(same(first, other) for other in others):
                continue
            told = [
                f"{one}: {json.dumps(answer.get(key), ensure_ascii=False, default=str)}"
                for one, answer in answers.items()
            ]
            values[key] = " | ".join([*told, *([f"truth: {known[key]}"] if key in known else [])])
        cards.append(Card(name, f"{len(values)} fields differ", files, values))
    return cards
