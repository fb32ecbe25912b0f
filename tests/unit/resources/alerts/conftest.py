"""Alerts as tests make them."""

import pytest

from resources.alerts.alert import Alert


@pytest.fixture
def alert():
    """A function that makes an alert: another subject or occurrence, the rest the same."""

    def make(subject="property_descriptions/KEY/row_count", occurrence="run-1", **more) -> Alert:
        fields = {
            "kind": "check_failed",
            "severity": "error",
            "title": f"row_count failed: {subject}",
            "next_step": "Materialize the partition again.",
            "partition": "KEY",
            "expected": "20 rows",
            "actual": "19",
            "page": "runs/run-1",
            "at": 1_790_000_000.0,
        }
        return Alert(subject=subject, occurrence=occurrence, **fields | more)

    return make
