"""Thumbnails for pages, made in a worker: untrusted files are not decoded in the run's own process."""

from __future__ import annotations

import io
import logging
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from PIL import Image

from vlm_durable.mirror.bucket import StoreAwayError
from vlm_engine.images.fetching import ImageSource
from vlm_engine.images.images import LoadedProperty, Made, Maker, PropertyJob
from vlm_engine.images.worker_pool import WorkerPool, WorkerPoolError

_PIXELS: Final = 512 * 512
_IMAGE_SECONDS: Final = 10.0
_ALL_SECONDS: Final = 120.0
"""For all thumbnails of a page. Those that are not made by then are shown as missing."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Thumbnails:
    """Small JPEG files, as arrays of bytes. height: in pixels; the width is at most twice as large."""

    height: int

    def load(self) -> Maker:
        """See ``vlm_engine.images.images.Output``."""
        import numpy as np

        return lambda images: Made([np.frombuffer(self._file(image), np.uint8) for image in images])

    def _file(self, image: Image.Image) -> bytes:
        # A panorama must not push the others off the page.
        width = min(2 * self.height, max(1, round(image.width * self.height / image.height)))
        stream = io.BytesIO()
        image.resize((width, self.height), Image.Resampling.LANCZOS).save(stream, "JPEG", quality=80)
        return stream.getvalue()


def make_thumbnails(
    jobs: Sequence[PropertyJob], *, height: int, source: ImageSource | None = None
) -> list[list[bytes | None]]:
    """A JPEG file for each image of each property; None for an image that failed. Raises nothing."""
    if not jobs:
        return []
    most = max(1, *(len(job.image_uris) for job in jobs))
    pool = WorkerPool(
        Thumbnails(height),
        workers=1,
        prefetch_batches=0,
        max_pixels=_PIXELS,
        max_images=most,
        image_seconds=_IMAGE_SECONDS,
        source=source,
    )
    enough = threading.Timer(_ALL_SECONDS, pool.close)
    enough.daemon = True
    made: list[list[bytes | None]] = []
    with pool:
        enough.start()
        try:
            for job in jobs:
                made.append(_in_place(job, pool.load(job)))
        except (WorkerPoolError, StoreAwayError) as error:
            _log.warning("Images are missing on the page: %s", error)
        finally:
            enough.cancel()
    return made + [[None] * len(job.image_uris) for job in jobs[len(made) :]]


def _in_place(job: PropertyJob, loaded: LoadedProperty) -> list[bytes | None]:
    failed = {failure.uri for failure in loaded.failed}
    files = iter(loaded.images)
    places: list[bytes | None] = []
    for uri in job.image_uris:
        file = None if uri in failed else next(files, None)
        places.append(None if file is None else file.tobytes())
    return places
