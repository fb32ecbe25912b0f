"""Whole partitions on a device, against vLLM: ``python -m benchmarks.gpu_partitions``, part of bench-gpu.

Ours is a process a partition, as a run is: start-up, loading, describing, embedding, checks and publishing,
with the settings' defaults and a small embedder; in the run's own process, and with the vLLM that
``make vllm`` installed. Against it, where that vLLM is: vLLM offline and ``vllm serve``, on the same images,
prompt, schema and processor, with weights that it makes up (``--load-format dummy``). What lives here: those,
and the table. What does not: stages and shares inside the engine, and plain generation (gpu.py).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal

import pyarrow.parquet as pq

from benchmarks.gpu_loops import PROMPT, render_jpegs
from benchmarks.gpu_meter import DeviceSamples, measure_ceilings
from benchmarks.gpu_models import SHAPES
from benchmarks.partitions import (
    EMBEDDINGS,
    SCHEMA,
    House,
    make_home,
    save_embedder,
    save_model,
    seconds_of_work,
)
from vlm_assets.config.engine_choice import vllm_command
from vlm_assets.config.resource_settings import build_vision_language_model
from vlm_assets.config.settings import PREFIX, load_settings
from vlm_catalog.ranges import DESCRIPTIONS
from vlm_engine.devices.loaded_servers import end_loaded_servers
from vlm_engine.images.images import load_image
from vlm_engine.protocol import Attempt, ImageTokens
from vlm_engine.server.chat_completions import EncodedImages, Question, chat_request, data_uris
from vlm_engine.server.server_plan import HOST
from vlm_engine.transformers.image_tokens import fitted_processor

ON_A_CPU: Final = {"VLLM_CPU_KVCACHE_SPACE": "1"}  # GiB
CPU_ARGUMENTS: Final = "--dtype float32 --enforce-eager --max-num-seqs 8"
_START_SECONDS: Final = 1200.0
_REQUESTS: Final = 256


@dataclass(frozen=True)
class Outcome:
    """What a partition took.

    whole: seconds, start-up included. seconds: of describing alone. busy, memory: NVML's shares of the whole
    time, with a kernel running and with the device's memory read or written.
    """

    name: str
    properties: int
    images: int
    whole: float
    seconds: float
    busy: float | None = None
    memory: float | None = None
    more: Mapping[str, Any] | None = None

    def line(self) -> str:
        """For the table."""
        busy, memory = ("-" if share is None else f"{share:.0%}" for share in (self.busy, self.memory))
        return (
            f"  {self.name:34} {self.whole:8.1f} {self.whole - self.seconds:9.1f}"
            f" {self.properties / self.whole:9.2f} {self.properties / self.seconds:9.2f}"
            f" {self.images / self.seconds:9.1f} {busy:>6} {memory:>6}"
        )


@dataclass(frozen=True)
class Bench:
    """One model's folder and home. settings: the product's, beside its defaults."""

    model: str
    device: Literal["cpu", "cuda"]
    folder: Path
    keys: list[str]
    settings: dict[str, Any]
    properties: int

    @property
    def home(self) -> Path:
        """The product's."""
        return self.folder / "home"

    def environment(self, **changed: Any) -> dict[str, str]:
        """Of the product's processes, and of vLLM's."""
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(PREFIX)}
        chosen = {PREFIX + name.upper(): str(value) for name, value in {**self.settings, **changed}.items()}
        of_cpu = ON_A_CPU if self.device == "cpu" else {}
        quiet = {"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", "DO_NOT_TRACK": "1"}
        return {**inherited, **chosen, **of_cpu, **quiet}

    def rows(self) -> list[dict[str, Any]]:
        """The properties of the first partition."""
        lines = (self.home / "listing.jsonl").read_text().splitlines()[: self.properties]
        return [json.loads(line) for line in lines]


def prepare(options: argparse.Namespace, model: str, folder: Path, jpegs: list[str]) -> Bench:
    """A model's folder, an embedder's, and a home with two partitions."""
    side = 112 if options.tiny else 1182
    save_model(model, folder / "model", device=options.device, side=side)
    save_embedder(folder / "embedder", tiny=options.tiny)
    images = 3 if options.tiny else 10
    keys = make_home(folder / "home", jpegs, partitions=2, properties=options.properties, images_each=images)
    settings: dict[str, Any] = {
        "home": folder / "home",
        "model": str(folder / "model"),
        "embedding_model": str(folder / "embedder"),
        "description_schema": SCHEMA,
        "prompt": PROMPT.text,
        "devices": "cpu:1" if options.device == "cpu" else "0",
    }
    if options.tiny:
        settings["max_pixels"] = 112 * 112
    return Bench(model, options.device, folder, keys, settings, options.properties)


