"""Pixels on their way to a server: nothing is lost but what JPEG loses, and no file stays behind."""

import base64
import io
import subprocess
import sys
from pathlib import Path
from urllib.request import url2pathname

import numpy as np
import pytest
from PIL import Image

from resources.engine.server.image_transport import (
    DataUris,
    EncodedImages,
    ImageFiles,
    ImageFolderError,
)


def picture(height, width):
    """Smooth colours, as photographs have them."""
    rows, columns = np.mgrid[0:height, 0:width]
    return np.stack([rows % 256, columns % 256, (rows + columns) // 2 % 256], axis=-1).astype(np.uint8)


def file_of(pixels):
    """An image as workers hand it to the engine."""
    return EncodedImages().load()([Image.fromarray(pixels)]).images[0]


def opened(url):
    data = base64.b64decode(url.partition(",")[2]) if url.startswith("data:") else None
    path = url2pathname(url.removeprefix("file://"))
    with Image.open(io.BytesIO(data) if data is not None else path) as image:
        return image.format, np.asarray(image)


def test_small_images_are_exact():
    """A thumbnail reaches the model as it is."""
    small = np.random.default_rng(1).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    (url,) = DataUris().urls([file_of(small)])
    assert url.startswith("data:image/png;base64,")
    kind, pixels = opened(url)
    assert kind == "PNG"
    assert np.array_equal(pixels, small)


def test_large_images_lose_next_to_nothing():
    """A second compression of a photograph is not seen."""
    large = picture(200, 300)
    (url,) = DataUris().urls([file_of(large)])
    assert url.startswith("data:image/jpeg;base64,")
    kind, pixels = opened(url)
    assert (kind, pixels.shape) == ("JPEG", large.shape)
    assert np.abs(pixels.astype(int) - large).mean() < 1.5


def test_image_longer_than_a_jpeg_may_be_goes_all_the_same(tmp_path):
    """A panorama beyond what JPEG takes is no fault of the folder, nor of anything."""
    images = ImageFiles(tmp_path)
    (url,) = images.urls([file_of(np.zeros((1, 65_501, 3), np.uint8))])
    kind, pixels = opened(url)
    assert (kind, pixels.shape) == ("PNG", (1, 65_501, 3))
    images.close()


def test_files_are_there_until_they_are_forgotten(tmp_path):
    """The server finds each image under its URL, and afterwards the folder is empty."""
    images = ImageFiles(tmp_path / "folder with blanks")
    urls = images.urls([file_of(picture(200, 300)), file_of(picture(10, 10))])
    assert [opened(url)[0] for url in urls] == ["JPEG", "PNG"]
    images.forget(urls)
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and path.name != ".lock"]
    images.close()
    assert not list((tmp_path / "folder with blanks").iterdir())


def test_folder_that_cannot_be_written_is_named(tmp_path):
    """The message says which folder and which setting."""
    (tmp_path / "file").touch()
    with pytest.raises(ImageFolderError, match=r"file.*VLM_ASSETS_SERVER_IMAGE_FOLDER"):
        ImageFiles(tmp_path / "file")


def test_killed_process_leaves_nothing_for_long(tmp_path):
    """Gigabytes of images of killed runs do not gather; those of a living one stay."""
    code = (
        "import os, sys, pathlib, numpy\n"
        "from resources.engine.server.image_transport import ImageFiles\n"
        "ImageFiles(pathlib.Path(sys.argv[1])).urls([numpy.frombuffer(b'\\x89PNG', numpy.uint8)])\n"
        "os.kill(os.getpid(), 9)\n"
    )
    root = Path(__file__).resolve().parents[5]
    killed = subprocess.run([sys.executable, "-c", code, tmp_path], cwd=root, check=False)
    assert killed.returncode == -9
    assert len(list(tmp_path.rglob("*.png"))) == 1
    living = ImageFiles(tmp_path)
    living.urls([file_of(picture(9, 9))])
    other = ImageFiles(tmp_path)
    assert len(list(tmp_path.rglob("*.png"))) == 1
    assert len(list(tmp_path.iterdir())) == 2
    living.close()
    other.close()
