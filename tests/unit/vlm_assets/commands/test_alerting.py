"""``vlm-assets alerts``: lists, tests and delivers with Dagster down, and never tells an address."""

import json
import time
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from resources.alerts.alert import Alert
from resources.alerts.outbox import Outbox
from sensors.ticks import Ticks
from vlm_assets.commands.main import app
from vlm_assets.config.settings import SettingsError, load_settings
from vlm_durable.state.database import ControlState, open_state

SECRET = "s3cret-pw"


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A home of its own, for the settings too."""
    monkeypatch.setenv("VLM_ASSETS_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def outbox(home) -> Outbox:
    return Outbox(open_state(home / ".state"))


@pytest.fixture
def told(monkeypatch, receiver):
    """The receiver is a target, with a password."""
    monkeypatch.setenv("VLM_ASSETS_ALERT_TARGETS", receiver.url(secret=f"user:{SECRET}"))
    return receiver


def run(*arguments: str):
    return CliRunner().invoke(app, ["alerts", *arguments])


def alert(number: int) -> Alert:
    return Alert(
        kind="check_failed",
        subject=f"rows/{number}",
        occurrence="1",
        severity="error",
        title=f"row_count failed: rows {number}",
        expected="20 rows",
        actual="19",
        next_step="Put the images back.",
        at=time.time(),
    )


def test_the_list_shows_what_is_open_with_its_next_step_and_what_was_told(home, outbox):
    """In the morning one look must tell."""
    outbox.post_all([alert(0), alert(1)])
    outbox.note_recovery("rows/0", sentence="It passed.", at=time.time())
    said = run()
    assert said.exit_code == 0
    assert "1 open" in said.output
    assert "row_count failed: rows 1 (expected: 20 rows; found: 19)\n    Put the images back." in said.output
    assert "right check_failed  row_count failed: rows 0" in said.output
    found = json.loads(run("--json").output)
    assert [one["subject"] for one in found["open"]] == ["rows/1"]
    assert len(found["recent"]) == 3


def test_a_person_closes_what_cannot_become_right_again_by_itself(home, outbox, told):
    """A card that was taken out: closed for good, recorded and told as closed and not as right again."""
    outbox.post_all([alert(0), alert(1)])
    assert "subject: rows/0" in run().output
    said = run("close", "rows/0", "--reason", "the card is out")
    assert said.exit_code == 0, said.output
    assert said.output == "Closed: row_count failed: rows 0 (1 open)\n"
    assert list(Outbox(ControlState(home / ".state")).open_subjects()) == ["rows/1"]
    assert "closed check_failed  row_count failed: rows 0" in run().output
    run("deliver")
    assert told.titles[-1] == "Closed by a person: row_count failed: rows 0"
    assert "A person closed it: the card is out" in told.messages[-1]["message"]
    assert not outbox.post(alert(0)), "the same occurrence is told once"
    assert run("close", alert(1).id).exit_code == 0, "by the id in a message"
    assert outbox.post(replace(alert(0), occurrence="2")), "what happens again is told again"


def test_closing_what_is_not_open_names_what_is(home, outbox):
    """A slip of the pen closes nothing, and says what could have been meant."""
    for posted, there in ([], "none"), ([alert(0), alert(1)], "rows/0, rows/1"):
        outbox.post_all(posted)
        refused = run("close", "rows/7")
        assert refused.exit_code == 1
        assert str(refused.exception) == f"No alert with the subject or id rows/7 is open. Open are: {there}."
    assert len(outbox.open_subjects()) == 2


def test_looking_at_a_home_without_alerts_leaves_nothing_there(home):
    """It reads only."""
    assert run().exit_code == 0
    assert not home.exists()


def test_a_test_message_says_what_each_target_answered(home, told):
    """Before the night in which it is needed."""
    said = run("test")
    assert (said.exit_code, said.output) == (0, "target 1 (json): took it\n")
    assert told.titles == ["This is a test"]
    told.answer = 401
    refused = run("test")
    assert refused.exit_code == 1
    assert "401" in refused.output
    assert SECRET not in said.output + refused.output


def test_without_a_target_the_test_says_how_to_set_one(home):
    """No silence that looks like success."""
    said = run("test")
    assert said.exit_code == 1
    assert "VLM_ASSETS_ALERT_TARGETS" in said.output


def test_deliver_tells_what_waits_and_that_the_daemon_is_silent_with_dagster_down(home, outbox, told):
    """A dead daemon says nothing itself: the machine's own timer does, once."""
    outbox.post(alert(0))
    Ticks(outbox.state).record("drift", time.time() - 1000)
    said = run("deliver")
    assert said.exit_code == 0, said.output
    assert "daemon has gone silent" in said.output
    assert sorted(told.titles) == ["Dagster's daemon has gone silent", "row_count failed: rows 0"]
    run("deliver")
    assert len(told.messages) == 2


def test_deliver_tells_that_the_alerts_sensor_alone_is_silent(outbox, told):
    """Who watches the others is watched from outside."""
    ticks, now = Ticks(outbox.state), time.time()
    ticks.record("alerts", now - 900)
    for before in range(600, -1, -200):
        ticks.record("drift", now - before)
    said = run("deliver")
    assert said.exit_code == 0, said.output
    assert told.titles == ["alerts has gone silent"]


def test_deliver_says_by_its_exit_code_that_something_waits(home, outbox, told):
    """A systemd unit goes red where nobody can be told."""
    told.down()
    outbox.post(alert(0))
    said = run("deliver")
    assert said.exit_code == 1
    assert "target 1 (json) did not take a message" in said.output
    assert SECRET not in said.output


def test_the_targets_are_secret_in_the_settings_and_in_their_errors(told):
    """`vlm-assets settings`, a repr in a traceback, an error: none of them shows an address."""
    listed = CliRunner().invoke(app, ["settings"])
    assert SECRET not in listed.output + repr(load_settings()) + str(load_settings().model_dump())
    with pytest.raises(SettingsError) as refused:
        load_settings(alert_targets=[f"json://user:{SECRET}@host"])
    assert SECRET not in str(refused.value)


def test_bad_targets_are_refused_when_the_definitions_load(home, monkeypatch):
    """Refused at load, by position and scheme."""
    from vlm_assets.home_definitions import build_defs

    monkeypatch.setenv("VLM_ASSETS_ALERT_TARGETS", f"json://host/ slack://{SECRET}")
    with pytest.raises(SettingsError, match=r"VLM_ASSETS_ALERT_TARGETS.*number 2 \(slack\)") as refused:
        build_defs(load_settings())
    assert SECRET not in str(refused.value)
