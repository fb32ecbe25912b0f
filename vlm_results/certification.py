"""Certification: what labels of a random sample show of each promised field, and how many are missing.

Looks are at fixed numbers of labels, and each is done once (``confidence_statistics.looks``). So it costs
nothing to look at the results while one labels or publishes: between two looks nothing is tested.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Final

import numpy as np

from vlm_assets.config.settings import Settings
from vlm_catalog.catalog import Catalog
from vlm_durable.commands import command
from vlm_durable.wording import counted
from vlm_results.confidence_statistics import GRID, Counts, certify, looks, next_look
from vlm_results.guarantee import (
    LookResult,
    lowest_threshold,
    only_looker,
    promised_shares,
    quarantine_looks,
    read_looks,
    write_looks,
)
from vlm_results.labels import Judged, certifying_labels, read_judged
from vlm_results.quality import Quality, assess_quality
from vlm_results.results_settings import ResultsSettings

_log: Final = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class FieldPromise:
    """What is promised of a field's answers that were made with the same settings.

    population: how many of these answers have a confidence in each cell of the grid. labels: those of the
    random sample. looks: those that were done, in their order. learned: labels that do not count, for the
    model was trained on them.
    """

    made_with: str
    field: str
    target: float
    risk: float
    population: Counts
    labels: int
    looks: tuple[LookResult, ...]
    learned: int = 0

    @property
    def threshold(self) -> float | None:
        """The confidence from which on answers are shown; None if nothing is promised."""
        return lowest_threshold(self.looks)

    @property
    def answers(self) -> int:
        """The answers that have a confidence."""
        return int(self.population.sum())

    @property
    def shown(self) -> int:
        """The answers that are shown."""
        return 0 if self.threshold is None else int(self.population[GRID.index(self.threshold) :].sum())

    @property
    def missing(self) -> int:
        """How many labels are missing for the next test."""
        return next_look(self.labels, target=self.target, risk=self.risk).labels - self.labels

    def sentence(self) -> str:
        """What is promised, or what is missing for it, as a sentence for people."""
        name = f"{self.field}, of answers made with {self.made_with}"
        if self.threshold is not None:
            return (
                f"{name}: {self.shown:,} of {self.answers:,} are shown, those with a confidence of at least"
                f" {self.threshold:g}. At least {self.target:.1%} of them are right."
            )
        if not self.answers:
            return (
                f"{name}: nothing is promised, and none is shown, for none has a confidence. Rows of earlier"
                " versions have none, and some servers give none."
            )
        more = (
            f"{counted(self.missing, 'labels')} of a random sample are missing for the next test:"
            f" {command('review', '--sample', 'N')}."
        )
        if self.learned:
            more += (
                f" {counted(self.learned, 'labels do', 'label does')} not count: the model was trained on"
                f" {'them' if self.learned > 1 else 'it'}."
            )
        if not self.looks:
            return f"{name}: nothing is promised yet, and none is shown. {more}"
        return (
            f"{name}: {counted(self.looks[-1].labels, 'labels')} do not show that {self.target:.1%} of the"
            f" surest are right. Nothing is promised, and none is shown. {more}"
        )


def certify_published(
    settings: Settings, catalog: Catalog, *, report: Callable[[str], None] = _log.warning
) -> list[FieldPromise]:
    """``read_and_certify`` for what is published. Only new partitions are read for its quality.

    Raises CommandError, CatalogError, SchemaError, TruthError, FormatVersionError, OSError.
    """
    if not ResultsSettings.part_of(settings).guarantee_targets:
        return []
    quality = assess_quality(settings, catalog)
    return read_and_certify(settings, catalog, quality, report=report)[1]


def read_and_certify(
    settings: Settings, catalog: Catalog, quality: Quality, *, report: Callable[[str], None]
) -> tuple[dict[str, list[Judged]], list[FieldPromise]]:
    """``read_judged``, and ``certify_promises`` with these labels; raises what they raise."""
    # Under one lock: a withdrawal in between would miss the labels of a look that is not written yet.
    with only_looker(settings):
        judged = read_judged(settings, catalog)
        return judged, certify_promises(settings, quality, judged, report=report)


def certify_promises(
    settings: Settings,
    quality: Quality,
    judged: Mapping[str, Sequence[Judged]],
    *,
    report: Callable[[str], None] = _log.warning,
) -> list[FieldPromise]:
    """Do the looks that are due, keep them, and say what is promised.

    report: is told where the looks before are damaged. Raises FormatVersionError, OSError.
    """
    targets, risk = promised_shares(settings)
    if not targets:
        return []
    if damage := quarantine_looks(settings):
        report(damage)
    kept = read_looks(settings)
    promises, done = list[FieldPromise](), list[LookResult]()
    for made_with, populations in quality.confidences.items():
        for field, target in targets.items():
            if not quality.asks_for(made_with, field):
                continue
            population = populations.get(field, np.zeros(len(GRID), np.int64))
            of_field = judged.get(made_with, ())
            labels = len(certifying_labels(of_field, field))
            learned = sum(label.is_learned and field in label.right for label in of_field)
            promise = FieldPromise(made_with, field, target, risk, population, labels, (), learned)
            results = list(_results(promise, of_field, kept))
            promises.append(replace(promise, looks=tuple(result for result in results if result.holds)))
            done += results
    current = {result.promise for result in done}
    # Looks for other targets or other answers stay: these may come back, and are not tested twice then.
    done = [*(result for result in kept if result.promise not in current), *done]
    if done != kept:
        write_looks(settings, done)
    return promises


def _results(
    promise: FieldPromise, judged: Sequence[Judged], kept: Sequence[LookResult]
) -> Iterator[LookResult]:
    """The looks that were done, and those that the labels are enough for by now.

    The labels of a look come first in all later ones, whatever is published since: else each publication
    would change which labels are the first, and test others at the full risk. A look is done again only if
    its labels changed: a person corrected a verdict, or a partition was described anew with the same answers
    and other confidences. One that there are too few labels for by now shows nothing, and is kept.
    """
    promised = promise.made_with, promise.field, promise.target, promise.risk
    done = {result.labels: result for result in kept if result.promise == promised}
    first = dict.fromkeys(name for labels in sorted(done) for name in done[labels].judged)
    today = certifying_labels(judged, promise.field).judged
    for planned in looks(promise.risk):
        result = done.pop(planned.labels, None)
        if planned.labels > promise.labels:
            if result is not None:
                yield replace(result, holds=False)
            if not done:
                return
        elif result is not None and not result.has_changed(today):
            yield replace(result, holds=True)
        else:
            chosen = certifying_labels(judged, promise.field, planned.labels, first=first)
            certified = certify(
                chosen.confidences, chosen.right, promise.population, target=promise.target, risk=planned.risk
            )
            now = datetime.now(UTC).isoformat(timespec="seconds")
            threshold, right, above = certified or (None, 0, 0)
            yield LookResult(*promised, planned.labels, chosen.judged, threshold, right, above, now)
            first |= dict.fromkeys(chosen.judged)