def ours(bench: Bench, name: str, **changed: Any) -> Iterator[Outcome]:
    """Two partitions after each other, a process each, descriptions and embeddings."""
    for key in bench.keys:
        began = time.monotonic()
        with DeviceSamples(cuda=bench.device == "cuda") as samples:
            ran = subprocess.run(
                [sys.executable, "-m", "benchmarks.partitions", key, DESCRIPTIONS, EMBEDDINGS],
                env=bench.environment(**changed),
                capture_output=True,
                text=True,
                check=False,
            )
        if ran.returncode:
            raise RuntimeError(ran.stderr[-2000:])
        measured = json.loads(ran.stdout.splitlines()[-1])
        beside = sum(measured[f"seconds {part}"] for part in ("reading images", "decoding images"))
        beside += measured["seconds in processor"]
        which = "first" if key == bench.keys[0] else "second"
        yield Outcome(
            f"{name}, {which} partition",
            bench.properties,
            measured["images"],
            time.monotonic() - began,
            seconds_of_work(measured),
            *busy_shares(samples),
            # Where the time went, or the next reader of a slow one must guess.
            {**measured, "images_per_second_a_core": measured["images"] / max(1e-9, beside)},
        )


def busy_shares(samples: DeviceSamples) -> tuple[float | None, float | None]:
    """NVML's shares of time: with a kernel running, and with the device's memory read or written."""
    means = samples.means()
    return means["busy"], means["memory_busy"]


def with_vllm(bench: Bench, command: str) -> Iterator[Outcome]:
    """Ours with a vLLM that stays loaded for the second partition."""
    changed = {"engine": "server", "server_command": command}
    try:
        yield from ours(bench, "ours, vLLM resident", **changed)
    finally:
        settings = load_settings(**{**bench.settings, **changed})
        end_loaded_servers(settings.state_directory, logging.getLogger("bench-gpu"))


@dataclass(frozen=True)
class EngineRequest:
    """What vLLM is started with, the same as our own server: context, processor and images of a property."""

    costs: ImageTokens | None
    context: int | None
    images: int

    @classmethod
    def from_bench(cls, bench: Bench) -> EngineRequest:
        """By the settings of the product."""
        settings = load_settings(**bench.settings)
        model = build_vision_language_model(settings)
        costs = fitted_processor(model.source, PROMPT.text, model.limits)[1]
        most = max(len(row["images"]) for row in bench.rows())
        if costs is None:
            return cls(None, None, most)
        needed = costs.text + costs.each * most + 2 * settings.max_new_tokens + 256
        return cls(costs, min(needed, costs.context or needed), most)

    def arguments(self) -> dict[str, Any]:
        """Of vLLM's engine."""
        arguments: dict[str, Any] = {
            "load_format": "dummy",
            "limit_mm_per_prompt": {"image": self.images, "video": 0},
            "mm_processor_cache_gb": 0,
            "structured_outputs_config": {"backend": "xgrammar", "disable_any_whitespace": True},
        }
        if self.context is not None:
            arguments["max_model_len"] = self.context
        if self.costs is not None and self.costs.options:
            arguments["mm_processor_kwargs"] = dict(self.costs.options)
        return arguments


