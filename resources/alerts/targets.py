"""The targets of alerts: apprise addresses, which are secrets as a whole.

Apprise's own command sends each message: a command that hangs can be ended, and nothing that a notification
library logs or remembers can reach our logs or files.
"""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
from collections.abc import Container, Sequence
from dataclasses import dataclass, field
from urllib.parse import quote, unquote

from resources.alerts.alert import Message

_SHORTEST_SECRET = 3
_LONGEST_ANSWER = 300
_SCHEME = re.compile(r"([a-z][a-z0-9+.-]{0,30})://", re.IGNORECASE)


_COMMAND = (
    "from vlm_durable.files.processes import die_with; die_with({}); from apprise.cli import main; main()"
)
"""Apprise's command, which ends with the process of this pid: a process that was killed cannot note what was
sent, so another process sends it again."""


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
        match = _SCHEME.match(self.url)
        return match.group(1).lower() if match else "no scheme"

    @property
    def name(self) -> str:
        """Its name for people."""
        return f"target {self.number} ({self.scheme})"


def checked_targets(urls: Sequence[str]) -> tuple[Target, ...]:
    """The targets of these addresses. Raises AlertTargetError, which names every bad address."""
    if not urls:
        return ()
    import apprise
    from apprise.manager_plugins import NotificationManager

    # Its records quote addresses.
    logging.getLogger("apprise").disabled = True
    known_schemes: Container[str] = NotificationManager()  # type: ignore[no-untyped-call]  # it has no types
    in_memory = apprise.AppriseAsset(storage_mode="memory")
    # An address that is named twice is one target.
    targets = [Target(number, url) for number, url in enumerate(dict.fromkeys(urls), start=1)]
    bad = []
    for target in targets:
        if not apprise.Apprise(asset=in_memory).add(target.url):
            # An unknown scheme is not quoted: it may be a password.
            scheme = target.scheme if target.scheme in known_schemes else "no scheme that apprise knows"
            bad.append(f"number {target.number} ({scheme})")
    if bad:
        raise AlertTargetError(
            f"Alert targets that cannot be used: {', '.join(bad)}. An address has the form that"
            " https://appriseit.com/services/ gives for its service, and several are separated by blanks;"
            " characters such as @, : and / inside a password are written as %40, %3A and %2F."
        )
    return tuple(targets)


def send(target: Target, message: Message, *, seconds: float) -> str | None:
    """Send a target a message. Returns None if it took it, else its answer without anything secret.

    seconds: after which a command that hangs is ended.
    """
    environment = {name: value for name, value in os.environ.items() if not name.startswith("APPRISE_")}
    try:
        process = subprocess.run(
            [
                *(sys.executable, "-c", _COMMAND.format(os.getpid()), "--verbose"),
                # As bytes, and read as bytes: a letter that the locale lacks must hold up no alert.
                f"--title={message.title}".encode(),
                f"--notification-type={message.type}",
                "--input-format=text",
                # Otherwise a plugin would keep its tokens in a file of the home folder.
                "--storage-mode=memory",
                f"--limit={seconds}",
            ],
            input=message.body.encode(),
            capture_output=True,
            check=False,
            # Not in its arguments, which every user of the machine can read.
            env=environment | {"APPRISE_URLS": target.url, "PYTHONUTF8": "1"},
            timeout=seconds,
        )
    except (OSError, subprocess.TimeoutExpired):
        return "no answer in time"
    if not process.returncode:
        return None
    # Each line begins with its time and level.
    lines = [line.split(" - ", 2)[-1] for line in process.stdout.decode(errors="replace").splitlines()]
    return scrubbed(" ".join(lines), target.url)[:_LONGEST_ANSWER] or "it was refused"


def scrubbed(text: str, url: str) -> str:
    """A text without any part of an address except its scheme: a target's answer may quote its address."""
    rest = url.partition("://")[2]
    parts = {part for form in (rest, unquote(rest)) for part in re.split(r"[/:@?&=+,;#\s]+", form)}
    parts |= {quote(part, safe="") for part in parts} | {unquote(part) for part in parts}
    for part in sorted(parts, key=len, reverse=True):
        if len(part) >= _SHORTEST_SECRET:
            text = text.replace(part, "***")
    return text
