"""How partitions stand, a look at a time, is what Dagster says of them."""

import dagster as dg
import sqlalchemy as db
from dagster._core.storage.event_log.schema import SqlEventLogStorageTable

from sensors.alerts import new_evaluations
from sensors.dagster_internals.events import DagsterFacts
from sensors.partition_history import PartitionHistory


def evaluate(orchestrator, key, passed, severity=dg.AssetCheckSeverity.ERROR):
    orchestrator.dagster.report_evaluation(
        dg.AssetCheckEvaluation(
            asset_key=dg.AssetKey("first"),
            check_name="file",
            passed=passed,
            metadata={"found": dg.MetadataValue.int(7)},
            severity=severity,
            partition=key,
        ),
    )


def test_a_look_that_reads_on_says_what_a_first_look_says(orchestrator):
    """Whatever happened in between: attempts, materializations and failed checks are the same."""
    kept = PartitionHistory(["first", "second"])
    for step in (
        lambda: orchestrator.materialize("a"),
        lambda: evaluate(orchestrator, "a", passed=False),
        lambda: orchestrator.behaviour.of_key.update(b="fail"),
        lambda: orchestrator.materialize("b"),
        lambda: evaluate(orchestrator, "b", passed=False, severity=dg.AssetCheckSeverity.WARN),
        lambda: evaluate(orchestrator, "c", passed=False),
        lambda: evaluate(orchestrator, "c", passed=True),
        lambda: evaluate(orchestrator, "d", passed=False),
        lambda: orchestrator.materialize("d"),
        lambda: orchestrator.created("d"),
    ):
        step()
        kept.update(orchestrator.dagster)
        fresh = PartitionHistory(["first", "second"])
        fresh.update(orchestrator.dagster)
        assert kept.open_attempts == fresh.open_attempts
        assert kept.materialized == fresh.materialized
        assert {key: [one.check for one in each] for key, each in kept.failing("first").items()} == {
            key: [one.check for one in each] for key, each in fresh.failing("first").items()
        }
    assert set(kept.failing("first")) == {"a"}
    assert set(kept.open_attempts["first"]) == {"b", "d"}


def test_a_check_that_was_only_planned_hides_no_failure(orchestrator):
    """A run that ended before its checks leaves them planned for ever: the result before it stands."""
    orchestrator.behaviour.of_key["a"] = "check"
    orchestrator.materialize("a")
    orchestrator.created("a")
    first = PartitionHistory(["first"])
    first.update(orchestrator.dagster)
    assert set(first.failing("first")) == {"a"}


def test_a_result_that_cannot_be_read_hides_no_other(orchestrator):
    """A row of the database is damaged: all that come after it count."""
    kept = PartitionHistory(["first"])
    evaluate(orchestrator, "a", passed=True)
    kept.update(orchestrator.dagster)
    cursor = orchestrator.dagster.newest_evaluation()
    for key in ("b", "c", "d", "e", "f"):
        evaluate(orchestrator, key, passed=False)
    events = SqlEventLogStorageTable
    with orchestrator.instance.event_log_storage.index_connection() as connection:
        of_b = db.select(db.func.min(events.c.id)).where(events.c.id > cursor).scalar_subquery()
        connection.execute(events.update().where(events.c.id == of_b).values(event="{"))
        connection.commit()
    kept.update(orchestrator.dagster)
    assert set(kept.failing("first")) == {"c", "d", "e", "f"}
    found, _ = new_evaluations(DagsterFacts(orchestrator.instance), cursor, {})
    assert {one.partition for one in found if not one.passed} == {"c", "d", "e", "f"}
