"""Truth files: read from what people have, and refused with a sentence where they cannot be right."""

import pytest

from vlm_assets.operate.truth import Share, TruthError, is_same, read_truth


def test_a_csv_and_a_jsonl_say_the_same(tmp_path):
    """Fields that are empty are not known."""
    (tmp_path / "t.csv").write_text("property_id,floors,pool,kind\na,2,true,villa\nb,,false,flat\n")
    (tmp_path / "t.jsonl").write_text(
        '{"property_id": "a", "floors": 2, "pool": true, "kind": "villa"}\n'
        '{"property_id": "b", "pool": false, "kind": "flat"}\n'
    )
    expected = {"a": {"floors": 2, "pool": True, "kind": "villa"}, "b": {"pool": False, "kind": "flat"}}
    assert read_truth(tmp_path / "t.csv") == expected == read_truth(tmp_path / "t.jsonl")


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("t.txt", "", "no truth file"),
        ("t.csv", "id,floors\na,2\n", "no column 'property_id'"),
        ("t.csv", "property_id,floors\na,2\na,3\n", "'a' twice"),
        ("t.jsonl", "{", "cannot be read"),
    ],
)
def test_what_cannot_be_right_is_refused(tmp_path, name, text, said):
    """A person is told what is wrong with the file, and nothing is compared with half of it."""
    (tmp_path / name).write_text(text)
    with pytest.raises(TruthError, match=said):
        read_truth(tmp_path / name)


def test_intervals_are_those_of_the_textbook():
    """Wilson's: 0 of 10 is no proof of 0."""
    assert (Share(0, 10).low, round(Share(0, 10).high, 4)) == (pytest.approx(0.0, abs=1e-9), 0.2775)
    assert (round(Share(8, 10).low, 4), round(Share(8, 10).high, 4)) == (0.4902, 0.9433)


def test_what_is_the_same():
    """A CSV knows no types: true is True, 2.0 is 2, and blanks are none."""
    assert is_same(True, "true") and is_same(2, 2.0) and is_same("villa ", "villa")
    assert not is_same(False, "true") and not is_same("villa", "flat") and not is_same(2, 3)
