"""What pyproject.toml declares is what the packages import."""

import ast
import importlib.metadata
import sys
import tomllib
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())
PACKAGES = tuple(name.rstrip("*") for name in PROJECT["tool"]["setuptools"]["packages"]["find"]["include"])


OF_EXTRAS = {"dagster-postgres", "dagster-ray", "pillow-heif", "ray"}
"""Imported only where an extra installs them: by what runs on Ray, and where a HEIC is met."""

FOR_OTHERS = {"accelerate", "dagster-aws"}
"""Imported by transformers to load weights onto a GPU, and named in dagster.yaml by people who keep Dagster's
logs on S3; our code imports neither."""


def test_what_is_imported_is_declared_and_nothing_else():
    """A fresh environment has what the packages import, and installs nothing that they do not."""
    declared = PROJECT["project"]["dependencies"]
    wanted = {one.split("~")[0].split(">")[0] for one in declared}
    names = importlib.metadata.packages_distributions()
    imported = {
        names.get(module, [module])[0].lower().replace("_", "-")
        for package in PACKAGES
        for path in (CHECKOUT / package).rglob("*.py")
        for module in modules_of(ast.parse(path.read_text()))
        if module not in sys.stdlib_module_names and module not in (*PACKAGES, "examples")
    }
    assert imported - OF_EXTRAS == wanted - FOR_OTHERS


def modules_of(tree: ast.Module) -> set[str]:
    """The top names that a module imports when it runs, those for types alone left out."""
    for_types = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and getattr(node.test, "id", None) == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {one.name.partition(".")[0] for one in node.names if id(node) not in for_types}
        elif isinstance(node, ast.ImportFrom) and node.module and id(node) not in for_types:
            found.add(node.module.partition(".")[0])
    return found
