"""Each promise of docs/durability.md and of the README names the tests that guard it, by one marker.

``@pytest.mark.promise("Every start is a resume")`` quotes how a promise begins, so that no number can drift.
"""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parents[2]
NOT_IN_MAKE_TEST = {"long", "vllm"}
LISTS = {
    "docs/durability.md": ("The promise", re.compile(r"^\d+\. ")),
    "README.md": ("What it promises", re.compile(r"^- ")),
}


def promises_of(document: str) -> list[str]:
    """The items of a document's list, each in one line, without what makes words bold."""
    title, begins = LISTS[document]
    text = (CHECKOUT / document).read_text().partition(f"\n## {title}\n\n")[2]
    items: list[str] = []
    for line in text.splitlines():
        if begins.match(line):
            items.append(begins.sub("", line))
        elif items and line.startswith(" "):
            items[-1] += f" {line.strip()}"
        else:
            break
    return [item.replace("**", "") for item in items]


PROMISES = [(document, promise) for document in LISTS for promise in promises_of(document)]


def marks_of(nodes: list[ast.expr]) -> Iterator[tuple[str, list[str]]]:
    """The name of each mark, and the texts that it is given."""
    for node in nodes:
        for call in ast.walk(node):
            if isinstance(call, ast.Attribute) and ast.unparse(call).startswith("pytest.mark."):
                yield call.attr, []
            if isinstance(call, ast.Call) and ast.unparse(call.func) == "pytest.mark.promise":
                yield "promise", [ast.literal_eval(argument) for argument in call.args]


@cache
def quotations() -> dict[str, str]:
    """How promises begin, as tests of `make test` quote them, with the name of such a test."""
    quoted = {}
    for path in sorted((CHECKOUT / "tests").rglob("test_*.py")):
        tree = ast.parse(path.read_text())
        of_module = [
            node.value
            for node in tree.body
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark"
        ]
        for node in tree.body:
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                marks = list(marks_of([*of_module, *node.decorator_list]))
                if not NOT_IN_MAKE_TEST.intersection(name for name, _ in marks):
                    name = f"{path.relative_to(CHECKOUT)}::{node.name}"
                    quoted.update({text: name for _, texts in marks for text in texts})
    return quoted


def begins_with(promise: str, quotation: str) -> bool:
    return re.match(rf"{re.escape(quotation)}\b", promise) is not None


@pytest.mark.parametrize(("document", "promise"), PROMISES)
def test_each_promise_names_a_test(document, promise):
    """What is promised and guarded by no test of `make test` is not promised."""
    guards = [name for quotation, name in quotations().items() if begins_with(promise, quotation)]
    assert guards, f'{document}: mark a test with @pytest.mark.promise("{promise[:40]} ...")'


def test_each_marker_quotes_one_promise_of_a_document():
    """A promise that is worded anew takes its tests along, and a marker never stands for several promises."""
    assert len(PROMISES) >= 17, "the lists were read"
    for quotation, name in quotations().items():
        documents = [document for document, promise in PROMISES if begins_with(promise, quotation)]
        assert documents, f"{name}: no promise begins with {quotation!r}"
        assert len(documents) == len(set(documents)), f"{name}: {quotation!r} is several promises"
