"""The core takes what an extension hands over, names none, and does its work without any."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from importlib.metadata import entry_points
from pathlib import Path

import dagster as dg
import pytest
import sqlalchemy as sa

from tests.support.command_line import run_command
from tests.support.homes import Dataset
from vlm_assets.commands import main as cli
from vlm_assets.config import extensions
from vlm_assets.config import settings as settings_module
from vlm_assets.config.engine_choice import require_models
from vlm_assets.config.resource_settings import (
    build_gpu,
    build_vision_language_model,
    control_state,
    runs_at_once,
)
from vlm_assets.config.settings import Settings, SettingsError, given_settings, load_settings
from vlm_assets.home_definitions import build_defs
from vlm_assets.services.command_error import CommandError
from vlm_assets.services.home_backup import back_up
from vlm_assets.services.withdrawal import prepare_withdrawal, withdraw
from vlm_catalog.catalog_file import withdrawal_note
from vlm_durable.state.tables import quality_summaries
from vlm_durable.state.workers import Workers

MODULE = '''
import dagster as dg
from pydantic import SecretStr
from vlm_assets.commands.terminal import app, say
from vlm_assets.config.extensions import DoctorCheck, Extension, Launcher, StatusTable
from vlm_assets.config.settings import Settings

class Wrong(Exception):
    """An error of this extension."""

@app.command("neighbours", epilog="vlm-assets neighbours")
def neighbours() -> None:
    """Say who lives there."""
    raise Wrong("Nobody lives there. Ask again in spring.")

@dg.asset
def neighbourhoods() -> None:
    """An asset of an extension."""

@dg.sensor(asset_selection="neighbourhoods", minimum_interval_seconds=77)
def neighbours_moved(context):
    """A sensor of an extension."""

def look_for_them(settings):
    yield "warning", "Ada is not at home. Ring again."
    raise Wrong("The bell is broken. Knock.")

class NeighbourSettings(Settings):
    rings: int = 3
    """How often to ring."""
    door: SecretStr | None = None
    """The door's number, for friends."""

class Neighbours(Extension):
    """Who lives there."""

    settings = NeighbourSettings
    settings_title = "With neighbours"
    package = "neighbours_extension"
    commands = {"neighbours": ("neighbours_extension", "Say who lives there.")}
    assets = ("neighbourhoods",)
    model_source = "neighbour"

    def definitions(self, settings):
        return dg.Definitions(assets=[neighbourhoods], sensors=[neighbours_moved])

    def model_folder(self, settings, name):
        return settings.home / "neighbourhoods" / name

    def status(self, settings):
        return StatusTable("neighbours", ("who", "since"), (("Ada", "1815"),), ({"who": "Ada"},))

    def launcher(self, settings):
        if getattr(settings, "rings", 0) == 4:
            return Launcher(node="ada", has_sensors=True, added_seconds=8.0)

    def doctor_checks(self):
        return (DoctorCheck("who is home", look_for_them, is_quick=True),)

    def busy_with(self, settings, ids, workers):
        return {worker.partition for worker in workers if worker.asset == "neighbourhoods"}

    def forget(self, settings, ids, keys):
        yield f"Forgot the neighbours of {len(ids)} in {', '.join(keys)}."
