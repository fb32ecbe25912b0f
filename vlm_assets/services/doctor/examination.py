"""Everything that a long run will need, tried for real in two minutes; each finding says what to do.

Quick checks for every start, and slow ones for a person who is about to begin. Those of settings and models
are here; the others have modules of their own.
"""

from __future__ import annotations

import math
import os
import shlex
import stat
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import numpy as np

from vlm_assets.config.engine_choice import require_models
from vlm_assets.config.extensions import DoctorCheck, Findings, Level, installed
from vlm_assets.config.question_sets import question_sets
from vlm_assets.config.resource_settings import build_gpu, build_vision_language_model
from vlm_assets.config.settings import ENV_FILE, PREFIX, Settings
from vlm_assets.services.doctor.catalog_checks import examine_catalogue, examine_images
from vlm_assets.services.doctor.machine_checks import (
    examine_alerts,
    examine_clock,
    examine_dagster,
    examine_devices,
    examine_limits,
    examine_space,
    examine_state,
    examine_storage,
    examine_store,
)
from vlm_assets.services.progress import doing
from vlm_assets.services.request_vector import embed_text
from vlm_assets.services.trial import run_trial
from vlm_catalog.catalog import Catalog
from vlm_durable.commands import command
from vlm_engine.devices.leases import NoDeviceFreeError
from vlm_engine.model_source import NO_EMBEDDER
from vlm_engine.prompt import build_prompt
from vlm_engine.schema import load_schema

_DEVICE_WAIT_SECONDS: Final = 2.0


@dataclass(frozen=True)
class Diagnosis:
    """What one check says."""

    check: str
    level: Level
    message: str


def examine(settings: Settings, *, quick: bool = False) -> Iterator[Diagnosis]:
    """Run the checks, each finding as it is made. A check that fails itself is a finding too."""
    chosen = [check for check in checks() if check.is_quick or not quick]
    for number, check in enumerate(chosen):
        doing(f"trying what a run will need ({check.name}), checks", number, len(chosen))
        try:
            for level, message in check.examine(settings):
                yield Diagnosis(check.name, level, message)
        except Exception as error:
            yield Diagnosis(check.name, "error", str(error).strip() or type(error).__name__)


def checks() -> Sequence[DoctorCheck]:
    """All checks in their order: the quick ones first, those of extensions after the core's quick ones."""
    of_extensions = [check for extension in installed() for check in extension.doctor_checks()]
    return [*QUICK, *sorted(of_extensions, key=lambda check: not check.is_quick), *SLOW]


def examine_settings(settings: Settings) -> Findings:
    """Settings that contradict each other, or mean nothing here."""
    require_models(settings)
    for asked in question_sets(settings):
        build_prompt(load_schema(asked.settings.description_schema), asked.settings.prompt)
    findings = list(contradictions(settings))
    yield from findings
    if not findings:
        yield "ok", "No setting contradicts another; the schema makes a prompt."


def examine_neighbours(settings: Settings) -> Findings:
    """Other accounts of this machine: what of ours they may write, enter or read."""
    folders = [*settings.layout.open_to_others()]
    if settings.dagster_home.is_dir() and stat.S_IMODE(settings.dagster_home.stat().st_mode) & 0o077:
        folders.append(settings.dagster_home)
    for folder in folders:
        right = "go-w" if folder == settings.home else "go-rwx"
        yield (
            "error",
            f"Other accounts of this machine may write in or enter {folder}: they could stop the service or"
            f" replace what is in it. Close it to them: {shlex.join(['chmod', right, str(folder)])}",
        )
    mode = ENV_FILE.stat().st_mode if ENV_FILE.is_file() else 0
    if mode & 0o077:
        yield (
            "error" if mode & 0o022 else "warning",
            f"Other accounts of this machine may {'write' if mode & 0o022 else 'read'} {ENV_FILE}, which"
            " decides what runs and may hold secrets. Close it to them:"
            f" {shlex.join(['chmod', '600', str(ENV_FILE)])}",
        )
    elif not folders:
        yield "ok", "No other account of this machine may write in the home or read its settings."


