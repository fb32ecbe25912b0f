"""What tests of backfills share: a Dagster without runs, and an API that notes what it is to launch."""

from faults.rehearsal.dagster_in_memory import DagsterInMemory, SimulatedClock
from sensors.dagster_internals.runs import LaunchedBackfill
from vlm_assets.webserver.api import DagsterApi


def with_backfills(*backfills):
    """A Dagster without runs."""
    dagster = DagsterInMemory(SimulatedClock())
    dagster.backfills.extend(backfills)
    return dagster


def of_assets(unfinished):
    """Such a Dagster with unfinished backfills, by asset."""
    return with_backfills(
        *(
            LaunchedBackfill(f"b of {asset}", True, {asset: frozenset(keys)})
            for asset, keys in unfinished.items()
        )
    )


class LaunchedKeys(DagsterApi):
    """Notes the last keys that were to be launched, and what becomes of stale ones."""

    def __init__(self):
        super().__init__("http://127.0.0.1:9", None)
        self.keys = []
        self.stale = {}

    def launch_backfill(self, assets, keys, *, run_config, **_):
        self.keys = list(keys)
        self.stale = {asset: run_config["ops"][asset]["config"]["stale"] for asset in assets}
        return "b"


class LaunchesOfAssets(DagsterApi):
    """Notes all that it is asked to launch."""

    def __init__(self):
        super().__init__("http://127.0.0.1:9", None)
        self.launched = []

    def launch_backfill(self, assets, keys, **_):
        self.launched.append((tuple(assets), list(keys)))
        return "new"
