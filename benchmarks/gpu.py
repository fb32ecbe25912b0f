"""What a run describes on a GPU in a second, and what it waits for: ``make bench-gpu``.

What lives here: the grid of cases, what is measured of each, and the command. What does not: the loops
(gpu_loops.py), the models (gpu_models.py), the clocks (gpu_meter.py), the lines (gpu_report.py), and whole
partitions against vLLM, which follow (gpu_partitions.py). Weights are random and images rendered: nothing is
downloaded, and for all but whole partitions torch, transformers, pyarrow and pillow are enough.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np

from benchmarks.gpu_facts import gpu_readings, versions
from benchmarks.gpu_loops import (
    PROMPT,
    Answers,
    Bench,
    Case,
    Work,
    decode_rate,
    describe_window,
    plain_window,
    render_jpegs,
    workers_of,
)
from benchmarks.gpu_meter import DeviceSamples, StageClock, Stages, measure_ceilings, profile_kernels
from benchmarks.gpu_models import SHAPES, AnswerLengths, AnswerScripts, save_processor_of, vision_layers
from benchmarks.gpu_report import PLAIN, print_case, print_table
from vlm_engine.images.images import LoadedProperty, Pixels
from vlm_engine.model_source import ModelSource
from vlm_engine.protocol import Attempt
from vlm_engine.transformers.collation import Tensors
from vlm_engine.transformers.transformers_engine import TransformersEngine

IMAGES_OF_THE_RUN: Final = 12_800_000
DEVICES_OF_THE_RUN: Final = 10
PROFILED_STEPS: Final = 24
DEFAULT_SIDE: Final = 1182
"""Longest edge in pixels of an image of four to three with as many pixels as the settings allow."""
_AXES: Final = ("model", "side", "images", "output_tokens", "alike", "drafts", "batch")
TIGHT_GIB: Final = 48
"""Of a device's memory left beside the model: with less, a case's batch may not fit."""
WORTH_A_LARGER_BATCH: Final = 1.15
"""Plain generation is compared at a larger batch too, if so much more fits into the engine's memory."""

CASES: Final = (
    # What a run with the default settings does: shipped processors, a megapixel of each image.
    Case("qwen2.5-vl-3b", DEFAULT_SIDE, batch=6, plain=True),
    Case("smolvlm2-2.2b", DEFAULT_SIDE, batch=6, plain=True),
    Case("qwen2.5-vl-3b", DEFAULT_SIDE, batch=24),
    Case("smolvlm2-2.2b", DEFAULT_SIDE, batch=24),
    Case("smolvlm-2.2b", 384, plain=True, profile=True),
    Case("smolvlm-2.2b", 384, alike=50, plain=True),
    Case("gemma3-4b", 896, batch=16, plain=True),
    Case("idefics3-8b", 364, plain=True),
    Case("idefics3-8b", 728, batch=8),
    Case("smolvlm-2.2b", 384, batch=96),
    Case("smolvlm-2.2b", 768, batch=16),
    Case("smolvlm-2.2b", 384, output_tokens=384),
)
TINY_CASES: Final = (
    Case("tiny-qwen2.5-vl", 112, 3, 8, 2, plain=True),
    Case("tiny-smolvlm2", 112, 3, 8, 2, plain=True),
    Case("tiny-idefics3", 112, 3, 8, 2, plain=True, profile=True),
    Case("tiny-idefics3", 56, 3, 40, 4, alike=75, plain=True),
    Case("tiny-gemma3", 56, 3, 8, 2, plain=True, profile=True),
)


