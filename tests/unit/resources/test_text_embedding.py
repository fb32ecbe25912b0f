"""Embeddings of texts by the example's embedder."""

import numpy as np
import pytest

from resources.text_embedding import TextEmbedder, TextEmbeddingModel
from vlm_assets.config.settings import EXAMPLE_EMBEDDER
from vlm_engine.model_source import ModelSource
from vlm_engine.protocol import ModelLoadError

TEXTS = ["a", '{"roof":"flat","storeys":2}', "house " * 40, '{"roof":"gable","storeys":2}', "naïve 屋根"]


@pytest.fixture(scope="module")
def embedder():
    embedder = TextEmbedder(ModelSource(str(EXAMPLE_EMBEDDER)), device="cpu")
    yield embedder
    embedder.close()


def test_unit_vectors(embedder):
    """One vector a text, of the stated width, in float32, of length one, and not all alike."""
    vectors = embedder.embed(TEXTS)
    assert (vectors.shape, vectors.dtype) == ((5, embedder.width), np.float32)
    assert np.allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-6)
    similarity = vectors @ vectors.T
    assert similarity[~np.eye(5, dtype=bool)].max() < 0.999


def test_vectors_do_not_depend_on_the_batch(embedder):
    """A text's vector is the same alone and among others, shorter or longer, in any order."""
    together = embedder.embed(TEXTS)
    alone = np.concatenate([embedder.embed([text]) for text in TEXTS])
    backwards = embedder.embed(TEXTS[::-1])[::-1]
    assert np.abs(together - alone).max() < 1e-5
    assert np.abs(together - backwards).max() < 1e-5


def test_many_batches_keep_the_order(embedder, monkeypatch):
    """Where texts are spread over batches by length, each vector still stands at its text."""
    expected = embedder.embed(TEXTS)
    monkeypatch.setattr("resources.text_embedding._BATCH_TOKENS", {"cpu": 30})
    assert np.abs(embedder.embed(TEXTS) - expected).max() < 1e-5


def test_no_texts(embedder):
    """No texts give no vectors, of the right width."""
    assert embedder.embed([]).shape == (0, embedder.width)


def test_nothing_embeds_where_no_model_is_named():
    """Whatever asks for the embedder says the one setting that names it; no other model takes its place."""
    model = TextEmbeddingModel("")
    for question in (model.exact_revision, model.width, model.weight_bytes):
        with pytest.raises(ModelLoadError, match="set VLM_ASSETS_EMBEDDING_MODEL to the folder or hub id"):
            question()
