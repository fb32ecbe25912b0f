"""A process that runs the processor for a model on the CPU, whose Python leaves a thread beside it no time.

What lives here: starting it, asking it, and that nobody waits for one that hangs. What does not: the program
(``preparation_worker.py``), and what is prepared when (``model_inputs.py``).
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from multiprocessing.connection import Pipe
from typing import TYPE_CHECKING, Any, Final

from resources.vlm.preparation_worker import READY
from resources.vlm.worker_process import python_path

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from resources.vlm.model_loading import ModelSource

_BATCH_SECONDS: Final = 120.0
_ENDING_SECONDS: Final = 2.0


class PreparationLostError(RuntimeError):
    """The process died, hung, or could not prepare a batch; the caller prepares it itself."""


class PreparationProcess:
    """One process with a processor of its own. Asked from one thread, the one that started it.

    It ends with that thread, because Linux sends the parent-death signal when the thread that started a
    process ends.
    """

    def __init__(self, source: ModelSource, prompt: str) -> None:
        self._connection, theirs = Pipe()
        with theirs:
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-P",
                    "-m",
                    "resources.vlm.preparation_worker",
                    str(os.getpid()),
                    str(theirs.fileno()),
                ],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                # Its own group: a signal to the run's is the parent's to handle.
                process_group=0,
                # No CUDA context, and no threads that take the model's cores.
                env=os.environ
                | {"PYTHONPATH": python_path(), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
            )
        self._ready = False
        with contextlib.suppress(OSError):
            self._connection.send((source, prompt))

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def ready(self, wait_seconds: float = 0.0) -> bool:
        """Whether it can be asked: it takes seconds to import what it needs. Raises PreparationLostError."""
        if not self._ready and self._connection.poll(wait_seconds):
            self._ready = self._receive() == READY
        return self._ready

    def arrays(self, images: Sequence[Sequence[npt.NDArray[np.uint8]]]) -> dict[str, npt.NDArray[Any]]:
        """The processor's tensors, for the images [height, width, 3] of each property.

        Raises PreparationLostError.
        """
        # Ends a send and a receive alike, where the process has stopped.
        limit = threading.Timer(_BATCH_SECONDS, self._process.kill)
        limit.daemon = True
        limit.start()
        try:
            self._connection.send(images)
            answer = self._receive()
        except OSError as error:
            raise PreparationLostError(f"The preparation process is gone: {error}") from error
        finally:
            limit.cancel()
        if isinstance(answer, str):
            raise PreparationLostError(f"The preparation process could not prepare a batch: {answer}")
        prepared: dict[str, npt.NDArray[Any]] = answer
        return prepared

    def close(self) -> None:
        """End it, at work or not, from any thread; who waits for an answer is told that it is lost."""
        self._process.kill()
        # Where it reads from storage that hangs, it ends when that does.
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_ENDING_SECONDS)

    def _receive(self) -> Any:
        try:
            return self._connection.recv()
        except (EOFError, OSError) as error:
            raise PreparationLostError("The preparation process is gone.") from error
