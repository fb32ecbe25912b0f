"""Sending with apprise's own command, to a real HTTP receiver."""

import os
import subprocess
import sys
import threading

from resources.alerts.alert import Message
from resources.alerts.targets import Target, send
from tests.support.processes import command_line, descendants, has_ended
from tests.support.waiting import wait_until

SECRET = "s3cret-pw"


def message(title="a title", body="b\nId: i") -> Message:
    return Message("i", title, body, "warning")


def test_a_message_arrives_as_it_is(receiver):
    """Not as markup, and whatever it begins with: a title is no option of a command."""
    assert send(Target(1, receiver.url()), message("--help\n*x*"), seconds=20) is None
    assert (receiver.titles, receiver.ids) == (["--help\n*x*"], ["i"])
    assert receiver.messages[0]["type"] == "warning"


def test_any_text_arrives_where_the_locale_cannot_say_it(receiver):
    """An alert that cannot be sent would hold up all later ones, at each look."""
    title = "Tür … 日本"
    code = (
        "from resources.alerts.alert import Message; from resources.alerts.targets import Target, send;"
        f" message = Message('i', {title!a}, 'b\\nId: i', 'warning');"
        f" exit(send(Target(1, {receiver.url()!r}), message, seconds=20))"
    )
    ascii_only = os.environ | {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
    subprocess.run([sys.executable, "-c", code], env=ascii_only, check=True)
    assert receiver.titles == [title]


def test_what_a_target_says_is_told_without_its_address(receiver):
    """A person reads why, and nobody the password."""
    receiver.answer = 401
    said = send(Target(1, receiver.url(secret=f"user:{SECRET}")), message(), seconds=20)
    assert said is not None
    assert "401" in said
    assert SECRET not in said


def test_an_address_is_in_no_argument_of_a_process(receiver):
    """Every user of the machine can list them."""
    receiver.answer = None
    sender = threading.Thread(
        target=send,
        args=(Target(1, receiver.url(secret=f"user:{SECRET}")), message()),
        kwargs={"seconds": 20},
    )
    sender.start()
    assert receiver.asked.wait(20)
    lines = [" ".join(command_line(process)) for process in descendants(os.getpid())]
    receiver.released.set()
    sender.join()
    assert any("apprise" in line for line in lines)
    assert not any(SECRET in line for line in lines)


def test_settings_of_apprise_in_the_environment_change_nothing(receiver, monkeypatch):
    """Alerts go to the targets of the settings, and to no others."""
    monkeypatch.setenv("APPRISE_URLS", "json://127.0.0.1:9/")
    assert send(Target(1, receiver.url()), message(), seconds=20) is None
    assert receiver.titles == ["a title"]


def test_what_a_killed_process_was_about_to_send_is_not_sent(receiver):
    """Another process sends it when its time is over: sent by both, it would come twice."""
    order = f"send(Target(1, {receiver.url()!r}), Message('i', 't', 'b', 'info'), seconds=20)"
    code = f"from resources.alerts.targets import Message, Target, send; {order}"
    sender = subprocess.Popen([sys.executable, "-c", code])
    children = wait_until(lambda: descendants(sender.pid), "its child", seconds=60, every=0.01)
    sender.kill()
    sender.wait()
    wait_until(lambda: all(map(has_ended, children)), "end of its child", seconds=60)
    assert receiver.requests == 0
