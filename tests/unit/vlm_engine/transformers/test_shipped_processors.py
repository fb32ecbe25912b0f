"""Families of models as they are shipped: real processor configurations, images as people take them.

The families are in ``benchmarks/model_families.py``. The weights are random and the widths tiny; what tiles
an image, and counts its tokens, is the family's own.
"""

import dataclasses
import json
import math
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Literal

import numpy as np
import pydantic
import pytest
from PIL import Image

from benchmarks.model_families import CONFIGURATIONS, FAMILIES, save_processor
from tests.support.shares import share_of
from vlm_engine.images.images import LoadedProperty, PropertyJob, fitted_size, load_image
from vlm_engine.images.worker_pool import WorkerPool
from vlm_engine.ladder import describe_batch
from vlm_engine.model_source import ModelSource
from vlm_engine.prompt import FurtherQuestion, Prompt
from vlm_engine.protocol import Attempt, ImageLimits, ModelLoadError
from vlm_engine.schema import DescriptionSchema
from vlm_engine.transformers import fast_images, image_tokens, model_loading
from vlm_engine.transformers.collation import Tensors
from vlm_engine.transformers.image_tokens import agree_on_images, fitted_processor, processed, within
from vlm_engine.transformers.transformers_engine import TransformersEngine

IMAGES = "preprocessor_config.json"
DOCUMENTED = Path(__file__).parents[4] / "docs" / "models.md"
TEXT = {
    "vocab_size": 512, "hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.2, "pad_token_id": 0,
    "bos_token_id": None, "eos_token_id": 2,
}  # fmt: skip
VISION = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
QWEN_VISION = {"depth": 1, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": 48}
HEADS = {"head_dim": 16, "num_key_value_heads": 2}
ROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 2, 2]}
LINEAR = {
    "head_dim": 16, "layer_types": ["linear_attention", "full_attention"], "linear_key_head_dim": 8,
    "linear_value_head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "rope_parameters": ROPE | {"mrope_section": [1, 1, 0], "partial_rotary_factor": 0.25},
}  # fmt: skip


SIZES_OF = {
    "qwen2.5-vl": (
        QWEN_VISION | {"fullatt_block_indexes": [0]}, {"head_dim": 12, "rope_parameters": ROPE}, {},
    ),
    "qwen3-vl": (
        QWEN_VISION | {"deepstack_visual_indexes": [0]}, {"head_dim": 12, "rope_parameters": ROPE}, {},
    ),
    "gemma3": (VISION | {"num_attention_heads": 1}, {"head_dim": 12, "sliding_window": 512}, {}),
    "internvl3.5": (VISION, {"head_dim": 12}, {}),
    "qwen3.5": (QWEN_VISION, LINEAR, {}),
    "glm4.6v": (
        QWEN_VISION,
        {"rope_parameters": ROPE | {"mrope_section": [1, 1, 1], "partial_rotary_factor": 0.5}}, {},
    ),
    "minicpm-v4.6": (VISION | {"num_hidden_layers": 2}, LINEAR, {"insert_layer_id": 0}),
    "minicpm-v4.7": (VISION | {"num_hidden_layers": 2}, LINEAR, {"insert_layer_id": 0}),
    "gemma4": (
        VISION | HEADS,
        {"head_dim": 12, "global_head_dim": 12, "hidden_size_per_layer_input": 0, "sliding_window": 512,
         "layer_types": ["sliding_attention", "full_attention"], "vocab_size_per_layer_input": 512,
         "use_bidirectional_attention": "vision"},
        {},
    ),
    "lfm2-vl": (VISION, {"layer_types": ["conv", "full_attention"]}, {"projector_hidden_size": 64}),
    "molmo2": (
        VISION | HEADS, {"head_dim": 12},
        {"adapter_config": {
            **HEADS, "vision_feature_layer": [0], "hidden_size": 32, "num_attention_heads": 2,
            "intermediate_size": 64, "text_hidden_size": 48,
        }},
    ),
}  # fmt: skip
"""Of vision and text layers and of the rest, where those of all others will not do."""

