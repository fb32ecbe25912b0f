"""The folders of a home, and the homes that are refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from vlm_assets.config.settings import load_settings
from vlm_durable.files.layout import Home, UnusableHomeError

KEY = "000000000-000000009"


def test_a_published_folder_is_above_nothing_else(tmp_path: Path) -> None:
    """No working file of an asset lies below the folder that readers are pointed at."""
    paths = Home(tmp_path).asset("property_descriptions").partition(KEY)
    working = [
        *(paths.version(number) for number in (0, 1, 2)),
        *(paths.record, paths.record_copy, paths.asset.staging, paths.publication_lock),
        *(paths.journal("g"), paths.quarantine, paths.high_water_mark("g")),
    ]
    assert len(set(working)) == len(working)
    assert paths.published == tmp_path / "property_descriptions" / f"{KEY}.parquet"
    for path in working:
        assert path.relative_to(tmp_path).parts[0].startswith(".")


def test_a_new_or_missing_home_is_not_refused(tmp_path: Path) -> None:
    """A first start, and a home in which every folder is there, are usable."""
    Home(tmp_path / "none").refuse_unusable()
    asset = Home(tmp_path).asset("property_descriptions")
    for folder in (asset.published, asset.versions, asset.staging, asset.journals, asset.quarantine):
        folder.mkdir(parents=True)
    asset.home.refuse_unusable()
    assert load_settings(home=tmp_path).layout == asset.home


def test_listing_keys(tmp_path: Path) -> None:
    """Keys come from names alone; a record's copy and a version are no keys of their own."""
    asset = Home(tmp_path).asset("a")
    assert asset.published_keys() == asset.journal_keys() == []
    for paths in map(asset.partition, ("k1", "k0")):
        for path in (paths.published, paths.record, paths.record_copy, paths.version(0)):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
        paths.journal("g").mkdir(parents=True)
    assert asset.published_keys() == asset.journal_keys() == ["k0", "k1"]


def test_a_partition_of_which_anything_is_there_is_touched(tmp_path: Path) -> None:
    """What is not touched is not looked at: a copy, a version or a mark that is left alone is something."""
    asset = Home(tmp_path).asset("a")
    assert asset.touched_keys() == set()
    one = [asset.partition(f"k{number}") for number in range(6)]
    left = (
        one[0].published, one[1].record, one[2].record_copy, one[3].version(2), one[4].journal("g"),
        one[5].high_water_mark("g"),
    )  # fmt: skip
    for path in left:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    assert asset.touched_keys() == {f"k{number}" for number in range(6)}


def test_an_asset_of_which_anything_is_left_is_listed(tmp_path: Path) -> None:
    """A withdrawal looks into each: a record, a journal, a file in the quarantine or a mark is enough."""
    home = Home(tmp_path)
    assert home.asset_names() == set()
    one = [home.asset(f"a{number}") for number in range(6)]
    left = (
        one[0].versions, one[1].journals, one[2].quarantine, one[3].staging, one[4].high_water_marks,
        one[5].version_marks,
    )  # fmt: skip
    for folder in (*left, home.asset("published alone").published):
        folder.mkdir(parents=True)
    assert home.asset_names() == {asset.name for asset in one}
    assert one[0].folders[-1].is_relative_to(home.state), "what is deleted last is known until then"
    assert {folder for asset in one for folder in asset.folders} >= set(left)


def test_a_folder_on_another_device_is_refused(tmp_path: Path, elsewhere: Path) -> None:
    """Fault 9 (EXDEV): said at the start, not at the first rename. ``.state`` may be elsewhere."""
    (tmp_path / ".state").symlink_to(elsewhere)
    Home(tmp_path).refuse_unusable()
    asset = Home(tmp_path).asset("a")
    for place in (tmp_path / ".staging", asset.versions, asset.published):
        asset.staging.mkdir(parents=True, exist_ok=True)
        if place.is_dir():
            asset.staging.rmdir()
            place.rmdir()
        place.parent.mkdir(parents=True, exist_ok=True)
        place.symlink_to(elsewhere)
        with pytest.raises(UnusableHomeError, match=rf"{place} is on another device than {tmp_path}"):
            asset.home.refuse_unusable()
        place.unlink()


@pytest.mark.parametrize("name", [".state", ".journal", ""])
def test_a_folder_on_a_disk_that_is_not_mounted_is_refused(tmp_path: Path, name: str) -> None:
    """A dangling link is not an empty folder: pauses, marks or unfinished rows would count as none."""
    home = tmp_path / "home"
    if name:
        home.mkdir()
    (home / name).symlink_to(tmp_path / "disk")
    with pytest.raises(UnusableHomeError, match="Mount its disk"):
        Home(home).refuse_unusable()
    (tmp_path / "disk").mkdir()
    Home(home).refuse_unusable()
