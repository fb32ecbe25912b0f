"""Families of models with random weights, through the same path as the example model."""

import copy
import itertools
import random
from typing import Literal

import pydantic
import pytest

from tests.support.shares import share_of
from vlm_engine.model_source import ModelSource
from vlm_engine.prompt import Prompt
from vlm_engine.protocol import Attempt
from vlm_engine.schema import DescriptionSchema
from vlm_engine.transformers import attention, drafting
from vlm_engine.transformers.drafting import Drafting, Drafts
from vlm_engine.transformers.guided import Grammar
from vlm_engine.transformers.image_tokens import processed
from vlm_engine.transformers.transformers_engine import TransformersEngine

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


PROMPT = Prompt("Describe.")
GREEDY = Attempt(number=1, max_new_tokens=60)


class House(pydantic.BaseModel):
    """A short answer."""

    roof: Literal["flat", "hip"]
    name: str = pydantic.Field(max_length=8)


SCHEMA = DescriptionSchema(House)


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
        text_config={"head_dim": 12, "sliding_window": 32, **TEXT},
    )
    Gemma3ForConditionalGeneration(config).save_pretrained(folder)
    Gemma3Processor(
        image_processor=Gemma3ImageProcessor(size={"height": 32, "width": 32}),
        tokenizer=named,
        image_seq_length=4,
        chat_template=TEMPLATE.replace("IMAGE", "<boi>"),
    ).save_pretrained(folder)


def around_qwen(tokenizer, *, name, vision):
    """An engine around a Qwen-VL in memory. Its video processor, which needs torchvision, is left out."""
    import transformers

    tokenizer.add_special_tokens({"additional_special_tokens": ["<video>", "<see>", "<seen>"]})
    tokenizer.image_token, tokenizer.video_token = "<image>", "<video>"
    names = {"image": "<image>", "video": "<video>", "vision_start": "<see>", "vision_end": "<seen>"}
    config = getattr(transformers, f"{name}Config")(
        vision_config={
            "depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "patch_size": 8,
            "out_hidden_size": 48, **vision,
        },
        text_config={
            **TEXT, "head_dim": 12,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 2, 2]},
        },
        **{f"{name}_token_id": tokenizer.convert_tokens_to_ids(token) for name, token in names.items()},
    )  # fmt: skip
    model = getattr(transformers, f"{name}ForConditionalGeneration")(config).eval()

    class ImagesOnly(getattr(transformers, f"{name}Processor")):
        def check_argument_for_proper_class(self, argument_name, argument):
            return type(argument)

    processor = ImagesOnly(
        image_processor=transformers.Qwen2VLImageProcessorPil(
            patch_size=8, size={"shortest_edge": 16 * 16, "longest_edge": 48 * 48}
        ),
        tokenizer=tokenizer,
        video_processor=None,
        chat_template=TEMPLATE.replace("IMAGE", "<see><image><seen>"),
    )
    grammar = Grammar(SCHEMA.json_schema, tokenizer, logits_width=TEXT["vocab_size"], stop_token_ids=[2])
    return TransformersEngine.around(model, processor, grammar=grammar, prompt=PROMPT, device="cpu")


def from_folder(folder):
    return TransformersEngine(ModelSource(str(folder)), schema=SCHEMA, prompt=PROMPT, device="cpu")


FAMILIES = ["idefics3", "llava", "gemma3", "qwen2.5-vl", "qwen3-vl"]


@pytest.fixture(params=share_of(FAMILIES, 2))
def engine(request, tmp_path, tokenizer):
    """The engine around a model of a family, with random weights; two or three of the families a day."""
    import torch

    torch.manual_seed(3)
    own = copy.deepcopy(tokenizer)
    match request.param:
        case "idefics3":
            return from_folder(request.getfixturevalue("model_folder"))
        case "llava":
            save_llava(tmp_path, own)
        case "gemma3":
            save_gemma3(tmp_path, own)
        case "qwen2.5-vl":
            windows = {"window_size": 32, "fullatt_block_indexes": [1]}
            return around_qwen(own, name="Qwen2_5_VL", vision=windows)
        case "qwen3-vl":
            deep = {"num_position_embeddings": 16, "deepstack_visual_indexes": [0]}
            return around_qwen(own, name="Qwen3VL", vision=deep)
    return from_folder(tmp_path)


