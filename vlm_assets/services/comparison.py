"""Compare models, prompts, schemas or processor options on the same sample of properties.

How far they agree with a truth file or with each other, and the page with the images where they disagree.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from vlm_assets.assets.truth import Descriptions, TruthError, read_truth
from vlm_assets.config.resource_settings import build_gpu, build_vision_language_model
from vlm_assets.config.settings import Settings
from vlm_assets.services.command_error import CommandError
from vlm_assets.services.intervals import Difference, Share, mean_share, paired_difference, wilson
from vlm_assets.services.second_opinion import SecondOpinion
from vlm_assets.services.trial import Trial, run_trial, sample
from vlm_catalog.catalog import Catalog
from vlm_durable.wording import counted
from vlm_engine.confidence import Confidence
from vlm_engine.schema import load_schema, same


@dataclass(frozen=True)
class Contender:
    """What is compared with others: settings, and a name for people."""

    name: str
    settings: Settings

    @property
    def fields(self) -> frozenset[str]:
        """The fields of its schema. Raises SchemaError."""
        return frozenset(load_schema(self.settings.description_schema).json_schema.get("properties", ()))


@dataclass(frozen=True)
class Result:
    """How a contender did.

    failed: the share of properties without a description. invalid: the share whose first answer was no valid
    description. overall: the share of right fields; a failed property has all of its fields wrong.
    with_itself: how far a second answer agrees with the first; None if it was asked once. asked_again: the
    share of properties that need a second opinion; None where nobody is asked for one.
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
    asked_again: Share | None = None


@dataclass(frozen=True)
class Pair:
    """Two contenders, compared by the fields that both were asked for.

    agreement: how often they agree. better_by: how much better the first is by the truth, if it is given.
    """

    first: str
    second: str
    agreement: Share
    fields: Mapping[str, Share]
    better_by: Difference | None


