"""Dagster's state: seeded, bound to one catalogue, run by one Dagster at a time; damage set aside by name."""

import io
import os
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import dagster as dg
import psutil
import pytest
import yaml

from resources.alerts.outbox import Outbox
from tests.support.damage import flip_bit
from tests.support.processes import has_ended
from vlm_assets.commands.terminal import TerminalConsole
from vlm_assets.config.settings import load_settings
from vlm_assets.services import backfill
from vlm_assets.services.backfill import dagster_facts
from vlm_assets.services.command_error import CommandError
from vlm_assets.webserver import home as home_module
from vlm_assets.webserver.home import (
    STARTING_SECONDS,
    DagsterHomeError,
    claim_for_catalog,
    damages,
    home_id,
    names_aside,
    note_address,
    only_dagster,
    prepare_dagster_home,
    running_address,
    seed_settings,
    set_databases_aside,
    start_timeout,
)
from vlm_assets.webserver.server import dagster_server, prepare_home
from vlm_catalog.catalog import Catalog
from vlm_durable.state.database import open_state

ROOT = Path(__file__).parents[4]


def test_prepared_home_has_settings_and_the_pool_limit(tmp_path: Path) -> None:
    """The limit of the pool stands before the first launch; telemetry and the first-visit dialog are off."""
    home = tmp_path / "dagster"
    prepare_dagster_home(home, catalog_id="one", slots=3)
    settings = yaml.safe_load((home / "dagster.yaml").read_text())
    assert settings["telemetry"] == {"enabled": False}
    assert settings["nux"] == {"enabled": False}
    with dg.DagsterInstance.from_config(str(home)) as instance:
        assert instance.event_log_storage.get_concurrency_info("gpu").slot_count == 3
        assert instance.run_monitoring_enabled
        assert not instance.telemetry_enabled


def test_settings_that_a_person_changed_stay(tmp_path: Path) -> None:
    """A second start seeds nothing over what is there."""
    prepare_dagster_home(tmp_path, catalog_id="one", slots=1)
    with (tmp_path / "dagster.yaml").open("a") as settings:
        settings.write("# mine\n")
    prepare_dagster_home(tmp_path, catalog_id="one", slots=1)
    assert "# mine" in (tmp_path / "dagster.yaml").read_text()


LAUNCHED_ELSEWHERE = """
run_launcher:
  module: launching
  class: ElsewhereRunLauncher
"""


def test_settings_that_nobody_changed_follow_the_program(tmp_path: Path, monkeypatch) -> None:
    """A home of before gets the start timeout of now; one whose settings a person changed keeps them."""
    before, template = tmp_path / "before.yaml", home_module._TEMPLATE
    before.write_text(template.read_text().replace("enabled: true", "enabled: false"))
    monkeypatch.setattr(home_module, "_TEMPLATE", before)
    seed_settings(tmp_path, None)
    settings = tmp_path / "dagster.yaml"
    settings_before = settings.read_text()
    monkeypatch.setattr(home_module, "_TEMPLATE", template)
    seed_settings(tmp_path, None)
    assert yaml.safe_load(settings.read_text()) == yaml.safe_load(template.read_text())
    changed = settings_before.replace("telemetry", "# mine\ntelemetry")
    settings.write_text(changed)
    seed_settings(tmp_path, None)
    assert settings.read_text() == changed


def test_settings_with_a_launcher_follow_the_extension(tmp_path: Path) -> None:
    """As it moves the launcher; where a person changed the file, the line to change is named."""
    seed_settings(tmp_path, LAUNCHED_ELSEWHERE.replace("launching", "moved_since"))
    settings = tmp_path / "dagster.yaml"
    before = settings.read_text()
    seed_settings(tmp_path, LAUNCHED_ELSEWHERE)
    assert yaml.safe_load(settings.read_text()) == yaml.safe_load(LAUNCHED_ELSEWHERE)
    settings.write_text(f"# mine\n{before}")
    with pytest.raises(DagsterHomeError, match="Write `module: launching` below run_launcher"):
        seed_settings(tmp_path, LAUNCHED_ELSEWHERE)
    assert settings.read_text() == f"# mine\n{before}"
    settings.write_text(settings.read_text().replace("moved_since", "launching"))
    seed_settings(tmp_path, LAUNCHED_ELSEWHERE)