def offline(bench: Bench, command: str) -> Outcome:
    """vLLM's own loop over all requests of a partition."""
    settings = load_settings(**bench.settings)
    on_a_cpu = {"dtype": "float32", "enforce_eager": True, "max_num_seqs": 8}
    engine = EngineRequest.from_bench(bench).arguments() | (on_a_cpu if bench.device == "cpu" else {})
    task = bench.folder / "offline.json"
    listing = bench.folder / "first.jsonl"
    listing.write_text("".join(json.dumps(row) + "\n" for row in bench.rows()))
    task.write_text(
        json.dumps(
            {
                "engine": {"model": str(bench.folder / "model"), **engine},
                "listing": str(listing),
                "prompt": PROMPT.text,
                "json_schema": House.model_json_schema(),
                "max_tokens": settings.max_new_tokens,
                "pixels": settings.max_pixels,
                "threads": len(os.sched_getaffinity(0)),
            }
        )
    )
    began = time.monotonic()
    with DeviceSamples(cuda=bench.device == "cuda") as samples:
        ran = subprocess.run(
            [Path(command).with_name("python"), "-m", "benchmarks.contenders.vllm_offline", task],
            env={**bench.environment(), "PYTHONPATH": "."},
            capture_output=True,
            text=True,
            check=False,
        )
    if ran.returncode:
        raise RuntimeError(ran.stderr[-2000:])
    # vLLM writes there too, while it ends.
    measured = json.loads(next(line for line in reversed(ran.stdout.splitlines()) if line.startswith("{")))
    images = sum(len(row["images"]) for row in bench.rows())
    whole = time.monotonic() - began
    shares = busy_shares(samples)
    return Outcome("vLLM offline", bench.properties, images, whole, measured["seconds"], *shares)


def served(bench: Bench, command: str) -> Outcome:
    """``vllm serve``, asked by threads with the requests that ours makes."""
    settings = load_settings(**bench.settings)
    with socket.socket() as free:
        free.bind((HOST, 0))
        port = free.getsockname()[1]
    words = [command, "serve", str(bench.folder / "model"), "--host", HOST, "--port", str(port)]
    for name, value in EngineRequest.from_bench(bench).arguments().items():
        text = json.dumps(value) if isinstance(value, dict) else str(value)
        words += [f"--{name.replace('_', '-')}", text]
    if bench.device == "cpu":
        words += CPU_ARGUMENTS.split()
    question = Question(str(bench.folder / "model"), PROMPT.text, House.model_json_schema())
    attempt = Attempt(number=1, max_new_tokens=settings.max_new_tokens)
    encode = EncodedImages().load()

    def ask(row: dict[str, Any]) -> int:
        images = [load_image(Path(path), max_pixels=settings.max_pixels) for path in row["images"]]
        body = chat_request(question, data_uris(encode(images).images), row["property_id"], attempt)
        request = urllib.request.Request(  # on loopback
            f"http://{HOST}:{port}/v1/chat/completions", body, {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request) as answer:
            return len(answer.read())

    log = bench.folder / "vllm.log"
    began = time.monotonic()
    with (
        log.open("w") as written,
        DeviceSamples(cuda=bench.device == "cuda") as samples,
        _process(words, bench.environment(), written) as server,
    ):
        while not _answers(f"http://{HOST}:{port}/health"):
            if server.poll() is not None or time.monotonic() - began > _START_SECONDS:
                raise RuntimeError(log.read_text()[-2000:])
            time.sleep(0.5)
        started = time.monotonic()
        with ThreadPoolExecutor(min(_REQUESTS, bench.properties)) as pool:
            list(pool.map(ask, bench.rows()))
        ended = time.monotonic()
    images = sum(len(row["images"]) for row in bench.rows())
    shares = busy_shares(samples)
    return Outcome("vllm serve", bench.properties, images, ended - began, ended - started, *shares)


@contextlib.contextmanager
def _process(
    words: list[str], environment: dict[str, str], written: Any
) -> Iterator[subprocess.Popen[bytes]]:
    """A process with its children, which are ended on leaving."""
    process = subprocess.Popen(words, env=environment, stdout=written, stderr=written, start_new_session=True)
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2) as answer:  # on loopback
            return bool(answer.status == 200)
    except OSError:
        return False


