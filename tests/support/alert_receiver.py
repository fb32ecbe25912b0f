"""A real HTTP server that takes alerts, goes down, refuses or hangs; sending to it without a command."""

from __future__ import annotations

import json
import re
import threading
import time
from collections import Counter
from contextlib import ExitStack

from resources.alerts.alert import Message
from resources.alerts.targets import Target
from tests.support.http_stub import Request, serving

_ID = re.compile(r"^Id: (\S+)$", re.MULTILINE)


class AlertReceiver:
    """What a webhook of a person's is to us: apprise's ``json://``. answer: the status, or None to hang.

    refused: titles that are never taken, whatever the answer to others is. hanging: titles at which it hangs.
    times: unix seconds, a message's.
    """

    def __init__(self) -> None:
        self.messages: list[dict] = []
        self.times: list[float] = []
        self.requests = 0
        self.authorizations: list[str | None] = []
        self.answer: int | None = 200
        self.refused: tuple[str, ...] = ()
        self.hanging: tuple[str, ...] = ()
        self.arrived = threading.Condition()
        self.asked = threading.Event()
        self.released = threading.Event()
        self._standing = ExitStack()
        self.port = 0
        self.up()

    def up(self) -> None:
        """Listen, on the same port as before."""
        self.port = self._standing.enter_context(serving(self._take, port=self.port))

    def _take(self, request: Request) -> None:
        message = json.loads(request.content())
        self.authorizations.append(request.headers["Authorization"])
        self.requests += 1
        self.asked.set()
        if self.answer is None or message["title"] in self.hanging:
            self.released.wait(60)
            return
        if message["title"] in self.refused:
            request.respond(400)
            return
        if self.answer == 200:
            with self.arrived:
                self.messages.append(message)
                self.times.append(time.time())
                self.arrived.notify_all()
        request.respond(self.answer)

    def down(self) -> None:
        """Refuse connections."""
        self.released.set()
        self._standing.close()

    def url(self, *, secret: str = "") -> str:
        """Its address as apprise takes it."""
        return f"json://{secret + '@' if secret else ''}127.0.0.1:{self.port}/"

    @property
    def titles(self) -> list[str]:
        return [message["title"] for message in self.messages]

    @property
    def ids(self) -> list[str]:
        """The stable ids in the messages, in the order of their arrival."""
        return [found for message in self.messages for found in _ID.findall(message["message"])]

    def repeated(self) -> dict[str, int]:
        """Ids that came more than once, and how often."""
        return {id_: count for id_, count in Counter(self.ids).items() if count > 1}

    def wait_for(self, count: int, *, seconds: float) -> None:
        """Until so many messages are there."""
        deadline = time.monotonic() + seconds
        with self.arrived:
            while len(self.messages) < count:
                left = deadline - time.monotonic()
                assert left > 0, f"{len(self.messages)} of {count} messages after {seconds} s"
                self.arrived.wait(left)


def send_from_here(target: Target, message: Message, *, seconds: float) -> str | None:
    """Send as ``targets.send`` does, with apprise in this process."""
    import apprise

    sender = apprise.Apprise(asset=apprise.AppriseAsset(storage_mode="memory"))
    sender.add(target.url)
    taken = sender.notify(message.body, message.title, message.type, body_format="text", timeout=seconds)
    return None if taken else "it was refused"
