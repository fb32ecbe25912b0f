"""The process of a run on a node of a Ray cluster: ``python -m vlm_cluster.ray_run execute_run ARGS``.

It holds its run's lock from here to its end, by which the node says that the run lives.
"""

from __future__ import annotations

import os
import sys

RAY_RUN = "VLM_RAY_RUN"
"""Environment variable of this process: the run's id. Says that Ray chose its device."""


def main(arguments: list[str]) -> None:
    """Hold the run's lock, and let Dagster execute the run."""
    from vlm_assets.config.settings import current_settings
    from vlm_durable.state.nodes import RunLocks

    with RunLocks(current_settings().state_directory).held(os.environ[RAY_RUN]):
        # Dagster takes seconds to import, and a loaded machine a minute: the run has begun before that.
        from sensors.dagster_internals.launchers import execute

        execute(arguments)


if __name__ == "__main__":
    main(sys.argv[1:])
