"""Tests that a command which a message suggests works as it stands, in the same home, and helps."""

from __future__ import annotations

import re
import shlex
import shutil

import pytest
from PIL import Image
from typer.testing import CliRunner

from tests.support.homes import Dataset
from vlm_assets.commands import main as cli
from vlm_assets.config.settings import load_settings
from vlm_catalog.catalog import Catalog
from vlm_catalog.catalog_copies import backup_paths, catalog_path

KEY = "000000000-000000002"


def run(*words):
    return CliRunner().invoke(cli.app, list(map(str, words)))


def suggestions(done):
    text = f"{done.output} {done.exception or ''}"
    return [shlex.split(one)[1:] for one in re.findall(r"`(vlm-assets [^`]*)`", text)]


@pytest.fixture
def listing(tmp_path, monkeypatch):
    """A listing in windows-1252 with three properties, whose images lie elsewhere."""
    monkeypatch.delenv("VLM_ASSETS_HOME", raising=False)
    photos = tmp_path / "my photos"
    photos.mkdir()
    Image.new("RGB", (40, 30)).save(photos / "a.jpg")
    path = tmp_path / "my list.csv"
    path.write_bytes("Objekt;Fotos\nHöfe;a.jpg\n2;a.jpg\n3;a.jpg\n".encode("windows-1252"))
    return path, tmp_path / "my home", photos


def ingest_words(listing, *more):
    path, home, photos = listing
    given = ["--image-root", photos, "--range-size", 2, "--encoding", "windows-1252", "--delimiter", ";"]
    given += ["--id-column", "Objekt", "--image-column", "Fotos"]
    return ["ingest", path, "--home", home, *given, *more]


def test_a_refused_ingest_suggests_the_whole_command(listing):
    """The rest is taken into the same home, with the same root, range size, encoding and delimiter."""
    path, home, _ = listing
    path.write_bytes(path.read_bytes() + b"4;../outside.jpg\n")
    refused = run(*ingest_words(listing))
    assert refused.exit_code == 1
    (suggested,) = suggestions(refused)
    assert run(*suggested).exit_code == 0
    catalog = Catalog.open(home)
    assert (catalog.rows, catalog.header.range_size) == (3, 2)


def test_what_an_ingest_suggests_next_runs(listing):
    """Closing the tail, and taking changed images, act on the same home as the ingest before."""
    path, home, photos = listing
    first = run(*ingest_words(listing))
    close = next(one for one in suggestions(first) if "--close" in one)
    assert run(*close).exit_code == 0
    assert len(Catalog.open(home).ranges) == 2
    Image.new("RGB", (80, 30)).save(photos / "b.jpg")
    path.write_bytes(path.read_bytes().replace(b"3;a.jpg", b"3;b.jpg"))
    (update,) = [one for one in suggestions(run(*ingest_words(listing))) if "--update" in one]
    done = run(*update)
    assert done.exit_code == 0
    assert "stale" in done.output
    assert "To be made anew" not in done.output, "nothing is published yet"


def test_other_photographs_are_given_a_home_of_their_own(listing, tmp_path):
    """Photographs of another folder change nothing; the first suggestion is a home of their own."""
    assert run(*ingest_words(listing)).exit_code == 0
    other = tmp_path / "others"
    (other / "9").mkdir(parents=True)
    Image.new("RGB", (40, 30)).save(other / "9" / "a.jpg")
    refused = run("ingest", other, "--home", listing[1])
    own = next(one for one in suggestions(refused) if "DIR" in one)
    home = tmp_path / "a new home"
    assert run(*[str(home) if word == "DIR" else word for word in own]).exit_code == 0
    assert Catalog.open(home).rows == 1


def lose_catalogue(home):
    copies = [catalog_path(home), *backup_paths(home)]
    shutil.copy(catalog_path(home), home.with_name("copy.parquet"))
    for path in copies:
        if path.exists():
            path.write_bytes(b"no catalogue")


def cut_short(home):
    partition = load_settings(model="example", home=home).descriptions.partition(KEY)
    partition.published.write_bytes(partition.published.read_bytes()[:100])


def put_back(home):
    Dataset(load_settings(model="example", home=home)).put_back(KEY)


@pytest.mark.parametrize(
    ("harm", "asked", "next_step"),
    [
        (shutil.rmtree, "status", "ingest SOURCE"),
        (lose_catalogue, "status", "repair --catalog"),
        (cut_short, "status", "repair"),
        (cut_short, "audit", "repair"),
        (put_back, "audit", f"repair --accept-version {KEY}"),
        (lambda home: run("devices", "pause", "--home", home), "status", "devices resume"),
    ],
)
def test_what_a_refusal_suggests_ends_it(dataset, monkeypatch, harm, asked, next_step):
    """The command out of the message runs as it stands, says how it is told yes, and ends what it was for."""
    home = dataset.settings.home.rename(dataset.settings.home.with_name("my home"))
    monkeypatch.delenv("VLM_ASSETS_HOME", raising=False)
    monkeypatch.setenv("VLM_ASSETS_MODEL", "example")
    harm(home)
    listing = home.with_name("listing.csv")
    listing.write_text("property_id,images\np0,a.jpg\n")
    filled_in = {"SOURCE": str(listing), "FILE": str(home.with_name("copy.parquet"))}

    def ask():
        return [words for words in suggestions(run(asked, "--home", home)) if fits(words)]

    def fits(words):
        step = words[: words.index("--home")] + words[words.index("--home") + 2 :]
        return shlex.join(step).startswith(next_step)

    (suggested, *_) = ask()
    assert suggested[suggested.index("--home") + 1] == str(home)
    done = run(*[filled_in.get(word, word) for word in suggested])
    if done.exit_code:
        (again,) = [words for words in suggestions(done) if "--yes" in words]
        done = run(*again)
    assert done.exit_code == 0, done.output
    assert ask() == []


def test_a_wrong_setting_is_looked_up_in_the_list_that_is_suggested(monkeypatch, tmp_path):
    """The command that lists the settings works where one is wrong: that is when it is asked for."""
    monkeypatch.setenv("VLM_ASSETS_HOMME", "/srv")
    monkeypatch.setenv("VLM_ASSETS_MAX_IMAGES", "many")
    (suggested,) = suggestions(run("status"))
    done = run(*suggested)
    assert "VLM_ASSETS_HOME=" in done.output and "VLM_ASSETS_MAX_IMAGES=12" in done.output
    assert "VLM_ASSETS_HOMME is set" in str(done.exception)


def test_a_command_that_is_copied_from_a_status_is_one_line(dataset, monkeypatch):
    """A terminal of 80 columns breaks no command in two, also where its home has a blank and is long."""
    home = dataset.settings.home.rename(dataset.settings.home.with_name("my " + 10 * "long home "))
    monkeypatch.setenv("VLM_ASSETS_MODEL", "example")
    monkeypatch.setenv("COLUMNS", "80")
    told = run("status", "--home", home).output
    assert any(f"--home '{home}'" in line for line in told.splitlines())
