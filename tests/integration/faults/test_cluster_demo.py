"""The short form of `make cluster-demo`: real Ray, Postgres and S3 on machines that are apart."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import pytest

from faults.machines import missing
from faults.postgres_server import programs

CHECKOUT = Path(__file__).resolve().parents[3]


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_machine_that_loses_power_and_one_that_is_cut_off_lose_and_double_nothing(
    left_out: Callable[[str], NoReturn],
) -> None:
    """Their partitions go on elsewhere by themselves, and every property is in the store once."""
    if (why := missing()) is not None:
        left_out(why)
    if programs() is None:
        left_out("postgresql")
    arguments = ["--properties", "60", "--range-size", "20", "--seed", "3", "--at-once"]
    done = subprocess.run(
        [sys.executable, "-m", "faults.cluster_demo", *arguments],
        cwd=CHECKOUT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert (found["lost"], found["doubled"]) == (0, 0)
    assert found["seconds_until_elsewhere"] > 0
