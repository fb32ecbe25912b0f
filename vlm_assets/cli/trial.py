"""``vlm-assets try``: a few properties described without a partition, before weeks of it."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from vlm_assets.cli.options import AsJson, Home, app, chosen_settings, say_as_json
from vlm_assets.operate.terminal import duration, say
from vlm_assets.settings import PREFIX, require_models

if TYPE_CHECKING:
    from vlm_assets.operate.trial import BatchTrial, Trial

_EXAMPLES = """\b
vlm-assets try --limit 20
vlm-assets try --batch-images 32 --batch-images 64    which batch pays"""

Limit = Annotated[int, typer.Option(min=1, help="Properties to describe.")]
Batches = Annotated[
    list[int] | None,
    typer.Option(
        "--batch-images",
        min=1,
        help="Find the batch that pays: images described together, such as 64; repeat it for each size.",
    ),
]


@app.command("try", epilog=_EXAMPLES)
def try_(home: Home = None, limit: Limit = 20, batch_images: Batches = None, as_json: AsJson = False) -> None:
    """Describe a few properties without a partition: the answers, the rate, and what all would take.

    What was measured is kept for `vlm-assets plan`.
    """
    from vlm_assets.catalog.catalog import Catalog
    from vlm_assets.operate.measurement import keep_trial
    from vlm_assets.operate.trial import choose, run_trial, try_batches
    from vlm_assets.resource_settings import build_gpu, build_vision_language_model

    current = chosen_settings(home)
    catalog = Catalog.open(current.home)
    require_models(current)
    gpu, model = build_gpu(current), build_vision_language_model(current)
    if not batch_images:
        trial = run_trial(current, catalog, gpu, model, limit=limit)
        keep_trial(current, model, trial)
        if as_json:
            say_as_json(_as_json(trial))
        else:
            _show(trial)
        return
    tried = []
    for one in try_batches(current, catalog, gpu, model, sizes=batch_images):
        if not as_json:
            say(_line(one))
        tried.append(one)
        changed = {"batch_size": one.images, "batch_images": one.images}
        keep_trial(current.model_copy(update=changed), model, one.trial)
    if as_json:
        chosen = choose(tried)
        sizes = [_as_json(one.trial) | {"images_a_batch": one.images, "held": one.held} for one in tried]
        say_as_json({"tried": sizes, "batch_images": None if chosen is None else chosen.images})
    else:
        say(_advice(tried))


def _as_json(trial: Trial) -> dict[str, object]:
    measured = {
        name: getattr(trial, name)
        for name in ("properties_per_second", "images_per_second", "days", "disk_bytes")
    }
    return asdict(trial) | measured


def _show(trial: Trial) -> None:
    for one in trial.described:
        say(one.property_id, bold=True)
        if one.description is None:
            say(f"  failed ({one.error_kind}): {one.error}")
        else:
            for name, value in one.description.items():
                say(f"  {name}: {value}")
        if one.fewer_images is not None:
            say(f"  shown with {one.images_seen} images only: {one.fewer_images}")
        for failure in one.images_failed:
            say(f"  image left out ({failure.kind}): {failure.error}")
    say(
        f"\n{len(trial.described)} properties in {trial.seconds:.1f} s on {trial.device}:"
        f" {trial.properties_per_second:.2f} properties/s, {trial.images_per_second:.1f} images/s"
        f" (in partitions of {trial.partition_rows}, starts of processes and models included;"
        f" the model loaded in {trial.load_seconds:.1f} s)"
    )
    asked = [one for one in trial.described if one.prompt_tokens]
    prompts = [one.prompt_tokens / one.attempts for one in asked] or [0.0]
    say(
        f"A property's images and prompt are {sum(prompts) / len(prompts):,.0f} tokens here,"
        f" {max(prompts):,.0f} at most."
        + ("" if trial.image_tokens is None else f" As set, at most: {trial.image_tokens.sentence()}.")
    )
    say(
        f"All {trial.catalogue_rows} would take {duration(86_400 * trial.days)} on {trial.devices}"
        f" device{'s' if trial.devices > 1 else ''} like it, and {trial.disk_bytes / 1e6:,.1f} MB of disk"
        " for the descriptions and their second copies."
    )


def _line(one: BatchTrial) -> str:
    memory = one.trial.device_bytes
    return (
        f"{one.images:5d} images a batch: {one.properties_per_second:.2f} properties/s,"
        f" {one.images_per_second:.1f} images/s, {one.longest:.1f} s the longest batch"
        + (f", {memory / (1 << 30):.1f} GiB of the device" if memory else "")
        + ("" if one.held else f"; too large for the device: it went on with {one.trial.held} properties")
    )


def _advice(tried: list[BatchTrial]) -> str:
    from resources.engine.batch_sizes import BATCH_SECONDS
    from vlm_assets.operate.trial import choose

    chosen = choose(tried)
    if chosen is None:
        return (
            f"All too large: the device does not hold them, or a kill loses more than {BATCH_SECONDS:.0f} s."
            f" Try fewer images than {tried[0].images}."
        )
    return (
        f"What pays: {PREFIX}BATCH_IMAGES={chosen.images} {PREFIX}BATCH_SIZE={chosen.images}."
        " What is committed stays, whatever the batches."
    )
