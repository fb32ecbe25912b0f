"""Batches of properties decoded ahead of the model, the same whatever the workers and the prefetch."""

import inspect
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from vlm_engine.images.images import (
    PIXELS_AHEAD,
    ImageError,
    ImageFailure,
    LoadedProperty,
    Pixels,
    PropertyJob,
    load_image,
)
from vlm_engine.images.worker_pool import WorkerPool, WorkerPoolError


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Twenty-four small JPEGs that differ, one that is broken."""
    folder = tmp_path_factory.mktemp("images")
    for number in range(24):
        noise = np.random.default_rng(number).integers(0, 255, (40 + number, 60, 3), dtype=np.uint8)
        Image.fromarray(noise).save(folder / f"{number}.jpg")
    (folder / "broken.jpg").write_bytes((folder / "1.jpg").read_bytes()[:900])
    return folder


def batches(folder: Path, count: int = 5) -> list[list[PropertyJob]]:
    names = [f"{number % 24}.jpg" for number in range(60)]
    names[3::11] = ["broken.jpg" for _ in names[3::11]]
    names[5::13] = ["missing.jpg" for _ in names[5::13]]
    jobs = [
        PropertyJob(f"p-{n}", n, tuple(str(folder / name) for name in names[n * 3 : n * 3 + n % 6]))
        for n in range(3 * count)
    ]
    return [jobs[start : start + 3] for start in range(0, len(jobs), 3)]


def plain(loaded: list[LoadedProperty]) -> list[tuple]:
    return [
        (p.property_id, p.ordinal, [image.tobytes() for image in p.images], p.seen, p.failed) for p in loaded
    ]


def loaded(folder: Path, **options: int) -> list[list[tuple]]:
    with WorkerPool(
        Pixels(), **{"max_pixels": 2000, "max_images": 3, "prefetch_batches": 2} | options
    ) as workers:
        return [plain(batch) for batch in workers.feed(batches(folder))]


@pytest.fixture(scope="module")
def expected(folder):
    """What comes out, by the plain loop that the pool stands for."""
    return [[in_a_loop(job, max_pixels=2000, max_images=3) for job in batch] for batch in batches(folder)]


def in_a_loop(job: PropertyJob, *, max_pixels: int, max_images: int) -> tuple:
    images, failed = [], []
    for path in job.image_uris:
        if len(images) < max_images:
            try:
                images.append(load_image(Path(path), max_pixels=max_pixels).tobytes())
            except ImageError as error:
                failed.append(ImageFailure(path, error.kind, str(error)))
    return job.property_id, job.ordinal, images, len(images), tuple(failed)


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("prefetch_batches", [0, 9])
def test_results_do_not_depend_on_workers_or_prefetch(workers, prefetch_batches, folder, expected):
    """Guards: a partition's content and order are the same on any machine: pixels, failures and all."""
    assert loaded(folder, workers=workers, prefetch_batches=prefetch_batches) == expected


def test_a_worker_keeps_the_memory_that_it_needs_again(tmp_path):
    """Guards: images after the first one find their pages where they were, instead of touching each anew."""
    path = tmp_path / "photo.jpg"
    Image.effect_noise((640, 480), 50).convert("RGB").save(path)
    pages = 640 * 480 * 3 // os.sysconf("SC_PAGE_SIZE")

    def faults(pid: int) -> int:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[7])

    with WorkerPool(Pixels(), workers=1, prefetch_batches=0, max_pixels=1 << 20, max_images=9) as workers:
        feed = workers.feed([PropertyJob("p", 0, (str(path),) * 9)] for _ in range(8))
        for _ in range(4):
            next(feed)
        (pid,) = workers.pids
        before = faults(pid)
        rest = sum(len(one.images) for batch in feed for one in batch)
        assert faults(pid) - before < rest * pages / 2


def test_batches_come_in_their_order(folder, expected):
    """Guards: one result a property, in the order of the plan."""
    assert [[row[0] for row in batch] for batch in expected] == [
        [job.property_id for job in batch] for batch in batches(folder)
    ]


def test_images_are_rgb_within_the_pixel_limit(folder):
    """Guards: what the engine is handed: arrays of height x width x 3 bytes, bounded, in the right order."""
    job = PropertyJob("p", 7, tuple(str(folder / f"{n}.jpg") for n in (4, 9)))
    with WorkerPool(Pixels(), workers=1, prefetch_batches=0, max_pixels=2000, max_images=5) as workers:
        [[one]] = workers.feed([[job]])
    assert [image.dtype for image in one.images] == [np.uint8] * 2
    assert [image.shape for image in one.images] == [(38, 52, 3), (40, 49, 3)]
    assert (one.property_id, one.ordinal, one.seen, one.failed) == ("p", 7, 2, ())
    assert 0 < one.reading_seconds < one.seconds


