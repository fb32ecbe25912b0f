"""The model that a partition's fingerprint names: waited for where it is asked of a server, and then kept to.

What lives here: what is waited for before anything is asked, and the comparison with what was loaded. What
does not: the wait (``waiting.py``), what a model is by name and revision (``resources/vlm``), and what else
decides the meaning of a row (``descriptions.py``).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

import dagster as dg

from resources.devices.leases import Clock
from resources.engine.protocol import Engine, ModelLoadError
from resources.engine.server.served_model import ServerUnreachableError
from vlm_assets.assets.fingerprint import Fingerprint
from vlm_assets.assets.waiting import when_it_is_there
from vlm_assets.settings import Settings

_T = TypeVar("_T")


class ModelChangedError(ModelLoadError):
    """The model was exchanged between the look at it and its loading: no row may stand for the wrong one."""


def when_model_is_known(
    context: dg.AssetExecutionContext, settings: Settings, find: Callable[[], _T], *, clock: Clock = time
) -> _T:
    """What ``find`` gives, which asks what the model is now: once no pause stands, and its server answers.

    A server at an address that is down is waited for as a device is, so that a backfill's queue does not run
    through. Raises ServerUnreachableError after ``device_wait_seconds``, which is no attempt at the
    partition: also where it is complete, for nobody can say then that it is what the settings mean.
    """
    return when_it_is_there(
        context,
        settings,
        find,
        lacking=ServerUnreachableError,
        title="No model to work with",
        clock=clock,
    )


def refuse_another_model(engine: Engine, fingerprint: Fingerprint) -> None:
    """Return where the engine's model is the fingerprint's. Raises ModelChangedError."""
    expected = fingerprint.parts["model"]
    if engine.revision != expected:
        raise ModelChangedError(
            f"the model was exchanged while this materialization began: {expected} was looked at, and"
            f" {engine.revision} ({engine.model}) is loaded. Nothing was described with it. Materialize the"
            " partition again: it then takes what is there"
        )