JOINED_BY_THE_PROCESSOR = {"llava-onevision", "minicpm-v4.6", "minicpm-v4.7", "molmo2"}
"""Whose tensors of different properties cannot be joined: the processor runs on whole batches."""

AS = {"qwen3.5": "qwen3-vl", "internvl3.5": "internvl3", "minicpm-v4.7": "minicpm-v4.6"}
"""Families whose images are processed as another's, which is tried for both."""
HERE = [name for name, family in FAMILIES.items() if family.is_here()]
TODAY = share_of(HERE, len(HERE) // 2)
"""Two of those that are here: two need torchvision, which does not import beside the CPU build of torch."""
PROCESSORS = sorted({AS.get(name, name) for name in TODAY})

RESIZED_BY_THEIR_OWN_CODE = {"gemma4", "lfm2-vl", "molmo2"}
"""By Pillow, or by torchvision: not by torch's own operation, which is quicker."""

SEEN_AT = {
    "smolvlm2": 600_000, "lfm2-vl": 600_000, "internvl3": 420_000, "internvl3.5": 420_000,
    "minicpm-v4.6": 420_000, "minicpm-v4.7": 420_000, "llava-onevision": 300_000, "molmo2": 300_000,
}  # fmt: skip
"""Pixels of an image in the test of whole answers: as few as are cut into tiles. Of others 200,000."""


def save(name, folder, tokenizer):
    """Save a model of the family as its repository has it: shipped processor, random weights."""
    import torch
    import transformers

    torch.manual_seed(3)
    vision, text, more = SIZES_OF.get(name, (VISION, {}, {}))
    family = FAMILIES[name]
    family = dataclasses.replace(family, more={**family.more, **more})
    named = family.named(tokenizer, pad_token="<pad>", eos_token="<|end|>")
    config = family.config(named, vision=vision, text={**TEXT, **text})
    getattr(transformers, f"{family.model}ForConditionalGeneration")(config).save_pretrained(folder)
    save_processor(name, folder, named)
    return folder


PROMPT = Prompt("Describe the property.")
SIZES = (
    (4000, 3000), (1200, 1600), (640, 480), (1, 4000), (4000, 1), (97, 97), (517, 333), (333, 517),
    (800, 200),
)  # fmt: skip
"""Images of 12, 2 and 0.3 megapixels, and odd ones: two are nothing but a line. The first of a property is
each family's own."""
OWN_WIDTH = 600
SHOWN = {"ten": range(len(SIZES)), "one": (), "three": (2, 7)}
"""Properties, and which of the images they have after the family's own."""


class House(pydantic.BaseModel):
    """A short answer."""

    roof: Literal["flat", "hip"]
    storeys: int = pydantic.Field(ge=0, le=9)
    name: str = pydantic.Field(max_length=3)


SCHEMA = DescriptionSchema(House)


@dataclass(frozen=True)
class EachFamily:
    """Tensors of all families from one pool, told apart by the width of a property's first image.

    Starting the workers of a pool takes seconds of importing, which a pool for each family would take anew.
    """

    outputs: tuple[Tensors, ...]

    def load(self):
        maker = cache(lambda at: self.outputs[at].load())
        return lambda images: maker(images[0].width - OWN_WIDTH)(images)


@pytest.fixture(scope="session")
def sources(tmp_path_factory, tokenizer):
    """A model of each family in a folder, made when it is first asked for."""
    folders = tmp_path_factory.mktemp("shipped")
    return cache(lambda name: ModelSource(str(save(name, folders / name, tokenizer))))


@pytest.fixture
def source(name, sources):
    """The model of the test's family."""
    return sources(name)


@pytest.fixture(scope="session")
def photos(tmp_path_factory):
    """Files of the images of all properties, no two of which look the same."""
    folder = tmp_path_factory.mktemp("photos")
    shape = Image.linear_gradient("L")
    for at, size in enumerate([*SIZES, *((OWN_WIDTH + at, 480) for at in range(len(TODAY)))]):
        bands = [shape.rotate(90 * (at // step)) for step in (1, 4, 16)]
        Image.merge("RGB", bands).resize(size).save(folder / f"{at}.jpg")

    def paths(name, property_id):
        own = len(SIZES) + TODAY.index(name)
        return tuple(str(folder / f"{at}.jpg") for at in (own, *SHOWN[property_id]))

    return paths


@pytest.fixture(scope="session")
def load(sources, photos):
    """Load a family's properties by the workers, as its tensors."""
    outputs = tuple(Tensors(sources(name), PROMPT.text, "float32", seen_limits(name)) for name in TODAY)
    options = {"prefetch_batches": 0, "max_pixels": max(SEEN_AT.values()), "max_images": 10}

    def load(name):
        jobs = [PropertyJob(one, at, photos(name, one)) for at, one in enumerate(SHOWN)]
        return next(pool.feed([jobs]))

    with WorkerPool(EachFamily(outputs), workers=1, **options) as pool:
        yield load


def seen_limits(name):
    """The limits of the test of whole answers: small images, so that it is quick."""
    return limits(pixels=SEEN_AT.get(name, 200_000), answer_tokens=LONGEST)


LONGEST = 48


def limits(**changed):
    return ImageLimits(**{"pixels": 1 << 20, "images": 10, "answer_tokens": 24} | changed)


@pytest.mark.parametrize("name", PROCESSORS)
def test_the_table_says_what_images_cost(name, source):
    """The figures of docs/models.md are those of the shipped processors: as they are, and as they are set."""
    allowed = limits(images=12, answer_tokens=512)
    _, shipped = fitted_processor(source, PROMPT.text, limits(pixels=4 << 20, images=2))
    _, default = fitted_processor(source, PROMPT.text, allowed)
    _, budget = fitted_processor(source, PROMPT.text, dataclasses.replace(allowed, tokens=3000))
    row = (
        f"| {FAMILIES[name].context:,} | {shipped.each:,} | {default.each:,} |"
        f" {budget.each:,}, {budget.fitting} of 12 images fit |"
    )
    assert row in DOCUMENTED.read_text()


@pytest.mark.parametrize("name", PROCESSORS)
def test_more_images_cost_resolution_only_where_they_do_not_fit(name, source):
    """One resolution holds for all properties of a run; docs/models.md says which families pay for that."""
    costs = [
        fitted_processor(source, PROMPT.text, limits(images=images, answer_tokens=512))[1]
        for images in (3, 30)
    ]
    short = {"smolvlm2": (419, 84), "internvl3": (1539, 1027)}
    assert tuple(one.each for one in costs) == short.get(name, (costs[0].each,) * 2)
    assert [one.fitting for one in costs] == [3, 30]


KNOBS = {
    "smolvlm2": {"size"}, "idefics3": {"size"}, "qwen2.5-vl": {"size"}, "qwen3-vl": {"size"}, "gemma3": set(),
    "llava-onevision": {"image_grid_pinpoints"}, "internvl3": {"max_patches"}, "glm4.6v": {"size"},
    "minicpm-v4.6": {"max_slice_nums"}, "gemma4": {"max_soft_tokens"}, "molmo2": {"max_crops"},
    "lfm2-vl": {"max_tiles", "do_image_splitting", "max_image_tokens", "min_image_tokens"},
}  # fmt: skip
"""The options by which each family keeps a bound, as docs/models.md says."""
TILES = {
    "smolvlm2": 384, "idefics3": 364, "llava-onevision": 384, "internvl3": 448, "minicpm-v4.6": 448,
    "lfm2-vl": 512, "molmo2": 378,
}  # fmt: skip
"""Width of a tile in pixels, where there are any."""


@pytest.mark.parametrize("changed", [{}, {"tokens": 3000}, {"pixels": 300_000}, {"images": 1}], ids=str)
@pytest.mark.parametrize("name", PROCESSORS)
def test_what_images_cost_is_what_the_processor_makes(name, changed, source):
    """No image of a usual shape costs more than was said, and the bounds of pixels and tokens hold."""
    allowed = limits(**changed)
    processor, known = fitted_processor(source, PROMPT.text, allowed)
    shown, made, pixels = min(2, allowed.images), [], []
    for width, height in ((1154, 866), (1000, 1000), (900, 1100), (640, 480)):
        image = Image.new("RGB", fitted_size(width, height, allowed.pixels))
        batch = processed(processor, PROMPT.text, [[image] * shown])
        made.append(math.ceil((batch["input_ids"].shape[1] - known.text) / shown))
        pixels.append(batch["pixel_values"].numel() / 3 / shown)
    # Edges are rounded to whole tokens, so a shape between the measured ones may cost more.
    assert known.each * 0.6 < max(made) <= known.each * (1.05 if name in {"gemma4", "molmo2"} else 1)
    assert known.options.keys() - allowed.options.keys() <= KNOBS[name]
    assert bool(known.options) == bool(KNOBS[name])
    if KNOBS[name]:  # a tile is a small copy of the whole; of Qwen and GLM each image is two frames
        copies = 2 if KNOBS[name] == {"size"} and not TILES.get(name) else 1
        tile = TILES.get(name, 0) ** 2
        assert max(pixels) / copies <= max(allowed.pixels, tile) + tile
    if known.fitting == known.images:
        assert known.each * known.images <= (allowed.tokens or known.context)
    else:
        assert known.each * known.fitting <= allowed.tokens < known.each * known.images


class Recorded:
    """A grammar that keeps the scores of each batch as the model made them: [step][rows, vocabulary]."""

    def __init__(self, grammar):
        self.grammar = grammar
        self.scores = []

    def for_batch(self, size):
        guide, steps = self.grammar.for_batch(size), []
        self.scores.append(steps)
        return lambda ids, scores: steps.append(scores.clone()) or guide(ids, scores)

    def of(self, batch, row, tokens):
        """The scores of a row of a batch [tokens, vocabulary]."""
        import torch

        return torch.stack([scores[row] for scores in self.scores[batch][:tokens]])


@pytest.mark.parametrize("name", TODAY)
def test_a_batch_says_what_each_property_alone_and_transformers_say(name, source, load, photos):
    """Each family: ten odd images by the workers, in a batch and alone, beside transformers' own generation.

    Guards: MiniCPM-V read the part for videos, which is left out. LLaVA's code looked for tiles by its own
    list of grids, and refused a property of one photograph. MiniCPM-V without a window merger mixes images.
    """
    import torch
    from transformers import AutoModelForImageTextToText, LogitsProcessorList

    loaded = load(name)
    assert [one.seen for one in loaded] == [10, 1, 3]
    assert bool(loaded[0].tensors) == (name not in JOINED_BY_THE_PROCESSOR)
    allowed = seen_limits(name)
    engine = TransformersEngine(source, schema=SCHEMA, prompt=PROMPT, device="cpu", limits=allowed)
    engine._grammar = recorded = Recorded(engine._grammar)
    described = describe_batch(engine, SCHEMA, loaded, LONGEST)
    assert [(one.status, one.images_seen, one.fewer_images) for one in described] == [
        ("ok", 10, None), ("ok", 1, None), ("ok", 3, None),
    ]  # fmt: skip
    assert described[0].prompt_tokens <= engine.image_tokens.property_tokens
    batch = len(recorded.scores) - 1  # a family that refuses the engine's attention begins anew
    attempt = Attempt(number=1, max_new_tokens=LONGEST)
    answers = [engine.describe([one], attempt=attempt)[0] for one in loaded]
    assert [SCHEMA.parse(one.text) for one in answers] == [one.description for one in described]
    processor, _ = fitted_processor(source, PROMPT.text, allowed)
    model = AutoModelForImageTextToText.from_pretrained(source.location, dtype=torch.float32).eval()
    agree_on_images(model.config, processor)
    for at, (one, answer) in enumerate(zip(loaded, answers, strict=True)):
        images = [
            load_image(path, max_pixels=max(SEEN_AT.values())) for path in photos(name, one.property_id)
        ]
        inputs = processed(processor, PROMPT.text, [images])
        own = Recorded(recorded.grammar)
        sequences = model.generate(
            **inputs, max_new_tokens=LONGEST, logits_processor=LogitsProcessorList([own.for_batch(1)])
        )
        tokens = answer.output_tokens + 1
        said = sequences[0, inputs["input_ids"].shape[1] :]
        assert engine._answer(said.tolist(), answer.prompt_tokens) == answer
        assert len(said) == tokens
        scores = own.of(0, 0, tokens)
        assert torch.allclose(recorded.of(batch, at, tokens), scores, rtol=0, atol=1e-4)
        assert torch.allclose(recorded.of(batch + 1 + at, 0, tokens), scores, rtol=0, atol=1e-4)


ANOTHER = FurtherQuestion(Prompt("How many storeys, and which roof?"), SCHEMA, LONGEST)


@pytest.mark.parametrize("name", TODAY)
def test_each_family_shares_its_images_between_questions(name, source, load, photos):
    """Guards: a second question says after the first what it says alone, with layers of all kinds.

    Sliding windows, linear attention, convolutions and positions in three axes go on from a copy.
    """
    import torch

    options = {"schema": SCHEMA, "device": "cpu", "limits": seen_limits(name)}
    both = TransformersEngine(source, prompt=PROMPT, further=[ANOTHER], **options)
    alone = TransformersEngine(source, prompt=ANOTHER.prompt, **options)
    assert both.shares_images
    (grammar, drafting), alone._grammar = both._further[0], Recorded(alone._grammar)
    both._further[0] = (recorded := Recorded(grammar), drafting)
    loaded, attempt = load(name), Attempt(number=1, max_new_tokens=LONGEST)
    both.describe(loaded, attempt=attempt)
    assert both._seen.beginning.is_computed
    answers = both.describe(loaded, attempt=dataclasses.replace(attempt, question=1))
    own = [
        [load_image(path, max_pixels=max(SEEN_AT.values())) for path in photos(name, one.property_id)]
        for one in loaded
    ]
    pixels = [
        dataclasses.replace(one, images=images, tensors={}) for one, images in zip(loaded, own, strict=True)
    ]
    assert answers == alone.describe(pixels, attempt=attempt)
    for row, answer in enumerate(answers):
        tokens = answer.output_tokens + 1
        scores = alone._grammar.of(-1, row, tokens)
        assert torch.allclose(recorded.of(-1, row, tokens), scores, rtol=0, atol=1e-4)


def test_an_option_goes_before_the_models_own(sources):
    """VLM_ASSETS_PROCESSOR_OPTIONS reaches the processor, and says what it costs."""
    _, known = fitted_processor(
        sources("smolvlm2"), PROMPT.text, limits(options={"do_image_splitting": False})
    )
    assert known.each == 84
    _, known = fitted_processor(sources("internvl3"), PROMPT.text, limits(options={"crop_to_patches": False}))
    assert known.each == 259


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {"do_image_spliting": False},
            "SmolVLMImageProcessorPil has no option do_image_spliting; it has",
        ),
        ({"max_image_size": "large"}, "its processor takes no pictures with VLM_ASSETS_PROCESSOR_OPTIONS="),
    ],
)
def test_an_option_that_cannot_be_used_is_refused(options, said, sources):
    """A misspelt option, or one of another kind, is refused by name and never ignored."""
    with pytest.raises(ModelLoadError, match=said):
        fitted_processor(sources("smolvlm2"), PROMPT.text, limits(options=options))


def test_a_processor_that_cannot_be_measured_is_used_as_it_is(sources, monkeypatch):
    """A processor that refuses our pictures may take others; a budget that nobody can keep is refused."""

    def refuse(*_):
        raise ValueError("no grey pictures")

    monkeypatch.setattr(image_tokens, "processed", refuse)
    processor, known = fitted_processor(sources("smolvlm2"), PROMPT.text, limits())
    assert known is None
    assert processor.image_processor.size["longest_edge"] == 1536
    with pytest.raises(ModelLoadError, match="VLM_ASSETS_IMAGE_TOKENS=3000: no grey pictures"):
        fitted_processor(sources("smolvlm2"), PROMPT.text, limits(tokens=3000))


@pytest.mark.parametrize("name", PROCESSORS)
def test_images_are_processed_as_with_pillow(name, source, monkeypatch):
    """Torch resizes and normalizes, and what the model sees is Pillow's to two levels of 256."""
    fast, _ = fitted_processor(source, PROMPT.text, limits())
    monkeypatch.setattr(model_loading, "made_fast", lambda one: one)
    slow, _ = fitted_processor(source, PROMPT.text, limits())
    photo = Image.linear_gradient("L").resize((1000, 750))
    photo = Image.merge("RGB", (photo, photo.rotate(180), Image.effect_noise(photo.size, 60)))
    ours, theirs = (processed(one, PROMPT.text, [[photo] * 2]) for one in (fast, slow))
    assert ours.keys() == theirs.keys()
    for key, tensor in theirs.items():
        assert ours[key].dtype == tensor.dtype, key
        if key != "pixel_values":
            assert ours[key].equal(tensor), key
    level = 1 / 255 / min(slow.image_processor.image_std)
    off = (ours["pixel_values"] - theirs["pixel_values"]).abs()
    assert off.max() < 2.1 * level
    assert (off > 0.5 * level).float().mean() < 0.02
    kind = fast.image_processor.resample
    has_filter = fast_images._resizes_alike(2 if kind is None else int(kind))  # torch 2.11 has no Lanczos
    if has_filter and name not in RESIZED_BY_THEIR_OWN_CODE:
        monkeypatch.setattr(Image.Image, "resize", None)
        processed(fast, PROMPT.text, [[photo]])


QWEN3_5_END = (
    "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n"
    "{% else %}<think>\n{% endif %}"
)


def test_no_thought_is_opened(sources, caplog):
    """Guards: the template of Qwen3.5 opens a thought by default, of which no answer is made."""
    processor, _ = fitted_processor(sources("qwen3-vl"), PROMPT.text, None)
    image = Image.new("RGB", (64, 64))

    def ends():
        [ids] = processed(processor, PROMPT.text, [[image]])["input_ids"].tolist()
        return processor.tokenizer.decode(ids).partition("assistant\n")[2]

    assert ends() == ""
    assert "Kwargs" not in caplog.text
    processor.chat_template += QWEN3_5_END
    assert ends() == "<think>\n\n</think>\n\n"


@pytest.mark.parametrize("name", AS)
def test_a_processor_of_two_families_is_one(name):
    """What is tried for one family holds for the other: docs/models.md gives one row for both."""
    one, other = (json.loads((CONFIGURATIONS / folder / IMAGES).read_text()) for folder in (name, AS[name]))
    assert {**one, "processor_class": None} == {**other, "processor_class": None}


MOLMO = {"size": {"height": 378, "width": 378}, "max_crops": 8}
LFM = {
    "size": {"height": 512, "width": 512}, "do_image_splitting": True, "max_tiles": 10, "min_tiles": 2,
    "tile_size": 512, "max_image_tokens": 256, "min_image_tokens": 64, "encoder_patch_size": 16,
    "downsample_factor": 2,
}  # fmt: skip
WHOLE = {"do_image_splitting": False}
MINICPM = {"max_slice_nums": 9, "scale_resolution": 448}
GEMMA = {"max_soft_tokens": 280, "pooling_kernel_size": 3, "patch_size": 16}


@pytest.mark.parametrize(
    ("shipped", "pixels", "chosen", "options"),
    [
        (MOLMO, 1 << 20, {}, {"max_crops": 7}),
        (MOLMO, 16 << 20, {}, {"max_crops": 8}),
        (MOLMO, 4096, {}, {"max_crops": 1}),
        (LFM, 16 << 20, {}, {"max_tiles": 10}),
        (LFM, 1 << 20, {}, {"max_tiles": 4}),
        (LFM, 1 << 20, {"max_tiles": 3}, {"max_tiles": 3}),
        (LFM, 600_000, {}, {"max_tiles": 2}),
        (LFM, 500_000, {}, WHOLE | {"max_image_tokens": 256, "min_image_tokens": 64}),
        (LFM, 1 << 20, WHOLE, WHOLE | {"max_image_tokens": 256, "min_image_tokens": 64}),
        (LFM, 40_000, {}, WHOLE | {"max_image_tokens": 39, "min_image_tokens": 39}),
        (LFM, 500, {}, WHOLE | {"max_image_tokens": 1, "min_image_tokens": 1}),
        (MINICPM, 1 << 20, {}, {"max_slice_nums": 5}),
        (MINICPM, 1 << 20, {"max_slice_nums": 2}, {"max_slice_nums": 2}),
        (MINICPM, 4096, {}, {"max_slice_nums": 1}),
        (GEMMA, 1 << 20, {}, {"max_soft_tokens": 280}),
        (GEMMA, 4 << 20, {"max_soft_tokens": 1120}, {"max_soft_tokens": 1120}),
        (GEMMA, 400_000, {}, {"max_soft_tokens": 140}),
        (GEMMA, 4096, {}, {"max_soft_tokens": 70}),
    ],
    ids=str,
)
def test_a_bound_is_kept_by_the_familys_own_option(shipped, pixels, chosen, options):
    """Also where the processor needs torchvision, which may not be here (LFM2-VL, Molmo2)."""
    assert within(SimpleNamespace(**shipped), pixels, chosen) == options


def test_glm_shows_as_many_pixels_as_qwen(sources):
    """Guards: GLM's bound counts both frames of an image, so that half the pixels were shown."""
    _, glm = fitted_processor(sources("glm4.6v"), PROMPT.text, limits())
    assert glm.options["size"] == {"shortest_edge": 12_544, "longest_edge": 2 << 20}
    _, qwen = fitted_processor(sources("qwen2.5-vl"), PROMPT.text, limits())
    assert qwen.options["size"] == {"shortest_edge": 3136, "longest_edge": 1 << 20}
    assert abs(glm.each - qwen.each) <= 16


def test_an_option_that_the_models_code_reads_too_reaches_it(sources):
    """Guards: MiniCPM-V's model joined four patches to a token where its processor had asked for each."""
    allowed = limits(options={"downsample_mode": "4x"}, pixels=100_000)
    engine = TransformersEngine(
        sources("minicpm-v4.6"), schema=SCHEMA, prompt=PROMPT, device="cpu", limits=allowed
    )
    pixels = np.zeros((224, 224, 3), np.uint8)
    [answer] = engine.describe(
        [LoadedProperty("a", 0, [pixels], 1, (), 0.0)], attempt=Attempt(number=1, max_new_tokens=LONGEST)
    )
    assert SCHEMA.parse(answer.text)
    assert answer.prompt_tokens > 256
