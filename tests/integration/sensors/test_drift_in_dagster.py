"""What the drift sensor tells a real instance: a failing check of the partition, and its end."""

from __future__ import annotations

import dagster as dg
import pytest

from sensors.alerts import alert_of
from sensors.dagster_internals.events import DagsterFacts
from sensors.partition_history import PartitionHistory
from sensors.published_file_drift import evaluation
from vlm_durable.versions.findings import Finding, FindingKind
from vlm_durable.versions.partition_files import PUBLISHED_FILE
from vlm_durable.versions.published import Verification

PARTITIONS = dg.StaticPartitionsDefinition(["k0", "k1"])
DAMAGED = Verification(
    "k1", None, (Finding(FindingKind.TRUNCATED, "a", "k1", "a truncated file.", "Materialize it."),)
)
STALE = Verification("k0", None, (Finding(FindingKind.STALE, "a", "k0", "others.", "By hand."),))
SOUND = Verification("k1", None)
AT = 1_790_000_000.25


@pytest.fixture
def instance():
    with dg.DagsterInstance.local_temp() as instance:
        for key in PARTITIONS.get_partition_keys():
            instance.report_runless_asset_event(dg.AssetMaterialization("a", partition=key))
        yield instance


def failing(instance):
    history = PartitionHistory(["a"])
    history.update(DagsterFacts(instance))
    return {
        key: [(one.check, one.severity, one.metadata["found"]) for one in found]
        for key, found in history.failing("a").items()
    }


def test_a_verdict_is_a_check_result_of_its_partition(instance):
    """Told as it is, by partition: an ERROR fails it, a WARN does not, and a sound look ends both."""
    DagsterFacts(instance).report_evaluation(evaluation("a", "k1", DAMAGED, AT))
    assert failing(instance) == {"k1": [(PUBLISHED_FILE, "ERROR", "a truncated file.")]}
    DagsterFacts(instance).report_evaluation(evaluation("a", "k0", STALE, AT))
    assert set(failing(instance)) == {"k1"}
    DagsterFacts(instance).report_evaluation(evaluation("a", "k1", SOUND, AT))
    assert failing(instance) == {}
    DagsterFacts(instance).report_evaluation(evaluation("a", "k1", DAMAGED, AT))
    assert set(failing(instance)) == {"k1"}, "Dagster itself takes only one such result a partition"


def test_a_verdict_that_is_told_twice_is_one_alert(instance):
    """A tick that died after telling tells it again; found another time it is another alert."""
    for at in (AT, AT, AT + 60):
        DagsterFacts(instance).report_evaluation(evaluation("a", "k1", DAMAGED, at))
    found, _ = DagsterFacts(instance).evaluations_since(0)
    first, again, later = [alert_of(one).id for one in found]
    assert first == again != later
