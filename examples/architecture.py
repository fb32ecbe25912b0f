"""The example model before it has learned anything: its shape, its tokens, its chat format.

What lives here: configuration, tokenizer, processor, and the encoding of one training example. What does
not: the training (training.py). The classes are those of transformers, so that what is saved loads through
``from_pretrained`` like any model from a hub.
"""

from __future__ import annotations

import json
import random
from collections.abc import Collection, Iterable, Sequence
from typing import Any, Final

from examples.truth import draw_truth
from vlm_assets.config.property_description import PropertyDescription
from vlm_assets.config.settings import EXAMPLE_MODEL
from vlm_engine.schema import description_text

IMAGE_SIDE: Final = 64
"""Width and height in pixels of an image as the model sees it."""

_PATCH, _HIDDEN, _VOCABULARY = 16, 128, 896
_HALF: Final = 88
_ADDED_TO_THE_STREAM: Final = (".out_proj.", ".fc2.", ".o_proj.", ".down_proj.")
"""What of a layer is added to the states that it is given: where it is zero, the layer changes nothing."""
_SPECIAL: Final = (
    "<pad>",
    "<eos>",
    "<end_of_utterance>",
    "<fake_token_around_image>",
    "<global-img>",
    "<image>",
)

CHAT_TEMPLATE: Final = (
    "{%- for message in messages -%}"
    "{%- if message['role'] == 'user' and message['content'] is not string -%}"
    "{%- for part in message['content'] -%}"
    "{%- if part['type'] == 'image' -%}<image>{%- endif -%}"
    "{%- endfor -%}"
    "{%- elif message['role'] == 'assistant' -%}"
    "<end_of_utterance>"
    "{%- if message['content'] is string -%}{{ message['content'] }}"
    "{%- else -%}{%- for part in message['content'] -%}{{ part['text'] }}{%- endfor -%}{%- endif -%}"
    "<eos>"
    "{%- endif -%}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}<end_of_utterance>{%- endif -%}"
)
"""The images and nothing else: the model knows one task, so the text of the question is left out."""


def answer_text(description: PropertyDescription, fields: Collection[str] | None = None) -> str:
    """The answer to learn: compact JSON, fields in schema order, as it is decoded and embedded.

    fields: those that are asked for; None: all.
    """
    return description_text(description.model_dump(include=None if fields is None else set(fields)))


