"""Text embedders in the layout of sentence-transformers: what their files say, and which are refused."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from resources.text_embedding import TextEmbedder, TextEmbeddingModel
from vlm_engine.model_source import ModelSource, deciding_files
from vlm_engine.protocol import ModelLoadError

TEXTS = ["a", '{"roof":"flat","storeys":2}', "house " * 40, '{"roof":"gabled","storeys":2}', "näïve 屋根"]
PROMPT = "Represent the property: "


def save_bert(folder, tokenizer):
    from transformers import BertConfig, BertModel

    config = BertConfig(
        vocab_size=len(tokenizer), hidden_size=32, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=64, max_position_embeddings=64, initializer_range=0.2,
    )  # fmt: skip
    BertModel(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def save_qwen3(folder, tokenizer):
    import torch
    from transformers import Qwen3Config, Qwen3Model

    config = Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=32, num_hidden_layers=2, num_attention_heads=2, head_dim=16,
        num_key_value_heads=1, intermediate_size=64, max_position_embeddings=512, initializer_range=0.2,
        pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    Qwen3Model(config).to(torch.bfloat16).save_pretrained(folder)
    tokenizer.padding_side = "left"
    tokenizer.save_pretrained(folder)
    tokenizer.padding_side = "right"


def old_layout(folder, pooling, *more, width=32, settings=None):
    """The JSON files as published models have them: paths by number, poolings as flags."""
    kinds = ["Transformer", "Pooling", *more]
    paths = ["", *(f"{number}_{kind}" for number, kind in enumerate(kinds) if number)]
    modules = [
        {"idx": number, "name": str(number), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for number, (kind, path) in enumerate(zip(kinds, paths, strict=True))
    ]
    write(folder, "modules.json", modules)
    for path in paths[1:]:
        (folder / path).mkdir()
    flags = ("cls_token", "mean_tokens", "max_tokens", "lasttoken")
    write(
        folder,
        "1_Pooling/config.json",
        {"word_embedding_dimension": width, **{f"pooling_mode_{flag}": flag == pooling for flag in flags}},
    )
    if settings is not None:
        write(folder, "config_sentence_transformers.json", settings)


def save_dense(folder, outputs):
    import torch
    from safetensors.torch import save_file

    weights = {"linear.weight": torch.randn(outputs, 32), "linear.bias": torch.randn(outputs)}
    save_file(weights, folder / "model.safetensors")
    config = {"in_features": 32, "out_features": outputs, "bias": True}
    write(folder, "config.json", {**config, "activation_function": "torch.nn.modules.activation.Tanh"})


def write(folder, name, content):
    (folder / name).write_text(json.dumps(content))


def change(folder, name, **changes):
    write(folder, name, {**json.loads((folder / name).read_text()), **changes})


def make(folder: Path, kind: str, tokenizer) -> Path:
    """A text embedder of random weights, as models of that kind are published."""
    import torch

    torch.manual_seed(7)
    folder.mkdir()
    if kind == "qwen3":
        save_qwen3(folder, tokenizer)
        prompts = {"query": "Instruct: find\nQuery:", "document": PROMPT}
        old_layout(folder, "lasttoken", "Normalize", settings={"prompts": prompts})
        return folder
    save_bert(folder, tokenizer)
    write(folder, "sentence_bert_config.json", {"max_seq_length": 48, "do_lower_case": True})
    if kind == "bge":
        old_layout(folder, "cls_token", "Normalize")
    elif kind == "mean":
        old_layout(folder, "mean_tokens", settings={"default_prompt_name": None, "truncate_dim": 24})
    else:
        old_layout(folder, "mean_tokens", "Dense", "Normalize")
        save_dense(folder / "2_Dense", 20)
    return folder


KINDS = {"bge": 32, "qwen3": 32, "mean": 24, "dense": 20}


@pytest.fixture(scope="module", params=list(KINDS))
def kind(request):
    return request.param


@pytest.fixture(scope="module")
def embedder_folder(kind, tmp_path_factory, tokenizer):
    return make(tmp_path_factory.mktemp("embedders") / kind, kind, tokenizer)


@pytest.fixture
def bge(tmp_path, tokenizer):
    return make(tmp_path / "bge", "bge", tokenizer)


@pytest.fixture
def dense(tmp_path, tokenizer):
    return make(tmp_path / "dense", "dense", tokenizer)


@pytest.fixture(scope="module")
def embedder(embedder_folder):
    embedder = TextEmbedder(ModelSource(str(embedder_folder)), device="cpu")
    yield embedder
    embedder.close()


def test_vectors_are_those_of_the_library(embedder_folder, embedder, kind):
    """Pooling, prompt, normalization, number format, longest text and width are those that the files say."""
    from sentence_transformers import SentenceTransformer

    prompt = PROMPT if kind == "qwen3" else None
    library = SentenceTransformer(str(embedder_folder), device="cpu")
    expected = np.stack([library.encode(text, prompt=prompt) for text in TEXTS])
    found = embedder.embed(TEXTS)
    assert (found.shape, found.dtype) == ((5, KINDS[kind]), np.float32)
    assert TextEmbeddingModel(str(embedder_folder)).width() == KINDS[kind]
    # The number format of the Qwen-like files is bfloat16, which rounds by what stands beside a text.
    assert np.abs(found - expected).max() < (0.03 if kind == "qwen3" else 1e-5)
    one = [embedder.embed([text])[0] for text in TEXTS]
    assert np.array_equal(np.stack(one), expected)


def test_vectors_do_not_depend_on_the_batch(embedder, kind, monkeypatch):
    """A text's vector is the same in any order and any batch."""
    allowed = 0.03 if kind == "qwen3" else 1e-5
    together = embedder.embed(TEXTS)
    assert np.abs(together - embedder.embed(TEXTS[::-1])[::-1]).max() < allowed
    monkeypatch.setattr("resources.text_embedding._BATCH_TOKENS", {"cpu": 30})
    assert np.abs(together - embedder.embed(TEXTS)).max() < allowed


