"""What the pyproject.toml of each distribution declares is what its packages import."""

import ast
import importlib.metadata
import re
import sys
import tomllib
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parents[2]
CORE = ("vlm_durable", "vlm_engine", "vlm_catalog", "resources", "sensors", "vlm_assets")
DISTRIBUTIONS = {
    ".": CORE,
    "distributions/results": ("vlm_results",),
    "distributions/training": ("vlm_training",),
    "distributions/cluster": ("vlm_cluster",),
}

OF_EXTRAS = {"dagster-postgres", "dagster-ray", "pillow-heif", "ray"}
"""Imported only where an extra installs them: by what runs on Ray, and where a HEIC is met."""

FOR_OTHERS = {"accelerate", "dagster-aws"}
"""Imported by transformers to load weights onto a GPU, and named in dagster.yaml by people who keep Dagster's
logs on S3; our code imports neither."""


def project_of(folder: str) -> dict:
    return tomllib.loads((CHECKOUT / folder / "pyproject.toml").read_text())


@pytest.mark.parametrize("folder", DISTRIBUTIONS)
def test_what_is_imported_is_declared_and_nothing_else(folder):
    """A fresh environment has what the packages import, and installs nothing that they do not."""
    declared = {re.split("[~>=<[]", name)[0] for name in project_of(folder)["project"]["dependencies"]}
    names = importlib.metadata.packages_distributions()
    ours = {package for packages in DISTRIBUTIONS.values() for package in packages}
    imported = {
        names.get(module, [module])[0].lower().replace("_", "-")
        for package in DISTRIBUTIONS[folder]
        for path in (CHECKOUT / package).rglob("*.py")
        for module in modules_of(ast.parse(path.read_text()))
        if module not in sys.stdlib_module_names and module not in (*ours, "examples")
    }
    assert imported - OF_EXTRAS == declared - FOR_OTHERS - {"vlm-assets"}


def test_a_distribution_installs_its_packages_alone():
    """Each package is in one distribution, whose extension is made for this version of the core."""
    core = project_of(".")
    included = core["tool"]["setuptools"]["packages"]["find"]["include"]
    assert [name.rstrip("*") for name in included] == list(CORE)
    version = core["project"]["version"]
    for folder, packages in [*DISTRIBUTIONS.items()][1:]:
        project = project_of(folder)
        assert project["tool"]["setuptools"]["packages"] == list(packages)
        assert project["project"]["version"] == version, folder
        assert f"vlm-assets=={version}" in project["project"]["dependencies"], folder
    folders = {path.parent.name for path in (CHECKOUT / "distributions").glob("*/pyproject.toml")}
    assert folders == {Path(folder).name for folder in DISTRIBUTIONS} - {""}


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
