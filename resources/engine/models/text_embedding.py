"""Embeddings of descriptions: texts to vectors, by a text embedder or a describing model's language layers.

What lives here: the embedding model of the settings, and vectors of texts on the leased device. What does
not: which files a text embedder may have (``sentence_modules.py``), the text of a description
(``engine/schema.py``), where the vectors are kept.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from resources.devices.find import Device
from resources.devices.leases import refuse_another_gpu
from resources.engine.model_source import MODULES, ModelSource, embedding_modules, exact_revision
from resources.engine.models.sentence_modules import SentenceModules, model_files, read_modules
from resources.engine.protocol import ModelLoadError
from resources.engine.transformers.model_loading import (
    load_config,
    load_model,
    load_sentence_transformer,
    load_tokenizer,
    read_json,
    release_memory,
    take_language_layers,
)

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

Pooling = Literal["mean", "cls", "lasttoken"]

_BATCH_TOKENS = {"cpu": 2048, "cuda": 8192}
"""Padded tokens of one batch, by kind of device: what bounds its memory. On a CPU, 8192 took a third more
time and 240 MiB more at its peak: blocks of that size leave the allocator's heap in holes."""


@dataclass(frozen=True)
class TextEmbeddingModel:
    """The model that embeds the text of descriptions.

    model: a local folder or a hub id; empty where none is chosen. pooling: how its layers' states become a
    vector; None: its own files say so, in the layout of sentence-transformers. A vision-language model whose
    pooling is given lends its text layers. The other fields are those of VisionLanguageModel. A plain object:
    see there.
    """

    model: str
    revision: str | None = None
    trust_remote_code: bool = False
    records_directory: str | None = None
    pooling: Pooling | None = None

    @property
    def source(self) -> ModelSource:
        """Where the model comes from."""
        records = Path(self.records_directory) if self.records_directory else None
        return ModelSource(self.model, self.revision, self.trust_remote_code, records)

    def exact_revision(self) -> str:
        """What exactly the model is now; needs no device and no torch.

        Raises ModelLoadError, also where a local folder's files are refused.
        """
        revision = exact_revision(self.source)
        if self.source.folder is not None:
            self._modules()
        return revision

    def width(self) -> int:
        """Numbers a vector has, from the model's files without its weights. Raises ModelLoadError."""
        modules = self._modules()
        return int(load_config(self.source).get_text_config().hidden_size) if not modules else modules.width

    def load(self, device: Device) -> TextEmbedder:
        """An embedder on the leased device. Raises ModelLoadError, and DeviceError as the describer does."""
        embedder = TextEmbedder(self.source, device=device.kind, pooling=self.pooling)
        refuse_another_gpu(device)
        return embedder

    def weight_bytes(self) -> int:
        """Bytes of its weights, those of a hub's model downloaded. Raises ModelLoadError."""
        return sum(
            path.stat().st_size for path in model_files(self.source, weights=True).rglob("*.safetensors")
        )

    def _modules(self) -> SentenceModules | None:
        return _modules(self.source, self.pooling)


class TextEmbedder:
    """One text model on one device.

    pooling: see TextEmbeddingModel. A text's vector does not depend on the texts beside it (1e-5 in float32).
    What is longer than the model takes is cut off, and counted. Raises ModelLoadError.
    """

    def __init__(
        self, source: ModelSource, *, device: Literal["cpu", "cuda"], pooling: Pooling | None
    ) -> None:
        self.model = source.label
        self.revision = exact_revision(source)
        self._device = device
        modules = _modules(source, pooling)
        self._encoder: _SentenceEncoder | _PooledLayers
        if modules is not None:
            self._encoder = _SentenceEncoder(source, modules, device)
        else:
            assert pooling is not None
            self._encoder = _PooledLayers(source, pooling, device)
        self.width = self._encoder.width
        self.longest: int | None = self._encoder.longest
        """Tokens of a text, its prompt among them, that the model takes; None: it knows no limit."""
        self.cut_off = 0
        """Texts that were longer, of all so far."""

    def embed(self, texts: Sequence[str]) -> npt.NDArray[np.float32]:
        """Vectors [texts, width], in order. Raises ValueError for a text without tokens."""
        import numpy as np

        if not texts:
            return np.empty((0, self.width), dtype=np.float32)
        lengths = [len(ids) for ids in self._encoder.tokens(texts)]
        for text, length in zip(texts, lengths, strict=True):
            if not length:
                raise ValueError(f"the text {text!r} has no tokens, so it has no embedding")
        at_the_limit = [text for text, one in zip(texts, lengths, strict=True) if one == self.longest]
        if at_the_limit:
            whole = self._encoder.tokens(at_the_limit, cut=False)
            self.cut_off += sum(len(ids) != self.longest for ids in whole)
        vectors = np.empty((len(texts), self.width), dtype=np.float32)
        for rows in _batches(lengths, _BATCH_TOKENS[self._device]):
            vectors[rows] = self._encoder.vectors([texts[row] for row in rows])
        return vectors

    def close(self) -> None:
        """Give the model's memory back. The embedder cannot be used afterwards."""
        del self._encoder
        release_memory(self._device)


