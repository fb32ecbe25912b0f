"""Images fetched from a real S3 server come out as those of a folder do."""

import threading
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.support.damage import flipped
from vlm_durable.mirror import bucket as bucket_module
from vlm_durable.mirror.bucket import S3Folder, StoreAwayError, client
from vlm_engine.images import fetching
from vlm_engine.images.fetching import image_of
from vlm_engine.images.images import Pixels, PropertyJob
from vlm_engine.images.worker_pool import WorkerPool

OPTIONS = {"workers": 2, "prefetch_batches": 2, "max_pixels": 2000, "max_images": 3}


@pytest.fixture
def folder(tmp_path, bucket, s3_server):
    """Twelve images, a broken one and an empty one, on disk and in the bucket."""
    for number in range(12):
        noise = np.random.default_rng(number).integers(0, 255, (40 + number, 60, 3), dtype=np.uint8)
        Image.fromarray(noise).save(tmp_path / f"{number}.jpg")
    (tmp_path / "broken.jpg").write_bytes((tmp_path / "1.jpg").read_bytes()[:900])
    (tmp_path / "empty.jpg").touch()
    own = s3_server.client()
    for path in tmp_path.glob("*.jpg"):
        own.put_object(Bucket=bucket.bucket, Key=bucket.prefix + path.name, Body=path.read_bytes())
    return tmp_path


def jobs(names):
    return [[PropertyJob(f"p{at}", at, some)] for at, some in enumerate(names)]


def plain(batches):
    return [
        (
            one.property_id,
            [image.tobytes() for image in one.images],
            [(bad.uri, bad.kind) for bad in one.failed],
        )
        for batch in batches
        for one in batch
    ]


@dataclass
class OnDisk:
    """The images of a folder."""

    folder: Path
    fetch = None

    def locate(self, uri):
        return self.folder / uri


@dataclass
class InBucket:
    """The images of a bucket."""

    bucket: S3Folder

    def locate(self, uri):
        return self.bucket.address(uri)

    def fetch(self, address):
        return image_of(self.bucket, address.rpartition("/")[2])


LISTED = [
    ("0.jpg", "1.jpg"),
    ("2.jpg", "missing.jpg", "broken.jpg", "3.jpg"),
    ("empty.jpg",),
    (),
    # Three are shown: for each of the two that cannot be decoded another one is fetched.
    ("broken.jpg", "4.jpg", "broken.jpg", "5.jpg", "missing.jpg", "6.jpg", "7.jpg"),
    *((f"{number}.jpg",) for number in range(12)),
]


def test_fetched_images_come_out_as_files_do(bucket, folder):
    """Pixels, order and failures do not depend on where the images lie."""
    with WorkerPool(Pixels(), source=OnDisk(folder), **OPTIONS) as pool:
        expected = plain(pool.feed(jobs(LISTED)))
    with WorkerPool(Pixels(), source=InBucket(bucket), **OPTIONS) as pool:
        assert plain(pool.feed(jobs(LISTED))) == expected
        one = pool.load(jobs(LISTED)[4][0])
        assert len(one.with_images(1).images) == 1


def test_no_more_is_fetched_than_is_shown(bucket, folder, s3_proxy):
    """A property with hundreds of images costs the requests of those that the model sees."""
    with WorkerPool(Pixels(), source=InBucket(bucket), **OPTIONS) as pool:
        list(pool.feed(jobs([tuple(f"{number}.jpg" for number in range(12))])))
    assert len([path for _, path in s3_proxy.requests if "jpg" in path]) == OPTIONS["max_images"]


def test_a_store_that_goes_down_ends_the_feed_and_costs_no_image(bucket, folder, s3_proxy, monkeypatch):
    """An outage is raised as one, after all that was loaded before; no image has failed."""
    monkeypatch.setattr(bucket_module, "PATIENCE_SECONDS", 0.0)
    client.cache_clear()
    with WorkerPool(Pixels(), source=InBucket(bucket), **OPTIONS | {"prefetch_batches": 0}) as pool:
        feed = pool.feed(jobs([("0.jpg",), ("1.jpg",), ("2.jpg",)]))
        assert not next(feed)[0].failed
        s3_proxy.breaks(lambda passing: passing.answer(503, "SlowDown"))
        with pytest.raises(StoreAwayError, match="SlowDown"):
            list(feed)


def test_wrong_bytes_of_an_image_cost_that_image_only(bucket, folder, s3_proxy):
    """The store's own checksum tells them; the others of the property are shown."""

    def wrong(passing):
        if "/1.jpg" not in passing.path:
            return False
        answer = passing.forward()
        return passing.pass_on(answer, flipped(answer.content, -1))

    s3_proxy.breaks(wrong)
    with WorkerPool(Pixels(), source=InBucket(bucket), **OPTIONS) as pool:
        ((_, images, failed),) = plain(pool.feed(jobs([("0.jpg", "1.jpg", "2.jpg")])))
    assert len(images) == 2
    assert failed == [("1.jpg", "io_error")]


def test_fetched_bytes_that_wait_are_bounded(monkeypatch):
    """However far the plan reaches, what waits for a worker is at most the bound and one image a thread."""
    monkeypatch.setattr(fetching, "BYTES_AHEAD", 1000)
    held = most = 0
    guard = threading.Lock()
    done = threading.Semaphore(0)

    def slow(path):
        nonlocal held, most
        with guard:
            held += 100
            most = max(most, held)
        return b"x" * 100

    waiting = []
    fetcher = fetching.Fetcher(
        slow, ready=lambda one: (waiting.append(one), done.release()), fail=lambda error: None
    )
    many = [fetching.Fetch([str(number) for number in range(10)], 10) for _ in range(40)]
    fetcher.add(many)
    for _ in many:
        assert done.acquire(timeout=20)
        one = waiting.pop(0)
        with guard:
            held -= sum(map(len, one.contents.values()))
        fetcher.forget(one)
    fetcher.close()
    assert most <= 1000 + 100 * fetching.THREADS + 1000
