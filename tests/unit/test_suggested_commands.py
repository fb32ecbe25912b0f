"""Every command that the program suggests anywhere is one that the command line understands."""

from __future__ import annotations

import ast
import re
import shlex
import shutil
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from typer.core import TyperCommand, TyperGroup
from typer.testing import CliRunner

from tests.support.activity import commands_of
from vlm_assets.commands import main as cli
from vlm_catalog.catalog_copies import catalog_path
from vlm_durable.commands import command, given_command, note_given
from vlm_results import exported_images

ROOT = Path(__file__).parents[2]
CORE = ("vlm_durable", "vlm_engine", "vlm_catalog", "resources", "sensors", "vlm_assets")
EXTENSIONS = ("vlm_results", "vlm_training", "vlm_cluster")
FILLED_IN = "3"
"""Stands for what a message or a person fills in: a key, a number, an id, a file."""
SPREAD = {"*home": ["--home", "a home"], "*missing": ["--missing"]}
"""Lists of words in a call, as they are written there, and what they hold."""
WRITERS = {"command", "given_command"}
"""Functions that write down words that others give them."""


def suggested_words(call: ast.Call) -> list[str]:
    """The words of a suggested command; none where the call suggests nothing."""
    words: list[str] = []
    match call.func:
        case ast.Name("command"):
            pass
        case ast.Attribute(value=made_by, attr="command") if "request" in ast.unparse(made_by):
            # An ingest with what it was given, and more.
            words += ["ingest", FILLED_IN, *(["--image-root", FILLED_IN] if call.keywords else [])]
        case _:
            return []
    for word in call.args:
        if isinstance(word, ast.Constant):
            words.append(FILLED_IN if str(word.value).isupper() else str(word.value))
        else:
            words += SPREAD[ast.unparse(word)] if isinstance(word, ast.Starred) else [FILLED_IN]
    return words


@cache
def trees(package: str) -> dict[Path, ast.Module]:
    """The modules of a package that may suggest a command."""
    texts = {path: path.read_text() for path in sorted((ROOT / package).rglob("*.py"))}
    return {path: ast.parse(text) for path, text in texts.items() if "command(" in text}


def options_to_add() -> set[tuple[str, ...]]:
    """The words that messages add to the command that was given."""
    added = set()
    for tree in (tree for package in (*CORE, *EXTENSIONS) for tree in trees(package).values()):
        for node in ast.walk(tree):
            match node:
                case ast.Call(func=ast.Name("given_command"), args=words):
                    added.add(tuple(ast.unparse(word).strip("'") for word in words))
    return added


@cache
def suggestions(packages: tuple[str, ...]) -> dict[str, str]:
    """Each suggested command of these packages, and where the first message with it is written."""
    places: dict[str, str] = {}
    for path, tree in sorted(item for package in packages for item in trees(package).items()):
        place = str(path.relative_to(ROOT))
        passed_on = {
            id(node)
            for function in ast.walk(tree)
            if isinstance(function, ast.FunctionDef) and function.name in WRITERS
            for node in ast.walk(function)
        }
        for node in ast.walk(tree):
            if id(node) in passed_on or not isinstance(node, ast.Call):
                continue
            if words := suggested_words(node):
                places.setdefault(shlex.join(words), f"{place}:{node.lineno}")
    return places


@pytest.fixture
def parsed(monkeypatch):
    """Has the command line parse a command, and gives its options; nothing is done."""
    contexts: list[Any] = []
    # Of a command and of a group; typer brings its own click.
    of_all = TyperCommand.__mro__[1]
    assert of_all in TyperGroup.__mro__
    monkeypatch.setattr(of_all, "invoke", lambda _, context: contexts.append(context))

    def parse(line: str):
        contexts.clear()
        done = CliRunner().invoke(cli.app, shlex.split(line.strip("`"))[1:], catch_exceptions=False)
        assert done.exit_code == 0, done.output
        return contexts[-1].params if contexts else None

    return parse


@pytest.mark.parametrize("words", suggestions((*CORE, *EXTENSIONS)))
def test_a_suggested_command_exists_and_keeps_its_home(words, parsed, tmp_path, monkeypatch):
    """No message names a command or an option that is not there, and none leads to another home."""
    home = tmp_path / "my home's folder"
    monkeypatch.setenv("VLM_ASSETS_HOME", str(home))
    monkeypatch.chdir(tmp_path)
    Path(FILLED_IN).touch()  # where it stands for a file
    given = shlex.split(words)
    options = parsed(command(*given))
    if "--help" not in given:
        named = given[given.index("--home") + 1] if "--home" in given else home
        assert options["home"] == Path(named)


