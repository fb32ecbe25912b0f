"""vLLM without a server: ``python -m benchmarks.contenders.vllm_offline TASK.json``, in vLLM's environment.

The task is what ``benchmarks.gpu_partitions`` writes. Images are opened in threads, a chunk ahead of the
model, and made as small as ours are. Printed is one line of JSON: seconds until the model answers, and from
then on.
"""

from __future__ import annotations

import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from PIL import Image

CHUNK = 128
"""Properties whose images are in memory at once; vLLM makes batches of its own."""


def opened(path: str, pixels: int) -> Image.Image:
    """An image with at most so many pixels."""
    with Image.open(path) as image:
        share = min(1.0, (pixels / (image.width * image.height)) ** 0.5)
        size = int(image.width * share), int(image.height * share)
        image.draft("RGB", (int(size[0] * 0.81), int(size[1] * 0.81)))
        rgb = image.convert("RGB")
    return rgb.resize(size, Image.Resampling.HAMMING) if rgb.width > size[0] else rgb


def main() -> None:
    """Describe all properties of the task."""
    task: dict[str, Any] = json.loads(Path(sys.argv[1]).read_text())
    began = time.monotonic()
    from vllm import LLM, SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    model = LLM(**task["engine"])
    loaded = time.monotonic()
    sampling = SamplingParams(
        temperature=0.0,
        max_tokens=task["max_tokens"],
        structured_outputs=StructuredOutputsParams(json=task["json_schema"]),
    )
    rows = [json.loads(line) for line in Path(task["listing"]).read_text().splitlines()]
    chunks = [rows[at : at + CHUNK] for at in range(0, len(rows), CHUNK)]
    tokens = 0
    with ThreadPoolExecutor(task["threads"]) as pool:

        def load(chunk: list[dict[str, Any]]) -> Any:
            return [[pool.submit(opened, path, task["pixels"]) for path in row["images"]] for row in chunk]

        ahead = load(chunks[0])
        for at in range(len(chunks)):
            images = [[future.result() for future in shown] for shown in ahead]
            ahead = load(chunks[at + 1]) if at + 1 < len(chunks) else []
            conversations = [
                [
                    {
                        "role": "user",
                        "content": [
                            *({"type": "image_pil", "image_pil": image} for image in shown),
                            {"type": "text", "text": task["prompt"]},
                        ],
                    }
                ]
                for shown in images
            ]
            outputs = model.chat(conversations, sampling, use_tqdm=False)
            tokens += sum(len(output.outputs[0].token_ids) for output in outputs)
    print(json.dumps({"start": loaded - began, "seconds": time.monotonic() - loaded, "tokens": tokens}))


if __name__ == "__main__":
    main()
