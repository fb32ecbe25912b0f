"""The program that runs a model's processor beside it: ``python -m resources.vlm.preparation_worker``.

What lives here: the loop that takes the pixels of a batch and answers with its tensors. What does not:
starting and ending it, and what is done where it is lost (``preparation_process.py``). A program of its own,
as the decode workers are: it inherits no lock and runs no ``__main__`` of its parent's a second time.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

from resources.vlm.decode_worker import die_with

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

READY = "ready"


def main() -> None:
    """Answer until the connection ends or the parent dies."""
    parent, descriptor = int(sys.argv[1]), int(sys.argv[2])
    die_with(parent)
    # A Ctrl-C is for the parent, which commits what is finished and then ends this process.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    connection: Connection[Any, Any] = Connection(descriptor)
    source, prompt = connection.recv()

    import torch

    from resources.vlm.model_inputs import processed
    from resources.vlm.model_loading import load_processor

    torch.set_num_threads(1)
    processor = load_processor(source)
    connection.send(READY)
    while True:
        try:
            images: Sequence[Sequence[npt.NDArray[np.uint8]]] = connection.recv()
        except EOFError:
            return
        try:
            tensors = processed(processor, prompt, images)
            answer: Any = {name: tensor.numpy() for name, tensor in tensors.items()}
        except Exception as error:  # the parent's processor says it again, where it can be answered for
            answer = f"{type(error).__name__}: {error}"
        connection.send(answer)


if __name__ == "__main__":
    main()
