"""Another account of the machine neither reads the verdicts of a review nor holds them up."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import pytest

from vlm_assets.assets.truth import REVIEWS
from vlm_results.review import Reviewed, append_verdict, forget_verdicts, verdict_of

HOUSE = Reviewed("p1", "k", 0, "a", {"floors": 2})
VERDICT = verdict_of(HOUSE, right=["floors"], wrong=[], corrections={})


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A home with a verdict that was given under umask 000."""
    umask = os.umask(0)
    try:
        append_verdict(tmp_path, VERDICT)
    finally:
        os.umask(umask)
    return tmp_path


def test_verdicts_are_for_this_account_alone(home: Path) -> None:
    """Whatever umask the shell had."""
    assert (home / REVIEWS).stat().st_mode & 0o077 == 0


@pytest.mark.timeout(60)
def test_a_neighbours_lock_on_the_verdicts_stops_no_review_and_no_withdrawal(home: Path) -> None:
    """An earlier version let every account read the file: a lock on it means nothing, and it is closed."""
    reviews = home / REVIEWS
    reviews.chmod(0o644)
    with reviews.open("rb") as neighbours:
        fcntl.flock(neighbours, fcntl.LOCK_SH)
        append_verdict(home, VERDICT)
        assert reviews.stat().st_mode & 0o077 == 0
        assert forget_verdicts(home, {"p1"}) == 2
    assert reviews.stat().st_mode & 0o077 == 0
