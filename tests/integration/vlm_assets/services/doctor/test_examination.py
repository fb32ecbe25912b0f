"""``vlm-assets doctor``: what is tried for real, and that each trouble is found and said."""

import json
import os
import re
import resource
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from pydantic import SecretStr
from typer.testing import CliRunner

from resources.alerts.outbox import Outbox
from vlm_assets.commands.main import app
from vlm_assets.config.resource_settings import control_state
from vlm_assets.services.doctor import examination, machine_checks
from vlm_assets.services.doctor.examination import checks, examine
from vlm_durable.state.pause import pause


@pytest.fixture
def said(desk, monkeypatch):
    """What one check says of the desk's home under some settings: the levels, and all sentences."""

    def look(check, **settings):
        chosen = [one for one in checks() if one.name == check]
        monkeypatch.setattr(examination, "checks", lambda: chosen)
        for limit in ("_STATE_SECONDS", "_STORE_SECONDS"):  # This machine may be slow.
            monkeypatch.setattr(machine_checks, limit, 600.0)
        found = list(examine(desk.changed(**settings).settings))
        return [one.level for one in found], " ".join(one.message for one in found)

    return look


def test_a_sound_home_has_no_error(desk, disk, tmp_path, monkeypatch, receiver):
    """All is tried for real: a property is described, a message sent, processes killed; exit code 0."""
    home = Path(shutil.copytree(desk.settings.home, disk / "home"))  # None in memory is sound.
    monkeypatch.setenv("VLM_ASSETS_DEVICES", "cpu:1")
    monkeypatch.setenv("VLM_ASSETS_ALERT_TARGETS", f"json://127.0.0.1:{receiver.port}/hook")
    monkeypatch.setattr(machine_checks, "_CAMPAIGN_MINUTES", 0.02)
    (tmp_path / "ramp.py").write_text(
        "import pydantic\nclass Ramp(pydantic.BaseModel):\n    has_ramp: bool\n"
    )
    (tmp_path / "questions.yaml").write_text("access:\n  schema: ramp:Ramp\n")
    monkeypatch.setenv("VLM_ASSETS_QUESTIONS", str(tmp_path / "questions.yaml"))
    done = CliRunner().invoke(app, ["doctor", "--home", str(home), "--json"])
    found = json.loads(done.stdout)
    assert [one for one in found if one["level"] == "error"] == []
    assert done.exit_code == 0
    of = {one["check"]: one["message"] for one in found}
    silent = {"truth", "guarantee", "cluster"}  # These extensions' checks have nothing to look at here.
    assert set(of) | silent == {check.name for check in checks()}
    assert "images fit" in of["model"]
    assert any("Question set access: It loaded in" in one["message"] for one in found)
    assert "kills: nothing committed was lost" in of["storage"]
    assert "images/s a core" in of["images"]
    assert re.search(r"JPEG.*; 0\.\d\d MB, .*; \d+\.\d% cannot be read", of["images"])
    assert "a vector of 96 numbers" in of["embedder"]
    assert [one["title"] for one in receiver.messages] == ["This is a test"]
    assert Outbox(control_state(desk.changed(home=home).settings)).open_subjects() == {}


def test_quick_checks_take_no_device_and_send_nothing(desk):
    """``serve`` runs them at each start."""
    quick = list(examine(desk.settings, quick=True))
    assert {one.check for one in quick} >= {"settings", "space", "devices", "limits", "state"}
    assert not {one.check for one in quick} & {"model", "storage", "images", "alerts"}


def test_images_that_are_away_are_an_error(desk, said, listing):
    """A disk that is not mounted is found before the first property fails."""
    source, images = listing.parent / "images", desk.settings.home / "away"
    source.rename(images)
    try:
        levels, message = said("images")
    finally:
        images.rename(source)
    assert levels == ["error"]
    assert "mounted" in message


@pytest.mark.parametrize(
    ("check", "settings", "level", "words"),
    [
        ("settings", {"commit_seconds": 700.0}, "error", "VLM_ASSETS_STUCK_SECONDS"),
        ("settings", {"batch_images": 4}, "warning", "a batch alone"),
        ("settings", {"description_schema": "nothing:There"}, "error", "nothing"),
        ("settings", {"model": None, "embedding_model": "a/b"}, "error", "VLM_ASSETS_MODEL"),
        ("devices", {"devices": "7"}, "error", "VLM_ASSETS_DEVICES"),
        ("model", {"model": "/nothing/there"}, "error", "/nothing/there"),
        ("state", {"state_url": SecretStr("postgresql+psycopg2://u@127.0.0.1:1/x")}, "error", "127.0.0.1"),
        ("catalogue", {"home": Path("/nowhere")}, "error", "vlm-assets ingest"),
        ("alerts", {}, "warning", "VLM_ASSETS_ALERT_TARGETS"),
        ("embedder", {"embedding_model": None}, "warning", "set VLM_ASSETS_EMBEDDING_MODEL"),
        ("embedder", {"embedding_model": "/nothing/there"}, "error", "/nothing/there"),
        ("truth", {"truth": Path("/nowhere/truth.csv")}, "error", "/nowhere/truth.csv"),
        ("guarantee", {"guarantee": "no_such_field>=0.9"}, "error", "no_such_field"),
    ],
)
def test_each_trouble_is_said_with_what_to_do(said, check, settings, level, words):
    """A wrong setting or a missing part is a finding of its own check, never a traceback."""
    levels, message = said(check, **settings)
    assert level in levels
    assert words in message


def test_too_little_room_is_an_error(desk, said, monkeypatch):
    """A disk that will be full in the night is found in the evening."""
    real = os.statvfs(desk.settings.home)
    full = os.statvfs_result([*real[:3], 0, 0, *real[5:]])
    monkeypatch.setattr(os, "statvfs", lambda path: full)
    levels, message = said("space")
    assert levels == ["error"]
    assert "prune" in message


def test_few_open_files_and_little_memory_are_said(said, monkeypatch):
    """Limits of a shell or a container are found before a worker meets them."""
    monkeypatch.setattr(resource, "getrlimit", lambda which: (256, 256))
    monkeypatch.setattr(machine_checks, "memory_bytes", lambda: 1e6)
    levels, message = said("limits")
    assert (levels[0], levels[-1]) == ("error", "warning")
    assert "LimitNOFILE" in message


def test_a_pause_is_said(desk, said):
    """Nobody wonders for a night why nothing starts."""
    pause(control_state(desk.settings), "new kernel", now=1.0)
    assert "new kernel" in said("state")[1]


def test_a_store_is_tried_and_one_that_is_away_is_an_error(said, bucket, s3_proxy):
    """A real S3 server is asked what the order of writers depends on; a closed door is found before a run."""
    assert said("store", store=bucket)[0] == ["ok"]
    assert list(bucket.names()) == [], "nothing is left of the probe"
    bucket = replace(bucket, prefix="another/")
    s3_proxy.breaks(lambda passing: passing.answer(403, "AccessDenied"))
    levels, message = said("store", store=bucket)
    assert levels == ["error"]
    assert str(bucket) in message


def test_a_real_postgres_is_tried_by_a_write_that_changes_nothing(said, postgres_url):
    """A user of the database that may read alone is found before the night."""
    levels, message = said("state", state_url=SecretStr(postgres_url))
    assert (levels, "Postgres" in message) == (["ok"], True)
