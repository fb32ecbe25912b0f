"""Fixtures for faults of the disk and of the process: file_operations.py beside this file, as a module."""

from __future__ import annotations

import importlib.util
import sys
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
