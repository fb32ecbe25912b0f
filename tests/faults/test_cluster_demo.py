"""A campaign of machines goes on where its last part ended."""

import json
from pathlib import Path

import pytest

from faults import cluster_demo
from faults.cluster_demo import CUT, KILL, Campaign, Fault, main


def test_what_a_part_found_is_kept_and_what_is_left_is_done_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """200 kills add up over parts of minutes, a row that was lost in one is never forgotten."""
    monkeypatch.setattr(cluster_demo, "_RESULTS", tmp_path)
    monkeypatch.setattr(cluster_demo, "go_inside", lambda: None)
    lost = [0, 0, 1]
    left: list[list[str]] = []

    def live(asked: object, kinds: list[str], campaign: Campaign, chance: object) -> None:
        left.append(sorted(kinds))
        campaign.add([Fault(kind, "node-2", "p", 1, 2.0, 3.0, 1.0) for kind in kinds[:2]])
        campaign.lost += lost.pop()

    monkeypatch.setattr(cluster_demo, "_live", live)
    campaign = ["--alone", "--kills", "2", "--cuts", "1", "--minutes", "5"]
    assert main(campaign) == 1
    assert main(campaign) == 1
    assert [len(kinds) for kinds in left] == [3, 1]
    assert main(campaign) == 1, "nothing is left, and what was lost is lost"
    assert len(left) == 2
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (found["kills"], found["cuts"], found["lost"], found["recomputed"]) == (2, 1, 1, 3)
    assert main(["--alone"]) == 0, "without --minutes it is a story of its own"
    assert left[-1] == sorted([KILL, CUT])