def test_settings_of_one_machine_are_refused_where_an_extension_launches_runs(tmp_path: Path) -> None:
    """Partitions would run on this machine alone, and nobody be told."""
    seed_settings(tmp_path, None)
    with pytest.raises(DagsterHomeError, match="Move the file away"):
        seed_settings(tmp_path, LAUNCHED_ELSEWHERE)


def test_runs_have_one_bound_to_start(tmp_path: Path) -> None:
    """One machine and a cluster give a run the same time to begin, the home of a checkout too."""
    seed_settings(tmp_path, None)
    assert start_timeout(tmp_path) == STARTING_SECONDS
    assert start_timeout(ROOT / "dagster_home") == STARTING_SECONDS
    assert start_timeout(tmp_path / "none") is None


def test_second_dagster_is_refused_by_address(tmp_path: Path) -> None:
    """Two daemons on one state would launch runs twice; the second is told where the first is."""
    with only_dagster(tmp_path, wait_seconds=0.0):
        note_address(tmp_path, "http://127.0.0.1:3000")
        assert running_address(tmp_path) == "http://127.0.0.1:3000"
        with (
            pytest.raises(DagsterHomeError, match=r"http://127\.0\.0\.1:3000"),
            only_dagster(tmp_path, wait_seconds=60.0),
        ):
            pass
    assert running_address(tmp_path) is None
    with only_dagster(tmp_path, wait_seconds=0.0):
        pass


STARTER = """
import os, signal, sys
from pathlib import Path
from vlm_assets.webserver.home import note_address, only_dagster
from vlm_assets.webserver.process_group import ProcessGroup
home = Path(sys.argv[1])
with only_dagster(home, wait_seconds=0.0) as lock:
    with ProcessGroup(grace_seconds=5.0, keep_open=lock.fileno()) as group:
        sleep = [sys.executable, "-c", "import signal; signal.pause()"]
        group.start("daemon", sleep, environment=os.environ, directory=home, log=home / "log")
        note_address(home, "http://127.0.0.1:3000", group.id)
        print(group.id, group.pid_of("daemon"), flush=True)
        signal.pause()
"""


def started_dagster(home: Path) -> tuple[subprocess.Popen[str], int, psutil.Process]:
    starter = subprocess.Popen([sys.executable, "-c", STARTER, home], stdout=subprocess.PIPE, text=True)
    assert starter.stdout is not None
    watchdog, daemon = map(int, starter.stdout.readline().split())
    return starter, watchdog, psutil.Process(daemon)


def test_a_daemon_whose_starter_and_watchdog_were_killed_is_ended_before_another_starts(tmp_path, caplog):
    """Two daemons on one home would launch each run twice: the lock is held by what runs."""
    starter, watchdog, daemon = started_dagster(tmp_path)
    with (
        pytest.raises(DagsterHomeError, match=rf"3000 \(process {starter.pid}\).*`kill {starter.pid}`"),
        only_dagster(tmp_path, wait_seconds=60.0),
    ):
        pass
    os.kill(watchdog, signal.SIGKILL)
    assert running_address(tmp_path) == "http://127.0.0.1:3000", "its starter lives"
    starter.kill()
    starter.wait(10)
    assert not has_ended(daemon), "nobody was left to end it"
    assert running_address(tmp_path) is None
    with only_dagster(tmp_path, wait_seconds=60.0):
        assert has_ended(daemon)
    assert f"Ended process {daemon.pid} of an earlier Dagster" in caplog.text


