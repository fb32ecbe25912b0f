"""The command line: ``vlm-assets``, its list of commands, and the command ``settings``."""

from __future__ import annotations

import io
import logging
import os
import sys
import traceback
from collections.abc import Mapping
from functools import cache, partial
from importlib import import_module
from importlib.metadata import version
from typing import Annotated, Any, Final

import typer
from typer.core import TyperCommand, TyperGroup

from vlm_assets.commands.terminal import (
    AsJson,
    Home,
    VisibleFormatter,
    app,
    chosen_settings,
    say,
    say_as_json,
    show_activity,
)
from vlm_assets.config.extensions import installed
from vlm_assets.config.settings import (
    ENV_FILE,
    PREFIX,
    SettingsError,
    env_file_sentence,
    settings_class,
    settings_groups,
)
from vlm_durable.commands import HOME, note_given
from vlm_durable.files.files import restrict_umask

_OURS = frozenset(
    {"vlm_durable", "vlm_engine", "vlm_catalog", "resources", "sensors", "vlm_assets", "examples", "faults"}
)
"""Packages whose errors are sentences, beside those of extensions."""

_EXTRAS = {"dagster_postgres": ".[postgres]"}
"""Import packages that an extra of the core installs, each with what to give to pip."""


_CORE: Final = {
    "alerts": ("alerting", "What is wrong and whom it was told."),
    "audit": ("audit", "Prove from what is on disk that every published property is there once."),
    "backup": ("backup", "Copy a home into a folder while work goes on; each time only what is new."),
    "compare": (
        "comparison_view",
        "Describe a sample of properties: with the settings, or with several models.",
    ),
    "demo": ("intake", "Start the Dagster UI and a backfill of everything that is missing."),
    "devices": ("device_commands", "Show the devices: free, held, failed before, or left out."),
    "doctor": ("doctor", "Try all that a long run will need, and say what is wrong."),
    "ingest": ("intake", "Take properties into the catalogue. What is in it already never moves."),
    "plan": ("plan", "Say what describing the rest will take: days, cost, disk, failures."),
    "prune": ("prune", "List what takes space and is needed no more; then remove it."),
    "questions": ("questions", "Show what is asked of each property; ask one more question."),
    "repair": ("repair", "List what is wrong and what would put it right; then do it."),
    "restore": ("backup", "Restore a backup into an empty home."),
    "run": ("run", "Materialize partitions and show the progress until they are done."),
    "serve": ("run", "Run the Dagster UI, daemon, schedules and alerts of a home."),
    "settings": ("main", "List every setting, its value and what it means."),
    "show": ("property_view", "Show one property: images, description, errors, files."),
    "status": ("status_view", "Say where every partition stands, and what is left."),
    "withdraw": ("withdraw", "Remove properties for good, from files, versions and journals."),
}
"""The core's commands, by name: the module beside this one, and the first line of its help."""


@cache
def commands() -> Mapping[str, tuple[str, str]]:
    """Each command's module, and the first line of its help; those of extensions too, by name.

    A name of two words is a command that an extension adds to a group.
    """
    listed = {name: (f"{__package__}.{module}", help_line) for name, (module, help_line) in _CORE.items()}
    for extension in installed():
        listed |= extension.commands
    return dict(sorted(listed.items()))


class _Listed(TyperCommand):
    """A command as ``--help`` lists it. Its module is imported when it is called.

    whole: its name; of two words within a group, whose list has the second.
    """

    def __init__(self, whole: str, sentence: str) -> None:
        super().__init__(whole.rpartition(" ")[2], help=sentence)
        self.whole = whole

    def make_context(self, *arguments: Any, **options: Any) -> Any:
        """The context of the command itself."""
        note_given([*self.whole.split(), *arguments[1]])
        return find_command(self.whole).make_context(*arguments, **options)


