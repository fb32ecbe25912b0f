"""Embeddings of texts, by a describing model's language layers and by a text encoder."""

import numpy as np
import pytest

from resources.engine.model_source import ModelSource, exact_revision
from resources.engine.models import text_embedding
from resources.engine.models.text_embedding import TextEmbedder
from resources.engine.transformers.model_loading import (
    keep_language_layers,
    load_model,
    take_language_layers,
)

TEXTS = ["a", '{"roof":"flat","storeys":2}', "house " * 40, '{"roof":"gabled","storeys":2}', "näïve 屋根"]


@pytest.fixture(scope="module")
def encoder_folder(tmp_path_factory, tokenizer):
    """A tiny text encoder with absolute positions, as embedding models often are."""
    from transformers import BertConfig, BertModel

    folder = tmp_path_factory.mktemp("models") / "tiny-bert"
    config = BertConfig(
        vocab_size=len(tokenizer), hidden_size=32, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=64, max_position_embeddings=50,
    )  # fmt: skip
    BertModel(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module", params=["describing model", "text encoder"])
def embedder(request, model_folder, encoder_folder):
    folder = model_folder if request.param == "describing model" else encoder_folder
    embedder = TextEmbedder(ModelSource(str(folder)), device="cpu", pooling="mean")
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
    monkeypatch.setattr("resources.engine.models.text_embedding._BATCH_TOKENS", {"cpu": 30})
    assert np.abs(embedder.embed(TEXTS) - expected).max() < 1e-5


def test_mean_over_tokens(model_folder):
    """The vector is the mean of the language layers' last states over the text's tokens, made unit long."""
    import torch
    from transformers import AutoModelForImageTextToText, AutoTokenizer

    model = AutoModelForImageTextToText.from_pretrained(model_folder, dtype=torch.float32).eval()
    ids = AutoTokenizer.from_pretrained(model_folder)(TEXTS[1], return_tensors="pt")["input_ids"]
    with torch.inference_mode():
        mean = model.model.text_model(input_ids=ids).last_hidden_state[0].mean(dim=0).numpy()
    vector = TextEmbedder(ModelSource(str(model_folder)), device="cpu", pooling="mean").embed([TEXTS[1]])[0]
    assert np.abs(vector - mean / np.linalg.norm(mean)).max() < 1e-5


@pytest.mark.parametrize(("pooling", "at"), [("cls", 0), ("lasttoken", -1)])
def test_named_pooling(encoder_folder, pooling, at):
    """Where the pooling is named, the vector is the first or the last token's state."""
    import torch
    from transformers import AutoModel, AutoTokenizer

    model = AutoModel.from_pretrained(encoder_folder, dtype=torch.float32).eval()
    ids = AutoTokenizer.from_pretrained(encoder_folder)(TEXTS[1], return_tensors="pt")["input_ids"]
    with torch.inference_mode():
        state = model(input_ids=ids).last_hidden_state[0, at].numpy()
    vectors = TextEmbedder(ModelSource(str(encoder_folder)), device="cpu", pooling=pooling).embed(TEXTS)
    assert np.abs(vectors[1] - state / np.linalg.norm(state)).max() < 1e-5


def test_texts_that_are_cut_off_are_counted(encoder_folder, model_folder):
    """Nothing is cut silently: what is longer than the model takes counts, what fills it does not."""
    embedder = TextEmbedder(ModelSource(str(encoder_folder)), device="cpu", pooling="mean")
    assert embedder.longest == 50
    embedder.embed(["x" * 50, "a"])
    assert embedder.cut_off == 0
    embedder.embed(["x" * 51, "x" * 50, "house " * 200])
    embedder.embed(["x" * 51])
    assert embedder.cut_off == 3


def test_no_texts(embedder):
    """No texts give no vectors, of the right width."""
    assert embedder.embed([]).shape == (0, embedder.width)


def test_text_without_tokens(embedder):
    """A text without tokens has no mean; it is an error rather than a row of NaN."""
    with pytest.raises(ValueError, match="no tokens"):
        embedder.embed(["a", ""])


def test_layers_of_the_describer_are_not_loaded_again(model_folder, monkeypatch):
    """Layers that were kept embed as loaded ones do, once, and never in the place of another model's."""
    from transformers import AutoModelForImageTextToText

    source = ModelSource(str(model_folder))
    loaded = TextEmbedder(source, device="cpu", pooling="mean").embed(TEXTS)
    describer = load_model(source, AutoModelForImageTextToText, device="cpu")
    keep_language_layers(describer, exact_revision(source), "cpu")
    assert take_language_layers("sha256:another", "cpu") is None
    with monkeypatch.context() as nothing_loads:
        nothing_loads.delattr(text_embedding, "load_model")
        embedder = TextEmbedder(source, device="cpu", pooling="mean")
        assert np.array_equal(embedder.embed(TEXTS), loaded)
        with pytest.raises(NameError, match="load_model"):
            TextEmbedder(source, device="cpu", pooling="mean")


def test_kept_layers_are_let_go_for_the_next_model(model_folder):
    """The device may not hold them beside another describer, such as that of a next trial."""
    from transformers import AutoModelForImageTextToText

    source = ModelSource(str(model_folder))
    describer = load_model(source, AutoModelForImageTextToText, device="cpu")
    keep_language_layers(describer, exact_revision(source), "cpu")
    load_model(source, AutoModelForImageTextToText, device="cpu")
    assert take_language_layers(exact_revision(source), "cpu") is None
