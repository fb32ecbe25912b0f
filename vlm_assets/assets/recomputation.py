"""Computing partitions again for a repair: through the running Dagster, else the commands to do it.

What lives here: which assets of a partition are materialized together, with which run config. What does
not: why (``repair.py``), and what a materialization does with it (``materialize.py``).
"""

from __future__ import annotations

import json
import shlex
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from vlm_assets.operate.dagster_server.api import DagsterApi
from vlm_assets.operate.repair import COMPUTING, Repair, Way
from vlm_assets.settings import PREFIX, Settings

TAG = "vlm-assets/launched-by"

_OPTIONS = {Way.COMPUTE: "recompute", Way.RETRY_FAILED: "retry_failed"}


@dataclass(frozen=True)
class Recomputation:
    """Partitions that are materialized alike. ways: by asset, upstream first."""

    ways: Mapping[str, Way]
    keys: tuple[str, ...]

    @property
    def assets(self) -> tuple[str, ...]:
        """The assets that are materialized together."""
        return tuple(self.ways)

    @property
    def run_config(self) -> dict[str, object]:
        """The run config of each partition's run; empty where finished work is kept as always."""
        options = {asset: _OPTIONS[way] for asset, way in self.ways.items() if way in _OPTIONS}
        if not options:
            return {}
        return {"ops": {asset: {"config": {option: True}} for asset, option in options.items()}}

    def command(self, key: str) -> str:
        """The command that materializes one of the partitions without a running Dagster."""
        words = ["dagster", "asset", "materialize", "-m", "vlm_assets.definitions"]
        words += ["--select", ",".join(self.assets), "--partition", key]
        if self.run_config:
            words += ["--config-json", json.dumps(self.run_config)]
        return shlex.join(words)


def recomputations(repairs: Iterable[Repair], descriptions: str, embeddings: str) -> list[Recomputation]:
    """Group repairs that compute by what is done to each partition.

    New descriptions always take their embeddings with them.
    """
    of_key: dict[str, dict[str, Way]] = defaultdict(dict)
    for one in repairs:
        if one.way in COMPUTING and one.key is not None:
            of_key[one.key][one.asset] = one.way
    groups: dict[tuple[tuple[str, Way], ...], list[str]] = defaultdict(list)
    for key, ways in sorted(of_key.items()):
        if descriptions in ways:
            ways.setdefault(embeddings, Way.RESUME)
        groups[tuple((asset, ways[asset]) for asset in (descriptions, embeddings) if asset in ways)].append(
            key
        )
    return [Recomputation(dict(ways), tuple(keys)) for ways, keys in groups.items()]


def launch(api: DagsterApi, wanted: Sequence[Recomputation]) -> list[str]:
    """Launch one backfill for each; says which. Raises DagsterApiError."""
    said = []
    for one in wanted:
        title = f"repair: {len(one.keys)} partitions"
        backfill = api.launch_backfill(
            one.assets, one.keys, title=title, tags={TAG: "repair"}, run_config=one.run_config
        )
        said.append(
            f"Launched backfill {backfill} of {len(one.keys)} partitions ({', '.join(one.assets)}):"
            f" {api.url}/runs/b/{backfill}"
        )
    return said


def commands(settings: Settings, wanted: Sequence[Recomputation]) -> list[str]:
    """The shell commands that compute all of it where no Dagster runs, one partition after the other."""
    return [
        f"export {PREFIX}HOME={shlex.quote(str(settings.home))}"
        f" DAGSTER_HOME={shlex.quote(str(settings.dagster_home))}",
        *(one.command(key) for one in wanted for key in one.keys),
    ]
