"""The running Dagster of a home: code server, webserver and daemon, in one process group.

They are started in the order that wastes no time, and their definitions stay loaded. One process that holds
the home's lock and ends with all of its children is what a service manager can restart without ever running
two daemons on one database. ``api.py`` asks the running Dagster, ``home.py`` keeps its state.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape

from resources.alerts.alert import DAY_SECONDS, Alert
from resources.alerts.outbox import Outbox
from sensors.dagster_internals.code_server import can_launch, serving_process
from vlm_assets.assets.property_catalog import record_catalog
from vlm_assets.config.extensions import launcher_of
from vlm_assets.config.resource_settings import control_state, runs_at_once
from vlm_assets.config.settings import (
    CHECKOUT,
    ENV_FILE,
    IS_CHECKOUT,
    PREFIX,
    Settings,
    load_settings,
    of_env_file,
)
from vlm_assets.webserver.api import (
    CodeLocationError,
    DagsterApi,
    DagsterApiError,
    DagsterUnreachableError,
)
from vlm_assets.webserver.home import (
    LOST,
    DagsterHomeError,
    DamagedDatabaseError,
    damages,
    names_aside,
    note_address,
    only_dagster,
    prepare_dagster_home,
    set_databases_aside,
)
from vlm_assets.webserver.process_group import ProcessGroup, interruptible
from vlm_catalog.catalog import Catalog, CatalogMissingError
from vlm_durable.commands import command, given_command
from vlm_durable.files.home_claim import claim_home
from vlm_durable.files.layout import Home
from vlm_durable.files.processes import end_processes
from vlm_durable.state.nodes import only_machine_that_serves
from vlm_durable.state.sqlite_file import ControlStateError
from vlm_engine.devices.loaded_servers import end_loaded_servers

if TYPE_CHECKING:
    from starlette.types import ASGIApp

_log = logging.getLogger(__name__)

GRACE_SECONDS = 30.0
"""The time between SIGTERM and SIGKILL, in which a run commits what it has finished."""

_HOST = "127.0.0.1"
_LOOK_SECONDS = 0.2
_LOOK_AFTER_SECONDS = 30.0
_LAUNCH_SECONDS = 20
"""The time in which the code server says that it could launch a run: a loaded machine may take seconds."""
_LAUNCH_LOOKS = 3
"""The code server is restarted after this many looks in a row without an answer. A launch itself has 60 s."""
LAUNCHING = "Dagster/launching runs"
"""Subject of the alert that the code server launches nothing."""
_LOOK_SHARE = 0.005
"""Share of the time that checking the databases may take: larger databases are checked less often."""
_PORTS_TRIED = 100

_CODE_SERVER = "code-server"
CODE_LOCATION = "vlm_assets"
"""Name of the code location, as in pyproject.toml and workspace.yaml. Under another one Dagster forgets which
sensors and schedules were switched on or off."""

_FOREVER = 3600.0

_AGAIN_SECONDS = 20.0
"""A database that is damaged so soon after a start is left to a person: the disk damages what is written."""


class DagsterServer:
    """Code server and webserver, which run from here on; the daemon, once it is asked for.

    Made by ``dagster_server``. address: what people open in a browser.
    """

    def __init__(
        self,
        group: ProcessGroup,
        *,
        listening: socket.socket,
        dagster_home: Path,
        scratch: Path,
        outbox: Outbox,
        environment: Mapping[str, str],
    ) -> None:
        self.group = group
        # Not "logs": Dagster empties a folder of that name.
        self.logs = dagster_home / "process_logs"
        self.logs.mkdir(exist_ok=True)
        self.api = DagsterApi(_address_of(listening), dagster_home)
        self._outbox = outbox
        self._environment = environment
        self._listening = listening
        self._socket = scratch / "code-server"
        self._workspace = scratch / "workspace.yaml"
        self.dagster_home = dagster_home
        self._next_look = 0.0
        self._next_look_at_databases = 0.0
        self._looks_without_launch = 0
        self._workspace.write_text(
            f"load_from:\n  - grpc_server:\n      socket: {self._socket}\n"
            f"      location_name: {CODE_LOCATION}\n"
        )

    @property
    def address(self) -> str:
        """The address of the pages."""
        return self.api.url

    def start_pages(self, console: Console | None = None) -> None:
        """Start code server and webserver; returns when the definitions are loaded.

        Raises ProcessEndedError, CodeLocationError.
        """
        if console is not None:
            console.print(f"Starting Dagster on {self.address} (its logs: {self.logs}) ...")
        # One code server for webserver and daemon alike: each would start one of its own otherwise.
        self._start(
            _CODE_SERVER,
            _program("dagster"), "code-server", "start", "--socket", self._socket,
            "--module-name", "vlm_assets.definitions", "--location-name", CODE_LOCATION,
        )  # fmt: skip
        while not self._socket.exists():
            self.group.watch(_LOOK_SECONDS)
        self._start(
            "webserver",
            sys.executable, "-m", "vlm_assets.webserver.guarded_pages",
            str(self._listening.fileno()), self._workspace,
            pass_fds=[self._listening.fileno()],
        )  # fmt: skip
        # Only the webserver keeps it open: once that has ended, a request is refused and does not wait.
        self._listening.close()
        while not self._loaded():
            self.group.watch(_LOOK_SECONDS)

    def start_daemon(self) -> None:
        """Start the daemon. It looks for backfills at once and then every 30 s, so launch one before."""
        self._start("daemon", _program("dagster-daemon"), "run", "--workspace", self._workspace)

    def watch(self, seconds: float) -> None:
        """Let these seconds pass, and restart the process that serves the definitions where it is needed.

        That process ends itself after 30 s without a request (a machine that was suspended), and Dagster
        does not start another, as when it is killed. It may also live and launch nothing, for ever. From
        then on no run and no sensor would start, and nobody would be told.

        Raises ProcessEndedError as soon as a process of the group ends, and DamagedDatabaseError where a
        database of Dagster's does not read: sensors would fail.
        """
        deadline = time.monotonic() + seconds
        while True:
            now = time.monotonic()
            self.group.watch(max(0.0, min(deadline, self._next_look) - now))
            if time.monotonic() >= self._next_look:
                self._look_after_databases()
                self._look_after_definitions()
                self._look_after_launching()
                # Launches fail meanwhile: no time is lost between two looks.
                wait = 0.0 if self._looks_without_launch else _LOOK_AFTER_SECONDS
                self._next_look = time.monotonic() + wait
            if time.monotonic() >= deadline:
                return

    def stay(self) -> None:
        """Let time pass until Ctrl-C. Raises as ``watch`` does."""
        while True:
            self.watch(_FOREVER)

    def _look_after_databases(self) -> None:
        began = time.monotonic()
        if began < self._next_look_at_databases:
            return
        for damage in damages(self.dagster_home):
            raise DamagedDatabaseError(
                f"Dagster's database {damage.path} is damaged ({damage.why}). Finished work is safe. Start"
                " Dagster again: the database is set aside and a new one is filled from disk."
            )
        ended = time.monotonic()
        self._next_look_at_databases = ended + (ended - began) / _LOOK_SHARE

    def _look_after_definitions(self) -> None:
        try:
            self.api.definitions_loaded()
        except CodeLocationError as error:
            _log.warning("The definitions are loaded again: %s", str(error).splitlines()[0])
            # The answer is from before the new process is up; the next look shows its state.
            with contextlib.suppress(DagsterApiError):
                self.api.reload_definitions()
        except DagsterApiError:
            pass  # the pages are slow, or ended, which the group knows

    def _look_after_launching(self) -> None:
        if can_launch(self._socket, seconds=_LAUNCH_SECONDS):
            self._looks_without_launch = 0
            self._change_alert(
                lambda: self._outbox.note_recovery(
                    LAUNCHING, sentence="Runs are launched again.", at=time.time()
                )
            )
            return
        self._looks_without_launch += 1
        if self._looks_without_launch < _LAUNCH_LOOKS:
            return
        self._looks_without_launch = 0
        _log.warning("The code server launches no run any more. It is killed, and a new one is started.")
        # Its runs go on by themselves. After a SIGTERM it would wait for ever for the run that it hangs at.
        serving = serving_process(self.group.pid_of(_CODE_SERVER))
        if serving is not None and not end_processes(serving.send, serving.has_ended, grace=None):
            _log.warning("The old code server (process %d) does not end, though it was killed.", serving.pid)
        with contextlib.suppress(DagsterApiError):
            self.api.reload_definitions()
        self._change_alert(lambda: self._outbox.post_all([_launches_nothing()], once_while_open=True))

    def _change_alert(self, change: Callable[[], object]) -> None:
        """Change an alert where the control state can be written; the log has it in any case."""
        try:
            change()
        except ControlStateError as error:
            _log.warning("An alert could not be noted: %s", error)

    def _loaded(self) -> bool:
        try:
            return self.api.definitions_loaded()
        except DagsterUnreachableError:
            return False

    def _start(self, name: str, *command: str | Path, pass_fds: Sequence[int] = ()) -> None:
        log = self.logs / f"{name}.log"
        if log.exists():
            log.replace(log.with_suffix(".log.1"))
        self.group.start(
            name,
            command,
            environment=self._environment,
            # Not the person's folder: Dagster puts it first on the module path, where a folder named
            # resources would shadow ours. The checkout's own is there for a schema module in it.
            directory=CHECKOUT if IS_CHECKOUT else self.dagster_home,
            log=log,
            pass_fds=pass_fds,
        )


def _launches_nothing() -> Alert:
    now = time.time()
    return Alert(
        kind="launches_nothing",
        subject=LAUNCHING,
        occurrence=f"{now:.0f}",
        severity="error",
        title="Dagster's code server launched no run any more, and is restarted",
        next_step=(
            "Nothing for now: runs under way go on, and what could not be launched is tried again. The usual"
            " cause is a run that was terminated while its process was stopped or hung in the driver. That"
            " process is killed, and its device is free again or left out. If this repeats, restart"
            f" {command('serve')} and look at `nvidia-smi` and the kernel log."
        ),
        expected=f"an answer within {_LAUNCH_SECONDS} s",
        actual=f"none in {_LAUNCH_LOOKS} looks",
        at=now,
    )


def _address_of(listening: socket.socket) -> str:
    return f"http://{_HOST}:{listening.getsockname()[1]}"


def _program(name: str) -> Path:
    """A program of this environment."""
    return Path(sys.executable).with_name(name)


@contextlib.contextmanager
def dagster_server(
    home: Path,
    dagster_home: Path,
    *,
    port: int,
    grace_seconds: float = GRACE_SECONDS,
    environment: Mapping[str, str] | None = None,
) -> Iterator[DagsterServer]:
    """The Dagster of a prepared ``dagster_home``, nothing started yet; all of it ends with the context.

    So do the model servers of the home. port: for the pages; where it is taken, the next one that is free.
    It is this Dagster's from here on. environment: in addition to this process's own. Raises
    DagsterHomeError.
    """
    with contextlib.ExitStack() as stack:
        lock = stack.enter_context(only_dagster(dagster_home, wait_seconds=grace_seconds + 5.0))
        settings = load_settings(home=home)
        stack.enter_context(only_machine_that_serves(control_state(settings)))
        listening = stack.enter_context(_listen(port))
        # A socket's path may have 107 characters, so it cannot lie in the home.
        scratch = Path(tempfile.mkdtemp(prefix="vlm-assets-"))
        stack.callback(shutil.rmtree, scratch, ignore_errors=True)
        # After the runs: a model server outlives a run, to be used by the next, and there is none.
        stack.callback(end_loaded_servers, settings.devices_directory, _log)
        group = stack.enter_context(ProcessGroup(grace_seconds=grace_seconds, keep_open=lock.fileno()))
        server = DagsterServer(
            group,
            listening=listening,
            dagster_home=dagster_home,
            scratch=scratch,
            outbox=Outbox(control_state(settings)),
            environment={
                **of_env_file(),
                **os.environ,
                **(environment or {}),
                # A run is a process: without cached bytecode each would compile torch and transformers anew.
                "PYTHONDONTWRITEBYTECODE": "",
                # A backfill waits while its definitions are not served. Otherwise the daemon gives it up
                # where the code server ended first, as at Ctrl-C, or by itself.
                "DAGSTER_BACKFILL_RETRY_DEFINITION_CHANGED_ERROR": "1",
                f"{PREFIX}ENV_FILE": str(ENV_FILE),
                "DAGSTER_HOME": str(dagster_home),
                "VLM_ASSETS_HOME": str(home),
                # Those processes work in another folder, where a relative path would lead elsewhere.
                **({} if settings.questions is None else {f"{PREFIX}QUESTIONS": str(settings.questions)}),
            },
        )
        note_address(dagster_home, server.address, group.id)
        yield server


def _listen(port: int) -> socket.socket:
    """Listen on a port of loopback, or on the next one that is free.

    Listening from the first moment: a port that is only probed is another process's a moment later. Raises
    DagsterHomeError.
    """
    for number in range(port, port + _PORTS_TRIED):
        with contextlib.suppress(OSError, OverflowError):
            return socket.create_server((_HOST, number))
    raise DagsterHomeError(
        f"Ports {port} to {port + _PORTS_TRIED - 1} are all taken; name a free one:"
        f" {given_command('--port', 'PORT')}."
    )


def serve_page(
    app: ASGIApp, *, allowed_hosts: Collection[str], port: int, ready: Callable[[str], None]
) -> None:
    """Serve a page of our own behind the guard, on this port of loopback or the next free one, until Ctrl-C.

    ready: told its address once a browser may ask for it.
    """
    import uvicorn

    from vlm_assets.webserver.guarded_pages import WebGuard

    with _listen(port) as listening:
        ready(_address_of(listening))
        guarded = WebGuard(app, allowed_hosts=allowed_hosts)
        uvicorn.Server(uvicorn.Config(guarded, log_level="warning")).run(sockets=[listening])


def prepare_home(home: Path, dagster_home: Path, *, slots: int, console: Console) -> None:
    """Make Dagster's state fit the home's catalogue. Without one, its pages say what to do first.

    Raises CatalogError, DagsterHomeError, SettingsError, UnusableHomeError.
    """
    claim_home(Home(home))
    settings = load_settings(home=home)
    try:
        catalog: Catalog | None = Catalog.open(home)
    except CatalogMissingError as error:
        console.print(escape(str(error)))
        catalog = None
    if dagster_home.is_dir():
        _renew_damaged_databases(home, dagster_home, console)
    prepare_dagster_home(
        dagster_home,
        catalog_id=catalog.catalog_id if catalog else None,
        slots=slots,
        with_launcher=launcher_of(settings).dagster_settings(settings),
    )
    if catalog is not None:
        record_catalog(dagster_home, catalog)


def _renew_damaged_databases(home: Path, dagster_home: Path, console: Console) -> None:
    """Set damaged databases of Dagster's aside and say so, in the terminal and as an alert."""
    # Under the lock: a Dagster that runs is not to lose its databases.
    with only_dagster(dagster_home, wait_seconds=GRACE_SECONDS + 5.0):
        damaged = damages(dagster_home)
        aside = names_aside(dagster_home, damaged)
        sentences = {
            damage.folder: f"{damage.path} did not read ({damage.why}). It was set aside in"
            f" {aside[damage.folder]}, and a new one was begun. {LOST[damage.folder]}"
            for damage in damaged
        }
        # The alert comes first: after a kill in between it is sent twice, and not never.
        outbox = Outbox(control_state(load_settings(home=home)))
        alerts = [
            Alert(
                kind="state_damaged",
                subject=f"state/Dagster's {folder}",
                occurrence=sentence,
                severity="error",
                title=f"Dagster's {folder} was damaged and was begun anew",
                next_step=f"{sentence} Look at the disk's health.",
                at=time.time(),
                lasts=DAY_SECONDS,
            )
            for folder, sentence in sentences.items()
        ]
        outbox.post_all(alerts, once_while_open=True)
        set_databases_aside(dagster_home, aside)
    for sentence in sentences.values():
        console.print(f"[yellow]{escape(sentence)}[/]")


