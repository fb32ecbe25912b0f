"""How much work a kill at any moment costs: what waits for its commit, and the batch under way.

It takes the time, so it is no part of `make test`: there the commits' clock is simulated
(tests/unit/vlm_durable/journal/test_commits.py). The short form commits every second;
FAULTS_COMMIT_SECONDS=30 measures the default setting, in minutes.
"""

from __future__ import annotations

import itertools
import os
import random
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tests.support.listings import write_listing
from vlm_catalog.ingest import ingest

COMMIT_SECONDS = float(os.environ.get("FAULTS_COMMIT_SECONDS", "1"))
ROUNDS = int(os.environ.get("FAULTS_ROUNDS", "1"))
SEED = int(os.environ.get("FAULTS_SEED", "20240229"))
KILLS = 4 * ROUNDS
LONGEST = 3.0 * COMMIT_SECONDS + 5.0
"""The latest kill: late enough that a run without commits would lose more than the bound."""
PROPERTIES = round(100 * LONGEST)
"""More than can be described before the latest kill."""
KEY = f"{0:09d}-{PROPERTIES - 1:09d}"
COMMIT_ITSELF = 2.0
"""Seconds that a commit of so few rows does not take, however busy the machine is."""

pytestmark = [pytest.mark.long, pytest.mark.timeout(300 + KILLS * (30 + 2 * LONGEST))]


def seconds_lost(life: dict[str, Any], committed: int) -> float:
    """Work that a killed run had done since it submitted the newest row that is durable."""
    rows = itertools.accumulate(count for _, count in life["submitted"])
    durable = [at for (at, _), total in zip(life["submitted"], rows, strict=True) if total <= committed]
    return float(life["died"] - max(durable, default=life["began"]))


def longest_batch(life: dict[str, Any]) -> float:
    """Seconds of the longest batch, the one under way included."""
    moments = [life["began"], *(at for at, _ in life["submitted"]), life["died"]]
    return max(after - before for before, after in itertools.pairwise(moments))


def test_a_kill_loses_what_waits_and_the_batch_under_way(
    tmp_path: Path, lives: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """At most commit_seconds and one batch (30 and 20 s by default: under 60), wherever the kill comes."""
    for number in range(3):
        Image.new("RGB", (64, 48), (60 * number, 99, 40)).save(tmp_path / f"{number}.jpg")
    images = [f"{number}.jpg" for number in range(3)]
    listing = write_listing(tmp_path / "listing.jsonl", {f"p{n}": images for n in range(PROPERTIES)})
    chance = random.Random(SEED)
    worst = 0.0
    for number in range(KILLS):
        home = tmp_path / f"home-{number}"
        ingest(listing, home, range_size=PROPERTIES)
        settings = {"batch_size": 4, "commit_seconds": COMMIT_SECONDS, "decode_workers": 1}
        moment = LONGEST * (number % 4 + chance.random()) / 4
        life = lives.run(home, KEY, settings, seconds=moment)
        assert life["killed"], "the work ended before the kill: there must be more of it"
        lost, batch = seconds_lost(life, lives.committed_rows(home, KEY)), longest_batch(life)
        assert lost <= COMMIT_SECONDS + batch + COMMIT_ITSELF, (SEED, number, lost, batch)
        worst = max(worst, lost)
    with capsys.disabled():
        print(f"\n{KILLS} kills, a commit every {COMMIT_SECONDS:g} s: at most {worst:.1f} s of work lost")
    assert worst > 0.0
