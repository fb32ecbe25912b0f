"""How many tokens images cost, and at what resolution all of a property's images fit the model's context.

This module holds the call of a model's processor (chat template, image processor and tokenizer), the options
by which each family's processor keeps a bound of pixels, and the search for the largest bound that fits. All
of it is decided once a run from model, prompt and settings, so that a property's images are processed alike
wherever and whenever that happens.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from PIL import Image

from vlm_engine.model_source import ModelSource
from vlm_engine.protocol import ImageLimits, ImageTokens, ModelLoadError
from vlm_engine.transformers.model_loading import load_config, load_processor

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

_PIXEL_MASK: Final = "pixel_attention_mask"
"""A mask of each pixel of each tile [properties, tiles, height, width] (Idefics, SmolVLM). Processors make it
of integers of 64 bits, which is more than the pixels themselves. The models' own default is booleans."""

_SMALLEST: Final = 4096
"""Pixels an image keeps, whatever the budget."""

_SHAPES: Final = ((4, 3), (3, 4), (1, 1), (3, 2), (16, 9), (9, 16), (3, 1), (1, 3), (6, 1))
"""Widths and heights. How an image is tiled depends on its shape, so the most expensive of these counts."""


def processed(
    processor: Any, prompt: str, images: Sequence[Sequence[npt.NDArray[np.uint8] | Image.Image]]
) -> Any:
    """A BatchFeature for the images of each property, prompts padded on the left."""
    conversations = []
    for own_images in images:
        # With PIL images the processor need not guess which axis holds the channels.
        content: list[dict[str, Any]] = [
            {"type": "image", "image": image if isinstance(image, Image.Image) else Image.fromarray(image)}
            for image in own_images
        ]
        content.append({"type": "text", "text": prompt})
        conversations.append([{"role": "user", "content": content}])
    tensors = processor.apply_chat_template(
        conversations,
        add_generation_prompt=True,
        tokenize=True,
        return_dict=True,
        return_tensors="pt",
        processor_kwargs={"padding": True, "padding_side": "left"},
        **_without_thoughts(processor.chat_template),
    )
    mask = tensors.get(_PIXEL_MASK)
    if mask is not None and mask.dim() == 4:
        tensors[_PIXEL_MASK] = mask.bool()
    return tensors


def _without_thoughts(template: object) -> dict[str, Any]:
    """Options with which a chat template ends where the answer begins. Qwen3.5's would open a thought.

    Only options that the template has: transformers passes all others to the image processor.
    """
    return {"enable_thinking": False} if "enable_thinking" in str(template) else {}


def fitted_processor(
    source: ModelSource, prompt: str, limits: ImageLimits | None, *, without: Collection[str] = ()
) -> tuple[Any, ImageTokens | None]:
    """The model's processor, set to images that fit, and their cost in tokens; None where that is not known.

    Without limits the processor stays as the model's files have it. without: options that are left as they
    are. Raises ModelLoadError.
    """
    processor = load_processor(source)
    if limits is None:
        return processor, None
    _refuse_unknown(processor, limits.options)
    context = getattr(load_config(source).get_text_config(), "max_position_embeddings", None)
    try:
        return processor, fit_images(processor, prompt, limits, context=context, without=without)
    except MemoryError:
        raise
    except Exception as error:  # A processor that does not take our pictures may raise anything.
        if limits.options or limits.tokens is not None:
            raise ModelLoadError(
                f"model {source.name}: its processor takes no pictures with VLM_ASSETS_PROCESSOR_OPTIONS="
                f"{json.dumps(dict(limits.options))} and VLM_ASSETS_IMAGE_TOKENS={limits.tokens}: {error}"
            ) from error
        return load_processor(source), None


