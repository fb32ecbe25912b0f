"""The model server of a leased device: started, or used again where one that fits is loaded there.

This is the run's side. ``supervisor.py`` is with the server beside and after the run;
``vlm_engine/devices/loaded_servers.py`` has its record and its end.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import shutil
import socket
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

from vlm_durable.files.files import make_directory
from vlm_durable.files.lock_files import acquire_lock
from vlm_engine.devices.find import Device
from vlm_engine.devices.loaded_servers import LoadedServerError, LoadedServers, ServerRecord
from vlm_engine.protocol import EngineLostError
from vlm_engine.server.model_server import (
    KEY_VARIABLE,
    MOST_RESTARTS,
    ServerAddress,
    ServerDownError,
    ServerStartError,
    trouble,
)
from vlm_engine.server.server_plan import (
    HOST,
    PINS,
    ServerPlan,
    server_environment,
    variable_digests,
)
from vlm_engine.server.supervisor import Order

_SOURCE_ROOT = Path(__file__).resolve().parents[2]
_LOOK_SECONDS = 0.1
_NOTICE_SECONDS = 60.0
_SLACK_SECONDS = 30.0
_LAST_LINES = 30
_LAST_BYTES = 1 << 16
_NAMED = 5


_log = logging.getLogger(__name__)


class OwnedServer:
    """A model server of ours on a leased device, held by this process until ``release`` or the process's end.

    A server that lives on the device is used if it fits, else a new one is started. The constructor returns
    when the server answers. Raises ModelLoadError (ServerStartError where it did not come up),
    LoadedServerError.
    """

    def __init__(self, device: Device, plan: ServerPlan, *, state_directory: Path) -> None:
        self._device = device
        self._plan = plan
        self._servers = LoadedServers(state_directory)
        self._files = self._servers.files(device.id)
        self._environment = server_environment(device, os.environ)
        self._environment.pop(KEY_VARIABLE, None)  # Each start has its own.
        self._pin = {name: self._environment[name] for name in PINS if name in self._environment}
        self._record: ServerRecord | None = None
        self._key = ""
        self._restarts = 0
        make_directory(self._servers.directory)
        self._servers.directory.chmod(0o700)
        # A supervisor that ends an idle server holds this lock until no process of the server is left.
        lock = acquire_lock(self._files.lessee, seconds=plan.grace_seconds + _SLACK_SECONDS)
        if lock is None:
            raise ServerStartError(
                f"Another process uses the model server of {device.id}, or is still ending it: see who holds"
                f" {self._files.lessee} with `fuser`."
            )
        self._lock = lock
        try:
            self._bring_up()
        except BaseException:
            self.release()
            raise

    @property
    def address(self) -> ServerAddress:
        """The address now."""
        assert self._record is not None
        return ServerAddress(self._record.url, self._key, of_this_user=True)

    def check(self) -> None:
        """Return if its processes live and it answers us. Raises ServerDownError."""
        wrong = self._trouble()
        if wrong:
            raise ServerDownError(
                f"The model server of {self._device.id} is down: {wrong}.{self._last_words()}"
            )

    def restart(self, why: str) -> ServerAddress:
        """End it and start it anew, once; failing counts too. Raises ServerStartError, EngineLostError."""
        if self._restarts >= MOST_RESTARTS:
            raise EngineLostError(
                f"The model server of {self._device.id} was started anew {MOST_RESTARTS} times in this"
                f" materialization and is down again: {why}{self._last_words()}"
            )
        self._restarts += 1
        _log.warning(
            "Starting the model server of %s anew (%d of %d): %s",
            self._device.id, self._restarts, MOST_RESTARTS, why,
        )  # fmt: skip
        try:
            self._servers.end(self._device.id, "a new start", _log)
            self._start()
        except LoadedServerError as error:
            raise EngineLostError(str(error)) from error
        except OSError as error:
            raise EngineLostError(
                f"The model server of {self._device.id} cannot be started anew: {error}. Its record and log"
                f" lie in {self._servers.directory}; see that there is room, and that more processes may be"
                " started."
            ) from error
        return self.address

    def release(self) -> None:
        """Let it wait for its next lessee. Safe to call twice."""
        self._lock.close()

    def _bring_up(self) -> None:
        began = time.monotonic()
        record = self._servers.living_on(self._device.id)
        if record is not None:
            wrong = self._misfit(record)
            if not wrong:
                self._key = self._read_key()
                record = self._record = self._ready()
                wrong = self._trouble()
            if not wrong:
                _log.info(
                    "The model server of %s is used again after %.1f s: %s",
                    self._device.id, time.monotonic() - began, record.sentence(),
                )  # fmt: skip
                return
            _log.info("The model server of %s is not used again: %s.", self._device.id, wrong)
        self._servers.end(self._device.id, "another model server", _log)
        self._start()
        _log.info("The model server of %s answers after %.1f s", self._device.id, time.monotonic() - began)

    def _misfit(self, record: ServerRecord) -> str:
        """Why the server on the device cannot be used, or ""."""
        if record.digest != self._plan.digest:
            return "its model, revision or arguments are others"
        if record.pin != self._pin:
            return f"it is pinned otherwise ({dict(record.pin)}, not {self._pin})"
        if not record.supervisor.lives():
            return "its supervisor is gone"
        digests, server_digests = variable_digests(self._environment, self._read_key()), record.variables
        differing = sorted(
            name
            for name in digests.keys() | server_digests.keys()
            if digests.get(name) != server_digests.get(name)
        )
        if differing:
            more = f" and {len(differing) - _NAMED} more" if len(differing) > _NAMED else ""
            return f"its environment is another ({', '.join(differing[:_NAMED])}{more})"
        return ""

    def _start(self) -> None:
        """Start a supervisor and wait until its server answers. Raises ServerStartError."""
        port, plan = _free_port(), self._plan
        command = plan.arguments(port=port)
        if shutil.which(command[0], path=self._environment.get("PATH")) is None:
            raise ServerStartError(
                f"The model server cannot be started: there is no program {command[0]}. Install it in an"
                " environment of its own and give its full path in VLM_ASSETS_SERVER_COMMAND."
            )
        self._files.record.unlink(missing_ok=True)
        if self._files.log.exists():
            self._files.log.replace(self._files.log.with_suffix(".log.1"))
        self._key = secrets.token_urlsafe(32)
        lock = acquire_lock(self._files.supervisor, seconds=1.0)
        if lock is None:
            raise ServerStartError(f"Something else holds {self._files.supervisor}: see who with `fuser`.")
        try:
            _start_supervisor(
                Order(
                    directory=str(self._servers.directory),
                    lock=lock.fileno(),
                    about={
                        "device": self._device.id,
                        "what": f"A server of {plan.model}",
                        "digest": plan.digest,
                        "pin": self._pin,
                        "variables": variable_digests(self._environment, self._key),
                        "url": f"http://{HOST}:{port}/v1",
                        "command": command,
                        "grace_seconds": plan.grace_seconds,
                    },
                    environment=self._environment | {KEY_VARIABLE: self._key},
                    start_seconds=plan.start_seconds,
                    idle_seconds=plan.idle_seconds,
                )
            )
        finally:
            lock.close()  # The supervisor has inherited it.
        self._record = self._ready()

    def _ready(self) -> ServerRecord:
        """Wait until the started server is well, or is gone. Raises ServerStartError."""
        began = time.monotonic()
        deadline = began + self._plan.start_seconds + self._plan.grace_seconds + _SLACK_SECONDS
        next_notice = began + _NOTICE_SECONDS
        while (record := self._servers.living_on(self._device.id)) is not None:
            if record.state == "ready":
                return record
            now = time.monotonic()
            if now >= deadline:
                break
            if now >= next_notice:
                _log.info("Waiting for the model server of %s, %.0f s by now", self._device.id, now - began)
                next_notice = now + _NOTICE_SECONDS
            # Its supervisor is no child of ours, and reports through its record.
            time.sleep(_LOOK_SECONDS)
        raise ServerStartError(
            f"The model server of {self._device.id} did not come up:"
            f" {self._cause('its supervisor is gone')}.{self._last_words()}"
        )

    def _read_key(self) -> str:
        try:
            return self._files.key.read_text()
        except OSError:
            return ""  # Without the key no digest fits.

    def _trouble(self) -> str:
        """Why it cannot be used now, or ""."""
        record = self._record
        assert record is not None
        if record.supervisor.lives() and record.server is not None and record.server.lives():
            return trouble(self.address) or ""
        return self._cause("its process is gone")

    def _cause(self, otherwise: str) -> str:
        record = ServerRecord.read(self._files.record)
        return (record and record.why) or otherwise

    def _last_words(self) -> str:
        """The end of its log, without the key, which the server may have written there."""
        try:
            with self._files.log.open("rb") as stream:
                stream.seek(max(0, os.fstat(stream.fileno()).st_size - _LAST_BYTES))
                text = stream.read().decode(errors="replace")
        except OSError:
            return ""
        if self._key:
            text = text.replace(self._key, "(key)")
        lines = text.splitlines()[-_LAST_LINES:]
        return "\n".join([f" The end of its log, {self._files.log}:", *lines]) if lines else ""


def _start_supervisor(order: Order) -> None:
    """Start a supervisor. Returns when it has left this process's session. Raises ServerStartError."""
    started = subprocess.run(
        [sys.executable, "-P", "-m", "vlm_engine.server.supervisor"],
        input=json.dumps(asdict(order)).encode(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": str(_SOURCE_ROOT)},
        pass_fds=(order.lock,),
        start_new_session=True,
        check=False,
    )
    if started.returncode:
        message = started.stderr.decode(errors="replace").strip()
        raise ServerStartError(f"The supervisor of the model server did not start: {message}")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])
