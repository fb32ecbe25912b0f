"""A source on a real S3 server becomes a catalogue, and nothing outside the folder is ever named."""

import pytest

from vlm_catalog.catalog import Catalog
from vlm_catalog.ingest import ingest, take_in
from vlm_catalog.listing import IngestRequest, ListingError, ReadingOptions
from vlm_durable.mirror import bucket as bucket_module
from vlm_durable.mirror.bucket import S3Folder, StoreAwayError, client

JPEG = b"\xff\xd8\xff\xe0 and more"


@pytest.fixture
def images(bucket, s3_server):
    """Two properties, and what else lies about in a bucket."""
    own = s3_server.client()
    for name in (
        "b/10.jpg",
        "b/2.JPG",
        "b/without suffix",
        "a/1.jpg",
        "a/notes",
        "a/.hidden.jpg",
        "a/deeper/1.jpg",
        "beside.jpg",
    ):
        body = b"text" if name == "a/notes" else JPEG
        own.put_object(Bucket=bucket.bucket, Key=bucket.prefix + name, Body=body)
    return bucket


def catalogued(home):
    catalog = Catalog.open(home)
    rows = catalog.slice(catalog.ranges[0]).to_pylist()
    return {row["property_id"]: dict(zip(row["image_uris"], row["image_bytes"], strict=True)) for row in rows}


def test_a_folder_on_s3_is_read_as_one_on_disk(images, tmp_path, s3_proxy):
    """Ids, natural order and sizes, and what was passed over, without a request for each image."""
    report = ingest(images, tmp_path / "home", close=True)
    assert catalogued(tmp_path / "home") == {
        "a": {"a/1.jpg": len(JPEG)},
        "b": {"b/2.JPG": len(JPEG), "b/10.jpg": len(JPEG), "b/without suffix": len(JPEG)},
    }
    assert list(catalogued(tmp_path / "home")["b"]) == ["b/2.JPG", "b/10.jpg", "b/without suffix"]
    said = " ".join(report.sentences())
    for what in (
        "1 hidden",
        "1 file beside",
        "1 folder inside a property folder",
        "1 file that is not an image (a/notes",
    ):
        assert what in said
    asked = [path.rpartition("/")[2] for method, path in s3_proxy.requests if "list-type" not in path]
    assert sorted(asked) == ["notes", "without%20suffix"]
    assert Catalog.open(tmp_path / "home").image_root == str(images)
    again = ingest(images, tmp_path / "home", close=True)
    assert (again.new, again.unchanged, again.written) == (0, 2, False)


@pytest.mark.parametrize("nested", [False, True])
def test_inner_folders_on_s3_are_those_on_disk(bucket, s3_server, tmp_path, nested):
    """The same tree in both places is the same catalogue, with the same folders passed over and named."""
    names = (
        "1/photos/large/2.jpg",
        "2/front.jpg",
        "2/thumbs/front.jpg",
        "3/a/x.jpg",
        "3/b/y.jpg",
        "4/photos/1.jpg",
        "4/photos/large/1.jpg",
        "5/notes",
        "5/photos/1.jpg",
        "5/photos/no suffix",
        "6/deep/1/2/3/4/5/6/7/8/9/x.jpg",
        "7/photos/again/1.jpg",
        "7/photos/notes",
        "8/1.jpg",
        "8/thumbs/a/1.jpg",
        "8/thumbs/notes",
    )
    own, tree = s3_server.client(), tmp_path / "tree"
    for name in names:
        body = b"text" if name.endswith("notes") else JPEG
        own.put_object(Bucket=bucket.bucket, Key=bucket.prefix + name, Body=body)
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / name).write_bytes(body)
    reports = [
        take_in(IngestRequest(source, close=True, options=ReadingOptions(nested=nested)), tmp_path / home)
        for source, home in ((bucket, "on s3"), (tree, "on disk"))
    ]
    found, expected = (catalogued(tmp_path / home) for home in ("on s3", "on disk"))
    assert found == expected
    assert list(found["4"]) == ["4/photos/1.jpg", *(["4/photos/large/1.jpg"] if nested else [])]
    assert list(found["5"]) == ["5/photos/1.jpg", "5/photos/no suffix"]
    assert list(found["8"]) == ["8/1.jpg", *(["8/thumbs/a/1.jpg"] if nested else [])]
    assert reports[0].notes == reports[1].notes
    assert reports[0].not_images == reports[1].not_images
    (passed_over,) = [one for one in reports[0].sentences() if "Passed over" in one and "folder" in one]
    advice = "(more than 8 folders deep)" if nested else "--nested` takes the images in them)"
    assert advice in passed_over


def test_a_listing_names_images_on_s3(images, tmp_path):
    """Full addresses and keys relative to the root are the same images; a missing one costs itself alone."""
    listing = tmp_path / "list.csv"
    listing.write_text(f"property_id,images\n1,{images}/a/1.jpg|b/2.JPG\n2,{images}/a/missing.jpg\n")
    report = ingest(listing, tmp_path / "home", image_root=images, close=True)
    assert catalogued(tmp_path / "home") == {
        "1": {"a/1.jpg": len(JPEG), "b/2.JPG": len(JPEG)},
        "2": {"a/missing.jpg": None},
    }
    assert report.images_missing == 1


def test_no_listing_leads_out_of_the_folder(images, tmp_path):
    """Another bucket, a neighbour with a similar name, and dots are refused, line by line."""
    listing = tmp_path / "list.csv"
    bad = ["s3://other/a.jpg", f"{images}2/a.jpg", "a/../../x.jpg", "/a.jpg", f"{images}/a/./1.jpg"]
    listing.write_text("property_id,images\n" + "".join(f"{at},{one}\n" for at, one in enumerate(bad)))
    with pytest.raises(ListingError) as raised:
        ingest(listing, tmp_path / "home", image_root=images)
    assert str(raised.value).count("line ") == len(bad)


def test_a_listing_that_lies_on_s3_is_refused_with_the_way_out(tmp_path):
    """The sentence says to copy the listing; nothing is asked and nothing made."""
    with pytest.raises(ListingError, match="Copy it here"):
        ingest(S3Folder.parse("s3://bucket/list.csv"), tmp_path / "home")
    assert not (tmp_path / "home").exists()


def test_a_store_that_is_down_changes_no_catalogue(images, tmp_path, s3_proxy, monkeypatch):
    """An outage in mid-ingest is an error: no catalogue of what was listed so far, no missing images."""
    monkeypatch.setattr(bucket_module, "PATIENCE_SECONDS", 0.0)
    client.cache_clear()
    ingest(images, tmp_path / "home", close=True)
    before = Catalog.open(tmp_path / "home").path.read_bytes()
    s3_proxy.breaks(lambda passing: "without" in passing.path and passing.answer(503, "SlowDown"))
    with pytest.raises(StoreAwayError, match="SlowDown"):
        ingest(images, tmp_path / "home", update=True)
    assert Catalog.open(tmp_path / "home").path.read_bytes() == before