def test_what_cannot_be_told_to_be_left_over_is_named_and_not_ended(tmp_path: Path) -> None:
    """A process outside the noted group is never killed: a person reads which it is."""
    starter, watchdog, daemon = started_dagster(tmp_path)
    lock = tmp_path / "running.lock"
    lock.write_text(lock.read_text().replace(str(watchdog), str(os.getpgrp())))
    for pid in (watchdog, starter.pid):
        os.kill(pid, signal.SIGKILL)
    starter.wait(10)
    with (
        pytest.raises(DagsterHomeError, match=rf"`kill {daemon.pid}`, and start again"),
        only_dagster(tmp_path, wait_seconds=0.0),
    ):
        pass
    daemon.kill()


@pytest.mark.parametrize("name", ["a?b", "50%20off"])
def test_a_path_that_sqlite_would_read_otherwise_is_refused(name: str, tmp_path: Path) -> None:
    """Two homes whose paths differ after a '?' would share one history: nothing is written."""
    with pytest.raises(DagsterHomeError, match="moved as it is"):
        prepare_dagster_home(tmp_path / name / "dagster", catalog_id="one", slots=1)
    assert not list(tmp_path.iterdir())
    with pytest.raises(DagsterHomeError):
        claim_for_catalog(tmp_path / name, "one")


DATABASES = ["history/runs.db", "history/runs/index.db", "schedules/schedules.db"]


@pytest.fixture(scope="module")
def prepared(made, tmp_path_factory):
    """Dagster's state of a catalogued home, with more than a page in each table that Dagster writes first."""
    folder = tmp_path_factory.mktemp("prepared") / "dagster"
    prepare_dagster_home(folder, catalog_id=Catalog.open(made / "published").catalog_id, slots=1)
    return folder


@pytest.fixture
def dagster_home(dataset, prepared):
    """The same, which a test may damage."""
    return shutil.copytree(prepared, dataset.settings.dagster_home)


def overwrite(database):
    """The start of the file, as a torn write leaves it."""
    with database.open("r+b") as file:
        file.write(b"\0not a database\0" * 300)


def flip_a_page(database):
    """One page in the middle: the header still reads."""
    with sqlite3.connect(database) as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        (page,) = connection.execute(
            "SELECT rootpage FROM sqlite_master WHERE type = 'index' LIMIT 1"
        ).fetchone()
        (size,) = connection.execute("PRAGMA page_size").fetchone()
    connection.close()
    flip_bit(database, (page - 1) * size)


def start(dataset):
    console = TerminalConsole(file=io.StringIO(), soft_wrap=True)
    settings = dataset.settings
    prepare_home(settings.home, settings.dagster_home, slots=1, console=console)
    return console.file.getvalue()


def test_sound_databases_and_a_new_home_have_no_damage(dagster_home, tmp_path):
    """Neither a first start nor any other is held up."""
    assert damages(dagster_home) == []
    assert damages(tmp_path / "new") == []


@pytest.mark.parametrize("damage", [overwrite, flip_a_page])
@pytest.mark.parametrize("name", DATABASES)
def test_a_start_sets_a_damaged_database_aside_and_begins_a_new_one(dataset, dagster_home, name, damage):
    """No traceback: the old file is kept by name, the new one works, a person is told in two places."""
    damage(dagster_home / name)
    damaged = (dagster_home / name).read_bytes()
    (found,) = damages(dagster_home)
    assert found.path == dagster_home / name
    said = start(dataset)
    folder, _, file = name.partition("/")
    (aside,) = dagster_home.glob(f"{folder}.damaged-*")
    assert (aside / file).read_bytes() == damaged
    assert f"{aside}, and a new one was begun" in said
    (alert,) = Outbox(open_state(dataset.settings.state_directory)).open_subjects().values()
    assert str(aside) in alert.next_step
    assert damages(dagster_home) == []
    with dg.DagsterInstance.from_config(str(dagster_home)) as instance:
        assert instance.get_runs_count() == 0
        assert instance.event_log_storage.get_concurrency_info("gpu").slot_count == 1
        assert instance.get_latest_materialization_event(dg.AssetKey("property_catalog")) is not None
    assert "set aside" not in start(dataset)


