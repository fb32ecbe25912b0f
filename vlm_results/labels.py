"""Labels: fields of published answers that are known to be right or wrong, with their confidences.

They come from the truth file and from verdicts of ``review``. Curves and promises learn from them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from dataclasses import field as dataclass_field
from itertools import groupby
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from vlm_assets.assets.fingerprint import digest_of, settings_digest
from vlm_assets.assets.learned_labels import learned_labels
from vlm_assets.assets.partition import CONFIDENCE, INPUTS
from vlm_assets.assets.truth import REVIEWS, names_a_model, read_truth, verdicts
from vlm_assets.config.filled_fields import field_sources
from vlm_assets.config.question_sets import question_sets
from vlm_assets.config.settings import Settings
from vlm_assets.services.command_error import CommandError
from vlm_assets.services.progress import doing
from vlm_catalog.catalog import Catalog
from vlm_durable.commands import command
from vlm_durable.files.layout import AssetFolders
from vlm_durable.versions.partition_files import NotPublishedError
from vlm_durable.versions.versioned_object import PublishedError
from vlm_engine.schema import same
from vlm_results.confidence_statistics import Flags, Floats
from vlm_results.published_table import answer_digest, field_confidences, read_recorded
from vlm_results.results_settings import ResultsSettings

_COLUMNS: Final = ("property_id", "ordinal", "status", "description", INPUTS, CONFIDENCE)


@dataclass(frozen=True)
class Judged:
    """A property whose published answer somebody judged, field by field.

    name: a digest of its id, which no withdrawal has to search for. right: by field. confidences: by field; a
    field without one is left out. weight: what it counts for in a mean over all properties; 0 where it says
    nothing of others. is_random: drawn by chance alone, and judged by no model, so that it may certify.
    is_learned: the model that answered was trained on this label, which shows nothing of its other answers.
    """

    name: str
    answer: str
    right: Mapping[str, bool]
    confidences: Mapping[str, float]
    weight: float
    is_random: bool
    is_learned: bool = False


@dataclass(frozen=True, eq=False)
class FieldLabels:
    """The labels of one field, in the order in which they count.

    digest: of what was judged, how, and how sure the answer is; labels that are the same have the same.
    judged: of each label, by the digest of its property's id, what was judged, how, and how sure the answer
    is: all that a test depends on.
    """

    confidences: Floats
    right: Flags
    weights: Floats
    digest: str
    judged: Mapping[str, str] = dataclass_field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.right)


def teaching_labels(judged: Iterable[Judged], field: str) -> FieldLabels:
    """The labels of a field that say something of all answers, by their weights."""
    return _labels([judgement for judgement in judged if judgement.weight > 0], field)


def certifying_labels(
    judged: Iterable[Judged], field: str, most: int | None = None, *, first: Iterable[str] = ()
) -> FieldLabels:
    """The labels of a field's random sample, in which each has the same weight: the first so many of them.

    first: digests of the ids of those that come first, in this order.
    """
    places = {name: place for place, name in enumerate(first)}
    chosen = [judgement for judgement in judged if judgement.is_random]
    chosen.sort(key=lambda judgement: places.get(judgement.name, len(places)))
    return _labels(chosen, field, most)


def _labels(judged: Sequence[Judged], field: str, most: int | None = None) -> FieldLabels:
    chosen = [
        judgement for judgement in judged if field in judgement.right and field in judgement.confidences
    ][:most]
    content = "".join(
        f"{judgement.answer}{judgement.right[field]:d}{judgement.weight:g},{judgement.confidences[field]!r};"
        for judgement in chosen
    )
    return FieldLabels(
        np.array([judgement.confidences[field] for judgement in chosen], np.float64),
        np.array([judgement.right[field] for judgement in chosen], np.bool_),
        np.array([judgement.weight for judgement in chosen], np.float64),
        hashlib.sha256(content.encode()).hexdigest()[:16],
        {
            judgement.name: f"{judgement.answer}{judgement.right[field]:d} {judgement.confidences[field]:.4f}"
            for judgement in chosen
        },
    )


def read_judged(settings: Settings, catalog: Catalog) -> dict[str, list[Judged]]:
    """The judged properties, by what their answers were made with (see ``PartitionSummary.made_with``).

    Those of the truth file come first, in an order that their ids decide and nobody else. Then come verdicts,
    in the order in which they were first given, which is that of the shuffled sample. A property in both
    counts by the truth file. Raises TruthError, FormatVersionError, OSError, and CommandError for a partition
    that cannot be read: without its labels others would be the first.

    A label is of the answer that is shown: where another set fills the field, it is a label of that set.
    """
    truth: Mapping[str, Mapping[str, Any]] = {}
    # The verdicts as a truth file would let those certify that were chosen for being suspicious.
    file = ResultsSettings.part_of(settings).truth
    if file is not None and file.name != REVIEWS:
        truth = read_truth(file)
    may_certify = file is None or not names_a_model(file)
    given = verdicts(settings.home)
    ordered = [
        *sorted(truth, key=lambda name: hashlib.sha256(name.encode()).digest()),
        *(name for name in given if name not in truth),
    ]
    if not ordered:
        return {}
    judged: dict[str, list[Judged]] = {}
    sets = question_sets(settings)
    of_sets = {
        asked.name: {row["property_id"]: row for row in _published_rows(asked.asset, catalog, ordered)}
        for asked in sets
    }
    sources: dict[str, dict[str, str]] = {}
    for name in ordered:
        rows = {of_set: rows[name] for of_set, rows in of_sets.items() if name in rows}
        fields = field_sources(
            (asked.name, rows[asked.name]["type"], asked.fills) for asked in sets if asked.name in rows
        )
        answers = {of_set: row["description"] for of_set, row in rows.items()}
        sources[name] = {field: source.filler(answers) or source.first for field, source in fields.items()}
    for of_set, rows in of_sets.items():
        models = {row["model"] for row in rows.values()} if truth else ()
        learned = {model: learned_labels(settings, model) for model in models}
        for name in ordered:
            row = rows.get(name)
            if row is None or not row["confidences"]:
                continue
            shown = {field for field, source in sources[name].items() if source == of_set}
            answer = answer_digest(row)
            is_learned = name in truth and name in learned[row["model"]]
            if name in truth:
                true_fields, described = truth[name], row["description"]
                right = {
                    field: same(described[field], true_fields[field])
                    for field in described
                    if field in true_fields and field in shown
                }
                weight, is_random = float(not is_learned), may_certify and not is_learned
            else:
                verdict = given[name]
                if answer not in verdict.answer.split():
                    continue
                marks = dict.fromkeys(verdict.right, True) | dict.fromkeys(verdict.wrong, False)
                right = {
                    field: is_right
                    for field, is_right in marks.items()
                    if field in shown and verdict.judges(field, answer)
                }
                weight, is_random = verdict.weight, verdict.by_chance
            judged.setdefault(row["made_with"], []).append(
                Judged(digest_of(name), answer, right, row["confidences"], weight, is_random, is_learned)
            )
    return judged


def _published_rows(asset: AssetFolders, catalog: Catalog, ids: Sequence[str]) -> Iterator[dict[str, Any]]:
    """The rows of these properties in a question set.

    With the ``type`` of the description, ``made_with``, the model's exact revision and confidences; files of
    earlier versions have none of the last three. Only the partitions of the properties are read. Raises
    CommandError if one cannot be.
    """
    ordinals = catalog.ordinals_of(set(ids))
    for catalog_range, group in groupby(ordinals, catalog.range_of):
        doing("reading what was judged")
        try:
            record, table = read_recorded(asset, catalog_range.key, _COLUMNS)
        except NotPublishedError:
            continue
        except (PublishedError, OSError, pa.ArrowException) as error:
            raise CommandError(
                f"No promise was changed, for partition {catalog_range.key} has labels and cannot be read:"
                f" {error}. Do it again; if it fails again, {command('audit')} says what is wrong with the"
                f" partition in {asset.published}."
            ) from error
        table = table.filter(pc.is_in(table["ordinal"], value_set=pa.array(list(group), pa.int64())))
        parts = record.metadata.get("parts", {})
        made_with, model = settings_digest(parts), parts.get("model", "")
        type_ = table.schema.field("description").type
        fields = type_ if CONFIDENCE in table.column_names else ()
        sure = {field.name: field_confidences(table[CONFIDENCE], field.name) for field in fields}
        for number, row in enumerate(table.to_pylist()):
            confidences = {
                name: float(values[number]) for name, values in sure.items() if np.isfinite(values[number])
            }
            facts = {"type": type_, "made_with": made_with, "model": model, "confidences": confidences}
            yield {**row, **facts}
