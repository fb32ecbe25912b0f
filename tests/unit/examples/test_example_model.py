"""The shipped model: small, loaded like any other, right on properties it was never trained on."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import examples
from examples.architecture import answer_ids, answer_text, prompt_ids
from examples.evaluation import ask, embed, lift
from examples.scenes import draw_property, encode_photo, render
from examples.truth import FIELDS, draw_truth, known
from vlm_assets.config.property_description import PropertyDescription

FOLDER = Path(examples.__file__).with_name("model")
SEED = 424_242


@pytest.fixture(scope="module")
def loaded() -> tuple[Any, Any]:
    """Model and processor through the classes that any hub model takes."""
    from transformers import AutoModelForImageTextToText, AutoProcessor

    processor = AutoProcessor.from_pretrained(FOLDER, local_files_only=True)
    return AutoModelForImageTextToText.from_pretrained(FOLDER, local_files_only=True).eval(), processor


def test_the_folder_is_small_and_has_no_code() -> None:
    """It is shipped in the repository: 10 MB at most, safetensors only, with its card."""
    files = {path.name: path.stat().st_size for path in FOLDER.iterdir()}
    assert sum(files.values()) <= 10_000_000
    assert {"model.safetensors", "config.json", "tokenizer.json", "README.md"} <= set(files)
    assert not [name for name in files if name.endswith((".bin", ".pt", ".py", ".pkl"))]


def test_properties_never_trained_on_are_described_right(loaded: tuple[Any, Any]) -> None:
    """Unguided greedy answers fit the schema, and 97 of 100 fields are right."""
    homes = [draw_property("example", SEED, index) for index in range(9)]
    answers = ask(*loaded, [[encode_photo(render(home, view)) for view in home.views] for home in homes])
    assert all(answer is not None for answer in answers)
    right = [
        known(answer)[name] == known(home.truth)[name]
        for answer, home in zip(answers, homes, strict=True)
        if answer is not None
        for name in FIELDS
    ]
    assert np.mean(right) >= 0.97


def test_one_photo_is_enough_for_a_valid_answer(loaded: tuple[Any, Any]) -> None:
    """What no photo shows is guessed, but the answer still fits the schema."""
    homes = [draw_property("example", SEED, index) for index in range(4)]
    batch = [[encode_photo(render(home, home.views[2 * index]))] for index, home in enumerate(homes)]
    assert all(answer is not None for answer in ask(*loaded, batch))


def test_the_question_does_not_change_the_prompt(loaded: tuple[Any, Any]) -> None:
    """The model card says that the text of the question is left out; images and order are kept."""
    _, processor = loaded
    asked = [{"type": "image"}, {"type": "image"}, {"type": "text", "text": "Is there a cellar?"}]
    silent = [{"type": "image"}, {"type": "image"}]
    with_text, without = (
        processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
        for content in (asked, silent)
    )
    assert with_text == without == "<image><image><end_of_utterance>"


def test_training_encodes_the_prompt_as_the_processor_does(loaded: tuple[Any, Any]) -> None:
    """The model is asked exactly what it was trained on."""
    _, processor = loaded
    photos = [Image.new("RGB", (320, 240), (90, 120, 200))] * 3
    inputs = processor(text="<image><image><image><end_of_utterance>", images=[photos])
    assert inputs["input_ids"][0] == prompt_ids(processor.tokenizer, 3)
    assert np.asarray(inputs["pixel_values"]).shape == (1, 3, 3, 64, 64)


def test_unseen_fields_are_known_as_such(loaded: tuple[Any, Any]) -> None:
    """Only the tokens of those values: all others, and the end, follow from the images."""
    tokenizer = loaded[1].tokenizer
    truth = draw_truth("example", SEED, 0)
    ids, knowable = answer_ids(tokenizer, truth, ["garden", "floors"])
    guessed = [tokenizer.decode([token]) for token, known_ in zip(ids, knowable, strict=True) if not known_]
    assert guessed == [str(truth.floors), f'{truth.garden}"']
    assert tokenizer.decode(ids[:-1]) == answer_text(truth)
    assert ids[-1] == tokenizer.eos_token_id


def test_guided_decoding_allows_what_was_learned(loaded: tuple[Any, Any]) -> None:
    """xgrammar's compact form of the schema accepts every answer, token by token, to the end."""
    import xgrammar

    tokenizer = loaded[1].tokenizer
    info = xgrammar.TokenizerInfo.from_huggingface(tokenizer, stop_token_ids=[tokenizer.eos_token_id])
    grammar = xgrammar.GrammarCompiler(info).compile_json_schema(
        json.dumps(PropertyDescription.model_json_schema()), any_whitespace=False, separators=(",", ":")
    )
    for index in range(20):
        matcher = xgrammar.GrammarMatcher(grammar)
        ids, _ = answer_ids(tokenizer, draw_truth("example", SEED, index), [])
        assert all(matcher.accept_token(token) for token in ids)
        assert matcher.is_terminated()


def test_any_text_survives_the_tokenizer(loaded: tuple[Any, Any]) -> None:
    """Texts of another schema are embedded too: every byte has a token."""
    tokenizer = loaded[1].tokenizer
    text = 'Zürich, 東京\n{"rooms": 3.5, "note": "20% off…"}'
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_embeddings_of_like_properties_are_alike(loaded: tuple[Any, Any]) -> None:
    """Over 240 properties the nearest neighbours agree on fields far above chance (0.5 is asked for)."""
    truths = [draw_truth("example", SEED, index) for index in range(240)]
    embeddings = embed(*loaded, [answer_text(truth) for truth in truths])
    assert np.allclose(np.linalg.norm(embeddings, axis=1), 1, atol=1e-5)
    assert lift(embeddings, truths) > 0.5
