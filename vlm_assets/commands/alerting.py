"""The command ``alerts``: open alerts and who received them, test messages, delivery without Dagster."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import Annotated

import typer

from resources.alerts.delivery import Delivery
from resources.alerts.outbox import Outbox
from vlm_assets.commands.terminal import AsJson, Home, choose_home, chosen_settings, say, say_as_json
from vlm_assets.commands.terminal import app as commands
from vlm_assets.config.resource_settings import control_state
from vlm_assets.services.alert_delivery import build_delivery, pages_address, send_trial
from vlm_assets.services.progress import doing
from vlm_durable.commands import command
from vlm_durable.wording import counted

_SECONDS = 20.0
"""A target that does not answer for so long is given up."""

Limit = Annotated[int, typer.Option(min=1, help="How many of each list.")]

app = typer.Typer(
    help="What is wrong and whom it was told.",
    epilog="vlm-assets alerts --limit 5",
    invoke_without_command=True,
)
commands.add_typer(app, name="alerts")


@app.callback()
def alerts(context: typer.Context, home: Home = None, limit: Limit = 20, as_json: AsJson = False) -> None:
    """List what is wrong now, newest last, and what was told lately. Reads only."""
    if context.invoked_subcommand is not None:
        # `vlm-assets alerts --home DIR test` means the same home.
        choose_home(home)
        return
    delivery = build_delivery(chosen_settings(home))
    standing = list(delivery.outbox.open_subjects().values())
    recent = delivery.outbox.recent(limit)
    if as_json:
        opened = [alert.as_json() | {"id": alert.id} for alert in standing]
        events = [event.as_json() | {"id": event.id} for event in recent]
        say_as_json({"open": opened, "recent": events})
        return
    say(f"{len(standing)} open", bold=True)
    for alert in standing[-limit:]:
        values = ""
        if alert.expected and alert.actual:
            values = f" (expected: {alert.expected.rstrip('.')}; found: {alert.actual.rstrip('.')})"
        say(f"{_clock(alert.at)}  {alert.kind}  {alert.title}{values}")
        say(f"    {alert.next_step}\n    subject: {alert.subject}")
    if len(standing) > limit:
        shown = command("alerts", "--limit", len(standing))
        say(f"... and {len(standing) - limit} older; {shown} shows them too")
    say("\nLately", bold=True)
    for event in recent:
        say(f"{_clock(event.at)}  {_SIGNS[event.happening]}{event.alert.kind}  {event.alert.title}")
    say("")
    for name, (untold, tries) in delivery.backlog().items():
        tried = f", tried up to {counted(tries, 'times')}" if tries else ""
        say(f"{name}: {untold} to tell{tried}")
    if not delivery.targets:
        say(_NO_TARGETS)


@app.command(epilog="vlm-assets alerts test")
def test(home: Home = None) -> None:
    """Send a test message to every target and say what each answered. Exit code 1 if one did not take it."""
    current = chosen_settings(home)
    delivery = build_delivery(current)
    if not delivery.targets:
        say(_NO_TARGETS)
        raise typer.Exit(1)
    doing(_waiting(delivery))
    answers = send_trial(delivery, current, seconds=_SECONDS)
    for target, trouble in answers:
        say(f"{target.name}: {trouble or 'took it'}")
    raise typer.Exit(1 if any(trouble for _, trouble in answers) else 0)


@app.command(epilog="vlm-assets alerts close SUBJECT --reason 'the card was taken out'")
def close(
    name: Annotated[str, typer.Argument(metavar="SUBJECT", help="As the list shows it, or a message's id.")],
    home: Home = None,
    reason: Annotated[str | None, typer.Option(help="Why, for those who are told.")] = None,
) -> None:
    """Close an open alert by hand: what cannot become right again by itself, such as a card taken out.

    Whoever was told of it is told of that. What it was about is told again where it happens again.
    """
    sentence = f"A person closed it: {reason}" if reason else "A person closed it."
    outbox = Outbox(control_state(chosen_settings(home)))
    alert = outbox.close(name, sentence=sentence, at=time.time())
    say(f"Closed: {alert.title} ({len(outbox.open_subjects())} open)")


@app.command(epilog="vlm-assets alerts deliver")
def deliver(home: Home = None) -> None:
    """Notice a silent daemon or alerts sensor, and deliver what waits: for cron or a systemd timer.

    Works with Dagster up or down. Exit code 1 if something waits that a target did not take.
    """
    from sensors.ticks import Ticks

    current = chosen_settings(home)
    delivery = build_delivery(current)
    now = time.time()
    silent = Ticks(delivery.outbox.state).silence(now=now)
    if silent is not None:
        say(f"{silent.title}: {silent.actual}.")
        delivery.outbox.post(silent)
    doing(_waiting(delivery))
    done = delivery.deliver(now=now, seconds=_SECONDS, address=pages_address(current))
    say(done.sentence)
    raise typer.Exit(1 if done.troubles else 0)


def _waiting(delivery: Delivery) -> str:
    """The activity while targets answer: all are asked at once, and the slowest decides how long it takes."""
    return f"waiting for the answers of {counted(len(delivery.targets), 'targets')}, {_SECONDS:.0f} s at most"


_NO_TARGETS = (
    "No targets are set: alerts are only shown here. Set VLM_ASSETS_ALERT_TARGETS, e.g."
    " mailto://USER:PASSWORD@HOST, slack://TOKENS or json://HOST/PATH; https://appriseit.com/services/ lists"
    " them."
)

_SIGNS = {"raised": "      ", "recovered": "right ", "closed": "closed "}


def _clock(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).astimezone().strftime("%Y-%m-%d %H:%M")
