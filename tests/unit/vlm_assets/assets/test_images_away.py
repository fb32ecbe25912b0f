"""vlm_assets/assets/images_away.py: a disk that is not mounted is never taken for images that are gone."""

import json
from dataclasses import dataclass
from pathlib import Path

import pytest

from resources.engine.ladder import Described, LadderSettings, describe_batch
from resources.images.images import ImageFailure, LoadedProperty
from vlm_assets.assets.images_away import WHOLE_RANGE, ImagesAwayError, ImagesWatch
from vlm_assets.catalog.catalog import Catalog
from vlm_assets.catalog.ingest import ingest


@dataclass
class Shelf:
    """Properties with two images each, one of them never there; ``sizes``: properties of each range."""

    folder: Path

    def fill(self, *sizes: int) -> None:
        lines, first = [], 0
        for size in sizes:
            lines += [
                {"property_id": f"p{n}", "images": [f"images/{n}/a.jpg", f"images/{n}/b.jpg"]}
                for n in range(first, first + size)
            ]
            for number in range(first, first + size):
                self.image(number).parent.mkdir(parents=True)
                self.image(number).write_bytes(b"x")
            first += size
            listing = self.folder / "listing.jsonl"
            listing.write_text("".join(json.dumps(line) + "\n" for line in lines))
            ingest(listing, self.folder / "home", range_size=1000, close=True)

    def image(self, number: int) -> Path:
        return self.folder / "images" / str(number) / "a.jpg"

    def watch(self, number: int = 0, *, range_may_be_gone: bool = False) -> ImagesWatch:
        catalog = Catalog.open(self.folder / "home")
        wanted = catalog.ranges[number]
        return ImagesWatch(catalog, wanted, catalog.slice(wanted), range_may_be_gone)

    def described(self, number: int, name: str = "a", kind: str = "missing") -> Described:
        failed = (ImageFailure(f"images/{number}/{name}.jpg", kind, "gone"),)
        loaded = LoadedProperty(f"p{number}", number, [], 0, failed, 0.0)
        return describe_batch(None, None, [loaded], LadderSettings(max_new_tokens=1))[0]

    def unmount(self) -> None:
        (self.folder / "images").rename(self.folder / "away")


@pytest.fixture
def shelf(tmp_path):
    return Shelf(tmp_path)


@pytest.mark.parametrize("kind", ["missing", "denied", "io_error"])
def test_a_disk_that_is_away_stops_the_range_and_says_what_to_do(shelf, kind):
    """Not one image of the catalogue can be read: no row is made of that."""
    shelf.fill(3, 2)
    watch = shelf.watch()
    watch.look()
    shelf.unmount()
    with pytest.raises(ImagesAwayError, match=r"No such file.*mounted.*--update"):
        watch.take([shelf.described(0, kind=kind)])
    with pytest.raises(ImagesAwayError):
        shelf.watch().look()


def test_an_image_that_never_was_there_is_no_alarm(shelf):
    """What the ingest could not read already is a failed row as ever, wherever the disk is."""
    shelf.fill(3)
    watch = shelf.watch()
    shelf.unmount()
    watch.take([shelf.described(0, "b"), shelf.described(1, kind="unreadable")])


def test_images_that_are_gone_while_others_are_there_are_rows(shelf):
    """A listing that was deleted costs its own row, and is not waited for."""
    shelf.fill(3)
    shelf.image(1).unlink()
    shelf.watch().take([shelf.described(1)])


def test_an_image_that_was_away_and_is_back_makes_no_failed_row(shelf):
    """The disk went and came between the decoding and the look: the batch is not taken."""
    shelf.fill(3)
    with pytest.raises(ImagesAwayError, match="for a moment"):
        shelf.watch().take([shelf.described(1)])
    shelf.watch().take([shelf.described(1, kind="io_error")])  # as of a bad sector, which stays one


def test_a_small_range_may_be_deleted_and_a_large_one_is_asked_about(shelf):
    """One property alone in its range must not hold it up for ever; a whole disk below the root must."""
    shelf.fill(1, WHOLE_RANGE)
    shelf.image(0).unlink()
    shelf.watch(0).take([shelf.described(0)])
    shelf.watch(0).look()
    for number in range(WHOLE_RANGE):
        shelf.image(1 + number).unlink()
    shelf.image(0).write_bytes(b"x")
    with pytest.raises(ImagesAwayError):
        shelf.watch(1).look()
    shelf.watch(1, range_may_be_gone=True).look()
    shelf.unmount()
    with pytest.raises(ImagesAwayError):
        shelf.watch(1, range_may_be_gone=True).look()
