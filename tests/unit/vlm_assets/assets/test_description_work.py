"""description_work.py: how the work of a range is cut, and what a run says of too coarse a cut."""

import itertools
from dataclasses import replace
from typing import Literal

import pyarrow as pa
import pytest
from pydantic import BaseModel

from vlm_assets.assets.description_work import DescriptionWork
from vlm_assets.config.resource_settings import build_vision_language_model
from vlm_catalog.catalog import Catalog
from vlm_engine.batches import long_batch
from vlm_engine.devices.find import find_devices
from vlm_engine.images.images import ImageFailure, LoadedProperty
from vlm_engine.ladder import describe_batch
from vlm_engine.protocol import Answer, ImageTokens, RequestTooLargeError
from vlm_engine.schema import DescriptionSchema


@pytest.mark.parametrize(
    ("seconds", "images", "setting"),
    [(20.0, [6, 6], None), (40.0, [6, 6], 6), (90.0, [6, 6], 2), (900.0, [1, 1], 1), (900.0, [12], None)],
)
def test_a_batch_that_a_kill_would_lose_too_much_of_is_named(seconds, images, setting):
    """Over 20 s the setting that helps is named with a value; what cannot be cut is not complained about."""
    advice = long_batch(images, seconds)
    assert (advice is None) == (setting is None)
    if setting is not None:
        assert f"VLM_ASSETS_BATCH_IMAGES={setting};" in advice


def test_a_batch_has_so_many_images_at_most(dataset):
    """The setting reaches the plan, which still has every property once."""
    settings = dataset.settings.model_copy(update={"batch_size": 3, "batch_images": 1})
    model = build_vision_language_model(settings)
    catalog = Catalog.open(settings.home)
    work = DescriptionWork.for_range(settings, catalog, catalog.ranges[0], model)
    batches = work.batch_sizes().plan(work.jobs, max_images=settings.max_images)
    assert sorted(one.property_id for batch in batches for one in batch) == sorted(work.ids)
    assert all(len(batch) == 1 or sum(len(one.image_uris) for one in batch) <= 1 for batch in batches)
    whole = DescriptionWork.for_range(dataset.settings, catalog, catalog.ranges[0], model)
    assert len(whole.batch_sizes().plan(whole.jobs, max_images=settings.max_images)) < len(batches)


class Roof(BaseModel):
    """A short answer."""

    roof: Literal["flat", "hip"]


class Short:
    """An engine that takes so many images of a property, and remembers which it was shown at last."""

    model = revision = "short"

    def __init__(self, holds, allowed, fitting):
        self.image_tokens = None
        if fitting is not None:
            self.image_tokens = ImageTokens(64, 20, allowed, fitting, 4096, 1024, {})
        self.shown = []
        self._holds = holds

    def describe(self, batch, *, attempt):
        (one,) = batch
        self.shown = one.images[: attempt.images]
        if len(self.shown) > self._holds:
            return [RequestTooLargeError("prompt_too_long", "it is too long")]
        return [Answer('{"roof": "hip"}', "stop", 10, 10)]


@pytest.mark.parametrize(
    ("broken", "allowed", "fitting", "holds"),
    list(itertools.product([(), (1, 4)], [12, 8], [None, 8, 5], [12, 6, 2, 0])),
)
def test_a_row_names_the_images_that_were_shown_and_why_not_the_others(
    dataset, broken, allowed, fitting, holds
):
    """No property is described from fewer images than it has without its row saying which, and why."""
    settings = dataset.settings.model_copy(update={"max_images": allowed})
    catalog = Catalog.open(settings.home)
    model = build_vision_language_model(settings)
    work = DescriptionWork.for_range(settings, catalog, catalog.ranges[0], model)
    uris = [f"{at}.jpg" for at in range(10)]
    columns = {"property_id": [work.ids[0]], "ordinal": [0], "image_uris": [uris], "inputs_digest": [""]}
    work = replace(work, properties=pa.table(columns), schema=DescriptionSchema(Roof))
    engine = Short(holds, allowed, fitting)

    # As the worker pool loads it.
    failed, images = [], []
    for at, uri in enumerate(uris):
        if len(images) == min(allowed, fitting or allowed):
            break
        if at in broken:
            failed.append(ImageFailure(uri, "unreadable", "it is broken"))
        else:
            images.append(uri)
    loaded = LoadedProperty(work.ids[0], 0, images, len(images), tuple(failed), 0.0)
    (found,) = describe_batch(engine, work.schema, [loaded], work.settings.max_new_tokens)
    (row,) = work.rows([found], engine, find_devices("cpu:1", {})[0]).to_pylist()

    named = [one["uri"] for one in row["images_failed"]]
    assert row["status"] == ("ok" if holds else "failed")
    assert row["images_used"] == engine.shown
    assert sorted(row["images_used"] + row["images_not_used"] + named) == uris
    assert bool(row["images_not_used"]) == bool(row["images_not_used_reason"])
    if holds and len(engine.shown) < len(images):
        assert row["images_not_used_reason"] == "prompt_too_long: it is too long"
    elif holds and row["images_not_used"]:
        known = engine.image_tokens
        short = known is not None and fitting < allowed
        assert row["images_not_used_reason"] == (
            known.sentence() if short else f"VLM_ASSETS_MAX_IMAGES is {allowed}"
        )
