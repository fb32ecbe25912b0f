"""Whom alerts are sent to: apprise addresses, which are secrets as a whole.

What lives here: refusing bad ones, naming one without telling it, and the process of its own in which a
target is sent to. What does not: what is sent when (``delivery.py``). Each target has its own process because
a hanging one can then be ended, and because nothing that a notification library logs or remembers can then
reach our logs or files. Term: apprise URL.

The process is ``python -m resources.alerts.targets``. It reads a line with the address, then one line a
message, and answers each with one line before it reads the next, so that its parent has written down the one
before. It ends when its parent does, and at its time limit by itself.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import re
import select
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, unquote

from resources.alerts.alert import Message

if TYPE_CHECKING:
    import apprise

_CHECKOUT = Path(__file__).resolve().parents[2]
_GRACE_SECONDS = 5.0
_SHORTEST_SECRET = 3
_LONGEST_ANSWER = 300
_TIME_FOR_ONE = 1.0
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


@dataclass(frozen=True)
class TargetAnswer:
    """Whether a target took a message, and what it said where it did not; nothing secret is in it."""

    took: bool
    said: str = ""


class TargetProcess:
    """The process in which one target is sent to, started at the first message. A context; closing ends it.

    deadline: ``time.monotonic()`` at which it is killed. keep_open: a descriptor that the process holds while
    it lives, so that a lock on it outlasts a killed parent until nothing more is under way.
    """

    def __init__(self, target: Target, *, deadline: float, keep_open: int) -> None:
        self.target = target
        self._deadline = deadline
        self._keep_open = keep_open
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> TargetProcess:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()

    @property
    def out_of_time(self) -> bool:
        """Whether the deadline is so near that nothing more should be begun."""
        return self._deadline - time.monotonic() < _TIME_FOR_ONE

    def send(self, message: Message) -> TargetAnswer:
        """Send one message and wait for the answer, until the deadline."""
        try:
            process = self._process or self._start()
            assert process.stdin is not None
            self._write(process, asdict(message))
            answer = self._line(process)
        except (OSError, EOFError, ValueError) as error:
            return TargetAnswer(took=False, said=f"the sending process ended: {type(error).__name__}")
        if answer is None:
            return TargetAnswer(took=False, said="no answer in time")
        return TargetAnswer(took=bool(answer["took"]), said=str(answer["said"]))

    def _start(self) -> subprocess.Popen[bytes]:
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            pass_fds=(self._keep_open,),
            cwd=_CHECKOUT,
        )
        # Not in its arguments, which every user of the machine can read.
        seconds = max(0.0, self._deadline - time.monotonic())
        self._write(self._process, {"url": self.target.url, "parent": os.getpid(), "seconds": seconds})
        return self._process

    def _write(self, process: subprocess.Popen[bytes], said: object) -> None:
        assert process.stdin is not None
        process.stdin.write(json.dumps(said).encode() + b"\n")
        process.stdin.flush()

    def _line(self, process: subprocess.Popen[bytes]) -> dict[str, object] | None:
        assert process.stdout is not None
        descriptor = process.stdout.fileno()
        said = b""
        while not said.endswith(b"\n"):
            left = self._deadline - time.monotonic()
            if left <= 0 or not select.select([descriptor], [], [], left)[0]:
                return None
            part = os.read(descriptor, 1 << 16)
            if not part:
                raise EOFError("no answer")
            said += part
        found: dict[str, object] = json.loads(said)
        return found


def scrubbed(text: str, url: str) -> str:
    """A text without any part of an address but its scheme; what a target said may quote it."""
    rest = url.partition("://")[2]
    parts = {part for form in (rest, unquote(rest)) for part in re.split(r"[/:@?&=+,;#\s]+", form)}
    parts |= {quote(part, safe="") for part in parts} | {unquote(part) for part in parts}
    for part in sorted(parts, key=len, reverse=True):
        if len(part) >= _SHORTEST_SECRET:
            text = text.replace(part, "***")
    return text


def _notify(target: apprise.Apprise, url: str, message: dict[str, Any]) -> dict[str, Any]:
    try:
        result = target.notify(
            title=message["title"], body=message["body"], notify_type=message["type"], body_format="text"
        )
        took, said = bool(result), [entry.message for entry in result.logs()]
    except Exception as error:
        # Whatever a plugin of the seventy raises: the target did not take it, and the next is tried later.
        took, said = False, [type(error).__name__]
    text = " ".join(scrubbed(one, url) for one in said if one.strip())
    return {"id": message["id"], "took": took, "said": text[:_LONGEST_ANSWER]}


def _serve(lines: Iterable[str], channel: int) -> None:
    import apprise

    address: dict[str, Any] | None = None
    target = None
    for line in lines:
        said = json.loads(line)
        if address is None:
            address = said
            signal.setitimer(signal.ITIMER_REAL, said["seconds"] + _GRACE_SECONDS)
            # In memory: a plugin would keep its tokens in a file of the home folder otherwise.
            asset = apprise.AppriseAsset(app_id="vlm-assets", storage_mode="memory")
            target = apprise.Apprise(asset=asset)
            target.add(said["url"])
        elif target is not None:
            if os.getppid() != address["parent"]:
                # It was killed since: nobody would record what is sent now, and the next process sends it.
                return
            os.write(channel, json.dumps(_notify(target, address["url"], said)).encode() + b"\n")


if __name__ == "__main__":
    answers = os.dup(1)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    warnings.simplefilter("ignore")
    # iter(readline) and not the file itself, which would read ahead and wait for more.
    _serve(iter(sys.stdin.readline, ""), answers)
