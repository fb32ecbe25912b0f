"""Which attention a model computes with."""

import pytest

from vlm_engine.model_source import ModelSource
from vlm_engine.transformers import attention
from vlm_engine.transformers.attention import (
    attend_as_shipped,
    attend_to_images_by_length,
    prefer_flash_attention,
)
from vlm_engine.transformers.model_loading import load_model


@pytest.fixture
def model(model_folder):
    import torch
    from transformers import AutoModelForImageTextToText

    return AutoModelForImageTextToText.from_pretrained(model_folder, dtype=torch.bfloat16)


@pytest.fixture
def asked(model, monkeypatch):
    """What the model was asked to use, on a machine that seems to have flash attention."""
    asked = []
    monkeypatch.setattr("transformers.utils.is_flash_attn_2_available", lambda: True)
    use = type(model).set_attn_implementation
    monkeypatch.setattr(
        type(model), "set_attn_implementation", lambda self, name: asked.append(name) or use(self, name)
    )
    return asked


def test_a_package_that_fails_costs_nothing(model, asked):
    """Where flash attention seems installed and does not load, the model goes on with what it had."""
    prefer_flash_attention(model)
    assert asked == [{"vision_config": "sdpa"}]
    assert model.config.vision_config._attn_implementation == "sdpa"


def test_images_alone_are_looked_at_with_it(model, asked, monkeypatch):
    """A padded answer's steps would wait for the device in each layer, so the layers that answer stay."""
    monkeypatch.setattr("transformers.modeling_flash_attention_utils.lazy_import_flash_attention", id)
    monkeypatch.setattr(type(model), "_flash_attn_can_dispatch", lambda *_, **__: True)
    monkeypatch.setattr(type(model.model.vision_model), "_flash_attn_can_dispatch", lambda *_, **__: True)
    prefer_flash_attention(model)
    assert model.config.vision_config._attn_implementation == "flash_attention_2"
    assert model.config.text_config._attn_implementation == "sdpa"
    assert model.config._attn_implementation == "sdpa"


def test_it_is_not_asked_for_where_it_would_not_do(model, asked):
    """Not in float32, which it does not compute."""
    prefer_flash_attention(model.float())
    assert asked == []


def test_a_model_for_a_gpu_is_computed_without_plans(model_folder, monkeypatch):
    """A GPU's weights go straight to it, and cuDNN does not plan anew for each length."""
    import torch
    from transformers import AutoModel

    assert torch.backends.cuda.cudnn_sdp_enabled()
    monkeypatch.setattr(torch.version, "cuda", "13.0")  # as on a machine with a GPU
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.delattr(torch.nn.Module, "to")  # which moves a model that the host holds as a whole
    try:
        model = load_model(ModelSource(str(model_folder)), AutoModel, device="meta")
        assert {one.device.type for one in model.parameters()} == {"meta"}
        assert not torch.backends.cuda.cudnn_sdp_enabled()
    finally:
        torch.backends.cuda.enable_cudnn_sdp(True)


@pytest.fixture(params=["Qwen2_5_VL", "Qwen3VL"])
def qwen(request):
    """A tiny model whose images, or windows of them, are sequences of their own."""
    import torch
    import transformers

    torch.manual_seed(3)
    vision = {"depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "patch_size": 8}
    windows = {"window_size": 32, "fullatt_block_indexes": [1]} if request.param == "Qwen2_5_VL" else {}
    config = getattr(transformers, f"{request.param}Config")(
        vision_config={**vision, **windows, "out_hidden_size": 32},
        text_config={
            "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1,
            "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]},
        },
    )  # fmt: skip
    return getattr(transformers, f"{request.param}ForConditionalGeneration")(config).eval()


def test_images_of_one_length_are_looked_at_together(qwen, monkeypatch):
    """Features are those of an image after another, in as few questions as there are lengths, or parts."""
    import torch

    grid = torch.tensor([[1, 10, 12], [1, 4, 4], [1, 10, 12], [1, 4, 26]])  # patches of four images
    pixels = torch.randn(int(grid.prod(dim=1).sum()), 3 * 2 * 8 * 8)
    asked = []
    ask = torch.nn.functional.scaled_dot_product_attention

    def counted(query, *given, **named):
        asked.append(query.shape[0] * query.shape[2])
        return ask(query, *given, **named)

    def features():
        asked.clear()
        with torch.inference_mode():
            return qwen.get_image_features(pixels, grid).pooler_output

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", counted)
    singly, questions = features(), len(asked)
    attend_to_images_by_length(qwen)
    together = features()
    assert len(asked) < questions / 1.2
    for one, other in zip(singly, together, strict=True):
        assert torch.allclose(one, other, atol=1e-5)
    monkeypatch.setattr(attention, "_TOGETHER", 60)
    assert torch.equal(torch.cat(features()), torch.cat(together))
    assert max(asked) <= 120  # one that is longer is asked about alone
    assert attend_as_shipped(qwen)
    assert torch.equal(torch.cat(features()), torch.cat(singly))
    assert len(asked) == questions


def test_a_family_that_pads_its_images_keeps_its_attention(model):
    """Where images are rows of a tensor there is nothing to gain, and a mask that must be looked at."""
    attend_to_images_by_length(model)
    assert model.config.vision_config._attn_implementation == "sdpa"
