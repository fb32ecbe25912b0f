"""Search gives what a plain loop over all vectors gives, from several partitions, blocks and conditions."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from tests.support.homes import Dataset
from vlm_assets.commands.html_page import page
from vlm_assets.config.settings import load_settings
from vlm_assets.services.command_error import CommandError
from vlm_catalog.ingest import ingest
from vlm_durable.versions.partition_rows import PartitionRows
from vlm_results import search as search_module
from vlm_results.search import Hit, cards, scan, search

WIDTH = 8
SIZES = (40, 1, 25, 60, 3)
"""Rows of the partitions; the ordinals go on from one to the next."""

Vectors = npt.NDArray[np.float32]


@pytest.fixture
def vectors(tmp_path: Path) -> Vectors:
    """Of all partitions, by ordinal; every seventh row has none (NaN here), and one has no direction."""
    all_vectors = np.random.default_rng(3).standard_normal((sum(SIZES), WIDTH)).astype(np.float32)
    # Long ones: the score is an angle, and no length.
    all_vectors *= np.linspace(0.1, 50, len(all_vectors), dtype=np.float32)[:, None]
    all_vectors[::7] = np.nan
    all_vectors[5] = 0.0
    start = 0
    for number, size in enumerate(SIZES):
        part = all_vectors[start : start + size]
        cells = [None if np.isnan(one).any() else one.tolist() for one in part]
        columns = {
            "ordinal": pa.array(range(start, start + size), pa.int64()),
            "embedding": pa.array(cells, pa.list_(pa.float32(), WIDTH)),
        }
        pq.write_table(
            pa.table(columns), tmp_path / f"{number}.parquet", row_group_size=16, write_page_checksum=True
        )
        start += size
    return all_vectors


def brute_force(
    vectors: Vectors, query: Vectors, mask: npt.NDArray[np.bool_] | None
) -> list[tuple[float, int]]:
    """Every cosine, one after the other, best first."""
    scores = []
    for ordinal, vector in enumerate(vectors):
        if not np.isnan(vector).any() and (mask is None or mask[ordinal]):
            length = float(np.linalg.norm(vector))
            scores.append((float(vector @ query) / length if length else -1.0, ordinal))
    return sorted(scores, reverse=True)


@pytest.mark.parametrize("block", [4, 8192])
@pytest.mark.parametrize("most", [1, 7, 1000])
@pytest.mark.parametrize("is_masked", [False, True])
def test_the_nearest_of_all_partitions_are_those_of_a_plain_loop(
    vectors: Vectors, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: int, most: int, is_masked: bool
) -> None:
    """No hit is lost between blocks, partitions or threads, and none comes twice."""
    monkeypatch.setattr(search_module, "BATCH_ROWS", block)
    random = np.random.default_rng(4)
    keys = [str(number) for number in range(len(SIZES))]
    for _ in range(3):
        query = random.standard_normal(WIDTH).astype(np.float32)
        query /= np.linalg.norm(query)
        mask = random.random(len(vectors)) < 0.4 if is_masked else None
        expected = brute_force(vectors, query, mask)
        found, scanned = scan(
            keys, lambda key: PartitionRows(tmp_path / f"{key}.parquet"), query, mask=mask, most=most
        )
        assert scanned == len(expected)
        assert [ordinal for _, ordinal in found] == [ordinal for _, ordinal in expected[:most]]
        assert [score for score, _ in found] == pytest.approx(
            [score for score, _ in expected[:most]], abs=1e-5
        )


@pytest.fixture
def home(dataset, monkeypatch: pytest.MonkeyPatch):
    """Nine properties in three partitions with the vectors [1, ordinal]; p4 has none. "wide" is [0, 40]."""
    monkeypatch.setattr(search_module, "embedding_parts", lambda model: {"embedder": "m"})
    monkeypatch.setattr(search_module, "embed_text", lambda settings, text: np.array([0, 40], np.float32))
    return dataset


def ids(home, **asked) -> list[str]:
    return [hit.property_id for hit in search(home.settings, home.catalog, **asked).hits]


def angle(first: Vectors, second: Vectors) -> float:
    return float(first @ second / np.linalg.norm(first) / np.linalg.norm(second))


def test_a_text_with_a_property_is_searched_for_in_the_middle_of_both(home) -> None:
    """Both count alike, however long their vectors are; the property itself is no hit."""
    of = {f"p{n}": np.array([1.0, n]) for n in range(9) if n != 4}
    middle = of["p0"] + np.array([0.0, 1.0])
    expected = sorted((name for name in of if name != "p0"), key=lambda name: -angle(of[name], middle))
    assert expected[0] == "p1", "half way between the text and p0: not what is nearest to either of them"
    assert ids(home, text="wide", like="p0") == expected
    assert ids(home, text="wide", like="p0", limit=3) == expected[:3]
    assert ids(home, text="wide") == ["p8", "p7", "p6", "p5", "p3", "p2", "p1", "p0"]
    assert ids(home, like="p0")[0] == "p1"
    with pytest.raises(CommandError, match="Give a text"):
        search(home.settings, home.catalog)


def test_a_condition_holds_in_every_partition(home) -> None:
    """Only chosen properties are hits, and as many as were asked for; p4 was chosen and has no vector."""
    mask = np.isin(np.arange(9), (0, 2, 4, 8))
    found = search(home.settings, home.catalog, text="wide", mask=mask, limit=2)
    assert [hit.property_id for hit in found.hits] == ["p8", "p2"]
    assert found.scanned == 8, "rows of the index of words"
    assert ids(home, like="p2", mask=mask) == ["p8", "p0"]
    assert ids(home, like="p2", mask=mask, limit=1) == ["p8"]
    assert ids(home, like="p1", mask=mask, limit=2) == ["p2", "p8"], "p1 is not chosen, and may be asked for"


def test_words_beside_vectors_count_where_all_of_them_are(home) -> None:
    """A row with one word of two is not put before what the vectors find; by words alone it is a hit."""
    home.describe(
        home.keys[0],
        lambda rows: [{**row, "description": {"floors": 2, "has_pool": row["ordinal"] == 1}} for row in rows],
        text="pools",
    )
    nearest = ["p8", "p7", "p6", "p5", "p3", "p2", "p1", "p0"]
    assert ids(home, text="a pool")[0] == "p1", "seventh by vectors, first by words"
    assert ids(home, text="a pool and a lake") == nearest
    assert ids(home, text="a pool and a lake", by=("vectors",)) == nearest
    assert ids(home, text="a pool and a lake", by=("words",)) == ["p1"]


def test_without_an_embedder_a_search_goes_by_words_and_says_so(home) -> None:
    """No describing model embeds in its place; what needs a vector says what names an embedder."""
    unnamed = home.settings.model_copy(update={"embedding_model": None})
    found = search(unnamed, home.catalog, text="wide")
    assert found.left_out == ()
    assert "set VLM_ASSETS_EMBEDDING_MODEL" in found.notes[0]
    with pytest.raises(CommandError, match="set VLM_ASSETS_EMBEDDING_MODEL"):
        search(unnamed, home.catalog, like="p0")


def test_partitions_of_another_embedding_model_are_left_out_and_named(home, monkeypatch) -> None:
    """Vectors of two models lie in two spaces: their angle says nothing."""
    key = home.keys[1]
    parts = home.embeddings.record(key).metadata["parts"]
    assert parts["embedder"] == "m"
    records, _ = search_module.readable_records(home.settings.embeddings, home.catalog)
    changed = dict(records[key].metadata, parts={**parts, "embedder": "other"})
    monkeypatch.setattr(
        search_module,
        "readable_records",
        lambda *_: ({**records, key: type(records[key])(**{**vars(records[key]), "metadata": changed})}, {}),
    )
    found = search(home.settings, home.catalog, text="wide")
    assert found.left_out == (key,)
    assert {hit.property_id for hit in found.hits} == {"p0", "p1", "p2", "p6", "p7", "p8"}
    with pytest.raises(CommandError, match="no vector of the present"):
        search(home.settings, home.catalog, like="p3")


def test_a_page_names_an_image_that_cannot_be_shown_and_says_how_many_there_are(tmp_path: Path) -> None:
    """Four images of nine are no whole property, and a grey box says which file is damaged."""
    folder = tmp_path / "images" / "p1"
    folder.mkdir(parents=True)
    for number in range(9):
        Image.new("RGB", (64, 48), "red").save(folder / f"{number}.jpg")
    (folder / "2.jpg").write_bytes(b"no image")
    ingest(tmp_path / "images", tmp_path / "home", close=True)
    home = Dataset(load_settings(model="example", home=tmp_path / "home"))
    home.describe(home.keys[0])
    text = page("red", cards(home.settings, home.catalog, [Hit("p1", 0, 1.0)]))
    assert text.count("data:image/jpeg;base64,") == 3
    assert "2.jpg cannot be shown" in text
    assert "4 of 9 images" in text
