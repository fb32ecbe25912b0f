"""The figures of ``make bench`` as a table for a terminal; what they mean stands in bench.py."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

_console = Console(soft_wrap=True)


def say(text: str) -> None:
    """A line for who waits."""
    _console.print(text, markup=False, highlight=False)


def print_table(results: Mapping[str, Any]) -> None:
    """One line a contender: medians, and the least and the most over the rounds in brackets."""
    machine = results["machine"]
    table = Table(
        title=(
            f"{results['properties']} properties, {results['threads']} threads, "
            f"{machine['cores']} cores, {results['rounds']} rounds"
        )
    )
    table.add_column("contender")
    for name in (
        "batch",
        "properties/s",
        "ratio to the floor",
        "ours to this",
        "start-up s",
        "peak RSS MiB",
        "CPU s",
        "ms CPU a property, model's process",
        "same answers",
    ):
        table.add_column(name, justify="right")
    for name, contender in results["contenders"].items():
        title = f"{contender['title']} *" if name == results["floor"] else contender["title"]
        if "error" in contender:
            table.add_row(title, f"[red]FAILED: {escape(contender['error'])}[/red]")
            continue
        same = contender["same_answers_as_floor"]
        table.add_row(
            title,
            str(contender["batch"] or "default"),
            _spread(contender, "properties_per_second", 2),
            _spread(contender, "ratio_to_floor", 3) if "ratio_to_floor" in contender else "-",
            f"{contender['ours_to_this']:.2f}" if "ours_to_this" in contender else "-",
            _spread(contender, "startup_seconds", 1),
            f"{contender['peak_rss_mb']:.0f}",
            f"{contender['cpu_seconds']:.0f}",
            f"{contender['model_process_cpu_ms_per_property']:.1f}"
            if "model_process_cpu_ms_per_property" in contender
            else "-",
            "-" if same is None else f"{same:.1%}",
        )
    wide = Console(width=max(_console.width, 130))
    wide.print(table)
    for contender in results["contenders"].values():
        if rates := contender.get("properties_per_second_by_batch"):
            tried = ", ".join(f"{rate:.1f} at {size}" for size, rate in rates.items())
            say(f"{contender['title']}: {tried} properties/s by batch size, tried once")
    say("* the floor. Properties/s: from the first batch's end until all rows are durable.")


def _spread(contender: Mapping[str, Any], name: str, digits: int) -> str:
    low, high = contender["spread"][name]
    return f"{contender[name]:.{digits}f} ({low:.{digits}f}-{high:.{digits}f})"
