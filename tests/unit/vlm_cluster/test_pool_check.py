"""The doctor's check of a cluster: as many runs may work at once as the nodes hold."""

from pathlib import Path

import pytest

from vlm_assets.config.resource_settings import control_state
from vlm_assets.config.settings import Settings
from vlm_assets.services.doctor import machine_checks
from vlm_assets.webserver import home
from vlm_assets.webserver.api import DagsterApi, Queue
from vlm_cluster.cluster_extension import ClusterExtension, ClusterSettings
from vlm_durable.state.nodes import NodeRecord, Nodes

examine_pool = ClusterExtension().examine_pool


@pytest.fixture
def clustered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    """The settings of a head whose Dagster runs and lets three runs work at once."""
    monkeypatch.setattr(home, "running_address", lambda _: "http://127.0.0.1:1")
    monkeypatch.setattr(DagsterApi, "queue", lambda api, pool: Queue(2, 1, 3, {}))
    return ClusterSettings.model_construct(home=tmp_path, ray_address="http://127.0.0.1:8265")


def test_in_a_cluster_as_many_runs_may_work_as_its_nodes_hold(clustered: Settings) -> None:
    """The head's own devices say nothing of the pool: a sound cluster is not warned of."""
    assert [level for level, _ in examine_pool(clustered)] == ["warning"], "no node beats yet"
    Nodes(control_state(clustered)).beat(NodeRecord("n1", "b", 1, "10.0.0.2", slots=3))
    ((level, message),) = examine_pool(clustered)
    assert level == "ok"
    assert "lets 3 work at once" in message


def test_one_machine_is_none_of_its_business(clustered: Settings) -> None:
    """Without Ray the core compares the pool with the devices of this machine."""
    assert list(examine_pool(clustered.model_copy(update={"ray_address": None}))) == []


def test_the_core_leaves_the_pool_of_a_cluster_to_this_check(clustered: Settings, monkeypatch) -> None:
    """Else every sound cluster is told to start Dagster again, because the head has fewer devices."""
    monkeypatch.setattr(machine_checks, "running_address", lambda _: "http://127.0.0.1:1")
    monkeypatch.setattr(DagsterApi, "definitions_loaded", lambda api: True)
    assert [level for level, _ in machine_checks.examine_dagster(clustered)] == ["ok"]
    alone = clustered.model_copy(update={"ray_address": None})
    assert len(list(machine_checks.examine_dagster(alone))) == 2
