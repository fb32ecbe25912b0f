"""``vlm-assets search`` and ``export`` over what the example model really said of sixteen properties."""

import csv
import hashlib
import json
import os
import subprocess

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from tests.support.damage import flip_bit
from vlm_assets.commands.main import app
from vlm_assets.services.command_error import CommandError
from vlm_catalog.catalog import Catalog
from vlm_results.explore import TOTAL, explore_table
from vlm_results.published_table import matching_rows, table
from vlm_results.search import batch_scores

KEYS = ("000000000-000000007", "000000008-000000015")


@pytest.fixture
def described(desk):
    """Both partitions, described and embedded for real."""
    for key in KEYS:
        assert desk.materialize("property_descriptions", "property_embeddings", key=key).success
    return desk


def run(desk, *options):
    done = CliRunner().invoke(app, [*options, "--home", str(desk.settings.home)])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    assert done.exit_code == 0, done.output
    return done.stdout


def rows_of(desk, asset):
    folder = desk.settings.layout.asset(asset).published
    return pa.concat_tables([pq.read_table(one, partitioning=None) for one in sorted(folder.iterdir())])


def test_search_and_export_of_what_was_said(described, tmp_path, monkeypatch):
    """The whole way of a person who finds, looks, and gives rows on; nothing of the home is written."""
    before = {path: path.stat().st_mtime_ns for path in described.settings.home.rglob("*.parquet")}
    rows, vectors = rows_of(described, "property_descriptions"), rows_of(described, "property_embeddings")
    ok = rows.filter(pa.compute.equal(rows["status"], "ok"))
    _finds_by_text_and_by_neighbour(described, ok, vectors, tmp_path)
    _conditions_choose_and_reach_nothing_else(described, rows, tmp_path)
    _exports_in_three_formats(described, rows, vectors, tmp_path)
    _an_export_goes_on_and_notices_damage(described, tmp_path, monkeypatch)
    assert {path: path.stat().st_mtime_ns for path in described.settings.home.rglob("*.parquet")} == before
    _explores_what_has_a_vector(described, ok, vectors)


def _finds_by_text_and_by_neighbour(desk, ok, vectors, tmp_path):
    name, text = ok["property_id"][0].as_py(), json.dumps(ok["description"][0].as_py())
    found = json.loads(run(desk, "search", text, "--limit", "5", "--json"))
    assert len(found) == 5
    assert all(set(one) == {"property_id", "score"} for one in found)
    scores = [one["score"] for one in found]
    assert scores == sorted(scores, reverse=True)
    near = json.loads(run(desk, "search", "--like", name, "--limit", "15", "--json"))
    assert name not in {one["property_id"] for one in near}
    of = dict(zip(vectors["property_id"].to_pylist(), vectors["embedding"].to_pylist(), strict=True))
    mine = np.array(of[name])
    cosines = {
        one: float(mine @ np.array(other) / np.linalg.norm(mine) / np.linalg.norm(other))
        for one, other in of.items()
        if other is not None and one != name
    }
    assert {one["property_id"]: pytest.approx(one["score"], abs=1e-5) for one in near} == cosines
    page = tmp_path / "page.html"
    said = run(desk, "search", "--like", name, "--limit", "3", "--html", str(page))
    assert len(said.splitlines()) == 8, "two lines a hit"
    written = page.read_text()
    assert written.count("data:image/jpeg;base64,") >= 3
    assert "default-src &#x27;none&#x27;" in written
    assert "http:" not in written.replace("http-equiv", "")
    assert "https:" not in written


def _conditions_choose_and_reach_nothing_else(desk, rows, tmp_path):
    field, value = next(
        (name, one)
        for name, one in rows.filter(pa.compute.equal(rows["status"], "ok"))["description"][0].as_py().items()
        if isinstance(one, str) and one.isidentifier()
    )
    expected = sum((one or {}).get(field) == value for one in rows["description"].to_pylist())
    catalog = Catalog.open(desk.settings.home)
    assert matching_rows(desk.settings, catalog, f"{field} = '{value}'").sum() == expected > 0
    found = json.loads(run(desk, "search", "a house", "--where", f"{field} = '{value}'", "--json"))
    assert len(found) == expected
    published = desk.settings.descriptions.partition(KEYS[0]).published
    whole = published.read_bytes()
    outside = tmp_path / "outside.txt"
    outside.write_text("secret")
    for condition in (
        f"1 = 1); COPY (SELECT 1) TO '{published}'; SELECT (1 = 1",
        f"1 = 1); COPY (SELECT 1) TO '{tmp_path}/new.csv'; SELECT (1 = 1",
        f"(SELECT count(*) FROM read_text('{outside}')) > 0",
        "(SELECT count(*) FROM read_text('/etc/hostname')) > 0",
        "(SELECT count(*) FROM read_csv('http://127.0.0.1:1/x.csv')) > 0",
        "no_such_field = 1",
        "1 = 1); SET enable_external_access = true; SELECT (1 = 1",
    ):
        with pytest.raises(CommandError):
            matching_rows(desk.settings, catalog, condition)
    assert published.read_bytes() == whole
    assert not (tmp_path / "new.csv").exists()
    with table(desk.settings, KEYS) as connection, pytest.raises(Exception, match=r"[Cc]annot"):
        connection.execute("SET enable_external_access = true")


