"""The component: its settings are those of the file, and what it lacks is named."""

from contextvars import ContextVar
from pathlib import Path
from types import SimpleNamespace

import dagster as dg
import pytest
import yaml

from sensors.dagster_internals.instance_needs import UnfitInstanceError, refuse_unfit
from vlm_assets import component
from vlm_assets.component import PropertyDescriptionsComponent
from vlm_assets.config.settings import SettingsError
from vlm_durable import commands


@pytest.fixture(autouse=True)
def _no_homes(monkeypatch):
    """No test sees which homes another one's components have, or which home they named for commands."""
    monkeypatch.setattr(component, "_owners", {})
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
    assert component_of().to_settings(tmp_path, name="houses") == houses, "a reload"
    houses.home.mkdir(parents=True)
    (tmp_path / "link").symlink_to(houses.home)
    for home in ("data/houses", "data/houses/../houses", "link"):
        with pytest.raises(SettingsError, match="the home of the components houses and third"):
            component_of(home=home).to_settings(tmp_path, name="third")


def test_a_database_is_the_control_state_of_one_component(tmp_path):
    """It has the pauses, cancels and retries of one home; a second component that names it is refused."""
    given = component_of(settings={"state_url": "postgresql+psycopg2://u:secret@h/db"})
    houses = given.to_settings(tmp_path, name="houses")
    assert given.to_settings(tmp_path, name="houses") == houses, "a reload"
    with pytest.raises(SettingsError, match="control state of the components houses and flats") as refused:
        given.to_settings(tmp_path, name="flats")
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"settings": {"batch_sise": 3}}, "no setting batch_sise. Did you mean batch_size"),
        ({"settings": {"batch_size": -3}}, "batch_size=-3"),
        ({"settings": {"source": "x"}}, "source: no entry of `settings`"),
        ({"settings": {"home": "x"}}, "home: no entry of `settings`"),
        (
            {
                "settings": {
                    "ray_address": "http://a:1",
                    "state_url": "postgresql+psycopg2://a/b",
                    "store": "s3://abc",
                }
            },
            "ray_address: several machines",
        ),
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
    listing = tmp_path / "listing.jsonl"
    listing.write_text('{"property_id": "p", "images": ["p.jpg"]}\n')
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
