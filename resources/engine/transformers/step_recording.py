"""A step of a model recorded as a CUDA graph: its hundreds of kernels are launched at once from then on.

What lives here: recording, and what becomes of a recording that fails. What does not: what a step is
(static_decoding.py). Term: torch.cuda.CUDAGraph.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    import torch

Step = Callable[[], "torch.Tensor"]

_REHEARSALS: Final = 2
"""Times that a step runs before it is recorded: libraries make ready, and a compiler compiles, what they may
not while it is."""

_failed: Final[list[Any]] = []
"""Recordings that failed: PyTorch's allocator of pinned memory goes on asking them."""


class RecordingError(RuntimeError):
    """A step does what no graph can hold, such as asking the device for a value."""


class StepRecorder:
    """Records steps of one device; their memory is shared, so none is replayed while another runs.

    Called from one thread. Other threads may use the device meanwhile: they pin memory.
    """

    def __init__(self) -> None:
        import torch

        self._stream = torch.cuda.Stream()
        self.restart()

    def restart(self) -> None:
        """Begin anew, once all recordings were let go: memory that was shared by them is not used again."""
        import torch

        self._pool = torch.cuda.graph_pool_handle()

    def recorded(self, step: Step) -> Step:
        """The same step from a recording; what it returns is overwritten by the next step.

        The step must read and write at the same addresses whenever it runs, and may run any number of times.
        Raises RecordingError, and torch.OutOfMemoryError.
        """
        import torch

        # On the stream that records: a library's work space belongs to a stream.
        current = torch.cuda.current_stream()
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            for _ in range(_REHEARSALS):
                step()
        current.wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        try:
            # Thread-local: the threads that prepare batches pin memory, for which a recording that looked at
            # all threads would fail.
            with torch.cuda.graph(
                graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
            ):
                result = step()
        except Exception as error:
            # Where ending the recording fails, torch.cuda.graph leaves its stream the current one.
            torch.cuda.set_stream(current)
            self._clean_up_after(graph)
            # Ending a recording that ran out of memory fails in its turn, with another error.
            if out := out_of_memory(error):
                raise torch.OutOfMemoryError(str(out)) from error
            raise RecordingError(f"{type(error).__name__}: {str(error)[:300]}") from error

        def replayed() -> Any:
            graph.replay()
            return result

        return replayed

    def _clean_up_after(self, graph: Any) -> None:
        """Do what a recording that did not come to its end left undone.

        While PyTorch counts a recording as under way, ``empty_cache`` fails, and what makes room for an
        allocation is left out. It has no public name for this.
        """
        import torch

        try:
            graph.pool()  # raises where the recording did not end
        except RuntimeError:
            _failed.append(graph)
            device = torch.cuda.current_device()
            for done in ("_cuda_endAllocateToPool", "_cuda_releasePool"):
                with contextlib.suppress(AttributeError, RuntimeError):
                    getattr(torch._C, done)(device, self._pool)
            self.restart()


def out_of_memory(error: BaseException | None) -> BaseException | None:
    """The lack of memory that led to an error, if one did."""
    import torch

    while error is not None and not isinstance(error, torch.OutOfMemoryError):
        error = error.__cause__ or error.__context__
    return error
