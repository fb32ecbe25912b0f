"""Describing: the same rows however many batches an engine takes at once, and clean ends."""

import itertools
import os
import signal
import threading

import pydantic
import pytest

from tests.support.waiting import wait_until
from vlm_engine.batches import BatchSizes
from vlm_engine.describing import Describing
from vlm_engine.images.images import Pixels, PropertyJob
from vlm_engine.images.worker_pool import WorkerPool, WorkerPoolError
from vlm_engine.ladder import describe_batch
from vlm_engine.prompt import FurtherQuestion, Prompt
from vlm_engine.protocol import Answer, EngineLostError
from vlm_engine.schema import DescriptionSchema

SETTINGS = 50
PATIENCE = 30.0


class House(pydantic.BaseModel):
    """One field is enough."""

    storeys: int


SCHEMA = DescriptionSchema(House)


class Engine:
    """Answers by the name of a property, when ``before`` lets it; no model could be held up at will."""

    model = "by name"
    revision = "1"

    def __init__(self, at_once):
        self.batches_at_once = at_once
        self.before = lambda name: None
        self.asked = []
        self.prepared = {}
        self.asking = self.most = 0
        self.guard = threading.Lock()
        self.closed = threading.Event()

    def prepare(self, batch, *, attempt):
        """Note what is prepared."""
        self.prepared.setdefault(batch[0].property_id, threading.Event()).set()

    def describe(self, batch, *, attempt):
        """An answer a property; every third is none, to climb the ladder."""
        name = batch[0].property_id
        with self.guard:
            self.asked.append(name)
            self.asking += 1
            self.most = max(self.most, self.asking)
        try:
            self.before(name)
        finally:
            with self.guard:
                self.asking -= 1
        return [
            Answer("none" if len(one.images) == 3 and attempt.number == 1 else '{"storeys":2}', "stop", 9, 5)
            for one in batch
        ]

    def close(self):
        """End what waits."""
        self.closed.set()

    def wait(self, event):
        """Wait as a call over a network does that ``close`` cuts off."""
        while not event.wait(0.01):
            if self.closed.is_set():
                raise EngineLostError("closed")


@pytest.fixture
def batches(load_property):
    """Eight batches of two; one property has no image."""
    return [
        [load_property(f"{at}a", at % 4 + 1), load_property(f"{at}b", 0 if at == 5 else 2)] for at in range(8)
    ]


@pytest.fixture(autouse=True)
def no_thread_left():
    """No thread of a description outlives it."""
    yield
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("describing")]


class Loaded:
    """A pool whose batches are loaded already."""

    max_images = 9

    def __init__(self, batches):
        self.batches = batches

    def feed(self, jobs):
        """What is loaded, whatever the jobs."""
        return iter(self.batches)

    def close(self):
        """Nothing to end."""


def describing_of(engine, batches, **named):
    return Describing(engine, Loaded(batches), SCHEMA, SETTINGS, BatchSizes(2), **named)


def described_by(engine, batches):
    """All that comes out."""
    with describing_of(engine, batches) as describing:
        return [batch.described for batch in describing.describe(())]


def timeless(described):
    return [vars(one) | {"seconds": None} for one in described]


@pytest.mark.parametrize("at_once", [1, 2, 3, 20])
def test_rows_do_not_depend_on_the_batches_at_once(batches, at_once):
    """The rows are those of asking batch by batch, one at once in that order, and no more is under way."""
    engine = Engine(at_once)
    expected = [timeless(describe_batch(Engine(1), SCHEMA, batch, SETTINGS)) for batch in batches]
    found = [timeless(batch) for batch in described_by(engine, batches)]
    if at_once > 1:
        found.sort(key=lambda batch: batch[0]["property_id"])
    assert found == expected
    assert engine.most <= at_once
    assert engine.closed.is_set()


def test_a_slow_batch_holds_up_no_other(batches):
    """While the first batch waits, all others come out: they are committed, and seen by who watches."""
    engine = Engine(3)
    last_is_out = threading.Event()
    engine.before = lambda name: name != "0a" or last_is_out.wait(PATIENCE)
    out = []
    with describing_of(engine, batches) as describing:
        for batch in describing.describe(()):
            out.append(batch.described[0].property_id)
            if len(out) == 7:
                last_is_out.set()
    assert sorted(out[:7]) == [f"{at}a" for at in range(1, 8)]
    assert out[7:] == ["0a"]


def test_what_an_engine_takes_may_change_at_any_moment(batches):
    """An engine that takes fewer batches from one look to the next leaves none of them out."""
    takes = itertools.cycle([3, 1, 2])

    class Fickle(Engine):
        batches_at_once = property(lambda self: next(takes), lambda self, value: None)

    out = [one.property_id for batch in described_by(Fickle(3), batches) for one in batch]
    assert sorted(out) == sorted(one.property_id for batch in batches for one in batch)


