"""What a process does that posts and delivers and is killed; run by fork_server.py.

It posts the alerts of its order, one by one, delivers, and kills itself before its Nth step (an SQL
statement, a commit, a send, or the moment after one), or at a step of a name, or is killed after some
seconds. Apprise's command sends, or with ``send_from_here`` this process. It reports what it was promised.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import sqlalchemy as sa

from resources.alerts import delivery as module
from resources.alerts.alert import Alert
from resources.alerts.delivery import Delivered, Delivery
from resources.alerts.outbox import Outbox
from resources.alerts.targets import Target, checked_targets
from tests.support.alert_receiver import send_from_here
from vlm_durable.state.database import ControlState

# Apprise loads every service: here once, not in each child that sends by itself.
checked_targets(["json://127.0.0.1"])


def alert(number: int, at: float) -> Alert:
    """Of a kind of its own, so that a message about several names it."""
    return Alert(
        kind=f"kind-{number}",
        subject=f"subject-{number}",
        occurrence="1",
        severity="error",
        title=f"alert {number}",
        next_step="Look.",
        at=at,
    )


class Steps:
    """Counts the steps of this process, and kills it before one of them."""

    def __init__(self, at: int, name: str | None) -> None:
        self.count = 0
        self._at, self._name = at, name

    def install(self) -> None:
        """Count from now on."""
        sa.event.listen(sa.Engine, "before_cursor_execute", lambda *_: self.step("statement"))
        sa.event.listen(sa.Engine, "commit", lambda *_: self.step("commit"))
        send, mark = module.send, module._mark_told

        def sent(*arguments: object, **named: object) -> object:
            self.step("send")
            answer = send(*arguments, **named)
            self.step("mark")
            return answer

        def marked(*arguments: object, **named: object) -> None:
            mark(*arguments, **named)
            self.step("marked")

        module.send, module._mark_told = sent, marked

    def step(self, name: str) -> None:
        """One more."""
        self.count += 1
        if self.count == self._at or name == self._name:
            os.kill(os.getpid(), signal.SIGKILL)


def work(order: dict, report) -> None:
    """Post one by one, recover what the order says, deliver; report each as it is promised."""
    home = Path(order["home"])
    if order.get("send_from_here"):
        module.send = send_from_here
    steps = Steps(order.get("at", 0), order.get("kill_before"))
    steps.install()
    outbox = Outbox(ControlState(home / ".state"))
    delivery = Delivery(outbox, [Target(1, order["url"])], home=home)
    recover, ahead = set(order.get("recover", ())), order.get("ahead", 0.0)
    for number in order["numbers"]:
        one = alert(number, time.time() + ahead)
        outbox.post(one)
        report(posted=one.id)
        if number in recover and outbox.note_recovery(one.subject, sentence="It passed.", at=one.at):
            report(recovered=number)
        if order.get("deliver_each"):
            deliver(delivery, ahead)
    if order.get("deliver"):
        # One pass has a time limit, and a machine under load may leave some for the next.
        while deliver(delivery, ahead).waiting:
            time.sleep(0.2)
    told = [event.id for event in outbox.recent(1000) if event.happening == "raised"]
    report(finished=True, steps=steps.count, open=sorted(outbox.open_subjects()), raised=told)


def deliver(delivery: Delivery, ahead: float) -> Delivered:
    """By a clock that is ``ahead``: what a killed process was about to tell is told half a minute later."""
    return delivery.deliver(now=time.time() + ahead, seconds=20.0, address=None)
