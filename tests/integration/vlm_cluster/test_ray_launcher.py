"""Which runs go to Ray, with what command, and what happens where Ray or the nodes are away.

Real are Dagster's settings of a cluster and Postgres; Ray's job server is recorded here, and real in
``make cluster-demo``.
"""

import json
from types import SimpleNamespace

import dagster as dg
import pytest
from dagster._core.storage.dagster_run import DagsterRunStatus

from sensors.dagster_internals.launchers import (
    DagsterUserCodeUnreachableError,
    DefaultRunLauncher,
    LaunchRunContext,
    job_launcher_of,
)
from sensors.dagster_internals.runs import LAUNCHER_JOB
from vlm_assets.webserver.home import seed_settings
from vlm_cluster.cluster_launcher import filled_in
from vlm_cluster.ray_launcher import ClusterRunLauncher
from vlm_durable.mirror.bucket import S3Folder
from vlm_durable.state import tables
from vlm_durable.state.database import open_state
from vlm_durable.state.nodes import SILENT_SECONDS, NodeRecord, Nodes
from vlm_durable.state.pause import pause_node, resume_node

PARTITION = {"dagster/partition": "000000000-000000009"}


class Jobs:
    """What Ray was asked."""

    def __init__(self):
        self.submitted, self.statuses, self.fails = [], {}, None

    def get_job_status(self, job):
        if self.fails is not None:
            raise self.fails
        if job not in self.statuses:
            raise RuntimeError("Request failed with status code 404: no such job")
        return SimpleNamespace(value=self.statuses[job])

    def submit_job(self, **asked):
        self.submitted.append(asked)
        self.statuses[asked["submission_id"]] = "PENDING"


@dg.asset(partitions_def=dg.StaticPartitionsDefinition([PARTITION["dagster/partition"]]))
def described(): ...


@pytest.fixture
def cluster(tmp_path, postgres_url, monkeypatch):
    """An instance with the settings that a cluster's home gets, its launcher, nodes, and Ray's recorder."""
    monkeypatch.setenv("VLM_ASSETS_STATE_URL", postgres_url)
    monkeypatch.setenv("VLM_ASSETS_RAY_ADDRESS", "http://10.0.0.1:8265")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    home = tmp_path / "dagster"
    seed_settings(home, filled_in(S3Folder.parse("s3://bucket/data"), devices_of_a_run=2))
    nodes = Nodes(open_state(tmp_path, postgres_url))
    for name in ("one", "two"):
        assert nodes.beat(NodeRecord(name, "boot", 1, "10.0.0.2", 1))
        assert not nodes.beat(NodeRecord(name, "another machine's", 1, "10.0.0.3", 1))
    with dg.DagsterInstance.from_config(str(home)) as instance:
        launcher = instance.run_launcher
        jobs = launcher.__dict__["client"] = Jobs()
        yield SimpleNamespace(instance=instance, launcher=launcher, jobs=jobs, nodes=nodes)


def launch(cluster, tags, *, assets=("described",)):
    """Launch a run as Dagster's queue does; gives it as it stands afterwards."""
    job = dg.Definitions(assets=[described]).get_implicit_global_asset_job_def()
    run = cluster.instance.create_run_for_job(
        job,
        tags=tags,
        status=DagsterRunStatus.STARTING,
        asset_selection=frozenset(map(dg.AssetKey, assets)),
        job_code_origin=dg.reconstructable(_a_job).get_python_origin(),
    )
    cluster.launcher.launch_run(LaunchRunContext(dagster_run=run, workspace=None))
    return cluster.instance.get_run_by_id(run.run_id)


@dg.job
def _a_job(): ...


def test_a_partition_goes_to_nodes_that_beat_and_no_secret_goes_with_it(cluster, postgres_url):
    """Ray shows command, environment and metadata to whoever reaches its dashboard."""
    run = launch(cluster, PARTITION)
    (asked,) = cluster.jobs.submitted
    assert run.tags[LAUNCHER_JOB] == asked["submission_id"]
    assert asked["entrypoint_num_gpus"] == 2
    assert asked["entrypoint_label_selector"] == {"vlm-assets/node": "in(one,two)"}
    password = postgres_url.split(":")[2].partition("@")[0]
    assert len(password) > 5
    assert password not in json.dumps(asked)
    assert "runtime_env" not in asked
    assert "-u OMP_NUM_THREADS" in asked["entrypoint"]


def test_options_in_a_runs_tags_are_ignored(cluster):
    """Whoever may submit a run may not choose commands, environments or devices of a node."""
    options = {"num_gpus": 9, "runtime_env": {"env_vars": {"LD_PRELOAD": "x"}}, "env_vars": ["A=B"]}
    launch(cluster, {**PARTITION, "dagster-ray/config": json.dumps(options)})
    (asked,) = cluster.jobs.submitted
    assert asked["entrypoint_num_gpus"] == 2
    said = json.dumps(asked)
    assert not [one for one in ("LD_PRELOAD", "runtime_env", "A=B", "dagster-ray/config") if one in said]


