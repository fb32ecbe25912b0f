"""What the IO manager hands on, says and refuses, inside real materializations."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dagster as dg
import pyarrow as pa
import pytest

from resources.parquet_io import ParquetIOManager
from vlm_durable.files.layout import Home
from vlm_durable.versions.partition_files import NotPublishedError
from vlm_durable.versions.partition_rows import PartitionRows
from vlm_durable.versions.published import Publication, PublishedPartitions, StagedFile
from vlm_durable.versions.versioned_object import PublishedError

RANGES = dg.StaticPartitionsDefinition(["000-001", "002-003"])
SCHEMA = pa.schema([("property_id", pa.string()), ("text", pa.string())])
IDS = ["x", "y"]


def stage(home: Path, key: str, text: str = "a", expected: list[str] = IDS) -> StagedFile:
    batch = pa.record_batch([IDS, [text, text]], schema=SCHEMA)
    partitions = PublishedPartitions(Home(home).asset("property_descriptions"))
    return partitions.stage(key, [batch], SCHEMA, expected_ids=expected, fingerprint=text)


def describing(answer: Callable[[str], Any]) -> dg.AssetsDefinition:
    @dg.asset(name="property_descriptions", partitions_def=RANGES, io_manager_key="io")
    def descriptions(context: dg.AssetExecutionContext) -> Any:
        return answer(context.partition_key)

    return descriptions


def materialize(
    home: Path, asset: dg.AssetsDefinition, key: str = "000-001", **kwargs: Any
) -> dg.ExecuteInProcessResult:
    return dg.materialize(
        [asset], partition_key=key, resources={"io": ParquetIOManager(home=Home(home))}, **kwargs
    )


def metadata_of(result: dg.ExecuteInProcessResult) -> dict[str, Any]:
    (materialization,) = result.asset_materializations_for_node("property_descriptions")
    return {name: value.value for name, value in materialization.metadata.items()}


def test_staged_file_is_published_with_metadata(tmp_path: Path) -> None:
    """The partition's page shows where the file is, its rows, bytes, digest and version."""
    result = materialize(tmp_path, describing(lambda key: stage(tmp_path, key)))
    partitions = PublishedPartitions(Home(tmp_path).asset("property_descriptions"))
    record = partitions.record("000-001")
    assert record is not None
    assert metadata_of(result) == {
        "path": str(tmp_path / "property_descriptions" / "000-001.parquet"),
        "dagster/uri": (tmp_path / "property_descriptions" / "000-001.parquet").as_uri(),
        "dagster/partition_row_count": 2,
        "bytes": record.bytes,
        "digest": record.sha256[:12],
        "version": 1,
        "changed": True,
    }
    assert partitions.verify("000-001").ok


def test_already_published_changes_nothing(tmp_path: Path) -> None:
    """A complete, unchanged partition is materialized again without touching its files."""
    materialize(tmp_path, describing(lambda key: stage(tmp_path, key)))
    partitions = PublishedPartitions(Home(tmp_path).asset("property_descriptions"))
    record = partitions.record("000-001")
    assert record is not None
    before = {path: path.stat().st_mtime_ns for path in partitions.asset.home.root.rglob("*")}
    result = materialize(tmp_path, describing(lambda key: Publication(record, changed=False)))
    assert metadata_of(result)["changed"] is False
    assert metadata_of(result)["dagster/partition_row_count"] == 2
    assert {path: path.stat().st_mtime_ns for path in partitions.asset.home.root.rglob("*")} == before


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (lambda home, key: stage(home, key, "b", ["x", "z"]), "ids are not the expected ones"),
        (lambda home, key: stage(home, "002-003", "b"), "handed the file of partition"),
        (lambda home, key: pa.table({"property_id": IDS}), "returned a Table"),
        (
            lambda home, key: PublishedPartitions(Home(home).asset("property_descriptions")).publish(
                stage(home, "002-003")
            ),
            "handed the file of partition",
        ),
    ],
)
def test_refusal_fails_the_partition_and_keeps_the_old_file(tmp_path, answer, said) -> None:
    """The last line of defence: nothing is materialized, and what was published stays."""
    materialize(tmp_path, describing(lambda key: stage(tmp_path, key, "a")))
    asset = describing(lambda key: answer(tmp_path, key))
    result = materialize(tmp_path, asset, raise_on_error=False)
    assert not result.success
    assert result.asset_materializations_for_node("property_descriptions") == []
    (failure,) = [event for event in result.all_events if event.is_step_failure]
    error = str(failure.step_failure_data.error)
    assert "PublishedError" in error and said in error
    partitions = PublishedPartitions(Home(tmp_path).asset("property_descriptions"))
    assert partitions.read("000-001").to_table(["text"]).column(0).to_pylist() == ["a", "a"]
    assert partitions.verify("000-001").ok


@pytest.mark.filterwarnings("ignore:.*backfill_policy")
def test_range_run_is_refused(tmp_path: Path) -> None:
    """One run over several partitions cannot be published as one file, and says so."""

    @dg.asset(
        name="property_descriptions",
        partitions_def=RANGES,
        io_manager_key="io",
        backfill_policy=dg.BackfillPolicy.single_run(),
    )
    def descriptions(context: dg.AssetExecutionContext) -> Any:
        return stage(tmp_path, "000-001")

    with pytest.raises(PublishedError, match="one partition a run, and this run has 2"):
        dg.materialize(
            [descriptions],
            resources={"io": ParquetIOManager(home=Home(tmp_path))},
            tags={
                "dagster/asset_partition_range_start": "000-001",
                "dagster/asset_partition_range_end": "002-003",
            },
        )


def test_downstream_loads_lazily(tmp_path: Path) -> None:
    """The same partition gives one handle; an unpartitioned reader gets all of them by key."""
    asset = describing(lambda key: stage(tmp_path, key, key))
    for key in RANGES.get_partition_keys():
        materialize(tmp_path, asset, key)
    seen: dict[str, Any] = {}

    @dg.asset(partitions_def=RANGES)
    def one(property_descriptions: PartitionRows) -> None:
        seen["one"] = property_descriptions

    @dg.asset
    def every(property_descriptions: dict[str, PartitionRows]) -> None:
        seen["every"] = property_descriptions

    io = ParquetIOManager(home=Home(tmp_path))
    with warnings.catch_warnings():
        warnings.simplefilter("error", dg.PreviewWarning)
        dg.materialize([asset, one], selection=[one], partition_key="002-003", resources={"io": io})
        dg.materialize([asset, every], selection=[every], resources={"io": io})
    assert seen["one"].path == tmp_path / "property_descriptions" / "002-003.parquet"
    assert seen["one"].to_table(["text"]).column_names == ["text"]
    assert {key: rows.to_table().column("text")[0].as_py() for key, rows in seen["every"].items()} == {
        key: key for key in RANGES.get_partition_keys()
    }


def test_downstream_of_nothing_is_told(tmp_path: Path) -> None:
    """Loading a partition that was never published is an error by name, not an empty table."""
    asset = describing(lambda key: stage(tmp_path, key))

    @dg.asset(partitions_def=RANGES)
    def one(property_descriptions: PartitionRows) -> None:
        raise AssertionError("must not run")

    with pytest.raises(NotPublishedError, match="Materialize it first"):
        dg.materialize(
            [asset, one],
            selection=[one],
            partition_key="002-003",
            resources={"io": ParquetIOManager(home=Home(tmp_path))},
        )
