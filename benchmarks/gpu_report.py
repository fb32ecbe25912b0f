"""The figures of ``make bench-gpu`` as lines for a terminal; what they mean stands in gpu.py."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

Say = Callable[[str], None]

PLAIN: Final = ("plain", "plain_half", "plain_same_memory")
"""Plain generation at the engine's batch, at half of it, and at the batch of the same memory."""


def print_case(result: Mapping[str, Any], say: Say) -> None:
    """Everything about one case: rates, where a batch's time goes, shares of the limits, kernels."""
    say(
        f"   {result['parameters'] / 1e9:.2f} G parameters made in {result['model_seconds']:.1f} s; decode "
        f"workers alone {result['decode_workers_images_per_second']:.0f} images/s"
        + (f"; NVML: {result['nvml_problem']}" if result["nvml_problem"] else "")
    )
    engine, feeding = result["engine"], result["feeding"]
    say(
        f"   a core decodes and processes {feeding['images_per_second_a_core']:.1f} images/s:"
        f" {feeding['cores_to_feed_the_device']:.1f} cores feed this device"
    )
    _print_loop("engine", engine, say)
    say(
        f"     arithmetic {_percent(engine['arithmetic_share'])} of the ceiling "
        f"({engine['teraflop_per_property']:.1f} TFLOP and {engine['prompt_tokens']:.0f} prompt tokens a "
        f"property): "
        f"vision {_percent(engine['vision_arithmetic_share'])}, "
        f"prefill {_percent(engine['prefill_arithmetic_share'])}; decode reads at "
        f"{_percent(engine['decode_bandwidth_share'])} of the bandwidth (a step could be "
        f"{engine['step_floor_ms']:.2f} ms)"
    )
    if engine["largest_batch"]:
        say(f"     memory was too small for the batch: {engine['largest_batch']} fitted")
    for name in PLAIN:
        if name in result:
            _print_loop(f"{name.replace('_', ' ')}, batch {result[name]['batch']}", result[name], say)
    if "plain" in result:
        say(
            f"     engine against the fastest plain: {_ratio(result):.2f} times the properties/s, "
            f"{_generate_ratio(result):.2f} times in generate alone"
        )
    for part in (*PLAIN, "kernels"):
        if f"{part}_failed" in result:
            say(f"   {part} FAILED: {result[f'{part}_failed']}")
    for name, profile in result.get("kernels", {}).items():
        say(
            f"   kernels of a batch, {name}: {profile['kernels']:.2f} s of {profile['wall']:.2f} s, "
            f"{profile['launches']} launches"
        )
        for kernel, share, count in profile["longest"]:
            say(f"     {share:6.1%} {count:7d}  {kernel}")


def print_table(results: Mapping[str, Any], say: Say) -> None:
    """One line a case, at the end."""
    say("")
    say(
        f"{'case':62} {'images/s':>9} {'prop/s':>7} {'tokens/s':>9} {'busy':>6} {'arith':>6} "
        f"{'GiB':>6} {'days':>7} {'x plain':>8} {'x gen':>6}"
    )
    for result in results["cases"]:
        case = result["case"]
        name = (
            f"{case['model']}, {case['side']} px, {case['images']} images, {case['output_tokens']} tokens, "
            f"batch {case['batch']}"
        )
        if "error" in result:
            say(f"{name:62} {result['error'][:60]}")
            continue
        engine = result["engine"]
        peak = f"{engine['peak_gib']:.1f}" if engine["peak_gib"] is not None else "-"
        plain = alone = "-"
        if "plain" in result:
            plain = f"{_ratio(result):.2f}"
            alone = f"{_generate_ratio(result):.2f}"
        say(
            f"{name:62} {engine['images_per_second']:9.1f} "
            f"{engine['properties_per_second']:7.2f} "
            f"{engine['tokens_per_second']:9.0f} {_percent(engine['busy']):>6} "
            f"{_percent(engine['arithmetic_share']):>6} {peak:>6} {engine['days_of_the_run']:7.1f} "
            f"{plain:>8} {alone:>6}"
        )
    say(
        "days: of 12.8 million images on 10 such devices; busy: share of time with a kernel running (NVML); "
        "x plain: against transformers' generation at the fastest of this batch, half of it, and the one of "
        "the same memory, images opened and processed in its one thread; x gen: seconds in generate alone"
    )


def _print_loop(name: str, loop: Mapping[str, Any], say: Say) -> None:
    peak = f", {loop['peak_gib']:.1f} GiB" if loop["peak_gib"] is not None else ""
    watts = f", {loop['watts']:.0f} W at {loop['clock_mhz']:.0f} MHz" if loop["watts"] is not None else ""
    tokens = f"{loop['tokens_per_second']:.0f} tokens/s, " if loop["tokens_per_second"] else ""
    say(
        f"   {name}: {loop['images_per_second']:.1f} images/s, {loop['properties_per_second']:.2f} "
        f"properties/s, {tokens}busy {_percent(loop['busy'])}{watts}{peak}; "
        f"{loop['days_of_the_run']:.1f} days ({loop['batches']} batches in {loop['seconds']:.1f} s)"
    )
    whole = loop["batch_seconds"]
    stages = ", ".join(
        f"{stage} {spent:.3f} ({spent / whole:.0%})" for stage, spent in loop["stage_seconds"].items()
    )
    say(f"     a batch {whole:.2f} s: {stages}")
    say(
        f"     {loop['tiles']:.0f} tiles, {loop['decode_steps']:.0f} steps of {loop['step_ms']:.2f} ms, of "
        f"which {loop['step_forward_ms']:.2f} in the forward ({loop['step_host_ms']:.2f} of this thread); "
        f"(padded prompt, rows, steps) {loop['prompts_padded_rows_steps']}"
    )


def _ratio(result: Mapping[str, Any]) -> float:
    plain = max(figures["properties_per_second"] for figures in _plain(result))
    return float(result["engine"]["properties_per_second"] / plain)


def _generate_ratio(result: Mapping[str, Any]) -> float:
    plain = min(figures["generate_seconds_per_property"] for figures in _plain(result))
    return float(plain / result["engine"]["generate_seconds_per_property"])


def _plain(result: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [result[name] for name in PLAIN if name in result]


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"
