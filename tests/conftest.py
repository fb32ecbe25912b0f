"""What tests need from outside Python: there, or named at the end of the run, or in CI an error."""

from __future__ import annotations

import gc
import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

import pytest
from hypothesis import settings as examples

from tests.support.alert_receiver import AlertReceiver
from tests.support.costs import Costs
from tests.support.shares import described
from vlm_durable.commands import HOME

_missing: set[str] = set()
MEMORY = Path("/dev/shm")

# Tests work with the example's models, also in homes that only list an example rendered elsewhere.
os.environ.setdefault("VLM_ASSETS_MODEL", "example")
os.environ.setdefault("VLM_ASSETS_EMBEDDING_MODEL", "example")
# Torch's threads spin while they wait for each other: beside other tests, two of them take twice the CPU time
# of one, and longer.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Imports leave no garbage, and a look at all that they make takes 0.3 s: a tenth of the time without this.
gc.set_threshold(100_000)
# Homes of tests are in memory, where there is room: they are synced ten thousand times, and a test that kills
# sees the same states there, without a disk's waits. Power cuts have file systems of their own.
if os.access(MEMORY, os.W_OK) and shutil.disk_usage(MEMORY).free > 4 << 30:
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(MEMORY))

# No test fails because the machine is slow. In CI the examples are the same each time, so that a change is
# judged by what it changes; elsewhere they are drawn anew, and a failing one is remembered.
examples.register_profile("drawn", deadline=None)
examples.register_profile("fixed", deadline=None, derandomize=True, database=None, print_blob=True)
examples.load_profile("fixed" if os.environ.get("CI") == "true" else "drawn")

ONE_DATABASE = """
telemetry:
  enabled: false
event_log_storage:
  module: dagster._core.storage.event_log
  class: ConsolidatedSqliteEventLogStorage
  config:
    base_dir: FOLDER
"""
"""Events of all runs in one database: the default makes one for each run, half a second of CPU a time."""

LAUNCH_RUN = """
mutation($run: ExecutionParams!) {
  launchRun(executionParams: $run) {
    __typename ... on LaunchRunSuccess { run { runId } } ... on Error { message }
  }
}
"""


HERE = Path(__file__).parent
SERVED = HERE / "support" / "served"
WAITING = (
    HERE / "browser",
    *(HERE / "integration" / name for name in ("faults", "resources", "vlm_durable", "vlm_engine")),
    HERE / "integration" / "vlm_training" / "test_training_store.py",
)
"""Folders whose tests mostly wait for servers."""
SHARING = {"share_of", "count_share", "killed_homes"}
"""What a module imports whose sweeps take another share of their cases each day."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what waits for servers, and what takes a share of its cases each day."""
    for item in items:
        if any(item.path.is_relative_to(folder) for folder in WAITING):
            item.add_marker(pytest.mark.serves)
        if isinstance(item, pytest.Function) and vars(item.module).keys() & SHARING:
            item.add_marker(pytest.mark.shared)


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Costs())


def pytest_report_header() -> str:
    return described()


def pytest_sessionstart() -> None:
    """Make interrupts work whatever started the tests.

    A background job of a script ignores SIGINT, Dagster gives SIGTERM whatever SIGINT has after each run in
    this process, and every child then starts deaf to both.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def own_home() -> Iterator[None]:
    """A command that a test runs in this process names its home in the environment: no other test sees it."""
    before = os.environ.get(HOME)
    yield
    if before is None:
        os.environ.pop(HOME, None)
    else:
        os.environ[HOME] = before


@pytest.fixture(scope="session")
def left_out() -> Callable[[str], NoReturn]:
    """Ends a test that needs what this machine does not have; in CI that is a failure."""

    def end(name: str) -> NoReturn:
        _missing.add(name)
        wanted = f"{name} is missing: `make test-deps` installs what can be installed"
        if os.environ.get("CI") == "true":
            pytest.fail(wanted)
        pytest.skip(wanted)

    return end


@pytest.fixture(scope="session")
def program(left_out: Callable[[str], NoReturn]) -> Callable[[str], Path]:
    """Path of a program that ``make test-deps`` installs. Without it a test is left out, but not in CI."""

    def find(name: str) -> Path:
        found = shutil.which(name)
        return Path(found) if found is not None else left_out(name)

    return find


@pytest.fixture
def disk() -> Iterator[Path]:
    """An empty folder on a disk, for what must not be in memory."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