def say(text: str = "") -> None:
    """A line for who waits."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def run_case(bench: Bench, case: Case) -> dict[str, Any]:
    """All that is measured of one case, as it stands in the results file."""
    with tempfile.TemporaryDirectory() as folder:
        return _run_case(bench, case, Path(folder))


def _run_case(bench: Bench, case: Case, folder: Path) -> dict[str, Any]:
    shape = SHAPES[case.model]
    result: dict[str, Any] = {"case": asdict(case), "model_seconds": bench.load(case.model)}
    result["parameters"] = sum(parameter.numel() for parameter in bench.model.parameters())
    processor, limits = save_processor_of(shape, bench.tokenizer, folder, side=case.side, prompt=PROMPT.text)
    dtype = str(bench.model.dtype).removeprefix("torch.")
    output = Tensors(ModelSource(str(folder)), PROMPT.text, dtype, limits)
    guided, unguided = (_answers(bench, case, masked=masked) for masked in (True, False))
    bench.free()
    if bench.free_gib() < TIGHT_GIB:
        case = _fitting(bench, case, _engine(bench, case, processor, guided))
        guided.restart()
        result["case"] = asdict(case)
    clock = StageClock(bench.model, vision_layers(bench.model), cuda=bench.cuda)
    result["decode_workers_images_per_second"] = decode_rate(bench, case)
    with DeviceSamples(cuda=bench.cuda) as samples, clock:

        def restart() -> None:
            clock.restart()
            samples.restart()

        def measured(work: Work) -> dict[str, Any]:
            stages = clock.stages()
            whole = _rates(work, bench) | _stages(work, stages) | samples.means()
            return whole | _limits(bench, case, work, stages)

        bench.free()
        engine = _engine(bench, case, processor, guided)
        work = describe_window(bench, case, engine, output, guided, restart)
        result["engine"] = measured(work)
        result["engine"]["largest_batch"] = engine.largest_batch
        a_core = work.images / max(1e-9, work.feeding)
        cores_needed = result["engine"]["images_per_second"] / a_core
        result["feeding"] = {
            "images_per_second_a_core": a_core,
            "cores_to_feed_the_device": cores_needed,
        }
        result["nvml_problem"] = samples.problem
        fitted = engine.largest_batch or case.batch
        # Plain generation at its best: a batch may be too large for it as well as too small.
        for name, batch in zip(PLAIN, (fitted, fitted // 2, None), strict=True):
            batch = batch or _batch_of_the_same_memory(bench, case, result)
            if case.plain and batch and bench.has_time_for(3):
                bench.free()
                restart()
                try:
                    same = replace(case, batch=batch)
                    work = plain_window(bench, same, processor, unguided, clock.restart)
                    result[name] = measured(work) | {"batch": batch}
                except Exception as error:  # what the engine did stands all the same
                    result[f"{name}_failed"] = f"{type(error).__name__}: {str(error)[:300]}"
    if case.profile and bench.cuda and bench.has_time_for(2):
        try:
            result["kernels"] = _kernels(bench, case, _engine(bench, case, processor, guided))
        except Exception as error:  # a machine without CUPTI, say
            result["kernels_failed"] = f"{type(error).__name__}: {str(error)[:300]}"
    return result


def _fitting(bench: Bench, case: Case, engine: TransformersEngine) -> Case:
    """The case with a batch whose prompts fit, found in seconds; in a window it would take minutes."""
    engine.describe(_batch(bench, case), attempt=Attempt(number=1, max_new_tokens=1))
    return replace(case, batch=engine.largest_batch or case.batch)


def _batch(bench: Bench, case: Case) -> Sequence[LoadedProperty]:
    with workers_of(bench, case, Pixels()) as workers:
        return next(workers.feed(bench.batches(case)))


def _answers(bench: Bench, case: Case, *, masked: bool) -> Answers:
    vocabulary = SHAPES[case.model].vocabulary
    lengths = AnswerLengths(case.output_tokens, bench.tokenizer, vocabulary=vocabulary, masked=masked)
    if not case.alike:
        return lengths
    return AnswerScripts(lengths, bench.tokenizer, vocabulary=vocabulary, alike=case.alike)


def _engine(bench: Bench, case: Case, processor: Any, answers: Answers) -> TransformersEngine:
    return TransformersEngine.around(
        bench.model,
        processor,
        grammar=answers,
        prompt=PROMPT,
        device=bench.device,
        speculative_tokens=case.drafts,
    )


def _batch_of_the_same_memory(bench: Bench, case: Case, result: dict[str, Any]) -> int | None:
    """The batch with which plain generation takes the memory that the engine took, where that is larger."""
    if "plain" not in result or not bench.cuda:
        return None
    weights = (
        sum(parameter.numel() * parameter.element_size() for parameter in bench.model.parameters()) / 2**30
    )
    engine = result["engine"]["peak_gib"]
    times = (engine - weights) / max(0.1, result["plain"]["peak_gib"] - weights)
    return int(result["plain"]["batch"] * times) if times >= WORTH_A_LARGER_BATCH else None


def _rates(work: Work, bench: Bench) -> dict[str, Any]:
    images = work.images / work.seconds
    return {
        "seconds": work.seconds,
        "batches": work.batches,
        "images_per_second": images,
        "properties_per_second": work.properties / work.seconds,
        "tokens_per_second": sum(generated for _, generated in work.tokens) / work.seconds,
        "days_of_the_run": IMAGES_OF_THE_RUN / DEVICES_OF_THE_RUN / images / 86_400,
        "peak_gib": bench.peak_gib(),
    }


def _stages(work: Work, stages: Stages) -> dict[str, Any]:
    """Seconds a batch by stage; together they are the whole."""
    inside = stages.vision + stages.prefill + stages.decode
    seconds = {
        "wait_images": work.wait_images,
        "processor": work.processor,
        "upload_and_text": work.describe - work.processor - stages.generate,
        "vision": stages.vision,
        "prefill": stages.prefill,
        "decode": stages.decode,
        "generate_beside": stages.generate - inside,
        "loop": work.seconds - work.wait_images - work.describe,
    }
    steps = max(1, stages.steps)
    return {
        "batch_seconds": work.seconds / work.batches,
        "generate_seconds_per_property": stages.generate / work.properties,
        "stage_seconds": {name: spent / work.batches for name, spent in seconds.items()},
        "tiles": stages.tiles / work.batches,
        "decode_steps": stages.steps / work.batches,
        "step_ms": 1e3 * stages.decode / steps,
        "step_forward_ms": 1e3 * stages.step_forward / steps,
        "step_host_ms": 1e3 * stages.step_host / steps,
        "prompts_padded_rows_steps": stages.prompts[:4],
    }


def _limits(bench: Bench, case: Case, work: Work, stages: Stages) -> dict[str, Any]:
    """Shares of what the device could do, as measured in this run. Padding is no useful work."""
    shape, ceilings = SHAPES[case.model], bench.ceilings
    vision = shape.vision_flops(stages.tiles)
    prefill = sum(shape.prefill_flops(prompt) for prompt, _ in work.tokens)
    decode = sum(shape.decode_flops(prompt + generated // 2) * generated for prompt, generated in work.tokens)
    width = 2 if bench.cuda else 4
    weights = shape.step_bytes([], width)
    read = stages.steps * weights + sum(
        (generated - 1) * (shape.step_bytes([prompt + generated // 2], width) - weights)
        for prompt, generated in work.tokens
    )

    if not work.tokens:  # plain generation counts none
        return {}

    def share(amount: float, seconds: float, ceiling: float) -> float | None:
        return amount / seconds / ceiling if seconds > 0 else None

    return {
        "prompt_tokens": sum(prompt for prompt, _ in work.tokens) / len(work.tokens),
        "teraflop_per_property": (vision + prefill + decode) / work.properties / 1e12,
        "arithmetic_share": share(vision + prefill + decode, work.seconds, ceilings.flops),
        "vision_arithmetic_share": share(vision, stages.vision, ceilings.flops),
        "prefill_arithmetic_share": share(prefill, stages.prefill, ceilings.flops),
        "decode_bandwidth_share": share(read, stages.decode, ceilings.bytes_read),
        "step_floor_ms": 1e3 * read / ceilings.bytes_read / max(1, stages.steps),
    }


def _kernels(bench: Bench, case: Case, engine: TransformersEngine) -> dict[str, Any]:
    """The kernels of one batch of few tokens: once its prompt alone, once with the steps that follow."""
    attempts = {"prompt": 1, f"prompt and {PROFILED_STEPS} steps": PROFILED_STEPS + 1}
    batch = _batch(bench, case)
    profiles = {}
    for name, tokens in attempts.items():
        attempt = Attempt(number=1, max_new_tokens=tokens)
        profiles[name] = asdict(profile_kernels(partial(engine.describe, batch, attempt=attempt)))
    return profiles


def main() -> None:
    """Run the grid, print, and write the results after each case."""
    options = _options()
    import torch
    import transformers

    device: Literal["cpu", "cuda"] = options.device
    if device == "cuda" and not torch.cuda.is_available():
        sys.exit("bench-gpu: no CUDA device is visible; on a CPU: --device cpu --tiny")
    deadline = time.monotonic() + 60 * options.minutes
    cores = len(os.sched_getaffinity(0))
    transformers.logging.set_verbosity_error()
    results: dict[str, Any] = {
        "device": torch.cuda.get_device_name() if device == "cuda" else platform.processor() or "cpu",
        **versions(),
    }
    say("bench-gpu: " + ", ".join(f"{name} {value}" for name, value in results.items()))
    size = (640, 480) if options.tiny else (4000, 3000)
    with tempfile.TemporaryDirectory() as folder:
        began = time.monotonic()
        jpegs = render_jpegs(Path(folder), 4 if options.tiny else 24, size, cores)
        spent, megabytes = (
            time.monotonic() - began,
            np.mean([Path(jpeg).stat().st_size for jpeg in jpegs]) / 1e6,
        )
        say(f"{len(jpegs)} JPEGs of {size[0]}x{size[1]}, {megabytes:.1f} MB each, in {spent:.1f} s")
        ceilings = measure_ceilings(device)
        say(
            f"ceilings: {ceilings.flops / 1e12:.1f} TFLOP/s, {ceilings.bytes_read / 1e9:.0f} GB/s in memory, "
            f"{ceilings.upload / 1e9:.1f} GB/s up, {ceilings.upload_pinned / 1e9:.1f} pinned"
        )
        results |= {"ceilings": asdict(ceilings), "jpeg": {"size": size, "megabytes": float(megabytes)}}
        workers = options.workers or max(1, cores - 1)
        bench = Bench(device, workers, options.seconds, deadline, jpegs, ceilings)
        results |= {"workers": workers, "cases": []}
        for case in _cases(options):
            say(f"\n== {case}   ({deadline - time.monotonic():.0f} s left)")
            if time.monotonic() > deadline - 2 * options.seconds:
                say("   left out: the time is up")
                left_out = {"case": asdict(case), "error": "left out: the time is up", "left_out": True}
                results["cases"].append(left_out)
                continue
            try:
                result = run_case(bench, case) | {"gpus": gpu_readings()}
                print_case(result, say)
            except Exception as error:  # one model that fails must not cost the figures of the others
                say(f"   FAILED: {type(error).__name__}: {str(error)[:500]}")
                say("   " + "   ".join(traceback.format_exc().splitlines(keepends=True)[-12:]))
                result = {"case": asdict(case), "error": f"{type(error).__name__}: {error}"}
            results["cases"].append(result)
            options.output.parent.mkdir(parents=True, exist_ok=True)
            options.output.write_text(json.dumps(results, indent=1) + "\n")
    options.output.write_text(json.dumps(results, indent=1) + "\n")
    print_table(results, say)
    say(f"results: {options.output}")
    if options.partitions:
        bench.model = None
        bench.free()  # the whole device is for the processes that come now
        ran = subprocess.run(_of_partitions(options), check=False)
        if ran.returncode:
            sys.exit(ran.returncode)
    if failed := [case for case in results["cases"] if "engine" not in case and not case.get("left_out")]:
        sys.exit(f"bench-gpu: {len(failed)} of {len(results['cases'])} cases failed; see above")


def _of_partitions(options: argparse.Namespace) -> list[str]:
    """The command for whole partitions, which are processes of their own."""
    output = options.output.with_stem(f"{options.output.stem}-partitions")
    return [
        *(sys.executable, "-m", "benchmarks.gpu_partitions", "--device", options.device),
        *("--properties", str(options.partitions), "--output", str(output)),
        *(["--tiny"] if options.tiny else []),
    ]


def _cases(options: argparse.Namespace) -> list[Case]:
    """The standard grid, or the product of what the options name."""
    standard = TINY_CASES if options.tiny else CASES
    named = {name: getattr(options, name) for name in _AXES}
    if not any(named.values()):
        return list(standard)
    first = replace(standard[0], plain=options.plain, profile=options.profile)
    axes = [[(name, value) for value in values] for name, values in named.items() if values]
    return [replace(first, **dict(point)) for point in itertools.product(*axes)]


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench-gpu", description=__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument(
        "--tiny", action="store_true", help="tiny models and images, to try the benchmark itself"
    )
    parser.add_argument("--minutes", type=float, default=8.5, help="leave out what does not fit into these")
    parser.add_argument("--seconds", type=float, default=12.0, help="of measuring each way of a case")
    parser.add_argument("--workers", type=int, default=0, help="decode workers; 0: one less than cores")
    parser.add_argument(
        "--partitions", type=int, default=400, help="properties of each whole partition; 0: none"
    )
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/gpu.json"))
    grid = parser.add_argument_group("grid", "any of these replaces the standard cases by their product")
    grid.add_argument("--model", nargs="+", choices=sorted(SHAPES))
    for name, text in (
        ("--side", "longest edge of an image in pixels"),
        ("--images", "images of a property"),
        ("--output-tokens", "mean of an answer"),
        ("--alike", "tokens of an answer that all answers say, in per cent: what guesses find"),
        ("--drafts", "tokens that the engine guesses at once, at most; 0: none"),
        ("--batch", "properties in a batch"),
    ):
        grid.add_argument(name, nargs="+", type=int, help=text)
    grid.add_argument("--plain", action="store_true", help="compare with plain transformers generation")
    grid.add_argument("--profile", action="store_true", help="list the kernels of one batch")
    return parser.parse_args()


if __name__ == "__main__":
    main()
