"""What ``doctor`` tries of the catalogue, and of a sample of its images."""

from __future__ import annotations

import contextlib
import random
import time
from collections import Counter
from pathlib import Path
from statistics import median
from typing import Final

from vlm_assets.config.extensions import Findings
from vlm_assets.config.settings import Settings
from vlm_assets.services.progress import doing
from vlm_assets.services.trial import sample
from vlm_catalog.catalog import Catalog
from vlm_catalog.image_root import InvalidImagePathError
from vlm_durable.commands import command
from vlm_durable.wording import counted
from vlm_engine.images.images import PropertyJob, common_name, recognised_format
from vlm_engine.images.thumbnails import Thumbnails
from vlm_engine.images.worker_pool import WorkerPool

IMAGES: Final = 200
_IMAGES_SECONDS: Final = 40.0
_UNREADABLE_WARN: Final = 0.01
_SUFFIXES: Final = {"JPG": "JPEG", "JFIF": "JPEG", "HEIF": "HEIC", "TIF": "TIFF"}


def examine_catalogue(settings: Settings) -> Findings:
    """The catalogue reads, fills its partitions, and its images' folders are mounted. Raises CatalogError."""
    catalog = Catalog.open(settings.home)
    yield "ok", f"{counted(catalog.rows, 'properties')} in {counted(len(catalog.ranges), 'partitions')}."
    if catalog.waiting:
        yield (
            "warning",
            f"{counted(catalog.waiting, 'properties are', 'property is')} too few to fill a partition:"
            f" {command('run', '--missing')} takes"
            " them too.",
        )
    for root in catalog.images.places:
        if isinstance(root, Path) and not root.is_dir():
            yield "error", f"The images' folder {root} is not there: mount it, or ingest again."


def examine_images(settings: Settings) -> Findings:
    """Read a sample of the images with the workers of a run. Raises CatalogError."""
    catalog = Catalog.open(settings.home)
    jobs, outside, sizes = _sampled_images(catalog)
    formats, bad, kinds = Counter[str](), Counter[str](), Counter[str]()
    first, seen, seconds = "", 0, 0.0
    deadline = time.monotonic() + _IMAGES_SECONDS
    with WorkerPool(
        Thumbnails(16),
        workers=settings.decode_workers,
        prefetch_batches=1,
        max_pixels=settings.max_pixels,
        max_images=1,
        image_seconds=_IMAGES_SECONDS / 4,
        source=catalog.images,
    ) as pool:
        for job, (loaded,) in zip(jobs, pool.feed([[job] for job in jobs]), strict=False):
            doing("reading images", formats.total(), len(jobs))
            name = _format(catalog, job.image_uris[0])
            formats[name] += 1
            seen, seconds = seen + loaded.seen, seconds + loaded.seconds
            for failure in loaded.failed:
                bad[name] += 1
                kinds[failure.kind] += 1
                first = first or failure.error
            if time.monotonic() > deadline:
                break
    if outside:
        name = f"outside of {catalog.image_root}"
        formats[name] = bad[name] = kinds["denied"] = outside
    examined = formats.total()
    rate = f"{seen / seconds:.1f} images/s a core" if seconds else "no rate"
    share = f"{bad.total() / max(1, examined):.1%} cannot be read"
    if bad:
        share += f": {', '.join(f'{count} of {formats[name]} {name}' for name, count in bad.most_common())}"
        share += f" ({', '.join(f'{count} {kind}' for kind, count in kinds.most_common())})"
    properties = len({job.property_id for job in jobs})
    sentence = f"{counted(examined, 'images')} of {counted(properties, 'properties')}: "
    sentence += ", ".join(f"{count} {name}" for name, count in formats.most_common())
    if sizes:
        sentence += f"; {median(sizes) / 1e6:.2f} MB, {max(sizes) / 1e6:.2f} at most"
    sentence += f"; {share}; {rate}"
    if not examined:
        yield "warning", "The catalogue lists no image."
    elif bad.total() == examined:
        yield "error", f"{sentence}. {catalog.images.advice} First: {first}"
    elif kinds["no_decoder"]:
        yield "error", f"{sentence}. First: {first}"
    elif bad.total() > _UNREADABLE_WARN * examined:
        yield "warning", f"{sentence}. First: {first}"
    else:
        yield "ok", f"{sentence}."


def _sampled_images(catalog: Catalog) -> tuple[list[PropertyJob], int, list[int]]:
    """Images of properties spread over the catalogue, any of a property's; how many lie outside; bytes.

    The same images each time, so that what was mended is seen to be.
    """
    jobs, outside, sizes = list[PropertyJob](), 0, list[int]()
    rows = [row for row in sample(catalog, IMAGES).to_pylist() if row["image_uris"]]
    chance = random.Random(catalog.catalog_id)  # noqa: S311 - a sample, no secret
    for row in rows:
        uris = row["image_uris"]
        for at in sorted(chance.sample(range(len(uris)), min(len(uris), IMAGES // len(rows)))):
            try:
                catalog.image_path(uris[at])
            except InvalidImagePathError:
                outside += 1
                continue
            if (size := row["image_bytes"][at]) is not None:
                sizes.append(size)
            jobs.append(PropertyJob(row["property_id"], row["ordinal"], (uris[at],)))
    return jobs, outside, sizes


def _format(catalog: Catalog, uri: str) -> str:
    """The format that a file's first bytes show; else, and for an object on S3, the one that its name shows.

    Nothing is decoded here: a broken file may end its process, so a worker decodes.
    """
    format_ = None
    with contextlib.suppress(OSError, ValueError):  # The worker says why.
        path = catalog.image_path(uri)
        if isinstance(path, Path) and path.is_file():
            with path.open("rb") as stream:
                format_ = recognised_format(stream.read(64))
    suffix = Path(uri).suffix[1:].upper()
    return common_name(format_ or _SUFFIXES.get(suffix, suffix) or "of no known format")
