"""The two partitioned assets as Dagster sees them: parameters, device, and who does the work.

What lives here: property_descriptions and property_embeddings. What does not: their rows and the work that
fills them (``descriptions.py``, ``embeddings.py``), the order of a materialization (``materialization.py``),
the catalogue's and the audit's assets.
"""

# No postponed annotations here: Dagster reads an asset's parameters from its real ones.

from collections.abc import Iterator

import dagster as dg

from resources.devices.leases import Lease
from resources.devices.resource import GpuResource
from resources.engine.protocol import ModelLoadError
from resources.engine.resource import TextEmbeddingModel, VisionLanguageModel
from resources.journal.journal import Journal
from resources.publishing.parquet_io import AlreadyPublished
from resources.publishing.partition_rows import PartitionRows
from resources.publishing.staged_file import StagedFile
from vlm_assets.assets.check_events import check_specs
from vlm_assets.assets.checks import DESCRIPTION_CHECKS, EMBEDDING_CHECKS
from vlm_assets.assets.descriptions import ASSET as DESCRIPTIONS
from vlm_assets.assets.descriptions import DescriptionWork
from vlm_assets.assets.embeddings import ASSET as EMBEDDINGS
from vlm_assets.assets.embeddings import EmbeddingWork
from vlm_assets.assets.expected_model import when_model_is_known
from vlm_assets.assets.images_away import ImagesAwayError
from vlm_assets.assets.materialize import Metadata, RunOptions, Steps, materialize, one_partition
from vlm_assets.assets.partition import Partition
from vlm_assets.assets.run_progress import Progress
from vlm_assets.assets.waiting import when_it_is_there
from vlm_assets.catalog.catalog import Catalog
from vlm_assets.catalog.ranges import PropertyRange
from vlm_assets.resource_settings import build_vision_language_model
from vlm_assets.settings import Settings

_POOL = "gpu"


def build_property_descriptions(
    settings: Settings, partitions: dg.PartitionsDefinition[str], *, upstream: str
) -> dg.AssetsDefinition:
    """The asset. ``upstream``: the catalogue's asset, which says what there is to describe."""

    @dg.asset(
        name=DESCRIPTIONS,
        partitions_def=partitions,
        deps=[upstream],
        pool=_POOL,
        group_name="properties",
        kinds={"parquet", "transformers"},
        check_specs=check_specs(DESCRIPTIONS, DESCRIPTION_CHECKS, partitions),
        description=(
            "One structured description a property, by a vision-language model that looks at all of its"
            " images together. One partition is one range of the catalogue and one parquet file. Materialize"
            " resumes what was interrupted; a complete partition is verified and left alone."
        ),
    )
    def property_descriptions(
        context: dg.AssetExecutionContext,
        config: RunOptions,
        gpu: dg.ResourceParam[GpuResource],
        vision_language_model: dg.ResourceParam[VisionLanguageModel],
    ) -> Iterator[dg.Output[StagedFile | AlreadyPublished] | dg.AssetCheckResult]:
        key = one_partition(context)
        catalog = Catalog.open(settings.home)
        wanted = PropertyRange.from_key(key)
        work = when_model_is_known(
            context, settings, lambda: DescriptionWork.of(settings, catalog, wanted, vision_language_model)
        )

        def describe(journal: Journal, progress: Progress) -> Metadata:
            when_it_is_there(
                context,
                settings,
                work.images_watch().look,
                lacking=ImagesAwayError,
                title="No images to describe",
            )
            lease = _lease(context, gpu, DESCRIPTIONS, resident=vision_language_model.resident())
            if vision_language_model.is_at_address:
                # What fails there, CUDA errors too, says nothing of the device here.
                progress.load(None)
                return work.describe(journal, progress, lease.device)
            progress.load(lease.device.id)
            with gpu.blamed(lease.device, asset=DESCRIPTIONS, partition=key, log=context.log):
                return work.describe(journal, progress, lease.device)

        partition = Partition.at_home(settings, DESCRIPTIONS, key, work)
        steps = Steps(work.rows_schema, describe, work.check, work.for_people, work.remember)
        yield from materialize(context, partition, config, steps)

    return property_descriptions


def build_property_embeddings(
    settings: Settings, partitions: dg.PartitionsDefinition[str], *, descriptions: str
) -> dg.AssetsDefinition:
    """The asset. ``descriptions``: the asset whose text is embedded."""

    @dg.asset(
        name=EMBEDDINGS,
        partitions_def=partitions,
        ins={"descriptions": dg.AssetIn(descriptions)},
        pool=_POOL,
        group_name="properties",
        kinds={"parquet", "transformers"},
        check_specs=check_specs(EMBEDDINGS, EMBEDDING_CHECKS, partitions),
        description=(
            "One vector a property, made from the text of its description by a text-embedding model. A"
            " property whose description failed has a row with a null vector."
        ),
    )
    def property_embeddings(
        context: dg.AssetExecutionContext,
        config: RunOptions,
        gpu: dg.ResourceParam[GpuResource],
        text_embedding_model: dg.ResourceParam[TextEmbeddingModel],
        descriptions: PartitionRows,
    ) -> Iterator[dg.Output[StagedFile | AlreadyPublished] | dg.AssetCheckResult]:
        key = one_partition(context)
        catalog = Catalog.open(settings.home)
        work = EmbeddingWork.of(catalog, PropertyRange.from_key(key), descriptions, text_embedding_model)

        def embed(journal: Journal, progress: Progress) -> Metadata:
            lease = _lease(context, gpu, EMBEDDINGS, resident=_describing_server(settings))
            progress.load(lease.device.id)
            with gpu.blamed(lease.device, asset=EMBEDDINGS, partition=key, log=context.log):
                return work.embed(journal, progress, lease.device)

        partition = Partition.at_home(settings, EMBEDDINGS, key, work)
        steps = Steps(work.rows_schema, embed, work.check, work.for_people)
        yield from materialize(context, partition, config, steps)

    return property_embeddings


def _lease(context: dg.AssetExecutionContext, gpu: GpuResource, asset: str, *, resident: str | None) -> Lease:
    return gpu.lease(
        run_id=context.run.run_id,
        partition=context.partition_key,
        step=asset,
        log=context.log,
        resident=resident,
    )


def _describing_server(settings: Settings) -> str | None:
    """The model server that describes, which an embedding in between is not to end."""
    try:
        return build_vision_language_model(settings).resident()
    except ModelLoadError:
        return None
