"""property_catalog as an asset: it ingests the source of the settings, or reports what is catalogued.

The ingest itself is in ``vlm_catalog/ingest.py``.
"""

# No postponed annotations here: Dagster reads an asset's parameters from its real ones.

from pathlib import Path

import dagster as dg

from vlm_assets.assets.asset_metadata import CATALOG, table_metadata
from vlm_assets.assets.dagster_versions import CATALOG_VERSION
from vlm_assets.assets.markdown import Markdown, paragraphs, sentence
from vlm_assets.config.settings import Settings
from vlm_catalog.catalog import Catalog, CatalogMissingError, catalog_path
from vlm_catalog.catalog_file import SCHEMA
from vlm_catalog.ingest import take_in
from vlm_catalog.listing import IngestRequest
from vlm_catalog.stored_catalog import CATALOG_NAME
from vlm_durable.commands import command

ASSET = "property_catalog"

RELOAD = "New ranges become partitions when the code location is reloaded: Deployment > Reload."


class CatalogOptions(dg.Config):
    """update: take changed images of known properties too, which makes their ranges stale.

    close: make a partition of the last properties, however few. skip_bad: write entries that cannot be taken
    to a reject file in the home, and take the rest.
    """

    update: bool = False
    close: bool = False
    skip_bad: bool = False


def catalog_metadata(catalog: Catalog) -> dict[str, dg.MetadataValue]:
    """The figures of a catalogue that its page shows."""
    return {
        "ingest": dg.MetadataValue.int(catalog.header.sequence),
        "properties": dg.MetadataValue.int(catalog.rows),
        "ranges": dg.MetadataValue.int(len(catalog.ranges)),
        "image root": dg.MetadataValue.path(catalog.image_root),
        "path": dg.MetadataValue.path(str(catalog.path)),
        "dagster/row_count": dg.MetadataValue.int(catalog.rows),
    }


def record_catalog(dagster_home: Path, catalog: Catalog) -> None:
    """Report a catalogue that the command line made as a materialization, once for each ingest."""
    sequence = catalog.header.sequence
    with dg.DagsterInstance.from_config(str(dagster_home)) as instance:
        event = instance.get_latest_materialization_event(dg.AssetKey(ASSET))
        shown = event.asset_materialization if event else None
        if shown is None or shown.metadata["ingest"].value != sequence:
            instance.report_runless_asset_event(
                dg.AssetMaterialization(ASSET, metadata=catalog_metadata(catalog))
            )


def first_ingest(settings: Settings) -> list[str]:
    """The first steps in a home that has no catalogue, as sentences."""
    home = settings.home
    if settings.names.prefix:
        asset = settings.names.key(ASSET).to_user_string()
        return ["This home has no photographs yet.", f"Materialize {asset}. {RELOAD}"]
    return [
        "This home has no photographs yet.",
        f"Take them in, in a terminal: {command('ingest', 'FOLDER', '--home', home)}. FOLDER has a folder for"
        " each property, with its images; a CSV, JSONL or parquet listing does too.",
    ]


def with_first_ingest(settings: Settings, description: str) -> str:
    """An asset's description, with the first steps above it where the home has no catalogue.

    Dagster's page shows a description at once, but a sensor's report only after a reload of the page. The
    description is made anew when the definitions are reloaded, which follows an ingest.
    """
    if catalog_path(settings.home).exists():
        return description
    return paragraphs(sentence(" ".join(first_ingest(settings))), Markdown(description))


def build_property_catalog(settings: Settings) -> dg.AssetsDefinition:
    """The asset. With a source in the settings it ingests it; without, it reports the catalogue."""

    @dg.asset(
        key=settings.names.key(ASSET),
        group_name=settings.names.name("properties"),
        kinds={"parquet"},
        owners=settings.owner_list,
        tags=settings.tag_values,
        metadata=table_metadata(settings, CATALOG_NAME, SCHEMA, CATALOG),
        description=with_first_ingest(
            settings,
            "One row a property: its ordinal, which never changes, and its images. The ranges of ordinals"
            f" are the partitions of everything downstream. {RELOAD}",
        ),
    )
    def property_catalog(
        context: dg.AssetExecutionContext, config: CatalogOptions
    ) -> dg.MaterializeResult[None]:
        settings.name_in_commands()
        message = "Nothing was taken in: VLM_ASSETS_SOURCE is not set."
        if settings.source is not None:
            request = IngestRequest(
                settings.source,
                settings.range_size,
                settings.image_root,
                update=config.update,
                close=config.close,
                skip_bad=config.skip_bad,
            )
            report = take_in(request, settings.home, max_images=settings.max_images, store=settings.mirror)
            message = " ".join((*report.sentences(), *([RELOAD] if report.new_ranges else [])))
        context.log.info(message)
        try:
            catalog = Catalog.open(settings.home)
        except CatalogMissingError as error:
            raise dg.Failure(
                f"{error} Or set VLM_ASSETS_SOURCE and materialize this asset again.", allow_retries=False
            ) from error
        return dg.MaterializeResult(
            metadata={"report": dg.MetadataValue.text(message), **catalog_metadata(catalog)},
            data_version=CATALOG_VERSION,
        )

    return property_catalog
