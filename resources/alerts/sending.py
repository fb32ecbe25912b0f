"""The process that sends to one target: run by ``targets.py`` as ``python -m resources.alerts.sending``.

What lives here: the only call of apprise that leaves the machine. It reads a line with the address, then one
line a message, and answers each with one line before it reads the next, so that its parent has written down
the one before. It ends when its parent does, and at its time limit by itself.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import warnings
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, unquote

if TYPE_CHECKING:
    import apprise

_GRACE_SECONDS = 5.0
_SHORTEST_SECRET = 3
_LONGEST_ANSWER = 300


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
