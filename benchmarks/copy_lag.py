"""How far the store is behind the disk: python -m benchmarks.copy_lag [--seconds 60] [--rows 300]

A journal that commits a segment of so many rows every second, thirty times as often as a run does, and copies
it to a real S3 server. Then the server is away for as long, and comes back while the commits go on. Printed:
the longest that a commit waited in steady state, and how long it took until nothing waited after the outage,
with the pause of the back-off (30 s at most).
"""

from __future__ import annotations

import argparse
import os
import tempfile
import threading
import time
from pathlib import Path

import pyarrow as pa

from faults.s3_server import BUCKET, S3Server
from vlm_durable.files.layout import Home
from vlm_durable.journal.journal import Journal
from vlm_durable.journal.segments import JournalIdentity
from vlm_durable.mirror.bucket import S3Folder
from vlm_durable.mirror.stored_journal import Copying, StoredJournal

KEY, GENERATION = "000000000-000000999", "generation"
SCHEMA = pa.schema([("ordinal", pa.int64()), ("property_id", pa.string()), ("text", pa.string())])
TEXT_BYTES = 500


def main() -> None:
    """Print the figures of steady state and of an outage."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--rows", type=int, default=300)
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="copy-lag-") as folder, S3Server(Path(folder) / "s3") as server:
        os.environ |= server.environment
        paths = Home(Path(folder) / "home").asset("property_descriptions").partition(KEY)
        stored = StoredJournal(paths, GENERATION, S3Folder.parse(f"s3://{BUCKET}/lag"))
        stored.pull()
        most = round(3 * chosen.seconds + 60) * chosen.rows
        with Copying(stored, most_bytes=1 << 40) as copying:
            journal = Journal.open(
                paths.journal(GENERATION),
                JournalIdentity(
                    KEY, GENERATION, {"model": "m"}, SCHEMA, frozenset(f"p{n}" for n in range(most))
                ),
                high_water_mark=paths.high_water_mark(GENERATION),
                quarantine=paths.quarantine,
            )
            with journal:
                copying.begin(journal)
                measure(journal, copying, server, chosen.seconds, chosen.rows)


def measure(journal: Journal, copying: Copying, server: S3Server, seconds: float, rows: int) -> None:
    """Steady state, an outage, and catching up."""
    over = threading.Event()
    commits = threading.Thread(target=_commit, args=(journal, rows, over))
    commits.start()
    steady = _longest(copying, seconds)
    server.kill()
    time.sleep(seconds)
    backlog, none_waits = copying.lag(), threading.Event()
    copying.on_lag = lambda lag: none_waits.set() if lag.segments <= 1 else None
    back = time.monotonic()
    server.start()
    none_waits.wait()
    took = time.monotonic() - back
    over.set()
    commits.join()
    print(
        f"{rows} rows ({backlog.bytes / max(1, backlog.segments) / 1024:.0f} KiB) a second. Steady: a commit"
        f" waits {steady:.2f} s at most. After {seconds:.0f} s without the store {backlog.segments} segments"
        f" wait; none {took:.1f} s after it is back, copies go {(backlog.segments + took) / took:.0f} times"
        " as fast as commits come."
    )


def _commit(journal: Journal, rows: int, over: threading.Event) -> None:
    first = 0
    while not over.wait(1.0):
        ordinals = range(first, first + rows)
        ids, texts = [f"p{n}" for n in ordinals], [os.urandom(TEXT_BYTES).hex() for _ in ordinals]
        journal.submit(pa.table([list(ordinals), ids, texts], schema=SCHEMA))
        journal.flush()
        first += rows


def _longest(copying: Copying, seconds: float) -> float:
    end, longest = time.monotonic() + seconds, 0.0
    while time.monotonic() < end:
        since = copying.lag().since
        longest = max(longest, 0.0 if since is None else time.time() - since)
        time.sleep(0.02)
    return longest


if __name__ == "__main__":
    main()
