"""Where a device's time goes: stages of describing, busy share, and the limits that it is held against.

What lives here: clocks hooked onto a model, samples from NVML, measured arithmetic and
bandwidth ceilings, the kernels of one batch. What does not: what is run (gpu.py), and how much work it is by
calculation (gpu_models.py).
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Self

SAMPLE_SECONDS = 0.1
_SM_CLOCK = 1
"""NVML_CLOCK_SM."""


@dataclass
class Stages:
    """Seconds of some batches by stage, and what was worked on.

    vision, prefill (without vision) and decode are the device's clock from begin to end of the stage, gaps
    included; generate is this thread's. step_forward: of decode, inside the forward calls;
    step_host: this thread's seconds in them, which come near where the device waits for launches. prompts:
    for each call of ``generate``, its padded prompt length, its rows and the decode steps that it took.
    """

    generate: float = 0.0
    vision: float = 0.0
    prefill: float = 0.0
    decode: float = 0.0
    step_forward: float = 0.0
    step_host: float = 0.0
    steps: int = 0
    tiles: int = 0
    prompts: list[tuple[int, int, int]] = field(default_factory=list)


@dataclass
class _Forward:
    tokens: int
    rows: int
    began: Any
    host_began: float
    inside_another: bool = False
    ended: Any = None
    host_seconds: float = 0.0


class StageClock:
    """Clocks a model and its vision layers, whoever calls them, while this context manager is open.

    ``generate`` and the forwards must be called with keyword arguments.
    """

    def __init__(self, model: Any, vision: Any, *, cuda: bool) -> None:
        self._model = model
        self._vision = vision
        self._cuda = cuda
        self._exit = contextlib.ExitStack()
        self.restart()

    def restart(self) -> None:
        """Forget what was clocked."""
        self._stages = Stages()
        self._calls: list[list[_Forward]] = []
        """The forwards of each call of ``generate``: its prompt, then one for each step."""
        self._visions: list[_Forward] = []

    def __enter__(self) -> Self:
        self._exit.callback(self._clock_generate())
        for module, forwards in ((self._model, self._forwards_now), (self._vision, self._visions_now)):
            before = module.register_forward_pre_hook(self._begin(forwards), with_kwargs=True)
            after = module.register_forward_hook(self._end(forwards))
            self._exit.callback(before.remove)
            self._exit.callback(after.remove)
        return self

    def __exit__(self, *exception: object) -> None:
        self._exit.close()

    def stages(self) -> Stages:
        """What was clocked since the last ``restart``; waits for the device."""
        if self._cuda:
            import torch

            torch.cuda.synchronize()
        stages = replace(self._stages, prompts=[])
        stages.vision += sum(self._elapsed(span.began, span.ended) for span in self._visions)
        stages.tiles = sum(span.rows for span in self._visions)
        for call in self._calls:
            if not call:  # the memory was too small for its images
                continue
            first, *rest = call
            stages.prefill += self._elapsed(first.began, first.ended)
            stages.prompts.append((first.tokens, first.rows, len(rest)))
            stages.steps += len(rest)
            if rest:
                stages.decode += self._elapsed(first.ended, rest[-1].ended)
                stages.step_forward += sum(self._elapsed(span.began, span.ended) for span in rest)
                stages.step_host += sum(span.host_seconds for span in rest)
        # Some versions of transformers look at the images before the forward of the prompt, others in it.
        inside = [span for span in self._visions if span.inside_another]
        stages.prefill -= sum(self._elapsed(span.began, span.ended) for span in inside)
        return stages

    def _clock_generate(self) -> Callable[[], None]:
        """Replace the model's ``generate`` by a clocked one; returns what puts it back."""
        generate = self._model.generate

        def clocked(*arguments: Any, **named: Any) -> Any:
            self._calls.append([])
            began = time.perf_counter()
            result = generate(*arguments, **named)
            self._stages.generate += time.perf_counter() - began
            return result

        self._model.generate = clocked
        return lambda: delattr(self._model, "generate")

    def _forwards_now(self) -> list[_Forward]:
        return self._calls[-1]

    def _visions_now(self) -> list[_Forward]:
        return self._visions

    def _begin(self, forwards: Callable[[], list[_Forward]]) -> Any:
        def begin(module: Any, arguments: Any, named: dict[str, Any]) -> None:
            names = ("input_ids", "inputs_embeds", "pixel_values")
            shown = next((value for name in names if (value := named.get(name)) is not None), None)
            if shown is None and arguments:  # Qwen's vision layers: patches of all images
                shown = arguments[0]
            rows, tokens = shown.shape[:2] if shown is not None else (0, 0)
            inside = bool(self._calls and self._calls[-1]) and self._calls[-1][-1].ended is None
            forwards().append(_Forward(tokens, rows, self._now(), time.perf_counter(), inside))

        return begin

    def _end(self, forwards: Callable[[], list[_Forward]]) -> Any:
        def end(module: Any, arguments: Any, result: Any) -> None:
            forward = forwards()[-1]
            forward.host_seconds = time.perf_counter() - forward.host_began
            forward.ended = self._now()

        return end

    def _now(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        import torch

        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _elapsed(self, began: Any, ended: Any) -> float:
        if began is None or ended is None:
            return 0.0
        return float(began.elapsed_time(ended)) / 1000 if self._cuda else float(ended - began)


class DeviceSamples:
    """Samples NVML in a thread while open: busy is the share of time in which any kernel ran."""

    def __init__(self, *, cuda: bool) -> None:
        self._wanted = cuda
        self._samples: list[tuple[float, float, float, float]] = []
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self.problem: str | None = None if cuda else "no GPU"

    def __enter__(self) -> Self:
        if self._wanted:
            self._thread = threading.Thread(target=self._sample, daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()

    def restart(self) -> None:
        """Forget the samples."""
        self._samples = []

    def means(self) -> dict[str, float | None]:
        """Means over the samples; None where NVML gave none.

        Shares of time (0 to 1) in which a kernel ran and in which the device's memory was read or written;
        watts; clock in MHz.
        """
        names = ("busy", "memory_busy", "watts", "clock_mhz")
        if not self._samples:
            return dict.fromkeys(names)
        columns = zip(*self._samples, strict=True)
        return {name: sum(column) / len(column) for name, column in zip(names, columns, strict=True)}

    def _sample(self) -> None:
        try:
            import torch

            uuid = str(torch.cuda.get_device_properties(0).uuid)
            read = _nvml(uuid if uuid.startswith("GPU-") else f"GPU-{uuid}")
            while not self._stop.wait(SAMPLE_SECONDS):
                self._samples.append(read())
        except Exception as error:  # without samples the rest of the benchmark still tells something
            self.problem = f"{type(error).__name__}: {error}"


class _Utilization(ctypes.Structure):
    _fields_ = (("gpu", ctypes.c_uint), ("memory", ctypes.c_uint))


def _nvml(uuid: str) -> Callable[[], tuple[float, float, float, float]]:
    """What reads the samples of a device from the driver's own library: it has no package."""
    nvml = ctypes.CDLL("libnvidia-ml.so.1")

    def ask(name: str, *arguments: Any) -> None:
        if status := getattr(nvml, name)(*arguments):
            raise RuntimeError(f"{name} says {status}")

    ask("nvmlInit_v2")
    handle = ctypes.c_void_p()
    ask("nvmlDeviceGetHandleByUUID", uuid.encode(), ctypes.byref(handle))

    def read() -> tuple[float, float, float, float]:
        used, milliwatts, clock = _Utilization(), ctypes.c_uint(), ctypes.c_uint()
        ask("nvmlDeviceGetUtilizationRates", handle, ctypes.byref(used))
        ask("nvmlDeviceGetPowerUsage", handle, ctypes.byref(milliwatts))
        ask("nvmlDeviceGetClockInfo", handle, _SM_CLOCK, ctypes.byref(clock))
        return used.gpu / 100, used.memory / 100, milliwatts.value / 1000, float(clock.value)

    return read


@dataclass(frozen=True)
class Ceilings:
    """What this device did in the same run: matrix products (bfloat16 on a GPU), copies in its memory, copies
    from pageable and from pinned memory of the host. Operations or bytes a second."""

    flops: float
    bytes_read: float
    upload: float
    upload_pinned: float


def measure_ceilings(device: str) -> Ceilings:
    """Best of several rounds each; a copy counts what is read and what is written."""
    import torch

    cuda = device == "cuda"
    side, megabytes = (8192, 4096) if cuda else (512, 64)
    dtype = torch.bfloat16 if cuda else torch.float32
    first = torch.randn(side, side, device=device, dtype=dtype)
    second = torch.randn(side, side, device=device, dtype=dtype)
    flops = 2 * side**3 / _best(lambda: first @ second, cuda=cuda)
    source = torch.zeros(megabytes << 20, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copied = 2 * source.numel() / _best(lambda: target.copy_(source), cuda=cuda)
    host = torch.zeros(megabytes << 18, dtype=torch.uint8)
    pinned = host.pin_memory() if cuda else host
    part = target[: host.numel()]
    upload = host.numel() / _best(lambda: part.copy_(host), cuda=cuda)
    upload_pinned = host.numel() / _best(lambda: part.copy_(pinned, non_blocking=True), cuda=cuda)
    return Ceilings(flops, copied, upload, upload_pinned)


def _best(work: Callable[[], Any], *, cuda: bool) -> float:
    import torch

    repeats = 4
    best = float("inf")
    for _ in range(5):
        if cuda:
            torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(repeats):
            work()
        if cuda:
            torch.cuda.synchronize()
        best = min(best, (time.perf_counter() - began) / repeats)
    return best


@dataclass(frozen=True)
class KernelProfile:
    """Seconds of a call, of the kernels in it, how many kernels, and the longest by name with their share."""

    wall: float
    kernels: float
    launches: int
    longest: list[tuple[str, float, int]]


def profile_kernels(work: Callable[[], Any], *, longest: int = 10) -> KernelProfile:
    """Run ``work`` once under torch's profiler, which slows launches a little."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        began = time.perf_counter()
        work()
        torch.cuda.synchronize()
        wall = time.perf_counter() - began
    events = [event for event in profiler.key_averages() if event.self_device_time_total > 0]
    total = sum(event.self_device_time_total for event in events)
    events.sort(key=lambda event: -event.self_device_time_total)
    top = [
        (event.key[:90], event.self_device_time_total / total, int(event.count)) for event in events[:longest]
    ]
    return KernelProfile(wall, total / 1e6, sum(int(event.count) for event in events), top)
