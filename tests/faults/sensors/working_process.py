"""A worker for tests of what watches it: leases a CPU slot and beats, until it is ended.

Arguments: state folder, run id, partition, seconds between two commits. Says the device that it holds.
"""

import logging
import sys
import time
from pathlib import Path

from resources.gpu import GpuResource
from vlm_durable.state.database import open_state
from vlm_durable.state.workers import Phase, Workers


def main(state: Path, run_id: str, partition: str, seconds: float) -> None:
    gpu = GpuResource(leases_directory=str(state / "leases"), devices="cpu:2", wait_seconds=0)
    with Workers(open_state(state)).begin(
        run_id=run_id, asset="a", partition=partition, expected=1000
    ) as beat:
        lease = gpu.lease(run_id=run_id, partition=partition, step="a", log=logging.getLogger())
        beat.enter(Phase.WORKING, device=lease.device.id)
        print(lease.device.id, flush=True)
        for batch in range(1, 1000):
            time.sleep(seconds)
            beat.beat(computed=batch, committed=batch)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3], float(sys.argv[4]))
