"""What ``vlm-assets compare`` says of a trial: every rate says what it is of."""

import re

import pytest

from tests.support.trials import described
from vlm_assets.commands.comparison_view import _show
from vlm_assets.services.trial import Trial

DESCRIBED = tuple(described(number, {"floors": 2}, images_seen=3) for number in range(4))
TRIAL = Trial(
    DESCRIBED, 1000, "cpu-0 (slot)", 2, load_seconds=6.0, seconds=8.0, bytes=400, batches=((4, 12, 8.0),),
    start_seconds=4.0, partition_rows=10,
)  # fmt: skip


def test_both_rates_of_a_trial_are_of_the_same_work(capsys: pytest.CaptureFixture[str]) -> None:
    """4 properties in 8 s; in partitions of 10, which take 4 + 6 + 20 s, 10 in 30 s. Three images each."""
    _show(TRIAL)
    said = " ".join(capsys.readouterr().out.split())
    assert "4 properties with 12 images in 8.0 s" in said
    rates = re.findall(r"([\d.]+) properties/s, ([\d.]+) images/s", said)
    assert rates == [("0.50", "1.5"), ("0.33", "1.0")]
    assert "In partitions of 10: 0.33 properties/s" in said
    assert "4.0 s to start its process and 6.0 s to load the model" in said
    # 1,000 properties, 3 s each, on two devices.
    assert "All 1000 would take 25.0 minutes on 2 devices" in said
