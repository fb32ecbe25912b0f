"""The component: its settings are those of the file, and what it lacks is named."""

from contextvars import ContextVar
from pathlib import Path
from types import SimpleNamespace

import dagster as dg
import pytest
import yaml

from sensors.dagster_internals.instance_needs import UnfitInstanceError, refuse_unfit
from tests.support.listings import write_listing
from vlm_assets import component
from vlm_assets.component import PropertyDescriptionsComponent
from vlm_assets.config.component_settings import keep_settings, refuse_component, settings_of_home
from vlm_assets.config.settings import Settings, SettingsError
from vlm_durable import commands
from vlm_durable.files.sealed_json import read_sealed, write_sealed


@pytest.fixture(autouse=True)
def _no_homes(monkeypatch):
    """No test sees which home another one's components named for commands."""
    monkeypatch.setattr(commands, "_named_home", ContextVar("named_home", default=None))


def component_of(**fields: object) -> PropertyDescriptionsComponent:
    """The component of a defs.yaml with these fields."""
    given = {"images": "photographs", "model": "someone/model", **fields}
    return PropertyDescriptionsComponent.resolve_from_yaml(yaml.safe_dump(given))


def test_settings_are_those_of_the_file_alone(tmp_path, monkeypatch):
    """A run worker whose environment is another's has the same settings; paths begin in the project."""
    for name, value in {"MODEL": "another/model", "BATCH_SIZE": "7", "RANGE_SIZE": "7"}.items():
        monkeypatch.setenv(f"VLM_ASSETS_{name}", value)
    (tmp_path / "own").mkdir()
    given = component_of(model="own", range_size=50, settings={"devices": "cpu:1"})
    settings = given.to_settings(tmp_path, name="my-houses")
    assert settings.home == tmp_path / "data" / "my_houses"
    assert (settings.source, settings.model) == (tmp_path / "photographs", str(tmp_path / "own"))
    assert (settings.range_size, settings.batch_size, settings.devices) == (50, 256, "cpu:1")
    assert settings.names.prefix == "my_houses"


def test_two_components_share_devices_and_nothing_else(tmp_path):
    """Locks of devices are one folder; a home is one component's, and another that names it is refused."""
    houses = component_of().to_settings(tmp_path, name="houses")
    flats = component_of(name_prefix="flats").to_settings(tmp_path, name="houses")
    assert houses.devices_directory == flats.devices_directory
    assert houses.state_directory != flats.state_directory
    keep_settings(houses, tmp_path)
    keep_settings(component_of(range_size=9).to_settings(tmp_path, name="houses"), tmp_path)  # a reload
    (tmp_path / "link").symlink_to(houses.home)
    for home in ("data/houses", "data/houses/../houses", "link"):
        third = component_of(home=home).to_settings(tmp_path, name="third")
        with pytest.raises(SettingsError, match=r"is the home of the component houses of .* delete"):
            keep_settings(third, tmp_path)
    elsewhere = component_of(home=str(houses.home)).to_settings(tmp_path / "other", name="houses")
    with pytest.raises(SettingsError, match=f"component houses of {tmp_path}, and houses of .*other"):
        keep_settings(elsewhere, tmp_path / "other")


def test_commands_work_with_what_the_file_says_and_with_secrets_of_the_environment(tmp_path, monkeypatch):
    """Whatever the shell sets for another home; without a secret nothing is read from another database."""
    secret = "postgresql+psycopg2://u:secret@h/db"
    given = component_of(range_size=50, settings={"state_url": secret, "devices": "cpu:1"})
    settings = given.to_settings(tmp_path, name="houses")
    keep_settings(settings, tmp_path)
    assert "secret" not in (settings.state_directory / "component.json").read_text()
    monkeypatch.setenv("VLM_ASSETS_MODEL", "another/model")
    with pytest.raises(SettingsError, match="set VLM_ASSETS_STATE_URL for this command too"):
        settings_of_home(home=settings.home)
    monkeypatch.setenv("VLM_ASSETS_STATE_URL", secret)
    assert settings_of_home(home=settings.home) == settings
    assert settings_of_home(home=settings.home, model="a/contender").model == "a/contender"
    assert settings_of_home(home=tmp_path / "elsewhere").model == "another/model"
    with pytest.raises(SettingsError, match="materialize houses/property_descriptions there"):
        refuse_component(settings_of_home(home=settings.home))


