"""With the catalogue of an earlier day no command harms what was published since, and ordinals stay."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from typer.testing import Result

from tests.support.command_line import run_command
from tests.support.damage import damage_rows, flipped
from tests.support.homes import Dataset
from tests.support.listings import write_listing
from vlm_assets.config.settings import load_settings
from vlm_assets.services.home_audit import audit
from vlm_assets.services.repairs import Remedy, find_repairs
from vlm_assets.services.status import read_status
from vlm_catalog.catalog import Catalog, CatalogError, CatalogUnreadableError
from vlm_catalog.catalog_copies import backup_paths, catalog_path, check_copies, mark_path, quarantine
from vlm_catalog.ingest import close_tail, ingest
from vlm_durable.versions.findings import FindingKind
from vlm_durable.versions.partition_findings import stray_files

IDS = [f"p{number}" for number in range(24)]


def add(home: Path, ids: list[str], **options: bool) -> None:
    """Ingest these properties, in this order."""
    listing = write_listing(home.parent / "listing.jsonl", {one: [f"{one}.jpg"] for one in ids})
    ingest(listing, home, range_size=8, image_root=Path("/"), **options)


def numbers(home: Path) -> dict[str, int]:
    """The ordinal of each property."""
    tables = [table for _, table in Catalog.open(home).slices(with_tail=True)]
    return {row["property_id"]: row["ordinal"] for table in tables for row in table.to_pylist()}


@pytest.fixture(scope="module")
def homes(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A home of 16 properties, and as it was later: 24, and the third range published."""
    folder = tmp_path_factory.mktemp("homes")
    add(folder / "home", IDS[:16])
    shutil.copytree(folder / "home", folder / "older")
    add(folder / "home", IDS)
    dataset = Dataset(load_settings(model="example", home=folder / "home"))
    dataset.describe(dataset.keys[2])
    dataset.embed(dataset.keys[2])
    return folder / "older", folder / "home"


@pytest.fixture
def older(homes: tuple[Path, Path]) -> Path:
    """The home of the earlier day."""
    return homes[0]


@pytest.fixture
def dataset(homes: tuple[Path, Path], tmp_path: Path) -> Dataset:
    """The home of today."""
    shutil.copytree(homes[1], tmp_path / "home")
    return Dataset(load_settings(model="example", home=tmp_path / "home"))


def forget(home: Path, older: Path) -> None:
    """Have all that says which catalogue a home has be that of an earlier day."""
    for files in (catalog_path, lambda home: backup_paths(home)[0], mark_path):
        shutil.rmtree(files(home).parent)
        shutil.copytree(files(older).parent, files(home).parent)


@pytest.fixture
def forgetful(dataset: Dataset, older: Path) -> Dataset:
    """The home of today with all that says which catalogue it has from the earlier day."""
    forget(dataset.settings.home, older)
    return dataset


def call(dataset: Dataset, *arguments: str) -> Result:
    return run_command(dataset.settings.home, *arguments)


def test_the_catalogue_of_an_earlier_day_is_put_back_by_every_command(dataset: Dataset, older: Path) -> None:
    """Status, the audit, the sensor and an ingest in another order see 24 properties with their ordinals."""
    home, settings = dataset.settings.home, dataset.settings
    today = catalog_path(home).read_bytes()
    for look in (
        lambda: read_status(settings, dataset.catalog),
        lambda: audit(settings, dataset.catalog),
        lambda: check_copies(home),
        lambda: add(home, IDS[::-1]),
    ):
        shutil.copyfile(catalog_path(older), catalog_path(home))
        look()
        assert catalog_path(home).read_bytes() == backup_paths(home)[0].read_bytes() == today
        assert numbers(home) == {one: number for number, one in enumerate(IDS)}
    assert audit(settings, dataset.catalog, deep=True).ok