def test_the_database_of_a_dagster_that_runs_is_left_to_it(dataset, dagster_home):
    """A second start moves nothing away under the first."""
    overwrite(dagster_home / DATABASES[0])
    with only_dagster(dagster_home, wait_seconds=0.0):
        note_address(dagster_home, "http://127.0.0.1:3000")
        with pytest.raises(DagsterHomeError):
            start(dataset)
    assert not list(dagster_home.glob("*.damaged-*"))


def test_nothing_set_aside_before_is_written_over(dagster_home):
    """Two damages in one second have two names."""
    overwrite(dagster_home / DATABASES[2])
    found = damages(dagster_home)
    set_databases_aside(dagster_home, names_aside(dagster_home, found))
    (dagster_home / "schedules").mkdir()
    set_databases_aside(dagster_home, names_aside(dagster_home, found))
    assert len(list(dagster_home.glob("schedules.damaged-*"))) == 2


def test_a_locked_database_is_not_damaged(dagster_home):
    """Somebody's long transaction costs no history."""
    database = dagster_home / DATABASES[0]
    with sqlite3.connect(database, isolation_level=None) as connection:
        connection.execute("PRAGMA journal_mode = DELETE")
        connection.execute("BEGIN EXCLUSIVE")
        assert damages(dagster_home) == []
    connection.close()


def test_two_homes_started_at_once_never_share_a_port(dataset, tmp_path):
    """Each has its port before anything of it starts: no command finds the other home's pages at its own."""
    other = tmp_path / "other"
    with ExitStack() as stack:
        servers = []
        for home in (dataset.settings.home, other):
            dagster_home = home / "dagster"
            dagster_home.mkdir(parents=True, exist_ok=True)
            servers.append(
                stack.enter_context(dagster_server(home, dagster_home, port=3960, grace_seconds=1.0))
            )
        first, second = (server.address for server in servers)
        assert first != second
        assert running_address(servers[0].dagster_home) == first
        for address in (first, second):
            _, _, port = address.rpartition(":")
            socket.create_connection(("127.0.0.1", int(port)), timeout=5).close()
    with dagster_server(
        other, other / "dagster", port=int(second.rpartition(":")[2]), grace_seconds=1.0
    ) as again:
        assert again.address == second, "the port is free again at once"


def test_a_copy_of_a_home_has_an_id_of_its_own(tmp_path):
    """A home that was copied for a trial is another home, though its catalogue is the same."""
    with only_dagster(tmp_path, wait_seconds=0.0):
        before = home_id(tmp_path)
    copy = shutil.copytree(tmp_path, tmp_path / "copy")
    assert home_id(copy) != before
    with only_dagster(tmp_path, wait_seconds=0.0):
        note_address(tmp_path, "http://127.0.0.1:3000")
        assert home_id(tmp_path) == before


def test_a_variable_that_dagsters_settings_name_and_this_shell_lacks_is_named(tmp_path, monkeypatch):
    """The database's password may stand in the service's environment alone: `run` says which one it needs."""
    settings = load_settings(home=tmp_path)
    settings.dagster_home.mkdir()
    (settings.dagster_home / "dagster.yaml").write_text(
        "storage: {postgres: {postgres_url: {env: 'OF_SERVICE'}}}  # password: {env: OLD}\n"
        "x: [{env: OWN}, {env: VLM_ASSETS_OF_FILE}]\nother: {env: NO_SOURCE, of: two}"
    )
    file = {"VLM_ASSETS_OF_FILE": "here"}
    monkeypatch.setattr(backfill, "of_env_file", lambda: file)
    monkeypatch.setenv("OWN", "mine")
    monkeypatch.setenv("VLM_ASSETS_OF_FILE", "")
    monkeypatch.delenv("VLM_ASSETS_OF_FILE")
    monkeypatch.delenv("OF_SERVICE", raising=False)
    with pytest.raises(CommandError, match=r"names OF_SERVICE, and .* Set it"), dagster_facts(settings):
        pass
    assert os.environ["VLM_ASSETS_OF_FILE"] == "here", "the Dagster that `serve` starts has it from .env"
