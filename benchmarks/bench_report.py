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
    for name, found in results["contenders"].items():
        title = f"{found['title']} *" if name == results["floor"] else found["title"]
        if "error" in found:
            table.add_row(title, f"[red]FAILED: {escape(found['error'])}[/red]")
            continue
        same = found["same_answers_as_floor"]
        table.add_row(
            title,
            str(found["batch"] or "default"),
            _spread(found, "properties_per_second", 2),
            _spread(found, "ratio_to_floor", 3) if "ratio_to_floor" in found else "-",
            f"{found['ours_to_this']:.2f}" if "ours_to_this" in found else "-",
            _spread(found, "startup_seconds", 1),
            f"{found['peak_rss_mb']:.0f}",
            f"{found['cpu_seconds']:.0f}",
            f"{found['model_process_cpu_ms_per_property']:.1f}"
            if "model_process_cpu_ms_per_property" in found
            else "-",
            "-" if same is None else f"{same:.1%}",
        )
    wide = Console(width=max(_console.width, 130))
    wide.print(table)
    for found in results["contenders"].values():
        if rates := found.get("properties_per_second_by_batch"):
            tried = ", ".join(f"{rate:.1f} at {size}" for size, rate in rates.items())
            say(f"{found['title']}: {tried} properties/s by batch size, tried once")
    say("* the floor. Properties/s: from the first batch's end until all rows are durable.")


def _spread(found: Mapping[str, Any], name: str, digits: int) -> str:
    low, high = found["spread"][name]
    return f"{found[name]:.{digits}f} ({low:.{digits}f}-{high:.{digits}f})"
