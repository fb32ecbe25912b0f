"""The README and the documents: what they name is there."""

import ast
import importlib
import re
import subprocess
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import pytest

from vlm_assets.commands.main import commands, find_command
from vlm_assets.config.settings import PREFIX, settings_class, settings_groups

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted(ROOT.glob("*/README.md")),
]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_settings_that_a_document_names_exist(document: Path) -> None:
    """A misspelt setting is refused at load, so a document must not teach one."""
    known = {PREFIX + name.upper() for name in settings_class().model_fields}
    named = set(re.findall(rf"{PREFIX}[A-Z_]*[A-Z]", document.read_text()))
    assert named <= known


def test_every_setting_is_listed_with_who_needs_it() -> None:
    """The page groups them as the program does, and leaves none out; so does the file that people copy."""
    listed = (ROOT / "docs" / "use.md").read_text().partition("\n## Settings\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (.+?) \| (`.+`) \|$", listed, re.MULTILINE)
    names = [re.findall(r"`([A-Z_]+)`", settings) for _, settings in rows]
    assert [name.lower() for group in names for name in group] == list(settings_class().model_fields)
    groups = settings_groups()
    assert [group[0].lower() for group in names] == list(groups)
    assert [title.lower() for title, _ in rows] == [title.lower() for title in groups.values()]
    example = (ROOT / ".env.example").read_text()
    assert re.findall(r"^# ---- (.+) ----$", example, re.MULTILINE) == list(groups.values())
    chapters = re.split(r"^# ---- .+ ----$", example, flags=re.MULTILINE)[1:]
    for group, chapter in zip(names, chapters, strict=True):
        examples = re.findall(rf"^# {PREFIX}([A-Z_]+)=", chapter, re.MULTILINE)
        assert examples
        assert set(examples) <= set(group)


@cache
def commands_and_options() -> tuple[set[str], set[str]]:
    """The names of all commands, and the options that any of them has."""
    known = {name: find_command(name) for name in commands()}
    options = {
        option
        for command in known.values()
        for one in (command, *getattr(command, "commands", {}).values())
        for parameter in one.params
        for option in parameter.opts
    }
    return set(known), options


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_commands_and_options_that_a_document_names_exist(document: Path) -> None:
    """What a person copies from a document is a command that there is, with options that it has."""
    known, options = commands_and_options()
    for line in re.findall(r"vlm-assets ([a-z][^\n`|#]*)", document.read_text()):
        words = line.split()
        assert words[0] in known, line
        assert {word for word in words if re.fullmatch(r"--[a-z-]+", word)} <= options, line


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_files_that_a_document_links_to_exist(document: Path) -> None:
    """No picture or page is missing."""
    links = re.findall(r"\]\((?!https?:)([^)#]+)\)", document.read_text())
    assert [link for link in links if not (document.parent / link).exists()] == []


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
    "faults",
    "benchmarks",
    "examples",
)
MODULES = [
    path
    for package in PACKAGES
    for path in (ROOT / package).rglob("*.py")
    # `make bench` keeps other packages' files there.
    if ".environments" not in path.parts
]
FILES = [
    f"/{path.relative_to(ROOT)}" for path in (*ROOT.glob("*.py"), *MODULES, *(ROOT / "tests").rglob("*.py"))
]
PLACEHOLDERS = {"my_schema.py"}


def missing(named: Iterable[str]) -> list[str]:
    """Those names of files, with or without folders, that no file of the tree ends in."""
    return [
        one
        for one in named
        if one not in PLACEHOLDERS and not any(path.endswith(f"/{one}") for path in FILES)
    ]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_modules_that_a_document_names_exist(document: Path) -> None:
    """After a module was moved, a reader is not sent to where it was."""
    assert missing(re.findall(r"`([\w./-]+\.py)`", document.read_text())) == []


def test_modules_that_a_docstring_points_to_exist() -> None:
    """What does not live in a module is found where its docstring says."""
    said = [ast.get_docstring(ast.parse(module.read_text())) or "" for module in MODULES]
    folders = re.findall(r"``((?:vlm_[a-z]+|sensors|resources)(?:/\w+)*)``", " ".join(said))
    assert missing(re.findall(r"[\w/-]+\.py\b", " ".join(said))) == []
    assert [folder for folder in folders if not (ROOT / folder).is_dir()] == []
    assert len(folders) > 5


def test_make_targets_that_the_documents_name_exist() -> None:
    """`make x` in a document is a target of the Makefile."""
    rules = subprocess.run(["make", "-npq"], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False).stdout
    targets = set(re.findall(r"^([a-z.][\w./-]*):", rules, re.MULTILINE))
    named = {name for page in DOCUMENTS for name in re.findall(r"`make ([a-z.][\w./-]*)", page.read_text())}
    assert named <= targets


def kinds_told_by(file: Path) -> set[str]:
    """The kinds of the alerts that a module makes."""
    module = ".".join(file.relative_to(ROOT).with_suffix("").parts)
    found = set()
    for call in (node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Call)):
        if isinstance(call.func, ast.Name) and call.func.id in ("Alert", "_alert", "_alert_of"):
            for kind in (one.value for one in call.keywords if one.arg == "kind"):
                for part in [kind.body, kind.orelse] if isinstance(kind, ast.IfExp) else [kind]:
                    if isinstance(part, ast.Constant):
                        found.add(part.value)
                    elif isinstance(part, ast.Name):
                        found.add(getattr(importlib.import_module(module), part.id, None))
    return found - {None}


def test_the_runbook_says_what_to_do_of_every_alert_and_of_no_other() -> None:
    """A person who is woken by a kind of alert finds it in the table."""
    told = set()
    for folder in (name for name in PACKAGES if name not in ("faults", "benchmarks", "examples")):
        for file in (ROOT / folder).rglob("*.py"):
            if "Alert(" in file.read_text():
                told |= kinds_told_by(file)
    section = (ROOT / "docs" / "operations.md").read_text().partition("## Alerts")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (`.*?) \|", section, re.MULTILINE)
    assert sorted(re.findall(r"`(\w+)`", " ".join(rows))) == sorted(told)
    assert len(told) > 15