def test_no_published_file_is_ever_foreign(forgetful: Dataset) -> None:
    """Where nothing tells that the catalogue is old, the file's own record does: nobody moves it away."""
    settings = forgetful.settings
    assert forgetful.catalog.rows == 16
    found = audit(settings, forgetful.catalog)
    assert {one.kind for one in found.findings} == {FindingKind.UNLISTED}
    assert {one.remedy for one in find_repairs(settings, found)} == {Remedy.BY_HAND}
    files = [asset.published / "000000016-000000023.parquet" for asset in settings.partitioned_assets]
    assert call(forgetful, "repair", "--yes").exit_code == 1
    assert all(path.exists() for path in files)
    warnings = " ".join(read_status(settings, forgetful.catalog).warnings)
    assert "the catalogue is an older version" in warnings
    assert "moves it into" not in warnings
    kinds = {finding.kind for finding in stray_files(settings.descriptions, forgetful.keys)}
    assert kinds == {FindingKind.UNLISTED}


@pytest.mark.parametrize("order", ["same", "reversed", "more", "with more before"])
def test_an_ingest_gives_published_properties_their_ordinals_again(forgetful, homes, order) -> None:
    """Whatever the order of the listing, the rows of the published range are those of the day before."""
    home = forgetful.settings.home
    listed = {
        "same": IDS,
        "reversed": IDS[::-1],
        "more": [*IDS, "q1", "q2"],
        "with more before": ["q1", *IDS, "q2"],
    }[order]
    add(home, listed)
    today = Catalog.open(homes[1])
    assert forgetful.catalog.slice(today.ranges[2]) == today.slice(today.ranges[2])
    assert [number for one, number in numbers(home).items() if one in IDS] == list(range(24))
    assert audit(forgetful.settings, forgetful.catalog, deep=True).ok


def test_ranges_between_are_filled_and_published_ones_keep_their_bounds(dataset, older) -> None:
    """Ranges that nobody computed yet may hold other properties now; a closed tail stays as it was."""
    home = dataset.settings.home
    add(home, [*IDS, *(f"q{number}" for number in range(11))], close=True)
    last = dataset.catalog.ranges[-1]
    assert (last.start, last.stop) == (32, 35)
    dataset.describe(last.key)
    before = numbers(home)
    forget(home, older)
    with pytest.raises(CatalogError, match=r"of its properties are not new in .*, such as 'q10'"):
        add(home, IDS)
    with pytest.raises(CatalogError, match="has no property for the number 24 before it"):
        add(home, [*IDS, "q8", "q9", "q10"])
    assert dataset.catalog.rows == 16
    add(home, [*(f"q{number}" for number in range(10, -1, -1)), *IDS[::-1]])
    assert [one.key for one in dataset.catalog.ranges] == [
        "000000000-000000007", "000000008-000000015", "000000016-000000023", "000000024-000000031", last.key
    ]  # fmt: skip
    after = numbers(home)
    assert all(after[one] == number for one, number in before.items() if number < 24 or number >= 32)
    assert sorted(after.values()) == list(range(35))
    assert audit(dataset.settings, dataset.catalog, deep=True).ok


def test_a_tail_is_not_closed_over_a_published_range(dataset: Dataset, older: Path, tmp_path: Path) -> None:
    """A tail of the earlier day is a part of that range: it is an ingest that completes it."""
    home = dataset.settings.home
    shutil.copytree(older, tmp_path / "with tail" / "home")
    add(tmp_path / "with tail" / "home", IDS[:20])
    forget(home, tmp_path / "with tail" / "home")
    with pytest.raises(CatalogError, match="Ingest your listings again first"):
        close_tail(home)
    add(home, IDS[::-1])
    assert numbers(home) == {one: number for number, one in enumerate(IDS)}


@pytest.mark.parametrize(
    ("since", "reason"),
    [
        ((IDS[:20], True), "its range lies across others"),
        (([*IDS[:16], "q0"], False), "the catalogue has 'q0' in place of 'p16'"),
    ],
)
@pytest.mark.promise("Of two valid versions the newer is true")
def test_no_property_takes_the_number_of_a_published_one(dataset, older, tmp_path, since, reason) -> None:
    """What was ingested into the older catalogue in the meantime stops an ingest instead."""
    home, other = dataset.settings.home, tmp_path / "since" / "home"
    shutil.copytree(older, other)
    add(other, since[0], close=since[1])
    forget(home, other)
    before = catalog_path(home).read_bytes()
    with pytest.raises(CatalogError, match=reason):
        add(home, IDS)
    assert catalog_path(home).read_bytes() == before


