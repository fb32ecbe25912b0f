"""Whom alerts are sent to: apprise addresses, which are secrets as a whole.

What lives here: refusing bad ones, naming one without telling it, and sending. What does not: what is sent
when (``delivery.py``). A process of its own sends to each (``python -m resources.alerts.targets``): one that
hangs can be ended, and nothing that a notification library logs or remembers can reach our logs or files.
Term: apprise URL.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import re
import signal
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

from resources.alerts.alert import Message

_CHECKOUT = Path(__file__).resolve().parents[2]
_GRACE_SECONDS = 5.0
_SHORTEST_SECRET = 3
_LONGEST_ANSWER = 300
_SCHEME = re.compile(r"([a-z][a-z0-9+.-]{0,30})://", re.IGNORECASE)


class AlertTargetError(ValueError):
    """An address cannot be used. The message names it by position and scheme, never its text."""


@dataclass(frozen=True)
class Target:
    """One address. number: its place in the settings, from 1."""

    number: int
    url: str

    def __repr__(self) -> str:
        return f"Target({self.number})"

    @property
    def scheme(self) -> str:
        """Its kind, e.g. ``slack``; the rest of an address is secret."""
        found = _SCHEME.match(self.url)
        return found.group(1).lower() if found else "no scheme"

    @property
    def name(self) -> str:
        """How it is called wherever people read of it."""
        return f"target {self.number} ({self.scheme})"

    def key(self, salt: bytes) -> str:
        """Tells it from others in a file, and does not tell it: slow and salted, as passwords are kept."""
        return hashlib.scrypt(self.url.encode(), salt=salt, n=2**14, r=8, p=1, dklen=12).hex()


def checked_targets(urls: Sequence[str]) -> tuple[Target, ...]:
    """The targets of these addresses. Raises AlertTargetError, which names every bad one."""
    if not urls:
        return ()
    import apprise
    from apprise.manager_plugins import NotificationManager

    known: Container[str] = NotificationManager()  # type: ignore[no-untyped-call]  # apprise types it so
    bad = []
    in_memory = apprise.AppriseAsset(storage_mode="memory")
    with _silent(logging.getLogger("apprise")):
        for number, url in enumerate(urls, start=1):
            if not apprise.Apprise(asset=in_memory).add(url):
                scheme = Target(number, url).scheme
                # What is no scheme may be a password.
                told = scheme if scheme in known else "no scheme that apprise knows"
                bad.append(f"number {number} ({told})")
    if bad:
        raise AlertTargetError(
            f"Alert targets that cannot be used: {', '.join(bad)}. An address has the form that"
            " https://appriseit.com/services/ gives for its service, and several are separated by blanks;"
            " characters such as @, : and / inside a password are written as %40, %3A and %2F."
        )
    # One that is named twice is one target.
    return tuple(Target(number, url) for number, url in enumerate(dict.fromkeys(urls), start=1))


@contextlib.contextmanager
def _silent(logger: logging.Logger) -> Iterator[None]:
    """No record of a logger reaches anyone: it may quote an address."""
    before = logger.disabled
    logger.disabled = True
    try:
        yield
    finally:
        logger.disabled = before


@contextlib.contextmanager
def sending(target: Target, *, seconds: float) -> Iterator[Callable[[Message], str | None]]:
    """A function that sends the target a message: None where it took it, else what it said, nothing secret.

    seconds: for all messages together; then what hangs is ended.
    """
    try:
        process = subprocess.Popen(
            [sys.executable, "-m", __name__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd=_CHECKOUT,
        )
    except OSError as error:
        said = f"no process could be started for it ({error.strerror})"
        yield lambda message: said
        return
    over = threading.Event()

    def end() -> None:
        over.set()
        process.kill()

    timer = threading.Timer(max(0.0, seconds), end)
    timer.start()

    def send(message: Message) -> str | None:
        # Not in its arguments, which every user of the machine can read.
        order = {"url": target.url, "message": asdict(message), "parent": os.getpid(), "seconds": seconds}
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(json.dumps(order).encode() + b"\n")
            process.stdin.flush()
            answer = json.loads(process.stdout.readline())
        except (OSError, ValueError):
            return "no answer in time" if over.is_set() else "the sending process ended"
        return None if answer["took"] else str(answer["said"] or "it was refused")

    try:
        yield send
    finally:
        timer.cancel()
        process.kill()
        process.communicate()


def scrubbed(text: str, url: str) -> str:
    """A text without any part of an address but its scheme; what a target said may quote it."""
    rest = url.partition("://")[2]
    parts = {part for form in (rest, unquote(rest)) for part in re.split(r"[/:@?&=+,;#\s]+", form)}
    parts |= {quote(part, safe="") for part in parts} | {unquote(part) for part in parts}
    for part in sorted(parts, key=len, reverse=True):
        if len(part) >= _SHORTEST_SECRET:
            text = text.replace(part, "***")
    return text


def _notify(order: dict[str, Any]) -> dict[str, Any]:
    """Send a message. Where its parent was killed since this process ends: the next one sends it."""
    import apprise

    # In memory: a plugin would keep its tokens in a file of the home folder otherwise.
    target = apprise.Apprise(asset=apprise.AppriseAsset(app_id="vlm-assets", storage_mode="memory"))
    target.add(order["url"])
    message = order["message"]
    if os.getppid() != order["parent"]:
        sys.exit()
    try:
        result = target.notify(
            title=message["title"], body=message["body"], notify_type=message["type"], body_format="text"
        )
        took, said = bool(result), [entry.message for entry in result.logs()]
    except Exception as error:
        # Whatever a plugin of the seventy raises: the target did not take it, and the next is tried later.
        took, said = False, [type(error).__name__]
    text = " ".join(scrubbed(one, order["url"]) for one in said if one.strip())
    return {"took": took, "said": text[:_LONGEST_ANSWER]}


if __name__ == "__main__":
    answers = os.dup(1)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    warnings.simplefilter("ignore")
    # iter(readline) and not the file itself, which would read ahead and wait for more.
    for line in iter(sys.stdin.readline, ""):
        wanted = json.loads(line)
        # Its parent ends it in time, unless that was killed or stopped.
        signal.setitimer(signal.ITIMER_REAL, max(0.0, wanted["seconds"]) + _GRACE_SECONDS)
        os.write(answers, json.dumps(_notify(wanted)).encode() + b"\n")
