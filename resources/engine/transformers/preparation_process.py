"""A process that runs the processor, so that a model's own waits for no lock of the interpreter.

What lives here: starting it, asking it, and that nobody waits for one that hangs. What does not: the program
(``preparation_worker.py``), and what is prepared when (``model_inputs.py``).

Pixels that lie in memory which processes share, and tensors always, are not sent: only where they are.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import subprocess
import sys
from collections.abc import Sequence
from multiprocessing.connection import Pipe
from multiprocessing.reduction import recv_handle, send_handle
from typing import TYPE_CHECKING, Final

from resources.engine.transformers.preparation_worker import READY, as_tensor
from resources.images.nameless_memory import Layout, stored
from resources.images.pixel_memory import Place, SharedImage
from resources.images.worker_process import environment

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import torch

    from resources.engine.transformers.model_loading import ModelSource
    from resources.images.pixel_memory import PixelMemory

_BATCH_SECONDS: Final = 120.0
_ENDING_SECONDS: Final = 2.0


class PreparationLostError(RuntimeError):
    """The process died, hung, or could not prepare a batch; the caller prepares it itself."""


class PreparationProcess:
    """One process with a processor of its own. Asked from one thread at a time.

    It ends with the thread that started it, because Linux sends the parent-death signal when that ends.
    """

    def __init__(self, source: ModelSource, prompt: str) -> None:
        self._connection, theirs = Pipe()
        with theirs:
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-P",
                    "-m",
                    "resources.engine.transformers.preparation_worker",
                    str(os.getpid()),
                    str(theirs.fileno()),
                ],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                # Its own group: a signal to the run's is the parent's to handle.
                process_group=0,
                # No CUDA context, and no threads that take the model's cores.
                env=environment() | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
            )
        _limit(self._connection.fileno(), _BATCH_SECONDS)
        self._ready = False
        with contextlib.suppress(OSError):
            self._connection.send((source, prompt))

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def ready(self, wait_seconds: float = 0.0) -> bool:
        """Whether it can be asked: it takes seconds to import what it needs. Raises PreparationLostError."""
        try:
            if not self._ready and self._connection.poll(wait_seconds):
                self._ready = self._connection.recv() == READY
        except (EOFError, OSError) as error:
            raise PreparationLostError("The preparation process is gone.") from error
        return self._ready

    def tensors(
        self, images: Sequence[Sequence[npt.NDArray[np.uint8]]], dtype: torch.dtype
    ) -> dict[str, torch.Tensor]:
        """The processor's tensors, for the images [height, width, 3] of each property.

        dtype: of floating-point ones. Raises PreparationLostError.
        """
        memories: list[PixelMemory] = []
        shown = [[_sent(image, memories) for image in of_one] for of_one in images]
        try:
            self._connection.send((shown, len(memories), dtype))
            for memory in memories:
                send_handle(self._connection, memory.descriptor, self.pid)
            answer: Layout | str = self._connection.recv()
            if isinstance(answer, Layout):
                descriptor = recv_handle(self._connection)
                try:
                    arrays = stored(descriptor, answer)
                finally:
                    os.close(descriptor)
                return {name: as_tensor(array) for name, array in arrays.items()}
        except Exception as error:
            # Whatever it is, it is not asked again: what is left of an answer would be another batch's.
            self._process.kill()
            raise PreparationLostError(f"The preparation process is gone, or hangs: {error}") from error
        raise PreparationLostError(f"The preparation process could not prepare a batch: {answer}")

    def close(self) -> None:
        """End it, at work or not, from any thread; who waits for an answer is told that it is lost."""
        self._process.kill()
        # Where it reads from storage that hangs, it ends when that does.
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_ENDING_SECONDS)


def _sent(
    image: npt.NDArray[np.uint8], memories: list[PixelMemory]
) -> tuple[int, Place] | npt.NDArray[np.uint8]:
    """An image as it is sent: the number of its memory and its place there, or its pixels."""
    if not isinstance(image, SharedImage) or image.memory is None:
        return image
    if image.memory not in memories:
        memories.append(image.memory)
    return memories.index(image.memory), image.place


def _limit(descriptor: int, seconds: float) -> None:
    """Have what is sent or received there fail with an OSError when nothing moves for so long."""
    whole = int(seconds)
    limit = struct.pack("ll", whole, int((seconds - whole) * 1e6))
    with socket.socket(fileno=os.dup(descriptor)) as end:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