NOT_RUN_HERE = {
    "run": "starts Dagster",
    "serve": "starts Dagster",
    "review": "serves a page until it is ended",
    "compare": "describes a sample with the model",
    "plan": "describes a sample with the model",
    "doctor": "tries the model in processes of its own",
    "show": "wants rows of a real run",
}
"""Commands that are parsed alone, and why."""
REFUSED = {
    "alerts test": "No targets are set",
    "prune --set 3": "There are no files of a question set",
    "devices --forget-node 3": "No node",
    "devices --take-back 3": "Nothing is held against",
    "ingest 3 --image-root 3": "lie under",
    "questions add 3": "Nothing is published yet that a schema",
}
"""Commands that refuse a home in which nothing is wrong, and what they say."""
NOT_DONE = {"repair --failed": "no Dagster runs on this home"}
"""Commands that are told yes and are not done here, and what they say."""
BEFORE = {
    "restore 3 --home 3": ["backup", "backup"],
    "withdraw --undo 3": ["withdraw", "--ids", "ids.txt", "--yes"],
}
"""What has to have happened before a command."""
AFTER = {
    "--encoding": "utf-8",
    "--id-column": "property_id",
    "--image-column": "images",
    "--image-root": "photos",
    "--image-separator": ";",
    "--limit": "40",
    "--undo": "p0",
    "--ids": "ids.txt",
    "--catalog": "copy.parquet",
    "--accept-loss": "000000000-000000002",
    "--accept-version": "000000000-000000002",
    "--forget-node": "gone",
    "--take-back": "cpu-0",
    "--next": "1",
    "--node": "gone",
    "--range-size": "3",
    "export": "exported",
    "backup": "backup",
    "restore": "backup",
}
"""What is filled in after these words; after ``ingest``, the listing of the home."""


def suggested_in(message: str, before: str) -> list[str]:
    """The arguments of the command that stands in a message after these words."""
    (line,) = re.findall(f"{re.escape(before)}`vlm-assets ([^`]*)`", message)
    return shlex.split(line)


@pytest.mark.parametrize(
    "words", [words for words in suggestions((*CORE, *EXTENSIONS)) if words.split()[0] not in NOT_RUN_HERE]
)
def test_a_suggested_command_runs(words, made, dataset, tmp_path, monkeypatch):
    """On a described home it does its work, or asks before it does, or says why there is nothing to do."""
    monkeypatch.delenv("VLM_ASSETS_HOME", raising=False)
    monkeypatch.chdir(tmp_path)
    home = dataset.settings.home
    Path("photos").mkdir()
    Path("ids.txt").write_text("p0\n")
    shutil.copy(catalog_path(home), "copy.parquet")
    if words in BEFORE:
        assert CliRunner().invoke(cli.app, [*BEFORE[words], "--home", str(home)]).exit_code == 0
    given = shlex.split(words)
    for place, (before, word) in enumerate(pairwise(given), 1):
        if before == "--home":
            given[place] = "other" if given[0] == "restore" else str(home)
        elif word == FILLED_IN:
            given[place] = AFTER.get(before) or str(made / "listing.jsonl")
    if "--home" not in given and "--help" not in given:
        given += ["--home", str(home)]
    done = CliRunner().invoke(cli.app, given)
    message = f"{done.output} {done.exception}"
    if done.exit_code:
        assert REFUSED.get(words, "To do it: ") in message
        if words not in REFUSED:
            done = CliRunner().invoke(cli.app, suggested_in(message, "To do it: "))
            assert (done.exit_code == 0) != (words in NOT_DONE), done.output
            assert NOT_DONE.get(words, "") in done.output
    else:
        assert words not in REFUSED


def test_suggestions_are_collected():
    """The test above runs what messages hold: one with a key, one with a home, one of an ingest."""
    assert {"run 3", "run --missing --home 'a home'", "ingest 3 --update", "withdraw --undo 3"} <= set(
        suggestions(CORE)
    )


def test_the_core_suggests_no_command_of_an_extension():
    """Where no extension is installed, there is no such command."""
    of_extensions = {name for package in EXTENSIONS for name in commands_of(package)}
    assert "search" in of_extensions
    for words, place in suggestions(CORE).items():
        named = shlex.split(words)
        assert not of_extensions & {named[0], " ".join(named[:2])}, place