def test_a_home_starts_no_code_and_names_no_server(tmp_path, monkeypatch):
    """A home may be somebody else's copy: what it says of these is asked of the environment, or left out."""
    command = "serve {model} --port {port}"
    given = component_of(settings={"server_command": command, "trust_remote_code": True, "engine": "server"})
    settings = given.to_settings(tmp_path, name="houses")
    keep_settings(settings, tmp_path)
    names = "VLM_ASSETS_SERVER_COMMAND, VLM_ASSETS_TRUST_REMOTE_CODE"
    with pytest.raises(SettingsError, match=f"set {names} for this command too"):
        settings_of_home(home=settings.home)
    monkeypatch.setenv("VLM_ASSETS_ENGINE", "server")
    monkeypatch.setenv("VLM_ASSETS_SERVER_COMMAND", command)
    monkeypatch.setenv("VLM_ASSETS_TRUST_REMOTE_CODE", "true")
    assert settings_of_home(home=settings.home) == settings

    file = settings.state_directory / "component.json"
    content = read_sealed(file)
    content["settings"] |= {"server_command": "touch stolen", "description_schema": "theirs:Schema"}
    write_sealed(file, {**content, "own": []})
    forged = settings_of_home(home=settings.home)
    assert forged.server_command is None and not forged.trust_remote_code
    assert forged.description_schema == Settings.model_fields["description_schema"].default


def test_a_project_that_is_deployed_into_another_folder_keeps_its_home(tmp_path):
    """The folder of the deployment before is gone; while it is there, two projects would share a home."""
    (tmp_path / "1").mkdir()
    home = str(tmp_path / "home")
    keep_settings(component_of(home=home).to_settings(tmp_path / "1", name="houses"), tmp_path / "1")
    again = component_of(home=home).to_settings(tmp_path / "2", name="houses")
    with pytest.raises(SettingsError, match="is the home of the component houses"):
        keep_settings(again, tmp_path / "2")
    (tmp_path / "1").rmdir()
    keep_settings(again, tmp_path / "2")
    assert read_sealed(again.state_directory / "component.json")["project"] == str(tmp_path / "2")


def test_a_run_suggests_commands_for_its_own_home(tmp_path):
    """Two components are loaded in a process; the one that was loaded first fails, and names its home."""
    first, second = (component_of().to_settings(tmp_path, name=name) for name in ("houses", "flats"))
    definitions = component.build_defs(first)
    component.build_defs(second)
    second.name_in_commands()
    job = definitions.resolve_implicit_global_asset_job_def()
    done = job.execute_in_process(
        asset_selection=[dg.AssetKey(["houses", "dataset_audit"])], raise_on_error=False
    )
    assert not done.success
    assert commands.command("audit") == f"`vlm-assets audit --home {first.home}`"


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"settings": {"batch_sise": 3}}, "no setting batch_sise. Did you mean batch_size"),
        ({"settings": {"batch_size": -3}}, "batch_size=-3"),
        ({"settings": {"source": "x"}}, "source: no entry of `settings`"),
        ({"settings": {"home": "x"}}, "home: no entry of `settings`"),
        ({"name_prefix": "my houses"}, "name_prefix='my houses'"),
    ],
)
def test_a_wrong_field_is_named(tmp_path, fields, sentence):
    """The definitions do not load, and say which line of the file is wrong."""
    with pytest.raises(SettingsError, match=sentence):
        component_of(**fields).to_settings(tmp_path, name="houses")


def test_an_instance_that_cannot_keep_the_promises_is_refused_by_the_setting():
    """A default instance will do. Runs elsewhere, steps elsewhere and unreadable tables will not."""
    with dg.DagsterInstance.ephemeral() as instance:
        for executor in (None, "in_process", "multiprocess"):
            refuse_unfit(instance, executor)
        with pytest.raises(UnfitInstanceError, match="Set `executor`"):
            refuse_unfit(instance, "k8s")
        stores = {"event_log_storage": instance.event_log_storage, "run_storage": instance.run_storage}
        elsewhere = SimpleNamespace(**stores, run_launcher=object())
        with pytest.raises(UnfitInstanceError, match="Leave `run_launcher` out"):
            refuse_unfit(elsewhere)
        unreadable = SimpleNamespace(**stores | {"run_storage": object()}, run_launcher=instance.run_launcher)
        with pytest.raises(UnfitInstanceError, match="Set `storage`"):
            refuse_unfit(unreadable)


def test_a_run_of_an_unfit_dagster_fails_with_the_setting_and_is_not_tried_again(tmp_path, monkeypatch):
    """Definitions load all the same; a materialization computes nothing and says what to set."""
    monkeypatch.setattr("sensors.dagster_internals.instance_needs.EXECUTORS", ())
    listing = write_listing(tmp_path / "listing.jsonl", {"p": ["p.jpg"]})
    settings = component_of(images=str(listing), range_size=1).to_settings(tmp_path, name="houses")

    def materialize(asset: str, key: str | None = None) -> dg.ExecuteInProcessResult:
        job = component.build_defs(settings).resolve_implicit_global_asset_job_def()
        selected = [dg.AssetKey(["houses", asset])]
        return job.execute_in_process(asset_selection=selected, partition_key=key, raise_on_error=False)

    assert materialize("property_catalog").success
    done = materialize("property_descriptions", "000000000-000000000")
    (failure,) = [event for event in done.all_events if event.is_step_failure]
    assert "Set `executor`" in failure.step_failure_data.user_failure_data.description
    assert Path(settings.home, ".journal").exists() is False
