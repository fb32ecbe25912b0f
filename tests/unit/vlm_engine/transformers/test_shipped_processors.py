"""Families of models as they are shipped: real processor configurations, images as people take them.

The families are in ``benchmarks/model_families.py``. The weights are random and the widths tiny; what tiles
an image, and counts its tokens, is the family's own.
"""

import dataclasses
import json
import math
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Literal

import pydantic
import pytest
from PIL import Image

from benchmarks import model_families
from benchmarks.model_families import FAMILIES, Family, save_processor
from vlm_engine.images.images import PropertyJob, fitted_size
from vlm_engine.images.worker_pool import WorkerPool
from vlm_engine.ladder import describe_batch
from vlm_engine.model_source import ModelSource
from vlm_engine.prompt import Prompt
from vlm_engine.protocol import ImageLimits, ModelLoadError
from vlm_engine.schema import DescriptionSchema
from vlm_engine.transformers import image_tokens, model_loading
from vlm_engine.transformers.collation import Tensors
from vlm_engine.transformers.image_tokens import fitted_processor, processed, within
from vlm_engine.transformers.transformers_engine import TransformersEngine

DOCUMENTED = Path(__file__).parents[4] / "docs" / "models.md"
TEXT = {
    "vocab_size": 512, "hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.2, "pad_token_id": 0,
    "bos_token_id": None, "eos_token_id": 2,
}  # fmt: skip
VISION = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
QWEN_VISION = {"depth": 1, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": 48}
ROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 2, 2]}


SIZES_OF = {
    "qwen2.5-vl": (
        QWEN_VISION | {"fullatt_block_indexes": [0]}, {"head_dim": 12, "rope_parameters": ROPE},
    ),
    "qwen3-vl": (
        QWEN_VISION | {"deepstack_visual_indexes": [0]}, {"head_dim": 12, "rope_parameters": ROPE},
    ),
    "gemma3": (VISION, {"head_dim": 12, "sliding_window": 512}),
}  # fmt: skip
"""Of vision and text layers, where those of all others will not do."""


def save(name, folder, tokenizer):
    """Save a model of the family as its repository has it: shipped processor, random weights."""
    import torch
    import transformers

    torch.manual_seed(3)
    family = FAMILIES[name]
    named = family.named(tokenizer, pad_token="<pad>", eos_token="<|end|>")
    vision, text = SIZES_OF.get(name, (VISION, {}))
    config = family.config(named, vision=vision, text={**TEXT, **text})
    getattr(transformers, f"{family.model}ForConditionalGeneration")(config).save_pretrained(folder)
    save_processor(name, folder, named)
    return folder


PROMPT = Prompt("Describe the property.")
SIZES = (
    (4000, 3000), (3000, 4000), (4000, 3000), (1600, 1200), (1632, 1224), (1200, 1600), (640, 480), (1, 4000),
    (4000, 1),
)  # fmt: skip
"""Images of 12, 2 and 0.3 megapixels, and two that are nothing but a line. A tenth is each family's own."""
OWN_WIDTH = 600


class House(pydantic.BaseModel):
    """A short answer."""

    roof: Literal["flat", "hip"]


SCHEMA = DescriptionSchema(House)


@dataclass(frozen=True)
class EachFamily:
    """Tensors of all families from one pool, told apart by the width of a property's first image.

    Starting the workers of a pool takes seconds of importing, which seven pools would take each.
    """

    outputs: tuple[Tensors, ...]

    def load(self):
        makers = [output.load() for output in self.outputs]
        return lambda images: makers[images[0].width - OWN_WIDTH](images)


@pytest.fixture(scope="session")
def sources(tmp_path_factory, tokenizer):
    """A model of each family in a folder."""
    folders = tmp_path_factory.mktemp("shipped")
    return {name: ModelSource(str(save(name, folders / name, tokenizer))) for name in FAMILIES}


