"""A tiny Idefics3 with random weights and a byte-level tokenizer, saved as any model folder is."""

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import numpy as np
import pytest

CHAT_TEMPLATE = (
    "{% for message in messages %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<image>{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endfor %}{% if add_generation_prompt %}<|answer|>{% endif %}"
)


def tiny_tokenizer():
    """A byte-level BPE of about 300 tokens, learned from a few answers."""
    import transformers
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    specials = ["<pad>", "<|answer|>", "<|end|>", "<image>", "<fake_token_around_image>", "<global-img>"]
    trainer = trainers.BpeTrainer(
        vocab_size=310, special_tokens=specials, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    answers = [
        json.dumps({"roof": "flat", "storeys": n, "name": "house"}, separators=(",", ":")) for n in range(5)
    ]
    tokenizer.train_from_iterator([*answers, "Describe the property."], trainer)
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<|end|>",
        additional_special_tokens=specials[1:2] + specials[3:],
    )


def save_tiny_idefics3(folder: Path) -> Path:
    """Save a random Idefics3 of 97 thousand parameters, its logits wider than the tokenizer's vocabulary."""
    import torch
    from transformers import (
        GenerationConfig,
        Idefics3Config,
        Idefics3ForConditionalGeneration,
        Idefics3ImageProcessor,
        Idefics3Processor,
    )

    torch.manual_seed(7)
    tokenizer = tiny_tokenizer()
    config = Idefics3Config(
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        scale_factor=2,
        vision_config={
            "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2,
            "image_size": 32, "patch_size": 8,
        },
        text_config={
            "model_type": "llama", "vocab_size": 352, "hidden_size": 48, "intermediate_size": 96,
            "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
            "max_position_embeddings": 1024, "pad_token_id": tokenizer.pad_token_id,
            "bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "initializer_range": 0.2,
        },
    )  # fmt: skip
    model = Idefics3ForConditionalGeneration(config)
    model.generation_config = GenerationConfig(
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    model.save_pretrained(folder)
    Idefics3Processor(
        image_processor=Idefics3ImageProcessor(
            size={"longest_edge": 32}, max_image_size={"longest_edge": 32}, do_image_splitting=False
        ),
        tokenizer=tokenizer,
        image_seq_len=4,
        chat_template=CHAT_TEMPLATE,
    ).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory) -> Path:
    """A tiny model as a local folder."""
    return save_tiny_idefics3(tmp_path_factory.mktemp("models") / "tiny-idefics3")


@pytest.fixture(scope="session")
def load_property():
    """Make a property with so many random images, the same for the same id."""
    from vlm_engine.images.images import LoadedProperty

    def load(property_id: str, images: int, *, failed=()) -> LoadedProperty:
        random = np.random.default_rng(list(property_id.encode()))
        pixels = [
            random.integers(0, 256, (*random.integers(20, 70, 2), 3), dtype=np.uint8) for _ in range(images)
        ]
        return LoadedProperty(property_id, len(property_id), pixels, images, tuple(failed), 0.0)

    return load


@pytest.fixture(scope="session")
def tokenizer():
    """The tiny model's tokenizer."""
    return tiny_tokenizer()


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    """Tests of a tiny model gain nothing from threads that they would take from others."""
    import torch

    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def opened_files() -> Callable[[Path], AbstractContextManager[set[str]]]:
    """Collects the files under a folder that this process opens meanwhile.

    One hook for all tests: a process keeps every hook until it ends.
    """
    folders: dict[str, set[str]] = {}

    def hook(event: str, given: tuple) -> None:
        if folders and event == "open":
            for folder, opened in folders.items():
                if str(given[0]).startswith(folder):
                    opened.add(str(given[0]))

    sys.addaudithook(hook)

    @contextmanager
    def collected(folder: Path) -> Iterator[set[str]]:
        opened = folders[str(folder)] = set()
        yield opened
        del folders[str(folder)]

    return collected
