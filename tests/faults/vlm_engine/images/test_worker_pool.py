"""Faults 17 to 19 for decode workers: killed, hung, orphaned, or taken down by an image each time."""

import fcntl
import os
import select
import signal
import subprocess
import sys
import threading
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.support.waiting import wait_until
from vlm_engine.images.images import LoadedProperty, Pixels, PropertyJob, load_image
from vlm_engine.images.worker_pool import WorkerPool

# Real faults at a chosen image: the audit hook is Python's own, and runs in the worker's process only.
FAULTY_IMAGES = """
import os, signal, sys

FAULTS = {"kills.jpg": signal.SIGKILL, "crashes.jpg": signal.SIGSEGV, "hangs.jpg": signal.SIGSTOP}

def fault(event, arguments):
    if event == "open":
        name = os.path.basename(str(arguments[0]))
        once = os.path.join(os.path.dirname(str(arguments[0])), "was-opened")
        if name == "kills-once.jpg" and not os.path.exists(once):
            os.close(os.open(once, os.O_CREAT))
            os.kill(os.getpid(), signal.SIGKILL)
        if name == "waits.jpg":
            arrived = os.open(os.path.join(os.path.dirname(str(arguments[0])), "arrived"), os.O_WRONLY)
            os.write(arrived, b"%d\\n" % os.getpid())
            os.close(arrived)
            signal.pause()
        if name in FAULTS:
            os.kill(os.getpid(), FAULTS[name])

sys.addaudithook(fault)
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Small images, some of which take their decode worker down when they are opened."""
    (tmp_path / "hook").mkdir()
    (tmp_path / "hook" / "sitecustomize.py").write_text(FAULTY_IMAGES)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "hook"), prepend=os.pathsep)
    names = [f"{n}.jpg" for n in range(12)]
    for number, name in enumerate(
        [*names, "kills.jpg", "crashes.jpg", "hangs.jpg", "kills-once.jpg", "large.jpg"]
    ):
        size = (600, 900, 3) if name == "large.jpg" else (30 + number, 40, 3)
        noise = np.random.default_rng(number).integers(0, 255, size, dtype=np.uint8)
        Image.fromarray(noise).save(tmp_path / name)
    return tmp_path


def job(folder: Path, property_id: str, *names: str) -> PropertyJob:
    return PropertyJob(property_id, 0, tuple(str(folder / name) for name in names))


def ordinary(folder: Path, count: int = 12) -> list[list[PropertyJob]]:
    return [
        [job(folder, f"p-{n}-{m}", f"{(n + m) % 12}.jpg", f"{n % 12}.jpg") for m in range(4)]
        for n in range(count)
    ]


def plain(loaded: list[LoadedProperty]) -> list[tuple]:
    return [(p.property_id, [image.tobytes() for image in p.images], p.failed) for p in loaded]


def running(workers: int, **options: float) -> WorkerPool:
    return WorkerPool(
        Pixels(), **{"workers": workers, "prefetch_batches": 2, "max_pixels": 4000, "max_images": 9} | options
    )


def undisturbed(batches: list[list[PropertyJob]]) -> list[list[tuple]]:
    """What comes out where nothing goes wrong."""
    return [
        [
            (one.property_id, [load_image(Path(p), max_pixels=4000).tobytes() for p in one.image_uris], ())
            for one in batch
        ]
        for batch in batches
    ]


@contextmanager
def death_watch(pids):
    """Wait, in the kernel and not by polling, until all processes are gone."""
    descriptors = [os.pidfd_open(pid) for pid in pids]

    def wait(seconds: float) -> bool:
        return all(select.select([descriptor], [], [], seconds)[0] for descriptor in descriptors)

    yield wait
    for descriptor in descriptors:
        os.close(descriptor)


@pytest.mark.parametrize("workers", [1, 3])
def test_workers_killed_again_and_again_change_nothing(workers, folder):
    """Guards: fault 18: a killed worker is replaced and its images done again: same pixels, same order."""
    batches = ordinary(folder)
    # With a prefetch of one, no image can be in hand at two of the kills: none is blamed three times.
    with running(workers, prefetch_batches=1) as decode:
        seen, killed = [], set()
        for batch in decode.feed(batches):
            seen.append(plain(batch))
            for victim in set(decode.pids) - killed:
                os.kill(victim, signal.SIGKILL)
                killed.add(victim)
    assert seen == undisturbed(batches)
    assert len(killed) >= workers + 3


