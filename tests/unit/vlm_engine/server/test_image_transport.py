"""Pixels on their way to a server: nothing is lost but what JPEG loses."""

import base64
import io

import numpy as np
from PIL import Image

from vlm_engine.server.chat_completions import EncodedImages, data_uris


def picture(height, width):
    """Smooth colours, as photographs have them."""
    rows, columns = np.mgrid[0:height, 0:width]
    return np.stack([rows % 256, columns % 256, (rows + columns) // 2 % 256], axis=-1).astype(np.uint8)


def file_of(pixels):
    """An image as workers hand it to the engine."""
    return EncodedImages().load()([Image.fromarray(pixels)]).images[0]


def opened(url):
    with Image.open(io.BytesIO(base64.b64decode(url.partition(",")[2]))) as image:
        return image.format, np.asarray(image)


def test_small_images_are_exact():
    """A thumbnail reaches the model as it is."""
    small = np.random.default_rng(1).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    (url,) = data_uris([file_of(small)])
    assert url.startswith("data:image/png;base64,")
    kind, pixels = opened(url)
    assert kind == "PNG"
    assert np.array_equal(pixels, small)


def test_large_images_lose_next_to_nothing():
    """A second compression of a photograph is not seen."""
    large = picture(200, 300)
    (url,) = data_uris([file_of(large)])
    assert url.startswith("data:image/jpeg;base64,")
    kind, pixels = opened(url)
    assert (kind, pixels.shape) == ("JPEG", large.shape)
    assert np.abs(pixels.astype(int) - large).mean() < 1.5


def test_image_longer_than_a_jpeg_may_be_goes_all_the_same():
    """A panorama beyond what JPEG takes is sent as PNG."""
    (url,) = data_uris([file_of(np.zeros((1, 65_501, 3), np.uint8))])
    kind, pixels = opened(url)
    assert (kind, pixels.shape) == ("PNG", (1, 65_501, 3))
