"""The command line: ``vlm-assets``, its list of commands, and the command ``settings``."""

from __future__ import annotations

import io
import logging
import sys
import traceback
from importlib import import_module
from importlib.metadata import version
from typing import Annotated, Any, Final

import typer
from typer.core import TyperCommand, TyperGroup

from resources.storage.files import restrict_umask
from vlm_assets.config.settings import PREFIX, SettingsError
from vlm_assets.operate.terminal import (
    AsJson,
    VisibleFormatter,
    app,
    chosen_settings,
    say,
    say_as_json,
    show_home_in_commands,
)

_OURS = frozenset({"vlm_assets", "resources", "sensors", "examples"})

_OF_A_CLUSTER = frozenset({"ray", "dagster_ray", "dagster_postgres"})
"""Packages of the extra ``cluster``."""


COMMANDS: Final = {
    "alerts": ("operate.alerting", "What is wrong and whom it was told."),
    "audit": ("operate.audit", "Prove from what is on disk that every published property is there once."),
    "backup": ("operate.backup", "Copy a home into a folder while work goes on; each time only what is new."),
    "compare": ("operate.compare", "Compare models, prompts or schemas on the same sample."),
    "demo": ("operate.intake", "Start the Dagster UI and a backfill of everything that is missing."),
    "devices": ("operate.device_commands", "Show the devices: free, held, failed before, or left out."),
    "doctor": ("operate.doctor", "Try all that a long run will need, and say what is wrong."),
    "example": ("operate.intake", "Render the example properties and take them into the catalogue."),
    "explore": ("operate.explore", "Open charts, a table, a map and neighbours in a browser."),
    "export": ("operate.export", "Write published rows, texts and vectors as a folder for others."),
    "ingest": ("operate.intake", "Take properties into the catalogue. What is in it already never moves."),
    "metrics": ("operate.metrics", "Say the figures of status in the text format of Prometheus."),
    "node": ("cluster.node", "Be a node of a cluster: Ray's part here, and this machine's heartbeat."),
    "pause": ("operate.device_commands", "Let everything stand still, and wait until the devices are free."),
    "plan": ("operate.plan", "Say what describing the rest will take: days, cost, disk, failures."),
    "prune": ("operate.prune", "List what takes space and is needed no more; then remove it."),
    "publish": ("operate.run", "Publish a partition that the check failed_share refused."),
    "rehearse": ("rehearsal.rehearse", "Rehearse the run on a simulated clock, with faults by a seed."),
    "repair": ("operate.repair", "List what is wrong and what would put it right; then do it."),
    "restore": ("operate.backup", "Restore a backup into an empty home."),
    "resume": ("operate.device_commands", "Lift the pause: waiting runs go on at once."),
    "review": ("operate.review_page", "Mark fields of a sample right or wrong, on a page in a browser."),
    "run": ("operate.run", "Materialize partitions and show the progress until they are done."),
    "search": ("operate.search", "Find properties that are near to a text or to another property."),
    "serve": ("operate.run", "Run the Dagster UI, daemon, schedules and alerts of a home."),
    "settings": ("operate.main", "List every setting, its value and what it means."),
    "show": ("operate.property_view", "Show one property: images, description, errors, files."),
    "status": ("operate.status_view", "Say where every partition stands, and what is left."),
    "try": ("operate.measurement", "Describe a few properties: the answers, the rate, what all would take."),
    "withdraw": ("operate.withdraw", "Remove properties for good, from files, versions and journals."),
}
"""Each command's module, and the first line of its help."""


class _Listed(TyperCommand):
    """A command as ``--help`` lists it. Its module is imported when it is called."""

    def make_context(self, *arguments: Any, **options: Any) -> Any:
        """The context of the command itself."""
        return find_command(self.name or "").make_context(*arguments, **options)


class _Commands(TyperGroup):
    """All commands, without an import of their modules: ``--help`` answers at once."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.imported, self.commands = self.commands, {}
        for name, (_, sentence) in COMMANDS.items():
            self.commands[name] = _Listed(name, help=sentence)


def find_command(name: str) -> Any:
    """The command itself, with its arguments: imports its module."""
    import_module(f"vlm_assets.{COMMANDS[name][0]}")
    group = typer.main.get_command(app)
    assert isinstance(group, _Commands)
    return group.imported[name]


def main() -> None:
    """Run a command. Exit codes: 0 fine, 1 something is wrong, 2 the command or a setting is.

    Our own errors are sentences that say what to do, without a traceback; so are those of a file that cannot
    be read or written. What a terminal cannot show, or would obey, is shown escaped, in tracebacks and log
    records too.
    """
    restrict_umask()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    if logging.lastResort is not None:
        logging.lastResort.setFormatter(VisibleFormatter())
    try:
        app()
    except Exception as error:
        if type(error).__module__.partition(".")[0] in _OURS:
            said = str(error)
        elif isinstance(error, OSError) and error.filename is not None:
            said = f"{error.filename}: {error.strerror}. Put that right, and do it again."
        elif isinstance(error, ModuleNotFoundError) and (error.name or "").partition(".")[0] in _OF_A_CLUSTER:
            said = f"{error.name} is not installed: `pip install -c constraints.txt -e '.[cluster]'`."
        else:
            say(traceback.format_exc(), err=True)
            sys.exit(1)
        say(said, fg="red", err=True)
        sys.exit(2 if isinstance(error, SettingsError) else 1)


def _say_version(wanted: bool) -> None:
    if wanted:
        say(f"vlm-assets {version('vlm-assets')}")
        raise typer.Exit


@app.callback(cls=_Commands)
def vlm_assets(
    context: typer.Context,
    _version: Annotated[
        bool, typer.Option("--version", callback=_say_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Property descriptions and embeddings as Dagster partitions that are never lost.

    Exit codes: 0 fine, 1 something is wrong, 2 the command or a setting is wrong.
    """
    # Another command in the same process may mean another home.
    context.call_on_close(lambda: show_home_in_commands(None))


_EXAMPLES = """\b
vlm-assets settings
vlm-assets settings --json"""


@app.command("settings", epilog=_EXAMPLES)
def settings_command(as_json: AsJson = False) -> None:
    """List every setting, its value and what it means.

    Settings that you have set are bold.
    Secrets are never shown. A setting is set in the environment or in .env.
    """
    current = chosen_settings()
    listed = {}
    for name, field in type(current).model_fields.items():
        value = getattr(current, name)
        plain = value if isinstance(value, bool | int | float | None) else str(value)
        is_set, meaning = name in current.model_fields_set, " ".join((field.description or "").split())
        listed[f"{PREFIX}{name.upper()}"] = {"value": plain, "set": is_set, "meaning": meaning}
    if as_json:
        say_as_json(listed)
        return
    for name, told in listed.items():
        # Whole names and values, however narrow the terminal: they are copied and searched for.
        say(f"{name}={'' if told['value'] is None else told['value']}", bold=told["set"])
        say(f"    {told['meaning']}")
