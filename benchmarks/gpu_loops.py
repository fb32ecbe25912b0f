"""The two loops that bench-gpu compares, and what feeds them: images, batches of properties, one model.

What lives here: what a run does (decode workers and processor ahead of the engine, the ladder behind it) and
plain transformers generation, each over a window of time. What does not: the grid and the report (gpu.py,
gpu_report.py).
"""

from __future__ import annotations

import gc
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
from PIL import Image

from benchmarks.gpu_meter import Ceilings
from benchmarks.gpu_models import SHAPES, AnswerLengths, AnswerScripts, build_model, pixels_of, tokenizer_of
from vlm_engine.batches import BatchSizes
from vlm_engine.describing import Describing
from vlm_engine.images.images import Output, Pixels, PropertyJob
from vlm_engine.images.worker_pool import WorkerPool
from vlm_engine.ladder import Described
from vlm_engine.prompt import Prompt
from vlm_engine.transformers.attention import attend_as_shipped
from vlm_engine.transformers.transformers_engine import TransformersEngine

Answers = AnswerLengths | AnswerScripts
PREFETCH_BATCHES: Final = 2
SPECULATIVE_TOKENS: Final = 5
"""As the settings have it."""
PROMPT: Final = Prompt(
    "These are all images of one property. Look at them together and describe the property. Answer with one "
    "JSON object and nothing else: kind, storeys, roof, facade, condition, garden, rooms, and a summary of "
    "two sentences that mentions what a buyer would want to know."
)


@dataclass(frozen=True)
class Case:
    """One point of the grid.

    side: longest edge of an image in pixels as the model's processor is given it (4:3). images: most of a
    property; every other one has one less. output_tokens: mean of an answer. alike: tokens of an answer, in
    per cent, that all answers say, so that guesses find them; 0: they say what random weights say, and
    nothing is guessed. drafts: tokens that the engine guesses at once, at most. plain: compare with plain
    transformers generation. profile: list the kernels of one batch.
    """

    model: str
    side: int
    images: int = 10
    output_tokens: int = 128
    batch: int = 32
    alike: int = 0
    drafts: int = SPECULATIVE_TOKENS
    plain: bool = False
    profile: bool = False

    def __str__(self) -> str:
        images = f"{self.images - 1}-{self.images}" if self.images > 1 else "1"
        alike = f" ({self.alike}% alike)" if self.alike else ""
        drafts = "" if self.drafts == SPECULATIVE_TOKENS else f", {self.drafts} drafts"
        tokens = f"{self.output_tokens} tokens{alike}{drafts}"
        return f"{self.model}, {self.side} px, {images} images, {tokens}, batch {self.batch}"


@dataclass
class Bench:
    """What all cases share. seconds: of measuring a case; deadline: on ``time.monotonic``'s clock."""

    device: Literal["cpu", "cuda"]
    workers: int
    seconds: float
    deadline: float
    jpegs: list[str]
    ceilings: Ceilings
    model_name: str = ""
    model: Any = None
    tokenizer: Any = None

    @property
    def cuda(self) -> bool:
        """Whether the device is a GPU."""
        return self.device == "cuda"

    def load(self, name: str) -> float:
        """Have this model on the device, in the place of the one before; the seconds that it took."""
        began = time.monotonic()
        if name != self.model_name:
            self.model, self.model_name = None, ""
            self.free()
            self.tokenizer = tokenizer_of(SHAPES[name])
            self.model = build_model(SHAPES[name], self.tokenizer, device=self.device)
            self.model_name = name
        return time.monotonic() - began

    def free(self) -> None:
        """Give back what nobody holds any more, and begin to count the memory's peak anew."""
        gc.collect()
        if self.cuda:
            import torch

            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()

    def free_gib(self) -> float:
        """Memory of the device that nobody has taken; of a CPU's nobody asks."""
        if not self.cuda:
            return float("inf")
        import torch

        return float(torch.cuda.mem_get_info()[0]) / 2**30

    def has_time_for(self, windows: int) -> bool:
        """Whether so many windows of measuring, or what takes as long, are left before the deadline."""
        return time.monotonic() + windows * self.seconds < self.deadline

    def peak_gib(self) -> float | None:
        """Most memory that was reserved on the device since ``free``."""
        if not self.cuda:
            return None
        import torch

        return float(torch.cuda.max_memory_reserved()) / 2**30

    def batches(self, case: Case) -> Iterator[list[PropertyJob]]:
        """Endless batches of properties; the rendered images are used again and again."""
        images = itertools.cycle(self.jpegs)
        for number in itertools.count():
            first = number * case.batch
            yield [
                PropertyJob(f"p{at}", at, tuple(itertools.islice(images, max(1, case.images - at % 2))))
                for at in range(first, first + case.batch)
            ]


