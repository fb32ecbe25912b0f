"""Materializes one partition and kills itself, decode workers alive, after so many committed batches.

Arguments: home, partition key, committed batches before SIGKILL (0: never).
"""

import os
import signal
import sys

import dagster as dg

from resources.journal.journal import Journal
from vlm_assets.definitions import build_defs
from vlm_assets.settings import load_settings


def main(home: str, key: str, batches: int) -> int:
    submit = Journal.submit
    committed = 0

    def submit_and_perhaps_die(self, table):
        nonlocal committed
        submit(self, table)
        self.flush()
        committed += 1
        if committed == batches:
            os.kill(os.getpid(), signal.SIGKILL)

    Journal.submit = submit_and_perhaps_die
    settings = load_settings(home=home, devices="cpu:1", batch_size=2, decode_workers=2)
    defs = build_defs(settings)
    result = dg.materialize(
        defs.assets,
        selection=["property_descriptions"],
        partition_key=key,
        resources=defs.resources,
        raise_on_error=False,
    )
    return 0 if result.success else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2], int(sys.argv[3])))