def test_answers_follow_the_schema_and_not_the_batch(engine, load_property):
    """Each family answers by the schema, alone as in a batch."""
    batch = [load_property(f"property {at}", at) for at in (1, 3, 2)]
    answers = engine.describe(batch, attempt=GREEDY)
    assert answers == [engine.describe([one], attempt=GREEDY)[0] for one in batch]
    assert all(set(SCHEMA.parse(answer.text)) == {"roof", "name"} for answer in answers)


def test_long_prompts_are_masked_row_by_row(engine, load_property, monkeypatch):
    """No mask [rows, 1, tokens, tokens] is made of a padded batch, and each family says the same without."""
    import torch

    masks = []
    attend = torch.nn.functional.scaled_dot_product_attention

    def watched(*tensors, attn_mask=None, **options):
        if attn_mask is not None and attn_mask.shape[-2] > drafting.FEW_TOKENS:
            masks.append(tuple(attn_mask.shape))
        return attend(*tensors, attn_mask=attn_mask, **options)

    monkeypatch.setattr(drafting, "FEW_TOKENS", 1)
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", watched)
    batch = [load_property(f"property {at}", images) for at, images in enumerate((1, 3, 2, 3))]
    expected = engine.describe(batch, attempt=GREEDY)
    assert [mask for mask in masks if mask[0] == 4]
    masks.clear()
    monkeypatch.setattr(attention, "_LONG", 4)
    assert engine.describe(batch, attempt=GREEDY) == expected
    assert not [mask for mask in masks if mask[0] > 1]


def test_a_family_that_looks_into_its_mask_gets_one(engine, load_property, monkeypatch):
    """A model whose own code needs the mask as a tensor answers all the same, by transformers' attention."""
    batch = [load_property(f"property {at}", images) for at, images in enumerate((1, 3, 2))]
    expected = engine.describe(batch, attempt=GREEDY)
    layers = [one for one in engine._model.modules() if type(one).__name__.endswith("DecoderLayer")]

    def look(layer, args, kwargs):
        assert kwargs["attention_mask"] is None or kwargs["attention_mask"].dtype

    layers[0].register_forward_pre_hook(look, with_kwargs=True)
    monkeypatch.setattr(attention, "_LONG", 4)
    assert engine.describe(batch, attempt=GREEDY) == expected


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_finished_answers_leave_the_batch(engine, load_property, temperature):
    """The model computes ever fewer rows, and each text is what transformers' own decoding makes of it."""
    batch = [load_property(f"property {at}", 1 + at % 3) for at in range(5)]
    attempt = Attempt(number=1, max_new_tokens=40, temperature=temperature)
    rows = []
    engine._model.register_forward_pre_hook(
        lambda model, args, kwargs: rows.append(len(kwargs["input_ids"])), with_kwargs=True
    )
    answers = engine.describe(batch, attempt=attempt)
    left, rows[:] = list(rows), []
    engine._decodes_itself = False
    assert answers == engine.describe(batch, attempt=attempt)
    assert len({answer.output_tokens for answer in answers}) > 1
    assert set(rows) == {5}
    assert len(left) == len(rows)
    assert left == sorted(left, reverse=True)
    assert left[0] == 5
    assert left[-1] < 5


class WrongAtTimes(Drafts):
    """Guesses that know the answers, every third one of which is wrong from some token on."""

    def __init__(self, answers):
        super().__init__(6)
        self._answers, self._chance = answers, random.Random(11)

    def draft(self, answer, room):
        whole = next(known for known in self._answers if known[: len(answer)] == list(answer))
        tokens = whole[len(answer) :][: min(room, self._chance.randrange(6))]
        if tokens and not self._chance.randrange(3):
            at = self._chance.randrange(len(tokens))
            tokens[at:] = [self._chance.randrange(10, 300) for _ in tokens[at:]]
        return tokens


