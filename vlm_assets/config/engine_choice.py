"""Which engine runs the model: what the settings say, and what ``auto`` stands for in this home.

An engine is part of a row's meaning, so ``auto`` is chosen once a home: a driver that fails, or a look from
another machine, must not make finished partitions stale.
"""

from __future__ import annotations

import errno
import logging
import os
import shlex
import shutil
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

from vlm_assets.config.extensions import model_source
from vlm_assets.config.settings import CHECKOUT, EXAMPLE, EXAMPLE_MODEL, PREFIX, Settings, SettingsError
from vlm_durable.files.files import TEMPORARY_SUFFIX, make_directory, write_new
from vlm_durable.files.sealed_json import BrokenSealError, read_sealed, sealed
from vlm_engine.devices.find import DeviceError, find_devices
from vlm_engine.protocol import ModelLoadError

_ENVIRONMENT = CHECKOUT / ".venv-vllm"
"""``make vllm`` puts vLLM into it; a file ``cuda-VERSION`` or ``cpu-VERSION`` says which build."""

_ABOUT = (
    "Truth: what VLM_ASSETS_ENGINE=auto stands for in this home since its first run. Remove it to have it"
    " chosen anew; if the choice is another, finished partitions are stale."
)


@dataclass(frozen=True)
class ChosenEngine:
    """``server``: one that we start, or one at the address of the settings. warning: what ``auto`` forgoes.

    kept: whether a home may keep the choice; not where the driver did not answer.
    """

    engine: Literal["transformers", "server"]
    warning: str | None = None
    kept: bool = True


@cache
def chosen_engine(settings: Settings) -> ChosenEngine:
    """The engine of these settings on this machine. Raises SettingsError where the home's note is damaged."""
    if settings.engine != "auto":
        return ChosenEngine(settings.engine)
    detected, kept = _detected(settings), _kept(settings)
    if kept is None or kept == detected.engine:
        return detected
    if kept == "server":
        return ChosenEngine("server")  # without it here, its start fails with a sentence of its own
    return ChosenEngine(
        "transformers",
        f"vLLM is there and not used: this home's work was begun in the run's own process."
        f" {PREFIX}ENGINE=server uses it, and makes finished partitions stale.",
    )


def require_models(settings: Settings) -> None:
    """Return if a describing model is chosen. Raises SettingsError, which says what to set.

    A server at an address knows its own model. Describing waits for no embedding model.
    """
    example = f", or {PREFIX}MODEL={EXAMPLE} for the example model" if EXAMPLE_MODEL.is_dir() else ""
    serves = chosen_engine(settings).engine == "server"
    if settings.model is None and not (serves and settings.server_url is not None):
        raise SettingsError(
            f"{PREFIX}MODEL is not set, so nothing can describe your images. Set it to a model's folder or"
            f" hub id{example}."
        )
    if (source := model_source(settings)) is None:
        return
    extension, name = source
    folder = extension.model_folder(settings, name)
    trouble = extension.model_trouble(settings, name)
    if trouble is not None or not folder.is_dir():
        why = trouble.text if trouble else f"it is not there yet: {folder} would hold it. Make it first."
        raise SettingsError(
            f"Nothing is described with {PREFIX}MODEL={settings.model}: {why} Or set another model's"
            " folder or hub id."
        )


def keep_engine(settings: Settings, log: logging.Logger) -> None:
    """Note what ``auto`` stands for in this home from now on, and say what is lost by it.

    Raises SettingsError as ``require_models`` does, ModelLoadError where another run has noted another choice
    meanwhile, OSError.
    """
    require_models(settings)
    chosen, note = chosen_engine(settings), _note(settings)
    if settings.engine != "auto" or not chosen.kept:
        return
    if chosen.warning is not None:
        log.warning(chosen.warning)
    make_directory(note.parent)
    try:
        write_new(note, sealed({"about": _ABOUT, "engine": chosen.engine}))
    except OSError as error:
        # The note is there, or it came while this one was written, and then the file may be gone.
        if error.errno not in (errno.EEXIST, errno.ENOENT) or not note.exists():
            raise
    # Of runs that were killed. One that writes just now finds its file gone and the note there.
    for leftover in note.parent.glob(f".{note.name}.*{TEMPORARY_SUFFIX}"):
        leftover.unlink(missing_ok=True)
    if (kept := _kept(settings)) != chosen.engine:
        raise ModelLoadError(
            f"Another run has begun this home's work with the engine {kept!r} at this moment, and this one"
            f" would work with {chosen.engine!r}. Materialize the partition again, or set {PREFIX}ENGINE."
        )


def vllm_command() -> str | None:
    """The command that starts the vLLM of ``make vllm``; None where there is none: then that of the PATH."""
    from vlm_engine.server.server_plan import VLLM_COMMAND

    program = _ENVIRONMENT / "bin" / "vllm"
    return VLLM_COMMAND.replace("vllm", shlex.quote(str(program)), 1) if program.is_file() else None


def _detected(settings: Settings) -> ChosenEngine:
    """What ``auto`` would choose now."""
    try:
        devices = find_devices(settings.devices, os.environ)
    except DeviceError:
        return ChosenEngine("transformers", kept=False)  # no run gets a device either
    if devices[0].kind == "cpu":
        return ChosenEngine("transformers")
    why = None
    if not any(_ENVIRONMENT.glob("cuda-*")) and shutil.which("vllm") is None:
        why = "it is not installed (`make vllm`)"
    elif any(device.id.startswith("MIG-") for device in devices):
        why = "it was never tried on MIG instances"
    if why is None:
        return ChosenEngine("server")
    return ChosenEngine(
        "transformers",
        f"vLLM, which is made for throughput on GPUs, is not used: {why}."
        f" {PREFIX}ENGINE=transformers if that is meant.",
    )


def _note(settings: Settings) -> Path:
    return settings.state_directory / "models" / "engine.json"


def _kept(settings: Settings) -> Literal["transformers", "server"] | None:
    try:
        kept = read_sealed(_note(settings))["engine"]
    except FileNotFoundError:
        return None
    except (OSError, BrokenSealError, KeyError) as error:
        raise SettingsError(
            f"{_note(settings)}, which says what {PREFIX}ENGINE=auto stands for in this home, cannot be read"
            f" ({error}). Set {PREFIX}ENGINE to the engine of the finished partitions (their run's log names"
            " a model server if there was one), or remove the file."
        ) from error
    return "server" if kept == "server" else "transformers"