def test_what_the_library_opens_is_in_the_digest(dense, opened_files):
    """Every file of the folder that is opened while the model loads decides its revision."""
    with opened_files(dense) as opened:
        TextEmbedder(ModelSource(str(dense)), device="cpu")
    files = {path for path in opened if Path(path).is_file()}
    assert str(dense / "1_Pooling" / "config.json") in files
    assert files <= {str(path) for path in deciding_files(dense)}


def test_texts_that_are_cut_off_are_counted(bge):
    """The limit is the one of the model's files."""
    embedder = TextEmbedder(ModelSource(str(bge)), device="cpu")
    embedder.embed(["x" * 48, "x" * 49])
    assert (embedder.longest, embedder.cut_off) == (48, 1)


def test_text_without_tokens(bge):
    """A text without tokens has no vector; it is an error rather than a row of NaN."""
    with pytest.raises(ValueError, match="no tokens"):
        TextEmbedder(ModelSource(str(bge)), device="cpu").embed(["a", ""])


@pytest.mark.parametrize("name", ["1_Pooling/config.json", "2_Dense/model.safetensors", "modules.json"])
def test_files_of_modules_decide_the_revision(dense, name):
    """A change of pooling or of a module's weights is another model."""
    before = TextEmbeddingModel(str(dense)).exact_revision()
    with (dense / name).open("ab") as file:
        file.write(b"\n")
    assert TextEmbeddingModel(str(dense)).exact_revision() != before


def test_a_hub_models_files_are_those_of_its_commit(bge, monkeypatch):
    """A hub's model is downloaded at the commit in its rows, without pickles, and judged like a folder."""
    asked = []

    def download(name, *, revision, allow_patterns, ignore_patterns):
        asked.append((name, revision))
        assert not any(pattern.endswith((".bin", "*")) for pattern in allow_patterns)
        return str(bge)

    commit = "c0ffee" + 34 * "0"
    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    monkeypatch.setattr("vlm_engine.model_source._hub_commit", lambda name, revision: commit)
    embedder = TextEmbedder(ModelSource("owner/name"), device="cpu")
    local = TextEmbedder(ModelSource(str(bge)), device="cpu")
    assert np.array_equal(embedder.embed(TEXTS), local.embed(TEXTS))
    assert embedder.revision == commit
    assert set(asked) == {("owner/name", commit)}