@pytest.fixture
def widths(engine):
    """Tokens of each row of each step, the prompt's included."""
    widths = []
    engine._model.register_forward_pre_hook(
        lambda model, args, kwargs: widths.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    return widths


@pytest.mark.parametrize("images", [(1, 2, 3), (2, 2, 1, 3, 1, 2, 3, 1, 1)])
def test_guesses_change_nothing_of_what_is_said(engine, load_property, monkeypatch, widths, images):
    """Each family says the same in fewer steps, wrong guesses, holes and rows that leave notwithstanding.

    Keys and values of several heads are used as they lie in the cache, and never copied for each. (In
    steps of one token transformers 5.17 copies them.)
    """
    from transformers.integrations import sdpa_attention

    batch = [load_property(f"property {at}", number) for at, number in enumerate(images)]
    tokens = []
    answer = engine._answer
    with monkeypatch.context() as watched:
        watched.setattr(engine, "_answer", lambda said, *rest: tokens.append(said) or answer(said, *rest))
        expected = engine.describe(batch, attempt=GREEDY)
    plain, widths[:] = len(widths), []
    monkeypatch.setattr(engine.drafting, "drafts", WrongAtTimes(tokens))
    monkeypatch.setattr(drafting, "FEW_HOLES", 3)
    columns = []  # of the cache, before each step

    def count_columns(model, args, kwargs):
        columns.append(kwargs["attention_mask"].shape[1] - kwargs["input_ids"].shape[1])

    engine._model.register_forward_pre_hook(count_columns, with_kwargs=True)
    if hasattr(sdpa_attention, "pack_gqa"):
        monkeypatch.setattr(sdpa_attention, "repeat_kv", None)
    assert engine.describe(batch, attempt=GREEDY) == expected
    if "Gemma3" in type(engine._model).__name__:  # its windows count columns
        assert len(widths) == plain
    else:
        assert len(widths) < plain
        assert max(widths[1:]) > 3
        # Holes that were closed leave fewer columns in the cache.
        assert any(after < before for before, after in itertools.pairwise(columns)) or len(images) < 9


def test_answers_teach_the_next_ones(engine, load_property, monkeypatch, widths):
    """What one batch says, the next one is guessed from; retries, which are drawn, are not."""
    batch = [load_property(f"property {at}", 2) for at in range(3)]
    monkeypatch.setattr(engine, "drafting", Drafting(engine._model, 5))
    expected = engine.describe(batch, attempt=GREEDY)
    first, widths[:] = len(widths), []
    assert engine.describe(batch, attempt=GREEDY) == expected
    assert len(widths) < first or "Gemma3" in type(engine._model).__name__
    widths.clear()
    drawn = Attempt(number=2, max_new_tokens=60, temperature=1.0)
    engine.describe(batch, attempt=drawn)
    assert set(widths[1:]) == {1}


def test_guesses_end_where_an_answer_must(engine, load_property, monkeypatch):
    """An answer that is cut off is cut off at the same token, however many were guessed beyond it."""
    batch = [load_property(f"property {at}", 1 + at) for at in range(3)]
    for limit in (1, 2, 7, 13):
        attempt = Attempt(number=1, max_new_tokens=limit)
        monkeypatch.setattr(engine, "drafting", Drafting(engine._model, 0))
        expected = engine.describe(batch, attempt=attempt)
        monkeypatch.setattr(engine, "drafting", Drafting(engine._model, 5))
        for _ in range(2):
            assert engine.describe(batch, attempt=attempt) == expected


def test_properties_made_singly_join_to_the_processors_own_batch(engine, load_property):
    """Guards: in each family, tensors of properties join to the processor's batch bit for bit."""
    from vlm_engine.transformers.collation import as_array, collated, learn_joins

    processor = engine._inputs._processors.get()
    joins = learn_joins(processor, PROMPT.text)
    assert joins
    images = [load_property(f"property {at}", number).images for at, number in enumerate((1, 4, 2, 3))]
    whole = processed(processor, PROMPT.text, images)
    singly = []
    for shown in images:
        tensors = processed(processor, PROMPT.text, [shown])
        singly.append({name: (as_array(one), joins[name]) for name, one in tensors.items()})
    batch = collated(singly)
    assert batch.keys() == whole.keys()
    for name, tensor in whole.items():
        assert batch[name].dtype == tensor.dtype
        assert batch[name].equal(tensor), name


def test_a_processor_that_mixes_properties_is_found_out(engine):
    """Guards: tensors are not joined where a property's depend on the others of its batch."""
    from vlm_engine.transformers.collation import learn_joins

    processor = engine._inputs._processors.get()
    make = type(processor).apply_chat_template

    class Mixes(type(processor)):
        def apply_chat_template(self, conversations, **arguments):
            tensors = make(self, conversations, **arguments)
            tensors["pixel_values"] = tensors["pixel_values"] - tensors["pixel_values"].mean()
            return tensors

    processor.__class__ = Mixes
    assert learn_joins(processor, PROMPT.text) is None


class Pool(pydantic.BaseModel):
    """Another question."""

    pool: Literal["none", "outside"]
    storeys: int = pydantic.Field(ge=0, le=9)


SECOND = DescriptionSchema(Pool)
SECOND_PROMPT = Prompt("Has it a pool, and how many storeys?")


class Recorded:
    """A grammar that keeps the scores of each batch as the model made them: [step][rows, vocabulary]."""

    def __init__(self, grammar):
        self.grammar = grammar
        self.scores = []

    def for_batch(self, size):
        guide, steps = self.grammar.for_batch(size), []
        self.scores.append(steps)
        return lambda ids, scores: steps.append(scores.clone()) or guide(ids, scores)


@pytest.fixture
def asking_two(engine):
    """The family's model in two engines: of a second question after the first, and of the second alone."""
    grammar = Grammar(
        SECOND.json_schema, engine._tokenizer, logits_width=TEXT["vocab_size"], stop_token_ids=[2]
    )
    together, by_itself = Recorded(grammar), Recorded(grammar)
    with engine._inputs._a_processor() as processor:
        both = TransformersEngine.around(
            engine._model,
            processor,
            grammar=Recorded(engine._grammar),
            prompt=PROMPT,
            device="cpu",
            further=[(together, SECOND_PROMPT)],
        )
        alone = TransformersEngine.around(
            engine._model, processor, grammar=by_itself, prompt=SECOND_PROMPT, device="cpu"
        )
    return both, alone, together, by_itself


@pytest.fixture
def looks(engine):
    """How many times the layers that look at images were run, for which rows of pixels."""
    looks = []
    names = ("vision_tower", "visual", "vision_model")
    tower = next(getattr(engine._model.model, name) for name in names if hasattr(engine._model.model, name))
    tower.register_forward_pre_hook(lambda *_: looks.append(1))
    return looks


@pytest.mark.parametrize("long", [512, 4])
def test_a_second_question_shares_the_images(asking_two, looks, load_property, monkeypatch, long):
    """Guards: images are looked at once, and the second question's answers are those that it has alone.

    Also about some of the properties, in another order; attention goes by rows or not.
    """
    import torch

    monkeypatch.setattr(attention, "_LONG", long)
    both, alone, together, by_itself = asking_two
    assert both.shares_images
    batch = [load_property(f"property {at}", images) for at, images in enumerate((1, 3, 2, 3))]
    second = Attempt(number=1, max_new_tokens=60, question=1)
    for asked in (batch, [batch[2], batch[0]]):
        looks.clear()
        first = both.describe(batch, attempt=GREEDY)
        once = len(looks)
        answers = both.describe(asked, attempt=second)
        assert len(looks) == once > 0
        assert answers == alone.describe(asked, attempt=GREEDY)
        assert all(SECOND.parse(answer.text) for answer in answers)
        assert all(SCHEMA.parse(answer.text) for answer in first)
        for ours, theirs in zip(together.scores[-1], by_itself.scores[-1], strict=True):
            assert torch.allclose(ours, theirs, rtol=0, atol=1e-4)