def test_what_has_no_partition_stays_on_this_machine_without_a_device(cluster, monkeypatch):
    """The picture, the audit and the catalogue need what is here, and no GPU."""
    here = []
    monkeypatch.setattr(DefaultRunLauncher, "launch_run", lambda _, context: here.append(context))
    launch(cluster, {})
    assert len(here) == 1
    assert not cluster.jobs.submitted


def test_a_paused_node_is_given_nothing(cluster, tmp_path, postgres_url):
    """It is drained; without any other node the run waits in the queue, and is no failed one."""
    state = open_state(tmp_path, postgres_url)
    pause_node(state, "one", "", now=1.0)
    try:
        launch(cluster, PARTITION)
        assert cluster.jobs.submitted[0]["entrypoint_label_selector"] == {"vlm-assets/node": "in(two)"}
        pause_node(state, "two", "", now=1.0)
        with pytest.raises(DagsterUserCodeUnreachableError, match="waits in the queue"):
            launch(cluster, PARTITION)
    finally:
        resume_node(state, "one")
        resume_node(state, "two")


def test_a_silent_node_is_given_nothing(cluster, tmp_path, postgres_url):
    """In a trial the next run went to the dead node: one that missed some beats gets none."""
    state = open_state(tmp_path, postgres_url)

    def silence(name):
        aged = tables.nodes.update().where(tables.nodes.c.name == name)
        aged = aged.values(beat_at=tables.nodes.c.beat_at - SILENT_SECONDS - 1.0)
        state.beat(lambda connection: connection.execute(aged))

    silence("one")
    assert not cluster.nodes.snapshot().nodes["one"].is_dead
    launch(cluster, PARTITION)
    assert cluster.jobs.submitted[0]["entrypoint_label_selector"] == {"vlm-assets/node": "in(two)"}
    silence("two")
    with pytest.raises(DagsterUserCodeUnreachableError, match=r"two silent for \d+ s: it is given no run"):
        launch(cluster, PARTITION)
    assert len(cluster.jobs.submitted) == 1


def test_a_run_waits_in_the_queue_while_ray_is_away(cluster):
    """A head that is restarted in mid-backfill ends no run and costs no attempt."""
    cluster.jobs.fails = ConnectionError("refused")
    with pytest.raises(DagsterUserCodeUnreachableError, match="waits in the queue"):
        launch(cluster, PARTITION)
    queue = cluster.instance.run_coordinator.get_run_queue_config()
    assert queue.max_user_code_failure_retries > 100_000


def test_a_run_that_is_launched_again_has_one_job_that_lives(cluster):
    """Ray took it, and the answer was lost; or its job has ended before it began."""
    run = launch(cluster, PARTITION)
    context = LaunchRunContext(dagster_run=run, workspace=None)
    cluster.launcher.launch_run(context)
    assert len(cluster.jobs.submitted) == 1
    cluster.jobs.statuses[run.tags[LAUNCHER_JOB]] = "FAILED"
    cluster.launcher.launch_run(context)
    assert [asked["submission_id"] for asked in cluster.jobs.submitted] == [
        f"dagster-run-{run.run_id}",
        f"dagster-run-{run.run_id}-2",
    ]


def test_a_run_whose_launch_is_killed_is_known_as_rays(cluster):
    """A run that works, with no tag and on no node that beats, counts as started by hand: nobody ends it."""

    def killed(**asked):
        raise SystemExit

    cluster.jobs.submit_job = killed
    with pytest.raises(SystemExit):
        launch(cluster, PARTITION)
    (run,) = cluster.instance.get_runs()
    assert run.tags[LAUNCHER_JOB] == f"dagster-run-{run.run_id}"


def test_a_cancel_stops_the_job_of_its_own_run_alone(cluster):
    """A tag that the parent left, or a person chose, names another run's job."""
    run = launch(cluster, PARTITION)
    own, stopped = run.tags[LAUNCHER_JOB], []
    cluster.jobs.stop_job = lambda job: stopped.append(job) or True
    cluster.instance.add_run_tags(run.run_id, {LAUNCHER_JOB: "dagster-run-another"})
    assert cluster.launcher.terminate(run.run_id)
    assert stopped == [own]


def test_dagsters_monitoring_has_no_say_in_who_lives(cluster):
    """A restarted head made Dagster fail runs that lived: heartbeats alone decide."""
    assert isinstance(cluster.launcher, ClusterRunLauncher)
    assert job_launcher_of(cluster.instance) is cluster.launcher
    assert not cluster.launcher.supports_check_run_worker_health
    assert cluster.instance.run_monitoring_start_timeout_seconds > 10_000_000
    assert not cluster.launcher.has_ended("unknown to Ray")
    cluster.jobs.fails = ConnectionError("refused")
    assert not cluster.launcher.has_ended("dagster-run-x")
