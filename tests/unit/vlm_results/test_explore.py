"""Explore: its library is an extra. A person without it is told how to install it."""

import pyarrow as pa
import pytest

from vlm_assets.assets.partition import CONFIDENCE
from vlm_assets.services.command_error import CommandError
from vlm_results import explore
from vlm_results.explore import export_page, forget_tables


def test_without_the_extra_a_person_is_told_how_to_get_it(tmp_path, monkeypatch):
    """No traceback of an import: the command that installs it."""

    def missing(name):
        raise ImportError(name)

    monkeypatch.setattr(explore, "import_module", missing)
    with pytest.raises(CommandError, match="make explore"):
        export_page(pa.table({"property_id": ["a"]}), tmp_path)


def test_a_withdrawal_leaves_no_table_behind(dataset):
    """What was kept for the page shows texts and images: it goes with any property that is withdrawn."""
    folder = dataset.settings.state_directory / "explore"
    folder.mkdir(parents=True)
    (folder / "old.parquet").write_bytes(b"x")
    forget_tables(dataset.settings)
    assert list(folder.iterdir()) == []


def test_a_field_named_as_a_column_of_the_page_is_kept_beside_it():
    """A schema may have a field `text` or `row`: neither the field nor the page's own column is lost."""
    fields = explore._fields({"text": "a", "row": 1, "rooms": 2, "parts": ["b"]})
    assert fields == {"text_": "a", "row_": 1, "rooms": 2, "parts": '["b"]'}


def test_a_field_named_as_the_confidence_of_another_is_kept_beside_it():
    """A schema may have the fields `x` and `x_confidence`: two columns of one name cannot be put together."""
    rows = pa.table({CONFIDENCE: [{"x": 0.5, "x_confidence": 0.25}]})
    made = explore._with_confidences(pa.table({"x": [1], "x_confidence": ["high"]}), rows)
    assert made.to_pylist() == [
        {"x": 1, "x_confidence": "high", "x_confidence_": 0.5, "x_confidence_confidence": 0.25}
    ]
