"""What a person is told of partitions that are tried again: in which words, and when it is over.

What lives here: the alerts. What does not: when they are posted (``failed_partitions.py``).
"""

from __future__ import annotations

from resources.alerts.alert import Alert, Severity
from sensors.retry_ledger import Entry


def subject(key: str) -> str:
    """The subject of all that is told of one partition's attempts."""
    return f"partitions/{key}/attempts"


def interrupted_again(entry: Entry, now: float) -> Alert:
    """A partition whose runs end for no fault of its own again and again, without a new row."""
    return _alert(
        entry,
        now,
        kind="interrupted_again",
        severity="warning",
        title=f"Partition {entry.key} was interrupted {entry.interruptions} times without a new row",
        next_step=(
            "See what ends its runs (the run's page: no device, a model server or a disk of images that is"
            " away; the machine's log: a time limit, memory); it is resumed all the same, less and less"
            " often."
        ),
        expected="a new row committed between two interruptions",
        found=f"{entry.interruptions} in a row without one",
    )


def given_up(entry: Entry, why: str, now: float) -> Alert:
    """A partition that was tried often enough."""
    return _alert(
        entry,
        now,
        kind="partition_given_up",
        title=f"Partition {entry.key} is given up after {entry.attempts} attempts without a new row",
        next_step=(
            "Open its last run and read the error. When its cause is gone, materialize the partition by hand:"
            " what is committed is kept, and its attempts count from the start. All that were given up at"
            " once: the job failed_partitions_now with `at_once: true`."
        ),
        expected="a materialization that gets on",
        found=why,
    )


def left_to_person(entry: Entry, why: str, now: float) -> Alert:
    """A partition that a check refused and that no further try would cure."""
    return _alert(
        entry,
        now,
        kind="partition_needs_person",
        title=f"Partition {entry.key} is not tried again by itself",
        next_step=(
            "`vlm-assets show ID` shows a failed property. Put right what its kind says (missing or damaged"
            " images, limits, prompt), then materialize with `retry_failed: true`."
        ),
        expected="failed rows that another try may cure",
        found=why,
    )


def _alert(
    entry: Entry,
    now: float,
    *,
    kind: str,
    title: str,
    next_step: str,
    expected: str,
    found: str,
    severity: Severity = "error",
) -> Alert:
    """An alert of a partition's attempts: its subject, run and page follow from the entry."""
    return Alert(
        kind=kind,
        subject=subject(entry.key),
        occurrence=entry.reckoned or f"launch {entry.launches}",
        severity=severity,
        title=title,
        next_step=next_step,
        partition=entry.key,
        expected=expected,
        found=found,
        page=f"runs/{entry.reckoned}" if entry.reckoned else None,
        at=now,
    )
