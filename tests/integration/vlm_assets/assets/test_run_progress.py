"""Paused, what works commits and ends as interrupted, what starts waits, and nothing is lost or failed."""

import socket
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest
from pydantic import SecretStr
from typer.testing import CliRunner

from resources.vision_language_model import VisionLanguageModel
from sensors.dagster_internals.events import DagsterFacts
from tests.support.waiting import wait_until
from vlm_assets.assets.partition_state import committed_rows
from vlm_assets.commands.main import app
from vlm_assets.config.resource_settings import build_vision_language_model, control_state
from vlm_durable.state.nodes import NodeRecord, Nodes, RunLocks
from vlm_durable.state.pause import pause, paused_nodes, resume, resume_node

KEY = "000000000-000000007"

pytestmark = pytest.mark.usefixtures("scripted_engine")

at_first_batch = []
"""What is done when the first batch is described."""


class PausedModel(VisionLanguageModel):
    """A model; something happens while it describes its first batch."""

    def load(self, device, **how):
        engine = super().load(device, **how)
        whole = engine.describe

        def describe(batch, *, attempt):
            while at_first_batch:
                at_first_batch.pop()()
            return whole(batch, attempt=attempt)

        engine.describe = describe
        return engine


@pytest.fixture
def model(desk):
    return PausedModel(**vars(build_vision_language_model(desk.settings)))


def test_a_working_materialization_commits_its_batch_and_ends_as_interrupted(desk, model):
    """The batch under way is committed, nothing is published, and Dagster calls it no failure of a step."""
    state = control_state(desk.settings)
    at_first_batch.append(lambda: pause(state, "the power is cut", now=time.time()))
    ended = desk.materialize(vision_language_model=model)
    assert not ended.success
    assert not ended.published
    assert committed_rows(desk.settings.descriptions, KEY) == 4
    run = DagsterFacts(desk.instance).run_states([ended.result.run_id])[ended.result.run_id]
    assert run.interrupted_by == "UNEXPECTED_TERMINATION"
    resume(state)
    done = desk.materialize()
    assert done.success, done.failure
    assert done.published[0].metadata["restored rows"].value == 4


def test_a_run_on_a_node_that_is_drained_commits_before_the_node_counts_as_free(
    desk, model, postgres_url, monkeypatch
):
    """`vlm-assets devices pause --node` returns when the rows are committed; the run counts as no attempt."""
    monkeypatch.setenv("VLM_ASSETS_STATE_URL", postgres_url)
    on_node = desk.changed(state_url=SecretStr(postgres_url))
    settings, state = on_node.settings, control_state(on_node.settings)
    name, locks, committed = socket.gethostname(), RunLocks(settings.state_directory), []

    def record():
        return NodeRecord(name, "boot", 1, "10.0.0.1", 1, runs=frozenset(locks.living()))

    def drain():
        said = CliRunner().invoke(app, ["devices", "pause", "--node", name, "--home", str(settings.home)])
        committed.append(committed_rows(settings.descriptions, KEY))
        return said

    with ExitStack() as stack, ThreadPoolExecutor() as pool:
        of_run = stack.enter_context(ExitStack())
        of_run.enter_context(locks.held("a-run"))
        stack.enter_context(Nodes(state).beating(record))
        drains = []

        def begin_to_drain():
            drains.append(pool.submit(drain))
            wait_until(lambda: drains[0].done() or name in paused_nodes(state), "the pause", every=0.02)
            assert not drains[0].done(), drains[0].result()

        at_first_batch.append(begin_to_drain)
        ended = on_node.materialize(vision_language_model=model)
        assert not drains[0].done()
        of_run.close()
        drained = drains[0].result(timeout=60)
    assert (drained.exit_code, committed) == (0, [4]), drained.output
    assert not ended.published
    run = DagsterFacts(desk.instance).run_states([ended.result.run_id])[ended.result.run_id]
    assert run.interrupted_by == "UNEXPECTED_TERMINATION"
    assert resume_node(state, name)
    done = on_node.materialize()
    assert done.success, done.failure
    assert done.published[0].metadata["restored rows"].value == 4


def test_a_start_waits_for_the_end_of_the_pause(shared_desk):
    """No queue of a backfill burns: a run waits without a device, and goes on when the pause is lifted."""
    desk, state = shared_desk, control_state(shared_desk.settings)
    pause(state, "", now=time.time())
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(desk.materialize)
        try:
            wait_until(lambda: waiting.done() or desk.waits_without_device(), "the wait")
            assert not waiting.done(), waiting.result().failure
            assert not list((state.directory / "leases").glob("*.lock"))
        finally:
            resume(state)
        done = waiting.result(timeout=120)
    assert done.success, done.failure
