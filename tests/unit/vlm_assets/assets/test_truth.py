"""Truth files: read from what people have, refused where they cannot be right, and what is the same."""

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from vlm_assets.assets.truth import TruthError, read_truth
from vlm_engine.schema import same


@pytest.mark.parametrize(
    ("said", "right", "alike"),
    [
        (2, "2.0", True),
        (True, "yes", True),
        ("Brick ", "brick", True),
        (["a", "b"], ["b", "a"], True),
        (["a", "a", "b"], ["a", "b"], False),
        (["a", "a", "b"], ["b", "b", "a"], False),
        (["a", "b", "a"], ["b", "a", "a"], True),
        (1, True, False),
        (None, "brick", False),
        ("red brick", "brick", False),
    ],
)
def test_values_are_compared_by_meaning(said, right, alike) -> None:
    """A CSV knows only words: 2.0 is two, and yes is true."""
    assert same(said, right) is alike


def test_a_truth_file_may_be_csv_or_parquet_and_know_a_part(tmp_path) -> None:
    """What it does not know of a property is not held against anybody."""
    (tmp_path / "t.csv").write_text("\ufeffid,floors,material\np1,2,brick\np2,,wood\nother,1,x\n")
    assert read_truth(tmp_path / "t.csv") == {
        "p1": {"floors": 2, "material": "brick"},
        "p2": {"material": "wood"},
        "other": {"floors": 1, "material": "x"},
    }
    (tmp_path / "t.jsonl").write_text('{"property_id": "p1", "description": {"floors": 3}}\n')
    assert read_truth(tmp_path / "t.jsonl") == {"p1": {"floors": 3}}
    rows = [{"property_id": "p1", "truth": {"floors": 3}, "hard": "no"}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "t.parquet")
    assert read_truth(tmp_path / "t.parquet") == {"p1": {"floors": 3}}
    with pytest.raises(TruthError, match="nothing"):
        read_truth(tmp_path / "t.parquet", hard_too=False)


def test_the_last_line_of_a_property_counts(tmp_path) -> None:
    """A file that is appended to may name a property twice."""
    (tmp_path / "t.jsonl").write_text(
        '{"property_id": "4711", "description": {"a": 1}}\n{"property_id": "4711", "description": {"b": 2}}\n'
    )
    assert read_truth(tmp_path / "t.jsonl") == {"4711": {"b": 2}}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("name,floors\np1,2\n", "property_id or id"),
        ("id,floors\np1,2\np1,3\n", "twice"),
        ("id\nx\n", "nothing"),
    ],
)
def test_a_truth_that_says_nothing_is_refused(tmp_path, text, said) -> None:
    """An empty comparison would look like one without a mistake."""
    (tmp_path / "t.csv").write_text(text)
    with pytest.raises(TruthError, match=said):
        read_truth(tmp_path / "t.csv")
