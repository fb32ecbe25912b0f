"""The program that runs a model's processor beside it, ``preparation_worker PARENT_PID DESCRIPTOR``.

What lives here: the loop that is told where the pixels of a batch are and answers where its tensors are.
What does not: starting and ending it, and what is done where it is lost (``preparation_process.py``). A
program of its own, as the decode workers are: it inherits no lock and runs no ``__main__`` of its parent's a
second time.
"""

from __future__ import annotations

import mmap
import os
import signal
import sys
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle, send_handle
from typing import TYPE_CHECKING, Any

from resources.images.decode_worker import LESS_THAN_THE_MODEL, die_with
from resources.images.nameless_memory import Layout, store

if TYPE_CHECKING:
    import numpy.typing as npt
    import torch

READY = "ready"


def main() -> None:
    """Answer until the connection ends or the parent dies."""
    parent, descriptor = int(sys.argv[1]), int(sys.argv[2])
    die_with(parent)
    # A Ctrl-C is for the parent, which commits what is finished and then ends this process.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.nice(LESS_THAN_THE_MODEL)
    connection: Connection[Any, Any] = Connection(descriptor)
    source, prompt = connection.recv()

    import torch

    from resources.engine.transformers.model_loading import load_processor

    torch.set_num_threads(1)
    processor = load_processor(source)
    connection.send(READY)
    while True:
        try:
            shown, memories, dtype = connection.recv()
        except EOFError:
            return
        handles = [recv_handle(connection) for _ in range(memories)]
        try:
            tensors, layout = _prepared(processor, prompt, shown, handles, dtype)
        except Exception as error:  # the parent's processor says it again, where it can be answered for
            connection.send(f"{type(error).__name__}: {error}")
        else:
            connection.send(layout)
            send_handle(connection, tensors, parent)
            os.close(tensors)


def _prepared(
    processor: Any, prompt: str, shown: Any, handles: list[int], dtype: torch.dtype
) -> tuple[int, Layout]:
    """The descriptor and the layout of a batch's tensors."""
    from resources.engine.transformers.model_inputs import processed

    maps = []
    for handle in handles:
        maps.append(mmap.mmap(handle, os.fstat(handle).st_size, prot=mmap.PROT_READ))
        os.close(handle)
    images = [
        [one[1].image(maps[one[0]]) if isinstance(one, tuple) else one for one in of_one] for of_one in shown
    ]
    # Converted here: half as much to hand over, and nothing left to do for the model's process.
    tensors = processed(processor, prompt, images).to("cpu", dtype)
    return store({name: as_array(tensor) for name, tensor in tensors.items()})


def as_array(tensor: torch.Tensor) -> npt.NDArray[Any]:
    """A tensor's memory. NumPy knows no bfloat16: it is passed off as uint16, which no processor makes."""
    import torch

    array: npt.NDArray[Any] = (
        tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor
    ).numpy()
    return array


def as_tensor(array: npt.NDArray[Any]) -> torch.Tensor:
    """The tensor of ``as_array``."""
    import torch

    tensor = torch.from_numpy(array)
    return tensor.view(torch.bfloat16) if tensor.dtype == torch.uint16 else tensor


if __name__ == "__main__":
    main()
