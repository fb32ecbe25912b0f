"""Which errors are a device's own: what a CUDA call says when the device, not the model or the data, failed.

A result that no sound device computes counts too, though a model may be to blame for it.

What lives here: the judgement over an error and its causes. What does not: counting them (``left_out.py``).
"""

from __future__ import annotations

from collections.abc import Iterator

_SIGNS = ("cuda error", "cublas_status", "cudnn_status", "nccl error", "uncorrectable ecc")
"""In an error, and in the end of a model server's log, which names NCCL at each start."""

_NOT_ITS_OWN = ("out of memory", "alloc_failed", "device-side assert")
"""Too large a batch, and an index out of range in a model's code, fail on any device."""


class ImpossibleResultError(RuntimeError):
    """What was computed cannot be right; the first sentence of the message says what it is.

    The device may have done it, or the model: an occurrence of it counts on one device alone.
    """


def device_failure(error: BaseException) -> str | None:
    """A sentence where the error is a device's own failure, else None. Looks at its causes too."""
    for one in _causes(error):
        if isinstance(one, MemoryError):
            return None
        text = str(one)
        if isinstance(one, ImpossibleResultError):
            return f"{text.partition('. ')[0].rstrip('.')}."
        plain = text.lower()
        if any(sign in plain for sign in _NOT_ITS_OWN):
            return None
        lines = text.splitlines()
        telling = [line for line in lines if any(sign in line.lower() for sign in _SIGNS)]
        # By name: torch is not imported where no model ran.
        if telling or type(one).__name__ == "AcceleratorError":
            return f"{type(one).__name__}: {(telling or lines or [''])[0].strip()}"
    return None


def _causes(error: BaseException) -> Iterator[BaseException]:
    """The error's causes, the first one first, and then itself."""
    chain: list[BaseException] = []
    one: BaseException | None = error
    while one is not None and one not in chain:
        chain.append(one)
        one = one.__cause__
    yield from reversed(chain)