@contextlib.contextmanager
def running_dagster(
    settings: Settings, *, port: int, console: Console, environment: Mapping[str, str] | None = None
) -> Iterator[DagsterServer]:
    """The Dagster of a home, prepared, nothing started yet. Ctrl-C and SIGTERM end the context quietly.

    environment: of Dagster's processes, in addition to this one's. Raises CatalogError, DagsterHomeError.
    """
    home, dagster_home, grace = settings.home, settings.dagster_home, settings.grace_seconds
    prepare_home(home, dagster_home, slots=runs_at_once(settings), console=console)
    with (
        interruptible(),
        dagster_server(home, dagster_home, port=port, grace_seconds=grace, environment=environment) as server,
    ):
        if port and not server.address.endswith(f":{port}"):
            console.print(f"Port {port} is taken; the pages of this home are at {server.address}.")
        try:
            yield server
        except KeyboardInterrupt:
            console.print(
                f"\nEnding Dagster. Runs commit what they have finished, {grace:.0f} s at most"
                " (Ctrl-C again: at once). The next start goes on from there."
            )


def serve(settings: Settings, *, port: int, console: Console) -> None:
    """Run webserver, code server and daemon until SIGTERM or Ctrl-C; ends too when one of them ends.

    Where a database of Dagster's is damaged meanwhile, everything is started again with a new one. Raises
    CatalogError, DagsterHomeError, ProcessEndedError and CodeLocationError.
    """
    while True:
        started = time.monotonic()
        try:
            with running_dagster(settings, port=port, console=console) as server:
                server.start_pages(console)
                server.start_daemon()
                console.print("Schedules, sensors and alerts are on. Ctrl-C ends it.")
                server.stay()
            return
        except Exception as error:
            # A process that ends, or does not start, may be the first sign of it.
            if not damages(settings.dagster_home) or time.monotonic() - started < _AGAIN_SECONDS:
                raise
            console.print(f"[yellow]{escape(str(error))}[/]")
