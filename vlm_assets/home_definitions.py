"""Everything meets here: settings, catalogue, assets, checks and resources become one set of definitions.

Loaded by every process of a run, so nothing here imports torch or transformers. The caller says which
settings they are: ``definitions.py`` reads them from the environment, ``component.py`` from a defs.yaml.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path

import dagster as dg
import sqlalchemy as sa

from vlm_assets.assets import property_catalog as catalog_asset
from vlm_assets.assets.property_catalog import build_property_catalog, first_ingest
from vlm_assets.assets.property_descriptions import build_described_assets
from vlm_assets.assets.property_embeddings import build_property_embeddings
from vlm_assets.automation.dataset_audit import build_audit_sensor, build_dataset_audit
from vlm_assets.automation.dataset_plan import build_dataset_plan
from vlm_assets.automation.dataset_progress import build_dataset_progress, build_progress_sensor
from vlm_assets.automation.retries import build_retries
from vlm_assets.automation.sensors import build_alerts, build_sensors
from vlm_assets.config.extensions import installed
from vlm_assets.config.question_sets import joined_sets
from vlm_assets.config.resource_settings import build_resources, control_state, fixed
from vlm_assets.config.settings import Settings, SettingsError
from vlm_assets.webserver.home import claim_for_catalog
from vlm_catalog.catalog import Catalog, CatalogMissingError, catalog_path
from vlm_catalog.ranges import PropertyRange
from vlm_catalog.stored_catalog import pull_catalog
from vlm_durable.mirror.bucket import StoreAwayError
from vlm_durable.state import tables
from vlm_durable.state.sqlite_file import ControlStateError

_log = logging.getLogger(__name__)


def build_defs(
    settings: Settings, *, resource_overrides: Mapping[str, object] | None = None
) -> dg.Definitions:
    """All definitions for these settings. Raises CatalogUnreadableError; a missing catalogue has no ranges.

    resource_overrides: resources by key, in place of the ones made from the settings.
    """
    names, ranges = settings.names, _ranges(settings)
    resources = {**build_resources(settings), **(resource_overrides or {})}
    partitions = dg.StaticPartitionsDefinition([property_range.key for property_range in ranges])
    watched = build_sensors(settings, partitions.get_partition_keys())
    retrying = build_retries(settings, partitions)
    watched.append(retrying.sensor)
    progress = build_dataset_progress(settings)
    watched.append(build_progress_sensor(settings, progress))
    audit = build_dataset_audit(settings, audited=[asset.name for asset in settings.partitioned_assets])
    watched.append(build_audit_sensor(settings, audit))
    extending = [extension.definitions(settings) for extension in installed()]
    extension_sensors = [sensor for definitions in extending for sensor in definitions.sensors or ()]
    ticking = {retrying.schedule.name: settings.retry_every_minutes * 60.0}
    core = dg.Definitions(
        assets=[
            build_property_catalog(settings),
            *(
                build_described_assets(settings, sets, partitions, upstream=catalog_asset.ASSET)
                for sets in joined_sets(settings)
            ),
            build_property_embeddings(settings, partitions),
            audit,
            progress,
            build_dataset_plan(settings),
        ],
        jobs=[*retrying.jobs],
        schedules=[retrying.schedule],
        sensors=[*watched, build_alerts(settings, [*watched, *extension_sensors], schedules=ticking)],
        # One process a run: the device is leased by the process, and both assets of a partition share it. In
        # somebody else's project the executor is theirs.
        executor=None if names.prefix else dg.in_process_executor,
        resources=fixed({names.name(key): resource for key, resource in resources.items()}),
    )
    return dg.Definitions.merge(core, *extending)


def _ranges(settings: Settings) -> tuple[PropertyRange, ...]:
    try:
        pull_catalog(settings.home, settings.mirror)
    except StoreAwayError as error:
        _log.warning("The catalogue of this home is shown as it was: %s", error)
    try:
        return Catalog.open(settings.home).ranges
    except CatalogMissingError as error:
        # The catalogue's own asset must be there to be materialized, so this is no error yet.
        _log.warning("%s", " ".join(first_ingest(settings)) if settings.names.prefix else error)
        return ()


def claim_control_state(settings: Settings) -> None:
    """Note whose control state the database of STATE_URL keeps; refuse that of another catalogue.

    Partition keys are alike in all catalogues: one home's pauses, cancels and attempts would be another's.
    Raises SettingsError.
    """
    if settings.state_url is None or not catalog_path(settings.home).exists():
        return
    own = Catalog.open(settings.home).catalog_id

    def claim(connection: sa.Connection) -> str:
        owner = tables.text_of(connection, tables.CATALOG_ID)
        if owner is None:
            connection.execute(tables.meta.insert().values(name=tables.CATALOG_ID, value=own))
        return owner or own

    try:
        owner = control_state(settings).write(claim)
    except ControlStateError as error:
        _log.warning("Whether another home has this control state is not known: %s", error)
        return
    if owner != own:
        raise SettingsError(
            f"The database of VLM_ASSETS_STATE_URL is the control state of catalogue {owner}, and the"
            f" catalogue of {settings.home} is {own}. Nothing was changed. Give each home a database of its"
            " own; a catalogue that was begun anew needs an empty one."
        )


def check_dagster_home(settings: Settings) -> None:
    """Refuse a DAGSTER_HOME of another catalogue; warn where none is set, if it is ours to set.

    Raises DagsterHomeError.
    """
    dagster_home = os.environ.get("DAGSTER_HOME")
    if not dagster_home:
        if settings.names.prefix:
            return
        _log.warning(
            "DAGSTER_HOME is not set, so Dagster forgets this run when it ends. The results are kept in %s."
            " To keep the history too: export DAGSTER_HOME=%s",
            settings.home,
            settings.dagster_home,
        )
    elif Path(dagster_home).is_dir() and catalog_path(settings.home).exists():
        claim_for_catalog(Path(dagster_home), Catalog.open(settings.home).catalog_id, settings.names)
