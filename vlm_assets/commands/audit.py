"""The command ``audit``: what ``services/home_audit.py`` finds, as a table and sentences, or as JSON."""

from __future__ import annotations

from collections.abc import Sequence

import typer
from rich.table import Table

from vlm_assets.assets.partition_state import State
from vlm_assets.commands.terminal import (
    AsJson,
    Deep,
    Home,
    TerminalConsole,
    app,
    chosen_settings,
    say,
    say_as_json,
    say_list,
)
from vlm_assets.services.home_audit import Audit, audit
from vlm_catalog.catalog import Catalog
from vlm_durable.versions.findings import Finding

_EXAMPLES = """\b
vlm-assets audit
vlm-assets audit --deep --json"""


@app.command("audit", epilog=_EXAMPLES)
def audit_command(home: Home = None, deep: Deep = False, as_json: AsJson = False) -> None:
    """Prove from what is on disk that every published property is there once.

    Reads only. Exit code 1 if anything is wrong; partitions not published yet are counted, not wrong.
    """
    settings = chosen_settings(home)
    audited = audit(settings, Catalog.open(settings.home), deep=deep)
    if as_json:
        say_as_json(audited.as_json())
    else:
        _show(audited)
    raise typer.Exit(0 if audited.ok else 1)


def _show(audited: Audit) -> None:
    table = Table("Properties", *audited.assets)
    totals = [audited.total(asset) for asset in audited.assets]
    for name in ("expected", "ok", "failed", "not_asked", "missing", "duplicate", "foreign", "not_yet"):
        if name == "not_asked" and not any(total.not_asked for total in totals):
            continue
        label = "not published yet" if name == "not_yet" else name.replace("_", " ")
        table.add_row(label, *(f"{getattr(total, name):,}" for total in totals))
    table.add_section()
    for state in State:
        counts = [audited.partitions_in(asset, state) for asset in audited.assets]
        if any(counts) or state is State.DONE:
            table.add_row(f"partitions {state.value}", *(f"{count:,}" for count in counts))
    TerminalConsole().print(table)
    say_list(_sentences(audited.wrong), "red")
    say_list(_sentences(audited.warnings), "yellow")
    say(audited.verdict(), fg="green" if audited.ok else "red", bold=True)


def _sentences(findings: Sequence[Finding]) -> list[str]:
    return [f"{finding.asset} {finding.key or ''}: {finding.text}" for finding in findings]
