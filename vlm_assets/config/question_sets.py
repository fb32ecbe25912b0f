"""The question sets of a home: what is asked of the images of each property.

Each is a partitioned asset of its own, made by the code of ``vlm_assets/assets/property_descriptions.py``.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

from vlm_assets.config.questions_file import SET_PREFIX, AskedSet, QuestionsFile
from vlm_assets.config.settings import Settings, SettingsError
from vlm_assets.config.where import where_of
from vlm_durable.commands import command
from vlm_durable.files.layout import AssetFolders

MODEL_KEY: Final = "vision_language_model"
"""Dagster's key of the resource that describes. A set whose model or processor differs has one of its own."""


SETS: Final = "sets"
"""Key in an op's run config: the options of single assets, which hold in place of those of the op."""


@dataclass(frozen=True)
class QuestionSet:
    """One question set.

    settings: those that make its rows: the home's, with the set's schema, prompt, model and processor
    options. model_key: Dagster's key of the resource that answers. fills: fields of sets above it, of which
    it gives the better answer.
    """

    asset: AssetFolders
    settings: Settings
    model_key: str
    fills: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """Its name in the file of question sets; that of the first is "descriptions"."""
        return self.asset.name.removeprefix(SET_PREFIX)


@cache
def question_sets(settings: Settings) -> tuple[QuestionSet, ...]:
    """The sets of a home's settings, of which the first is the descriptions; of a set's own settings, it."""
    first = QuestionSet(settings.descriptions, settings, MODEL_KEY)
    file = settings.questions
    if file is None:
        return (first,)
    return (first, *(_further(settings, file, name, asked) for name, asked in file.sets))


def further_set(settings: Settings, name: str) -> QuestionSet:
    """The set of this name in the file of question sets. Raises SettingsError where there is none."""
    sets = {asked.name: asked for asked in question_sets(settings)[1:]}
    if name not in sets:
        names = ", ".join(sets) or "none"
        raise SettingsError(f"There is no question set {name!r}; there is {names}: {command('questions')}.")
    return sets[name]


@cache
def joined_sets(settings: Settings) -> tuple[tuple[QuestionSet, ...], ...]:
    """The sets of a home's settings by their model: those of one model share the work on their images.

    One with a condition is alone: it is asked when the sets that it looks at are published.
    """
    joined = defaultdict[tuple[str, str | None], list[QuestionSet]](list)
    for asked in question_sets(settings):
        joined[asked.model_key, None if asked.settings.where is None else asked.name].append(asked)
    return tuple(map(tuple, joined.values()))


def looked_at_by(settings: Settings, asset: str) -> tuple[str, ...]:
    """The assets of the sets that the condition of this asset's set looks at; of another asset none."""
    for asked in question_sets(settings):
        if asked.asset.name == asset and asked.settings.where is not None:
            return tuple(answers.asset for answers in asked.settings.where.answers)
    return ()


def with_downstream(settings: Settings, assets: Collection[str]) -> set[str]:
    """These assets, and those of the settings that are made from them: they follow what is made anew."""
    made = set(assets)
    for asset in settings.computed_assets:
        of_descriptions = asset == settings.embeddings.name and settings.descriptions.name in made
        if of_descriptions or made.intersection(looked_at_by(settings, asset)):
            made.add(asset)
    return made


def joined_assets(settings: Settings, asset: str) -> tuple[str, ...]:
    """The assets that Dagster makes in one op with this one, itself among them, in their order.

    The op has the name of the first one.
    """
    for joined in joined_sets(settings):
        names = tuple(asked.asset.name for asked in joined)
        if asset in names:
            return names
    return (asset,)


def config_of_runs(settings: Settings, options: Mapping[str, Mapping[str, object]]) -> dict[str, Any]:
    """The run config that gives each of these assets its options."""
    ops: dict[str, Any] = {}
    for asset, of_asset in options.items():
        first, *others = joined_assets(settings, asset)
        op = ops.setdefault(settings.names.op(first), {"config": {}})
        if others:
            op["config"].setdefault(SETS, {})[asset] = dict(of_asset)
        else:
            op["config"] = dict(of_asset)
    return {"ops": ops}


def options_of(settings: Settings, config: Mapping[str, Any], asset: str) -> Mapping[str, Any]:
    """The options that a run config gives an asset."""
    op = settings.names.op(joined_assets(settings, asset)[0])
    of_op: Mapping[str, Any] = config.get("ops", {}).get(op, {}).get("config", {})
    of_all = {name: value for name, value in of_op.items() if name != SETS}
    of_sets: Mapping[str, Mapping[str, Any]] = of_op.get(SETS, {})
    return of_sets.get(asset, of_all)


def _further(settings: Settings, file: QuestionsFile, name: str, asked: AskedSet) -> QuestionSet:
    own = settings.of_set(name, asked, where_of(file, name, settings.description_schema))
    sees_alike = (own.model, own.processor_options) == (settings.model, settings.processor_options)
    key = MODEL_KEY if sees_alike else f"{MODEL_KEY}_of_{name}"
    return QuestionSet(own.descriptions, own, key, asked.fills)