class _Commands(TyperGroup):
    """All commands, without an import of their modules: ``--help`` answers at once."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.imported, self.commands = self.commands, {}
        for name, (_, sentence) in commands().items():
            if " " not in name:
                self.commands[name] = _Listed(name, sentence)


def find_command(name: str) -> Any:
    """The command itself, with its arguments: imports its module. name: of two words within a group."""
    listed = commands()
    of_group, _, inner = name.partition(" ")
    import_module((listed.get(name) or listed[of_group])[0])
    group = typer.main.get_command(app)
    assert isinstance(group, _Commands)
    command = group.imported[of_group]
    if not isinstance(command, TyperGroup):
        return command
    if inner:
        return command.commands[inner]
    for added, (_, sentence) in listed.items():
        if added.startswith(f"{name} "):
            command.commands[added.removeprefix(f"{name} ")] = _Listed(added, sentence)
    return command


def main(program: typer.Typer | None = None) -> None:
    """Run a command; of ``program``, or else of ``vlm-assets``.

    Exit codes: 0 fine, 1 something is wrong, 2 the command or a setting is.

    Our own errors are sentences that say what to do, without a traceback; so are those of a file that cannot
    be read or written. What a terminal cannot show, or would obey, is shown escaped, in tracebacks and log
    records too.
    """
    restrict_umask()
    # Whatever is started from here works in other folders, and reads the same file.
    os.environ[f"{PREFIX}ENV_FILE"] = str(ENV_FILE)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    if logging.lastResort is not None:
        logging.lastResort.setFormatter(VisibleFormatter())
    try:
        (program or app)()
    except Exception as error:
        if type(error).__module__.partition(".")[0] in _OURS.union(
            extension.package for extension in installed()
        ):
            message = str(error)
        elif isinstance(error, OSError) and error.filename is not None:
            message = f"{error.filename}: {error.strerror}. Put that right, and do it again."
        elif isinstance(error, ModuleNotFoundError) and (extra := _extra_with(error.name or "")) is not None:
            message = f"{error.name} is not installed: `pip install -c constraints.txt -e '{extra}'`."
        else:
            say(traceback.format_exc(), err=True)
            sys.exit(1)
        say(message, fg="red", err=True)
        sys.exit(2 if isinstance(error, SettingsError) else 1)


def _extra_with(module: str) -> str | None:
    """The argument of pip for a module that an extra of the core or of an extension installs."""
    extras: dict[str, str] = {}
    for extension in installed():
        extras |= extension.extras
    # Last: where both install it, the core's brings nothing else along.
    extras |= _EXTRAS
    return extras.get(module.partition(".")[0])


def _say_version(is_given: bool) -> None:
    if is_given:
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
    context.call_on_close(partial(_restore_home, os.environ.get(HOME)))
    show_activity(context)


def _restore_home(home: str | None) -> None:
    if home is None:
        os.environ.pop(HOME, None)
    else:
        os.environ[HOME] = home


_EXAMPLES = """\b
vlm-assets settings
vlm-assets settings --json"""


@app.command("settings", epilog=_EXAMPLES)
def settings_command(home: Home = None, as_json: AsJson = False) -> None:
    """List every setting, its value and what it means.

    Settings that you have set are bold.
    Secrets are never shown. A setting is set in the environment or in .env.
    Where a setting is wrong, the defaults are listed, and then what is wrong.
    """
    wrong = None
    try:
        current = chosen_settings(home)
    except SettingsError as error:
        # Its message says that this command lists the settings, so the command does.
        current, wrong = settings_class().model_construct(), error
    listed = {}
    for name, field in type(current).model_fields.items():
        value = getattr(current, name)
        plain = value if isinstance(value, bool | int | float | None) else str(value)
        is_set, meaning = name in current.model_fields_set, " ".join((field.description or "").split())
        listed[f"{PREFIX}{name.upper()}"] = {"value": plain, "set": is_set, "meaning": meaning}
    if as_json:
        say_as_json(listed)
    else:
        say(env_file_sentence(current) if wrong is None else "A setting is wrong, so these are the defaults.")
        titles = {f"{PREFIX}{first.upper()}": title for first, title in settings_groups().items()}
        for name, setting in listed.items():
            if name in titles:
                say(f"\n{titles[name]}\n", bold=True)
            # Whole names and values, however narrow the terminal: they are copied and searched for.
            say(f"{name}={'' if setting['value'] is None else setting['value']}", bold=setting["set"])
            say(f"    {setting['meaning']}")
    if wrong is not None:
        raise wrong
