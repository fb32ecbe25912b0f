"""Families of models with random weights, through the same path as the example model."""

import copy
from typing import Literal

import pydantic
import pytest

from resources.vlm.embedder import TextEmbedder
from resources.vlm.engine import Attempt
from resources.vlm.model_loading import ModelSource
from resources.vlm.prompt import Prompt
from resources.vlm.schema import DescriptionSchema
from resources.vlm.transformers_engine import TransformersEngine

TEMPLATE = (
    "{% for message in messages %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}IMAGE{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endfor %}<|answer|>"
)
VISION = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
    "image_size": 32, "patch_size": 8,
}  # fmt: skip
TEXT = {
    "vocab_size": 352, "hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 1024,
    "initializer_range": 0.2, "pad_token_id": 0, "bos_token_id": None, "eos_token_id": 2,
}  # fmt: skip


class House(pydantic.BaseModel):
    """A short answer."""

    roof: Literal["flat", "hip"]
    name: str = pydantic.Field(max_length=8)


def save_llava(folder, tokenizer):
    from transformers import CLIPImageProcessor, LlavaConfig, LlavaForConditionalGeneration, LlavaProcessor

    config = LlavaConfig(
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        image_seq_length=16,
        vision_config={"model_type": "clip_vision_model", **VISION},
        text_config={"model_type": "llama", **TEXT},
    )
    LlavaForConditionalGeneration(config).save_pretrained(folder)
    LlavaProcessor(
        image_processor=CLIPImageProcessor(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32}),
        tokenizer=tokenizer,
        patch_size=8,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=TEMPLATE.replace("IMAGE", "<image>"),
    ).save_pretrained(folder)


def save_gemma3(folder, tokenizer):
    from transformers import (
        Gemma3Config,
        Gemma3ForConditionalGeneration,
        Gemma3ImageProcessor,
        Gemma3Processor,
        PreTrainedTokenizerFast,
    )

    named = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer.backend_tokenizer,
        pad_token="<pad>",
        eos_token="<|end|>",
        extra_special_tokens={"boi_token": "<boi>", "eoi_token": "<eoi>", "image_token": "<image>"},
    )
    config = Gemma3Config(
        image_token_id=named.convert_tokens_to_ids("<image>"),
        boi_token_index=named.convert_tokens_to_ids("<boi>"),
        eoi_token_index=named.convert_tokens_to_ids("<eoi>"),
        mm_tokens_per_image=4,
        vision_config={"model_type": "siglip_vision_model", **VISION},
        text_config={"head_dim": 12, "sliding_window": 64, **TEXT},
    )
    Gemma3ForConditionalGeneration(config).save_pretrained(folder)
    Gemma3Processor(
        image_processor=Gemma3ImageProcessor(size={"height": 32, "width": 32}),
        tokenizer=named,
        image_seq_length=4,
        chat_template=TEMPLATE.replace("IMAGE", "<boi>"),
    ).save_pretrained(folder)


@pytest.mark.parametrize("save", [save_llava, save_gemma3])
def test_family(save, tmp_path, tokenizer, load_property):
    """Another family answers by the schema, alone as in a batch, and its language layers embed."""
    import torch

    torch.manual_seed(3)
    save(tmp_path, copy.deepcopy(tokenizer))
    schema = DescriptionSchema(House)
    source = ModelSource(str(tmp_path))
    engine = TransformersEngine(source, schema=schema, prompt=Prompt("Describe."), device="cpu")
    batch = [load_property(f"property {at}", at) for at in (1, 3, 2)]
    attempt = Attempt(number=1, max_new_tokens=60)
    answers = engine.describe(batch, attempt=attempt)
    assert answers == [engine.describe([one], attempt=attempt)[0] for one in batch]
    assert all(set(schema.parse(answer.text)) == {"roof", "name"} for answer in answers)
    assert TextEmbedder(source, device="cpu").embed(["a house"]).shape == (1, 48)