def test_an_image_that_kills_once_is_decoded_after_all(folder):
    """Guards: fault 19: one death is no verdict: the image is tried again by the next worker."""
    with running(2) as decode:
        [[one]] = decode.feed([[job(folder, "p", "0.jpg", "kills-once.jpg", "1.jpg")]])
    assert (folder / "was-opened").exists(), "the image killed its worker"
    assert (one.seen, one.failed) == (3, ())


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize(
    ("name", "sign"), [("kills.jpg", "SIGKILL"), ("crashes.jpg", "SIGSEGV")], ids=["SIGKILL", "SIGSEGV"]
)
@pytest.mark.promise("One bad input costs one row")
def test_an_image_that_kills_each_time_is_isolated(workers, name, sign, folder, caplog):
    """Guards: fault 19: after three workers that image is a failure; its property and all others go on."""
    batches = ordinary(folder, 4)
    batches[1][2] = job(folder, "victim", "0.jpg", name, "1.jpg")
    with running(workers) as decode:
        seen = list(decode.feed(batches))
    victim = seen[1].pop(2)
    assert victim.seen == 2
    [failure] = victim.failed
    assert (Path(failure.uri).name, failure.kind) == (name, "kills_worker")
    assert sign in failure.error
    assert "after 3 workers" in failure.error
    deaths = [record for record in caplog.records if "another takes its place" in record.getMessage()]
    assert len(deaths) == 3
    del batches[1][2]
    assert [plain(batch) for batch in seen] == undisturbed(batches)


def test_a_property_of_nothing_but_killers_is_a_failed_row(folder):
    """Guards: fault 19: the property that kills the process each time comes out once, with its reasons."""
    with running(2) as decode:
        [[bad, good]] = decode.feed(
            [[job(folder, "bad", "kills.jpg", "kills.jpg"), job(folder, "good", "2.jpg")]]
        )
    assert (bad.seen, [failure.kind for failure in bad.failed]) == (0, ["kills_worker"] * 2)
    assert (good.seen, good.failed) == (1, ())


@pytest.mark.promise("One bad input costs one row")
def test_an_image_that_hangs_each_time_is_given_up(folder):
    """Guards: fault 18: blocked storage ends after the limit, as timed_out, and holds up nothing else."""
    with running(2, image_seconds=1.0) as decode:
        [[one, other]] = decode.feed([[job(folder, "p", "0.jpg", "hangs.jpg"), job(folder, "q", "1.jpg")]])
    assert one.seen == 1
    assert [(Path(failure.uri).name, failure.kind) for failure in one.failed] == [("hangs.jpg", "timed_out")]
    assert "no answer for 1 s" in one.failed[0].error
    assert (other.seen, other.failed) == (1, ())


def test_a_stopped_worker_is_replaced(folder):
    """Guards: fault 18: a worker that was stopped is ended after the limit and its images are done again."""
    batches = ordinary(folder, 3)
    with running(1, image_seconds=4.0) as decode:
        feed = decode.feed(batches)
        seen = [plain(next(feed))]
        stopped = decode.pids
        for pid in stopped:
            os.kill(pid, signal.SIGSTOP)
        with death_watch(stopped) as gone:
            seen += [plain(batch) for batch in feed]
            more = decode.feed(batches)
            assert plain(next(more)) == seen[0]
            assert gone(30)
    assert seen == undisturbed(batches)


def test_a_death_is_noticed_at_once(folder):
    """Guards: fault 18: the next worker has the image long before the limit, which is that of no test."""
    with running(1, image_seconds=3000.0) as decode:
        [[one]] = decode.feed([[job(folder, "p", "kills.jpg", "0.jpg")]])
    assert (one.seen, [failure.kind for failure in one.failed]) == (1, ["kills_worker"])


PARENT = """
import fcntl, os, sys, threading
with open(sys.argv[2], "a") as runs:
    runs.write("main\\n")
lock = os.open(sys.argv[3], os.O_CREAT | os.O_RDWR)
os.set_inheritable(lock, True)
fcntl.flock(lock, fcntl.LOCK_EX)
from vlm_engine.images.images import Pixels
from vlm_engine.images.worker_pool import WorkerPool
from vlm_engine.images.images import LoadedProperty, PropertyJob, load_image
jobs = [[PropertyJob("p", 0, (sys.argv[1],) * 9)], [PropertyJob("q", 1, (sys.argv[4],))]]
with WorkerPool(Pixels(), workers=2, prefetch_batches=1, max_pixels=10**6, max_images=9) as decode:
    feed = decode.feed(jobs)
    next(feed)
    print(*decode.pids, flush=True)
    threading.Event().wait()
"""


