"""Numbers in sentences."""

import ast
import re
from pathlib import Path

import pytest

from vlm_durable.wording import counted


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        (counted(0, "partitions"), "0 partitions"),
        (counted(1, "partitions"), "1 partition"),
        (counted(1350, "new partitions"), "1,350 new partitions"),
        (counted(1, "properties"), "1 property"),
        (counted(1, "batches"), "1 batch"),
        (counted(1, "image roots"), "1 image root"),
        (counted(1, "partitions are left", "partition is left"), "1 partition is left"),
        (counted(2, "partitions are left", "partition is left"), "2 partitions are left"),
    ],
)
def test_one_of_a_thing_is_not_a_plural(said, expected):
    """People read "1 partition", "1 property" and "2 partitions"."""
    assert said == expected


ROOT = Path(__file__).parents[3]
PACKAGES = (
    "vlm_durable",
    "vlm_engine",
    "vlm_catalog",
    "resources",
    "sensors",
    "vlm_assets",
    "vlm_results",
    "vlm_training",
    "vlm_cluster",
)
COUNTABLE = re.compile(
    r" ((?!of |has |have |on |names? )[a-z]+ )?(alerts|checks|columns|descriptions|devices|entries|failures"
    r"|fields|files|folders|ids|images|nodes|partitions|properties|ranges|repairs|results|row groups|rows"
    r"|runs|samples|segments|settings|times|values|workers)\b(?!/s| a second| a core)"
)
"""After a number that is no rate."""


def test_no_sentence_has_a_number_and_a_fixed_plural():
    """ "1 rows" is read by everybody with one row: such a number goes through ``counted``."""
    plurals = []
    for path in sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py")):
        for text in ast.walk(ast.parse(path.read_text())):
            if not isinstance(text, ast.JoinedStr):
                continue
            parts = [None, *text.values]
            for before, number, after in zip(parts, parts[1:], parts[2:], strict=False):
                if not (isinstance(number, ast.FormattedValue) and isinstance(after, ast.Constant)):
                    continue
                written = ast.unparse(number.value)
                is_total = isinstance(before, ast.Constant) and str(before.value).endswith(" of ")
                is_fixed = is_total or written.isupper() or "counted(" in written
                if not is_fixed and COUNTABLE.match(str(after.value)):
                    plurals.append(f"{path.relative_to(ROOT)}:{number.lineno} {{{written}}}{after.value}")
    assert plurals == []
