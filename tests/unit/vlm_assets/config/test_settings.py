"""Settings are validated when they are read, and a wrong one is named with what would do."""

import subprocess
import sys
from pathlib import Path

import pytest

from vlm_assets.assets.fingerprint import Meanings
from vlm_assets.config import settings as settings_module
from vlm_assets.config.engine_choice import require_models
from vlm_assets.config.resource_settings import build_text_embedding_model, build_vision_language_model
from vlm_assets.config.settings import (
    CHECKOUT,
    EXAMPLE_EMBEDDER,
    EXAMPLE_MODEL,
    Settings,
    SettingsError,
    load_settings,
)
from vlm_engine.protocol import ModelLoadError


@pytest.fixture(autouse=True)
def no_settings(monkeypatch, tmp_path):
    import os

    for name in os.environ:
        if name.startswith("VLM_ASSETS_"):
            monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)


def test_a_misspelt_setting_is_refused_with_the_right_name(monkeypatch):
    """A setting that is silently ignored costs weeks."""
    monkeypatch.setenv("VLM_ASSETS_MODLE", "x")
    with pytest.raises(SettingsError, match=r"VLM_ASSETS_MODLE .* Did you mean VLM_ASSETS_MODEL\?"):
        load_settings()


def test_a_misspelt_setting_in_the_file_is_refused_too(monkeypatch, tmp_path):
    """Where it stands is named: the file is where most settings of a service are."""
    file = tmp_path / ".env"
    file.write_text("# ours\nVLM_ASSETS_MODEL=a/b\nVLM_ASSETS_HOEM=/srv\nOTHER=1\n")
    monkeypatch.setitem(Settings.model_config, "env_file", file)
    with pytest.raises(SettingsError, match=r"VLM_ASSETS_HOEM .*\.env .* Did you mean VLM_ASSETS_HOME\?"):
        load_settings()
    file.write_text("VLM_ASSETS_MODEL=a/b\nOTHER=1\n")
    assert load_settings().model == "a/b"


PROGRAM = Path(sys.executable).with_name("vlm-assets")
OF_A_CHILD = "import os, subprocess, sys; from vlm_assets.config.settings import ENV_FILE; print(ENV_FILE)"


def said_in(folder: Path, *command: str | Path) -> str:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=100, check=False)
    return done.stdout + done.stderr


def test_the_env_file_of_the_working_folder_goes_before_that_of_the_checkout(tmp_path):
    """A file that is silently not read would have a command act on another home."""
    file, home = tmp_path / ".env", tmp_path / "home"
    assert f"{CHECKOUT / '.env'}" in said_in(tmp_path, PROGRAM, "settings")
    file.write_text("OTHER=1\n")
    assert f"{CHECKOUT / '.env'}" in said_in(tmp_path, PROGRAM, "settings"), "another program's"
    file.write_text(f"VLM_ASSETS_HOME={home}\n")
    said = said_in(tmp_path, PROGRAM, "settings")
    assert f"Settings are read from {file}" in said
    assert f"VLM_ASSETS_HOME={home}" in said
    file.write_bytes(b"VLM_ASSETS_HOME=\xff\n")
    said = said_in(tmp_path, PROGRAM, "settings")
    assert str(file) in said and "Traceback" not in said


def test_an_env_file_that_was_named_holds_in_every_folder(monkeypatch, tmp_path):
    """So children of a command, which work elsewhere, read what the command read."""
    inner = tmp_path / "inner"
    inner.mkdir()
    (inner / ".env").write_text("VLM_ASSETS_MAX_IMAGES=2\n")
    monkeypatch.setenv("VLM_ASSETS_ENV_FILE", str(tmp_path / ".env"))
    assert said_in(inner, sys.executable, "-c", OF_A_CHILD).strip() == str(tmp_path / ".env")
    monkeypatch.delenv("VLM_ASSETS_ENV_FILE")
    assert said_in(inner, sys.executable, "-c", OF_A_CHILD).strip() == str(inner / ".env")


def test_every_wrong_value_is_named(monkeypatch):
    """All wrong settings are told at once, each with its value."""
    monkeypatch.setenv("VLM_ASSETS_BATCH_SIZE", "0")
    monkeypatch.setenv("VLM_ASSETS_COMMIT_SECONDS", "soon")
    with pytest.raises(SettingsError, match=r"BATCH_SIZE='0'.*COMMIT_SECONDS='soon'"):
        load_settings()