@pytest.fixture(scope="session")
def load(tmp_path_factory, sources):
    """Load a property of ten images by the workers, as a family's tensors."""
    folder = tmp_path_factory.mktemp("photos")
    for at, size in enumerate([*SIZES, *((OWN_WIDTH + at, 480) for at in range(len(sources)))]):
        Image.linear_gradient("L").resize(size).convert("RGB").save(folder / f"{at}.jpg")
    outputs = tuple(Tensors(source, PROMPT.text, "float32", limits()) for source in sources.values())
    options = {"prefetch_batches": 0, "max_pixels": 1 << 20, "max_images": 10}

    def load(name):
        photos = [len(SIZES) + list(sources).index(name), *range(len(SIZES))]
        job = PropertyJob(name, 0, tuple(str(folder / f"{at}.jpg") for at in photos))
        return next(pool.feed([[job]]))[0]

    with WorkerPool(EachFamily(outputs), workers=1, **options) as pool:
        yield load


def limits(**changed):
    return ImageLimits(**{"pixels": 1 << 20, "images": 10, "answer_tokens": 24} | changed)


@pytest.mark.parametrize("name", FAMILIES)
def test_the_table_says_what_images_cost(name, sources):
    """The figures of docs/models.md are those of the shipped processors: as they are, and as they are set."""
    source, allowed = sources[name], limits(images=12, answer_tokens=512)
    _, shipped = fitted_processor(source, PROMPT.text, limits(pixels=4 << 20, images=2))
    _, default = fitted_processor(source, PROMPT.text, allowed)
    _, budget = fitted_processor(source, PROMPT.text, dataclasses.replace(allowed, tokens=3000))
    row = (
        f"| {FAMILIES[name].context:,} | {shipped.each:,} | {default.each:,} |"
        f" {budget.each:,}, {budget.fitting} of 12 images fit |"
    )
    assert row in DOCUMENTED.read_text()


@pytest.mark.parametrize("name", FAMILIES)
def test_more_images_cost_resolution_only_where_they_do_not_fit(name, sources):
    """One resolution holds for all properties of a run; docs/models.md says which families pay for that."""
    costs = [
        fitted_processor(sources[name], PROMPT.text, limits(images=images, answer_tokens=512))[1]
        for images in (3, 12, 30)
    ]
    short = {"smolvlm2": (419, 419, 84), "internvl3": (1539, 1539, 1027)}
    assert tuple(one.each for one in costs) == short.get(name, (costs[0].each,) * 3)
    assert [one.fitting for one in costs] == [3, 12, 30]


@pytest.mark.parametrize("changed", [{}, {"tokens": 3000}, {"pixels": 300_000}, {"images": 1}], ids=str)
@pytest.mark.parametrize("name", FAMILIES)
def test_what_images_cost_is_what_the_processor_makes(name, changed, sources):
    """No image of a usual shape costs more than was said, and the bounds of pixels and tokens hold."""
    allowed = limits(**changed)
    processor, known = fitted_processor(sources[name], PROMPT.text, allowed)
    shown, made, pixels = min(2, allowed.images), [], []
    for width, height in ((1154, 866), (1000, 1000), (900, 1100), (640, 480)):
        image = Image.new("RGB", fitted_size(width, height, allowed.pixels))
        batch = processed(processor, PROMPT.text, [[image] * shown])
        made.append(math.ceil((batch["input_ids"].shape[1] - known.text) / shown))
        pixels.append(batch["pixel_values"].numel() / 3 / shown)
    assert known.each * 0.6 < max(made) <= known.each
    if name != "gemma3":  # it has one size alone; a tile is a small copy of the whole, Qwen sees all twice
        copies = 2 if name.startswith("qwen") else 1
        tile = {"smolvlm2": 384, "idefics3": 364, "llava-onevision": 384, "internvl3": 448}.get(name, 0) ** 2
        assert max(pixels) / copies <= max(allowed.pixels, tile) + tile
    if known.fitting == known.images:
        assert known.each * known.images <= (allowed.tokens or known.context)
    else:
        assert known.each * known.fitting <= allowed.tokens < known.each * known.images