def test_a_damaged_file_says_no_number(forgetful: Dataset) -> None:
    """It is put back from its second copy before its ids are read."""
    damage_rows(forgetful.settings.descriptions.published / "000000016-000000023.parquet")
    add(forgetful.settings.home, IDS[::-1])
    assert numbers(forgetful.settings.home) == {one: number for number, one in enumerate(IDS)}
    assert audit(forgetful.settings, forgetful.catalog, deep=True).ok


def test_an_older_catalogue_is_accepted_by_a_person_alone(dataset: Dataset, older: Path) -> None:
    """The command that the error names works: it says what is lacking, asks, and renumbers nothing."""
    home = dataset.settings.home
    for path in (catalog_path(home), backup_paths(home)[0]):
        shutil.copyfile(catalog_path(older), path)
    with pytest.raises(CatalogUnreadableError) as raised:
        dataset.catalog  # noqa: B018 - it is opened
    assert f"`vlm-assets repair --home {home} --catalog {catalog_path(home)}`" in str(raised.value)
    asked = call(dataset, "repair", "--catalog", str(catalog_path(home)))
    assert asked.exit_code == 1
    assert "the newest that is known of is ingest 2" in asked.output
    assert "Published, and not in it: 000000016-000000023" in asked.output
    with pytest.raises(CatalogUnreadableError):
        dataset.catalog  # noqa: B018 - it is opened
    done = call(dataset, "repair", "--catalog", str(catalog_path(home)), "--yes")
    assert done.exit_code == 0, done.output
    assert (dataset.catalog.header.sequence, dataset.catalog.rows) == (3, 16)
    assert catalog_path(home).read_bytes() == backup_paths(home)[0].read_bytes()
    assert len(list(quarantine(home).glob("catalog*"))) == 2
    add(home, IDS[::-1])
    assert numbers(home) == {one: number for number, one in enumerate(IDS)}
    assert audit(dataset.settings, dataset.catalog, deep=True).ok


def test_the_newest_catalogue_comes_back_from_a_copy_of_ones_own(dataset, older, tmp_path) -> None:
    """It is taken as it is once every byte was read; damage and another home's catalogue are refused."""
    home = dataset.settings.home
    today = catalog_path(home).read_bytes()
    (tmp_path / "mine.parquet").write_bytes(today)
    shutil.copyfile(catalog_path(older), catalog_path(home))
    backup_paths(home)[0].unlink()
    (tmp_path / "damaged.parquet").write_bytes(flipped(today, 200))
    add(tmp_path / "other" / "home", IDS)
    for place, reason in (
        (tmp_path / "damaged.parquet", "is no whole catalogue"),
        (tmp_path / "none.parquet", "cannot be read"),
        (catalog_path(tmp_path / "other" / "home"), "is the catalogue of another home"),
    ):
        with pytest.raises(CatalogError, match=reason):
            call(dataset, "repair", "--catalog", str(place), "--yes")
    done = call(dataset, "repair", "--catalog", str(tmp_path / "mine.parquet"), "--yes")
    assert done.exit_code == 0, done.output
    assert "older version" not in done.output
    assert catalog_path(home).read_bytes() == backup_paths(home)[0].read_bytes() == today
    assert dataset.catalog.rows == 24


def test_of_two_homes_catalogues_a_person_names_the_true_one(dataset: Dataset, tmp_path: Path) -> None:
    """Without a mark nothing here can tell: both are kept, and the command takes the one that is named."""
    home = dataset.settings.home
    mine = backup_paths(home)[0].read_bytes()
    for count in (1, 2, 3):
        add(tmp_path / "other" / "home", IDS[:count])
    shutil.copyfile(catalog_path(tmp_path / "other" / "home"), catalog_path(home))
    shutil.rmtree(mark_path(home).parent)
    with pytest.raises(CatalogUnreadableError, match="is of another home than its second copy"):
        read_status(dataset.settings, dataset.catalog)
    done = call(dataset, "repair", "--catalog", str(backup_paths(home)[0]), "--yes")
    assert done.exit_code == 0, done.output
    assert catalog_path(home).read_bytes() == backup_paths(home)[0].read_bytes() == mine
    assert dataset.catalog.rows == 24