@dataclass(frozen=True)
class Comparison:
    """All results. disagreements: ids of properties on which contenders differ, most different first.

    differences: for each of these properties, the fields that differ, with the answer of each contender.
    confidences: by contender and property, how sure it was of each field.
    """

    sample: int
    truth: str | None
    results: tuple[Result, ...]
    pairs: tuple[Pair, ...]
    disagreements: tuple[str, ...]
    differences: Mapping[str, Mapping[str, Mapping[str, Any]]] = field(repr=False, default_factory=dict)
    truths: Descriptions = field(repr=False, default_factory=dict)
    confidences: Mapping[str, Mapping[str, Confidence | None]] = field(repr=False, default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """Numbers and ids, without the descriptions."""
        content = asdict(self)
        del content["differences"], content["truths"], content["confidences"]
        return content


@dataclass(frozen=True)
class ComparedSample:
    """Which properties contenders are compared by: at most ``limit``, of those that ``truth`` knows.

    truth: a file; None: any property is taken. twice: each contender describes the sample twice.
    """

    limit: int
    truth: Path | None = None
    twice: bool = False


def compare(
    contenders: Sequence[Contender],
    catalog: Catalog,
    compared: ComparedSample,
    *,
    price_per_hour: float | None = None,
    second_opinion: SecondOpinion | None = None,
    report: Callable[[str], None] = lambda sentence: None,
) -> Comparison:
    """Describe a sample with each contender and compare the answers with the truth and with each other.

    Contenders of the same name get a number: the same one twice shows how far it agrees with itself.
    second_opinion: one more contender, the first with the answers of the second where they are asked for. It
    follows from what both answered.
    Raises CommandError, TruthError, SchemaError, and what ``run_trial`` raises.
    """
    if len(contenders) < 2:
        raise CommandError("One contender alone: name at least two, such as --model A --model B.")
    contenders = _with_unique_names(contenders)
    requested = {contender.name: contender.fields for contender in contenders}
    truth = compared.truth
    all_truths = None if truth is None else read_truth(truth)
    ids = sample(catalog, compared.limit, all_truths)["property_id"].to_pylist()
    if not ids:
        raise TruthError(f"{truth} knows no property of the catalogue: are its ids those of the catalogue?")
    truths: Descriptions = {} if all_truths is None else {name: all_truths[name] for name in ids}
    trials: dict[str, list[Trial]] = {}
    for contender in contenders:
        report(f"{contender.name}: {counted(len(ids), 'properties')} ...")
        trials[contender.name] = [
            _describe_sample(contender, catalog, compared.limit, all_truths)
            for _ in range(2 if compared.twice else 1)
        ]
    asked_again: Share | None = None
    if second_opinion is not None:
        first, second = contenders
        both = Contender(f"{first.name}, then {second.name}", first.settings)
        trials[both.name] = list(map(second_opinion.combined, trials[first.name], trials[second.name]))
        asked_again = wilson(len(second_opinion.asked_again(trials[first.name][0])), len(ids))
        contenders.append(both)
        requested[both.name] = requested[first.name]
    descriptions = {name: _by_id(of_contender[0]) for name, of_contender in trials.items()}
    truths = _without_other_columns(truths, descriptions, truth)
    results = [
        _result(contender, trials[contender.name], descriptions[contender.name], truths, price_per_hour)
        for contender in contenders
    ]
    if asked_again is not None:
        models = f"{results[0].model}, then {results[1].model}"
        results[-1] = replace(results[-1], model=models, asked_again=asked_again)
    pairs = [
        _pair(first, second, descriptions, truths) for first, second in itertools.combinations(contenders, 2)
    ]
    differing = {property_id: _differing(property_id, descriptions, requested) for property_id in ids}
    most_different = sorted(ids, key=lambda property_id: -len(differing[property_id]))
    differences = {
        property_id: differing[property_id] for property_id in most_different if differing[property_id]
    }
    return Comparison(
        sample=len(ids),
        truth=None if truth is None else str(truth),
        results=tuple(results),
        pairs=tuple(pairs),
        disagreements=tuple(differences),
        differences=differences,
        truths=truths,
        confidences={
            name: {row.property_id: row.confidence for row in trial.described}
            for name, (trial, *_) in trials.items()
        },
    )


def _with_unique_names(contenders: Sequence[Contender]) -> list[Contender]:
    """The contenders; the second of a name gets " (2)", and so on."""
    counts: Counter[str] = Counter()
    unique = []
    for contender in contenders:
        counts[contender.name] += 1
        number = counts[contender.name]
        unique.append(replace(contender, name=f"{contender.name} ({number})") if number > 1 else contender)
    return unique


def _without_other_columns(
    truths: Descriptions, descriptions: Mapping[str, Descriptions], path: Path | None
) -> Descriptions:
    """The truth without columns that are a field of no description. Raises TruthError if none is left."""
    fields = {
        field_name
        for by_id in descriptions.values()
        for description in by_id.values()
        for field_name in description or {}
    }
    kept = {
        property_id: {key: value for key, value in (truth or {}).items() if key in fields}
        for property_id, truth in truths.items()
    }
    if truths and fields and not any(kept.values()):
        raise TruthError(
            f"{path} has no column that is a field of the descriptions: {', '.join(sorted(fields))}."
        )
    return kept


def _describe_sample(
    contender: Contender, catalog: Catalog, limit: int, truth_ids: Collection[str] | None
) -> Trial:
    return run_trial(
        contender.settings,
        catalog,
        build_gpu(contender.settings),
        build_vision_language_model(contender.settings),
        limit=limit,
        among=truth_ids,
        name=f"the sample with {contender.name}",
    )


def _by_id(trial: Trial) -> Descriptions:
    return {row.property_id: row.description for row in trial.described}


def _result(
    contender: Contender,
    trials: Sequence[Trial],
    descriptions: Descriptions,
    truths: Descriptions,
    price_per_hour: float | None,
) -> Result:
    trial, *again = trials
    described, count = trial.described, len(trial.described)
    asked = [row for row in described if row.attempts]
    judged = _judge(descriptions, truths, contender.fields)
    repeated = _judge(descriptions, _by_id(again[0]), contender.fields) if again else None
    cost = None if price_per_hour is None else trial.days * 24 * trial.devices * price_per_hour
    return Result(
        name=contender.name,
        model=contender.settings.model or "at an address",
        failed=wilson(sum(row.description is None for row in described), count),
        invalid=wilson(sum(row.attempts > 1 or row.description is None for row in asked), len(asked)),
        prompt_tokens=fmean([row.prompt_tokens / row.attempts for row in asked] or [0.0]),
        output_tokens=fmean([row.output_tokens for row in asked] or [0.0]),
        properties_per_second=trial.properties_per_second,
        days=trial.days,
        cost=cost,
        overall=_mean_share(judged) if truths else None,
        fields=_share_by_field(judged),
        with_itself=None if repeated is None else _mean_share(repeated),
    )


def _pair(
    first: Contender, second: Contender, descriptions: Mapping[str, Descriptions], truths: Descriptions
) -> Pair:
    fields = first.fields & second.fields
    better = None
    if truths:
        first_shares = _share_by_property(_judge(descriptions[first.name], truths, fields))
        second_shares = _share_by_property(_judge(descriptions[second.name], truths, fields))
        ids = sorted(first_shares.keys() & second_shares.keys())
        better = paired_difference([first_shares[key] for key in ids], [second_shares[key] for key in ids])
    agreeing = _judge(descriptions[first.name], descriptions[second.name], fields)
    return Pair(first.name, second.name, _mean_share(agreeing), _share_by_field(agreeing), better)


def _judge(
    descriptions: Descriptions, expected: Descriptions, fields: Collection[str]
) -> dict[str, dict[str, bool]]:
    """Whether each field of each property is as expected. Fields without an expected value are left out."""
    return {
        property_id: {
            key: same((descriptions[property_id] or {}).get(key), value)
            for key, value in (expectation or {}).items()
            if key in fields and value is not None
        }
        for property_id, expectation in expected.items()
        if property_id in descriptions
    }


def _share_by_field(judged: Mapping[str, Mapping[str, bool]]) -> dict[str, Share]:
    """How often each field is as expected, over the properties with an expected value."""
    verdicts: dict[str, list[bool]] = {}
    for fields in judged.values():
        for key, is_right in fields.items():
            verdicts.setdefault(key, []).append(is_right)
    return {key: wilson(sum(marks), len(marks)) for key, marks in verdicts.items()}


def _share_by_property(judged: Mapping[str, Mapping[str, bool]]) -> dict[str, float]:
    """The share of each property's judged fields that are as expected."""
    return {property_id: fmean(fields.values()) for property_id, fields in judged.items() if fields}


def _mean_share(judged: Mapping[str, Mapping[str, bool]]) -> Share:
    return mean_share(list(_share_by_property(judged).values()))


def _differing(
    property_id: str, descriptions: Mapping[str, Descriptions], requested: Mapping[str, frozenset[str]]
) -> dict[str, dict[str, Any]]:
    """The fields in which contenders that were asked for them differ, with the answer of each."""
    of_property = {contender: by_id.get(property_id) or {} for contender, by_id in descriptions.items()}
    fields = dict.fromkeys(key for description in of_property.values() for key in description)
    differing = {}
    for key in fields:
        answers = {
            contender: description.get(key)
            for contender, description in of_property.items()
            if key in requested[contender]
        }
        first, *others = answers.values()
        if not all(same(first, other) for other in others):
            differing[key] = answers
    return differing