def render_jpegs(folder: Path, count: int, size: tuple[int, int], threads: int) -> list[str]:
    """Photographs of noise in octaves on a gradient, with grain: they compress about as a room does."""

    def render(number: int) -> str:
        random = np.random.default_rng(number)
        width, height = size
        small = (width // 4, height // 4)
        coarse = np.repeat(np.linspace(60, 190, small[1], dtype=np.float32), small[0])
        picture = np.stack([coarse.reshape(small[1], small[0])] * 3, axis=-1)
        for cells, strength in ((4, 50), (16, 25), (64, 12), (256, 8)):
            noise = random.normal(128, strength, (cells * 3 // 4, cells, 3)).clip(0, 255).astype(np.uint8)
            picture += np.asarray(Image.fromarray(noise).resize(small, Image.Resampling.BICUBIC)) - 128.0
        smooth = Image.fromarray(picture.clip(0, 255).astype(np.uint8)).resize(size, Image.Resampling.BICUBIC)
        grain = random.normal(0, 5, (small[1], small[0], 1)).astype(np.int16)
        grained = np.asarray(smooth) + np.tile(grain, (4, 4, 1))
        path = folder / f"{number}.jpg"
        Image.fromarray(grained.clip(0, 255).astype(np.uint8)).save(path, quality=88)
        return str(path)

    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(render, range(count)))


def decode_rate(bench: Bench, case: Case) -> float:
    """Images a second that workers read and decode, where they do nothing else."""
    with workers_of(bench, case, Pixels()) as workers:
        feed = workers.feed(bench.batches(case))
        for _ in range(PREFETCH_BATCHES + 1):
            next(feed)
        began, images = time.monotonic(), 0
        while (spent := time.monotonic() - began) < bench.seconds / 5 or not images:
            images += sum(loaded.seen for loaded in next(feed))
        return images / spent


def workers_of(bench: Bench, case: Case, output: Output) -> WorkerPool:
    """The workers as a run with this case's settings would have them."""
    return WorkerPool(
        output,
        workers=bench.workers,
        prefetch_batches=PREFETCH_BATCHES,
        max_pixels=pixels_of(case.side),
        max_images=case.images,
    )


@dataclass
class Work:
    """What a window of batches did.

    tokens: of the prompts and of the answers of each property. wait_images: seconds without a batch in the
    model. processor: seconds in its thread for what was not prepared ahead.
    """

    seconds: float = 0.0
    batches: int = 0
    properties: int = 0
    images: int = 0
    wait_images: float = 0.0
    processor: float = 0.0
    describe: float = 0.0
    feeding: float = 0.0
    """Seconds of a core beside the model: reading, decoding, the processor and joining."""
    tokens: list[tuple[int, int]] = field(default_factory=list)


class AnyText:
    """In the place of a schema: what a model with random weights says is a description."""

    fields = ()
    """It asks for no field, so that an answer has no confidence to be found in it."""

    def parse(self, text: str) -> dict[str, Any]:
        """The verdict on an answer."""
        return {"text": text}


def describe_window(
    bench: Bench,
    case: Case,
    engine: TransformersEngine,
    output: Output,
    lengths: Answers,
    restart: Callable[[], None],
) -> Work:
    """What a run does, from decoding to the verdict, without the journal. Closes the engine.

    The first batch is not counted.
    """
    settings = lengths.longest
    with (
        workers_of(bench, case, output) as workers,
        # AnyText parses and has no fields, which is all that is asked of a schema here.
        Describing(engine, workers, AnyText(), settings, BatchSizes(case.batch)) as describing,  # type: ignore[arg-type]
    ):
        described = describing.describe_batches(bench.batches(case))
        next(described)
        lengths.restart()
        restart()
        work, before = Work(), replace(describing.spent)
        processor, began = engine.seconds["processor"], time.monotonic()
        while _goes_on(bench, work, began, least=3):
            _count(work, next(described).described)
        work.seconds = time.monotonic() - began
        work.processor = engine.seconds["processor"] - processor
        spent = describing.spent
        work.wait_images = spent.waiting - before.waiting
        work.describe = spent.model - before.model
        parts = ("reading", "decoding", "preparing")
        work.feeding = sum(getattr(spent, part) - getattr(before, part) for part in parts)
    return work


def _count(work: Work, described: Sequence[Described]) -> None:
    if failed := [answer for answer in described if answer.status != "ok"]:
        raise RuntimeError(f"{len(failed)} of {len(described)} failed, first: {failed[0].error}")
    work.batches += 1
    work.properties += len(described)
    work.images += sum(answer.images_seen for answer in described)
    work.tokens += [(answer.prompt_tokens, answer.output_tokens) for answer in described]


def plain_window(
    bench: Bench, case: Case, processor: Any, lengths: Answers, restart: Callable[[], None]
) -> Work:
    """Plain transformers generation: open, process and generate, one after the other in one thread.

    Images are opened as small as their decoder makes them, as a run's are: whole, those of a batch would take
    a minute and 10 GB. Not counted is a first call for two tokens, which takes memory from the device.
    """
    import torch
    from transformers import BatchFeature, LogitsProcessorList

    def generated(inputs: Any, tokens: int) -> Any:
        with torch.inference_mode():
            return bench.model.generate(
                **BatchFeature(dict(inputs)).to(bench.device, bench.model.dtype),
                max_new_tokens=tokens,
                logits_processor=LogitsProcessorList([lengths.for_batch(case.batch)]),
                do_sample=False,
            )

    attend_as_shipped(bench.model)  # an engine has had it
    work = Work()
    batches = bench.batches(case)
    began = time.monotonic()
    while _goes_on(bench, work, began, least=1):
        batch = next(batches)
        called = time.monotonic()
        conversations = []
        for job in batch:
            content: list[dict[str, Any]] = [
                {"type": "image", "image": _opened(path, case.side)} for path in job.image_uris
            ]
            content.append({"type": "text", "text": PROMPT.text})
            conversations.append([{"role": "user", "content": content}])
        opened = time.monotonic()
        inputs = processor.apply_chat_template(
            conversations,
            add_generation_prompt=True,
            tokenize=True,
            return_dict=True,
            return_tensors="pt",
            processor_kwargs={"padding": True, "padding_side": "left"},
        )
        processed = time.monotonic()
        if work.batches == 0:
            generated(inputs, 2)
            lengths.restart()
            restart()
        answering_since = time.monotonic()
        sequences = generated(inputs, lengths.longest)
        processor.batch_decode(sequences[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        work.wait_images += opened - called
        work.processor += processed - opened
        work.describe += (processed - opened) + time.monotonic() - answering_since
        work.batches += 1
        work.properties += len(batch)
        work.images += sum(len(job.image_uris) for job in batch)
    work.seconds = work.wait_images + work.describe
    return work


def _opened(path: str, side: int) -> Image.Image:
    """An image that is not made smaller than a longest edge of ``side`` pixels."""
    with Image.open(path) as image:
        image.draft("RGB", (side, side * 3 // 4))
        return image.convert("RGB")


def _goes_on(bench: Bench, work: Work, began: float, *, least: int) -> bool:
    now = time.monotonic()
    if work.batches == 0:
        return True
    if now + (now - began) / work.batches > bench.deadline:
        return False
    return now - began < bench.seconds or (work.batches < least and now - began < 2 * bench.seconds)
