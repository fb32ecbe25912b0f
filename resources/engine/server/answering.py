"""What of a model server decides its answers, beside the model: for the fingerprint of the rows it makes.

What lives here: telling the arguments that can change an answer from those that cannot. What does not: the
fingerprint (``vlm_assets/assets/fingerprint.py``), starting the server (``server_plan.py``).
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import PurePath
from typing import Final

_VALUES_ALIKE: Final = frozenset(
    {
        # Where it listens, who may ask, what it may read.
        "--host", "--port", "--api-key", "--allowed-local-media-path", "--served-model-name",
        # How much memory and how many requests at once: they move the last digits, as a batch does.
        "--gpu-memory-utilization", "--kv-cache-memory-bytes", "--max-num-seqs", "--max-num-batched-tokens",
        "--swap-space", "--cpu-offload-gb", "--block-size", "--tensor-parallel-size", "-tp",
        "--pipeline-parallel-size", "-pp", "--data-parallel-size", "-dp", "--mm-processor-cache-gb",
        "--mem-fraction-static", "--max-running-requests", "--tp-size", "--tp",
        # Where files lie, and what is written down.
        "--download-dir", "--load-format", "--uvicorn-log-level", "--log-level",
    }
)  # fmt: skip
"""Options with a value that cannot change an answer."""

_FLAGS_ALIKE: Final = frozenset(
    {
        "--enable-prefix-caching", "--no-enable-prefix-caching", "--enable-chunked-prefill",
        "--enforce-eager", "--disable-uvicorn-access-log", "--disable-log-requests", "--disable-log-stats",
        "--enable-log-requests",
    }
)  # fmt: skip
"""The same without one: the word after them is another's."""


def answering_arguments(command: str) -> list[str]:
    """The words of a server's command template that can change an answer, its program without folders.

    Whatever is not known to change nothing counts: quantization, precision, the processor's sizes, the chat
    template. Raises ValueError where the template cannot be split into words.
    """
    words = shlex.split(command)
    return [PurePath(word).name for word in words[:1]] + list(_deciding(words[1:]))


def _deciding(words: list[str]) -> Iterator[str]:
    rest = iter(words)
    for word in rest:
        name, equals, _ = word.partition("=")
        if name in _VALUES_ALIKE:
            if not equals:
                next(rest, None)
        elif name not in _FLAGS_ALIKE:
            yield word
