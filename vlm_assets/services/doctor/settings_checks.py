"""What ``doctor`` tries of the settings, and of what other accounts of the machine may do."""

from __future__ import annotations

import os
import shlex
import stat
from pathlib import Path

from vlm_assets.config.engine_choice import require_models
from vlm_assets.config.extensions import Findings
from vlm_assets.config.settings import ENV_FILE, PREFIX, Settings
from vlm_engine.prompt import build_prompt
from vlm_engine.schema import load_schema


def examine_settings(settings: Settings) -> Findings:
    """Settings that contradict each other, or mean nothing here."""
    require_models(settings)
    build_prompt(load_schema(settings.description_schema), settings.prompt)
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
