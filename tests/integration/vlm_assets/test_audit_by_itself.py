"""What an audit or a cancelled run left on the pages is put right without a person."""

import dagster as dg
import pytest

from resources.alerts.outbox import Outbox
from sensors.dagster_internals.events import DagsterFacts
from sensors.reconciliation import restore_results_of_cancelled
from vlm_assets.automation import dataset_audit
from vlm_assets.home_definitions import build_defs
from vlm_assets.services.home_audit import audit as look
from vlm_assets.services.repairs import find_repairs, put_right
from vlm_catalog.catalog import Catalog
from vlm_durable.state.database import open_state

KEY = "000000000-000000007"

pytestmark = pytest.mark.usefixtures("scripted_engine")


@pytest.fixture
def ticked(shared_desk):
    """Ticks of a sensor of these definitions, each with the cursor of the one before."""
    cursors = {}

    def tick(name):
        defs = build_defs(shared_desk.settings)
        context = dg.build_sensor_context(
            instance=shared_desk.instance, cursor=cursors.get(name), definitions=defs
        )
        done = defs.get_sensor_def(name).evaluate_tick(context)
        cursors[name] = done.cursor
        return list(done.run_requests or ())

    return tick


def audit(desk):
    """The audit as a run, which a tick asked for."""
    defs = build_defs(desk.settings)
    wanted = [one for one in defs.assets if dg.AssetKey("dataset_audit") in one.keys]
    return dg.materialize(wanted, instance=desk.instance, resources=defs.resources, raise_on_error=False)


def test_alert_of_a_fault_closes_after_the_repair(shared_desk, ticked, monkeypatch):
    """The audit runs again an hour after one that found a fault, and the alert of the fault is over."""
    desk = shared_desk
    assert ticked("dataset_audit_due") == [], "there is nothing to audit yet"
    assert desk.materialize().success
    assert len(ticked("dataset_audit_due")) == 1, "what was never audited is audited"
    copy = desk.settings.descriptions.partition(KEY).version(0)
    copy.write_bytes(copy.read_bytes()[:-10])
    audit(desk)
    ticked("alerts")
    outbox = Outbox(open_state(desk.settings.state_directory))
    assert "dataset_audit/conserved" in outbox.open_subjects()
    assert ticked("dataset_audit_due") == []
    # Not the command: this process holds its device still, and the command leaves the partition to it.
    for one in find_repairs(desk.settings, look(desk.settings, Catalog.open(desk.settings.home))):
        put_right(desk.settings, one)
    assert ticked("dataset_audit_due") == []
    with monkeypatch.context() as later:
        later.setattr(dataset_audit, "AGAIN_SECONDS", 0.001)
        assert len(ticked("dataset_audit_due")) == 1
    audit(desk)
    ticked("alerts")
    assert "dataset_audit/conserved" not in outbox.open_subjects()
    assert ticked("dataset_audit_due") == []


def test_a_cancelled_run_leaves_the_checks_of_a_finished_partition_as_they_were(shared_desk):
    """A run that was cancelled before its checks hides what they said; it is shown again, and only once."""
    desk = shared_desk
    assert desk.materialize().success
    defs = build_defs(desk.settings)
    job = defs.resolve_implicit_global_asset_job_def()
    run = desk.instance.create_run_for_job(
        job_def=job.get_subset(asset_selection={dg.AssetKey("property_descriptions")}),
        tags={"dagster/partition": KEY},
        status=dg.DagsterRunStatus.STARTED,
    )
    desk.instance.report_run_canceled(run)
    check = dg.AssetCheckKey(dg.AssetKey("property_descriptions"), "ids_conserved")

    def shown():
        storage = desk.instance.event_log_storage
        (latest,) = storage.get_asset_check_execution_history(check, limit=1)
        return latest.status.value

    assert shown() == "PLANNED"
    handled = set()
    restored = restore_results_of_cancelled(DagsterFacts(desk.instance), handled, now=run_time(desk, run))
    assert ("property_descriptions", "ids_conserved", KEY) in restored
    assert shown() == "SUCCEEDED"
    assert restore_results_of_cancelled(DagsterFacts(desk.instance), handled, now=run_time(desk, run)) == []
    assert restore_results_of_cancelled(DagsterFacts(desk.instance), set(), now=run_time(desk, run)) == []


def run_time(desk, run):
    """When Dagster says that the run ended."""
    return desk.instance.get_run_record_by_id(run.run_id).update_timestamp.timestamp()