def fit_images(
    processor: Any,
    prompt: str,
    limits: ImageLimits,
    *,
    context: int | None,
    without: Collection[str] = (),
) -> ImageTokens:
    """Set the processor to the largest size at which all images fit, and return their cost.

    Where they do not all fit even at the smallest size, that size is set, and ``fitting`` is below
    ``images``.
    """
    shipped = processor.image_processor
    text = prompt_tokens(processor, prompt, [])
    room = min(
        math.inf if limits.tokens is None else limits.tokens,
        math.inf if context is None else context - text - limits.answer_tokens,
    )
    cost: ImageTokens | None = None
    pixels = limits.pixels
    while pixels >= _SMALLEST:
        bounds = within(shipped, pixels, limits.options)
        options = {**limits.options, **{name: bounds[name] for name in bounds.keys() - without}}
        if cost is None or options != cost.options:
            _set(processor, shipped, options)
            each, alone = _costs(processor, prompt, text, pixels, limits.images)
            fitting = max(1, min(limits.images, int(min(room, 1 << 40) // each)))
            cost = ImageTokens(each, text, limits.images, fitting, pixels, context, options, limits.tokens)
            share = room / max(alone, each * limits.images)
            if share >= 1:
                break
        pixels = int(pixels * min(0.9, max(0.1, share)))
    assert cost is not None
    return cost


def within(image_processor: Any, pixels: int, chosen: Mapping[str, Any]) -> dict[str, Any]:
    """The options with which an image has at most so many pixels when it reaches the model.

    chosen: the user's options, which are kept where they ask for fewer. The pixels of tiles count; those of a
    small copy of the whole image beside the tiles do not. At least one tile remains. Families with images of
    one fixed size (LLaVA, Gemma) have no such options.
    """
    own = {name: chosen.get(name, getattr(image_processor, name, None)) for name in _READ}
    size = dict(own["size"] or {})
    if own["max_soft_tokens"] and own["pooling_kernel_size"]:  # Gemma 4: a token is a square of patches
        token_pixels = (own["patch_size"] * own["pooling_kernel_size"]) ** 2
        fitting = [
            tokens
            for tokens in _SOFT_TOKENS
            if tokens * token_pixels <= pixels and tokens <= own["max_soft_tokens"]
        ]
        return {"max_soft_tokens": max(fitting, default=min(_SOFT_TOKENS))}
    if own["max_slice_nums"] and own["scale_resolution"]:  # MiniCPM-V: so many tiles
        return {"max_slice_nums": max(1, min(own["max_slice_nums"], pixels // own["scale_resolution"] ** 2))}
    if own["max_crops"] and size.get("height"):  # Molmo2: so many tiles, which overlap
        return {"max_crops": max(1, min(own["max_crops"], pixels // (size["height"] * size["width"])))}
    if own["image_grid_pinpoints"]:  # LLaVA-NeXT and -OneVision: the grids that an image may be laid on
        grids = own["image_grid_pinpoints"]
        fitting = [grid for grid in grids if math.prod(grid) <= pixels]
        return {"image_grid_pinpoints": fitting or [min(grids, key=math.prod)]}
    if own["max_patches"] and own["max_patches"] > 1 and size.get("height"):  # InternVL: so many tiles
        tiles = pixels // (size["height"] * size["width"])
        return {"max_patches": max(1, own["min_patches"] or 1, min(own["max_patches"], tiles))}
    if own["do_image_splitting"] and own["max_image_size"]:  # Idefics3, SmolVLM: enlarged to so many tiles
        tile, longest = own["max_image_size"]["longest_edge"], size["longest_edge"]
        return {"size": {"longest_edge": max(tile, min(longest, math.isqrt(pixels) // tile * tile))}}
    if own["max_tiles"] and own["max_image_tokens"]:  # LFM2-VL: one whole image, or so many tiles
        return _tiles_or_tokens(own, pixels)
    if own["merge_size"] and size.get("longest_edge"):  # Qwen-VL, GLM: both edges are pixels of the image
        most = pixels * _frames(image_processor)
        return {"size": {name: min(size[name], most) for name in ("shortest_edge", "longest_edge")}}
    return {}


def _tiles_or_tokens(own: Mapping[str, Any], pixels: int) -> dict[str, Any]:
    """LFM2-VL's options under a bound of pixels: fewer tiles, or where two are too many, a smaller image."""
    tiles = min(own["max_tiles"], pixels // own["tile_size"] ** 2)
    if own["do_image_splitting"] and tiles >= max(2, own["min_tiles"]):
        return {"max_tiles": tiles}
    token_pixels = (own["encoder_patch_size"] * own["downsample_factor"]) ** 2
    most = max(1, min(own["max_image_tokens"], pixels // token_pixels))
    least = min(own["min_image_tokens"], most)
    return {"do_image_splitting": False, "max_image_tokens": most, "min_image_tokens": least}


def _frames(image_processor: Any) -> int:
    """How many times the bound in ``size`` counts each pixel. GLM's image is a video of two equal frames."""
    count = getattr(image_processor, "get_number_of_image_patches", None)
    if count is None:
        return 1
    most = int(dict(image_processor.size)["longest_edge"])
    side = 2 * math.isqrt(most)  # larger than the bound, so that the bound decides
    shown = int(count(side, side, {})) * int(image_processor.patch_size) ** 2
    return max(1, round(most / shown))


_SOFT_TOKENS: Final = (70, 140, 280, 560, 1120)
"""Tokens of an image that Gemma 4 takes."""

_READ: Final = (
    "size", "image_grid_pinpoints", "max_patches", "min_patches", "do_image_splitting", "max_image_size",
    "merge_size", "max_soft_tokens", "pooling_kernel_size", "patch_size", "max_slice_nums",
    "scale_resolution", "max_crops", "max_tiles", "min_tiles", "tile_size", "max_image_tokens",
    "min_image_tokens", "encoder_patch_size", "downsample_factor",
)  # fmt: skip

_COUNTED_BY_MODELS: Final = ("image_grid_pinpoints", "downsample_mode")
"""Options by which a model's own code, too, counts the tiles (LLaVA) or tokens (MiniCPM-V) of an image."""


def agree_on_images(config: Any, processor: Any) -> None:
    """Copy the options by which both count an image's tiles from the processor to the model's configuration.

    Otherwise LLaVA expects the tiles of its own list of grids, and refuses images under a bound of pixels.
    """
    for name in _COUNTED_BY_MODELS:
        value = getattr(processor.image_processor, name, None)
        if value is not None and hasattr(config, name):
            setattr(config, name, value)


def _refuse_unknown(processor: Any, options: Mapping[str, Any]) -> None:
    accepted = set(getattr(processor.image_processor.valid_kwargs, "__annotations__", {}))
    if unknown := sorted(options.keys() - accepted):
        raise ModelLoadError(
            f"VLM_ASSETS_PROCESSOR_OPTIONS: {type(processor.image_processor).__name__} has no option"
            f" {', '.join(unknown)}; it has {', '.join(sorted(accepted))}"
        )


def _set(processor: Any, shipped: Any, options: Mapping[str, Any]) -> None:
    """Give the processor an image processor with these options, and have it pass them at each call."""
    if options:
        processor.image_processor = type(shipped)(**{**_attributes(shipped), **options})
    processor.images_kwargs = {**getattr(type(processor), "images_kwargs", {}), **options}


def _attributes(image_processor: Any) -> dict[str, Any]:
    names = getattr(image_processor.valid_kwargs, "__annotations__", {})
    values = {name: getattr(image_processor, name, None) for name in names}
    return {name: value for name, value in values.items() if value is not None}


def _costs(processor: Any, prompt: str, text: int, pixels: int, images: int) -> tuple[int, int]:
    """Tokens of an image among several, and of an image alone, which LLaVA shows at a higher resolution."""
    shape = _dearest_shape(processor, prompt, pixels)
    alone = prompt_tokens(processor, prompt, [shape]) - text
    if images == 1:
        return alone, alone
    return math.ceil((prompt_tokens(processor, prompt, [shape] * 2) - text) / 2), alone


def _dearest_shape(processor: Any, prompt: str, pixels: int) -> tuple[int, int]:
    """Width and height of the image with most patches, or tokens, among images with so many pixels."""
    shapes = [_sides(shape, pixels) for shape in _SHAPES]
    count = getattr(processor.image_processor, "get_number_of_image_patches", None)
    if count is None:
        return max(shapes, key=lambda shape: prompt_tokens(processor, prompt, [shape]))

    def patches(shape: tuple[int, int]) -> int:
        counted = count(shape[1], shape[0], dict(processor.images_kwargs))
        return int(counted[0] if isinstance(counted, tuple) else counted)

    return max(shapes, key=patches)


def _sides(shape: tuple[int, int], pixels: int) -> tuple[int, int]:
    width, height = shape
    scale = math.sqrt(pixels / (width * height))
    return max(1, int(width * scale)), max(1, int(height * scale))


def prompt_tokens(processor: Any, prompt: str, sizes: list[tuple[int, int]]) -> int:
    """Tokens of a prompt with grey images of these sizes, as the processor makes it."""
    images = [Image.new("RGB", size, "grey") for size in sizes]
    return int(processed(processor, prompt, [images])["input_ids"].shape[1])
