"""What takes long at this moment, and how far it is: services say it, and whoever called them may show it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import TypeVar

_listeners: list[Callable[[str, int, int], None]] = []
"""The listener, at most one: the command that runs in this process."""


def listen_to_progress(listener: Callable[[str, int, int], None]) -> None:
    """Call ``listener`` with each activity, how many of its steps are done, and of how many (0: unknown)."""
    _listeners[:] = [listener]


def stop_listening() -> None:
    """Let what services say be heard by nobody."""
    _listeners.clear()


def doing(text: str, done: int = 0, total: int = 0) -> None:
    """Say what takes long, and how far it is. Called as often as one likes."""
    for listener in _listeners:
        listener(text, done, total)


_Step = TypeVar("_Step")


def doing_each(text: str, steps: Collection[_Step]) -> Iterator[_Step]:
    """Give the steps one after another, and say before each how many of all are done."""
    for done, step in enumerate(steps):
        doing(text, done, len(steps))
        yield step