GIVEN_ONCE_MORE = {
    ("--yes",): [
        "ingest 3 --update",
        "prune",
        "repair",
        "repair --accept-loss 3",
        "repair --catalog 3",
        "run 3 --accept-failed",
        "withdraw --ids 3",
    ],
    ("--home", "DIR"): ["demo --home 3", "devices --home 3 pause", "devices resume"],
    ("--port", "PORT"): ["demo", "review --port 3", "run", "serve --port 3"],
    ("--images", "copy"): ["export 3 --format csv --images embed"],
    ("--images", "none"): ["export 3 --images copy"],
    ("--images", "Images.none"): ["export 3 --format iceberg --images copy"],
    ("--format", "huggingface"): ["export 3 --format csv --images embed"],
    ("--schema", "MODULE:CLASS"): ["questions add access"],
}
"""What messages add to the command that was given, and the commands that say so."""


@pytest.mark.parametrize(
    ("more", "given"), [(more, given) for more, commands in GIVEN_ONCE_MORE.items() for given in commands]
)
def test_the_command_that_was_given_is_suggested_with_one_word_more(
    more, given, parsed, monkeypatch, tmp_path
):
    """It exists, keeps its home and all that it was given, and the word that is added counts."""
    home = tmp_path / "my home"
    monkeypatch.setenv("VLM_ASSETS_HOME", str(home))
    monkeypatch.chdir(tmp_path)
    Path(FILLED_IN).touch()
    note_given(given.split())
    option, *values = more
    value = values[0].removeprefix("Images.").replace("PORT", "4") if values else "True"
    options = parsed(given_command(option, *(value for _ in values)))
    given_options = {name.strip("_"): given for name, given in options.items()}
    assert str(given_options[option.strip("-")]) == value
    if option != "--home":
        assert options["home"] == home


MORE_NOT_RUN_HERE = {("--port", "PORT"): "starts Dagster, or serves a page until it is ended"}
"""Words that are added to a command which is parsed alone, and why."""
MORE_RUN_HERE = {
    ("--home", "DIR"): {
        "demo --no-run --properties 1 --home HOME": "a home of its own: ",
        "devices pause --home nowhere": "Name its folder: ",
        "devices resume --home nowhere": "Name its folder: ",
    },
    ("--images", "copy"): {"export out --format csv --images embed --home HOME": "holds no image: "},
    ("--format", "huggingface"): {"export out --format csv --images embed --home HOME": "`, or "},
    ("--images", "none"): {"export out --images copy --home HOME": "To export without images: "},
    ("--images", "Images.none"): {
        "export out --format iceberg --images copy --home HOME": "no image files: "
    },
    ("--schema", "MODULE:CLASS"): {"questions add access --home HOME": "Say what to ask: "},
}
"""Commands that are refused, by what the refusal adds to them, and its words before the new command."""


@pytest.mark.parametrize(
    ("given", "before"), [refused for commands in MORE_RUN_HERE.values() for refused in commands.items()]
)
def test_the_command_that_was_given_runs_with_one_word_more(given, before, dataset, tmp_path, monkeypatch):
    """The command in the refusal is copied as it stands, and does what the refused one should."""
    home = dataset.settings.home.rename(tmp_path / "my home")
    monkeypatch.delenv("VLM_ASSETS_HOME", raising=False)
    monkeypatch.chdir(tmp_path)
    if "without images" in before:
        monkeypatch.setattr(exported_images, "_has_entries", lambda place: False)
    refused = CliRunner().invoke(cli.app, [str(home) if word == "HOME" else word for word in given.split()])
    assert refused.exit_code == 1
    suggested = suggested_in(f"{refused.output} {refused.exception}", before)
    another = tmp_path / "another home" if given.startswith("demo") else home
    Path("access.py").write_text("import pydantic\nclass Access(pydantic.BaseModel):\n    has_ramp: bool\n")
    filled_in = {"DIR": str(another), "MODULE:CLASS": "access:Access"}
    done = CliRunner().invoke(cli.app, [filled_in.get(word, word) for word in suggested])
    assert done.exit_code == 0, f"{done.output} {done.exception}"
    if given.startswith("export"):
        assert any(Path("out").iterdir())


def test_each_word_that_a_refusal_adds_was_run_or_says_why_not():
    """What is told yes runs above, but for a publication, which starts Dagster."""
    assert set(GIVEN_ONCE_MORE) == {("--yes",), *MORE_RUN_HERE, *MORE_NOT_RUN_HERE}
    told_yes = [words for words in GIVEN_ONCE_MORE[("--yes",)] if words.split()[0] not in NOT_RUN_HERE]
    assert set(told_yes) <= set(suggestions(CORE)) - set(REFUSED)


def test_no_command_is_made_up_where_none_was_given():
    """In a run of Dagster's a message names the option alone."""
    note_given([])
    assert given_command("--images", "none") == "`--images none`"


def test_every_word_that_a_message_adds_is_tried():
    """The test above knows all of them."""
    assert options_to_add() == set(GIVEN_ONCE_MORE)