def _modules(source: ModelSource, pooling: Pooling | None) -> SentenceModules | None:
    """What the model's files make of a text; None where its pooling is given. Raises ModelLoadError."""
    if pooling is None:
        return read_modules(source, model_files(source, weights=False))
    folder = source.folder
    said = read_json(source, MODULES) if folder is None else embedding_modules(folder)
    if said is not None:
        raise ModelLoadError(
            f"model {source.name}: its files say its pooling ({MODULES}). Name it in"
            " VLM_ASSETS_EMBEDDING_MODEL and unset VLM_ASSETS_EMBEDDING_POOLING."
        )
    return None


class _SentenceEncoder:
    """A model with the files of sentence-transformers: pooling, prompt, normalization as they say."""

    def __init__(self, source: ModelSource, modules: SentenceModules, device: str) -> None:
        folder = model_files(source, weights=True)
        self.width = modules.width
        self._prompt = modules.prompt
        self._model = load_sentence_transformer(source, folder, device=device)
        self._tokenizer = self._model.tokenizer
        self.longest = _longest(self._model.max_seq_length)

    def tokens(self, texts: Sequence[str], *, cut: bool = True) -> list[list[int]]:
        texts = [self._prompt + text for text in texts]
        return _token_ids(self._tokenizer, texts, self.longest if cut else None)

    def vectors(self, texts: Sequence[str]) -> npt.NDArray[np.float32]:
        import numpy as np

        found = self._model.encode_document(
            list(texts), prompt=self._prompt, batch_size=len(texts), show_progress_bar=False
        )
        if found.shape != (len(texts), self.width):
            raise ValueError(
                f"the model's vectors have {found.shape[-1]} numbers, and its files say {self.width}"
            )
        return np.asarray(found, dtype=np.float32)


class _PooledLayers:
    """Layers without a word about pooling: unit vectors, pooled as it was asked for.

    Of an image-text-to-text model the language layers are taken and the rest is let go; where they were kept
    when the describer was closed in this process, nothing is loaded. Any other model is taken whole (its
    encoder, where it also has a decoder).
    """

    def __init__(self, source: ModelSource, pooling: Pooling, device: str) -> None:
        self._device = device
        self._pooling = pooling
        kept = take_language_layers(exact_revision(source), device)
        self._layers = _language_layers(source, device) if kept is None else kept
        self._tokenizer = load_tokenizer(source)
        self._pad_token_id = self._tokenizer.pad_token_id or 0
        config = self._layers.config.get_text_config()
        self.width: int = config.hidden_size
        self.longest = _longest(
            self._tokenizer.model_max_length, getattr(config, "max_position_embeddings", None)
        )

    def tokens(self, texts: Sequence[str], *, cut: bool = True) -> list[list[int]]:
        return _token_ids(self._tokenizer, texts, self.longest if cut else None)

    def vectors(self, texts: Sequence[str]) -> npt.NDArray[np.float32]:
        import torch

        tokens = self.tokens(texts)
        longest = max(map(len, tokens))
        input_ids = torch.full((len(tokens), longest), self._pad_token_id)
        mask = torch.zeros_like(input_ids)
        for row, ids in enumerate(tokens):
            input_ids[row, : len(ids)] = torch.tensor(ids)
            mask[row, : len(ids)] = 1
        input_ids, mask = input_ids.to(self._device), mask.to(self._device)
        with torch.inference_mode():
            hidden = self._layers(input_ids=input_ids, attention_mask=mask).last_hidden_state.float()
            unit = torch.nn.functional.normalize(self._pooled(hidden, mask), dim=-1)
        vectors: npt.NDArray[np.float32] = unit.cpu().numpy()
        return vectors

    def _pooled(self, hidden: Any, mask: Any) -> Any:
        import torch

        if self._pooling == "cls":
            return hidden[:, 0]
        if self._pooling == "lasttoken":
            return hidden[torch.arange(len(hidden), device=hidden.device), mask.sum(dim=1) - 1]
        weights = mask.unsqueeze(-1).float()
        return (hidden * weights).sum(dim=1) / weights.sum(dim=1)


def _longest(*limits: int | None) -> int | None:
    """The smallest of these limits of tokens. A tokenizer that knows no limit says 10^30."""
    return min((int(limit) for limit in limits if limit and limit < 10**9), default=None)


def _token_ids(tokenizer: Any, texts: Sequence[str], longest: int | None) -> list[list[int]]:
    cut = longest is not None
    found: list[list[int]] = tokenizer(list(texts), truncation=cut, max_length=longest, verbose=False)[
        "input_ids"
    ]
    return found


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
