"""One Dagster run with two steps that need a device, in a process of its own, for test_gpu.py.

Usage: two_steps.py LEASES_DIRECTORY WAIT_SECONDS. It writes one JSON line when the first step holds its
device, goes on when a line comes in, and ends with one JSON line of what each step saw and the run logged.
"""

import json
import os
import sys
from typing import Any

import dagster as dg

from resources.gpu import GpuResource

seen: list[dict[str, Any]] = []


def look(context: dg.AssetExecutionContext, gpu: GpuResource) -> None:
    torch_before = "torch" in sys.modules
    lease = gpu.lease(
        run_id=context.run_id, partition="000000000-000000999", step=context.op_handle.name, log=context.log
    )
    seen.append(
        {
            "device": lease.device.id,
            "torch_before": torch_before,
            "visible": os.environ["CUDA_VISIBLE_DEVICES"],
            "holders": [held.sentence() for held in gpu.leases().holders()],
        }
    )


@dg.asset
def described(context: dg.AssetExecutionContext, gpu: dg.ResourceParam[GpuResource]) -> None:
    """Needs a device first."""
    look(context, gpu)
    print(json.dumps(seen[-1]), flush=True)
    sys.stdin.readline()


@dg.asset(deps=[described])
def embedded(context: dg.AssetExecutionContext, gpu: dg.ResourceParam[GpuResource]) -> None:
    """Needs one again."""
    look(context, gpu)


if __name__ == "__main__":
    gpu = GpuResource(leases_directory=sys.argv[1], devices="cpu:1", wait_seconds=float(sys.argv[2]))
    with dg.DagsterInstance.ephemeral() as instance:
        result = dg.materialize(
            [described, embedded], resources={"gpu": gpu}, instance=instance, raise_on_error=False
        )
        failures = [event.step_failure_data.error for event in result.get_step_failure_events()]
        log = [entry.user_message for entry in instance.all_logs(result.run_id)]
    causes = [error.cause.to_string() for error in failures if error and error.cause]
    print(json.dumps({"success": result.success, "seen": seen, "causes": causes, "log": log}), flush=True)
