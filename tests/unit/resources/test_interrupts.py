"""A run hears its first signal alone, whatever step of it the signals meet."""

import subprocess
import sys

SCRIPT = """
import os, signal, subprocess

import dagster as dg

from resources.interrupts import emit, interrupt_once

in_manager = False


def told_twice(where):
    try:
        os.kill(os.getpid(), signal.SIGTERM)
        print(where, "heard nothing", flush=True)
    finally:
        child = subprocess.Popen(["sleep", "60"])
        for number in (signal.SIGTERM, signal.SIGINT):
            os.kill(os.getpid(), number)
        child.terminate()
        print(where, "drained", child.wait(), flush=True)


class Manager(dg.IOManager):
    def handle_output(self, context, obj):
        interrupt_once(context.run_id)
        if in_manager:
            told_twice("manager")

    def load_input(self, context):
        raise NotImplementedError


@dg.asset(io_manager_def=Manager())
def one(context):
    interrupt_once(context.run.run_id)
    yield from emit(context.run.run_id, dg.AssetObservation("one"), dg.Output(1))
    told_twice("asset")


before = signal.getsignal(signal.SIGINT)
for in_manager in (False, True, False):
    print(dg.materialize([one], raise_on_error=False).success, signal.getsignal(signal.SIGINT) is before)
"""


def test_a_second_signal_breaks_into_no_step_of_a_run() -> None:
    """After the first event and in the IO manager; children can be ended, and the next run hears one."""
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=False)
    expected = "".join(f"{where} drained -15\nFalse True\n" for where in ("asset", "manager", "asset"))
    assert done.stdout == expected, done.stderr[-2000:]
