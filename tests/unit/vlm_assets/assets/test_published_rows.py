"""What published rows tell of outcomes, devices and time, and which of them failed."""

from __future__ import annotations

from vlm_assets.assets.published_rows import PublishedRows, first_failed, read_published_rows, row_counts


def read(dataset) -> dict[str, PublishedRows]:
    return read_published_rows(dataset.settings.descriptions, dataset.keys)


def test_rows_are_told_by_outcome_device_and_time(dataset) -> None:
    """Ok and failed rows by kind, and the stretch in which a device described them, from the record alone."""
    for key in dataset.keys:
        dataset.settings.descriptions.partition(key).published.unlink()
    found = read(dataset)
    assert list(found) == dataset.keys
    second = found[dataset.keys[1]]
    assert (second.ok, dict(second.failed)) == (2, {"missing": 1})
    (stretch,) = second.stretches
    assert (stretch.device, stretch.rows, stretch.last - stretch.first) == ("cpu-0", 3, 4.0)


def test_a_folders_name_is_no_column(dataset, tmp_path) -> None:
    """A home below ``device=…`` looks to DuckDB like a partitioned data set: its rows would all be there."""
    folder = tmp_path / "device=other"
    folder.mkdir()
    file = folder / "rows.parquet"
    file.write_bytes(dataset.settings.descriptions.partition(dataset.keys[0]).published.read_bytes())
    assert {one["device"] for one in row_counts(file)["stretches"]} == {"cpu-0"}


def test_failed_rows_are_named_from_the_files_that_read(dataset) -> None:
    """The first failed properties with the reason; one damaged file never breaks the triage."""
    descriptions = dataset.settings.descriptions
    dataset.describe(dataset.keys[0], lambda rows: [{**row, "status": "failed"} for row in rows])
    named = [one.sentence() for one in first_failed(descriptions, read(dataset))]
    assert [one.partition(":")[0] for one in named] == ["p0", "p1", "p2", "p4"]
    assert named[3] == "p4: missing: its image is gone"
    descriptions.partition(dataset.keys[0]).published.write_bytes(b"not parquet")
    assert [one.property_id for one in first_failed(descriptions, read(dataset))] == ["p4"]
