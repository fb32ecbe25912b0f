"""Vision-language models at real sizes with random weights, made on the device: nothing is downloaded.

What lives here: the shapes, model and processor of each, what they have to calculate and to read for a
property, and how long answers are. What does not: measuring (gpu_meter.py) and the loops (gpu.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np

from benchmarks.model_families import FAMILIES, save_processor
from vlm_engine.model_source import ModelSource
from vlm_engine.protocol import ImageLimits
from vlm_engine.transformers.attention import avoid_attention_with_plans
from vlm_engine.transformers.image_tokens import fitted_processor

_TILE_TOKENS: Final = [f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)]
_SPECIAL: Final = (
    "<pad>",
    "<eos>",
    "<image>",
    "<fake_token_around_image>",
    "<global-img>",
    "<end_of_utterance>",
    "<boi>",
    "<eoi>",
    *_TILE_TOKENS,
)
_TEMPLATE: Final = (
    "{% for message in messages %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}IMAGE{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endfor %}<end_of_utterance>"
)


@dataclass(frozen=True)
class Shape:
    """The sizes of one vision-language model.

    tile: side in pixels of the square that the vision layers see; patch: side of a patch; tile_tokens: tokens
    that a tile becomes for the text layers. window: tokens that a local text layer looks back; in every
    ``global_every``-th layer (and where window is None in all) they look back on everything.
    """

    family: Literal["idefics3", "gemma3", "smolvlm2", "qwen2.5-vl"]
    vision_layers: int
    vision_width: int
    vision_inner: int
    vision_heads: int
    tile: int
    patch: int
    tile_tokens: int
    text_layers: int
    text_width: int
    text_inner: int
    heads: int
    kv_heads: int
    head_width: int
    vocabulary: int
    context: int
    window: int | None = None
    global_every: int = 6
    seen: int | None = None
    """Patches that each patch looks at in most layers, where that is not its tile. Then a tile is a patch."""

    @property
    def is_shipped(self) -> bool:
        """Whether the family's shipped processor is used, set as a run's settings set it."""
        return self.family in ("smolvlm2", "qwen2.5-vl")

    @property
    def patches(self) -> int:
        """Patches of a tile."""
        return 1 if self.seen else (self.tile // self.patch) ** 2

    def tiles_of(self, image_tokens: int) -> int:
        """Tiles that became so many tokens of a prompt; Qwen makes a token of four patches."""
        return 4 * image_tokens if self.seen else round(image_tokens / self.tile_tokens)

    def vision_flops(self, tiles: int) -> float:
        """Operations of the vision layers for so many tiles."""
        wide = self.vision_width
        products = 2 * self.patches * (4 * wide**2 + 2 * wide * self.vision_inner)
        attention = 4 * self.patches * (self.seen or self.patches) * wide
        embedding = 2 * self.patches * 3 * self.patch**2 * wide
        return float(tiles * (self.vision_layers * (products + attention) + embedding))

    def prefill_flops(self, tokens: int) -> float:
        """Operations of the text layers for a prompt of so many tokens, and its first logits."""
        seen = sum(min(at, tokens) * tokens - min(at, tokens) ** 2 / 2 for at in self._reaches(tokens))
        return (
            tokens * 2.0 * self.layer_weights + 4 * self.heads * self.head_width * seen + self._logits_flops
        )

    def decode_flops(self, context: int) -> float:
        """Operations for one more token after ``context`` of them."""
        seen = sum(self._reaches(context))
        return 2.0 * self.layer_weights + 4 * self.heads * self.head_width * seen + self._logits_flops

    def step_bytes(self, contexts: Sequence[int], bytes_each: int) -> float:
        """Bytes that one decode step must read: the text weights once, keys and values of each row."""
        weights = self.layer_weights + self.vocabulary * self.text_width
        kept = sum(2 * self.kv_heads * self.head_width * sum(self._reaches(context)) for context in contexts)
        return float(bytes_each * (weights + kept))

    @property
    def layer_weights(self) -> int:
        """Weights of all text layers."""
        attention = self.text_width * self.head_width * (2 * self.heads + 2 * self.kv_heads)
        return self.text_layers * (attention + 3 * self.text_width * self.text_inner)

    @property
    def _logits_flops(self) -> float:
        return 2.0 * self.text_width * self.vocabulary

    def _reaches(self, context: int) -> list[int]:
        if self.window is None:
            return [context] * self.text_layers
        return [
            context if layer % self.global_every == 0 else min(context, self.window)
            for layer in range(1, self.text_layers + 1)
        ]


SHAPES: Final[dict[str, Shape]] = {
    # SigLIP so400m and SmolLM2-1.7B: SmolVLM's parts in the classes of Idefics3, which need no torchvision.
    "smolvlm-2.2b": Shape(
        "idefics3", 27, 1152, 4304, 16, 384, 14, 81, 24, 2048, 8192, 32, 32, 64, 49_280, 16_384
    ),
    "idefics3-8b": Shape(
        "idefics3", 27, 1152, 4304, 16, 364, 14, 169, 32, 4096, 14_336, 32, 8, 128, 128_259, 32_768
    ),
    "gemma3-4b": Shape(
        "gemma3", 27, 1152, 4304, 16, 896, 14, 256, 34, 2560, 10_240, 8, 4, 256, 262_208, 32_768, 1024
    ),
    # With their shipped processors.
    "smolvlm2-2.2b": Shape(
        "smolvlm2", 27, 1152, 4304, 16, 384, 14, 81, 24, 2048, 8192, 32, 32, 64, 49_280, 8192
    ),
    "qwen2.5-vl-3b": Shape(
        "qwen2.5-vl", 32, 1280, 3420, 16, 14, 14, 1, 36, 2048, 11_008, 16, 2, 128, 151_936, 128_000, seen=64
    ),
    # Heads of 32, the smallest that vLLM computes on a CPU.
    "tiny-smolvlm2": Shape("smolvlm2", 2, 64, 64, 2, 384, 14, 81, 2, 64, 128, 2, 1, 32, 1024, 8192),
    "tiny-qwen2.5-vl": Shape(
        "qwen2.5-vl", 2, 64, 64, 2, 14, 14, 1, 2, 64, 128, 2, 1, 32, 1024, 8192, seen=64
    ),
    "tiny-idefics3": Shape("idefics3", 2, 64, 128, 2, 56, 14, 4, 2, 64, 128, 2, 1, 32, 512, 8192),
    "tiny-gemma3": Shape("gemma3", 2, 64, 128, 4, 56, 14, 4, 2, 64, 128, 4, 2, 16, 512, 8192, 64),
}


def build_model(shape: Shape, tokenizer: Any, *, device: str) -> Any:
    """The model on its device with random weights, for evaluation: bfloat16 on a GPU, float32 on a CPU."""
    import torch
    from transformers import AutoModelForImageTextToText

    torch.manual_seed(0)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    if device == "cuda":
        avoid_attention_with_plans()
    with torch.device(device):
        model = AutoModelForImageTextToText.from_config(_config(shape, tokenizer), dtype=dtype)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    return model.eval()


def vision_layers(model: Any) -> Any:
    """The module that turns tiles into features."""
    inner = model.model
    if hasattr(inner, "visual"):
        return inner.visual
    return inner.vision_model if hasattr(inner, "vision_model") else inner.vision_tower


def _config(shape: Shape, tokenizer: Any) -> Any:
    from transformers import Gemma3Config, Idefics3Config

    if shape.is_shipped:
        return _shipped_config(shape, tokenizer)
    vision = {
        "hidden_size": shape.vision_width,
        "intermediate_size": shape.vision_inner,
        "num_hidden_layers": shape.vision_layers,
        "num_attention_heads": shape.vision_heads,
        "image_size": shape.tile,
        "patch_size": shape.patch,
    }
    text = {
        "hidden_size": shape.text_width,
        "intermediate_size": shape.text_inner,
        "num_hidden_layers": shape.text_layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_width,
        "vocab_size": shape.vocabulary,
        "max_position_embeddings": shape.context,
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
    }
    image = tokenizer.convert_tokens_to_ids("<image>")
    if shape.family == "gemma3":
        return Gemma3Config(
            vision_config={"model_type": "siglip_vision_model", **vision},
            text_config={"model_type": "gemma3_text", "sliding_window": shape.window, **text},
            mm_tokens_per_image=shape.tile_tokens,
            image_token_id=image,
            boi_token_index=tokenizer.convert_tokens_to_ids("<boi>"),
            eoi_token_index=tokenizer.convert_tokens_to_ids("<eoi>"),
        )
    return Idefics3Config(
        vision_config={"model_type": "idefics3_vision", **vision},
        text_config={"model_type": "llama", **text},
        scale_factor=round((shape.patches / shape.tile_tokens) ** 0.5),
        image_token_id=image,
        pad_token_id=tokenizer.pad_token_id,
    )


def _shipped_config(shape: Shape, tokenizer: Any) -> Any:
    vision: dict[str, Any] = {
        "hidden_size": shape.vision_width,
        "intermediate_size": shape.vision_inner,
        "num_hidden_layers": shape.vision_layers,
        "num_attention_heads": shape.vision_heads,
    }
    text: dict[str, Any] = {
        "hidden_size": shape.text_width,
        "intermediate_size": shape.text_inner,
        "num_hidden_layers": shape.text_layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_width,
        "vocab_size": shape.vocabulary,
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
    }
    if shape.family == "qwen2.5-vl":
        vision = {
            "hidden_size": shape.vision_width,
            "intermediate_size": shape.vision_inner,
            "depth": shape.vision_layers,
            "num_heads": shape.vision_heads,
            "out_hidden_size": shape.text_width,
            "fullatt_block_indexes": list(range(7, shape.vision_layers, 8)),
        }
        half = shape.head_width // 2
        sections = [half - 2 * (half * 3 // 8), half * 3 // 8, half * 3 // 8]
        text["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": sections}
    return FAMILIES[shape.family].config(tokenizer, vision=vision, text=text)


def tokenizer_of(shape: Shape) -> Any:
    """A tokenizer of single bytes with the tokens that the shape's family has."""
    tokenizer = build_tokenizer(shape.context)
    if not shape.is_shipped:
        return tokenizer
    return FAMILIES[shape.family].named(tokenizer, pad_token="<pad>", eos_token="<eos>")