def _explores_what_has_a_vector(desk, ok, vectors):
    catalog = Catalog.open(desk.settings.home)
    # Three: the map of more needs the extra.
    found = explore_table(desk.settings, catalog, sample=3)
    of = int(found.schema.metadata[TOTAL])
    assert (found.num_rows, of) == (3, ok.num_rows)
    assert of < catalog.rows, "a failed property has no vector"
    described = {row["property_id"]: row for row in ok.to_pylist()}
    vector_of = dict(zip(vectors["property_id"].to_pylist(), vectors["embedding"].to_pylist(), strict=True))
    for row in found.to_pylist():
        name = row["property_id"]
        assert row["vector"] == vector_of[name]
        assert {field: row[field] for field in described[name]["description"]} == described[name][
            "description"
        ]
        assert (row["partition"] in KEYS, row["model"]) == (True, described[name]["model"])
        assert row["thumbnail"]["bytes"].startswith(b"\xff\xd8")
        assert len(row["neighbours"]["ids"]) == 2
    again = explore_table(desk.settings, catalog, sample=3)
    assert (again, again.schema.metadata[TOTAL]) == (found, found.schema.metadata[TOTAL])


def _exports_in_three_formats(desk, rows, vectors, tmp_path):
    folder = tmp_path / "hf"
    said = json.loads(run(desk, "export", str(folder), "--json"))
    assert (said["rows"], said["shards"], said["kept"]) == (16, 2, 0)
    written = pa.concat_tables(
        [pq.read_table(one, partitioning=None) for one in sorted((folder / "data").iterdir())]
    )
    assert written["property_id"].to_pylist() == rows["property_id"].to_pylist()
    assert written["description"].to_pylist() == rows["description"].to_pylist()
    assert written["embedding"].to_pylist() == vectors["embedding"].to_pylist()
    assert all(written["image_uris"].to_pylist())
    card = (folder / "README.md").read_text()
    assert card.startswith("---\nlicense: other\n")
    assert "16 properties" in card
    assert subprocess.run(["sha256sum", "-c", "SHA256SUMS"], cwd=folder, capture_output=True).returncode == 0
    run(desk, "export", str(tmp_path / "lines"), "--format", "jsonl")
    lines = [
        json.loads(line)
        for one in sorted((tmp_path / "lines").glob("*.jsonl"))
        for line in one.read_text().splitlines()
    ]
    assert [one["description"] for one in lines] == rows["description"].to_pylist()
    run(desk, "export", str(tmp_path / "flat"), "--format", "csv", "--where", "status = 'ok' AND ordinal < 8")
    (one,) = (tmp_path / "flat").glob("*.csv")
    with one.open(newline="") as stream:
        flat = list(csv.DictReader(stream))
    ok = [row for row in rows.to_pylist() if row["status"] == "ok" and row["ordinal"] < 8]
    assert [row["property_id"] for row in flat] == [row["property_id"] for row in ok]
    name = next(iter(ok[0]["description"]))
    assert [row[f"description.{name}"] for row in flat] == [str(row["description"][name]) for row in ok]


def _an_export_goes_on_and_notices_damage(desk, tmp_path, monkeypatch):
    folder = tmp_path / "hf"
    first, second = sorted((folder / "data").iterdir())
    flip_bit(first, 100)
    seen = hashlib.sha256(second.read_bytes()).hexdigest()
    left = folder / "data" / f".{second.name}.1-0123456789ab.tmp"
    left.write_bytes(b"what a killed export had begun")
    again = json.loads(run(desk, "export", str(folder), "--json"))
    assert (again["rows"], again["kept"]) == (16, 1)
    assert hashlib.sha256(second.read_bytes()).hexdigest() == seen
    assert not left.exists(), "it would be sent along"
    with pytest.raises(CommandError, match="another export"):
        run(desk, "export", str(folder), "--format", "csv")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "letter.txt").write_text("mine")
    with pytest.raises(CommandError, match="other files"):
        run(desk, "export", str(tmp_path / "full"))

    def refuse(path):
        raise OSError(28, "No space left on device", str(path))

    with monkeypatch.context() as full:
        full.setattr(os, "fsync", refuse)
        with pytest.raises(OSError, match="No space left"):
            run(desk, "export", str(tmp_path / "none"))
    assert json.loads(run(desk, "export", str(tmp_path / "none"), "--json"))["rows"] == 16


def test_rows_without_a_vector_or_a_direction_are_never_near() -> None:
    """A failed row has no vector, a zero vector no direction: neither moves the others."""
    vectors = pa.array([[0.0, 2.0], None, [0.0, 0.0], [3.0, 0.0]], pa.list_(pa.float32(), 2))
    batch = pa.record_batch({"ordinal": pa.array([5, 6, 7, 8]), "embedding": vectors})
    ordinals, scores = batch_scores(batch, np.array([0.0, 1.0], np.float32))
    assert ordinals.tolist() == [5, 7, 8]
    assert scores.tolist() == [1.0, -1.0, 0.0]
