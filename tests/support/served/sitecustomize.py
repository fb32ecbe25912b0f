"""Makes the processes of a Dagster that tests start quick. Python imports this at the start of each of them.

The daemon looks for backfills every two seconds instead of every 30 s. With TESTS_SCRIPTED_MODELS runs have
scripted models, which take so many seconds a property: importing torch and loading a model costs each run 6 s
of a core. They find no pandas, which only tests install: pyarrow imports it where it is, for 0.2 s. And
garbage is looked for less often: imports leave none, and the search takes an eighth of their time.

The code server forks runs with scripted models from a process that has imported Dagster and the project.
A run that imports them itself takes 2 s of a core more. Each run still loads the definitions. The process
from which `make cluster-demo` forks runs spares the real models' libraries, which take 5 s.
"""

import gc
import importlib.util
import multiprocessing
import os
import sys
import types

PATCHED = "resources.vision_language_model"
IMPORTED = (
    "dagster._grpc.impl",
    "vlm_assets.home_definitions",
    "vlm_assets.config.component_settings",
    "vlm_assets.assets.property_embeddings",
    "vlm_training.training_extension",
    "vlm_results.results_extension",
)
"""Modules that every run imports, and that leave nothing of a home in memory."""
LIBRARIES = ("sentence_transformers", "torch", "transformers", "xgrammar")
"""Of real models."""


class Nothing(types.ModuleType):
    """Stands where a library was to be imported before it is needed."""

    def __getattr__(self, name):
        """Nothing, under each name."""


class Scripting:
    """Replaces the models once the module is imported that loads them."""

    @classmethod
    def find_spec(cls, name, path=None, target=None):
        """None for all other modules."""
        if name != PATCHED:
            return None
        sys.meta_path.remove(cls)
        spec = importlib.util.find_spec(name)
        execute = spec.loader.exec_module

        def execute_and_script(module):
            execute(module)
            from tests.support.scripted_models import script_models

            script_models(float(os.environ["TESTS_SCRIPTED_MODELS"]))
            for library in LIBRARIES:
                if isinstance(sys.modules.get(library), Nothing):
                    del sys.modules[library]

        spec.loader.exec_module = execute_and_script
        return spec


class WithoutPandas:
    """Finds no pandas, as where only this project is installed."""

    @staticmethod
    def find_spec(name, path=None, target=None):
        """Raise what Python raises where nobody finds a module; None for all others."""
        if name == "pandas":
            raise ModuleNotFoundError("No module named 'pandas'", name=name)


gc.set_threshold(10_000)
if any(word.endswith("dagster-daemon") for word in sys.orig_argv):
    from dagster._daemon import controller

    controller.DEFAULT_DAEMON_INTERVAL_SECONDS = 2
if "TESTS_SCRIPTED_MODELS" in os.environ:
    # A real model's libraries ask whether pandas is there, and take no error for an answer.
    sys.meta_path[:0] = [Scripting, WithoutPandas]
    if "faults.run_template" in sys.orig_argv:
        sys.modules.update({library: Nothing(library) for library in LIBRARIES})
    if {"api", "grpc"} <= set(sys.orig_argv):
        context_of = multiprocessing.get_context
        multiprocessing.set_forkserver_preload(list(IMPORTED))
        multiprocessing.get_context = lambda method=None: context_of(
            "forkserver" if method == "spawn" else method
        )
