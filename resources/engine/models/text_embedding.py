"""Embeddings of descriptions: texts to unit vectors, by a text model or a describing model's language layers.

What lives here: the embedding model of the settings, and mean-pooled embeddings of texts on the leased
device. What does not: the text of a description (``engine/schema.py``), where the vectors are kept.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from resources.devices.find import Device
from resources.engine.model_source import ModelSource, exact_revision
from resources.engine.transformers.model_loading import load_config, load_model, load_tokenizer

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

_BATCH_TOKENS = {"cpu": 2048, "cuda": 8192}
"""Padded tokens of one batch, by kind of device: what bounds its memory. On a CPU, 8192 took a third more
time and 240 MiB more at its peak: blocks of that size leave the allocator's heap in holes."""


@dataclass(frozen=True)
class TextEmbeddingModel:
    """The model that embeds the text of descriptions.

    model: a local folder or a hub id; a vision-language model lends its text layers; empty where none is
    chosen. The other fields are those of VisionLanguageModel. A plain object: see there.
    """

    model: str
    revision: str | None = None
    trust_remote_code: bool = False
    records_directory: str | None = None

    @property
    def source(self) -> ModelSource:
        """Where the model comes from."""
        records = Path(self.records_directory) if self.records_directory else None
        return ModelSource(self.model, self.revision, self.trust_remote_code, records)

    def exact_revision(self) -> str:
        """What exactly the model is now; needs no device and no torch. Raises ModelLoadError."""
        return exact_revision(self.source)

    def width(self) -> int:
        """Numbers a vector has, from the model's configuration alone. Raises ModelLoadError."""
        return int(load_config(self.source).get_text_config().hidden_size)

    def load(self, device: Device) -> TextEmbedder:
        """An embedder on the leased device. Raises ModelLoadError."""
        return TextEmbedder(self.source, device=device.kind)


class TextEmbedder:
    """One text model on one device.

    Of an image-text-to-text model the language layers are taken and the rest is let go; any other model is
    taken whole (its encoder, where it also has a decoder). A text's vector is the mean of its tokens' last
    hidden states, and does not depend on the texts beside it (1e-5 in float32). What is longer than the model
    takes is cut off. Raises ModelLoadError.
    """

    def __init__(self, source: ModelSource, *, device: Literal["cpu", "cuda"]) -> None:
        self.model = source.label
        self.revision = exact_revision(source)
        self._device = device
        self._layers = _language_layers(source, device)
        self._tokenizer = load_tokenizer(source)
        self._pad_token_id = self._tokenizer.pad_token_id or 0
        config = self._layers.config.get_text_config()
        self.width: int = config.hidden_size
        limits = [self._tokenizer.model_max_length, getattr(config, "max_position_embeddings", None)]
        # A tokenizer that knows no limit says 10^30.
        self._longest = min((int(limit) for limit in limits if limit and limit < 10**9), default=None)

    def embed(self, texts: Sequence[str]) -> npt.NDArray[np.float32]:
        """Unit vectors [texts, width], in order. Raises ValueError for a text without tokens."""
        import numpy as np

        if not texts:
            return np.empty((0, self.width), dtype=np.float32)
        tokens: list[list[int]] = self._tokenizer(
            list(texts), truncation=self._longest is not None, max_length=self._longest
        )["input_ids"]
        for text, ids in zip(texts, tokens, strict=True):
            if not ids:
                raise ValueError(f"the text {text!r} has no tokens, so it has no embedding")
        vectors = np.empty((len(texts), self.width), dtype=np.float32)
        for rows in _batches([len(ids) for ids in tokens], _BATCH_TOKENS[self._device]):
            vectors[rows] = self._embed([tokens[row] for row in rows])
        return vectors

    def close(self) -> None:
        """Give the model's memory back. The embedder cannot be used afterwards."""
        import torch

        del self._layers
        gc.collect()
        if self._device == "cuda":
            torch.cuda.empty_cache()

    def _embed(self, tokens: Sequence[Sequence[int]]) -> npt.NDArray[np.float32]:
        import torch

        longest = max(map(len, tokens))
        input_ids = torch.full((len(tokens), longest), self._pad_token_id)
        mask = torch.zeros_like(input_ids)
        for row, ids in enumerate(tokens):
            input_ids[row, : len(ids)] = torch.tensor(ids)
            mask[row, : len(ids)] = 1
        input_ids, mask = input_ids.to(self._device), mask.to(self._device)
        with torch.inference_mode():
            hidden = self._layers(input_ids=input_ids, attention_mask=mask).last_hidden_state.float()
            weights = mask.unsqueeze(-1).float()
            mean = (hidden * weights).sum(dim=1) / weights.sum(dim=1)
            unit = torch.nn.functional.normalize(mean, dim=-1)
        vectors: npt.NDArray[np.float32] = unit.cpu().numpy()
        return vectors


def _language_layers(source: ModelSource, device: str) -> Any:
    from transformers import AutoModel, AutoModelForImageTextToText
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

    config = load_config(source)
    if type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
        return load_model(source, AutoModelForImageTextToText, device=device).get_decoder()
    model = load_model(source, AutoModel, device=device)
    return model.get_encoder() if config.is_encoder_decoder else model


def _batches(lengths: Sequence[int], tokens: int) -> Iterator[list[int]]:
    """Rows of like length together, longest first, so that a batch too large for memory shows at once."""
    batch: list[int] = []
    for row in sorted(range(len(lengths)), key=lambda row: -lengths[row]):
        if batch and lengths[batch[0]] * (len(batch) + 1) > tokens:
            yield batch
            batch = []
        batch.append(row)
    if batch:
        yield batch
