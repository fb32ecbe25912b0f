"""What ``doctor`` tries of services: the control state, the store, alert targets and Dagster."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from typing import Final

import sqlalchemy as sa

from sensors.cluster import STARTING_SECONDS
from sensors.ticks import Ticks
from vlm_assets.config.extensions import Findings
from vlm_assets.config.resource_settings import control_state, runs_at_once
from vlm_assets.config.settings import PREFIX, Settings
from vlm_assets.services.alert_delivery import build_delivery, send_trial
from vlm_assets.webserver.api import DagsterApi, Queue
from vlm_assets.webserver.home import POOL, damages, running_address, start_timeout
from vlm_durable.commands import command
from vlm_durable.state.pause import pause_of
from vlm_durable.state.tables import alert_events
from vlm_durable.wording import counted, duration

_ALERT_SECONDS: Final = 15.0
_DEFINITIONS_SECONDS: Final = 60.0
_STORE_SECONDS: Final = 5.0
_STATE_SECONDS: Final = 1.0
_RESTORED_SECONDS: Final = 7 * 24 * 3600.0


def examine_state(settings: Settings) -> Findings:
    """The control state takes a change, and nothing is paused. Raises ControlStateError."""
    began = time.monotonic()
    state = control_state(settings)
    # Changes nothing, and needs all that a change needs.
    state.write(lambda connection: connection.execute(alert_events.delete().where(sa.false())).rowcount)
    paused = pause_of(state)
    where = "SQLite in the home" if settings.state_url is None else "Postgres"
    took = time.monotonic() - began
    if took > _STATE_SECONDS:
        yield (
            "warning",
            f"The control state ({where}) answered after {took:.1f} s: each look of a sensor waits as long.",
        )
    else:
        yield "ok", f"The control state ({where}) answers in {1000 * took:.0f} ms."
    for restoration in state.restorations()[-1:]:
        if time.time() - restoration.at < _RESTORED_SECONDS:
            yield "warning", restoration.sentence()
    if paused:
        yield "warning", f"Nothing is started: {paused.sentence()}. {command('devices', 'resume')}."


def examine_store(settings: Settings) -> Findings:
    """The store honours what the order of writers depends on. Raises StoreError."""
    store = settings.mirror
    if not store.keeps_copies:
        yield "ok", f"No store is set ({PREFIX}STORE): this home alone holds what is finished."
        return
    began = time.monotonic()
    store.prove()
    took = time.monotonic() - began
    yield "ok", f"{store} honours conditions and checksums; ten requests took {took:.2f} s."
    if took > _STORE_SECONDS:
        yield "warning", "That is slow: each finished partition takes some ten requests more. Is it far away?"


def examine_alerts(settings: Settings) -> Findings:
    """Every alert target takes a test message, and no alert is open. Raises SettingsError."""
    delivery = build_delivery(settings)
    if not delivery.targets:
        yield (
            "warning",
            f"Nobody is told of trouble: set {PREFIX}ALERT_TARGETS, then {command('alerts', 'test')}.",
        )
    else:
        for target, refusal in send_trial(delivery, settings, seconds=_ALERT_SECONDS):
            if refusal is None:
                yield "ok", f"{target.name} took a test message."
            else:
                yield "error", f"{target.name} did not take a test message: {refusal}."
    open_alerts = delivery.outbox.open_subjects()
    if open_alerts:
        yield "warning", f"{counted(len(open_alerts), 'alerts are', 'alert is')} open: {command('alerts')}."


def examine_dagster(settings: Settings) -> Findings:
    """Dagster runs with the definitions and its daemons, or else the definitions load."""
    for damage in damages(settings.dagster_home) if settings.dagster_home.is_dir() else ():
        yield (
            "error",
            f"Dagster's database {damage.path} is damaged ({damage.why}): start Dagster again, it is"
            " renewed.",
        )
    seconds = start_timeout(settings.dagster_home)
    if seconds is not None and seconds < STARTING_SECONDS:
        yield (
            "warning",
            f"A run has {duration(seconds)} to start, and a busy machine takes longer: a person changed"
            f" {settings.dagster_home / 'dagster.yaml'}. Set start_timeout_seconds in it to"
            f" {STARTING_SECONDS:.0f}, or move it away, and start Dagster again, which writes a new one.",
        )
    address = running_address(settings.dagster_home)
    if address is not None:
        silent = Ticks(control_state(settings)).silence(now=time.time())
        if silent is not None:
            yield "error", f"{silent.title}: {silent.actual}. {silent.next_step}"
        api = DagsterApi(address, settings.dagster_home)
        if api.definitions_loaded():
            yield "ok", f"Dagster runs at {address} and has the definitions."
        else:
            yield "error", f"Dagster at {address} does not have the definitions: see its log, start it again."
        queue = api.queue(POOL)
        for name, why in queue.failing_daemons.items():
            yield "error", f"Dagster's daemon {name} does not work ({why}): see its log, start Dagster again."
        if settings.ray_address is None:
            # In a cluster the pool follows the nodes.
            yield from pool_findings(queue, runs_at_once(settings))
        return
    environment = {**os.environ, f"{PREFIX}HOME": str(settings.home)}
    environment.pop("DAGSTER_HOME", None)
    done = subprocess.run(
        [sys.executable, "-c", "import vlm_assets.definitions"],
        env=environment,
        check=False,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=_DEFINITIONS_SECONDS,
    )
    if done.returncode:
        yield "error", f"The definitions do not load: {done.stderr.strip().splitlines()[-1]}"
    else:
        yield "ok", f"Dagster does not run on this home; the definitions load. {command('serve')} starts it."


def pool_findings(queue: Queue, may_work: int) -> Findings:
    """Whether the queue of a running Dagster lets as many runs work at once as may."""
    sentence = (
        f"{counted(queue.queued, 'runs wait', 'run waits')} and {queue.started} work; the pool {POOL}"
        f" lets {queue.slots} work at once"
    )
    if queue.slots == 0:
        yield (
            "error",
            f"{sentence}: nothing starts. Deployment > Concurrency sets it; a start of Dagster does too.",
        )
    elif queue.slots != may_work:
        yield "warning", f"{sentence}, and {may_work} may: start Dagster again, which sets the pool."
    else:
        yield "ok", f"{sentence}."