@pytest.fixture(scope="module")
def one_worker():
    with WorkerPool(Pixels(), workers=1, prefetch_batches=0, max_pixels=1 << 20, max_images=9) as pool:
        yield pool


@given(sound=st.lists(st.booleans(), max_size=8), max_images=st.integers(1, 4))
@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_property_shows_its_first_readable_images(sound, max_images, folder, one_worker):
    """Guards: one readable image is enough, wherever it stands; each failure is named."""
    names = [f"{n}.jpg" if good else "broken.jpg" for n, good in enumerate(sound)]
    uris = tuple(f"{folder}{'/' * (n + 1)}{name}" for n, name in enumerate(names))
    one = one_worker.load(PropertyJob("p", 0, uris), max_images)
    good = [n for n, is_good in enumerate(sound) if is_good][:max_images]
    looked_at = good[-1] + 1 if len(good) == max_images else len(sound)
    assert [image.shape[0] for image in one.images] == [40 + n for n in good]
    assert [failure.uri for failure in one.failed] == [uris[n] for n in range(looked_at) if not sound[n]]
    assert {failure.kind for failure in one.failed} <= {"unreadable"}


def test_odd_names_reach_the_worker_unchanged(one_worker, tmp_path):
    """Guards: names with spaces, line breaks, unicode and raw bytes open; impossible names are failures."""
    names = ["a b.jpg", "line\nbreak.jpg", "Größe 家.jpg", os.fsdecode(b"raw\xff.jpg"), "x" * 240 + ".jpg"]
    for name in names:
        Image.new("RGB", (8, 8)).save(tmp_path / name, "JPEG")
    impossible = ("long/" * 2000, "lone \ud800", "nul\0")
    job = PropertyJob("p", 0, (*(str(tmp_path / name) for name in names), *impossible))
    one = one_worker.load(job)
    assert one.seen == len(names)
    assert [(failure.uri, failure.kind) for failure in one.failed] == [
        (name, "missing") for name in impossible
    ]


class Confined:
    """A folder with one image that leads out of it."""

    fetch = None

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def locate(self, uri: str) -> Path:
        if uri == "3.jpg":
            raise ValueError("it leads out")
        return self.folder / uri


def test_an_image_that_leads_out_of_its_source_is_never_opened(folder):
    """Guards: it is a failed image by the catalogue's name, however many are shown; the others are shown."""
    job = PropertyJob("p", 0, ("missing.jpg", "0.jpg", "3.jpg", "4.jpg"))
    with WorkerPool(
        Pixels(), workers=1, prefetch_batches=0, max_pixels=1 << 20, max_images=9, source=Confined(folder)
    ) as pool:
        [[one]] = pool.feed([[job]])
        fewer = one.with_images(1)
    assert [image.shape[0] for image in one.images] == [40, 44]
    assert [(failure.uri, failure.kind) for failure in one.failed] == [
        ("missing.jpg", "missing"),
        ("3.jpg", "denied"),
    ]
    assert one.failed[1].error == "3.jpg is not opened: it leads out."
    assert (fewer.seen, fewer.failed) == (1, one.failed)


@pytest.mark.parametrize(
    ("prefetch_batches", "max_pixels", "ahead"), [(0, 100, 0), (2, 100, 2), (2, PIXELS_AHEAD, 1)]
)
def test_the_plan_is_drawn_from_no_further_than_the_prefetch(prefetch_batches, max_pixels, ahead, folder):
    """Guards: memory does not grow with the partition; beside the batch in hand one is always loaded."""
    drawn = 0

    def plan():
        nonlocal drawn
        for batch in batches(folder, 6):
            drawn += 1
            yield batch

    with WorkerPool(
        Pixels(), workers=1, prefetch_batches=prefetch_batches, max_pixels=max_pixels, max_images=1
    ) as workers:
        for number, _ in enumerate(workers.feed(plan()), start=1):
            assert drawn == min(6, number + ahead)


def test_a_feed_left_early_leaves_nothing_for_the_next(folder, expected):
    """Guards: after an interrupted feed the same workers serve another one exactly."""
    with WorkerPool(Pixels(), workers=2, prefetch_batches=3, max_pixels=2000, max_images=3) as workers:
        first = workers.feed(batches(folder))
        assert plain(next(first)) == expected[0]
        first.close()
        assert [plain(batch) for batch in workers.feed(batches(folder))] == expected


def test_an_error_in_the_plan_reaches_the_consumer(folder):
    """Guards: what feeds the workers fails where the consumer sees it."""

    def plan():
        yield batches(folder)[0]
        raise LookupError("the catalogue is gone")

    with (
        WorkerPool(Pixels(), workers=1, prefetch_batches=0, max_pixels=100, max_images=1) as workers,
        pytest.raises(LookupError, match="the catalogue is gone"),
    ):
        list(workers.feed(plan()))


