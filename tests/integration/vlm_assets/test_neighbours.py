"""Another account of the machine can neither stop the service nor move what is published."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn

import pytest

from vlm_assets.config.settings import Settings
from vlm_assets.services.doctor import examination
from vlm_assets.webserver.home import prepare_dagster_home
from vlm_durable.files.layout import Home

PROGRAM = Path(sys.executable).with_name("vlm-assets")

ATTACK = """
import fcntl, json, os, sys
os.setgroups([]), os.setgid(65534), os.setuid(65534)
home, held, moved = sys.argv[1], [], []
for folder, folders, files in os.walk(home):
    for name in folders + files:
        path = os.path.join(folder, name)
        try:
            os.rename(path, path + ".moved")
            os.rename(path + ".moved", path)
            moved.append(path)
        except OSError:
            pass
    for name in files:
        path = os.path.join(folder, name)
        if path.endswith(".parquet"):
            continue
        try:
            with open(path, "rb") as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                held.append(path)
        except OSError:
            pass
published = os.path.join(home, "property_catalog", "catalog.parquet")
print(json.dumps({"held": held, "moved": moved, "readable": os.access(published, os.R_OK)}))
"""


@pytest.fixture(scope="module")
def made_open(listing: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A home that was made under umask 000."""
    home = tmp_path_factory.mktemp("open") / "home"
    for command in (("ingest", listing, "--home", home), ("devices", "pause", "--home", home)):
        subprocess.run([PROGRAM, *command], check=True, umask=0, capture_output=True)
    prepare_dagster_home(home / "dagster", catalog_id="c", slots=1)
    return home


@pytest.fixture
def home(made_open: Path) -> Iterator[Path]:
    """The same, modes and all, in a folder that every account may enter."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    yield shutil.copytree(made_open, folder / "home")
    shutil.rmtree(folder)


def test_another_account_holds_no_lock_and_moves_no_file(
    home: Path, left_out: Callable[[str], NoReturn]
) -> None:
    """Whatever umask the shell had: a neighbour reads what is published, and that is all."""
    assert (home / ".state" / "state.db").is_file()
    if os.geteuid() != 0:
        left_out("root, to take another account,")
    attack = [sys.executable, "-c", ATTACK, str(home)]
    report = subprocess.run(attack, check=True, capture_output=True, text=True).stdout
    assert json.loads(report) == {"held": [], "moved": [], "readable": True}


def test_locks_and_databases_are_for_this_account_alone(home: Path) -> None:
    """Also one that a person copies elsewhere, or whose folder somebody opens again."""
    (home / ".state").chmod(0o755)
    private = [*(home / ".state").rglob("*.lock"), *(home / ".state").rglob("*.db*")]
    assert len(private) > 2
    assert [str(path) for path in private if path.stat().st_mode & 0o077] == []
    assert [*Home(home).open_to_others()] == [home / ".state"]
    Home(home).close_to_others()
    assert [*Home(home).open_to_others()] == []


@pytest.mark.parametrize(
    ("mode", "level"), [(0o600, None), (0o640, "warning"), (0o644, "warning"), (0o666, "error")]
)
def test_the_doctor_names_what_others_may_read_or_write(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: int, level: str | None
) -> None:
    """An ``.env`` that others may write decides what runs; a home that they may write loses files."""
    file = tmp_path / ".env"
    file.touch()
    file.chmod(mode)
    monkeypatch.setattr(examination, "ENV_FILE", file)
    settings = Settings(home=home)
    findings = list(examination.examine_neighbours(settings))
    levels = [level for level, message in findings if str(file) in message]
    assert levels == ([] if level is None else [level])
    home.chmod(0o777)
    findings = list(examination.examine_neighbours(settings))
    assert [level for level, message in findings if f"{home}:" in message] == ["error"]