@pytest.fixture
def elsewhere(tmp_path: Path, left_out: Callable[[str], NoReturn]) -> Iterator[Path]:
    """An empty folder on another file system than the test's own."""
    for place in (MEMORY, Path("/tmp")):
        if os.access(place, os.W_OK) and place.stat().st_dev != tmp_path.stat().st_dev:
            with tempfile.TemporaryDirectory(dir=place) as folder:
                yield Path(folder)
            return
    left_out("a second file system at /dev/shm")


@pytest.fixture(scope="session")
def launch_run() -> Callable[..., str]:
    """Launches one partition as "Launch 1 run" does: at once; a backfill waits until the daemon looks."""

    def launch(api: Any, assets: Sequence[str], key: str) -> str:
        selector = {
            "repositoryLocationName": "vlm_assets",
            "repositoryName": "__repository__",
            "pipelineName": "__ASSET_JOB",
            "assetSelection": [{"path": [asset]} for asset in assets],
        }
        tags = {"tags": [{"key": "dagster/partition", "value": key}]}
        run = {"selector": selector, "mode": "default", "runConfigData": {}, "executionMetadata": tags}
        answer = api.ask(LAUNCH_RUN, run=run)["launchRun"]
        assert answer["__typename"] == "LaunchRunSuccess", answer
        return str(answer["run"]["runId"])

    return launch


@pytest.fixture(scope="session")
def quick_daemon() -> dict[str, str]:
    """The environment of a Dagster that looks for backfills every two seconds.

    A backfill otherwise waits up to 30 s for its start, and as long for its end.
    """
    path = (str(SERVED), str(HERE.parent), os.environ.get("PYTHONPATH"))
    return {"PYTHONPATH": os.pathsep.join(filter(None, path))}


@pytest.fixture(scope="session")
def scripted_runs(quick_daemon: dict[str, str]) -> dict[str, str]:
    """The environment of such a Dagster whose runs have scripted models."""
    return {**quick_daemon, "TESTS_SCRIPTED_MODELS": "0.0"}


@pytest.fixture(scope="session")
def empty_instance(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with Dagster's empty database, made once."""
    import dagster as dg

    folder = tmp_path_factory.mktemp("dagster")
    (folder / "dagster.yaml").write_text(ONE_DATABASE.replace("FOLDER", str(folder / "history")))
    with dg.DagsterInstance.from_config(str(folder)) as instance:
        instance.get_runs_count()
        instance.all_instigator_state()
    return folder


@pytest.fixture
def new_instance(empty_instance: Path, tmp_path: Path) -> Callable[[str], Any]:
    """Opens an instance of Dagster on disk, over an empty database in a folder of this name."""
    import dagster as dg

    def new(name: str) -> dg.DagsterInstance:
        folder = tmp_path / name
        shutil.copytree(empty_instance, folder)
        settings = folder / "dagster.yaml"
        settings.write_text(settings.read_text().replace(str(empty_instance), str(folder)))
        return dg.DagsterInstance.from_config(str(folder))

    return new


@pytest.fixture
def receiver() -> Iterator[AlertReceiver]:
    """A real HTTP server that alerts are sent to."""
    started = AlertReceiver()
    yield started
    started.down()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Name what was missing."""
    if _missing:
        terminalreporter.write_line(
            f"Not all tests ran: {', '.join(sorted(_missing))} missing. As root: `make test-deps`.",
            yellow=True,
        )