@pytest.mark.parametrize("at_once", [1, 3])
def test_a_panic_while_preparing_holds_up_nobody(batches, at_once):
    """What is no Exception ends no thread for which others would wait for ever."""

    class PanicError(BaseException):
        """As a library in Rust raises it."""

    def prepare(batch, attempt):
        raise PanicError

    engine = Engine(at_once)
    engine.prepare = prepare
    assert len(described_by(engine, batches)) == len(batches)


@pytest.mark.parametrize("at_once", [1, 2])
def test_the_next_batch_is_prepared_beside_the_model(batches, at_once):
    """While a batch is with the engine, the one after is being prepared, in another thread."""
    engine = Engine(at_once)
    names = [batch[0].property_id for batch in batches]
    engine.prepared = {name: threading.Event() for name in names}
    following = dict(itertools.pairwise(names))

    def before(name):
        if name in following:
            assert engine.prepared[following[name]].wait(PATIENCE)

    engine.before = before
    assert len(described_by(engine, batches)) == len(batches)


def test_one_batch_is_ahead_and_no_more(batches):
    """Memory is bounded: while a batch is with the engine, one more is drawn and prepared."""
    drawn = []

    def source():
        for number, batch in enumerate(batches):
            drawn.append(number)
            yield batch

    with describing_of(Engine(1), source()) as describing:
        for number, _ in enumerate(describing.describe(())):
            assert drawn[-1] <= number + 1
    assert drawn == list(range(8))


@pytest.mark.parametrize("at_once", [1, 3])
def test_a_lost_engine_ends_all(batches, at_once):
    """What was finished before comes out, then the error; nothing is asked afterwards."""
    engine = Engine(at_once)

    fourth_is_out = threading.Event()

    def before(name):
        if name == "4a":
            assert fourth_is_out.wait(PATIENCE)
            raise EngineLostError("gone")
        if name in ("5a", "6a"):
            engine.wait(threading.Event())

    engine.before = before
    out = []
    with (
        pytest.raises(EngineLostError, match="gone"),
        describing_of(engine, batches) as describing,
    ):
        for batch in describing.describe(()):
            out.append(batch.described[0].property_id)
            if len(out) == 4:
                fourth_is_out.set()
    assert sorted(out) == ["0a", "1a", "2a", "3a"]
    assert "7a" not in engine.asked


@pytest.mark.parametrize("at_once", [1, 3])
def test_an_interrupt_leaves_nothing_behind(batches, at_once):
    """An interrupt of who consumes ends the calls under way, and nothing is asked afterwards."""
    engine = Engine(at_once)
    engine.before = lambda name: engine.wait(threading.Event()) if name > "1a" else None
    with (
        pytest.raises(KeyboardInterrupt),
        describing_of(engine, batches) as describing,
    ):
        next(describing.describe(()))
        raise KeyboardInterrupt
    assert set(engine.asked) <= {"0a", "1a", "2a", "3a", "4a"}  # Two answered, three under way at most.


def test_one_at_once_is_asked_in_the_calling_thread(batches):
    """An engine in this process is called where signals arrive."""
    engine = Engine(1)
    callers = set()
    engine.before = lambda name: callers.add(threading.current_thread())
    described_by(engine, batches)
    assert callers == {threading.current_thread()}


@pytest.mark.parametrize("at_once", [1, 3])
def test_an_error_of_the_images_comes_after_what_was_before(batches, at_once):
    """Where loading ends with an error, all batches loaded before are described first."""

    def broken():
        yield from batches[:3]
        raise WorkerPoolError("no more")

    out = []
    with (
        pytest.raises(WorkerPoolError, match="no more"),
        describing_of(Engine(at_once), broken()) as describing,
    ):
        for batch in describing.describe(()):
            out.append(batch.described[0].property_id)
    assert sorted(out) == ["0a", "1a", "2a"]


def test_leaving_does_not_wait_for_images(tmp_path):
    """A worker that hangs over an image holds up neither an interrupt nor the end."""
    (tmp_path / "a.jpg").write_bytes(b"never read")
    jobs = [PropertyJob("a", 0, (str(tmp_path / "a.jpg"),))]
    with WorkerPool(Pixels(), workers=1, prefetch_batches=1, max_pixels=10, max_images=1) as workers:
        wait_until(lambda: workers.pids, "a worker", every=0.01)
        os.kill(workers.pids[0], signal.SIGSTOP)
        with (
            pytest.raises(KeyboardInterrupt),
            Describing(Engine(1), workers, SCHEMA, SETTINGS, BatchSizes(2)) as describing,
        ):
            describing.describe(jobs)
            raise KeyboardInterrupt


