"""described_properties: the Iceberg table as an asset, and the sensor that has it follow what is published.

Dagster's side alone. ``vlm_results/described_table.py`` writes the table.
"""

# No postponed annotations here: Dagster reads an asset's parameters from its real ones.
from pathlib import Path

import dagster as dg

from sensors.sensor_definition import Decided, Situation, ask_until_done, build_sensor
from sensors.ticks import Ticks
from vlm_assets.assets.fingerprint import digest_of
from vlm_assets.assets.markdown import sentence
from vlm_assets.config.resource_settings import control_state
from vlm_assets.config.settings import Settings
from vlm_catalog.catalog import Catalog
from vlm_durable.files.seen_files import signature_at
from vlm_durable.state.pause import pause_of
from vlm_results.guarantee import FILE, promised_shares
from vlm_results.known_tables import has_table
from vlm_results.published_table import last_publication
from vlm_results.results_settings import ResultsSettings

ASSET = "described_properties"
SENSOR = "described_properties_due"
INTERVAL_SECONDS = 60


def build_described_properties(settings: Settings) -> dg.AssetsDefinition:
    """The asset."""
    folder = ResultsSettings.part_of(settings).described_table
    uri = f"file://{folder}" if isinstance(folder, Path) else str(folder)

    @dg.asset(
        key=settings.names.key(ASSET),
        deps=[settings.names.key(asset.name) for asset in settings.partitioned_assets],
        group_name=settings.names.name("properties"),
        kinds={"iceberg"},
        owners=settings.owner_list,
        tags=settings.tag_values,
        metadata={"dagster/uri": uri},
        description=(
            "One Apache Iceberg table of descriptions, vectors and image URIs, for Spark, Trino, DuckDB and"
            " pyiceberg. A partition is written in one commit, once its vectors are of its descriptions; only"
            " changed partitions are. Materialize it once, and it follows by itself."
        ),
    )
    def described_properties(context: dg.AssetExecutionContext) -> dg.MaterializeResult[None]:
        from vlm_results.described_table import TablePlace, bring_up_to_date

        settings.name_in_commands()
        changed = shown_state(settings)
        table = bring_up_to_date(settings, Catalog.open(settings.home), TablePlace.from_settings(settings))
        for text in table.sentences():
            context.log.warning(text)
        return dg.MaterializeResult(
            metadata={
                "dagster/row_count": table.rows,
                "dagster/table_name": table.table,
                "partitions": table.partitions,
                "written": table.written,
                "waiting for vectors": len(table.waiting),
                "of other types": len(table.other_types),
                "snapshots": table.snapshots,
                "snapshot": dg.MetadataValue.text(str(table.snapshot)),
                "not in it yet": dg.MetadataValue.text(sentence(" ".join(table.sentences()))),
                "changed": dg.MetadataValue.text(changed),
            }
        )

    return described_properties


def shown_state(settings: Settings) -> str:
    """A digest of what the table depends on: publications, and which answers are shown."""
    targets, risk = promised_shares(settings)
    kept = signature_at(settings.state_directory / FILE)
    return digest_of([last_publication(settings.partitioned_assets), targets, risk, kept])


def build_table_sensor(settings: Settings, table: dg.AssetsDefinition) -> dg.SensorDefinition:
    """The sensor that has a table that was begun brought up to date as partitions are published."""
    state = control_state(settings)

    def decide(at: Situation) -> Decided:
        pause = pause_of(state)
        if pause:
            return Decided(f"Nothing is started: {pause.sentence()}.")
        if not has_table(settings):
            return Decided("Nobody has begun the table: materialize described_properties for that.")
        changed = shown_state(settings)
        materialization = at.dagster.latest_materialization(ASSET)
        if materialization is not None and materialization[1].get("changed") == changed:
            return Decided("The table has what is published.")
        last = 0 if materialization is None else materialization[0]
        why = "Partitions were published, or the promise has changed, since the table was written."
        return ask_until_done(at, f"{ASSET} {last:.0f} {changed}", why)

    return build_sensor(
        SENSOR,
        decide,
        interval_seconds=INTERVAL_SECONDS,
        description="Brings the Iceberg table up to date when partitions were published, once it was begun.",
        ticks=Ticks(state, settings.names),
        target=table,
    )