def build_tokenizer(context: int) -> Any:
    """A tokenizer of single bytes: a character of the prompt is a token. The model's vocabulary is larger."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: at for at, token in enumerate([*_SPECIAL, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(_SPECIAL))
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<eos>",
        extra_special_tokens={"boi_token": "<boi>", "eoi_token": "<eoi>", "image_token": "<image>"},
        padding_side="left",
        model_max_length=context,
        clean_up_tokenization_spaces=False,
    )


def save_processor_of(
    shape: Shape, tokenizer: Any, folder: Path, *, side: int, prompt: str
) -> tuple[Any, ImageLimits | None]:
    """The processor, saved in a folder, and the limits with which it is to be loaded from there.

    side: longest edge in pixels that an image is brought to. A shipped processor is set as a run sets it
    whose settings allow as many pixels.
    """
    if not shape.is_shipped:
        processor = _processor(shape, tokenizer, side=side)
        processor.save_pretrained(folder)
        return processor, None
    limits = ImageLimits(pixels=max(4096, pixels_of(side)), images=12, answer_tokens=512)
    save_processor(shape.family, folder, tokenizer)
    _config(shape, tokenizer).save_pretrained(folder)
    return fitted_processor(ModelSource(str(folder)), prompt, limits)[0], limits


def _processor(shape: Shape, tokenizer: Any, *, side: int) -> Any:
    """A processor that works on PIL images.

    Idefics3 cuts what is larger than a tile into tiles and adds one of the whole image, Gemma3 squeezes each
    image into its one tile.
    """
    if shape.family == "gemma3":
        from transformers import Gemma3Processor
        from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

        return Gemma3Processor(
            image_processor=Gemma3ImageProcessorPil(size={"height": shape.tile, "width": shape.tile}),
            tokenizer=tokenizer,
            image_seq_length=shape.tile_tokens,
            chat_template=_TEMPLATE.replace("IMAGE", "<boi>"),
        )
    from transformers import Idefics3Processor
    from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

    images = Idefics3ImageProcessorPil(
        size={"longest_edge": side},
        max_image_size={"longest_edge": shape.tile},
        do_image_splitting=side > shape.tile,
        image_mean=[0.5, 0.5, 0.5],
        image_std=[0.5, 0.5, 0.5],
    )
    template = _TEMPLATE.replace("IMAGE", "<image>")
    return Idefics3Processor(images, tokenizer, image_seq_len=shape.tile_tokens, chat_template=template)


def pixels_of(side: int) -> int:
    """Pixels of an image of four to three with this longest edge."""
    return side * side * 3 // 4


class AnswerLengths:
    """Ends each answer at a length drawn for it, in a grammar's place: random weights end none themselves.

    Lengths in tokens are spread evenly between half and one and a half times ``mean``, the same at each
    ``restart``. ``masked``: each step also costs what guided decoding costs the device: the last tokens come
    to the host, and a mask over the vocabulary goes back and is applied.
    """

    def __init__(self, mean: int, tokenizer: Any, *, vocabulary: int, masked: bool) -> None:
        self.longest = mean + mean // 2
        self._mean = mean
        self._stop: int = tokenizer.eos_token_id
        self._never = [at for at in range(len(_SPECIAL)) if at != self._stop]
        self._words = -(-vocabulary // 32) if masked else 0
        self.restart()

    def restart(self) -> None:
        """Draw the same lengths again."""
        self._random = np.random.default_rng(7)

    def for_batch(self, size: int) -> LengthsOfBatch:
        """The logits processor of one call of ``generate`` with ``size`` sequences."""
        return LengthsOfBatch(self.draw(size), stop=self._stop, never=self._never, words=self._words)

    def draw(self, size: int) -> list[int]:
        """Lengths of so many answers."""
        lengths = self._random.integers(max(1, self._mean // 2), self.longest, size=size, endpoint=True)
        drawn: list[int] = lengths.tolist()
        return drawn


class AnswerScripts:
    """Has answers of such lengths say what was written for them: blocks that all say alike, and others.

    alike: tokens of each block of 20, in per cent, that stand in all answers; the others are drawn for each.
    It costs the device no mask.
    """

    def __init__(self, lengths: AnswerLengths, tokenizer: Any, *, vocabulary: int, alike: int) -> None:
        self.longest = lengths.longest
        self._lengths = lengths
        self._stop: int = tokenizer.eos_token_id
        self._words = range(len(_SPECIAL), vocabulary)
        self._of_all = np.random.default_rng(1).integers(len(_SPECIAL), vocabulary, size=self.longest)
        self._alike = np.arange(self.longest) % 20 < alike / 5
        self._random = np.random.default_rng(3)

    def restart(self) -> None:
        """Draw the same lengths again, for other words: no draft knows them."""
        self._lengths.restart()

    def for_batch(self, size: int) -> ScriptsOfBatch:
        """The logits processor, and check of drafts, of one batch of ``size``."""
        scripts = []
        for length in self._lengths.draw(size):
            own = self._random.integers(self._words.start, self._words.stop, size=self.longest)
            answer = np.where(self._alike, self._of_all, own)[: length - 1]
            scripts.append([*answer.tolist(), self._stop])
        return ScriptsOfBatch(scripts)


class ScriptsOfBatch:
    """Has each row say its script, token by token or along drafts. See AnswerScripts and DraftCheck."""

    def __init__(self, scripts: list[list[int]]) -> None:
        self._scripts = scripts
        self._counts = [0] * len(scripts)

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        """Scores [batch, width] in which one token of each row is certain."""
        import torch

        tokens = [
            script[min(count, len(script) - 1)]
            for script, count in zip(self._scripts, self._counts, strict=True)
        ]
        self._counts = [count + 1 for count in self._counts]
        certain = torch.tensor(tokens, device=scores.device)[:, None]
        return torch.full_like(scores, float("-inf")).scatter_(1, certain, 0.0)

    def accept_tokens(self, tokens: Sequence[int]) -> None:
        """What was said by a call counts already."""

    def next_tokens(
        self, rows: Sequence[int], drafts: Sequence[Sequence[int]], scores: Any
    ) -> list[list[int]]:
        """The next tokens of each of ``rows``, along its draft."""
        scores.argmax(dim=-1).tolist()  # as a check that reads them
        tokens = []
        for row, draft in zip(rows, drafts, strict=True):
            rest = self._scripts[row][self._counts[row] :]
            right = 0
            while right < min(len(draft), len(rest) - 1) and draft[right] == rest[right]:
                right += 1
            tokens.append(rest[: right + 1])
            self._counts[row] += right + 1
        return tokens


class LengthsOfBatch:
    """Logits processor of one batch; see AnswerLengths."""

    def __init__(self, lengths: list[int], *, stop: int, never: list[int], words: int) -> None:
        import torch

        self._lengths = torch.tensor(lengths)
        self._never = torch.tensor(never)
        self._stop = stop
        self._step = 0
        self._mask = torch.full((len(lengths), words), -1, dtype=torch.int32) if words else None

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        """Scores [batch, width] in which the end is certain, or impossible."""
        import torch

        if self._step == 0:
            self._lengths, self._never = self._lengths.to(scores.device), self._never.to(scores.device)
        self._step += 1
        if self._mask is not None:
            input_ids[:, -1].tolist()
            if scores.is_cuda and not self._mask.is_pinned():
                self._mask = self._mask.pin_memory()
            mask = self._mask.to(scores.device, non_blocking=True)
            bits = (mask.unsqueeze(-1) >> torch.arange(32, device=scores.device, dtype=torch.int32)) & 1
            scores = scores.masked_fill(bits.flatten(1)[:, : scores.shape[-1]] == 0, float("-inf"))
        scores = scores.index_fill(1, self._never, float("-inf"))
        # An answer of n tokens is n - 1 and the one that ends it.
        ends = torch.where(self._lengths <= self._step, 1e4, float("-inf"))
        scores[:, self._stop] = ends.to(scores.dtype)
        return scores
