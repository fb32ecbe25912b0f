"""State files of ours that did not verify and were kept aside: what a person is told, and when it is over.

What lives here: the alert. What does not: noticing one and making it anew, which is each file's own module's.
"""

from __future__ import annotations

from collections.abc import Collection

from resources.alerts.alert import Alert
from resources.alerts.outbox import Outbox

KIND = "state_damaged"
STANDS_SECONDS = 24 * 3600.0
"""How long it is told of: made anew at once, it says for a day that somebody should look at the disk."""


def subject(what: str) -> str:
    """The subject of all that is told of one file."""
    return f"state/{what}"


def damaged(what: str, sentence: str, now: float, *, occurrence: str | None = None) -> Alert:
    """A file of ours that does not verify, was kept aside and made anew. sentence: what follows from it."""
    return Alert(
        kind=KIND,
        subject=subject(what),
        occurrence=occurrence or sentence,
        severity="error",
        title=f"The file of {what} was damaged",
        next_step=f"{sentence} Look at the disk's health.",
        at=now,
    )


def call_off(outbox: Outbox, files: Collection[str], now: float) -> None:
    """Say of these files, which read now, that their damage is over, once it has stood for a day."""
    opened = outbox.open_subjects()
    for what in files:
        alert = opened.get(subject(what))
        if alert is not None and now - alert.at >= STANDS_SECONDS:
            sentence = "It was made anew and has been read since."
            outbox.recovered(alert.subject, occurrence=alert.occurrence, sentence=sentence, at=now)