def build_tokenizer(*, properties: int = 3000, parts: bool = False) -> Any:
    """A byte-level BPE tokenizer trained on answers. Any text can be encoded; answers take few tokens.

    parts: also on answers of single fields, so that each has one way to begin, whatever is asked for.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    # A field's name with its punctuation is one piece, a value another: no token spans two fields.
    pieces = Regex(r'[{,]?"[a-z_]+":"?|[a-z_0-9]+"?| ?[A-Za-z]+| ?[0-9]|[^A-Za-z0-9 ]+| ')
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(pieces, behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=_VOCABULARY,
        special_tokens=list(_SPECIAL),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_texts(properties, parts=parts), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=_SPECIAL[0],
        eos_token=_SPECIAL[1],
        additional_special_tokens=list(_SPECIAL[2:]),
        padding_side="left",
        model_max_length=4096,
        clean_up_tokenization_spaces=False,
    )


def _texts(properties: int, *, parts: bool) -> Iterable[str]:
    for index in range(properties):
        truth = draw_truth("training", 0, index)
        yield answer_text(truth)
        if parts:
            yield from (answer_text(truth, [name]) for name in PropertyDescription.model_fields)


def build_processor(tokenizer: Any) -> Any:
    """The processor: images squeezed to one size, never split, one token an image."""
    from transformers import Idefics3Processor
    from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

    images = Idefics3ImageProcessorPil(
        size={"height": IMAGE_SIDE, "width": IMAGE_SIDE},
        max_image_size={"longest_edge": IMAGE_SIDE},
        do_image_splitting=False,
        image_mean=[0.5, 0.5, 0.5],
        image_std=[0.5, 0.5, 0.5],
    )
    return Idefics3Processor(images, tokenizer, image_seq_len=1, chat_template=CHAT_TEMPLATE)


def example() -> tuple[Any, Any]:
    """The example model with random weights, and its processor: the base of its training."""
    tokenizer = build_tokenizer()
    return build_model(tokenizer), build_processor(tokenizer)


def student() -> tuple[Any, Any]:
    """The same with half as many weights."""
    tokenizer = build_tokenizer()
    return build_model(tokenizer, hidden=_HALF), build_processor(tokenizer)


def larger() -> tuple[Any, Any]:
    """The trained example model with more layers, which change nothing before they have learned something.

    Its tokenizer knows how an answer of any field begins.
    """
    import torch
    from transformers import AutoModelForImageTextToText, AutoTokenizer

    trained = AutoModelForImageTextToText.from_pretrained(EXAMPLE_MODEL, local_files_only=True).state_dict()
    vocabulary = AutoTokenizer.from_pretrained(EXAMPLE_MODEL, local_files_only=True).get_vocab()
    tokenizer = build_tokenizer(parts=True)
    model = build_model(tokenizer, vision_layers=5, text_layers=5)
    with torch.no_grad():
        for name, weights in model.state_dict().items():
            if name.endswith(("embed_tokens.weight", "lm_head.weight")):
                for token, row in tokenizer.get_vocab().items():
                    if token in vocabulary:
                        weights[row] = trained[name][vocabulary[token]]
            elif name in trained:
                weights.copy_(trained[name])
            elif any(part in name for part in _ADDED_TO_THE_STREAM):
                weights.zero_()
    return model, build_processor(tokenizer)


def build_model(
    tokenizer: Any, *, hidden: int = _HIDDEN, vision_layers: int = 3, text_layers: int = 4
) -> Any:
    """The model with random weights: by default three vision and four text layers, 128 wide."""
    from transformers import Idefics3Config, Idefics3ForConditionalGeneration, LlamaConfig
    from transformers.models.idefics3.configuration_idefics3 import Idefics3VisionConfig

    special = {name: tokenizer.convert_tokens_to_ids(name) for name in _SPECIAL}
    config = Idefics3Config(
        vision_config=Idefics3VisionConfig(
            hidden_size=hidden,
            intermediate_size=4 * hidden,
            num_hidden_layers=vision_layers,
            num_attention_heads=4,
            image_size=IMAGE_SIDE,
            patch_size=_PATCH,
        ).to_dict(),
        text_config=LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=hidden,
            intermediate_size=3 * hidden,
            num_hidden_layers=text_layers,
            num_attention_heads=4,
            num_key_value_heads=4,
            max_position_embeddings=4096,
            pad_token_id=special["<pad>"],
            bos_token_id=None,
            eos_token_id=special["<eos>"],
        ).to_dict(),
        scale_factor=IMAGE_SIDE // _PATCH,
        image_token_id=special["<image>"],
        pad_token_id=special["<pad>"],
        eos_token_id=special["<eos>"],
        bos_token_id=None,
    )
    model = Idefics3ForConditionalGeneration(config)
    model.generation_config.eos_token_id = special["<eos>"]
    model.generation_config.pad_token_id = special["<pad>"]
    model.generation_config.max_new_tokens = 256
    return model


def prompt_ids(tokenizer: Any, images: int) -> list[int]:
    """Token ids of the prompt for a number of images, as the processor makes them."""
    one = ["<fake_token_around_image>", "<global-img>", "<image>", "<fake_token_around_image>"]
    ids: list[int] = tokenizer.convert_tokens_to_ids([*(one * images), "<end_of_utterance>"])
    return ids


def answer_ids(
    tokenizer: Any,
    description: PropertyDescription,
    unseen: Sequence[str],
    fields: Collection[str] | None = None,
) -> tuple[list[int], list[bool]]:
    """Token ids of an answer with its end, and for each whether it can be known from the images given.

    The values of the ``unseen`` fields cannot. fields: those that are asked for; None: all.
    """
    text = answer_text(description, fields)
    hidden: list[tuple[int, int]] = []
    for name in unseen:
        if fields is not None and name not in fields:
            continue
        value = json.dumps(getattr(description, name), ensure_ascii=False)
        start = text.index(f'"{name}":') + len(name) + 3
        # The opening quote of a value is one token with the name, and can be known.
        hidden.append((start + value.startswith('"'), start + len(value)))
    encoded = tokenizer(text, return_offsets_mapping=True)
    knowable = [
        not any(begin < stop and end > start for start, stop in hidden)
        for begin, end in encoded["offset_mapping"]
    ]
    return [*encoded["input_ids"], tokenizer.eos_token_id], [*knowable, True]


def kept_views(views: Sequence[str], rng: random.Random) -> tuple[str, ...]:
    """The views of one training example: mostly all, sometimes a few are missing, sometimes one is left."""
    draw = rng.random()
    if draw < 0.78:
        return tuple(views)
    if draw < 0.86:
        return (rng.choice(views),)
    kept = tuple(view for view in views if rng.random() < 0.75)
    return kept or (rng.choice(views),)
