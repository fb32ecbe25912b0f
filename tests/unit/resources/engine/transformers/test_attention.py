"""Which attention a model computes with."""

import pytest

from resources.engine.model_source import ModelSource
from resources.engine.transformers.attention import prefer_flash_attention
from resources.engine.transformers.model_loading import load_model


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
    monkeypatch.delattr(torch.nn.Module, "to")  # which moves a model that the host holds as a whole
    try:
        model = load_model(ModelSource(str(model_folder)), AutoModel, device="meta")
        assert {one.device.type for one in model.parameters()} == {"meta"}
        assert not torch.backends.cuda.cudnn_sdp_enabled()
    finally:
        torch.backends.cuda.enable_cudnn_sdp(True)