@pytest.mark.parametrize("name", FAMILIES)
def test_ten_images_are_described(name, sources, load):
    """Each family describes a property from all of its images, whatever their shapes: workers to answer."""
    loaded = load(name)
    assert (loaded.seen, loaded.failed, loaded.refusal) == (10, (), None)
    # LLaVA-OneVision pads images to the tiles of a whole batch, so its properties are not joined.
    assert bool(loaded.tensors) == (name != "llava-onevision")
    engine = TransformersEngine(sources[name], schema=SCHEMA, prompt=PROMPT, device="cpu", limits=limits())
    [described] = describe_batch(engine, SCHEMA, [loaded], 24)
    assert (described.status, described.images_seen, described.fewer_images) == ("ok", 10, None)
    known = engine.image_tokens
    assert known.fitting == 10
    assert known.property_tokens * 0.3 < described.prompt_tokens <= known.property_tokens


def test_an_option_goes_before_the_models_own(sources):
    """VLM_ASSETS_PROCESSOR_OPTIONS reaches the processor, and says what it costs."""
    _, known = fitted_processor(
        sources["smolvlm2"], PROMPT.text, limits(options={"do_image_splitting": False})
    )
    assert known.each == 84
    _, known = fitted_processor(sources["internvl3"], PROMPT.text, limits(options={"crop_to_patches": False}))
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
        fitted_processor(sources["smolvlm2"], PROMPT.text, limits(options=options))


def test_a_processor_that_cannot_be_measured_is_used_as_it_is(sources, monkeypatch):
    """A processor that refuses our pictures may take others; a budget that nobody can keep is refused."""

    def refuse(*_):
        raise ValueError("no grey pictures")

    monkeypatch.setattr(image_tokens, "processed", refuse)
    processor, known = fitted_processor(sources["smolvlm2"], PROMPT.text, limits())
    assert known is None
    assert processor.image_processor.size["longest_edge"] == 1536
    with pytest.raises(ModelLoadError, match="VLM_ASSETS_IMAGE_TOKENS=3000: no grey pictures"):
        fitted_processor(sources["smolvlm2"], PROMPT.text, limits(tokens=3000))


@pytest.mark.parametrize("name", FAMILIES)
def test_images_are_processed_as_with_pillow(name, sources, monkeypatch):
    """Torch resizes and normalizes, and what the model sees is Pillow's to two levels of 256."""
    fast, _ = fitted_processor(sources[name], PROMPT.text, limits())
    monkeypatch.setattr(model_loading, "made_fast", lambda one: one)
    slow, _ = fitted_processor(sources[name], PROMPT.text, limits())
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
    monkeypatch.setattr(Image.Image, "resize", None)
    processed(fast, PROMPT.text, [[photo]])


QWEN3_5_END = (
    "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n"
    "{% else %}<think>\n{% endif %}"
)


def test_no_thought_is_opened(sources, caplog):
    """Guards: the template of Qwen3.5 opens a thought by default, of which no answer is made."""
    processor, _ = fitted_processor(sources["qwen3-vl"], PROMPT.text, None)
    image = Image.new("RGB", (64, 64))

    def ends():
        [ids] = processed(processor, PROMPT.text, [[image]])["input_ids"].tolist()
        return processor.tokenizer.decode(ids).partition("assistant\n")[2]

    assert ends() == ""
    assert "Kwargs" not in caplog.text
    processor.chat_template += QWEN3_5_END
    assert ends() == "<think>\n\n</think>\n\n"