def test_leaving_does_not_wait_for_a_processor(batches, monkeypatch):
    """A processor under way, which nothing can stop, holds up the end of a run no longer than its grace."""
    monkeypatch.setattr("vlm_engine.describing._ENDING_SECONDS", 0.0)
    engine = Engine(1)
    goes_on = threading.Event()
    engine.prepare = lambda batch, attempt: goes_on.wait(PATIENCE)
    with (
        pytest.raises(KeyboardInterrupt),
        describing_of(engine, batches) as describing,
    ):
        describing.describe(())
        raise KeyboardInterrupt
    (ahead,) = (thread for thread in threading.enumerate() if thread.name == "describing-ahead")
    goes_on.set()
    ahead.join()
    assert not engine.asked


def test_where_the_time_went(batches):
    """Waiting for images and the model's own time are told apart."""
    engine = Engine(1)
    now = 0.0
    is_waited_for = threading.Event()

    def pass_time(seconds):
        nonlocal now
        now += seconds

    def clock():
        at = now
        if threading.current_thread() is threading.main_thread() and describing_began:
            is_waited_for.set()
        return at

    def slowly():
        assert is_waited_for.wait(PATIENCE)
        pass_time(5.0)
        yield batches[0]

    describing_began = []
    engine.prepare = lambda batch, attempt: pass_time(2.0)
    engine.before = lambda name: pass_time(3.0)
    with describing_of(engine, slowly(), clock=clock) as describing:
        describing_began.append(True)
        list(describing.describe(()))
    spent = describing.spent
    assert (spent.waiting, spent.model, spent.preparing) == (7.0, 3.0, 2.0)


FURTHER = FurtherQuestion(Prompt("And the rest?"), SCHEMA, 2 * SETTINGS)


class TwoQuestions(Engine):
    """Answers two questions by their number, and notes what is asked in which order."""

    def __init__(self, at_once):
        super().__init__(at_once)
        self.calls = []

    def describe(self, batch, *, attempt):
        """The number of the question, about each property."""
        with self.guard:
            self.calls.append(
                (tuple(one.property_id for one in batch), attempt.question, attempt.max_new_tokens)
            )
        return [Answer(f'{{"storeys":{attempt.question}}}', "stop", 9, 5) for _ in batch]


@pytest.mark.parametrize("at_once", [1, 3])
def test_all_questions_are_asked_before_the_next_batch(batches, at_once):
    """Guards: a batch's images are shared. A server is asked about one property at a time."""
    engine = TwoQuestions(at_once)
    with describing_of(engine, batches, further=[FURTHER]) as describing:
        rows = [row for batch in describing.describe(()) for row in batch.described]
    assert {(row.property_id, row.question) for row in rows} == {
        (one.property_id, question) for batch in batches for one in batch for question in (0, 1)
    }
    assert all(row.description == {"storeys": row.question} for row in rows if row.status == "ok")
    assert {(question, tokens) for _, question, tokens in engine.calls} == {(0, SETTINGS), (1, 2 * SETTINGS)}
    if at_once == 1:
        firsts, seconds = engine.calls[::2], engine.calls[1::2]
        assert [ids for ids, *_ in firsts] == [ids for ids, *_ in seconds]
        assert {question for _, question, _ in firsts} == {0}
        assert describing.spent.images == sum(len(one.images) for batch in batches for one in batch)
    else:
        assert {len(ids) for ids, *_ in engine.calls} == {1}


def test_each_question_has_its_own_properties_to_do(batches):
    """Guards: a set that has an answer is not asked again; batches that nobody needs are not loaded."""
    engine = TwoQuestions(1)
    jobs = [PropertyJob(f"{at}{name}", 2 * at + (name == "b"), ("x",)) for at in range(8) for name in "ab"]
    by_id = {one.property_id: one for batch in batches for one in batch}
    pool = Loaded(())
    pool.feed = lambda planned: ([by_id[job.property_id] for job in jobs] for jobs in planned)
    describing = Describing(engine, pool, SCHEMA, SETTINGS, BatchSizes(2), further=[FURTHER])
    with describing:
        found = describing.describe(jobs, {"0a", "1a"}, further_to_do=[{"1a", "2b"}])
        rows = {(row.property_id, row.question) for batch in found for row in batch.described}
    assert rows == {("0a", 0), ("1a", 0), ("1a", 1), ("2b", 1)}
    assert "2b" in engine.prepared


def test_a_batch_that_memory_does_not_hold_is_asked_in_parts(batches):
    """Guards: the engine keeps what it knows of as many images as fit, so each part gets all questions."""
    engine = TwoQuestions(1)
    engine.largest_batch = 1
    with describing_of(engine, batches[:2], further=[FURTHER]) as describing:
        assert [len(batch.described) for batch in describing.describe(())] == [4, 4]
    asked = [(ids, question) for ids, question, _ in engine.calls]
    assert asked == [((name,), question) for name in ("0a", "0b", "1a", "1b") for question in (0, 1)]
