"""What a person reads of partitions whose last run did not end well."""

import time

import pytest

from resources.dagster_names import NEEDS_PERSON
from sensors.dagster_internals.runs import GOES_ON_WITH, LAUNCHED_BY, RETRY
from sensors.outlook import outlooks


def test_what_is_tried_again_and_what_needs_a_person_are_told_apart(orchestrator):
    """With the reason and the command; a run that never started is not called failed.

    Given up is what the schedule itself has tried last: what a person launched since is tried again.
    """
    garbage = orchestrator.created("a")
    orchestrator.instance.add_run_tags(garbage.run_id, {NEEDS_PERSON: garbage.run_id})
    orchestrator.ends(garbage, "the model's answers are garbage.")
    for key, does in (("b", "the disk is full."), ("c", "never start"), ("d", "fail")):
        orchestrator.ends(orchestrator.created(key), does)
    orchestrator.materialize("d")
    ours = {LAUNCHED_BY: RETRY, GOES_ON_WITH: "before", "dagster/parent_run_id": "before"}
    orchestrator.ends(orchestrator.created("e", **ours), "the disk is full.")
    told, more = outlooks(orchestrator.dagster, "abcdef", {"b", "e"}, most=9)
    left, given_up, failed, late = told
    assert more == 0
    assert [one.ending for one in told] == ["Failed", "Failed", "Failed", "Not started"]
    assert left.sentence() == (
        "partition a needs you: the model's answers are garbage. Put that right, then `vlm-assets run a`"
    )
    assert given_up.sentence().startswith("partition e needs you: the disk is full. Put that right")
    assert failed.sentence() == (
        "partition b is tried again by itself, 5 times at most without a new row, because the disk is full"
    )
    assert "no failure of the partition, and no attempt" in late.sentence()
    told, more = outlooks(orchestrator.dagster, "abcdef", {"b", "e"}, most=1)
    assert ([one.key for one in told], more) == (["a"], 3)


def test_a_long_error_ends_with_a_whole_sentence(orchestrator):
    """A command that is copied from it is never cut in two."""
    errors = {
        "a": f"No row is good. {'See more. ' * 56}Then `vlm-assets run a --home /srv/properties`.",
        "b": 100 * "endless ",
        "c": f"`vlm-assets show {900 * 'c'}` shows it.",
    }
    for key, error in errors.items():
        orchestrator.ends(orchestrator.created(key), error)
    told, _ = outlooks(orchestrator.dagster, errors, (), most=9)
    whys = {outlook.key: outlook.why for outlook in told}
    assert whys["a"].startswith("No row is good. See more. ") and whys["a"].endswith("See more …")
    assert whys["b"].endswith("endless …") and "`" not in whys["c"]
    assert max(map(len, whys.values())) <= 602


@pytest.mark.parametrize(("odd", "stored"), [("\udce9", "\\udce9"), ("\0", "\\x00")])
def test_an_error_that_no_database_can_hold_stops_no_retry(orchestrator, odd, stored):
    """Half of a pair, or a zero character: the schedule goes on with this partition and all others."""
    for key, error in (("a", f"404: no model caf{odd}."), ("b", "It failed.")):
        orchestrator.ends(orchestrator.created(key), error)
    orchestrator.tick()
    assert orchestrator.ledger["a"].why == f"404: no model caf{stored}"
    orchestrator.ahead += 3600.0
    assert orchestrator.tick() == ["b", "a"]


def test_the_ledger_says_what_a_run_died_of_from_its_first_failure_on(orchestrator):
    """A status without Dagster says it too; a run that never started is no attempt."""
    orchestrator.ends(orchestrator.created("b"), "the disk is full.")
    orchestrator.tick()
    entry = orchestrator.failed_partitions.attempts.read()["b"]
    assert (entry.why, entry.attempts) == ("the disk is full", 0)
    assert entry.not_before > time.time()