def contradictions(settings: Settings) -> Findings:
    """Settings of which each is possible, and which do not go together."""
    if settings.commit_seconds >= settings.stuck_seconds:
        yield (
            "error",
            f"{PREFIX}COMMIT_SECONDS ({settings.commit_seconds:g}) is not below {PREFIX}STUCK_SECONDS"
            f" ({settings.stuck_seconds:g}): a sound worker would be ended between two commits. Commit"
            " sooner.",
        )
    elif settings.commit_seconds > 60:
        yield (
            "warning",
            f"{PREFIX}COMMIT_SECONDS is {settings.commit_seconds:g}: a kill loses more than a minute.",
        )
    if settings.batch_images != "auto" and settings.batch_images < settings.max_images:
        yield (
            "warning",
            f"{PREFIX}BATCH_IMAGES ({settings.batch_images}) is below {PREFIX}MAX_IMAGES"
            f" ({settings.max_images}): properties with more images are a batch alone, which is slow.",
        )
    cores = len(os.sched_getaffinity(0))
    if settings.decode_workers > 2 * cores:
        yield (
            "warning",
            f"{PREFIX}DECODE_WORKERS is {settings.decode_workers} and this process may use {cores} cores.",
        )
    if isinstance(settings.source, Path) and not settings.source.exists():
        yield "warning", f"{PREFIX}SOURCE: {settings.source} is not there; nothing new can be taken in."


def examine_model(settings: Settings) -> Findings:
    """Ask each question set of one property on a leased device. Raises what ``run_trial`` raises."""
    first, *further = question_sets(settings)
    yield from _try_model(first.settings)
    for asked in further:
        for level, message in _try_model(asked.settings):
            yield level, f"Question set {asked.name}: {message}"


def _try_model(settings: Settings) -> Findings:
    catalog = Catalog.open(settings.home)
    gpu = replace(build_gpu(settings), wait_seconds=_DEVICE_WAIT_SECONDS)
    try:
        trial = run_trial(settings, catalog, gpu, build_vision_language_model(settings), limit=1)
    except NoDeviceFreeError as error:
        yield "warning", f"Not tried, for every device is at work: {error}"
        return
    answer = trial.described[0]
    took = f"loaded in {trial.load_seconds:.1f} s on {trial.device}"
    if answer.description is None:
        reason = (answer.error or "").rstrip(".")
        yield (
            "error",
            f"It {took}, and could not describe {answer.property_id} ({answer.error_kind}): {reason}."
            f" {command('compare')} shows more.",
        )
        return
    yield "ok", f"It {took} and described {answer.property_id}."
    image_tokens = trial.image_tokens
    if image_tokens is None:
        return
    if image_tokens.fitting < image_tokens.images:
        yield (
            "warning",
            f"{image_tokens.sentence()}: fewer {PREFIX}MAX_PIXELS or {PREFIX}IMAGE_TOKENS lets all of them"
            " fit.",
        )
    else:
        yield "ok", f"{image_tokens.sentence()}."


def examine_embedder(settings: Settings) -> Findings:
    """Make a vector from a text. Raises ModelLoadError."""
    if settings.embedding_model is None:
        yield "warning", NO_EMBEDDER
        return
    began = time.monotonic()
    vector = embed_text(settings, "A stone cottage with two floors and a garden.")
    length = float(np.linalg.norm(vector))
    if not math.isfinite(length) or length < 1e-6:
        yield "error", "The embedding model makes a vector that is zero or no numbers: take another one."
        return
    yield (
        "ok",
        f"The embedding model made a vector of {len(vector)} numbers from a text in"
        f" {time.monotonic() - began:.1f} s, loading included.",
    )


QUICK: Final = (
    DoctorCheck("settings", examine_settings, is_quick=True),
    DoctorCheck("neighbours", examine_neighbours, is_quick=True),
    DoctorCheck("catalogue", examine_catalogue, is_quick=True),
    DoctorCheck("space", examine_space, is_quick=True),
    DoctorCheck("devices", examine_devices, is_quick=True),
    DoctorCheck("limits", examine_limits, is_quick=True),
    DoctorCheck("clock", examine_clock, is_quick=True),
    DoctorCheck("state", examine_state, is_quick=True),
)
"""Each takes a fraction of a second."""

SLOW: Final = (
    DoctorCheck("store", examine_store),
    DoctorCheck("images", examine_images),
    DoctorCheck("storage", examine_storage),
    DoctorCheck("dagster", examine_dagster),
    DoctorCheck("alerts", examine_alerts),
    DoctorCheck("embedder", examine_embedder),
    # Last: the device that it takes is this process's until it ends.
    DoctorCheck("model", examine_model),
)
