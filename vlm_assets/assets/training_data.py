"""What a variant is trained on: properties of the catalogue with what is known of each.

What lives here: reading a teacher's published descriptions, review verdicts, the truth of the example or a
file, and joining them with the catalogue's images. What does not: the split and the order
(``resources/training``).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from resources.training.plan import Sample, TrainingError
from vlm_assets.assets.fingerprint import digest_of
from vlm_assets.catalog.catalog import Catalog
from vlm_assets.catalog.image_root import InvalidImagePathError
from vlm_assets.settings import EXAMPLE, Settings
from vlm_assets.variants import Variant

_STRUCTS = ("description", "truth")
_NOT_FIELDS = frozenset({"property_id", "hard", "status"})

Targets = dict[str, Mapping[str, Any]]
"""What is known of each property, by its id."""


def training_samples(settings: Settings, variant: Variant) -> tuple[list[Sample], str]:
    """The samples in the order of the catalogue, and a digest of all that they say.

    Raises TrainingError, CatalogError, OSError.
    """
    targets = _targets(settings, variant)
    samples, told = [], []
    for property_id, inputs, paths in _properties(Catalog.open(settings.home), targets):
        target = targets[property_id]
        samples.append(Sample(property_id, paths, target))
        told.append([property_id, inputs, target])
    if not samples:
        raise TrainingError(
            f"There is nothing to train on: data is {variant.data!r}, and of its {len(targets)} properties"
            f" none is in the catalogue of {settings.home} with an image."
        )
    return samples, digest_of(told)


def _properties(catalog: Catalog, wanted: Targets) -> Iterator[tuple[str, str, tuple[str, ...]]]:
    """Id, digest of the inputs and image paths of each wanted property that has an image."""
    for one in catalog.ranges:
        rows = catalog.slice(one)
        columns = (rows[name].to_pylist() for name in ("property_id", "inputs_digest", "image_uris"))
        for property_id, inputs, uris in zip(*columns, strict=True):
            if property_id in wanted and (paths := tuple(_paths(catalog, uris))):
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
        return _of_file(settings.home / EXAMPLE / "truth.parquet")
    if variant.data == "review":
        return _of_file(settings.home / "review.jsonl")
    return _of_file(Path(variant.data).expanduser())


def _published(settings: Settings, partitions: Sequence[str] | None) -> Targets:
    """A teacher's answers: the ok rows of published partitions."""
    there = settings.descriptions.published_keys()
    if missing := [key for key in partitions or () if key not in there]:
        raise TrainingError(
            f"{missing[0]} is not published in {settings.descriptions.published}: materialize"
            " property_descriptions of it, or take it out of the variant's partitions."
        )
    found: Targets = {}
    for key in partitions or there:
        path = settings.descriptions.partition(key).published
        for row in pq.read_table(path, columns=["property_id", "status", "description"]).to_pylist():
            if row["status"] == "ok":
                found[row["property_id"]] = row["description"]
    return found


def _of_file(path: Path) -> Targets:
    """Ids and fields of a parquet, CSV or JSONL file; fields are columns, or one column of structs.

    Rows that are hard on purpose (``hard`` of the example's truth) are left out, as are empty values.
    """
    try:
        rows = _rows(path)
    except FileNotFoundError as error:
        raise TrainingError(
            f"{path} does not exist. data is truth (the example's own), descriptions, review, or the path"
            " of a parquet, CSV or JSONL file with the column property_id and the known fields."
        ) from error
    except (ValueError, pa.ArrowException) as error:
        raise TrainingError(f"{path} cannot be read: {' '.join(str(error).split())}") from error
    found: Targets = {}
    for number, row in enumerate(rows, start=1):
        if not isinstance(row, dict) or not isinstance(row.get("property_id"), str):
            raise TrainingError(f"{path}: row {number} has no property_id that is a text.")
        if row.get("hard") is not None:
            continue
        fields = next((row[name] for name in _STRUCTS if isinstance(row.get(name), dict)), row)
        known = {
            name: value for name, value in fields.items() if name not in _NOT_FIELDS and value is not None
        }
        if known:
            found[row["property_id"]] = known
    return found


def _rows(path: Path) -> Iterable[Any]:
    if path.suffix == ".parquet":
        rows: list[Any] = pq.read_table(path).to_pylist()
        return rows
    if path.suffix == ".csv":
        from pyarrow import csv

        with path.open("rb") as stream:
            table: list[Any] = csv.read_csv(stream).to_pylist()
            return table
    if path.suffix in (".jsonl", ".ndjson"):
        return [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
    raise ValueError("a file of .parquet, .csv or .jsonl is read")
