"""Whom alerts are sent to: apprise addresses, which are secrets as a whole.

What lives here: refusing bad ones, naming one without telling it, and sending. What does not: what is sent
when (``delivery.py``). A process of its own sends to each (``python -m resources.alerts.targets``): one that
hangs can be ended, and nothing that a notification library logs or remembers can reach our logs or files.
Term: apprise URL.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from urllib.parse import quote, unquote

from resources.alerts.alert import Message

_CHECKOUT = Path(__file__).resolve().parents[2]
_SHORTEST_SECRET = 3
_LONGEST_ANSWER = 300
_SCHEME = re.compile(r"([a-z][a-z0-9+.-]{0,30})://", re.IGNORECASE)


class AlertTargetError(ValueError):
    """An address cannot be used. The message names it by position and scheme, never its text."""


@dataclass(frozen=True)
class Target:
    """One address. number: its place in the settings, from 1."""

    number: int
    url: str = field(repr=False)

    @property
    def scheme(self) -> str:
        """Its kind, e.g. ``slack``; the rest of an address is secret."""
        found = _SCHEME.match(self.url)
        return found.group(1).lower() if found else "no scheme"

    @property
    def name(self) -> str:
        """How it is called wherever people read of it."""
        return f"target {self.number} ({self.scheme})"


def checked_targets(urls: Sequence[str]) -> tuple[Target, ...]:
    """The targets of these addresses. Raises AlertTargetError, which names every bad one."""
    if not urls:
        return ()
    import apprise
    from apprise.manager_plugins import NotificationManager

    # Its records quote addresses.
    logging.getLogger("apprise").disabled = True
    known: Container[str] = NotificationManager()  # type: ignore[no-untyped-call]  # apprise types it so
    in_memory = apprise.AppriseAsset(storage_mode="memory")
    # One that is named twice is one target.
    targets = [Target(number, url) for number, url in enumerate(dict.fromkeys(urls), start=1)]
    # What is no scheme may be a password.
    bad = [
        f"number {one.number} ({one.scheme if one.scheme in known else 'no scheme that apprise knows'})"
        for one in targets
        if not apprise.Apprise(asset=in_memory).add(one.url)
    ]
    if bad:
        raise AlertTargetError(
            f"Alert targets that cannot be used: {', '.join(bad)}. An address has the form that"
            " https://appriseit.com/services/ gives for its service, and several are separated by blanks;"
            " characters such as @, : and / inside a password are written as %40, %3A and %2F."
        )
    return tuple(targets)


@contextlib.contextmanager
def sending(target: Target, *, seconds: float) -> Iterator[Callable[[Message], str | None]]:
    """A function that sends the target a message: None where it took it, else what it said, nothing secret.

    seconds: for all messages together; then what hangs is ended.
    """
    with subprocess.Popen(
        [sys.executable, "-m", __name__, str(seconds), str(os.getpid())],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        cwd=_CHECKOUT,
        text=True,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        orders, answers = process.stdin, process.stdout

        def send(message: Message) -> str | None:
            try:
                # Not in its arguments, which every user of the machine can read.
                print(json.dumps({"url": target.url, **asdict(message)}), file=orders, flush=True)
                said: str | None = json.loads(answers.readline())
            except (OSError, ValueError):
                return "no answer in time"
            return said

        try:
            yield send
        finally:
            process.kill()
            with contextlib.suppress(OSError):
                orders.close()  # What it was not told any more cannot be flushed.


def scrubbed(text: str, url: str) -> str:
    """A text without any part of an address but its scheme; what a target said may quote it."""
    rest = url.partition("://")[2]
    parts = {part for form in (rest, unquote(rest)) for part in re.split(r"[/:@?&=+,;#\s]+", form)}
    parts |= {quote(part, safe="") for part in parts} | {unquote(part) for part in parts}
    for part in sorted(parts, key=len, reverse=True):
        if len(part) >= _SHORTEST_SECRET:
            text = text.replace(part, "***")
    return text


def _send_what_is_ordered() -> None:
    """The process of its own: an answer for each line of its input, null or what the target said."""
    seconds, parent = float(sys.argv[1]), int(sys.argv[2])
    # A plugin that hangs ends it, whatever has become of its parent.
    signal.setitimer(signal.ITIMER_REAL, max(0.001, seconds))
    import apprise

    # A plugin that prints must not answer.
    answers, sys.stdout = sys.stdout, sys.stderr
    # In memory: a plugin would keep its tokens in a file of the home folder otherwise.
    asset = apprise.AppriseAsset(app_id="vlm-assets", storage_mode="memory")
    # iter(readline) and not the file itself, which would read ahead and wait for more.
    for line in iter(sys.stdin.readline, ""):
        order = json.loads(line)
        target = apprise.Apprise(asset=asset)
        target.add(order["url"])
        if os.getppid() != parent:
            return  # Nobody could note that it was sent: whoever comes next sends it.
        result = target.notify(
            title=order["title"], body=order["body"], notify_type=order["type"], body_format="text"
        )
        logs = " ".join(scrubbed(entry.message, order["url"]) for entry in result.logs())
        answer = None if result else logs[:_LONGEST_ANSWER] or "it was refused"
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    _send_what_is_ordered()