def refused(folder, match):
    """Both what names the model and what loads it refuse the folder."""
    with pytest.raises(ModelLoadError, match=match):
        TextEmbeddingModel(str(folder)).exact_revision()
    with pytest.raises(ModelLoadError, match=match):
        TextEmbedder(ModelSource(str(folder)), device="cpu")


def test_a_folder_without_pooling_is_refused(bge, model_folder):
    """A plain encoder or a describing model is not pooled by guess."""
    (bge / "modules.json").unlink()
    refused(bge, "in the layout of sentence-transformers")
    refused(model_folder, "in the layout of sentence-transformers")


def test_a_foreign_class_is_not_imported(bge, monkeypatch):
    """modules.json names any class; only the library's four are imported, whatever is trusted."""
    (bge / "foreign_module.py").write_text("raise SystemExit('imported')")
    modules = json.loads((bge / "modules.json").read_text())
    write(bge, "modules.json", [*modules[:2], {**modules[2], "type": "foreign_module.Normalize"}])
    monkeypatch.syspath_prepend(bge)
    refused(bge, "foreign_module.Normalize")
    with pytest.raises(ModelLoadError, match="foreign_module"):
        TextEmbedder(ModelSource(str(bge), trust_remote_code=True), device="cpu")
    assert "foreign_module" not in sys.modules


@pytest.mark.parametrize("part", ["", "2_Dense"])
def test_pickled_weights_are_refused(dense, part):
    """Weights in .bin are not loaded, neither the transformer's nor a module's."""
    (dense / part / "model.safetensors").rename(dense / part / "pytorch_model.bin")
    refused(dense, r"pytorch_model\.bin")


@pytest.mark.parametrize("path", ["../elsewhere", "/tmp", "linked"])
def test_files_outside_the_folder_are_refused(dense, path):
    """A module's folder lies in the model's, by its name and by where a link leads."""
    (dense.parent / "elsewhere").mkdir()
    (dense / "linked").symlink_to(dense.parent / "elsewhere")
    modules = json.loads((dense / "modules.json").read_text())
    write(dense, "modules.json", [*modules[:2], {**modules[2], "path": path}])
    refused(dense, "not in the model's own folder")


@pytest.mark.parametrize(
    "options",
    [
        {"tokenizer_name_or_path": "/elsewhere"},
        {"model_args": {"use_safetensors": False}},
        {"modality_config": {"text": {"method": "generate", "method_output_name": None}}},
        {"transformer_task": "fill-mask"},
    ],
)
def test_options_that_load_other_things_are_refused(bge, options):
    """The transformer's options cannot name other files, other weights or other methods."""
    change(bge, "sentence_bert_config.json", **options)
    refused(bge, next(iter(options)))


def test_an_activation_is_torchs_own(dense):
    """The library takes any class below torch, and another one silently for its default."""
    change(dense, "2_Dense/config.json", activation_function="foreign.Activation")
    refused(dense, r"foreign\.Activation")


def test_a_pooling_that_says_nothing_is_refused(bge):
    """The library takes a pooling without a mode for the mean."""
    write(bge, "1_Pooling/config.json", {"word_embedding_dimension": 32})
    refused(bge, "does not say a known pooling")


def test_missing_weights_are_refused(bge):
    """Weights that the files lack are not filled with noise."""
    from safetensors.torch import load_file, save_file

    weights = load_file(bge / "model.safetensors")
    del weights["encoder.layer.1.output.dense.weight"]
    save_file(weights, bge / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelLoadError, match=r"lack 1 of the weights of BertModel, first encoder\.layer\.1"):
        TextEmbedder(ModelSource(str(bge)), device="cpu")
