"""A second opinion: a question set that asks again where its condition holds, and fills some fields.

What both models answered on one sample says what the two together would answer, and what that would take.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import pyarrow as pa

from vlm_assets.config.filled_fields import FieldSources
from vlm_assets.config.question_sets import further_set
from vlm_assets.config.settings import Settings, SettingsError
from vlm_assets.services.trial import Trial
from vlm_catalog.ranges import DESCRIPTIONS
from vlm_engine.ladder import Described
from vlm_engine.schema import load_schema

if TYPE_CHECKING:
    from vlm_assets.config.where import Where


@dataclass(frozen=True)
class SecondOpinion:
    """A question set that asks again.

    settings: those that ask it of every property. fills: fields of the descriptions of which it gives the
    better answer.
    """

    name: str
    settings: Settings
    where: Where
    fills: tuple[str, ...]

    @classmethod
    def of_set(cls, settings: Settings, name: str) -> SecondOpinion:
        """That of a question set of these settings. Raises SettingsError where it is none."""
        question = further_set(settings, name)
        where = question.settings.where
        if where is None or not question.fills:
            lacking = "where" if where is None else "fills"
            raise SettingsError(f"The set {name} has no {lacking}: only one that has both asks again.")
        described = load_schema(settings.description_schema).json_schema["properties"]
        fills = tuple(field for field in question.fills if field in described)
        if not fills:
            raise SettingsError(f"The set {name} fills no field of the {DESCRIPTIONS}.")
        if others := [answers.asset for answers in where.answers if answers.asset != DESCRIPTIONS]:
            raise SettingsError(
                f"The condition of the set {name} looks at answers of {', '.join(others)}, and a sample has"
                f" those of {DESCRIPTIONS} alone."
            )
        assert settings.questions is not None
        of_all = settings.of_set(name, dict(settings.questions.sets)[name])
        return cls(name, of_all, where, fills)

    def asked_again(self, trial: Trial) -> frozenset[str]:
        """The ids of the properties of a trial for which the condition holds."""
        (answers,) = self.where.answers
        rows = [
            {"property_id": row.property_id, "description": row.description, "confidence": row.confidence}
            for row in trial.described
        ]
        table = pa.Table.from_pylist(rows, schema=answers.columns)
        looks = self.where.evaluate(table["property_id"].to_pylist(), {answers.asset: table})
        return frozenset(property_id for property_id, evaluated in looks.items() if evaluated.holds)

    def combined(self, first: Trial, second: Trial) -> Trial:
        """What both would take and answer. second: the set asked of every property of the first trial.

        A property that is asked again is taken to cost what an average one costs. Each partition is started
        and each model is loaded for both.
        """
        again = self.asked_again(first)
        answers = {row.property_id: row for row in second.described if row.property_id in again}
        return replace(
            first,
            described=tuple(self._filled(row, answers.get(row.property_id)) for row in first.described),
            load_seconds=first.load_seconds + second.load_seconds,
            start_seconds=first.start_seconds + second.start_seconds,
            seconds=first.seconds + second.seconds * len(again) / len(first.described),
        )

    def _filled(self, first: Described, second: Described | None) -> Described:
        """The answer of the first with what the second fills, where that has an answer."""
        if second is None:
            return first
        both = replace(
            first,
            prompt_tokens=first.prompt_tokens + second.prompt_tokens,
            output_tokens=first.output_tokens + second.output_tokens,
        )
        if second.description is None:
            return both
        sources = (FieldSources(name, DESCRIPTIONS, (self.name,)) for name in self.fills)
        answers = {self.name: second.description}
        filled = {
            source.field: second.description[source.field] for source in sources if source.filler(answers)
        }
        sure = {name: (second.confidence or {}).get(name) for name in filled}
        return replace(
            both,
            description=(first.description or {}) | filled,
            confidence=(first.confidence or {}) | sure,
        )
