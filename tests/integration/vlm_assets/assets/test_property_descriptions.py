"""What the example model makes of a partition: a row and a vector for each property."""

import pyarrow.parquet as pq

from vlm_catalog.catalog import Catalog

KEY = "000000000-000000007"


def rows(path):
    """The rows of a published file, in its order."""
    return pq.read_table(path).to_pylist()


def test_every_property_of_the_range_comes_out_once_in_order(desk):
    """A terminal row and its vector a property, in the catalogue's order, and where the time went."""
    done = desk.materialize("property_descriptions", "property_embeddings")
    assert done.success, done.failure
    found = rows(desk.file)
    catalog = Catalog.open(desk.settings.home)
    assert [row["property_id"] for row in found] == catalog.slice(catalog.ranges[0])[
        "property_id"
    ].to_pylist()
    assert {row["status"] for row in found} <= {"ok", "failed"}
    for row in found:
        assert (row["description"] is None) == (row["status"] == "failed")
        assert (row["error_kind"] is not None) == (row["status"] == "failed")
    assert all(check.passed for check in done.checks.values())
    assert {check.partition for check in done.checks.values()} == {KEY}
    said = done.published[0].metadata
    spent = {name: said[f"seconds in {name}"].value for name in ("model", "prefill", "generation")}
    assert spent["model"] >= spent["prefill"] + spent["generation"] > 0
    assert "| answers (generation) |" in said["where the time went"].value
    embedded = rows(desk.settings.embeddings.partition(KEY).published)
    for description, embedding in zip(found, embedded, strict=True):
        assert embedding["property_id"] == description["property_id"]
        assert (embedding["embedding"] is None) == (description["status"] == "failed")
