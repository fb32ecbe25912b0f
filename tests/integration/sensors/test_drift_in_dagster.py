"""What the drift sensor tells a real instance: a failing check of the partition, and its end."""

from __future__ import annotations

import dagster as dg
import pytest

from sensors.dagster_history import PartitionHistory, report_evaluation
from sensors.row_count_drift import CHECK, Verdict, evaluation

PARTITIONS = dg.StaticPartitionsDefinition(["k0", "k1"])
DAMAGED = Verdict("truncated", "ERROR", "3 rows", "a truncated file.", "Materialize it.")
STALE = Verdict("stale", "WARN", "today's settings", "others.", "By hand.")
SOUND = Verdict("sound", None, "3 rows", "3 rows.")


@pytest.fixture
def instance():
    with dg.DagsterInstance.local_temp() as instance:
        for key in PARTITIONS.get_partition_keys():
            instance.report_runless_asset_event(dg.AssetMaterialization("a", partition=key))
        yield instance


def failing(instance):
    history = PartitionHistory(["a"])
    history.look(instance)
    return {
        key: [(one.check, one.severity, one.metadata["found"]) for one in found]
        for key, found in history.failing("a").items()
    }


def test_a_verdict_is_a_check_result_of_its_partition(instance):
    """Told as it is, by partition: an ERROR fails it, a WARN does not, and a sound look ends both."""
    report_evaluation(instance, evaluation("a", "k1", DAMAGED))
    assert failing(instance) == {"k1": [(CHECK, "ERROR", "a truncated file.")]}
    report_evaluation(instance, evaluation("a", "k0", STALE))
    assert set(failing(instance)) == {"k1"}
    report_evaluation(instance, evaluation("a", "k1", SOUND))
    assert failing(instance) == {}
    report_evaluation(instance, evaluation("a", "k1", DAMAGED))
    assert set(failing(instance)) == {"k1"}, "Dagster itself takes only one such result a partition"
