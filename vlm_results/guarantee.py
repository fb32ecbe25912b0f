"""The guarantee: which answers are shown, so that as many of them are right as ``VLM_ASSETS_GUARANTEE`` says.

An answer whose confidence is below its field's threshold is shown as null, and the raw answer stays in the
column ``raw_description``. ``certification.py`` finds the thresholds; they are kept in
``HOME/.state/guarantee.json``. Without the setting everything is shown as it is.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Final, Self

import pyarrow as pa
import pyarrow.compute as pc

from vlm_assets.assets.fingerprint import digest_of, settings_digest
from vlm_assets.assets.partition import CONFIDENCE
from vlm_assets.config.settings import Settings
from vlm_durable.files.files import TEMPORARY_SUFFIX, make_directory
from vlm_durable.files.lock_files import locked
from vlm_durable.files.sealed_json import BrokenSealError, read_sealed, set_aside_damaged, write_sealed
from vlm_durable.versions.partition_files import PublishedRecord
from vlm_results.results_settings import ResultsSettings

FILE: Final = "guarantee.json"

_FORMAT: Final = 3

_NOISE: Final = 0.01
"""A label whose confidence changed by no more is as sure as it was: another batch moves it a little."""

RAW: Final = "raw_description"
"""The column with the answers as the model gave them, beside those that are shown."""

Thresholds = Mapping[str, float | None]
"""The confidence from which on answers are shown, by promised field; None: nothing is promised yet."""


@dataclass(frozen=True)
class LookResult:
    """What one look at the labels of a field showed. It is kept for good, and done again if they change.

    made_with: see ``PartitionSummary``. target, risk: of the field; a look spends its part of the risk.
    judged: its labels, in the order in which later looks take them first (see ``FieldLabels``). threshold:
    the lowest that is good, None if none is; right, above: the labels above it. at: when. holds: whether
    there still are so many labels; else it shows nothing.
    """

    made_with: str
    field: str
    target: float
    risk: float
    labels: int
    judged: Mapping[str, str]
    threshold: float | None
    right: int
    above: int
    at: str
    holds: bool = True

    @property
    def promise(self) -> tuple[str, str, float, float]:
        """What it is a look for: its later looks take the same labels first."""
        return self.made_with, self.field, self.target, self.risk

    def has_changed(self, judged: Mapping[str, str]) -> bool:
        """Whether a label's verdict changed, or its confidence by more than noise, or all labels are gone.

        One that is gone alone changes nothing that was shown.
        """
        today = {name: judged[name] for name in self.judged if name in judged}
        return not today or any(_is_other(self.judged[name], label) for name, label in today.items())


def _is_other(before: str, today: str) -> bool:
    """Whether a label (see ``FieldLabels.judged``) has another verdict, or a confidence beyond the noise."""
    (verdict, _, sure), (verdict_today, _, sure_today) = before.partition(" "), today.partition(" ")
    if not sure or verdict != verdict_today:
        return True
    # Rounded: as floats, 0.91 and 0.9 differ by more than 0.01.
    return round(abs(float(sure) - float(sure_today)), 4) > _NOISE


def lowest_threshold(looks: Iterable[LookResult]) -> float | None:
    """The lowest threshold that any look of a field has shown to be good.

    The risks of all looks are parts of the field's, so what each of them showed holds.
    """
    return min(
        (result.threshold for result in looks if result.holds and result.threshold is not None), default=None
    )


def read_looks(settings: Settings) -> list[LookResult]:
    """All looks that are kept. Raises FormatVersionError, OSError.

    With a damaged file nothing is promised, until ``quarantine_looks`` has moved it and they are done again.
    """
    with contextlib.suppress(FileNotFoundError, BrokenSealError):
        content = read_sealed(settings.state_directory / FILE, format_=_FORMAT)
        return [_look_result(entry) for entry in content["looks"]]
    return []


def quarantine_looks(settings: Settings) -> str:
    """Move a damaged file of looks aside before they are done again, and say so; empty if it is whole."""
    damage = set_aside_damaged(settings.state_directory / FILE, settings.descriptions.quarantine)
    return damage and f"{damage} Its looks at the labels are done again."


def write_looks(settings: Settings, looks: Iterable[LookResult]) -> None:
    """Keep these looks in place of those before, durably. Raises OSError."""
    write_sealed(
        settings.state_directory / FILE, {"looks": [asdict(result) for result in looks]}, format_=_FORMAT
    )


@contextlib.contextmanager
def only_looker(settings: Settings) -> Iterator[None]:
    """Let one process at a time read labels and write its looks at them, or forget labels. Raises OSError."""
    make_directory(settings.state_directory)
    with locked(settings.state_directory / f"{FILE}.lock"):
        yield


def forget_judged(settings: Settings, ids: Iterable[str]) -> bool:
    """Take the labels of these properties out of all looks; whether there were any. Raises OSError.

    What a look showed stays: a label that is gone changes nothing. Damaged files promise nothing, and go.
    """
    with only_looker(settings):
        quarantine_looks(settings)
        leftovers = settings.state_directory.glob(f".{FILE}.*{TEMPORARY_SUFFIX}")
        for path in (*settings.descriptions.quarantine.glob(f"{FILE}.*"), *leftovers):
            path.unlink()
        gone = set(map(digest_of, ids))
        kept = read_looks(settings)
        left = [
            replace(result, judged={name: label for name, label in result.judged.items() if name not in gone})
            for result in kept
        ]
        if left != kept:
            write_looks(settings, left)
    return left != kept


def _look_result(content: Mapping[str, Any]) -> LookResult:
    """The result of a look, read from the file.

    Format 1 kept a digest of its labels alone, format 2 not how sure they are: such a look is done once more.
    """
    names = [field.name for field in fields(LookResult)]
    return LookResult(**{"judged": {}} | {name: content[name] for name in names if name in content})


def promised_shares(settings: Settings) -> tuple[dict[str, float], float]:
    """The promised share of right answers by field, and the risk of each: that of all, divided."""
    own = ResultsSettings.part_of(settings)
    return own.guarantee_targets, own.guarantee_risk / max(1, len(own.guarantee_targets))


@dataclass(frozen=True)
class Guarantee:
    """The thresholds of the promised fields. targets: the promised shares, by field.

    thresholds: by what answers were made with, and by field.
    """

    targets: Mapping[str, float]
    thresholds: Mapping[tuple[str, str], float | None]

    @classmethod
    def read(cls, settings: Settings) -> Self:
        """The thresholds that labels have shown for these settings. Raises FormatVersionError, OSError."""
        targets, risk = promised_shares(settings)
        looks: dict[tuple[str, str], list[LookResult]] = {}
        for result in read_looks(settings) if targets else ():
            if (result.target, result.risk) == (targets.get(result.field), risk):
                looks.setdefault((result.made_with, result.field), []).append(result)
        return cls(targets, {key: lowest_threshold(of_field) for key, of_field in looks.items()})

    def thresholds_for(self, record: PublishedRecord | None) -> Thresholds:
        """The thresholds for a partition's rows; empty without a guarantee."""
        if not self.targets:
            return {}
        made_with = settings_digest({} if record is None else record.metadata.get("parts", {}))
        return {field: self.thresholds.get((made_with, field)) for field in self.targets}

    def version_of(self, record: PublishedRecord) -> str:
        """What a partition's shown rows depend on beside the partition; empty without a guarantee."""
        return digest_of(self.thresholds_for(record)) if self.targets else ""


