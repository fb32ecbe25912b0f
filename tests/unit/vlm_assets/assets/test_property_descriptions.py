"""property_descriptions.py: how the work of a range is cut, and what a run says of too coarse a cut."""

import pytest

from resources.engine.ladder import Described
from vlm_assets.assets.property_descriptions import DescriptionWork, long_batch
from vlm_assets.catalog.catalog import Catalog
from vlm_assets.resource_settings import build_vision_language_model


def described(images: int) -> Described:
    return Described(
        "id", 0, "ok", None, None, {}, None, 1, images, (), prompt_tokens=1, output_tokens=1,
        finish_reason="stop", seconds=1.0,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("seconds", "images", "setting"),
    [(20.0, [6, 6], None), (40.0, [6, 6], 6), (90.0, [6, 6], 2), (900.0, [1, 1], 1), (900.0, [12], None)],
)
def test_a_batch_that_a_kill_would_lose_too_much_of_is_named(seconds, images, setting):
    """Over 20 s the setting that helps is named with a value; what cannot be cut is not complained about."""
    advice = long_batch([described(count) for count in images], seconds)
    assert (advice is None) == (setting is None)
    if setting is not None:
        assert f"VLM_ASSETS_BATCH_IMAGES={setting};" in advice


def test_a_batch_has_so_many_images_at_most(dataset):
    """The setting reaches the plan, which still has every property once."""
    settings = dataset.settings.model_copy(update={"batch_size": 3, "batch_images": 1})
    model = build_vision_language_model(settings)
    catalog = Catalog.open(settings.home)
    work = DescriptionWork.of(settings, catalog, catalog.ranges[0], model)
    batches = work.plan(frozenset())
    assert sorted(one.property_id for batch in batches for one in batch) == sorted(work.ids)
    assert all(len(batch) == 1 or sum(one.images for one in batch) <= 1 for batch in batches)
    whole = DescriptionWork.of(dataset.settings, catalog, catalog.ranges[0], model)
    assert len(whole.plan(frozenset())) < len(batches)
