"""Images a second from a real S3 server on this machine, and what fetching them costs in cores.

``python -m benchmarks.s3_fetch [--images 1000] [--kilobytes 250]``. The server has its own process; counted
is the CPU time of this one, in which a run fetches beside its model. Decoding is in other processes, and not
measured here.
"""

from __future__ import annotations

import argparse
import os
import queue
import tempfile
import time
from pathlib import Path

from faults.s3_server import BUCKET, S3Server
from vlm_durable.mirror.bucket import S3Folder
from vlm_engine.images.fetching import Fetch, Fetcher, image_of

IMAGES_A_PROPERTY = 10


def main() -> None:
    """Print the rate, and the cores at 100 images/s."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--images", type=int, default=1000)
    parser.add_argument("--kilobytes", type=int, default=250)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, S3Server(Path(folder)) as server:
        os.environ.update(server.environment)
        own = server.client()
        stored = 50
        for number in range(stored):
            own.put_object(Bucket=BUCKET, Key=f"images/{number}", Body=os.urandom(options.kilobytes << 10))
        source = S3Folder(BUCKET, "images/")
        source.peek("0")  # Imports and the first connection are paid once.
        done: queue.SimpleQueue[Fetch | Exception] = queue.SimpleQueue()
        fetcher = Fetcher(lambda name: image_of(source, name), ready=done.put, fail=done.put)
        numbers = [str(number % stored) for number in range(options.images)]
        fetches = [
            Fetch(numbers[at : at + IMAGES_A_PROPERTY], IMAGES_A_PROPERTY)
            for at in range(0, len(numbers), IMAGES_A_PROPERTY)
        ]
        began, spent = time.monotonic(), time.process_time()
        fetcher.add(fetches)
        for _ in fetches:
            fetched = done.get()
            if isinstance(fetched, Exception):
                raise fetched
            fetcher.forget(fetched)
        seconds, cores = time.monotonic() - began, time.process_time() - spent
        fetcher.close()
    rate, spent_each = options.images / seconds, cores / options.images
    print(
        f"{options.images} images of {options.kilobytes} kB in {seconds:.1f} s: {rate:.0f} images/s;"
        f" {spent_each * 1000:.1f} ms of CPU an image, so 100 images/s take {spent_each * 100:.2f} cores"
    )


if __name__ == "__main__":
    main()
