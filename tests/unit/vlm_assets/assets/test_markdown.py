"""No text of a stranger is markup on a page of ours."""

from __future__ import annotations

import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from vlm_assets.assets.markdown import Markdown, bullets, escape, sentence, table
from vlm_durable.markdown_text import plain

EVIL = "![x](http://127.0.0.1:1/a.png) <img src=x> [a](javascript:alert(1)) | b"


@pytest.mark.parametrize("made", [escape(EVIL), sentence(EVIL), bullets([EVIL]), table((EVIL,), [(EVIL,)])])
def test_markup_of_a_stranger_is_text(made: Markdown) -> None:
    """No bracket, bar or angle of a stranger is left without its backslash."""
    own = "| " if made.startswith("|") else ""
    bare = re.sub(r"\\.", "", made)
    assert not re.search(r"[\[\]<>!`]", bare)
    assert bool(re.search(r"\|", bare)) == bool(own)
    assert "http://" not in made


@pytest.mark.parametrize("text", ["http://a.b", "HTTPS://a.b", "www.a.b", "someone@a.b", "ftp://a.b"])
def test_an_address_is_no_link(text: str) -> None:
    """The parser of the page makes a link of a bare address, after it has taken the escapes away."""
    assert escape(text) != text
    assert escape(text).replace("\N{ZERO WIDTH SPACE}", "") == text


@given(st.text("ab1 `\\*_{}[]<>!|~&-+#=.)(:/@\"'$\n", max_size=60))
@example("1. a")
@example("`a\\_b` \\_ `c")
@example(f"{EVIL} https://a.b " + "x" * 60)
def test_a_reader_without_markdown_reads_what_was_written(text: str) -> None:
    """Alerts and the terminal tell what a check's page says, without a backslash more or less."""
    assert plain(escape(text)) == plain(sentence(text)) == re.sub(r"\n+", " ", text)


def test_a_command_stays_code() -> None:
    """A person copies it from the page."""
    assert sentence("Run `vlm-assets repair --yes`.") == "Run `vlm-assets repair --yes`."


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("`a``b`", r"`a`\`b\`"),
        ("one ` tick", r"one \` tick"),
        ("``", r"\`\`"),
        ("`a|b`", r"\`a\|b\`"),
        ("`a` ![x](y) `b`", r"`a` \!\[x\](y) `b`"),
        ("![x`](y)`", r"\!\[x`](y)`"),
        ("`a\n\nb`", "`a b`"),
    ],
)
def test_backticks_of_a_stranger_open_nothing(text: str, shown: str) -> None:
    """Whatever stands between two of them is code, and everything else is escaped."""
    assert sentence(text) == shown


@pytest.mark.parametrize("text", ["# a", "- a", "+ a", "1. a", "12) a", "  - a", "---", "==="])
def test_a_text_begins_no_block(text: str) -> None:
    """A description that begins with a dash is no list."""
    assert escape(text) != text
    assert escape(text).replace("\\", "") == text


def test_figures_stay_as_they_are() -> None:
    """A share in a cell is no numbered list."""
    assert escape("15.0%") == "15.0%"
    assert table(("", "s"), [("rows", 3)], numbers=True) == "|  | s |\n| --- | --: |\n| rows | 3 |"


def test_escaped_text_is_not_escaped_twice() -> None:
    """What was put together from it is a plain text again, and is escaped."""
    assert sentence(escape("a_b")) == r"a\_b"
    assert sentence(f"{escape('a_b')}") == r"a\\\_b"


def test_nothing_invisible_is_shown() -> None:
    """A text that turns the direction, or steers a terminal, is written out."""
    assert sentence("a\u202eb `c\x1bd`") == "a\\\\u202eb `c\\\\u001bd`"
