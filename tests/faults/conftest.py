"""Where the fault tests work: in memory, or on file systems mounted for them where that can be had.

FAULTS_ROUNDS multiplies the random part of a campaign, and FAULTS_SEED replays a failure.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import NoReturn

import pytest

from faults.mounts import Mount, loop_mounted, missing
from tests.support.forking import (  # noqa: F401 - fixtures
    fork_server,
)


@pytest.fixture
def memory_path() -> Iterator[Path]:
    """An empty folder, in memory where there is such a place: for sweeps that need no real disk."""
    place = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    folder = Path(tempfile.mkdtemp(dir=place))
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def mounted(memory_path: Path, left_out: Callable[[str], NoReturn]) -> Iterator[Callable[..., Mount]]:
    """A function that gives a new file system ('ext4', 'xfs', 'tmpfs'), unmounted after the test."""
    if absent := missing():
        left_out(absent)
    with ExitStack() as closing:

        def give(kind: str, name: str = "tmpfs") -> Mount:
            if kind == "tmpfs":
                return closing.enter_context(Mount.in_memory(memory_path / name, mib=1))
            return closing.enter_context(loop_mounted(kind, memory_path))

        yield give


@pytest.fixture(scope="session")
def rounds() -> int:
    """How many times the random part of a campaign runs."""
    return int(os.environ.get("FAULTS_ROUNDS", "1"))


@pytest.fixture(scope="session")
def seed() -> int:
    """Seed of the random part; a failure prints it in its assertion."""
    return int(os.environ.get("FAULTS_SEED", "20240229"))
