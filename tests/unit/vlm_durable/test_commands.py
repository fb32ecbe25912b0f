"""Tests of the function that writes suggested commands, and that nothing else writes one."""

from __future__ import annotations

import ast
import re
import shlex
from pathlib import Path

from vlm_durable.commands import command

ROOT = Path(__file__).parents[3]


def test_a_command_names_its_home_and_is_quoted(monkeypatch):
    """A suggestion that is copied acts on the same home, also where its path holds a blank."""
    monkeypatch.setenv("VLM_ASSETS_HOME", "/srv/my homes/a")
    words = shlex.split(command("run", "it's", "--accept-failed").strip("`"))
    assert words == ["vlm-assets", "run", "it's", "--accept-failed", "--home", "/srv/my homes/a"]
    assert command("ingest", "--home", "DIR") == "`vlm-assets ingest --home DIR`"
    monkeypatch.delenv("VLM_ASSETS_HOME")
    assert command("audit", "--deep") == "`vlm-assets audit --deep`"


def test_no_module_writes_a_command_by_hand_or_at_its_import():
    """A command written by hand names no home; one written at import names that of another command."""
    wrong = []
    folders = ("vlm_durable", "vlm_engine", "vlm_catalog", "resources", "sensors", "vlm_assets")
    for folder in (*folders, "vlm_results", "vlm_training", "vlm_cluster"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            text = path.read_text()
            if not re.search(r"vlm-assets|make (run|demo)|\bcommand\(", text):
                continue
            tree = ast.parse(text)
            later = {
                id(inner)
                for node in ast.walk(tree)
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
                for statement in node.body
                for inner in ast.walk(statement)
            }
            prose = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
            for node in ast.walk(tree):
                place = f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 0)}"
                if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in prose:
                    by_hand = r"vlm-assets [a-z]+" if id(node) in later else r"`vlm-assets [a-z]+"
                    if re.search(rf"{by_hand}|`make (run|demo)`", node.value):
                        wrong.append(f"{place} {node.value}")
                elif isinstance(node, ast.List | ast.Tuple) and path.name != "commands.py":
                    first = node.elts[0] if node.elts else None
                    wrong += [place] * (isinstance(first, ast.Constant) and first.value == "vlm-assets")
                elif isinstance(node, ast.Call) and id(node) not in later:
                    wrong += [f"{place} at import"] * (getattr(node.func, "id", "") == "command")
    assert wrong == []
