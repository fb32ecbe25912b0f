"""What an ingest did, as numbers and as sentences for the person who ran it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from vlm_assets.catalog.catalog_copies import backup_paths
from vlm_assets.catalog.listing import NOT_IMAGES
from vlm_assets.catalog.ranges import PropertyRange

_NAMED = 10


@dataclass(frozen=True, kw_only=True)
class IngestReport:
    """Counts are of properties unless they say otherwise. Up to ten ids are named; the counts are complete.

    ``written``: whether the catalogue changed; ``moved``: whether its image root did. ``waiting``: properties
    in the unfilled tail, which is no partition yet. ``new_ranges``: partitions that did not exist before;
    ``stale_ranges``: known ones of which images were replaced. ``notes``: what else the source holds.
    ``not_images``: the first files of a folder tree that are no images.
    ``format``: how it was read, if that is worth a sentence. ``refused``: entries that were left out, which
    stand in ``rejects``. ``more_images``: properties with more than ``max_images``.
    ``range_size_asked``: where another size was asked for than the one before, ``range_size_before``.
    """

    home: Path
    catalog: Path
    catalog_id: str
    written: bool = False
    moved: bool = False
    rows: int
    range_size: int
    image_root: str
    listed: int
    new: int
    waiting: int
    unchanged: int
    changed_taken: int
    changed_not_taken: int
    changed_ids: tuple[str, ...]
    gone: int
    gone_ids: tuple[str, ...]
    without_images: int
    images_listed: int
    images_missing: int
    missing_uris: tuple[str, ...]
    new_ranges: tuple[PropertyRange, ...]
    stale_ranges: tuple[PropertyRange, ...]
    notes: Mapping[str, int]
    not_images: tuple[str, ...] = ()
    format: str | None = None
    refused: int = 0
    rejects: Path | None = None
    max_images: int | None = None
    more_images: int = 0
    range_size_before: int | None = None
    range_size_asked: int | None = None

    def sentences(self) -> tuple[str, ...]:
        """The report in words, the most important first."""
        said = [self.format] if self.format else []
        said.append(
            f"{self.listed} properties with {self.images_listed} images were listed: {self.new} new, "
            f"{self.unchanged} unchanged, {self.changed_taken + self.changed_not_taken} changed. "
            f"The catalogue {'now holds' if self.written else 'stays as it was, with'} "
            f"{self.rows} properties."
        )
        if self.refused:
            said.append(
                f"{self.refused} entries were refused and left out, with their properties. They are listed"
                f" with the reasons in {self.rejects}. Correct them and ingest again."
            )
        if self.new_ranges:
            said.append(f"{len(self.new_ranges)} new partitions: {_named(_keys(self.new_ranges))}.")
        if self.waiting:
            said.append(
                f"Waiting: {self.waiting}, too few for a partition of {self.range_size}."
                " `vlm-assets run --missing` makes a smaller partition of them and runs it;"
                " `ingest --close` only makes it."
            )
        if self.range_size_asked is not None:
            said.append(
                f"The ranges that were there keep their size of {self.range_size_before} properties, for what"
                f" is catalogued never moves; {self.range_size_asked} a range is the size of new properties'"
                " ranges alone. For another size of all, before their first run: remove"
                f" {self.catalog.parent} and {backup_paths(self.home)[0].parent}, and ingest again."
            )
        if self.changed_not_taken:
            said.append(
                f"{self.changed_not_taken} known properties have other images than in the catalogue. They "
                f"were not taken ({_named(self.changed_ids, self.changed_not_taken)}): run ingest --update "
                "to take them, which makes their ranges stale."
            )
        if self.stale_ranges:
            said.append(
                f"The images of {self.changed_taken} known properties were replaced "
                f"({_named(self.changed_ids, self.changed_taken)}). {len(self.stale_ranges)} ranges are "
                f"stale now: {_named(_keys(self.stale_ranges))}."
            )
        if self.moved:
            said.append(f"The catalogue's images lie under {self.image_root} from now on.")
        if self.gone:
            said.append(
                f"{self.gone} known properties are not in this source ({_named(self.gone_ids, self.gone)}). "
                "They stay in the catalogue."
            )
        if self.images_missing:
            said.append(
                f"{self.images_missing} of {self.images_listed} images could not be found or read "
                f"({_named(self.missing_uris, self.images_missing)}). Their properties are described without "
                "them."
            )
            if self.images_missing == self.images_listed:
                said.append(
                    f"Not one image lies where it should, under {self.image_root}: if they lie elsewhere, "
                    "ingest again with --image-root FOLDER --update."
                )
        if self.more_images:
            said.append(
                f"{self.more_images} properties have more than {self.max_images} images"
                " (VLM_ASSETS_MAX_IMAGES). The model is shown the first of them that can be read; each row"
                " lists the images that were used and those that were not."
            )
        if self.without_images:
            said.append(f"{self.without_images} properties have no image: they will be failed rows.")
        for what, count in sorted(self.notes.items()):
            names = f" ({_named(self.not_images, count)})" if what == NOT_IMAGES else ""
            said.append(f"Passed over: {count} {what}{names}.")
        return tuple(said)


def _keys(ranges: Sequence[PropertyRange]) -> list[str]:
    return [one.key for one in ranges]


def _named(names: Sequence[str], count: int | None = None) -> str:
    more = (len(names) if count is None else count) - len(names[:_NAMED])
    return ", ".join(names[:_NAMED]) + (f" and {more} more" if more > 0 else "")
