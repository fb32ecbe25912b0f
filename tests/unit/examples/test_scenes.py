"""The renderer: the same photos each time, every field to be seen, full and small photos alike."""

import io

import numpy as np
from PIL import Image

from examples.architecture import IMAGE_SIDE
from examples.scenes import PHOTO_SIZE, VISIBLE, draw_property, encode_photo, render
from examples.truth import FIELDS


def test_photos_are_the_same_each_time() -> None:
    """A render that was interrupted goes on with the very same photos."""
    first, again = (encode_photo(render(draw_property("example", 7, 3), "street")) for _ in range(2))
    assert first == again
    assert first != encode_photo(render(draw_property("example", 8, 3), "street"))


def test_nine_or_ten_photos_show_every_field() -> None:
    """Nothing is asked of the model that no photo shows."""
    counts = set()
    for index in range(40):
        home = draw_property("example", 7, index)
        counts.add(len(home.views))
        assert {field for view in home.views for field in VISIBLE[view]} == set(FIELDS)
    assert counts == {9, 10}


def test_every_view_renders_at_full_size() -> None:
    """Photos are colour JPEGs with something on them."""
    home = draw_property("example", 7, 0)
    for view in VISIBLE:
        photo = Image.open(io.BytesIO(encode_photo(render(home, view))))
        assert (photo.format, photo.mode, photo.size) == ("JPEG", "RGB", PHOTO_SIZE)
        assert np.asarray(photo).std() > 15


def test_training_sees_what_the_photo_shows() -> None:
    """A photo drawn small for training has the colours of the full photo scaled down."""
    small = (IMAGE_SIDE, IMAGE_SIDE)
    home = draw_property("example", 7, 2)
    for view in home.views:
        full = np.asarray(render(home, view).resize(small, Image.Resampling.LANCZOS), dtype=float)
        direct = np.asarray(render(home, view, size=small, scale=0.4), dtype=float)
        assert np.abs(full - direct).mean() < 12
        assert np.abs(full.mean(axis=(0, 1)) - direct.mean(axis=(0, 1))).max() < 5


def test_a_changed_field_changes_its_photos() -> None:
    """Each field is drawn where VISIBLE says it is."""
    home = draw_property("example", 7, 3)
    other = {
        "building_type": "villa",
        "facade_material": "stone",
        "roof": "flat",
        "floors": 3,
        "garage": "double",
        "has_solar_panels": True,
        "garden": "patio",
        "has_pool": True,
        "kitchen": "navy",
        "living_floor": "tile",
        "has_fireplace": True,
        "bathroom": "shower",
    }
    from dataclasses import replace

    for name, value in other.items():
        assert getattr(home.truth, name) != value
        changed = replace(home, truth=home.truth.model_copy(update={name: value}))
        for view in home.views:
            if name in VISIBLE[view] and name not in ("facade_material",):
                before, after = (np.asarray(render(one, view), dtype=int) for one in (home, changed))
                assert np.abs(before - after).mean() > 0.5, (name, view)