@pytest.fixture
def parent(folder, tmp_path):
    """A process with an inheritable lock, a __main__ that counts, and two workers, one blocked in storage."""
    os.mkfifo(tmp_path / "arrived")
    (tmp_path / "parent.py").write_text(PARENT)
    process = subprocess.Popen(
        [
            sys.executable,
            tmp_path / "parent.py",
            folder / "large.jpg",
            tmp_path / "runs",
            tmp_path / "lock",
            folder / "waits.jpg",
        ],
        stdout=subprocess.PIPE,
        text=True,
    )
    process.pids = [int(pid) for pid in process.stdout.readline().split()]
    yield process
    process.kill()
    process.wait()
    process.stdout.close()


def test_workers_die_with_a_killed_parent(parent, tmp_path):
    """Guards: fault 21: SIGKILL of the run leaves no process and no lock held."""
    lock = os.open(tmp_path / "lock", os.O_RDWR)
    with death_watch(parent.pids) as gone:
        # A worker that waits for its storage does not get to see that its pipes are closed.
        assert int((tmp_path / "arrived").read_text()) in parent.pids
        parent.kill()
        parent.wait()
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        assert gone(10)
    os.close(lock)


def test_pixels_pass_through_no_named_memory(parent, tmp_path_factory):
    """Guards: a killed run leaves nothing in shared memory, because neither side ever puts anything there."""
    own = str(tmp_path_factory.getbasetemp())  # The tests' own folders may be there.
    for pid in (parent.pid, *parent.pids):
        held = [str(entry.readlink()) for entry in Path(f"/proc/{pid}/fd").iterdir()]
        mapped = Path(f"/proc/{pid}/maps").read_text().splitlines()
        assert not [entry for entry in [*held, *mapped] if "/dev/shm" in entry and own not in entry]


def test_workers_hold_nothing_of_their_parents(parent, tmp_path):
    """Guards: no inherited lock, no imports but the output's, and the parent's __main__ runs once."""
    for pid in parent.pids:
        command = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
        assert command[2:4] == ["-m", "vlm_engine.images.worker"]
        held = [str(entry.readlink()) for entry in Path(f"/proc/{pid}/fd").iterdir()]
        assert str(tmp_path / "lock") not in held
        assert not any(word in Path(f"/proc/{pid}/maps").read_text() for word in ("torch", "pyarrow"))
    assert (tmp_path / "runs").read_text() == "main\n"


def test_workers_are_forked_where_nothing_else_runs(parent):
    """Guards: the process that forks has one thread: no lock is held by a thread that the worker lacks."""
    templates = {
        int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]) for pid in parent.pids
    }
    assert [len(list(Path(f"/proc/{pid}/task").iterdir())) for pid in templates] == [1]


def ignores_interrupts(pid):
    """Whether a worker has come so far in its start that a SIGINT is nothing to it."""
    (line,) = (line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if "SigIgn" in line)
    return bool(int(line.split()[1], 16) & 1 << signal.SIGINT - 1)


def test_interrupts_are_the_parents(folder):
    """Guards: fault 3: Ctrl-C and a SIGTERM to the run's group do not reach the workers."""
    batches = ordinary(folder, 3)
    with running(2) as decode:
        feed = decode.feed(batches)
        seen = [plain(next(feed))]
        pids = decode.pids
        wait_until(lambda: all(map(ignores_interrupts, pids)), "deaf workers", every=0.01)
        for pid in pids:
            assert os.getpgid(pid) != os.getpgid(0)
            os.kill(pid, signal.SIGINT)
        seen += [plain(batch) for batch in feed]
        assert decode.pids == pids
    assert seen == undisturbed(batches)


def test_an_interrupt_while_waiting_ends_everything(folder):
    """Guards: fault 3: SIGINT reaches a consumer that waits for a hung image, and no worker outlives it."""
    with pytest.raises(KeyboardInterrupt), running(2) as decode:
        started = decode.feed([[job(folder, "first", "0.jpg")], [job(folder, "p", "hangs.jpg")]])
        next(started)
        pids = decode.pids
        with death_watch(pids) as gone:
            threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
            try:
                next(started)
            finally:
                decode.__exit__(None, None, None)
                assert gone(10)


def test_ending_leaves_no_process_and_no_descriptor(folder):
    """Guards: a partition after another in one process: nothing piles up."""
    with running(2):
        pass
    before = set(Path("/proc/self/fd").iterdir())
    for _ in range(3):
        with running(2) as decode:
            next(decode.feed(ordinary(folder)))
            pids = decode.pids
        for pid in pids:
            with pytest.raises(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
    # Fewer is fine: what others left to the garbage collector may be closed meanwhile.
    assert set(Path("/proc/self/fd").iterdir()) <= before