def test_workers_that_cannot_start_are_an_error_and_not_a_wait(tmp_path, monkeypatch, folder):
    """Guards: a broken environment ends the run with the reason, instead of starting workers for ever."""
    (tmp_path / "sitecustomize.py").write_text("import os; os.write(2, b'no Pillow today\\n'); os._exit(3)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with (
        WorkerPool(Pixels(), workers=2, prefetch_batches=0, max_pixels=100, max_images=1) as workers,
        pytest.raises(WorkerPoolError, match="exit code 3: no Pillow today"),
    ):
        list(workers.feed(batches(folder)))


def test_a_worker_starts_small():
    """Guards: start-up in milliseconds where no processor is needed: no framework is imported."""
    program = "import vlm_engine.images.worker, sys; print(*{name.split('.')[0] for name in sys.modules})"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert {"torch", "transformers", "dagster", "pyarrow"}.isdisjoint(done.stdout.split())


def test_waiting_is_measured(folder):
    """Guards: the seconds lost to images that a person sees are those that the consumer waited."""
    with WorkerPool(Pixels(), workers=1, prefetch_batches=9, max_pixels=2000, max_images=9) as pool:
        next(pool.feed(batches(folder)))
        assert pool.wait_seconds > 0


def test_a_property_can_be_loaded_again_with_fewer_images(folder, one_worker):
    """Guards: a property whose images are too many for the model is shown with the first ones of them."""
    job = PropertyJob("p", 0, tuple(str(folder / name) for name in ("0.jpg", "broken.jpg", "2.jpg", "3.jpg")))
    [[one]] = one_worker.feed([[job]])
    fewer = one.with_images(2)
    assert (one.seen, fewer.seen) == (3, 2)
    assert [image.tobytes() for image in fewer.images] == [image.tobytes() for image in one.images[:2]]
    assert fewer.failed == one.failed


def test_an_output_that_refuses_costs_its_property_alone(folder):
    """Guards: what a processor raises is told with the property, and the others go on."""
    jobs = [PropertyJob(f"p{n}", n, tuple(str(folder / f"{m}.jpg") for m in range(n))) for n in (1, 2, 3)]
    with WorkerPool(RefusesTwo(), workers=1, prefetch_batches=0, max_pixels=100, max_images=9) as pool:
        [loaded] = pool.feed([jobs])
    assert [one.refusal for one in loaded] == [None, "ValueError: two are too many", None]
    assert [len(one.images) for one in loaded] == [1, 0, 3]


class RefusesTwo:
    """Pixels of any number of images but two."""

    def load(self):
        def make(images):
            if len(images) == 2:
                raise ValueError("two are too many")
            return Pixels().load()(images)

        return make


NUMBERS = [
    name
    for name, one in inspect.signature(WorkerPool).parameters.items()
    if one.kind is one.KEYWORD_ONLY and name != "source"
]


@pytest.mark.parametrize("wrong", NUMBERS)
def test_impossible_settings_are_refused(wrong):
    """Guards: a wrong setting is refused at once, not by a run that never moves."""
    options = {"workers": 1, "prefetch_batches": 1, "max_pixels": 1, "max_images": 1} | {wrong: -1}
    with pytest.raises(ValueError, match=wrong):
        WorkerPool(Pixels(), **options)


def test_a_feed_without_workers_running_is_refused():
    """Guards: a forgotten with statement is an error, not a wait."""
    with pytest.raises(WorkerPoolError, match="with statement"):
        WorkerPool(Pixels(), workers=1, prefetch_batches=1, max_pixels=1, max_images=1).feed([])


def test_workers_see_no_secret_and_no_gpu(folder, monkeypatch):
    """They decode what nobody trusts: the environment that they get is a list of what they need."""
    secrets = {
        "AWS_SECRET_ACCESS_KEY": "secret-1",
        "HF_TOKEN": "secret-2",
        "VLM_ASSETS_SERVER_KEY": "secret-3",
        "DATABASE_PASSWORD": "secret-4",
        "HTTPS_PROXY": "http://user:secret-5@proxy:3128",
        "SOME_SERVICE_CREDENTIALS": "secret-6",
    }
    needed = {"LC_ALL": "C.UTF-8", "HF_HOME": "/cache", "http_proxy": "http://proxy:3128"}
    for name, value in {**secrets, **needed, "CUDA_VISIBLE_DEVICES": "GPU-7"}.items():
        monkeypatch.setenv(name, value)
    with WorkerPool(Pixels(), workers=1, prefetch_batches=0, max_pixels=1 << 20, max_images=9) as pool:
        next(pool.feed(batches(folder, 1)))
        running = Path(f"/proc/{pool._template._process.pid}/environ").read_bytes().split(b"\0")
    seen = dict(one.decode().split("=", 1) for one in running if one)
    assert "secret" not in " ".join(seen.values())
    assert needed.items() <= seen.items()
    assert seen["CUDA_VISIBLE_DEVICES"] == ""
