"""`make cluster-demo` on machines that are apart, with a real Postgres and a real S3 store."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest

from faults.machines import missing
from faults.postgres_server import programs

CHECKOUT = Path(__file__).resolve().parents[3]


@pytest.fixture
def demo(left_out: Callable[[str], NoReturn]) -> Callable[..., dict[str, Any]]:
    """Lives through the story; gives its last line."""
    if (why := missing()) is not None:
        left_out(why)
    if programs() is None:
        left_out("postgresql")

    def live(*arguments: str) -> dict[str, Any]:
        done = subprocess.run(
            [sys.executable, "-m", "faults.cluster_demo", *arguments],
            cwd=CHECKOUT,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return found

    return live


def test_machines_that_go_on_from_one_store_lose_and_double_nothing(
    demo: Callable[..., dict[str, Any]],
) -> None:
    """One loses its power and one is cut off and comes back: others go on with what was committed."""
    found = demo("--alone", "--properties", "16", "--range-size", "8", "--machines", "3", "--seed", "3")
    assert (found["kills"], found["cuts"], found["lost"], found["doubled"]) == (1, 1, 0, 0)
    assert found["recomputed_at_most"] <= 4, "a batch is two rows: what was committed was computed again"


@pytest.mark.long
@pytest.mark.timeout(900)
def test_ray_has_the_work_of_lost_machines_go_on_elsewhere(demo: Callable[..., dict[str, Any]]) -> None:
    """Heartbeats find out which machine is lost, Dagster launches anew, and Ray's part comes back."""
    found = demo("--properties", "60", "--range-size", "20", "--seed", "3", "--at-once")
    assert (found["kills"], found["cuts"], found["lost"], found["doubled"]) == (1, 1, 0, 0)
    assert found["seconds_until_elsewhere"] > 0
