"""A small example, rendered once, and homes over it; the example model describes what it really sees."""

import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from dagster._core.storage import event_log, runs

from examples import rendered_properties
from resources.gpu import GpuResource
from resources.vision_language_model import VisionLanguageModel
from vlm_assets.config.question_sets import config_of_runs
from vlm_assets.config.settings import Settings, load_settings
from vlm_assets.home_definitions import build_defs
from vlm_catalog.catalog import Catalog
from vlm_catalog.ingest import ingest
from vlm_durable.files.layout import PartitionPaths

KEY = "000000000-000000007"


@pytest.fixture(scope="session")
def listing(tmp_path_factory) -> Path:
    """Sixteen rendered properties, a few of them hard. Processes that render would cost as much again."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rendered_properties, "ProcessPoolExecutor", lambda *_, **__: ThreadPoolExecutor(1))
        return rendered_properties.write_example(tmp_path_factory.mktemp("example"), properties=16, seed=7)


@dataclass
class Materialized:
    """What a run did: its result, and its check evaluations by name."""

    result: dg.ExecuteInProcessResult

    @property
    def success(self) -> bool:
        return self.result.success

    @property
    def published(self) -> list[dg.AssetMaterialization]:
        return self.result.asset_materializations_for_node("property_descriptions")

    @property
    def checks(self) -> dict[str, dg.AssetCheckEvaluation]:
        return {one.check_name: one for one in self.result.get_asset_check_evaluations()}

    @property
    def failure(self) -> str:
        """The sentence that a person reads on the failed run's page."""
        events = [event for event in self.result.all_events if event.is_step_failure]
        data = events[-1].step_failure_data
        return data.user_failure_data.description if data.user_failure_data else data.error.to_string()


def ephemeral() -> dg.DagsterInstance:
    """An instance in memory. It does not note at which migration it is: Dagster loads 89 of them for that."""
    with pytest.MonkeyPatch.context() as patched:
        for storage in (event_log.in_memory, runs.in_memory):
            patched.setattr(storage, "stamp_alembic_rev", lambda *_: None)
        return dg.DagsterInstance.ephemeral()


@dataclass
class Desk:
    """A home with its Dagster instance: what a person has in front of them."""

    settings: Settings
    instance: dg.DagsterInstance = field(default_factory=ephemeral)

    def materialize(
        self,
        *assets: str,
        key: str = KEY,
        config: dict | None = None,
        config_of: tuple[str, ...] = (),
        tags: dict | None = None,
        **overrides,
    ) -> Materialized:
        """Materialize assets of one partition in this process, as a run of Dagster's.

        config_of: the assets that the config is for; all by default.
        """
        names = assets or ("property_descriptions",)
        defs = build_defs(self.settings, resource_overrides=overrides)
        options = dict.fromkeys(config_of or names, config) if config else {}
        run_config = config_of_runs(self.settings, options)
        result = dg.materialize(
            defs.assets,
            selection=list(names),
            partition_key=key,
            instance=self.instance,
            resources=defs.resources,
            run_config=run_config,
            tags=tags,
            raise_on_error=False,
        )
        return Materialized(result)

    def changed(self, **settings) -> "Desk":
        """The same home under other settings."""
        return Desk(self.settings.model_copy(update=settings), self.instance)

    def waits_without_device(self) -> bool:
        """Whether a run that is started says that it waits."""
        started = self.instance.get_runs(dg.RunsFilter(statuses=[dg.DagsterRunStatus.STARTED]))
        logs = [entry.message for run in started for entry in self.instance.all_logs(run.run_id)]
        return any("Waiting, without a device" in message for message in logs)

    @property
    def paths(self) -> PartitionPaths:
        return self.settings.descriptions.partition(KEY)

    @property
    def file(self) -> Path:
        return self.paths.published


class NoDevice(GpuResource):
    """A GPU resource that must not be asked for a device."""

    def lease(self, **_):
        raise AssertionError("a device was asked for")


class ImagesAway:
    """Takes images of properties of the first range away. ids: of those properties."""

    def __init__(self, settings: Settings) -> None:
        catalog = Catalog.open(settings.home)
        rows = catalog.slice(catalog.ranges[0]).to_pylist()
        self._folders = {row["property_id"]: catalog.image_path(row["image_uris"][0]).parent for row in rows}
        self.ids = list(self._folders)

    def take(self, *ids: str) -> None:
        for property_id in ids:
            self._folders[property_id].rename(f"{self._folders[property_id]}.away")

    def put_back(self, *ids: str) -> None:
        for property_id in ids:
            with suppress(FileNotFoundError):
                Path(f"{self._folders[property_id]}.away").rename(self._folders[property_id])


def settings_of(home: Path, **more: Any) -> Settings:
    return load_settings(home=home, devices="cpu:1", batch_size=4, decode_workers=1, **more)


@pytest.fixture(scope="session")
def published_home(listing, tmp_path_factory) -> Callable[..., Path]:
    """A home whose first range has these assets published, made once a kind of model; it may be copied."""

    @cache
    def made(assets: tuple[str, ...], load: Callable[..., Any]) -> Path:
        home = tmp_path_factory.mktemp("published") / "home"
        ingest(listing, home, range_size=8)
        done = Desk(settings_of(home)).materialize(*assets)
        assert done.success, done.failure
        return home

    # A test with scripted models gets no answers of a real one, nor the other way round.
    return lambda *assets: made(assets, VisionLanguageModel.load)


@pytest.fixture
def desk(listing, tmp_path, request, published_home, warm_workers) -> Desk:
    """A home over the example: two ranges of eight, and what the mark ``published`` names of the first."""
    home = tmp_path / "home"
    if published := request.node.get_closest_marker("published"):
        shutil.copytree(published_home(*published.args), home)
    else:
        ingest(listing, home, range_size=8)
    return Desk(settings_of(home))


@pytest.fixture
def no_device(desk) -> NoDevice:
    return NoDevice(leases_directory=str(desk.settings.state_directory / "leases"), devices="cpu:1")


@pytest.fixture
def images_away(desk) -> Iterator[ImagesAway]:
    """They are back at the end, for all tests have the same."""
    away = ImagesAway(desk.settings)
    yield away
    away.put_back(*away.ids)


@pytest.fixture
def shared_desk(desk, tmp_path):
    """The desk with its instance on disk: two threads at once lock each other out of one in memory."""
    (tmp_path / "dagster").mkdir()
    with dg.DagsterInstance.local_temp(str(tmp_path / "dagster")) as instance:
        yield replace(desk, instance=instance)


@pytest.fixture
def machines(desk, bucket, tmp_path):
    """Two machines with homes of their own; the first one has the catalogue."""
    first = desk.changed(store=bucket, device_wait_seconds=0.1)
    second = first.changed(home=tmp_path / "second")
    return first, replace(second, instance=ephemeral())