'''


@pytest.fixture
def with_extensions(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Looks anew at what is installed: what is named, and nothing else; all that is there where None."""

    def look(*names: str) -> None:
        points = [one for one in entry_points(group=settings_module.EXTENSIONS) if one.name in names]
        for module in (extensions, settings_module):
            monkeypatch.setattr(module, "entry_points", lambda group: points)
        settings_module.loaded_extensions.cache_clear()
        cli.commands.cache_clear()

    yield look
    monkeypatch.undo()
    settings_module.loaded_extensions.cache_clear()
    cli.commands.cache_clear()


@pytest.fixture
def neighbours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, with_extensions: Callable[..., None]) -> None:
    """A distribution that somebody else made is installed, and no other extension."""
    about = tmp_path / "site" / "neighbours-1.0.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: neighbours\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(
        "[vlm_assets.extensions]\nneighbours = neighbours_extension:Neighbours\n"
    )
    (about.parent / "neighbours_extension.py").write_text(MODULE)
    monkeypatch.syspath_prepend(about.parent)
    with_extensions("neighbours")


def keys_of(definitions: dg.Definitions) -> set[str]:
    """The names of all assets."""
    return {key.to_user_string() for key in definitions.get_repository_def().assets_defs_by_key}


def test_assets_and_sensors_of_an_extension_are_the_projects(neighbours: None, dataset: Dataset) -> None:
    """They load beside the core's, and a sensor of theirs that falls silent is alerted like any other."""
    definitions = build_defs(dataset.settings)
    assert {"neighbourhoods", "property_descriptions", "dataset_audit"} <= keys_of(definitions)
    assert {"description_model", "dataset_quality"}.isdisjoint(keys_of(definitions))
    assert "neighbours_moved" in {one.name for one in definitions.get_repository_def().sensor_defs}


def test_a_command_of_an_extension_is_listed_and_its_errors_are_sentences(neighbours, capsys, monkeypatch):
    """A person sees no difference between a command of the core and one of an extension."""
    assert cli.commands()["neighbours"][1] == "Say who lives there."
    monkeypatch.setattr("sys.argv", ["vlm-assets", "neighbours"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    written = capsys.readouterr().err
    assert ended.value.code == 1
    assert "Ask again in spring" in written
    assert "Traceback" not in written


def test_settings_of_an_extension_are_listed_and_refused_as_all_others(
    neighbours: None, with_extensions: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They come from the environment, checked; a secret one is shown nowhere; without it none is known."""
    home = tmp_path / "home"
    listed = run_command(home, "settings").output
    assert listed.partition("\nWith neighbours\n")[2].split()[:5] == [
        "VLM_ASSETS_RINGS=3",
        *["How", "often", "to", "ring."],
    ]
    monkeypatch.setenv("VLM_ASSETS_RINGS", "often")
    monkeypatch.setenv("VLM_ASSETS_DOOR", "4711")
    with pytest.raises(SettingsError, match="VLM_ASSETS_RINGS='often'"):
        load_settings(home=home)
    with pytest.raises(SettingsError, match=r"VLM_ASSETS_DOOR=\(secret\)"):
        load_settings(home=home, rings=1, door=["4711"])
    settings = load_settings(home=home, rings=1)
    assert (settings.rings, settings.door.get_secret_value()) == (1, "4711")
    with_extensions()
    with pytest.raises(SettingsError, match=r"VLM_ASSETS_DOOR is set .* its extension is not installed"):
        load_settings(home=home)


def test_two_extensions_cannot_declare_one_setting() -> None:
    """One of them would be read by the rules of the other."""

    class First(Settings):
        rings: int = 1

    class Second(Settings):
        rings: str = "once"

    with pytest.raises(SettingsError, match="Two extensions declare VLM_ASSETS_RINGS"):
        settings_module._with_all(Settings, (First, Second))


def test_status_shows_what_an_extension_tells(neighbours: None, dataset: Dataset) -> None:
    """As a table for people, and as facts for programs."""
    shown = run_command(dataset.settings.home, "status").output
    assert "neighbours" in shown and "1815" in shown
    (table,) = json.loads(run_command(dataset.settings.home, "status", "--json").output)["extensions"]
    assert table["facts"] == [{"who": "Ada"}]


def test_the_doctor_makes_the_checks_of_an_extension(neighbours: None, dataset: Dataset) -> None:
    """They run among the quick ones, and one that fails itself is a finding too."""
    told = json.loads(run_command(dataset.settings.home, "doctor", "--quick", "--json").output)
    assert [(one["level"], one["message"]) for one in told if one["check"] == "who is home"] == [
        ("warning", "Ada is not at home. Ring again."),
        ("error", "The bell is broken. Knock."),
    ]


def test_a_backup_takes_along_what_an_extension_keeps(neighbours, dataset, tmp_path) -> None:
    """A finished file of an asset that the core does not know is in the backup."""
    theirs = dataset.settings.layout.asset("neighbourhoods").published / "ada.txt"
    theirs.parent.mkdir()
    theirs.write_text("1815")
    back_up(dataset.settings, tmp_path / "backup")
    copies = [path for path in (tmp_path / "backup").rglob("*") if path.is_file()]
    assert any(path.read_bytes() == b"1815" for path in copies)


def test_an_extension_is_asked_before_a_withdrawal_and_forgets_in_it(neighbours, dataset) -> None:
    """A run of theirs holds it up, and what they keep of the properties goes with them."""
    settings = dataset.settings
    wanted = prepare_withdrawal(settings, ["p0"])
    with (
        Workers(control_state(settings)).begin(
            run_id="r", asset="neighbourhoods", partition="ada", expected=1
        ),
        pytest.raises(CommandError, match="A run works on ada"),
    ):
        list(withdraw(settings, wanted))
    assert f"Forgot the neighbours of 1 in {dataset.keys[0]}." in list(withdraw(settings, wanted))


def test_the_core_works_with_no_extension(with_extensions, dataset, tmp_path) -> None:
    """Definitions load, status answers, properties are withdrawn, and other commands are unknown."""
    with_extensions()
    settings = dataset.settings
    assert "property_descriptions" in keys_of(build_defs(settings))
    assert "search" not in cli.commands()
    assert json.loads(run_command(settings.home, "status", "--json").output)["extensions"] == []
    assert dataset.withdraw("p0")
    back_up(settings, tmp_path / "backup")


TRAINED = ("description_model/v/model.safetensors", ".journal/description_model/v/plan/samples.jsonl")
LOOKED_AT = ("review.jsonl", ".state/explore/table.parquet", ".state/search/words.sqlite")


@pytest.mark.parametrize("name", [*TRAINED, *LOOKED_AT])
def test_what_a_missing_extension_keeps_stops_a_withdrawal(with_extensions, dataset, name) -> None:
    """The core cannot remove it: a person reads what to install, and nothing is withdrawn by half."""
    with_extensions()
    settings = dataset.settings
    wanted = prepare_withdrawal(settings, ["p0"])
    theirs = settings.home / name
    theirs.parent.mkdir(parents=True, exist_ok=True)
    theirs.write_text("")
    before = dataset.catalog.header
    missing = "vlm-assets-training" if name in TRAINED else "vlm-assets-results"
    for attempt in (lambda: prepare_withdrawal(settings, ["p0"]), lambda: list(withdraw(settings, wanted))):
        with pytest.raises(CommandError, match=rf"Nothing was changed\. Install {missing}"):
            attempt()
    assert dataset.catalog.header == before
    assert not withdrawal_note(settings.state_directory).exists()
    theirs.unlink()  # Empty folders hold up nothing.
    assert list(withdraw(settings, wanted))


@pytest.mark.parametrize("name", [*TRAINED, *LOOKED_AT])
def test_a_backup_never_drops_the_models_of_a_missing_extension(with_extensions, dataset, tmp_path, name):
    """The backup before has them, and stays; what the core copies itself or nobody needs stops nothing."""
    with_extensions()
    back_up(dataset.settings, tmp_path / "backup")
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "backup").rglob("*") if path.is_file()}
    theirs = dataset.settings.home / name
    theirs.parent.mkdir(parents=True, exist_ok=True)
    theirs.write_text("")
    if name in LOOKED_AT:
        back_up(dataset.settings, tmp_path / "backup")
        return
    with pytest.raises(CommandError, match=r"The backup before stays\. Install vlm-assets-training"):
        back_up(dataset.settings, tmp_path / "backup")
    after = {path: path.stat().st_mtime_ns for path in (tmp_path / "backup").rglob("*") if path.is_file()}
    assert after == before


def test_a_withdrawal_forgets_summaries_with_no_extension(with_extensions, dataset) -> None:
    """They lie in the core's control state, and may name who is withdrawn."""
    with_extensions()
    settings = dataset.settings
    state, keys = control_state(settings), dataset.keys
    rows = [{"key": key, "made_of": "", "summary": {}} for key in keys]
    state.beat(lambda connection: connection.execute(quality_summaries.insert(), rows))
    assert dataset.withdraw("p0")
    left = state.read_beats(lambda connection: connection.execute(sa.select(quality_summaries.c.key)).all())
    assert sorted(key for (key,) in left) == sorted(keys[1:])


@pytest.mark.parametrize(
    ("name", "distribution"), [("RAY_ADDRESS", "vlm-assets-cluster"), ("VARIANTS", "vlm-assets-training")]
)
def test_a_setting_of_a_missing_extension_is_refused_by_its_distribution(
    with_extensions, tmp_path, monkeypatch, name, distribution
) -> None:
    """Without that of several machines, all would run on this one, and nobody be told."""
    with_extensions()
    with pytest.raises(SettingsError, match=f"no setting {name.lower()}. Install {distribution}"):
        given_settings(home=tmp_path, name_prefix="houses", **{name.lower(): "x"})
    monkeypatch.setenv(f"VLM_ASSETS_{name}", "http://10.0.0.1:8265")
    with pytest.raises(SettingsError, match=f"VLM_ASSETS_{name} is set .* Install {distribution}"):
        load_settings(home=tmp_path)


def test_runs_are_launched_by_this_machine_unless_an_extension_launches_them(neighbours, dataset) -> None:
    """What asks the launcher follows it: how many begin, where, who watches them, which Dagster settings."""
    here = dataset.settings
    elsewhere = here.model_copy(update={"rings": 4})
    assert (runs_at_once(here) > 0, runs_at_once(elsewhere)) == (True, 0)
    assert (build_gpu(here).node, build_gpu(elsewhere).node) == ("", "ada")
    assert extensions.launcher_of(here) == extensions.Launcher()
    assert extensions.launcher_of(here).dagster_settings(here) is None
    sensors = [
        {sensor.name for sensor in build_defs(settings).get_repository_def().sensor_defs}
        for settings in (here, elsewhere)
    ]
    assert sensors[0] - sensors[1] == {"worker_health"}


def test_a_model_of_an_extension_describes(neighbours, with_extensions, dataset) -> None:
    """By its name; one that is not there yet stops no definitions, and work with a sentence."""
    settings = dataset.settings.model_copy(update={"model": "neighbour:ada"})
    folder = settings.home / "neighbourhoods" / "ada"
    assert build_vision_language_model(settings).model == str(folder)
    assert "property_descriptions" in keys_of(build_defs(settings))
    with pytest.raises(SettingsError, match="is not there yet"):
        require_models(settings)
    folder.mkdir(parents=True)
    require_models(settings)
    for other in (None, "owner/name", "/models/with:colon"):
        assert extensions.describing_model(settings.model_copy(update={"model": other})) == other
    with_extensions()
    with pytest.raises(SettingsError, match="of an extension that is not installed"):
        extensions.describing_model(settings)
