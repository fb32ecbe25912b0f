"""Processes that post and deliver and are killed, each forked; run as a script by conftest.py.

The script reads one order a line (JSON) on stdin and forks a child that posts the alerts of the order, one
by one, delivers, and kills itself before its Nth file operation, or is killed after some seconds. It answers
with what the child had been promised, over a pipe that survives the kill.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

from resources.alerts.alert import Alert
from resources.alerts.delivery import Delivered, Delivery
from resources.alerts.outbox import Outbox
from resources.alerts.targets import Target

OPERATIONS = ("open", "write", "fsync", "close", "link", "unlink", "rename", "replace", "mkdir", "ftruncate")


def alert(number: int) -> Alert:
    """A kind of its own each, so that none is told in a group and each must come by itself."""
    return Alert(
        kind=f"kind-{number}",
        subject=f"subject-{number}",
        occurrence="1",
        severity="error",
        title=f"alert {number}",
        next_step="Look.",
        at=time.time(),
    )


class Failpoint:
    """Wraps the os functions that change a disk; kills before the Nth call, or in the middle of a write."""

    def __init__(self, mode: str, at: int) -> None:
        self.mode, self.at = mode, at
        self.calls = itertools.count(1)
        self.guard = threading.Lock()
        for name in OPERATIONS:
            setattr(os, name, self.wrap(name, getattr(os, name)))

    def wrap(self, name, real):
        """The function to put in the place of ``os.name``."""

        def call(*arguments, **named):
            if name == "open" and not arguments[1] & os.O_CREAT:
                return real(*arguments, **named)
            with self.guard:
                number = next(self.calls)
            if number == self.at and self.mode in ("kill", "torn"):
                if self.mode == "torn" and name == "write":
                    real(arguments[0], bytes(arguments[1])[: len(arguments[1]) // 2])
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*arguments, **named)

        return call


def work(order: dict, report) -> None:
    """Post one by one, recover what the order says, deliver; report each as it is promised."""
    home = Path(order["home"])
    failpoint = Failpoint(order.get("mode", "none"), order.get("at", 0))
    outbox = Outbox(home / "alerts")
    delivery = Delivery(outbox, [Target(1, order["url"])], home=home)
    recover = set(order.get("recover", ()))
    for number in order["numbers"]:
        one = alert(number)
        outbox.post(one)
        report(posted=one.id)
        if number in recover:
            again = {"occurrence": "2", "sentence": "It passed.", "at": time.time()}
            if outbox.recovered(one.subject, **again):
                report(recovered=number)
        if order.get("deliver_each"):
            deliver(delivery)
    if order.get("deliver"):
        # One pass has a time limit, and a machine under load may leave some for the next.
        while deliver(delivery).waiting:
            time.sleep(0.2)
    report(finished=True, operations=next(failpoint.calls) - 1, open=sorted(outbox.open_subjects()))


def deliver(delivery: Delivery) -> Delivered:
    """A killed deliverer's sending process ends within moments; until then the lock is its own."""
    while (done := delivery.deliver(now=time.time(), seconds=30.0, address=None)) is None:
        time.sleep(0.02)
    return done


def run(order: dict) -> dict:
    """Fork, let the child work, kill it in time, and gather what it said before it ended."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        write = os.write  # the failpoint must not count our own reports
        report = lambda **said: write(writing, (json.dumps(said) + "\n").encode())  # noqa: E731
        code = 1
        try:
            work(order, report)
            code = 0
        except BaseException as error:
            report(error=f"{type(error).__name__}: {error}")
        finally:
            os._exit(code)
    os.close(writing)
    if "after" in order:
        timer = threading.Timer(order["after"], os.kill, (child, signal.SIGKILL))
        timer.start()
    _, status = os.waitpid(child, 0)
    if "after" in order:
        timer.cancel()
    with os.fdopen(reading) as stream:
        said = [json.loads(line) for line in stream]
    return {"killed": os.WIFSIGNALED(status), "said": said}


if __name__ == "__main__":
    for line in sys.stdin:
        print(json.dumps(run(json.loads(line))), flush=True)
