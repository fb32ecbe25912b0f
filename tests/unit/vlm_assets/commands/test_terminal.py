"""Nothing that a file, an id or an answer says reaches the terminal as a control sequence."""

import ast
import io
import json
import logging
import sys
import threading
import unicodedata
from pathlib import Path

import click
import pytest
import typer
from rich.live import Live
from rich.table import Table
from rich.text import Text
from typer.testing import CliRunner

import vlm_assets
from tests.support.listings import write_listing
from vlm_assets.commands import main as cli
from vlm_assets.commands import terminal
from vlm_assets.commands.terminal import TerminalConsole, say, say_json, visible, visible_line
from vlm_assets.services.progress import doing

EVIL = "\x1b]0;owned\x07\u202eevil\x9b2J\x7f\r"
TURNS_AROUND = {"LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI"}
MARKS = {"LEFT-TO-RIGHT MARK", "RIGHT-TO-LEFT MARK", "ARABIC LETTER MARK"}


def steers(character: str) -> bool:
    """Whether Unicode calls it a control character, or one that changes the direction of the text."""
    return (
        unicodedata.category(character) in ("Cc", "Zl", "Zp")
        or unicodedata.bidirectional(character) in TURNS_AROUND
        or unicodedata.name(character, "") in MARKS
    )


def test_every_character_that_steers_is_escaped_and_no_other():
    """All of Unicode: only ends of lines and tabs stay, and those not in a single line."""
    for code in range(sys.maxunicode + 1):
        character = chr(code)
        assert (visible_line(character) != character) == steers(character), hex(code)
        assert (visible(character) != character) == (steers(character) and character not in "\n\t"), hex(code)
        assert not any(map(steers, visible_line(character)))


def test_json_with_what_steers_stays_json(capsys):
    """An id such as CP1252 read as Latin-1 is in it: a program that follows must be able to read the line."""
    say_json(json.dumps({"property_id": EVIL}, ensure_ascii=False))
    line = capsys.readouterr().out
    assert not [one for one in line if steers(one) and one != "\n"]
    assert json.loads(line) == {"property_id": EVIL}


def unsteered(text):
    assert not [one for one in text if steers(one) and one not in "\n\t"], repr(text)
    assert r"\x1b]0;owned\x07\u202eevil\x9b2J\x7f\r" in text
    return True


@pytest.fixture
def evil_home(tmp_path):
    """A catalogue whose property's id and image steer terminals."""
    listing = write_listing(tmp_path / "listing.jsonl", {EVIL: [f"{EVIL}.jpg"]})
    home = tmp_path / "home"
    taken = CliRunner().invoke(cli.app, ["ingest", str(listing), "--home", str(home), "--range-size", "1"])
    assert taken.exit_code == 0, taken.output
    return home


def test_a_property_is_shown_escaped(evil_home):
    """The trial's id, which renamed the terminal's window; no end of line in it poses as a line of ours."""
    shown = CliRunner().invoke(cli.app, ["show", EVIL, "--home", str(evil_home)])
    assert shown.exit_code == 0
    assert unsteered(shown.output)


def test_a_refused_listing_is_shown_escaped(tmp_path, capsys, monkeypatch):
    """What is wrong with a listing names its ids."""
    listing = tmp_path / f"{EVIL.replace('/', '')}.jsonl"
    listing.write_text("{")
    monkeypatch.setattr("sys.argv", ["vlm-assets", "ingest", str(listing), "--home", str(tmp_path / "home")])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 1
    assert unsteered(capsys.readouterr().err)


def test_tracebacks_and_log_records_are_escaped(monkeypatch, capsys):
    """An error that nobody expected, and what a module logs meanwhile, quote what they met."""

    def fail():
        logging.getLogger("some").warning("met %s", EVIL)
        raise ZeroDivisionError(EVIL)

    monkeypatch.setattr(cli, "app", fail)
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 1
    said = capsys.readouterr().err
    assert "Traceback" in said
    assert unsteered(said)


def test_a_style_is_put_around_the_escaped_text(capsys, monkeypatch):
    """A red sentence is red, and what it quotes is not."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    say(f"met {EVIL}", fg="red")
    said = capsys.readouterr().out
    assert unsteered(said.replace("\x1b[31m", "").replace("\x1b[0m", ""))


@pytest.fixture
def console():
    return TerminalConsole(file=io.StringIO(), force_terminal=True, color_system=None, width=120)


@pytest.mark.parametrize("printed", [EVIL, Text(EVIL), f"[bold]{EVIL}[/]"])
def test_what_rich_prints_is_escaped(console, printed):
    """A string, a text and a cell of a table."""
    table = Table("id")
    table.add_row(printed)
    console.print(printed, table)
    shown = console.file.getvalue()
    assert not [one for one in shown if steers(one) and one != "\n"], repr(shown)
    # A Text drops some of the characters by itself.
    assert shown.count(r"\x1b]0;owned") == 2


def test_a_live_view_moves_the_cursor_and_escapes_its_text(console):
    """``status --watch`` keeps drawing in place."""
    with Live(Text(EVIL), console=console, auto_refresh=False) as live:
        live.update(Text(EVIL), refresh=True)
    drawn = console.file.getvalue()
    assert "\x1b[" in drawn
    assert "\x1b]" not in drawn
    assert "\u202e" not in drawn
    assert r"\x1b]0;owned" in drawn


def test_no_other_console_is_made():
    """A table of a new command is escaped too; for sentences the linter knows."""
    made = [
        f"{path}:{node.lineno}"
        for path in Path(vlm_assets.__file__).parent.rglob("*.py")
        if "Console(" in (text := path.read_text())
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Call) and getattr(node.func, "id", None) == "Console"
    ]
    assert made == []


@pytest.fixture
def in_command(monkeypatch):
    """As within a command, with lines for a file that do not wait for seconds."""
    monkeypatch.setattr(terminal, "_FIRST_LINE_SECONDS", 0.01)
    monkeypatch.setattr(terminal, "_LINE_SECONDS", 0.01)
    context = typer.Context(click.Command("a"))
    terminal.show_activity(context)
    yield
    doing("what is left when it ends")
    context.close()
    assert "activity" not in {one.name for one in threading.enumerate()}


def test_what_takes_long_is_told_on_stderr_and_ends_with_the_next_sentence(in_command, capfd):
    """Nobody waits for minutes before an empty line; what a program reads on stdout stays as it was."""
    doing(f"reading {EVIL}", 3, 1000)
    read = ""
    while "(0:00:0" not in read:
        read += capfd.readouterr().err
    assert "3 of 1,000" in read and unsteered(read)
    say("Done.")
    assert threading.active_count() == 1 or "activity" not in {one.name for one in threading.enumerate()}
    assert capfd.readouterr().out == "Done.\n"


def test_a_line_on_a_terminal_moves_and_goes(in_command, monkeypatch, capfd):
    """Of it nothing is left when the answer is written."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setattr(terminal, "_FIRST_SECONDS", 0.01)
    doing("reading", 1, 2)
    read = ""
    while "reading: 1 of 2" not in read:
        read += capfd.readouterr().err
    say("Done.")
    assert capfd.readouterr().err.endswith("\x1b[2K"), "the line is taken away"


def test_nothing_is_shown_for_programs_and_outside_of_a_command(in_command, capfd):
    """With --json, and where a sensor calls the same functions."""
    assert terminal._say_json_alone(True)
    doing("reading", 1, 2)
    assert "activity" not in {one.name for one in threading.enumerate()}
    assert capfd.readouterr().err == ""
