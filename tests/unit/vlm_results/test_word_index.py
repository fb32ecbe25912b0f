"""The words of descriptions: an index that follows what is published, and is rebuilt where it is lost."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from tests.support.damage import flip_bit
from vlm_results import word_index
from vlm_results.published_table import readable_records
from vlm_results.search import fused, line_of, search
from vlm_results.word_index import find_words, forget_words, words_of

POOLS = frozenset({"p1", "p5", "p7"})


def with_pools(names=POOLS):
    def change(rows):
        return [
            {**row, "description": {"floors": 2, "has_pool": row["property_id"] in names}}
            if row["status"] == "ok"
            else row
            for row in rows
        ]

    return change


@pytest.fixture
def home(dataset):
    for key in dataset.keys:
        dataset.describe(key, with_pools(), text=f"pools of {key}")
    return dataset


def find(home, text="a pool", **asked) -> list[str]:
    records, _ = readable_records(home.settings.descriptions, home.catalog)
    found = find_words(home.settings, records, text, **{"most": 20, **asked})
    names = [row["property_id"] for key in home.keys for row in home.rows(key)]
    return sorted(names[ordinal] for _, ordinal in found.ranked)


def test_words_follow_what_is_published(home, monkeypatch) -> None:
    """Only a changed partition is read again, and a search never answers from an earlier text."""
    assert find(home) == sorted(POOLS)
    read = []
    rows = word_index._rows
    monkeypatch.setattr(word_index, "_rows", lambda *of, rows=rows: read.append(of[-1]) or rows(*of))
    assert find(home) == sorted(POOLS)
    assert read == []
    home.describe(home.keys[0], with_pools({"p0"}), text="other", settings="t")
    assert find(home) == ["p0", "p5", "p7"]
    assert read == [home.keys[0]]
    mask = np.isin(np.arange(9), (0, 7))
    assert find(home, mask=mask) == ["p0", "p7"]
    assert find(home, mask=mask, most=1) == ["p0"]
    assert find(home, "floors 2") == [], "a word of all rows tells none from another"
    assert find(home, 'pool" OR "floors) NEAR(') == ["p0", "p5", "p7"], "a text is no query language"


def test_every_word_of_a_text_is_in_a_row_that_has_them_all(home) -> None:
    """Beside vectors a row with one word of two counts for nothing; "a" and "with" are no words."""
    home.describe(
        home.keys[0],
        lambda rows: [
            {**row, "description": {"floors": row["ordinal"], "has_pool": row["ordinal"] > 0}} for row in rows
        ],
    )
    assert find(home, "1 pool") == ["p1", "p2", "p5", "p7"]
    assert find(home, "the 1 with a pool", every=True) == ["p1"]
    assert find(home, "pool", every=True) == ["p1", "p2", "p5", "p7"]
    assert find(home, "a pool and a garage", every=True) == [], "no description has the word garage"
    assert find(home, "a pool on some floors") == ["p1", "p2", "p5", "p7"]
    assert find(home, "with a", every=True) == []


def test_a_word_that_no_row_has_is_looked_for_in_parts(home, monkeypatch) -> None:
    """Numbers as words, "fire" for a fireplace, "bathtub" for a bath; never where all words must be there."""
    words = {1: "1 floors", 2: "2 floors fireplace", 3: "3 floors fireplace"}
    monkeypatch.setattr(
        word_index, "words_of", lambda row: f"{words[row['floors']]} {words_of({**row, 'floors': None})}"
    )
    home.describe(
        home.keys[0], lambda rows: [{**row, "description": {"floors": row["ordinal"] + 1}} for row in rows]
    )
    for key in home.keys[1:]:
        home.describe(
            key,
            lambda rows: [
                {**row, "description": {"floors": 1, "has_pool": row["property_id"] in POOLS}}
                if row["status"] == "ok"
                else row
                for row in rows
            ],
            text="other pools",
        )
    assert find(home, "three floors") == ["p2"]
    assert find(home, "3 fireplaces", every=True) == ["p2"]
    assert find(home, "an open fire") == ["p1", "p2"]
    assert find(home, "an open fire", every=True) == [], "a wall begins a wallpaper too"
    assert find(home, "three carpools") == ["p2", "p5", "p7"]
    assert find(home, "carpools") == [], "a part alone says too little"


@pytest.mark.parametrize("damage", ["lost", "no database", "cut", "another version"])
def test_an_index_that_is_damaged_is_built_anew(home, damage: str) -> None:
    """The index is never truth: whatever happens to its file, the next search is right."""
    find(home)
    path = home.settings.layout.word_index
    if damage == "lost":
        path.unlink()
    elif damage == "no database":
        path.write_bytes(b"x" * 5000)
    elif damage == "cut":
        os.truncate(path, path.stat().st_size // 2)
    else:
        with sqlite3.connect(path) as connection:
            connection.execute("PRAGMA user_version=99")
    assert find(home) == sorted(POOLS)


def test_one_damaged_partition_is_named_and_the_others_are_searched(home) -> None:
    """A flipped bit in a file of a thousand switches off the words of that file alone."""
    flip_bit(home.settings.descriptions.partition(home.keys[0]).published)
    found = search(home.settings, home.catalog, text="a pool", by=("words",))
    assert sorted(hit.property_id for hit in found.hits) == ["p5", "p7"]
    assert len(found.unread) == 1
    assert home.keys[0] in found.unread[0]
    for record in (
        home.settings.descriptions.partition(home.keys[1]).record,
        home.settings.descriptions.partition(home.keys[1]).record_copy,
    ):
        record.write_bytes(b"{")
    found = search(home.settings, home.catalog, text="a pool", by=("words",))
    assert [hit.property_id for hit in found.hits] == ["p7"]
    assert len(found.unread) == 2


def test_two_searches_at_once_and_a_kill_in_the_middle(home) -> None:
    """Searches take turns; one that was killed between two writes leaves what the next puts right."""
    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(lambda _: find(home), range(8))) == [sorted(POOLS)] * 8
    forget_words(home.settings.layout)
    script = (
        "import os, sys\n"
        "from vlm_catalog.catalog import Catalog\n"
        "from vlm_assets.config.settings import load_settings\n"
        "from vlm_results import word_index\n"
        "from vlm_results.published_table import readable_records\n"
        "settings = load_settings(home=sys.argv[1])\n"
        "rows = word_index._rows\n"
        "def killed(settings, guarantee, key):\n"
        "    if key == sys.argv[2]:\n"
        "        os.kill(os.getpid(), 9)\n"
        "    return rows(settings, guarantee, key)\n"
        "word_index._rows = killed\n"
        "word_index._PARTITIONS_TOGETHER = 1\n"
        "records, _ = readable_records(settings.descriptions, Catalog.open(settings.home))\n"
        "word_index.find_words(settings, records, 'pool', most=9)\n"
    )
    ended = subprocess.run([sys.executable, "-c", script, str(home.settings.home), home.keys[1]], timeout=120)
    assert ended.returncode == -9
    assert find(home) == sorted(POOLS)


def test_nothing_of_the_words_stays_when_they_are_forgotten(home) -> None:
    """What a withdrawal removes is gone from the disk, free pages and journals too."""
    find(home)
    folder = home.settings.layout.word_index.parent
    assert any(b"pool" in path.read_bytes() for path in folder.iterdir())
    forget_words(home.settings.layout)
    assert not any(b"pool" in path.read_bytes() for path in folder.iterdir())
    assert find(home) == sorted(POOLS)


def test_words_say_what_is_there() -> None:
    """A field that is false, null or none gives no word: a search for pools finds no property without."""
    description = {
        "building_type": "apartment_block", "garage": "none", "has_pool": False, "has_fireplace": True,
        "floors": 3, "notes": ["near_water", None],
    }  # fmt: skip
    assert words_of(description) == "apartment block fireplace 3 floors near water"


def test_ranks_are_joined_and_equal_scores_share_one() -> None:
    """First in both comes first; a tie in one order is decided by the other."""
    words, vectors = [(5.0, 1), (5.0, 2), (1.0, 3)], [(0.9, 2), (0.8, 3), (0.7, 1)]
    assert [ordinal for _, ordinal in fused([words, vectors])] == [2, 1, 3]
    assert fused([words, vectors])[0][0] == 1.0
    assert [ordinal for _, ordinal in fused([[], vectors])] == [2, 3, 1]


def test_a_line_of_a_description_is_its_sentence() -> None:
    """A hit says why it is one: the longest text, or all values where there is no sentence."""
    assert (
        line_of({"roof": "flat", "summary": "A stone cottage. With a pool."})
        == "A stone cottage. With a pool."
    )
    assert line_of({"roof": "flat", "floors": 2, "garage": None}) == "roof flat, floors 2"
    assert len(line_of({"summary": "word " * 200})) <= 110
