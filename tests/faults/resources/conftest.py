"""Fixtures for faults of the disk and of the process: file_operations.py beside this file, as a module."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(scope="session")
def file_operations() -> ModuleType:
    """The module that records file operations, and the disk that loses what was not made durable."""
    path = Path(__file__).with_name("file_operations.py")
    spec = importlib.util.spec_from_file_location("file_operations", path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def memory_path() -> Iterator[Path]:
    """An empty folder, in memory where there is such a place: for sweeps that need no real disk."""
    place = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    folder = Path(tempfile.mkdtemp(dir=place))
    yield folder
    shutil.rmtree(folder)
