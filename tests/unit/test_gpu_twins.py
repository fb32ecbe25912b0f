"""Each test in tests/gpu runs on a CPU too, or names the test that does the same there."""

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MACHINES_OWN = "tests/unit/vlm_engine/"
"""Twins lie here: `make test-bare` runs these folders."""


def test_each_gpu_test_has_a_twin():
    """Guards: code that only a GPU runs is seen to work before there is one."""
    twins = []
    for file in sorted((ROOT / "tests" / "gpu").rglob("test_*.py")):
        text = file.read_text()
        assert "mark.long" not in text, file
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "needs_gpu":
                twins.append(ast.literal_eval(node.args[0]))
    assert len(twins) >= 8
    for twin in twins:
        path, _, name = twin.partition("::")
        assert path.startswith((f"{MACHINES_OWN}transformers/", f"{MACHINES_OWN}devices/")), twin
        assert f"def {name}(" in (ROOT / path).read_text(), twin