EVERYTHING: Final = Guarantee({}, {})
"""No guarantee: every answer is shown."""


def shown_rows(rows: pa.Table, thresholds: Thresholds) -> pa.Table:
    """The rows with null for answers below their threshold, and the raw answers beside them.

    rows: with the description, and with the confidence if the file has it. They stay as they are without a
    threshold.
    """
    if not thresholds or "description" not in rows.column_names:
        return rows
    place, raw = rows.column_names.index("description"), rows["description"].combine_chunks()
    without = pa.nulls(rows.num_rows, pa.struct([]))
    sure = rows[CONFIDENCE].combine_chunks() if CONFIDENCE in rows.column_names else without
    answers = [
        _sure_answers(raw, sure, field, thresholds[field.name])
        if field.name in thresholds
        else pc.struct_field(raw, field.name)
        for field in raw.type
    ]
    shown = pa.StructArray.from_arrays(answers, fields=list(raw.type), mask=raw.is_null())
    return rows.set_column(place, rows.schema.field(place), shown).append_column(RAW, raw)


def _sure_answers(
    raw: pa.StructArray, sure: pa.StructArray, field: pa.Field, threshold: float | None
) -> pa.Array:
    """The answers of a promised field, null for those below its threshold. sure: the confidences."""
    nothing = pa.nulls(len(raw), field.type)
    place = sure.type.get_field_index(field.name)
    # A nested object has no confidence of its own: nothing can be promised of it, and none of it is shown.
    if threshold is None or place < 0 or not pa.types.is_floating(sure.type.field(place).type):
        return nothing
    # As doubles on both sides, as in the tests: 0.95 as a float is less than 0.95.
    is_sure = pc.greater_equal(pc.struct_field(sure, field.name).cast(pa.float64()), threshold)
    return pc.if_else(is_sure, pc.struct_field(raw, field.name), nothing)


def as_json(settings: Settings) -> dict[str, Any]:
    """What is promised, for the files of an export; empty without a guarantee."""
    own = ResultsSettings.part_of(settings)
    if not own.guarantee_targets:
        return {}
    return {"guarantee": {"shares": own.guarantee_targets, "risk": own.guarantee_risk}}
