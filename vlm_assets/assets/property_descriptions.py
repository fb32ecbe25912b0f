"""The asset of a question set: one partition a property range, one row a property, asked of its images.

``property_descriptions`` is the first set's. Here is the asset, whose function shows the order of its
materialization. The loop that describes is in ``joined_sets.py``, the columns and the rows are in
``description_work.py``, the steps that all assets share in ``materialize.py``, the model in ``vlm_engine``.
"""

# No postponed annotations here: Dagster reads an asset's parameters from its real ones.

import contextlib
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import dagster as dg

from resources.dagster_names import NO_ATTEMPT
from resources.gpu import GpuResource
from resources.vision_language_model import VisionLanguageModel
from vlm_assets.assets.asset_metadata import DESCRIPTIONS, table_metadata
from vlm_assets.assets.checks import DESCRIPTION_CHECKS, WHERE_CHECKS, check_specs
from vlm_assets.assets.dagster_versions import description_code_version
from vlm_assets.assets.description_work import DescriptionWork, description_rows
from vlm_assets.assets.joined_sets import JoinedSets, SetAtWork
from vlm_assets.assets.learned_labels import keep_learned
from vlm_assets.assets.materialize import (
    Event,
    JoinedRunOptions,
    Materialization,
    no_retry_without_a_person,
    range_of_run,
)
from vlm_assets.assets.run_watch import ImagesAwayError, is_noted, note_run, wait_until_available
from vlm_assets.config.engine_choice import keep_engine
from vlm_assets.config.question_sets import QuestionSet, looked_at_by, question_sets
from vlm_assets.config.resource_settings import IO_MANAGER
from vlm_assets.config.settings import Settings
from vlm_catalog.ranges import EMBEDDINGS
from vlm_engine.schema import SchemaError, load_schema
from vlm_engine.server.running_server import ServerUnreachableError

_ABOUT = (
    "One structured description a property, by a vision-language model that looks at all of its images"
    " together. One partition is one range of the catalogue and one parquet file. Materialize resumes what"
    " was interrupted; a complete partition is verified and left alone."
)


def build_described_assets(
    settings: Settings,
    sets: Sequence[QuestionSet],
    partitions: dg.PartitionsDefinition[str],
    *,
    upstream: str,
) -> dg.AssetsDefinition:
    """The assets of the question sets of one model, made in one op, which has the name of the first.

    A run makes those that it selects. upstream: the catalogue's asset, which lists the properties. A set with
    a condition is alone; what its condition looks at is published before.
    """
    names, assets, model_key = settings.names, [asked.asset.name for asked in sets], sets[0].model_key
    looked_at = looked_at_by(settings, assets[0])
    computed_later = {EMBEDDINGS, *(asked.asset.name for asked in question_sets(settings))} - set(assets)

    @dg.multi_asset(
        name=names.op(assets[0]),
        # The first output has the name that an asset's own has, whether others join it or not.
        outs={
            "result" if asked is sets[0] else names.op(asked.asset.name): _asset_out(settings, asked)
            for asked in sets
        },
        can_subset=True,
        partitions_def=partitions,
        deps=[names.key(asset) for asset in (upstream, *looked_at)],
        required_resource_keys={names.name("gpu"), names.name(model_key)},
        pool="gpu",
        check_specs=[
            spec
            for asked in sets
            for spec in check_specs(names.key(asked.asset.name), checks_of(asked), partitions)
        ],
        description=_ABOUT,
    )
    def described_assets(context: dg.AssetExecutionContext, config: JoinedRunOptions) -> Iterator[Event]:
        gpu: GpuResource = names.resource(context, "gpu")
        model: VisionLanguageModel = names.resource(context, model_key)
        catalog, property_range = range_of_run(context, settings)
        joined = JoinedSets()
        with contextlib.ExitStack() as stack:
            for asked in sets:
                asset = asked.asset.name
                if names.key(asset) not in context.selected_asset_keys:
                    continue
                with joined.own_failure(asset), contextlib.ExitStack() as own:
                    with no_retry_without_a_person(context, asset):
                        work = wait_until_available(
                            context,
                            settings,
                            partial(
                                DescriptionWork.for_range, asked.settings, catalog, property_range, model
                            ),
                            unavailable=ServerUnreachableError,
                            title="No model to work with",
                            assets=[asset],
                        )
                    options = config.of(asset)
                    run = own.enter_context(Materialization.begin(context, settings, asset, work, options))
                    if run.is_complete:
                        yield from run.verify()
                        continue
                    journal = own.enter_context(run.resume())
                    joined.sets.append(SetAtWork(work, run, journal, stack.enter_context(own.pop_all())))
            if asking := joined.begin():
                with joined.failure_of_all():
                    first = asking[0]
                    wait_until_available(
                        context,
                        settings,
                        first.work.images.raise_if_away,
                        unavailable=ImagesAwayError,
                        title="No images to describe",
                        assets=[of_set.run.partition.asset for of_set in asking],
                    )
                    with (
                        joined.prepared(gpu.find()) as workers,
                        first.run.device(
                            gpu,
                            server_digest=model.server_digest(first.work.prompt, len(asking)),
                            computes_elsewhere=model.is_at_address,
                            needed_by=computed_later,
                        ) as device,
                    ):
                        keep_engine(first.work.settings, context.log)
                        keep_learned(first.work.settings, first.work.fingerprint.parts["model"])
                        joined.describe(device, workers)
            for of_set in joined.sets:
                with joined.own_failure(of_set.run.partition.asset), of_set.own:
                    yield from of_set.run.publish(of_set.journal, of_set.computed)
        if joined.failed and is_noted(context, NO_ATTEMPT, joined.failed):
            # Dagster skips what follows this op.
            note_run(context, NO_ATTEMPT, computed_later)
        joined.raise_first_failure(context.log)

    return described_assets


def checks_of(asked: QuestionSet) -> dict[str, str]:
    """The checks of a question set, with a sentence for people each."""
    return DESCRIPTION_CHECKS | (WHERE_CHECKS if asked.settings.where is not None else {})


def _asset_out(settings: Settings, asked: QuestionSet) -> dg.AssetOut:
    names = settings.names
    return dg.AssetOut(
        key=names.key(asked.asset.name),
        io_manager_key=names.name(IO_MANAGER),
        group_name=names.name("properties"),
        kinds={"parquet", "transformers"},
        owners=settings.owner_list,
        tags=settings.tag_values,
        code_version=description_code_version(asked.settings),
        metadata=_metadata(asked),
        is_required=False,
        description=_ABOUT,
    )


def _metadata(asked: QuestionSet) -> dict[str, Any]:
    """Columns and place of the partitions; nothing if the schema cannot be used, and a run says why."""
    try:
        schema = load_schema(asked.settings.description_schema)
    except SchemaError:
        return {}
    rows = description_rows(schema.arrow_type)
    return table_metadata(asked.settings, asked.asset.name, rows, DESCRIPTIONS, description=schema)