def arithmetic_share(bench: Bench, outcome: Outcome, flops: float) -> float | None:
    """Operations of the partition's prompts and answers by the shape, over what the device could do."""
    settings = load_settings(**bench.settings)
    file = settings.descriptions.partition(bench.keys[0]).published
    if not file.is_file():
        return None
    rows = pq.read_table(file, columns=["prompt_tokens", "output_tokens"]).to_pylist()
    shape, text = SHAPES[bench.model], len(PROMPT.text)
    total = 0.0
    for row in rows:
        prompt, generated = row["prompt_tokens"], row["output_tokens"]
        total += shape.vision_flops(shape.tiles_of(prompt - text)) + shape.prefill_flops(prompt)
        total += shape.decode_flops(prompt + generated // 2) * generated
    return total / outcome.seconds / flops


def run_model(options: argparse.Namespace, model: str, jpegs: list[str], flops: float) -> dict[str, Any]:
    """All ways of one model, each a line of the table; one that fails says so and the others go on."""
    outcomes: list[Outcome] = []
    failures: dict[str, str] = {}
    command = vllm_command() if options.vllm else None
    program = None if command is None else shlex.split(command)[0]
    say = options.say
    say(f"\n== whole partitions of {options.properties} properties: {model}")
    say(
        f"  {'':34} {'whole s':>8} {'start s':>9} {'prop/s':>9} {'steady':>9} {'images/s':>9} {'busy':>6}"
        f" {'memory':>6}"
    )
    with tempfile.TemporaryDirectory() as name:
        bench = prepare(options, model, Path(name), jpegs)
        ways: dict[str, Callable[[], Iterator[Outcome]]] = {
            "ours, in process": lambda: ours(bench, "ours, in process", engine="transformers")
        }
        if command is None or program is None:
            say("  vLLM is not installed (`make vllm`): not compared")
        else:
            served_command = f"{command} {CPU_ARGUMENTS}" if bench.device == "cpu" else command
            ways |= {
                "ours, vLLM resident": lambda: with_vllm(bench, served_command),
                "vLLM offline": lambda: iter([offline(bench, program)]),
                "vllm serve": lambda: iter([served(bench, program)]),
            }
        for way, run in ways.items():
            try:
                for outcome in run():
                    outcomes.append(outcome)
                    say(outcome.line())
            except Exception as error:  # one that fails must not cost the figures of the others
                failures[way] = str(error)[-600:]
                say(f"  {way} FAILED: {failures[way]}")
        share = arithmetic_share(bench, outcomes[0], flops) if outcomes else None
    if share is not None:
        first = outcomes[0]
        a_core = (first.more or {})["images_per_second_a_core"]
        say(
            f"  {first.name}: arithmetic {share:.1%} of the ceiling while describing; a core decodes and"
            f" processes {a_core:.1f} images/s: {first.images / first.seconds / a_core:.1f} cores feed it"
        )
    vllm_outcomes = [outcome for outcome in outcomes if outcome.name.lower().startswith("vllm")]
    if vllm_outcomes:
        best = max(outcome.properties / outcome.seconds for outcome in vllm_outcomes)
        whole = max(outcome.properties / outcome.whole for outcome in vllm_outcomes)
        for outcome in outcomes:
            if outcome not in vllm_outcomes:
                say(
                    f"  {outcome.name}: {outcome.properties / outcome.seconds / best:.2f} of vLLM's own"
                    f" steady rate, {outcome.properties / outcome.whole / whole:.2f} of its rate over the"
                    " whole"
                )
    return {
        "model": model,
        "outcomes": [asdict(outcome) for outcome in outcomes],
        "failures": failures,
        "arithmetic_share": share,
    }


def main() -> None:
    """Run all models, print, and write the results."""
    parser = argparse.ArgumentParser(prog="gpu_partitions", description=__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="tiny models and images, to try it on a CPU")
    parser.add_argument("--properties", type=int, default=400, help="of each partition")
    parser.add_argument("--model", nargs="+", choices=sorted(SHAPES))
    parser.add_argument(
        "--no-vllm", dest="vllm", action="store_false", help="leave vLLM out, although it is installed"
    )
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/gpu-partitions.json"))
    options = parser.parse_args()
    options.say = partial(print, flush=True)
    usual = ("tiny-qwen2.5-vl", "tiny-smolvlm2") if options.tiny else ("qwen2.5-vl-3b", "smolvlm2-2.2b")
    flops = measure_ceilings(options.device).flops
    results = []
    with tempfile.TemporaryDirectory() as folder:
        size = (640, 480) if options.tiny else (4000, 3000)
        cores = len(os.sched_getaffinity(0))
        jpegs = render_jpegs(Path(folder), 4 if options.tiny else 24, size, cores)
        for model in options.model or usual:
            results.append(run_model(options, model, jpegs, flops))
            options.output.parent.mkdir(parents=True, exist_ok=True)
            options.output.write_text(json.dumps(results, indent=1) + "\n")
    print(f"results: {options.output}")
    if any("ours, in process" in result["failures"] for result in results):
        sys.exit(1)


if __name__ == "__main__":
    main()
