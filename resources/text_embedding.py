"""Embeddings of descriptions: texts to vectors, by a text embedder.

Which files a text embedder may have is in ``vlm_engine/sentence_modules.py``, the text of a description in
``vlm_engine/schema.py``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from vlm_engine.canary import TEXTS, digest_of_answers, versions, weights_checksum
from vlm_engine.devices.find import Device
from vlm_engine.devices.leases import refuse_another_gpu
from vlm_engine.model_source import NO_EMBEDDER, ModelSource, exact_revision
from vlm_engine.protocol import CanaryAnswer, ModelLoadError
from vlm_engine.sentence_modules import SentenceModules, model_files, read_modules
from vlm_engine.transformers.model_loading import load_sentence_transformer, release_memory

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

_BATCH_TOKENS = {"cpu": 2048, "cuda": 8192}
"""Padded tokens of one batch, by kind of device: what bounds its memory. On a CPU, 8192 took a third more
time and 240 MiB more at its peak: blocks of that size leave the allocator's heap in holes."""


@dataclass(frozen=True)
class TextEmbeddingModel:
    """The model that embeds the text of descriptions.

    model: a local folder or a hub id, in the layout of sentence-transformers; empty if none is named. The
    other fields are those of VisionLanguageModel. A plain object, for the reason given there.
    """

    model: str
    revision: str | None = None
    trust_remote_code: bool = False
    records_directory: str | None = None

    @property
    def source(self) -> ModelSource:
        """The source of the model. Raises ModelLoadError if no model is named."""
        if not self.model:
            raise ModelLoadError(NO_EMBEDDER)
        records = Path(self.records_directory) if self.records_directory else None
        return ModelSource(self.model, self.revision, self.trust_remote_code, records)

    def exact_revision(self) -> str:
        """The exact revision of the model now; needs no device and no torch.

        Raises ModelLoadError, also if a local folder's files are refused.
        """
        revision = exact_revision(self.source)
        if self.source.folder is not None:
            self._modules()
        return revision

    def width(self) -> int:
        """The length of a vector, from the model's files without its weights. Raises ModelLoadError."""
        return self._modules().width

    def load(self, device: Device) -> TextEmbedder:
        """An embedder on the leased device. Raises ModelLoadError, and DeviceError as the describer does."""
        embedder = TextEmbedder(self.source, device=device.kind)
        refuse_another_gpu(device)
        return embedder

    def weight_bytes(self) -> int:
        """Bytes of the weights; a hub's model is downloaded first. Raises ModelLoadError."""
        return sum(
            path.stat().st_size for path in model_files(self.source, weights=True).rglob("*.safetensors")
        )

    def _modules(self) -> SentenceModules:
        return read_modules(self.source, model_files(self.source, weights=False))


class TextEmbedder:
    """One text model on one device.

    A text's vector does not depend on the texts beside it (1e-5 in float32). A text that is longer than the
    model takes is cut off, and counted. Raises ModelLoadError.
    """

    def __init__(self, source: ModelSource, *, device: Literal["cpu", "cuda"]) -> None:
        self.model = source.label
        self.revision = exact_revision(source)
        self._device = device
        modules = read_modules(source, model_files(source, weights=False))
        self.width = modules.width
        self._prompt = modules.prompt
        # The files of sentence-transformers set its pooling, prompt and normalization.
        self._encoder = load_sentence_transformer(source, model_files(source, weights=True), device=device)
        limit = self._encoder.max_seq_length
        # A tokenizer without a limit says 10^30.
        self.longest = int(limit) if limit and limit < 10**9 else None
        """The most tokens that the model takes, the prompt's included; None: it has no limit."""
        self.cut_off = 0
        """How many texts so far were longer."""

    def embed(self, texts: Sequence[str]) -> npt.NDArray[np.float32]:
        """Vectors [texts, width], in order. Raises ValueError for a text without tokens."""
        import numpy as np

        if not texts:
            return np.empty((0, self.width), dtype=np.float32)
        lengths = [len(ids) for ids in self._tokens(texts)]
        for text, length in zip(texts, lengths, strict=True):
            if not length:
                raise ValueError(f"the text {text!r} has no tokens, so it has no embedding")
        at_the_limit = [text for text, length in zip(texts, lengths, strict=True) if length == self.longest]
        if at_the_limit:
            uncut = self._tokens(at_the_limit, cut=False)
            self.cut_off += sum(len(ids) != self.longest for ids in uncut)
        vectors = np.empty((len(texts), self.width), dtype=np.float32)
        for rows in _batches(lengths, _BATCH_TOKENS[self._device]):
            vectors[rows] = self._vectors([texts[row] for row in rows])
        return vectors

    def _tokens(self, texts: Sequence[str], *, cut: bool = True) -> list[list[int]]:
        """Token ids of each text, cut to the model's limit if ``cut``."""
        longest = self.longest if cut else None
        encoded = self._encoder.tokenizer(
            [self._prompt + text for text in texts],
            truncation=longest is not None,
            max_length=longest,
            verbose=False,
        )
        token_ids: list[list[int]] = encoded["input_ids"]
        return token_ids

    def _vectors(self, texts: Sequence[str]) -> npt.NDArray[np.float32]:
        import numpy as np

        vectors = self._encoder.encode_document(
            list(texts), prompt=self._prompt, batch_size=len(texts), show_progress_bar=False
        )
        if vectors.shape != (len(texts), self.width):
            raise ValueError(
                f"the model's vectors have {vectors.shape[-1]} numbers, and its files say {self.width}"
            )
        return np.asarray(vectors, dtype=np.float32)

    def canary(self) -> CanaryAnswer:
        """Embed the fixed texts, rounded, and compute the weights' checksum. See CanaryEngine."""
        cut_off = self.cut_off
        vectors = self.embed(TEXTS).round(3) + 0.0
        self.cut_off = cut_off
        made_with = versions("torch", "transformers", "sentence-transformers", device=self._device)
        return CanaryAnswer(digest_of_answers(vectors.tolist(), weights_checksum(self._encoder)), made_with)

    def close(self) -> None:
        """Give the model's memory back. The embedder cannot be used afterwards."""
        del self._encoder
        release_memory(self._device)


def _batches(lengths: Sequence[int], tokens: int) -> Iterator[list[int]]:
    """Batches of rows of similar length, longest first: a batch too large for memory fails at once."""
    batch: list[int] = []
    for row in sorted(range(len(lengths)), key=lambda row: -lengths[row]):
        if batch and lengths[batch[0]] * (len(batch) + 1) > tokens:
            yield batch
            batch = []
        batch.append(row)
    if batch:
        yield batch
