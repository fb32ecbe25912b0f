"""The status of a home for a terminal, once or kept up to date."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime, timedelta
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Column, Table
from rich.text import Text

from vlm_assets.assets.partition_state import MEANING, State
from vlm_assets.commands.terminal import (
    AsJson,
    Home,
    TerminalConsole,
    app,
    chosen_settings,
    say_as_json,
    say_json,
)
from vlm_assets.config.settings import Settings, env_file_sentence
from vlm_assets.services.progress import doing
from vlm_assets.services.status import PartitionStatus, Status, read_status
from vlm_catalog.catalog import Catalog
from vlm_durable.commands import command
from vlm_durable.wording import counted, moment

SHOWN = 12
"""Partitions listed for people. The rest are counted, and ``--json`` lists all."""

WATCH_SECONDS = 5.0

_LISTED = (
    State.RUNNING,
    State.GIVEN_UP,
    State.LOST,
    State.DAMAGED,
    State.REFUSED,
    State.FAILED,
    State.CANCELLED,
    State.INTERRUPTED,
    State.STALE,
    State.NOT_STARTED,
)
"""States whose partitions are listed by key, in this order; not started ones if there is a reason."""


def watch_status(
    read: Callable[[], Status], console: Console, *, wait: Callable[[float], None] = time.sleep
) -> None:
    """Show the status and keep it up to date until Ctrl-C."""
    try:
        with Live(view(read()), console=console, auto_refresh=False) as live:
            while True:
                wait(WATCH_SECONDS)
                live.update(view(read()), refresh=True)
    except KeyboardInterrupt:
        return


def view(status: Status) -> Group:
    """The whole status, from the most to the least urgent part."""
    parts: list[RenderableType] = [_heading(status), _counts(status)]
    if any(device.rows or device.partition or device.left_out for device in status.devices):
        parts.append(_devices(status))
    parts += _listed(status)
    parts += _done_again(status)
    parts += _order(status)
    parts += _of_extensions(status)
    parts.append(Text(f"Published descriptions: {_rows(status.ok, status.failed_by_kind)}"))
    parts += [Text(f"  {failed_row.sentence()}") for failed_row in status.first_failed]
    if (more := sum(status.failed_by_kind.values()) - len(status.first_failed)) > 0 and status.first_failed:
        parts.append(Text(f"  and {more} more; {command('show', 'ID')} shows one of them", style="dim"))
    for further in status.further:
        rows = _rows(further.ok, further.failed_by_kind)
        rows += f"; not asked: {further.not_asked}" if further.not_asked else ""
        left = _duration(further.seconds_left)
        parts.append(Text(f"Published answers of {further.asset}: {rows}; time left: {left}"))
        parts += [Text(f"  {failed_row.sentence()}") for failed_row in further.first_failed]
    parts += [Text(sentence) for sentence in status.stale.sentences()]
    parts += [Text(warning, style="yellow") for warning in status.warnings]
    parts += [Text(f"→ {step}") for step in status.next_steps]
    return Group(*parts)


def _rows(ok: int, failed_by_kind: Mapping[str, int]) -> str:
    failed = ", ".join(f"{count} {kind}" for kind, count in failed_by_kind.items())
    return f"{ok} ok" + (f"; failed: {failed}" if failed else "")


def _heading(status: Status) -> Text:
    heading = Text(f"{counted(status.properties, 'properties')} in {status.home}\n")
    if status.waiting_in_tail:
        heading.append(f"In no partition yet: {status.waiting_in_tail}\n")
    if status.uncopied:
        waiting = (
            f"{counted(status.uncopied, 'segments')}, the oldest for {_duration(status.uncopied_seconds)}"
        )
        heading.append(f"Not in the store yet: {waiting}\n")
    if status.paused:
        heading.append(f"{status.paused[0].upper()}{status.paused[1:]}\n", style="bold yellow")
    heading.append(f"Dagster: {status.dagster or 'not running'}\n")
    rate = status.properties_per_second
    if rate is not None:
        heading.append(f"{rate:.2f} properties/s, starts of processes and models included\n")
    of_what = "all question sets" if status.further else "the descriptions"
    heading.append(f"Time left for {of_what}: {_duration(status.seconds_left)}", style="bold")
    return heading


def _counts(status: Status) -> Table:
    table = Table("partitions", *status.assets)
    counts = [status.counts(asset) for asset in status.assets]
    always = (State.DONE, State.RUNNING, State.INTERRUPTED, State.NOT_STARTED)
    for state in State:
        if state in always or any(asset_counts[state] for asset_counts in counts):
            table.add_row(state.value, *(str(asset_counts[state]) for asset_counts in counts))
    return table


def _devices(status: Status) -> Table:
    nodes = any(device.node for device in status.devices)
    table = Table(*(["node"] if nodes else []), "device", "works on", "properties/s", "described")
    for device in status.devices:
        does = device.partition or ("nothing" if device.is_here else "is not here now")
        heat = "" if device.temperature is None else f" at {device.temperature} °C"
        table.add_row(
            *([device.node or ""] if nodes else []),
            device.id,
            device.left_out or " ".join(filter(None, (f"{does}{heat}", device.trouble))),
            "" if (rate := device.properties_per_second) is None else f"{rate:.2f}",
            str(device.rows),
        )
    return table


def _listed(status: Status) -> list[RenderableType]:
    lines: list[RenderableType] = []
    for state in _LISTED:
        partitions = [
            partition
            for partition in status.partitions
            if partition.state is state and (partition.note or state is not State.NOT_STARTED)
        ]
        lines += [_line(partition) for partition in partitions[:SHOWN]]
        lines += _more(len(partitions), f" {state.value}")
    return lines


def _more(count: int, state: str = "") -> list[RenderableType]:
    return [Text(f"and {count - SHOWN} more{state}", style="dim")] if count > SHOWN else []


def _line(partition: PartitionStatus) -> Text:
    line = Text(f"{partition.asset} {partition.key}: ")
    line.append(partition.state.value, style="bold")
    rows = f"{partition.percent:.0f}% ({partition.rows} of {partition.expected})"
    line.append(f" at {rows}: {partition.note or MEANING[partition.state]}")
    return line


def _done_again(status: Status) -> list[RenderableType]:
    """Partitions that were tried again and done, the latest first: people ask about the last night."""
    if not status.done_again:
        return []
    count = len(status.done_again)
    lines: list[RenderableType] = [
        Text(f"Tried again by itself and done since {moment(status.done_again_since)}: {count}", style="bold")
    ]
    for partition in status.done_again[::-1][:SHOWN]:
        runs = counted(partition.runs, "new runs")
        lines.append(Text(f"{partition.key}: done by {moment(partition.at)} after {runs}; {partition.why}"))
    return [*lines, *_more(count)]


def _order(status: Status) -> list[RenderableType]:
    waiting = status.order
    if not waiting:
        return []
    asset = ["asset"] if status.further else []
    table = Table("turn", *asset, Column("heaviest first", no_wrap=True), "state", "done", "images left")
    for partition in waiting[:SHOWN]:
        table.add_row(
            str(partition.turn),
            *([partition.asset] if asset else []),
            partition.key,
            partition.state.value,
            f"{partition.percent:.0f}%",
            str(partition.images_left),
        )
    return [table, *_more(len(waiting))]


def _of_extensions(status: Status) -> Iterator[RenderableType]:
    for extension_table in status.extensions:
        table = Table(*extension_table.columns, title=extension_table.title, title_justify="left")
        for row in extension_table.rows:
            table.add_row(*row)
        yield table


def _duration(seconds: float | None) -> str:
    if seconds is None:
        return "unknown yet"
    return "less than a second" if 0 < seconds < 1 else str(timedelta(seconds=round(seconds)))


_EXAMPLES = """\b
vlm-assets status
vlm-assets status --watch
vlm-assets status --since 2026-01-31T08:00
vlm-assets status --prometheus --file /var/lib/node_exporter/vlm_assets.prom"""

_TIMES = ["%Y-%m-%d", "%Y-%m-%dT%H:%M", "%Y-%m-%dT%H:%M:%S"]
"""Local times, as people write them."""


def _show_metrics(settings: Settings, file: Path | None) -> None:
    from prometheus_client import generate_latest, write_to_textfile

    from vlm_assets.services.metrics import metrics_of

    registry = metrics_of(settings)
    if file is None:
        say_json(generate_latest(registry).decode().rstrip())
    else:
        write_to_textfile(str(file), registry)


@app.command("status", epilog=_EXAMPLES)
def status_command(
    home: Home = None,
    as_json: AsJson = False,
    watch: Annotated[bool, typer.Option("--watch", help="Keep it up to date until Ctrl-C.")] = False,
    since: Annotated[
        datetime | None,
        typer.Option(formats=_TIMES, help="List what was tried again and done since then; else a day ago."),
    ] = None,
    prometheus: Annotated[
        bool, typer.Option("--prometheus", help="Say the figures in the text format of Prometheus.")
    ] = False,
    file: Annotated[
        Path | None,
        typer.Option(
            help="With --prometheus: replace this file of node exporter's textfile collector; its name ends"
            " in .prom."
        ),
    ] = None,
) -> None:
    """Say where every partition stands, and what is left.

    Also in which order it runs. Reads what is on disk.
    """
    current = chosen_settings(home)

    def advance(done: int, partitions: int) -> None:
        if not watch:
            doing("reading where partitions stand", done, partitions)

    def read() -> Status:
        catalog, at = Catalog.open(current.home), since.timestamp() if since else None
        return read_status(current, catalog, since=at, advance=advance)

    if prometheus:
        _show_metrics(current, file)
    elif file is not None:
        raise typer.BadParameter("--file is for --prometheus.")
    elif as_json:
        say_as_json(read().as_json())
    elif watch:
        watch_status(read, TerminalConsole())
    else:
        console = TerminalConsole()
        console.print(env_file_sentence(current), soft_wrap=True)
        for part in view(read()).renderables:
            # A sentence stays one line: else a command that is copied from it would hold an end of line.
            console.print(part, soft_wrap=isinstance(part, Text))
