"""The table for a person's SQL, and the exported rows: how sure each field is, in files of any version."""

import json
from tempfile import gettempdir
from time import monotonic

import pyarrow.parquet as pq
import pytest

from tests.support.sure_answers import sure_dataset
from vlm_assets.services.command_error import CommandError
from vlm_results import published_table
from vlm_results.export import Format, export
from vlm_results.published_table import matching_rows

SURE = "confidence.has_pool > 0.9"
SLOW = "(SELECT sum(sqrt(a.range * b.range)) FROM range(10000000) a, range(10000000) b) > ordinal"
GUARANTEE = "has_pool>=0.9"


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    return sure_dataset(tmp_path_factory.mktemp("sure"))


def sure_ordinals(dataset):
    paths = [dataset.settings.descriptions.partition(key).published for key in dataset.keys]
    rows = [row for path in paths for row in pq.read_table(path).to_pylist()]
    return [row["ordinal"] for row in rows if (row.get("confidence") or {"has_pool": 0})["has_pool"] > 0.9]


def test_a_condition_names_the_confidence_of_a_field_whatever_files_have_it(dataset):
    """All files, some in the middle, or none: a row without confidence is not sure, and nothing fails."""
    for without in ((), (0, 3), (1, 2)):
        for number in without:
            dataset.answer(dataset.keys[number], without_confidence=True)
        mask = matching_rows(dataset.settings, dataset.catalog, SURE)
        assert mask.nonzero()[0].tolist() == sure_ordinals(dataset)
        assert mask.any() == (without != (1, 2))
    assert not matching_rows(dataset.settings, dataset.catalog, "confidence IS NOT NULL").any()


def test_exported_rows_have_their_confidence(dataset, tmp_path):
    """Files of two versions give shards of the same columns, with null where nothing was known."""
    dataset.answer(dataset.keys[0], without_confidence=True)
    dataset.answer(dataset.keys[1])
    export(dataset.settings, dataset.catalog, tmp_path / "rows", Format.huggingface)
    old, new = (
        pq.read_table(tmp_path / "rows" / "data" / f"train-{key}.parquet") for key in dataset.keys[:2]
    )
    assert old.schema.equals(new.schema)
    assert old["confidence"].null_count == old.num_rows
    assert (
        new["confidence"].to_pylist()
        == pq.read_table(dataset.settings.descriptions.partition(dataset.keys[1]).published)[
            "confidence"
        ].to_pylist()
    )
    export(dataset.settings, dataset.catalog, tmp_path / "cells", Format.csv)
    header = (tmp_path / "cells" / f"{dataset.keys[1]}.csv").read_text().splitlines()[0]
    assert {"description.floors", "confidence.floors"} <= set(json.loads(f"[{header}]"))


@pytest.mark.parametrize(
    ("guarantee", "limit", "reading", "condition", "partitions"),
    [
        pytest.param("", 0.5, 0.0, SLOW, 0, id="in the query"),
        pytest.param(GUARANTEE, 1000.0, 600.0, "floors >= 0", 2, id="between the partitions that are copied"),
        pytest.param(GUARANTEE, 1000.0, 249.9, SLOW, 4, id="in the query, after what copying took"),
    ],
)
def test_a_condition_that_takes_too_long_is_ended(
    tmp_path, monkeypatch, guarantee, limit, reading, condition, partitions
):
    """Copying and the query have one limit together, and end with a sentence: none holds the machine."""
    dataset = sure_dataset(tmp_path, guarantee=guarantee)
    read_rows, read = published_table.read_rows, []
    monkeypatch.setattr(published_table, "SECONDS", limit)
    monkeypatch.setattr(published_table, "monotonic", lambda: monotonic() + reading * len(read))
    monkeypatch.setattr(
        published_table, "read_rows", lambda *of, **more: (read.append(of), read_rows(*of, **more))[1]
    )
    with pytest.raises(CommandError, match=rf"ended after {limit:g} s\. Nothing was changed"):
        matching_rows(dataset.settings, dataset.catalog, condition)
    assert len(read) == partitions


@pytest.mark.parametrize("guarantee", ["", GUARANTEE])
def test_rows_without_room_in_memory_and_on_disk_end_with_a_sentence(tmp_path, monkeypatch, guarantee):
    """Whoever meets a full temporary folder reads which folder it is, and how to take another."""
    dataset = sure_dataset(tmp_path, guarantee=guarantee)
    monkeypatch.setattr(published_table, "MEMORY", "1KB")
    with pytest.raises(CommandError, match=rf"Nothing was changed.* {gettempdir()}: .*TMPDIR"):
        matching_rows(dataset.settings, dataset.catalog, "floors >= 0")
