"""The question sets of a run: one loop asks an engine all of them, and each has its own journal and failures.

Their rows are made in ``description_work.py``, and published in ``materialize.py``.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import dagster as dg

from vlm_assets.assets.description_work import DescriptionWork
from vlm_assets.assets.materialize import Materialization, Metadata
from vlm_durable.journal.journal import Journal
from vlm_engine.describing import Describing
from vlm_engine.devices.find import Device
from vlm_engine.devices.left_out import device_failure
from vlm_engine.images.worker_pool import WorkerPool
from vlm_engine.ladder import AnswerGuard, Described
from vlm_engine.protocol import Engine, image_tokens_of

INVALID_SHARE = 0.5
"""Share of the model's last answers that may be no descriptions, else the run stops: most mean a model,
prompt or schema that cannot work. A larger VLM_ASSETS_FAILED_SHARE is taken instead."""


@dataclass(eq=False)
class SetAtWork:
    """A question set in a run, with work to do or rows to publish.

    own: closes its journal and its heartbeat. question: its number among those that the engine is asked.
    computed: what the page says of the work.
    """

    work: DescriptionWork
    run: Materialization
    journal: Journal
    own: contextlib.ExitStack
    question: int = 0
    computed: Metadata = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.to_do = set[str]()
        self._tries: Mapping[str, int] = {}
        self._rounds = self.run.rounds(self.journal)
        self._guard = AnswerGuard(max(INVALID_SHARE, self.work.settings.failed_share))

    def begin_round(self) -> None:
        """Note which properties are asked about next."""
        self.to_do = set(next(self._rounds, ()))
        self._tries = self.journal.failed_tries

    def submit_rows(self, described: Sequence[Described], engine: Engine, device: Device) -> None:
        """Hand the journal the rows of its answers in a batch."""
        if answers := self._answers(described):
            with self.run.progress.building_rows():
                rows = self.work.rows(answers, engine, device, self._tries)
            self.journal.submit(rows)

    def advance(self, described: Sequence[Described]) -> None:
        """Count a batch, also one of the others alone. A pause or another machine ends the work here."""
        answers = self._answers(described)
        self.run.progress.advance(sum(answer.property_id not in self._tries for answer in answers))
        self._guard.count(answers)

    def note_work(self, describing: Describing, engine: Engine, device: Device) -> None:
        """Keep what the page says of the work."""
        progress, spent, image_tokens = self.run.progress, describing.spent, image_tokens_of(engine)
        self.computed = {
            "device": dg.MetadataValue.text(f"{self.work.model.device_name(device)} ({device.name})"),
            "properties/s": dg.MetadataValue.float(round(progress.rate, 3)),
            "images": dg.MetadataValue.int(spent.images),
            "prompt tokens a property": dg.MetadataValue.int(
                round(spent.prompt_tokens / max(1, spent.attempts))
            ),
            **(
                {}
                if image_tokens is None
                else {"image tokens": dg.MetadataValue.text(image_tokens.sentence())}
            ),
            "batches": dg.MetadataValue.text(describing.sizes.size.sentence()),
            "seconds of the longest batch": dg.MetadataValue.float(round(spent.longest, 3)),
            "seconds loading model": dg.MetadataValue.float(round(progress.load_seconds, 3)),
            **progress.work_time(spent, engine).metadata(),
        }

    def _answers(self, described: Sequence[Described]) -> list[Described]:
        return [answer for answer in described if answer.question == self.question]


class JoinedSets:
    """The question sets of a run that share a model and the work on their images.

    sets: those that may publish yet. asking: those of them that are described now, whose questions the engine
    is asked in this order. What fails of one set alone is raised when the others have published.
    """

    def __init__(self) -> None:
        self.sets: list[SetAtWork] = []
        self.asking: list[SetAtWork] = []
        self._failures: list[tuple[str, Exception]] = []

    @property
    def failed(self) -> tuple[str, ...]:
        """The assets that failed."""
        return tuple(asset for asset, _ in self._failures)

    def begin(self) -> list[SetAtWork]:
        """The sets with work to do. From here on all heartbeats are one, those of the others too."""
        for of_set in tuple(self.sets):
            try:
                if of_set.run.to_do(of_set.journal):
                    self.asking.append(of_set)
            except Exception as error:
                self._leave_out(of_set, error)
        for number, of_set in enumerate(self.asking):
            of_set.question = number
        for of_set in self.sets:
            of_set.run.work_beside(other.run for other in self.sets)
        return self.asking

    @contextlib.contextmanager
    def prepared(self, devices: Sequence[Device]) -> Iterator[WorkerPool]:
        """All that the work needs beside a device: modules and workers. devices: one kind, one is to come."""
        first, *others = self.asking
        done_ids = frozenset.intersection(*(of_set.journal.done_ids for of_set in self.asking))
        further = [of_set.work.question for of_set in others]
        with first.work.workers(devices[0], done_ids, further=further) as workers:
            first.work.model.prepare(devices)
            yield workers

    def describe(self, device: Device, workers: WorkerPool) -> None:
        """Describe what is left to do, and hand each set's journal its rows of each batch when it is done.

        The first set has the model, the images and the batches of all.
        """
        first, *others = self.asking
        work = first.work
        further = [of_set.work.question for of_set in others]
        sizes = work.batch_sizes(device, further=[of_set.work for of_set in others])
        with first.run.progress.loading_model():
            engine = work.model.load(device, schema=work.schema, prompt=work.prompt, further=further)
        with work.describing(engine, workers, sizes, further=further) as describing:
            work.refuse_another_model(engine)
            plan = describing.begin(first.journal.plan)
            for of_set in self.asking:
                of_set.journal.plan = plan
            with first.run.at_work(engine, device, beside=[of_set.run for of_set in others]):
                while self._begin_round():
                    for batch in describing.describe(
                        work.jobs, first.to_do, further_to_do=[of_set.to_do for of_set in others]
                    ):
                        if batch.advice is not None:
                            first.run.progress.warn(batch.advice)
                        work.images.judge_batch(batch.described)
                        self._submit(batch.described, engine, device)
        for of_set in self.asking:
            of_set.note_work(describing, engine, device)

    def _begin_round(self) -> bool:
        """Whether a set has properties left to ask about. Raises the failure of the last set."""
        for of_set in tuple(self.asking):
            with self.failure_of(of_set):
                of_set.begin_round()
        return any(of_set.to_do for of_set in self.asking)

    def _submit(self, described: Sequence[Described], engine: Engine, device: Device) -> None:
        """Hand each set's journal its rows of a batch, and count the batch when each has them."""
        for of_set in tuple(self.asking):
            with self.failure_of(of_set):
                of_set.submit_rows(described, engine, device)
        # A pause ends the work of all here.
        for of_set in tuple(self.asking):
            with self.failure_of(of_set):
                of_set.advance(described)

    @contextlib.contextmanager
    def own_failure(self, asset: str) -> Iterator[None]:
        """Keep what the inside raises of one set until the others have published."""
        try:
            yield
        except Exception as error:
            self._failures.append((asset, error))

    @contextlib.contextmanager
    def failure_of(self, of_set: SetAtWork) -> Iterator[None]:
        """Leave out a set that fails while others are described; raise what is of the device, or the last."""
        try:
            yield
        except Exception as error:
            if len(self.asking) == 1 or device_failure(error) is not None:
                raise
            self._leave_out(of_set, error)

    @contextlib.contextmanager
    def failure_of_all(self) -> Iterator[None]:
        """Leave out all sets that are described where the inside raises."""
        try:
            yield
        except Exception as error:
            for of_set in tuple(self.asking):
                self._leave_out(of_set, error)

    def _leave_out(self, of_set: SetAtWork, error: Exception) -> None:
        of_set.to_do.clear()
        if of_set in self.asking:
            self.asking.remove(of_set)
        self.sets.remove(of_set)
        with self.own_failure(of_set.run.partition.asset), of_set.own:
            raise error

    def raise_first_failure(self, log: logging.Logger) -> None:
        """Raise what failed first, if anything did. What else failed is logged."""
        if not self._failures:
            return
        (_, first), *others = self._failures
        for asset, error in others:
            if error is not first:
                log.error(f"{asset} failed too: {error}")
        raise first
