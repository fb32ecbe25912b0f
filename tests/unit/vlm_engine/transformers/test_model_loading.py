"""Loading models: files of the folder alone, and errors that say what to do."""

import json
import shutil
import subprocess
import sys

import pytest

from tests.support.damage import flip_bit
from vlm_engine.model_source import INDEX, ModelSource, deciding_files, exact_revision
from vlm_engine.protocol import ModelLoadError
from vlm_engine.transformers import model_loading
from vlm_engine.transformers.model_loading import load_model, load_processor


@pytest.fixture
def torch():
    """Torch, imported when a test needs it, so that collecting the tests does not."""
    import torch

    return torch


@pytest.fixture
def copied(model_folder, tmp_path):
    """A copy of the tiny model that a test may damage."""
    return shutil.copytree(model_folder, tmp_path / "model")


def weights_in(folder):
    import safetensors.torch

    return safetensors.torch.load_file(folder / "model.safetensors")


def load(folder):
    from transformers import AutoModelForImageTextToText

    return load_model(ModelSource(str(folder)), AutoModelForImageTextToText, device="cpu")


def test_weights_are_those_of_the_file(torch, model_folder):
    """Loaded weights are the file's, in float32 on a CPU, in evaluation mode."""
    model = load(model_folder)
    stored = weights_in(model_folder)
    assert torch.equal(model.lm_head.weight, stored["lm_head.weight"])
    assert model.dtype == torch.float32
    assert not model.training


def test_missing_weights_are_refused(copied):
    """Files that lack weights are refused, where transformers would fill them with noise."""
    import safetensors.torch

    weights = weights_in(copied)
    del weights["model.text_model.norm.weight"]
    safetensors.torch.save_file(weights, copied / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelLoadError, match=r"lack 1 of the weights.*text_model\.norm"):
        load(copied)


def test_only_safetensors(torch, copied):
    """Weights in a format that can run code are not loaded."""
    weights = weights_in(copied)
    torch.save(weights, copied / "pytorch_model.bin")
    (copied / "model.safetensors").unlink()
    with pytest.raises(ModelLoadError, match="safetensors"):
        load(copied)


def test_cut_weights(copied):
    """Weights cut short by a broken download give a sentence with the model's name."""
    weights = copied / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(ModelLoadError, match="weights cannot be loaded"):
        load(copied)


def test_remote_code_is_not_run(copied):
    """Python code in a model folder is not run unless asked for, and the error names the setting."""
    config = json.loads((copied / "config.json").read_text())
    config["model_type"] = "homemade"
    config["auto_map"] = {"AutoConfig": "code.Homemade", "AutoModelForImageTextToText": "code.Homemade"}
    (copied / "config.json").write_text(json.dumps(config))
    (copied / "code.py").write_text("raise SystemExit('this code was run')")
    with pytest.raises(ModelLoadError, match="VLM_ASSETS_TRUST_REMOTE_CODE"):
        load(copied)


def test_model_without_chat_template(copied):
    """A base model that nobody knows how to ask is refused when it is loaded, not at its first batch."""
    (copied / "chat_template.jinja").unlink()
    with pytest.raises(ModelLoadError, match=r"no chat template.*instruction-tuned"):
        load_processor(ModelSource(str(copied)))


def test_text_model_is_no_vision_language_model(copied):
    """A folder without an image processor is refused by name."""
    (copied / "processor_config.json").unlink()
    config = json.loads((copied / "config.json").read_text())
    (copied / "config.json").write_text(json.dumps(config["text_config"]))
    with pytest.raises(ModelLoadError, match="image processor"):
        load_processor(ModelSource(str(copied)))


WITHOUT_TORCHVISION = """
import importlib.metadata, sys

sys.modules["torchvision"] = None  # not to be found, installed or not
version = importlib.metadata.version
importlib.metadata.version = lambda name: version("no-such-package" if name == "torchvision" else name)

from vlm_engine.model_source import ModelLoadError, ModelSource
from vlm_engine.transformers.model_loading import load_processor

try:
    load_processor(ModelSource(sys.argv[1]))
except ModelLoadError as error:
    print(error)
"""


def test_model_that_needs_torchvision(tmp_path, tokenizer):
    """A family whose processor needs torchvision says which extra to install."""
    (tmp_path / "config.json").write_text('{"model_type": "lfm2_vl"}')
    (tmp_path / "preprocessor_config.json").write_text('{"image_processor_type": "Lfm2VlImageProcessor"}')
    tokenizer.save_pretrained(tmp_path)
    # In a process of its own: this one has settled by now whether there is torchvision.
    command = [sys.executable, "-c", WITHOUT_TORCHVISION, tmp_path]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "`.venv/bin/pip install -c constraints.txt -e '.[torchvision]'`" in said


