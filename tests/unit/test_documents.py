"""The README and the documents: what they name is there."""

import re
from pathlib import Path

import pytest
import typer.main

from vlm_assets.cli import app
from vlm_assets.settings import PREFIX, Settings

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_settings_that_a_document_names_exist(document: Path) -> None:
    """A misspelt setting is refused at load, so a document must not teach one."""
    known = {PREFIX + name.upper() for name in Settings.model_fields}
    named = set(re.findall(rf"{PREFIX}[A-Z_]*[A-Z]", document.read_text()))
    assert named <= known


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_commands_and_options_that_a_document_names_exist(document: Path) -> None:
    """What a person copies from a document is a command that there is, with options that it has."""
    root = typer.main.get_command(app)
    options = {
        option
        for command in root.commands.values()
        for one in (command, *getattr(command, "commands", {}).values())
        for parameter in one.params
        for option in parameter.opts
    }
    for line in re.findall(r"vlm-assets ([a-z][^\n`|#]*)", document.read_text()):
        words = line.split()
        assert words[0] in root.commands, line
        assert {word for word in words if re.fullmatch(r"--[a-z-]+", word)} <= options, line


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_files_that_a_document_links_to_exist(document: Path) -> None:
    """No picture or page is missing."""
    links = re.findall(r"\]\((?!https?:)([^)#]+)\)", document.read_text())
    assert [link for link in links if not (document.parent / link).exists()] == []


def test_make_targets_that_the_documents_name_exist() -> None:
    """`make x` in a document is a target of the Makefile."""
    targets = set(re.findall(r"^([a-z.][\w./-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = {name for page in DOCUMENTS for name in re.findall(r"`make ([a-z.][\w./-]*)", page.read_text())}
    assert named <= targets
