"""What finished answers that leave the batch save: python -m benchmarks.leaving [--prompt 2000] [--batch 8]

Answers whose lengths are spread from 16 to 128 tokens, after prompts as long as those of properties with
many images, decoded by turns by transformers' own greedy loop, which pads them to the longest, and by ours. A
language model with random weights, on a CPU with one thread: what it spends on each row is attention over its
cache, as in a large model on a GPU; a GPU also reads the weights once a step, whatever the batch.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import time
from typing import Any

from benchmarks.gpu_models import LengthsOfBatch
from vlm_engine.transformers.greedy_decoding import GreedyDecoding

SHORTEST, LONGEST = 16, 128
STOP, WIDTH = 1, 1000


def build() -> Any:
    """A language model of 20 million parameters."""
    import torch
    from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

    torch.set_num_threads(1)
    config = LlamaConfig(
        vocab_size=WIDTH, hidden_size=512, intermediate_size=1024, num_hidden_layers=8, num_attention_heads=8,
        num_key_value_heads=4, max_position_embeddings=1 << 15, eos_token_id=STOP, bos_token_id=None,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    model.generation_config = GenerationConfig(eos_token_id=STOP, pad_token_id=0, do_sample=False)
    return model


def main() -> None:
    """Measure by turns and print the paired ratios."""
    import torch

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompt", type=int, default=2000)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    model = build()
    prompt = torch.randint(2, WIDTH, (arguments.batch, arguments.prompt))
    chance = random.Random(1)
    lengths = [chance.randint(SHORTEST, LONGEST) for _ in range(arguments.batch)]

    def generate(decoding: GreedyDecoding | None) -> tuple[Any, float, float]:
        ends = LengthsOfBatch(lengths, stop=STOP, never=[0], words=0)
        began, cpu = time.perf_counter(), time.process_time()
        with torch.inference_mode():
            sequences = model.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                max_new_tokens=LONGEST,
                logits_processor=[ends],
                custom_generate=decoding,
            )
        return sequences, time.perf_counter() - began, time.process_time() - cpu

    first = GreedyDecoding(stop_token_ids=[STOP], pad_token_id=0, limits=[1] * arguments.batch)
    prefill = generate(first)[2]
    ratios, generations = [], []
    for number in range(arguments.rounds):
        turns = {}
        for leaving in (number % 2 == 0, number % 2 == 1):
            limits = [LONGEST] * arguments.batch
            decoding = (
                GreedyDecoding(stop_token_ids=[STOP], pad_token_id=0, limits=limits) if leaving else None
            )
            turns[leaving] = generate(decoding)
        assert torch.equal(turns[True][0], turns[False][0]), "both must choose the same tokens"
        ratios.append(turns[False][2] / turns[True][2])
        generations.append((turns[False][2] - prefill) / (turns[True][2] - prefill))
    print(f"answers of {sorted(lengths)} tokens after {arguments.prompt}; prefill {prefill:.1f} s of CPU")
    print(f"padded / leaving, CPU time of the whole: {[round(ratio, 2) for ratio in ratios]}")
    print(f"the same of the tokens after the first: median {statistics.median(generations):.2f}")
    print(f"load {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
