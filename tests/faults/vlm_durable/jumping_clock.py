"""A partition's life under a wall clock that jumps at every commit: journal, heartbeat, publication.

Arguments: home, rows to commit before SIGKILL (0: to the end). Run under faketime; its clock is set here,
through the file that FAKETIME_TIMESTAMP_FILE names.
"""

import itertools
import os
import signal
import sys
import time
from pathlib import Path

import pyarrow as pa

from tests.support.journals import open_journal
from vlm_durable.files.layout import Home
from vlm_durable.state.database import open_state
from vlm_durable.state.workers import Phase, Workers
from vlm_durable.versions.published import PublishedPartitions

SCHEMA = pa.schema([("property_id", pa.string()), ("ordinal", pa.int64()), ("value", pa.int64())])
IDS = [f"p{number:02d}" for number in range(40)]
JUMPS = ["+400d", "-400d", "+0", "-30y", "+3h", "-3h"]
KEY = "k"


def jump(to: str) -> None:
    """Set the wall clock."""
    Path(os.environ["FAKETIME_TIMESTAMP_FILE"]).write_text(f"{to}\n")


def main(home: Path, die_after: int) -> None:
    years = set()
    jumps = itertools.cycle(JUMPS)
    asset = Home(home).asset("a")
    with (
        Workers(open_state(home)).begin(run_id="r", asset="a", partition=KEY, expected=len(IDS)) as beat,
        open_journal(asset.partition(KEY), "g", IDS, schema=SCHEMA) as journal,
    ):
        restored = journal.committed_rows
        beat.resume(restored=restored)
        beat.enter(Phase.WORKING)
        for batch in [IDS[at : at + 4] for at in range(0, len(IDS), 4)]:
            todo = [one for one in batch if one in journal.missing_ids]
            if not todo:
                continue
            jump(next(jumps))
            years.add(time.gmtime().tm_year)
            rows = [{"property_id": one, "ordinal": IDS.index(one), "value": int(one[1:])} for one in todo]
            journal.submit(pa.Table.from_pylist(rows, SCHEMA))
            journal.flush()
            beat.beat(computed=journal.committed_rows - restored, committed=journal.committed_rows)
            if die_after and journal.committed_rows >= die_after:
                os.kill(os.getpid(), signal.SIGKILL)
        published = PublishedPartitions(asset)
        staged = published.stage(
            KEY, journal.read_ordered(), SCHEMA, expected_ids=IDS, fingerprint="f", metadata={}
        )
        jump("-30y")
        published.publish(staged)
        journal.retire()
        print(restored, len(years), beat.worker.batch_seconds, beat.worker.rate > 0)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
