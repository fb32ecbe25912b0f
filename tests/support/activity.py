"""What a command says that it does, and how far it is: for the tests of every command that takes long."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.support.homes import Dataset
from vlm_assets.commands import main, terminal
from vlm_assets.commands.main import app


@dataclass(frozen=True)
class Told:
    """Words of a command, and what it says: texts, each with the number that it counts to.

    0: it does not count; -1: to any. before: makes something for it to do.
    """

    words: str
    expected: Mapping[str, int]
    before: Callable[[Dataset, pytest.MonkeyPatch], None] = lambda dataset, monkeypatch: None
    fixtures: tuple[str, ...] = ()


class Steps(list[tuple[str, int, int]]):
    """Texts that commands showed, each with how far it was and how far it goes."""


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> Steps:
    """What the commands of a test show while they work."""
    shown = Steps()

    class Activity:
        console = None

        def __init__(self, text: str, done: int, total: int) -> None:
            self.now(text, done, total)

        def now(self, text: str, done: int, total: int) -> None:
            shown.append((text, done, total))

        def end(self) -> None: ...

    monkeypatch.setattr(terminal, "_Activity", Activity)
    return shown


def commands_of(package: str) -> set[str]:
    """Every command of a package by what a person types."""
    names = set()
    for name, (module, _) in main.commands().items():
        if module.startswith(f"{package}."):
            inner = getattr(main.find_command(name), "commands", {})
            added = {f"{name} {command}" for command in inner} - main.commands().keys()
            names |= {name, *added}
    return names


def check_steps(
    name: str,
    told: Told,
    dataset: Dataset,
    steps: Steps,
    monkeypatch: pytest.MonkeyPatch,
    receiver: Any,
    request: pytest.FixtureRequest,
) -> None:
    """Run a command over a small home: what takes long is shown, up to the last of what can be counted."""
    for fixture in told.fixtures:
        request.getfixturevalue(fixture)
    for setting, value in {
        "HOME": str(dataset.settings.home),
        "DEVICES": "cpu:1",
        "DECODE_WORKERS": "1",
        "ALERT_TARGETS": receiver.url(),
    }.items():
        monkeypatch.setenv(f"VLM_ASSETS_{setting}", value)
    told.before(dataset, monkeypatch)
    steps.clear()
    words = told.words.replace("FOLDER", str(dataset.settings.home.parent)).split()
    done = CliRunner().invoke(app, words, catch_exceptions=False)
    assert steps, done.output
    for text, total in told.expected.items():
        shown = [(step, of) for step_text, step, of in steps if step_text == text]
        assert shown, f"{text!r} is not among {sorted({step_text for step_text, *_ in steps})}"
        if total:
            assert {of for _, of in shown} == {total} or total < 0
            assert max(step for step, _ in shown) >= shown[0][1] - 1, "it is said up to the last"
    parameters = {parameter.name for parameter in main.find_command(name.split()[0]).params}
    if "as_json" in parameters and name == words[0]:
        steps.clear()
        CliRunner().invoke(app, [*words, "--json"])
        assert steps == [], "a program reads this"
