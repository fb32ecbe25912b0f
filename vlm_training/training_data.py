"""The data that a variant is trained on: properties of the catalogue, and the known fields of each.

The known fields come from a teacher's published descriptions, review verdicts, the truth of the example or a
file. They are joined here with the catalogue's images.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from pathlib import Path
from typing import Any, Final

import pyarrow.parquet as pq

from vlm_assets.assets.fingerprint import digest_of
from vlm_assets.assets.learned_labels import LearnedLabels, learned_labels
from vlm_assets.assets.partition import CONFIDENCE
from vlm_assets.assets.truth import REVIEWS, TruthError, read_truth
from vlm_assets.config.settings import EXAMPLE, Settings
from vlm_catalog.catalog import Catalog
from vlm_catalog.image_root import InvalidImagePathError
from vlm_catalog.stored_catalog import pull_catalog
from vlm_durable.versions.published import PublishedPartitions
from vlm_durable.versions.stored import StoredPartitions
from vlm_durable.versions.versioned_object import PublishedError
from vlm_durable.wording import counted
from vlm_training.training_plan import Sample, TrainingError
from vlm_training.variants import Variant

_COLUMNS: Final = ("property_id", "status", "description", CONFIDENCE)


def pull_data(settings: Settings, variant: Variant) -> list[str]:
    """Take over from the store the data of a variant: the catalogue and a teacher's answers.

    Returns sentences that say what was done. Raises StoreError, CatalogError.
    """
    pull_catalog(settings.home, settings.mirror)
    if variant.data != "descriptions":
        return []
    keys = variant.partitions or [bounds.key for bounds in Catalog.open(settings.home).ranges]
    stored = StoredPartitions(settings.descriptions, settings.mirror)
    return [note for key in keys for note in stored.pull(key)]


@dataclass(frozen=True)
class KnownFields:
    """The known fields of a property. confidence: how sure a teacher was of each, where it is known."""

    fields: Mapping[str, Any]
    confidence: Mapping[str, Any] = field(default_factory=dict)


Targets = dict[str, KnownFields]
"""The target of each property, by its id."""


def training_samples(settings: Settings, variant: Variant) -> tuple[list[Sample], str]:
    """The samples in the order of the catalogue, and a digest of their content.

    Raises TrainingError, CatalogError, OSError.
    """
    targets = _targets(settings, variant)
    samples, content = [], []
    for property_id, inputs, paths in _properties(Catalog.open(settings.home), targets):
        target = targets[property_id]
        samples.append(Sample(property_id, paths, target.fields, target.confidence))
        # Without confidences the digest is that of earlier versions: their trainings go on.
        weights = [target.confidence] if target.confidence else []
        content.append([property_id, inputs, target.fields, *weights])
    if not samples:
        raise TrainingError(
            f"There is nothing to train on: data is {variant.data!r}, and of its"
            f" {counted(len(targets), 'properties')}"
            f" none is in the catalogue of {settings.home} with an image."
        )
    return samples, digest_of(content)


def _properties(catalog: Catalog, targets: Targets) -> Iterator[tuple[str, str, tuple[str, ...]]]:
    """Id, digest of the inputs and image paths of each property with a target and an image."""
    for bounds in catalog.ranges:
        rows = catalog.slice(bounds)
        columns = (rows[name].to_pylist() for name in ("property_id", "inputs_digest", "image_uris"))
        for property_id, inputs, uris in zip(*columns, strict=True):
            if property_id in targets and (paths := tuple(_paths(catalog, uris))):
                yield property_id, inputs, paths


def _paths(catalog: Catalog, uris: Iterable[str]) -> Iterator[str]:
    for uri in uris:
        try:
            yield str(catalog.image_path(uri))
        except InvalidImagePathError:
            continue  # A link that leads out of the root is never opened.


def _targets(settings: Settings, variant: Variant) -> Targets:
    if variant.data == "descriptions":
        return _published(settings, variant.partitions)
    if variant.data == "truth":
        return _read_targets(settings.home / EXAMPLE / "truth.parquet")
    if variant.data == "review":
        return _read_targets(settings.home / REVIEWS)
    return _read_targets(Path(variant.data).expanduser())


def _published(settings: Settings, partitions: Sequence[str] | None) -> Targets:
    """A teacher's answers: the ok rows of published partitions."""
    published = settings.descriptions.published_keys()
    if missing := [key for key in partitions or () if key not in published]:
        raise TrainingError(
            f"{missing[0]} is not published in {settings.descriptions.published}: materialize"
            " property_descriptions of it, or take it out of the variant's partitions."
        )
    targets: Targets = {}
    for key in partitions or published:
        path = settings.descriptions.partition(key).published
        names = pq.read_schema(path).names  # Files of earlier versions have no confidence.
        for row in pq.read_table(path, columns=[name for name in _COLUMNS if name in names]).to_pylist():
            if row["status"] == "ok":
                confidence = _known_confidence(row.get(CONFIDENCE) or {})
                targets[row["property_id"]] = KnownFields(row["description"], confidence)
    return targets


def learned_by_teachers(settings: Settings, variant: Variant) -> LearnedLabels:
    """The properties whose labels a teacher had learned: its answers tell them.

    Raises TrainingError, CatalogError, OSError, SettingsError.
    """
    published = PublishedPartitions(settings.descriptions)
    try:
        records = [
            published.record(key) for key in variant.partitions or settings.descriptions.published_keys()
        ]
    except PublishedError as error:
        raise TrainingError(
            f"Nobody knows which model made the descriptions to learn from: {error}"
        ) from error
    models = {record.metadata.get("parts", {}).get("model", "") for record in records if record is not None}
    learned = (learned_labels(settings, model) for model in models)
    return reduce(LearnedLabels.joined, learned, LearnedLabels())


def _known_confidence(confidence: Mapping[str, Any]) -> dict[str, Any]:
    """The confidences that are known, with three digits: the rest is noise of the batch."""
    rounded = {
        name: _known_confidence(sure) if isinstance(sure, Mapping) else round(sure, 3)
        for name, sure in confidence.items()
        if sure is not None
    }
    return {name: sure for name, sure in rounded.items() if sure != {}}


def _read_targets(path: Path) -> Targets:
    """The true fields in a file. Rows that are hard on purpose are left out. Raises TrainingError."""
    try:
        targets = read_truth(path, hard_too=False)
    except TruthError as error:
        raise TrainingError(
            f"{error} data is truth (the example's own), descriptions, review, or the path of a parquet, CSV"
            " or JSONL file with the column property_id and the known fields."
        ) from error
    return {property_id: KnownFields(fields) for property_id, fields in targets.items() if fields}
