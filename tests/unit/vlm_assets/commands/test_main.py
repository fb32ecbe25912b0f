"""vlm_assets/commands/main.py: what goes wrong is a sentence, on any terminal."""

import io
import json
import re
import sys
from functools import cache
from importlib.metadata import version
from typing import ClassVar

import click
import pytest
from typer.testing import CliRunner

from vlm_assets.commands import main as cli
from vlm_assets.config.extensions import Extension
from vlm_assets.config.settings import load_settings
from vlm_durable.commands import command
from vlm_engine.schema import load_schema


def test_a_file_that_may_not_be_written_is_a_sentence(monkeypatch, capsys):
    """A read-only or full disk is named with its file, without a traceback."""

    def refuse():
        raise PermissionError(30, "Read-only file system", "/srv/home/.ingest.lock")

    monkeypatch.setattr(cli, "app", refuse)
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 1
    assert "/srv/home/.ingest.lock: Read-only file system." in capsys.readouterr().err


def test_what_a_terminal_cannot_show_is_shown_escaped(empty, monkeypatch):
    """An arrow that the terminal's encoding lacks ends no look at how things stand."""
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii", write_through=True))
    monkeypatch.setattr(sys, "argv", ["vlm-assets", "status", "--home", str(empty.settings.home)])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert not ended.value.code
    assert rb"\u2192 " in written.getvalue()


@cache
def commands() -> dict[str, click.Command]:
    """Every command by what a person types."""
    found = {}
    for name in cli.commands():
        found[name] = command = cli.find_command(name)
        inner = {f"{name} {word}" for word in getattr(command, "commands", {})}
        found |= {whole: cli.find_command(whole) for whole in inner}
    return found


@pytest.mark.parametrize("name", commands())
def test_every_command_has_an_example(name):
    """--help ends with a line that can be copied, and the line is a command with options that exist."""
    command = commands()[name]
    options = {option for parameter in command.params for option in parameter.opts}
    lines = [line for line in (command.epilog or "").splitlines() if "vlm-assets" in line]
    assert lines, "give the command an epilog"
    if name in cli.commands():
        assert (command.help or "").splitlines()[0] == cli.commands()[name][1]
    for line in lines:
        assert line.split("vlm-assets ")[1].startswith(name), line
        assert set(re.findall(r" (--[a-z-]+)", line)) <= options, line


def test_the_version_is_told():
    """A report of a problem begins with it."""
    done = CliRunner().invoke(cli.app, ["--version"])
    assert (done.exit_code, done.output) == (0, f"vlm-assets {version('vlm-assets')}\n")


@pytest.mark.parametrize(
    ("arguments", "environment", "code"),
    [
        (["settings"], {}, 0),
        (["show", "nobody"], {}, 1),
        (["audit", "--home", "/nowhere"], {}, 1),
        (["show"], {}, 2),
        (["audit", "--no-such-option"], {}, 2),
        (["settings"], {"VLM_ASSETS_MAX_IMAGES": "none"}, 2),
        (["settings"], {"VLM_ASSETS_HOMME": "/srv"}, 2),
    ],
)
def test_exit_codes(empty, monkeypatch, arguments, environment, code):
    """0: fine. 1: something is wrong. 2: the command or a setting is wrong. Scripts depend on them."""
    monkeypatch.setenv("VLM_ASSETS_HOME", str(empty.settings.home))
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "argv", ["vlm-assets", *arguments])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert (ended.value.code or 0) == code


def test_settings_and_a_property_as_json(dataset, call, monkeypatch):
    """Programs read values, not sentences; a secret is not among them."""
    monkeypatch.setenv("VLM_ASSETS_ALERT_TARGETS", "json://secret.example/hook")
    settings = json.loads(call("settings", "--json").stdout)
    assert settings["VLM_ASSETS_MAX_IMAGES"]["value"] == 12
    home = settings["VLM_ASSETS_HOME"]
    assert (home["value"], home["set"]) == (str(dataset.settings.home), True)
    assert "secret" not in json.dumps(settings["VLM_ASSETS_ALERT_TARGETS"]["value"])
    assert "nobody" not in settings


def test_next_steps_name_the_home_that_was_given(dataset, monkeypatch):
    """A command that is copied from the output works on the same home, also where its name has a blank."""
    home = dataset.settings.home.rename(dataset.settings.home.with_name("my home"))
    done = CliRunner().invoke(cli.app, ["audit", "--home", str(home)])
    monkeypatch.setenv("VLM_ASSETS_HOME", str(home))
    unnamed = CliRunner().invoke(cli.app, ["status"])
    named = CliRunner().invoke(cli.app, ["status", "--home", str(home)])
    commands = re.findall(r"vlm-assets [a-z]+", unnamed.output)
    assert commands
    assert done.exit_code == 0
    for shown in (unnamed, named):
        output = shown.output.replace("\n", "").replace(" ", "")
        assert output.count(f"--home'{home}'".replace(" ", "")) == len(commands)


def test_a_home_is_named_once(tmp_path, monkeypatch):
    """A command that names its home already gets no second --home: it could not be pasted."""
    home = tmp_path / "home"
    said = CliRunner().invoke(cli.app, ["doctor", "--quick", "--home", str(home)]).output
    assert f"vlm-assets ingest SOURCE --home {home}" in " ".join(said.split())
    assert f"--home {home} SOURCE" not in " ".join(said.split())


def test_a_home_is_named_by_its_own_command_alone(dataset):
    """What is shown after a command in the same process does not name that command's home."""
    CliRunner().invoke(cli.app, ["status", "--home", str(dataset.settings.home)])
    assert command("audit") == "`vlm-assets audit`"


def test_a_schema_beside_the_makefile_is_found(tmp_path, monkeypatch):
    """`my_module:MyClass` is a file in the folder where the command is started, as the README says."""
    (tmp_path / "beside_me.py").write_text(
        "import pydantic\nclass Mine(pydantic.BaseModel):\n    rooms_counted: int\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("VLM_ASSETS_DESCRIPTION_SCHEMA", "beside_me:Mine")
    schema = load_schema(load_settings(home=tmp_path / "home").description_schema)
    assert "rooms_counted" in str(schema.json_schema)


def test_the_cores_extra_is_named_before_that_of_an_extension(monkeypatch, capsys):
    """Postgres needs no packages of a cluster, whoever else installs its driver."""

    class Another(Extension):
        package = "another"
        extras: ClassVar = {
            "dagster_postgres": "distributions/another[all]",
            "another_driver": "another[driver]",
        }

    monkeypatch.setattr(cli, "installed", lambda: (Another(),))
    for module, extra in (("dagster_postgres.utils", ".[postgres]"), ("another_driver", "another[driver]")):

        def lack(module=module):
            raise ModuleNotFoundError(f"No module named {module!r}", name=module)

        monkeypatch.setattr(cli, "app", lack)
        with pytest.raises(SystemExit):
            cli.main()
        assert f"-e '{extra}'" in capsys.readouterr().err