def test_relative_folders_become_absolute(monkeypatch, tmp_path):
    """A run's working directory is not the shell's, so folders are resolved where they are read."""
    (tmp_path / "models" / "mine").mkdir(parents=True)
    monkeypatch.setenv("VLM_ASSETS_HOME", "here")
    monkeypatch.setenv("VLM_ASSETS_MODEL", "models/mine")
    settings = load_settings()
    assert settings.home == tmp_path / "here"
    assert settings.model == str(tmp_path / "models" / "mine")


def test_a_path_that_is_not_utf8_is_refused(monkeypatch):
    """No catalogue, record or database could name it; a half-made home there would look damaged."""
    monkeypatch.setenv("VLM_ASSETS_HOME", "/srv/caf\udce9")
    with pytest.raises(SettingsError, match=r"VLM_ASSETS_HOME=.*must be UTF-8"):
        load_settings()


def test_a_hub_id_stays_as_it_is(monkeypatch):
    """What is no folder here is a hub id, unless it is written like a path."""
    monkeypatch.setenv("VLM_ASSETS_MODEL", "owner/name")
    assert load_settings().model == "owner/name"
    monkeypatch.setenv("VLM_ASSETS_MODEL", "./owner/name")
    with pytest.raises(SettingsError, match="there is no folder"):
        load_settings()


def test_no_model_is_chosen_by_itself(monkeypatch, tmp_path):
    """The example model knows nothing of a person's images: it describes them only when asked for by name."""
    settings = load_settings(home=tmp_path)
    assert settings.model is None
    with pytest.raises(SettingsError, match=r"VLM_ASSETS_MODEL is not set.*VLM_ASSETS_MODEL=example"):
        require_models(settings)
    with pytest.raises(ModelLoadError, match="set VLM_ASSETS_MODEL"):
        build_vision_language_model(settings).exact_revision()
    monkeypatch.setenv("VLM_ASSETS_MODEL", "example")
    settings = load_settings(home=tmp_path)
    assert settings.model == str(EXAMPLE_MODEL)
    require_models(settings)


def test_describing_waits_for_no_embedding_model(monkeypatch, tmp_path):
    """Without an embedder descriptions are made, and no other model embeds in its place."""
    settings = load_settings(home=tmp_path, model="example")
    assert settings.embedding_model is None
    require_models(settings)
    assert settings.computed_assets == ("property_descriptions",)
    assert Meanings.from_settings(settings).of_asset("property_embeddings").parts == {}
    with pytest.raises(ModelLoadError, match="set VLM_ASSETS_EMBEDDING_MODEL"):
        build_text_embedding_model(settings).exact_revision()
    monkeypatch.setenv("VLM_ASSETS_EMBEDDING_MODEL", "owner/name")
    named = load_settings(home=tmp_path, model="example")
    assert named.computed_assets == ("property_descriptions", "property_embeddings")
    assert build_text_embedding_model(named).model == "owner/name"


def test_a_home_with_the_rendered_example_has_the_examples_models(monkeypatch, tmp_path):
    """What `make run` began, every later command and service goes on with, without a setting."""
    (tmp_path / "example").mkdir()
    (tmp_path / "example" / "example.json").write_text("{}")
    settings = load_settings(home=tmp_path)
    assert (settings.model, settings.embedding_model) == (str(EXAMPLE_MODEL), str(EXAMPLE_EMBEDDER))
    named = load_settings(home=tmp_path, model="owner/name", embedding_model="owner/embedder")
    assert (named.model, named.embedding_model) == ("owner/name", "owner/embedder")


def test_an_installed_package_says_that_it_has_no_example_model(monkeypatch, tmp_path):
    """Asked for by name without a checkout, it is refused; nothing is chosen in its place."""
    monkeypatch.setattr(settings_module, "EXAMPLE_MODEL", tmp_path / "nothing")
    monkeypatch.setenv("VLM_ASSETS_MODEL", "example")
    with pytest.raises(SettingsError, match="only a checkout has the example model"):
        load_settings()


def test_dagster_state_of_the_default_home_is_in_the_checkout(tmp_path):
    """The default home's Dagster state is dagster_home/; any other home carries its own."""
    assert load_settings().dagster_home == CHECKOUT / "dagster_home"
    assert load_settings(home=tmp_path / "h").dagster_home == tmp_path / "h" / "dagster"


