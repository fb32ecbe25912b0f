"""property_catalog as an asset: the ingest of the source in the settings, or a look at what is catalogued.

What lives here: Dagster's side only. What does not: the ingest (``ingest.py``) and the file (``catalog.py``).
"""

# No postponed annotations here: Dagster reads an asset's parameters from its real ones.

import dagster as dg

from vlm_assets.catalog import Catalog, CatalogMissingError
from vlm_assets.ingest import ingest
from vlm_assets.settings import Settings

ASSET = "property_catalog"

RELOAD = "New ranges become partitions when the code location is reloaded: Deployment > Reload."


class CatalogOptions(dg.Config):
    """update: take changed images of known properties too, which makes their ranges stale."""

    update: bool = False


def catalog_metadata(catalog: Catalog) -> dict[str, dg.MetadataValue]:
    """What a person wants to know of a catalogue, for its materialization."""
    return {
        "properties": dg.MetadataValue.int(catalog.rows),
        "ranges": dg.MetadataValue.int(len(catalog.ranges)),
        "image root": dg.MetadataValue.path(catalog.image_root),
        "path": dg.MetadataValue.path(str(catalog.path)),
        "dagster/row_count": dg.MetadataValue.int(catalog.rows),
    }


def build_property_catalog(settings: Settings) -> dg.AssetsDefinition:
    """The asset. With a source in the settings it takes new properties in; without, it says what is there."""

    @dg.asset(
        name=ASSET,
        group_name="properties",
        kinds={"parquet"},
        description=(
            "One row a property: its ordinal, which never changes, and its images. The ranges of ordinals"
            f" are the partitions of everything downstream. {RELOAD}"
        ),
    )
    def property_catalog(
        context: dg.AssetExecutionContext, config: CatalogOptions
    ) -> dg.MaterializeResult[None]:
        said = "Nothing was taken in: VLM_ASSETS_SOURCE is not set."
        if settings.source is not None:
            report = ingest(
                settings.source,
                settings.home,
                range_size=settings.range_size,
                image_root=settings.image_root,
                update=config.update,
            )
            said = " ".join((*report.sentences(), *([RELOAD] if report.new_ranges else [])))
        context.log.info(said)
        try:
            catalog = Catalog.open(settings.home)
        except CatalogMissingError as error:
            raise dg.Failure(
                f"{error} Or set VLM_ASSETS_SOURCE and materialize this asset again.", allow_retries=False
            ) from error
        return dg.MaterializeResult(
            metadata={"report": dg.MetadataValue.text(said), **catalog_metadata(catalog)}
        )

    return property_catalog
