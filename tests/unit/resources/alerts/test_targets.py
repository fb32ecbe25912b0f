"""Addresses: bad ones are refused without being told, and what a target says is scrubbed."""

import logging

import pytest

from resources.alerts.targets import AlertTargetError, Target, checked_targets, scrubbed

SECRET = "s3cret-pw"


@pytest.mark.parametrize(
    "bad", [f"mailto://u:{SECRET}@", SECRET, f"{SECRET}://x", f"slack://{SECRET}", "json://"]
)
def test_a_bad_address_is_refused_by_position_and_scheme_and_never_told(bad, caplog):
    """It is noticed when the definitions load, not in the night in which it is needed."""
    caplog.set_level(logging.DEBUG)
    with pytest.raises(AlertTargetError, match=r"number 2 \(") as refused:
        checked_targets(["json://127.0.0.1/", bad])
    assert SECRET not in str(refused.value)
    assert SECRET not in repr(refused.value.__cause__)
    assert SECRET not in caplog.text


def test_good_ones_keep_their_order_and_one_named_twice_is_one():
    """A person is told once."""
    found = checked_targets(["json://a/", "mailto://u:p@example.org", "json://a/"])
    assert [one.name for one in found] == ["target 1 (json)", "target 2 (mailto)"]


def test_a_target_never_shows_its_address():
    """In a log, a traceback or a debugger's list, an address is its number."""
    target = Target(1, f"json://u:{SECRET}@example.org/")
    assert SECRET not in f"{target!r} {target} {[target]} {target.name}"


@pytest.mark.parametrize(
    ("url", "said"),
    [
        (f"json://user:{SECRET}@host/path", f"401 for user:{SECRET}@host"),
        ("json://user:p%40ss-word@host/", "refused p@ss-word"),
        ("json://user:p%40ss-word@host/", "refused p%40ss-word"),
        ("slack://T1JJ3T3L2/A1BRTD4JD/TIiajkdnlazkcOXrIdevi7FQ/", "no TIiajkdnlazkcOXrIdevi7FQ"),
        ("json://host/?+X-Token=abcdef", "header abcdef refused"),
    ],
)
def test_no_part_of_an_address_is_left_in_what_a_target_said(url, said):
    """Services quote addresses in their errors; we do not."""
    found = scrubbed(said, url)
    for secret in (SECRET, "p@ss-word", "p%40ss-word", "TIiajkdnlazkcOXrIdevi7FQ", "abcdef"):
        assert secret not in found