def test_torchvision_of_another_torch(monkeypatch):
    """A torchvision that does not fit torch breaks every model; the error names the pair."""
    monkeypatch.setattr(model_loading, "version", {"torchvision": "0.29.2", "torch": "2.13.0"}.get)
    with (
        pytest.raises(ModelLoadError, match=r"torchvision 0\.29\.2 may not fit torch 2\.13\.0"),
        model_loading._loading(ModelSource("."), "processor"),
    ):
        raise RuntimeError("operator torchvision::nms does not exist")


@pytest.fixture
def sharded(torch, copied):
    """A copy whose weights lie in two files, named by an index."""
    import safetensors.torch

    weights = list(weights_in(copied).items())
    weight_map = {}
    for number, part in enumerate((weights[::2], weights[1::2])):
        name = f"model-0000{number + 1}-of-00002.safetensors"
        safetensors.torch.save_file(dict(part), copied / name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(dict(part), name)
    (copied / "model.safetensors").unlink()
    (copied / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return copied


def point_to(folder, name):
    """Let the index name this file for all that lay in the first shard."""
    index = json.loads((folder / INDEX).read_text())
    first = "model-00001-of-00002.safetensors"
    index["weight_map"] = {key: name if at == first else at for key, at in index["weight_map"].items()}
    (folder / INDEX).write_text(json.dumps(index))
    return folder / first


def test_shards_are_loaded_and_each_is_in_the_revision(torch, sharded, model_folder):
    """A sharded model is the same model, and another weight in any shard another revision."""
    assert torch.equal(load(sharded).lm_head.weight, load(model_folder).lm_head.weight)
    revisions = {exact_revision(ModelSource(str(sharded)))}
    for shard in sorted(sharded.glob("*.safetensors")):
        flip_bit(shard, -1)
        revisions.add(exact_revision(ModelSource(str(sharded))))
    assert len(revisions) == 3


@pytest.mark.parametrize("name", ["w.bin", "../elsewhere.safetensors", "sub/w.safetensors", "{absolute}", 7])
def test_an_index_names_safetensors_of_the_folder_alone(torch, sharded, name):
    """Neither a pickle, nor a file outside, nor one that is not in the revision."""
    import safetensors.torch

    outside = sharded.parent / "elsewhere.safetensors"
    name = name.format(absolute=outside) if isinstance(name, str) else name
    shard = point_to(sharded, name)
    outside.write_bytes(shard.read_bytes())
    (sharded / "sub").mkdir()
    (sharded / "sub" / "w.safetensors").write_bytes(shard.read_bytes())
    torch.save(safetensors.torch.load_file(shard), sharded / "w.bin")
    for attempt in (lambda: exact_revision(ModelSource(str(sharded))), lambda: load(sharded)):
        with pytest.raises(ModelLoadError, match="Only safetensors files that lie directly in"):
            attempt()


@pytest.mark.parametrize("chosen", ["adapter_model.bin", "../elsewhere.safetensors", "sub/w.safetensors"])
def test_a_configuration_names_safetensors_of_the_folder_alone(copied, chosen):
    """transformers takes the weights that a configuration names before all others."""
    config = json.loads((copied / "config.json").read_text())
    (copied / "config.json").write_text(json.dumps(config | {"transformers_weights": chosen}))
    for attempt in (lambda: exact_revision(ModelSource(str(copied))), lambda: load(copied)):
        with pytest.raises(ModelLoadError, match=r"config\.json names the weights"):
            attempt()


def test_an_adapter_is_refused(copied):
    """It would load the weights of a model that it names, from anywhere."""
    (copied / "adapter_config.json").write_text('{"base_model_name_or_path": "/elsewhere"}')
    for attempt in (lambda: exact_revision(ModelSource(str(copied))), lambda: load(copied)):
        with pytest.raises(ModelLoadError, match="it is an adapter"):
            attempt()


@pytest.mark.parametrize(
    ("method", "of", "way"),
    [
        ("awq", None, r".*`make vllm`"),
        ("fp8", "text_config", r".*`make vllm`"),
        ("bitsandbytes", None, r"[^,]*, and in the run's own process[^,]*$"),
    ],
)
def test_quantized_weights_are_refused(method, of, way, copied):
    """They need other packages and other number formats: the sentence says what runs them, if anything."""
    config = json.loads((copied / "config.json").read_text())
    part = config if of is None else config[of]
    part["quantization_config"] = {"quant_method": method}
    (copied / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelLoadError, match=rf"quantized \({method}\){way}"):
        load(copied)


def test_quantized_weights_of_which_the_configuration_says_nothing_are_refused(torch, copied):
    """Loaded without their scales they are other numbers of the right shape, and every answer is nonsense."""
    import safetensors.torch

    weights, name = weights_in(copied), "model.text_model.layers.0.mlp.up_proj.weight"
    scale = weights[name].abs().max() / 448
    weights[name] = (weights[name] / scale).to(torch.float8_e4m3fn)
    weights[f"{name}_scale"] = scale
    safetensors.torch.save_file(weights, copied / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelLoadError, match="weights are quantized"):
        load(copied)


def test_torch_for_cpus_beside_a_gpu_is_refused(torch, model_folder, monkeypatch):
    """The driver shows a GPU, and torch cannot use it: said before anything is loaded."""
    from transformers import AutoModelForImageTextToText

    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(ModelLoadError, match="is built for CPUs alone"):
        load_model(ModelSource(str(model_folder)), AutoModelForImageTextToText, device="cuda")


def test_nothing_is_unpickled_by_a_door_that_nobody_thought_of(torch, copied, monkeypatch):
    """A part of transformers that reads a pickle by itself is refused; torch.load works again afterwards."""
    from transformers import AutoModelForImageTextToText

    torch.save({}, copied / "w.bin")
    whole, before = AutoModelForImageTextToText.from_pretrained, torch.load
    monkeypatch.setattr(
        AutoModelForImageTextToText,
        "from_pretrained",
        lambda *args, **options: (torch.load(copied / "w.bin"), whole(*args, **options)),
    )
    with pytest.raises(ModelLoadError, match="not in the safetensors format"):
        load(copied)
    assert torch.load is before


def test_a_model_of_the_hub_is_held_to_the_same(sharded, monkeypatch):
    """What is downloaded may name a pickle too."""
    from transformers import AutoModelForImageTextToText, utils

    point_to(sharded, "w.bin")
    monkeypatch.setattr(model_loading, "exact_revision", lambda source: "0" * 40)
    monkeypatch.setattr(
        utils, "cached_file", lambda model, name, **_: sharded / name if (sharded / name).exists() else None
    )
    with pytest.raises(ModelLoadError, match="Only safetensors"):
        load_model(ModelSource("owner/name"), AutoModelForImageTextToText, device="cpu")


def test_every_file_that_is_opened_is_in_the_revision(model_folder, tmp_path, opened_files):
    """The loader reads no file of a model that could change without another revision."""
    from transformers import AutoModelForImageTextToText

    folder = shutil.copytree(model_folder, tmp_path / "model")
    source = ModelSource(str(folder))
    with opened_files(tmp_path) as opened:
        load_processor(source)
        load_model(source, AutoModelForImageTextToText, device="cpu")
    assert len(opened) > 2
    assert opened <= {str(path) for path in deciding_files(folder)}


def test_cuda_that_does_not_answer_is_one_sentence(torch, model_folder, monkeypatch):
    """A driver older than torch's build, or one that hangs back, is named with what to do."""
    from transformers import AutoModelForImageTextToText

    def init():
        raise RuntimeError("The NVIDIA driver on your system is too old\n(found version 12040).")

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "init", init)
    with pytest.raises(ModelLoadError, match=r"CUDA does not answer torch .* too old \(found version 12040"):
        load_model(ModelSource(str(model_folder)), AutoModelForImageTextToText, device="cuda")


def test_an_older_torch_gives_pinned_memory_back_too(torch, monkeypatch):
    """torch 2.11 has no ``torch.accelerator.empty_host_cache``; under its name there, or not at all."""
    called = []
    monkeypatch.setattr(torch.accelerator, "empty_host_cache", lambda: called.append("new"), raising=False)
    model_loading.empty_host_cache()
    monkeypatch.delattr(torch.accelerator, "empty_host_cache")
    monkeypatch.setattr(torch._C, "_host_emptyCache", lambda: called.append("old"), raising=False)
    model_loading.empty_host_cache()
    monkeypatch.delattr(torch._C, "_host_emptyCache")
    model_loading.empty_host_cache()
    assert called == ["new", "old"]
