"""Imported once by the process that runs are forked from: what every run imports of others' packages.

What lives here: their names, and what that process is besides: it ends with the last of its runs, not by a
signal to its group. Nothing of ours is imported ahead: a run has our modules, the settings and the catalogue
as they are when it starts.
"""

from __future__ import annotations

import atexit
import gc
import logging
import os
import signal
from importlib import import_module

_MODULES = (
    "dagster",
    "dagster._cli.api",
    "dagster._core.storage.sqlite_storage",
    "dagster._grpc.impl",
    "dagster._grpc.server",
    "duckdb",
    "fsspec",
    "numpy.ma",
    "PIL.PngImagePlugin",
    "pyarrow.compute",
    "pyarrow.dataset",
    "pyarrow.parquet",
    "pydantic_settings",
    "upath",
    "torch",
    "transformers",
    "transformers.generation",
    "transformers.modeling_utils",
    "transformers.models.auto.image_processing_auto",
    "transformers.models.auto.modeling_auto",
    "transformers.models.auto.processing_auto",
    "transformers.models.auto.tokenization_auto",
    "transformers.processing_utils",
    "xgrammar",
)


def _import_all() -> None:
    for module in _MODULES:
        try:
            import_module(module)
        except Exception as error:
            # A run that needs it says so itself.
            logging.getLogger(__name__).warning("%s is not imported ahead of runs: %s", module, error)
    # What is here stays, and a collection in a run need not look at it, and so copy it.
    gc.collect()
    gc.freeze()


def _outlive_runs() -> None:
    """SIGTERM to the group is for the runs: while one of them drains, its exit code is told from here."""
    before, here = signal.signal(signal.SIGTERM, signal.SIG_IGN), os.getpid()

    def in_a_child() -> None:
        if os.getppid() == here:
            signal.signal(signal.SIGTERM, before)

    os.register_at_fork(after_in_child=in_a_child)
    # Taking torch apart takes a second of a core, and nobody needs it.
    atexit.register(os._exit, 0)


_import_all()
_outlive_runs()