LATER = {
    "minicpm-v4.6": (
        Family(
            "MiniCPMV4_6", 32_768, "<image>",
            {"image_token": "<image>", "video_token": "<video>"}
            | {name: f"<{name}>" for name in (
                "image_start_token", "image_end_token", "slice_start_token", "slice_end_token",
                "image_id_start_token", "image_id_end_token",
            )},
            {"image_token_id": "image_token", "video_token_id": "video_token"},
            {"image_size": 980, "patch_size": 14, "insert_layer_id": 0}, {"model_type": "qwen3_5_text"},
        ),
        {}, {"head_dim": 12, "layer_types": ["full_attention"] * 2},
        [{"max_slice_nums": 5}, {"max_slice_nums": 2}, {"max_slice_nums": 1}],
    ),
    "gemma4": (
        Family(
            "Gemma4", 131_072, "<|image|>",
            {"image_token": "<|image|>", "boi_token": "<|image>", "eoi_token": "<image|>",
             "video_token": "<|video|>", "audio_token": "<|audio|>", "boa_token": "<|audio>",
             "eoa_token": "<audio|>"},
            {"image_token_id": "image_token", "boi_token_id": "boi_token", "eoi_token_id": "eoi_token",
             "video_token_id": "video_token"},
            {"patch_size": 16, "pooling_kernel_size": 3},
        ),
        {"head_dim": 16, "num_key_value_heads": 2},
        {"head_dim": 12, "global_head_dim": 12, "hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0,
         "layer_types": ["full_attention"] * 2, "vocab_size_per_layer_input": 512},
        [{"max_soft_tokens": 280}, {"max_soft_tokens": 140}, {"max_soft_tokens": 70}],
    ),
}  # fmt: skip
"""Families whose processors' files were not at hand: with transformers' own values. With what their vision
and text layers need, and the options under 10,000, 2,500 and 900 tokens."""


@pytest.mark.parametrize("name", LATER)
def test_families_with_knobs_of_their_own_are_described_within_a_budget(
    name, tmp_path, tokenizer, monkeypatch, load_property
):
    """Guards: MiniCPM-V read the part for videos, which is left out; no budget reached its tiles."""
    import transformers

    family, vision, text, expected = LATER[name]
    named = family.named(tokenizer, pad_token="<pad>", eos_token="<|end|>")
    shipped, folder = tmp_path / "shipped", tmp_path / name
    (shipped / name).mkdir(parents=True)
    kinds = {kind: f"{family.model}{part}" for kind, part in (
        ("image_processor_type", "ImageProcessor"), ("processor_class", "Processor"),
    )}  # fmt: skip
    (shipped / name / "preprocessor_config.json").write_text(json.dumps(kinds))
    monkeypatch.setattr(model_families, "CONFIGURATIONS", shipped)
    monkeypatch.setitem(FAMILIES, name, family)
    config = family.config(named, vision=VISION | {"num_hidden_layers": 2} | vision, text={**TEXT, **text})
    getattr(transformers, f"{family.model}ForConditionalGeneration")(config).save_pretrained(folder)
    save_processor(name, folder, named)
    source = ModelSource(str(folder))
    for tokens, options in zip((10_000, 2500, 900), expected, strict=True):
        processor, known = fitted_processor(source, PROMPT.text, limits(tokens=tokens))
        assert (known.options, known.fitting) == (options, 10)
        for size in ((1154, 866), (1000, 1000), (640, 480), (500, 1700)):
            image = Image.new("RGB", fitted_size(*size, known.pixels))
            made = processed(processor, PROMPT.text, [[image] * 2])["input_ids"].shape[1]
            # Edges are rounded to whole tokens, so a shape between the measured ones may cost more.
            assert (made - known.text) / 2 <= 1.05 * known.each
        assert known.each * 10 <= tokens
    engine = TransformersEngine(source, schema=SCHEMA, prompt=PROMPT, device="cpu", limits=limits())
    batch = [load_property(at, count) for at, count in (("a", 1), ("b", 4))]
    described = describe_batch(engine, SCHEMA, batch, 24)
    assert [(one.status, one.images_seen) for one in described] == [("ok", 1), ("ok", 4)]


@pytest.mark.parametrize(("pixels", "crops"), [(1 << 20, 7), (16 << 20, 8), (4096, 1)])
def test_molmo_has_fewer_crops_under_a_bound(pixels, crops):
    """Its processor needs torchvision, which is not here: what is asked are its own values."""
    shipped = SimpleNamespace(size={"height": 378, "width": 378}, max_crops=8)
    assert within(shipped, pixels, {}) == {"max_crops": crops}
