"""What a process does that posts and delivers and is killed; run by fork_server.py.

It posts the alerts of its order, one by one, delivers, and kills itself before its Nth file operation, or is
killed after some seconds. It reports what it was promised.
"""

from __future__ import annotations

import time
from pathlib import Path

from faults.file_operations import FileOperations, strike_at
from resources.alerts.alert import Alert
from resources.alerts.delivery import Delivered, Delivery
from resources.alerts.outbox import Outbox
from resources.alerts.targets import Target


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


def work(order: dict, report) -> None:
    """Post one by one, recover what the order says, deliver; report each as it is promised."""
    home = Path(order["home"])
    mode = order.get("mode")
    operations = FileOperations(home, strike_at(order.get("at", 0) if mode else 0, torn=mode == "torn"))
    operations.install()
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
    report(finished=True, operations=operations.count, open=sorted(outbox.open_subjects()))


def deliver(delivery: Delivery) -> Delivered:
    """A killed deliverer's sending process ends within moments; until then the lock is its own."""
    while (done := delivery.deliver(now=time.time(), seconds=30.0, address=None)) is None:
        time.sleep(0.02)
    return done
