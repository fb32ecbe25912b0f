"""The loop body of every contender but ours: decode, cap, processor, guided generation, validation, a row.

What lives here: what somebody writes who knows transformers and xgrammar and needs no more. What does not:
who calls it in which order (the contenders). On purpose it uses none of the project's engine, image loading
or guided decoding: it is the yardstick for them. Only the schema is the project's.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from functools import cache
from typing import Any

import pyarrow as pa
from PIL import Image, ImageOps

from benchmarks.contenders.task import Task
from vlm_engine.schema import load_schema


def decode(path: str, max_pixels: int) -> Image.Image:
    """An image as RGB, upright, at most so many pixels; a JPEG at a reduced scale where that suffices."""
    with Image.open(path) as image:
        scale = math.sqrt(max_pixels / (image.width * image.height))
        size = image.size
        if scale < 1:
            size = (max(1, int(image.width * scale)), max(1, int(image.height * scale)))
        image.draft("RGB", size)
        upright: Image.Image = ImageOps.exif_transpose(image).convert("RGB")
    if scale < 1:
        upright.thumbnail(size if upright.width >= upright.height else size[::-1], Image.Resampling.LANCZOS)
    return upright


def decode_property(row: dict[str, Any], task: Task) -> list[Image.Image]:
    """The images of one property that the model is shown."""
    return [decode(path, task.max_pixels) for path in row["images"][: task.max_images]]


@cache
def load_processor(task: Task) -> Any:
    """The model's processor, from its folder; once in a process."""
    from transformers import AutoProcessor

    return AutoProcessor.from_pretrained(task.model, local_files_only=True)


def model_inputs(processor: Any, prompt: str, properties: Sequence[Sequence[Image.Image]]) -> Any:
    """The tensors of one batch, prompts padded on the left."""
    conversations = [
        [
            {
                "role": "user",
                "content": [
                    *({"type": "image", "image": image} for image in images),
                    {"type": "text", "text": prompt},
                ],
            }
        ]
        for images in properties
    ]
    return processor.apply_chat_template(
        conversations,
        add_generation_prompt=True,
        tokenize=True,
        return_dict=True,
        return_tensors="pt",
        processor_kwargs={"padding": True, "padding_side": "left"},
    )


class Describer:
    """The model, loaded: batches of tensors in, rows out."""

    def __init__(self, task: Task, processor: Any | None = None) -> None:
        import torch
        import xgrammar
        from transformers import AutoModelForImageTextToText, GenerationConfig

        torch.set_num_threads(task.threads)
        self._task = task
        self._first = True
        self.processor = load_processor(task) if processor is None else processor
        self._tokenizer = self.processor.tokenizer
        self._model = AutoModelForImageTextToText.from_pretrained(
            task.model, local_files_only=True, dtype=torch.float32
        ).eval()
        stop = self._model.generation_config.eos_token_id
        self._model.generation_config = GenerationConfig(
            eos_token_id=stop, pad_token_id=self._tokenizer.pad_token_id, do_sample=False
        )
        self._context = self._model.config.get_text_config().max_position_embeddings
        schema = load_schema(task.description_schema)
        self._class = schema.model
        vocabulary = xgrammar.TokenizerInfo.from_huggingface(
            self._tokenizer, vocab_size=self._model.get_output_embeddings().weight.shape[0]
        )
        self._grammar = xgrammar.GrammarCompiler(vocabulary, max_threads=1).compile_json_schema(
            json.dumps(schema.json_schema), any_whitespace=False, separators=(",", ":"), strict_mode=True
        )

    def inputs(self, properties: Sequence[Sequence[Image.Image]]) -> Any:
        """The tensors of one batch of decoded properties."""
        return model_inputs(self.processor, self._task.prompt, properties)

    def describe(self, batch: Sequence[dict[str, Any]], inputs: Any) -> list[dict[str, Any]]:
        """One row a property. ``inputs``: the tensors by name."""
        import torch
        from transformers import LogitsProcessorList

        if self._first:
            self._task.mark("asked")
        length = inputs["input_ids"].shape[1]
        with torch.inference_mode():
            sequences = self._model.generate(
                **inputs,
                max_new_tokens=min(self._task.max_new_tokens, self._context - length),
                logits_processor=LogitsProcessorList(
                    [_Guide(self._grammar, len(batch))] if self._task.guided else []
                ),
            )
        texts = self._tokenizer.batch_decode(
            sequences[:, length:], skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        rows = [self._row(row, text) for row, text in zip(batch, texts, strict=True)]
        if self._first:
            self._task.mark("first_batch", len(rows))
            self._first = False
        return rows

    def _row(self, source: dict[str, Any], text: str) -> dict[str, Any]:
        row = {"property_id": source["property_id"], "ordinal": source["ordinal"], "error": None}
        try:
            parsed = self._class.model_validate_json(text, strict=True)
        except ValueError as error:
            return row | {"status": "failed", "error": str(error), "description": None}
        return row | {"status": "ok", "description": parsed.model_dump()}


class _Guide:
    """Keeps the answers of one batch inside the grammar: what xgrammar's documentation shows."""

    def __init__(self, grammar: Any, size: int) -> None:
        import xgrammar

        self._matchers = [xgrammar.GrammarMatcher(grammar) for _ in range(size)]
        self._bitmask = xgrammar.allocate_token_bitmask(size, grammar.tokenizer_info.vocab_size)
        self._started = False

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        """Mask ``scores`` [batch, vocabulary] for the next token."""
        import xgrammar

        if self._started:
            for matcher, token in zip(self._matchers, input_ids[:, -1].tolist(), strict=True):
                if not matcher.is_terminated():
                    matcher.accept_token(token)
        self._started = True
        for at, matcher in enumerate(self._matchers):
            if not matcher.is_terminated():
                matcher.fill_next_token_bitmask(self._bitmask, at)
        xgrammar.apply_token_bitmask_inplace(scores, self._bitmask)
        return scores


def row_schema(task: Task) -> pa.Schema:
    """The columns of the parquet file."""
    return pa.schema(
        [
            ("property_id", pa.string()),
            ("ordinal", pa.int64()),
            ("status", pa.string()),
            ("error", pa.string()),
            ("description", load_schema(task.description_schema).arrow_type),
        ]
    )
