"""Which attention a model computes with."""

import pytest

from resources.vlm.in_process.attention import prefer_flash_attention


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
    assert asked == ["flash_attention_2", "sdpa"]
    assert model.config.text_config._attn_implementation == "sdpa"


def test_it_is_not_asked_for_where_it_would_not_do(model, asked, monkeypatch):
    """Neither in float32, nor for a family whose masks are more than causal."""
    prefer_flash_attention(model.float())
    monkeypatch.setattr(type(model), "create_masks_for_generate", None, raising=False)
    prefer_flash_attention(model.bfloat16())
    assert asked == []
