"""Dagster's own daemon and its code server, killed while alerts are posted and delivered; a real receiver."""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import dagster as dg
import pytest

from resources.alerts.alert import Alert
from resources.alerts.delivery import LONGEST_WAIT_SECONDS
from resources.alerts.outbox import Outbox
from tests.support.listings import list_properties
from tests.support.processes import descendants, has_ended, kill
from tests.support.waiting import wait_until
from vlm_assets.config.resource_settings import control_state
from vlm_assets.config.settings import CHECKOUT, load_settings
from vlm_assets.services.alert_delivery import build_delivery
from vlm_assets.webserver.home import prepare_dagster_home
from vlm_catalog.catalog import Catalog
from vlm_catalog.ingest import ingest
from vlm_catalog.ranges import DESCRIPTIONS
from vlm_durable.state.pause import pause

ROUNDS = int(os.environ.get("FAULTS_ROUNDS", "1"))
KILLS = 2 * ROUNDS
FAILURES_A_LIFE = 2
LIFE_SECONDS = 14.0
"""On two idle cores the first tick of the alerts sensor comes 5 to 7 s after the daemon's start."""

# A life, and 3,000 seconds for the 200 kills of FAULTS_ROUNDS=100.
pytestmark = [pytest.mark.serves, pytest.mark.timeout(120 + 60 * KILLS)]


class KilledDaemon:
    """A daemon of a home with a code server of its own, until all of it is killed at once."""

    def __init__(self, environment: dict[str, str], log: Path) -> None:
        with log.open("ab") as output:
            self.process = subprocess.Popen(
                [Path(sys.executable).with_name("dagster-daemon"), "run", "-m", "vlm_assets.definitions"],
                env=os.environ | environment,
                cwd=CHECKOUT,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    def __enter__(self) -> KilledDaemon:
        return self

    def __exit__(self, *_: object) -> None:
        """As when the power goes: nobody is left to clean up."""
        below = descendants(self.process.pid)
        kill(below)
        self.process.kill()
        assert self.process.wait() == -signal.SIGKILL, "it ended by itself: nothing was killed"
        wait_until(lambda: all(map(has_ended, below)), "end of what the daemon started", seconds=60)

    def live(self, seconds: float) -> None:
        """Let it run for so long; it must not end by itself."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = self.process.wait(seconds)
            raise AssertionError(f"the daemon ended by itself ({code})")


def test_kills_of_the_daemon_lose_no_alert_and_repeat_one_only_with_the_same_id(tmp_path, receiver):
    """At any moment, and as a message is on its way: what failed is told in the end, counted, and once."""
    seed = int(os.environ.get("FAULTS_SEED", "20261121"))
    choose = random.Random(seed)
    home, dagster_home = tmp_path / "home", tmp_path / "home" / "dagster"
    count = FAILURES_A_LIFE * KILLS
    ingest(list_properties(tmp_path, count), home, range_size=1)
    catalog = Catalog.open(home)
    keys = iter([one.key for one in catalog.ranges])
    prepare_dagster_home(dagster_home, catalog_id=catalog.catalog_id, slots=1)
    settings = load_settings(home=home, devices="cpu:1", alert_targets=receiver.url())
    # Nothing is tried again: this is about who is told.
    pause(control_state(settings), "alerts alone", now=time.time())
    environment = {
        "VLM_ASSETS_HOME": str(home),
        "DAGSTER_HOME": str(dagster_home),
        "VLM_ASSETS_ALERT_TARGETS": receiver.url(),
        "VLM_ASSETS_DEVICES": "cpu:1",
    }

    with dg.DagsterInstance.from_config(str(dagster_home)) as instance:
        for _ in range(KILLS):
            for _ in range(FAILURES_A_LIFE):
                fail(instance, next(keys))
            with KilledDaemon(environment, tmp_path / "daemon.log") as daemon:
                if choose.random() < 0.5:
                    daemon.live(choose.uniform(0.0, LIFE_SECONDS))
                else:
                    with receiver.arrived:
                        before = len(receiver.messages)
                        receiver.arrived.wait_for(lambda n=before: len(receiver.messages) > n, LIFE_SECONDS)
                    daemon.live(choose.uniform(0.0, 0.1))
        with KilledDaemon(environment, tmp_path / "daemon.log") as daemon:
            outbox = Outbox(control_state(settings))
            deadline = time.monotonic() + 120
            while count > len(raised(outbox)):
                assert time.monotonic() < deadline, (seed, (tmp_path / "daemon.log").read_text()[-2000:])
                daemon.live(0.2)

    # What comes in a storm waits for a while: it is past.
    delivery = build_delivery(settings)
    delivery.deliver(now=time.time() + LONGEST_WAIT_SECONDS + 1, seconds=20, address=None)
    assert [waiting for waiting, _ in delivery.backlog().values()] == [0]

    failed = raised(outbox)
    assert len({one.partition for one in failed}) == len(failed) == count, seed
    told = {id_: message for message, id_ in zip(receiver.messages, receiver.ids, strict=True)}
    tells = sum(how_many(message["title"]) for message in told.values())
    assert tells == len(outbox.recent(100_000)), seed
    repeats = len(receiver.ids) - len(told)
    assert repeats <= KILLS, seed
    print(f"\n{KILLS} kills of the daemon: {count} failing checks, 0 lost, {repeats} messages repeated")


def fail(instance: dg.DagsterInstance, key: str) -> None:
    """A failing check of one partition, as a sensor reports it."""
    instance.report_runless_asset_event(
        dg.AssetCheckEvaluation(
            asset_key=dg.AssetKey(DESCRIPTIONS),
            check_name="row_count",
            passed=False,
            metadata={},
            partition=key,
        )
    )


def raised(outbox: Outbox) -> list[Alert]:
    """The failing checks that were told."""
    told = (one for one in outbox.recent(100_000) if one.happening == "raised")
    return [one.alert for one in told if one.alert.kind == "check_failed"]


def how_many(title: str) -> int:
    """Alerts or recoveries that a message tells."""
    counts = re.findall(r"(\d+) [a-z]", title) if title.startswith("Alerts: ") else [1]
    return sum(map(int, counts))
