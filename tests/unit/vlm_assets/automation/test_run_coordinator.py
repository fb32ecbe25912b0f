"""Runs enter Dagster's queue ranked by expected cost, whoever launched them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import dagster as dg
import pytest
from dagster._core.remote_origin import (
    RegisteredCodeLocationOrigin,
    RemoteJobOrigin,
    RemoteRepositoryOrigin,
)

from vlm_assets.automation.run_coordinator import HeaviestFirstRunCoordinator
from vlm_assets.config.settings import Settings
from vlm_assets.webserver.home import prepare_dagster_home
from vlm_catalog.catalog import Catalog, catalog_path
from vlm_catalog.catalog_copies import backup_paths

LIGHT, HEAVY, MIDDLE, LAST = (f"{start:09d}-{start + 1:09d}" for start in (0, 2, 4, 6))


@dg.op(config_schema={"recompute": dg.Field(bool, is_required=False)})
def property_descriptions() -> None:
    """Takes the run config of the asset."""


@dg.job
def nothing() -> None:
    """What is queued here is never started."""
    property_descriptions()


# What a queued run must name; asked only when it is started.
ORIGIN = RemoteJobOrigin(
    RemoteRepositoryOrigin(RegisteredCodeLocationOrigin("vlm_assets"), "__repository__"), "nothing"
)


class Queue:
    """A home's own run coordinator, as its dagster.yaml names it."""

    def __init__(self, instance: dg.DagsterInstance) -> None:
        self.instance = instance

    def submit(self, config: dict[str, Any] | None = None, **tags: str) -> dg.DagsterRun:
        """Submit a run as Dagster does, whatever it was launched by. config: of its descriptions."""
        run = self.instance.create_run_for_job(
            nothing,
            run_config={"ops": {"property_descriptions": {"config": config}}} if config else {},
            tags={name.replace("__", "/"): value for name, value in tags.items()},
            remote_job_origin=ORIGIN,
            job_code_origin=dg.reconstructable(nothing).get_python_origin(),
        )
        coordinator = self.instance.run_coordinator
        assert isinstance(coordinator, HeaviestFirstRunCoordinator)
        return coordinator.submit_run(dg.SubmitRunContext(run, workspace=None))

    @property
    def order(self) -> list[str]:
        """Partitions in the order in which Dagster's daemon takes them: by priority, then first come."""
        queued = self.instance.get_runs(dg.RunsFilter(statuses=[dg.DagsterRunStatus.QUEUED]))[::-1]
        ranked = sorted(queued, key=lambda run: int(run.tags.get("dagster/priority", "0")), reverse=True)
        return [run.tags["dagster/partition"] for run in ranked]


@pytest.fixture
def queue(uneven: Settings, monkeypatch: pytest.MonkeyPatch) -> Iterator[Queue]:
    """The queue of the uneven catalogue's home."""
    monkeypatch.setenv("VLM_ASSETS_HOME", str(uneven.home))
    catalog_id = Catalog.open(uneven.home).catalog_id
    prepare_dagster_home(uneven.dagster_home, catalog_id=catalog_id, slots=1)
    with dg.DagsterInstance.from_config(str(uneven.dagster_home)) as instance:
        yield Queue(instance)


def test_partitions_leave_the_queue_heaviest_first_but_for_a_persons_priority(queue: Queue) -> None:
    """Each run says how many images it has before it. Dagster's retry of what we ranked is ranked anew."""
    runs = [queue.submit(dagster__partition=key) for key in (LIGHT, LAST, HEAVY)]
    assert [run.status for run in runs] == [dg.DagsterRunStatus.QUEUED] * 3
    assert [run.tags["vlm_assets/expected_images"] for run in runs] == ["2", "5", "15"]
    retried = queue.submit(
        dagster__partition=MIDDLE, dagster__priority="500", vlm_assets__expected_images="900"
    )
    assert retried.tags["vlm_assets/expected_images"] == "4"
    assert queue.order == [HEAVY, LAST, MIDDLE, LIGHT]
    queue.submit(dagster__partition=LIGHT, dagster__priority="1")
    assert queue.order == [LIGHT, HEAVY, LAST, MIDDLE, LIGHT]


@pytest.mark.usefixtures("published")
def test_a_recomputation_is_ranked_by_what_it_computes(queue: Queue) -> None:
    """What is published has nothing left, but for a run that describes all of it again."""
    anew = {"recompute": True}
    runs = [queue.submit(anew, dagster__partition=key) for key in (LIGHT, MIDDLE, HEAVY)]
    assert [run.tags["vlm_assets/expected_images"] for run in runs] == ["2", "4", "15"]
    verified = queue.submit({"recompute": False}, dagster__partition=LAST)
    assert verified.tags["vlm_assets/expected_images"] == "0"
    assert queue.order == [HEAVY, MIDDLE, LIGHT, LAST]


def test_a_run_is_queued_whatever_cannot_be_read(
    queue: Queue, uneven: Settings, caplog: pytest.LogCaptureFixture
) -> None:
    """Without a partition, of an unknown one, or with the catalogue damaged: queued, in plain order."""
    assert queue.submit().status is dg.DagsterRunStatus.QUEUED
    assert queue.submit(dagster__partition="unknown").status is dg.DagsterRunStatus.QUEUED
    for path in (catalog_path(uneven.home), backup_paths(uneven.home)[0]):
        path.write_bytes(b"not parquet")
    damaged = queue.submit(dagster__partition=HEAVY)
    assert damaged.status is dg.DagsterRunStatus.QUEUED
    assert "dagster/priority" not in damaged.tags
    assert "plain order" in caplog.text
    assert str(catalog_path(uneven.home)) in caplog.text
