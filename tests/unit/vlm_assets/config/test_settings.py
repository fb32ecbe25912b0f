"""Settings are validated when they are read, and a wrong one is named with what would do."""

import os
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
    for name in os.environ:
        if name.startswith("VLM_ASSETS_"):
            monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)


POSTGRES = {"STATE_URL": "postgresql+psycopg2://u@10.0.0.1/d"}
REFUSED = {
    "a misspelt name": ({"MODLE": "x"}, r"VLM_ASSETS_MODLE .* Did you mean VLM_ASSETS_MODEL\?"),
    "all wrong values at once": (
        {"BATCH_SIZE": "0", "COMMIT_SECONDS": "soon"},
        "BATCH_SIZE='0'.*COMMIT_SECONDS='soon'",
    ),
    "a path that is not UTF-8, which no record could name": (
        {"HOME": "/srv/caf\udce9"},
        "VLM_ASSETS_HOME=.*must be UTF-8",
    ),
    "a folder that is not there": ({"MODEL": "./owner/name"}, "there is no folder"),
    "a database without its driver, whose password is not shown": (
        {"STATE_URL": "postgresql://u:a-secret@10.0.0.1/d"},
        r"postgresql\+psycopg2://",
    ),
    **{
        f"an allowed host that is no name: {hosts}": ({"ALLOWED_HOSTS": hosts}, "no host name")
        for hosts in ("http://a.example", "a.example:80", "*", "a/b")
    },
    **{
        f"a revision that is none: {model}": ({"MODEL": model}, "owner/name@revision")
        for model in ("owner/name@", "@v1", "owner/name@a@b")
    },
    **{
        f"{name}={value}": ({name: value}, f"VLM_ASSETS_{name}=.?{value}")
        for name, value in (
            *(("MAX_PIXELS", "10"), ("MAX_PIXELS", "200000000"), ("MAX_IMAGES", "0"), ("MAX_IMAGES", "501")),
            *(("DECODE_WORKERS", "0"), ("BATCH_SIZE", "10001")),
            # Dagster would refuse all definitions because of one of them, without the setting's name.
            *(
                ("OWNERS", "ann"),
                ("OWNERS", "team:"),
                ("TAGS", "gold"),
                ("TAGS", "tier=a/b"),
                ("TAGS", "=gold"),
            ),
        )
    },
}


@pytest.mark.parametrize(("values", "sentence"), REFUSED.values(), ids=REFUSED)
def test_a_setting_that_cannot_be_meant_is_refused_by_its_name(monkeypatch, values, sentence):
    """A setting that is silently ignored, or means another thing, costs weeks; a secret is not shown."""
    for name, value in values.items():
        monkeypatch.setenv(f"VLM_ASSETS_{name}", value)
    with pytest.raises(SettingsError, match=sentence) as refused:
        load_settings()
    assert "a-secret" not in str(refused.value)


def test_settings_that_can_be_meant_are_taken(monkeypatch, tmp_path):
    """Folders become absolute where they are read; a hub id stays as it is; hosts are a list of names."""
    (tmp_path / "models" / "mine").mkdir(parents=True)
    values = {
        "HOME": "here",
        "MODEL": "models/mine",
        "EMBEDDING_MODEL": "owner/name",
        "ALLOWED_HOSTS": "a.example 10.0.0.7",
        "STORE": "s3://bucket/data",
        **POSTGRES,
    }
    for name, value in values.items():
        monkeypatch.setenv(f"VLM_ASSETS_{name}", value)
    settings = load_settings()
    assert settings.home == tmp_path / "here"
    assert settings.model == str(tmp_path / "models" / "mine")
    assert settings.embedding_model == "owner/name"
    assert settings.hosts == ["a.example", "10.0.0.7"]


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
    here = {**os.environ, "PYTHONPATH": str(CHECKOUT)}
    done = subprocess.run(command, cwd=folder, env=here, capture_output=True, text=True, timeout=100)
    return done.stdout + done.stderr


def test_the_env_file_of_the_working_folder_goes_before_that_of_the_checkout(tmp_path):
    """A file that is silently not read would have a command act on another home."""
    file, home = tmp_path / ".env", tmp_path / "home"
    of_the_checkout = str(CHECKOUT / ".env")
    assert said_in(tmp_path, sys.executable, "-c", OF_A_CHILD).strip() == of_the_checkout
    file.write_text("OTHER=1\n")
    assert said_in(tmp_path, sys.executable, "-c", OF_A_CHILD).strip() == of_the_checkout, "another program's"
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
