"""The process of a run on a node: when it counts as begun."""

import os
import subprocess
import sys

MAIN = """
import sys
from vlm_durable.state import nodes
from vlm_cluster import ray_run

class Locks(nodes.RunLocks):
    def held(self, run_id):
        print(run_id, "dagster" in sys.modules)
        raise SystemExit

nodes.RunLocks = Locks
ray_run.main([])
"""


def test_a_run_has_begun_before_dagster_is_imported(tmp_path):
    """That takes a minute on a loaded machine: the cluster would count it as one that never began."""
    environment = os.environ | {"VLM_RAY_RUN": "a-run", "VLM_ASSETS_HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", MAIN], env=environment, capture_output=True, text=True, check=False
    )
    assert done.stdout.split() == ["a-run", "False"], done.stderr
