"""A control state that was damaged or deleted and put back: one alert says what may be missing.

What lives here: the alert, and when it is over. What does not: restoring (``resources/state/database.py``).
"""

from __future__ import annotations

from resources.alerts.alert import Alert
from resources.alerts.outbox import Outbox
from resources.state.database import ControlState

KIND = "state_damaged"
SUBJECT = "state/database"
STANDS_SECONDS = 24 * 3600.0
"""How long the alert stays open: it asks somebody to look at the disk."""


def tell_restorations(state: ControlState, outbox: Outbox, now: float) -> None:
    """Post each restoration of the last day once; close the alert after it. now: unix seconds."""
    restorations = state.restorations()
    if not restorations:
        return
    latest = restorations[-1]
    if now - latest.at < STANDS_SECONDS:
        outbox.post(
            Alert(
                kind=KIND,
                subject=SUBJECT,
                occurrence=f"{latest.at}",
                severity="error",
                title="The control state was damaged and was put back",
                next_step=f"{latest.sentence()} Look at the disk's health.",
                at=now,
            )
        )
    elif SUBJECT in outbox.open_subjects():
        sentence = "It was put back a day ago and has been sound since."
        outbox.recovered(SUBJECT, occurrence=f"{latest.at}", sentence=sentence, at=now)
