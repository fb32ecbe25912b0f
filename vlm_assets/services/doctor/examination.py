"""Everything that a long run will need, tried for real in two minutes; each finding says what to do.

Quick checks for every start, and slow ones for a person who is about to begin.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from vlm_assets.config.extensions import DoctorCheck, Level, installed
from vlm_assets.config.settings import Settings
from vlm_assets.services.doctor.catalog_checks import examine_catalogue, examine_images
from vlm_assets.services.doctor.machine_checks import (
    examine_clock,
    examine_devices,
    examine_limits,
    examine_space,
    examine_storage,
)
from vlm_assets.services.doctor.model_checks import examine_embedder, examine_model
from vlm_assets.services.doctor.service_checks import (
    examine_alerts,
    examine_dagster,
    examine_state,
    examine_store,
)
from vlm_assets.services.doctor.settings_checks import examine_neighbours, examine_settings
from vlm_assets.services.progress import doing


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