@pytest.mark.parametrize(
    ("minutes", "every"), [(0.05, 1), (1.0, 1), (7.5, 6), (10.0, 10), (59.0, 30), (600.0, 60)]
)
def test_the_schedule_looks_at_equal_intervals(minutes, every, tmp_path):
    """Cron's */7 waits four minutes at every full hour: the next smaller divisor of 60 is taken."""
    assert load_settings(home=tmp_path, retry_minutes=minutes).retry_every_minutes == every


@pytest.mark.parametrize("hosts", ["http://a.example", "a.example:80", "*", "a/b"])
def test_an_allowed_host_is_a_name(hosts, tmp_path):
    """An address or a pattern in VLM_ASSETS_ALLOWED_HOSTS would silently allow nothing."""
    with pytest.raises(SettingsError, match="no host name"):
        load_settings(home=tmp_path, allowed_hosts=hosts)
    assert load_settings(home=tmp_path, allowed_hosts="a.example 10.0.0.7").hosts == ["a.example", "10.0.0.7"]


@pytest.mark.parametrize(
    ("name", "value"),
    [("owners", "ann"), ("owners", "team:"), ("tags", "gold"), ("tags", "tier=a/b"), ("tags", "=gold")],
)
def test_owners_and_tags_are_refused_by_name(name, value, tmp_path):
    """Dagster would refuse all definitions because of one of them, without the setting's name."""
    with pytest.raises(SettingsError, match=f"VLM_ASSETS_{name.upper()}"):
        load_settings(home=tmp_path, **{name: value})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("MAX_PIXELS", "10"),
        ("MAX_PIXELS", "200000000"),
        ("MAX_IMAGES", "0"),
        ("MAX_IMAGES", "501"),
        ("DECODE_WORKERS", "0"),
        ("BATCH_SIZE", "10001"),
    ],
)
def test_settings_with_which_nothing_sensible_can_come_out_are_refused(monkeypatch, name, value):
    """An image of ten pixels shows nothing, and a run is refused before it begins."""
    monkeypatch.setenv(f"VLM_ASSETS_{name}", value)
    with pytest.raises(SettingsError, match=f"VLM_ASSETS_{name}=.?{value}"):
        load_settings()


def test_several_machines_need_what_they_share(monkeypatch, tmp_path):
    """A cluster without Postgres and a store would be as many data sets as machines."""
    monkeypatch.setenv("VLM_ASSETS_HOME", str(tmp_path))
    monkeypatch.setenv("VLM_ASSETS_RAY_ADDRESS", "http://10.0.0.1:8265")
    with pytest.raises(SettingsError, match="share Postgres, and VLM_ASSETS_STATE_URL is not set"):
        load_settings()
    monkeypatch.setenv("VLM_ASSETS_STATE_URL", "postgresql+psycopg2://u@10.0.0.1/d")
    with pytest.raises(SettingsError, match="share an S3 store, and VLM_ASSETS_STORE is not set"):
        load_settings()
    monkeypatch.setenv("VLM_ASSETS_STORE", "s3://bucket/data")
    assert load_settings().ray_address == "http://10.0.0.1:8265"


def test_a_database_address_without_its_driver_is_refused_and_not_shown(monkeypatch):
    """Dagster reads the same variable, and would fail on it in a run."""
    monkeypatch.setenv("VLM_ASSETS_STATE_URL", "postgresql://u:a-secret@10.0.0.1/d")
    with pytest.raises(SettingsError, match=r"postgresql\+psycopg2://") as refused:
        load_settings()
    assert "a-secret" not in str(refused.value)


@pytest.mark.parametrize("model", ["owner/name@", "@v1", "owner/name@a@b"])
def test_a_hub_id_has_one_revision(model, tmp_path):
    """A slip would be another model, or none: it is named before anything is loaded."""
    with pytest.raises(SettingsError, match="owner/name@revision"):
        load_settings(home=tmp_path, model=model)


def test_a_revision_reaches_the_models_and_a_folder_has_none(tmp_path):
    """The part after the @ of a hub id; a folder may have one in its name."""
    settings = load_settings(home=tmp_path, model="owner/name@v1", embedding_model="owner/embedder")
    assert (made := build_vision_language_model(settings)).model == "owner/name"
    assert made.revision == "v1"
    assert build_text_embedding_model(settings).revision is None
    folder = tmp_path / "mine@2"
    folder.mkdir()
    of_folder = build_vision_language_model(load_settings(home=tmp_path, model=str(folder)))
    assert (of_folder.model, of_folder.revision) == (str(folder), None)
