"""The recipes of docs/after.md, run as they stand there: each reads an export, and the picture opens."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn
from urllib.parse import parse_qs, urlsplit

import pytest
from PIL import Image

from tests.support.homes import Dataset
from tests.support.pictures import COLOURS, OPENED
from tests.support.recipes import recipe
from vlm_assets.assets.truth import verdicts
from vlm_results.described_table import TablePlace, bring_up_to_date
from vlm_results.export import ExportOptions, Format, export
from vlm_results.exported_images import Images
from vlm_results.review import TakenVerdicts, take_verdicts


@pytest.fixture
def run(pictures: Dataset, tmp_path: Path, monkeypatch, left_out) -> Callable[..., dict[str, Any]]:
    """Exports into ``out`` and runs a recipe beside it; gives the names that it has defined."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")

    def run_recipe(heading: str, format_: Format, *, folder: str = "out", number: int = 0, **more: Any):
        export(pictures.settings, pictures.catalog, Path(folder), format_, ExportOptions(**more))
        names: dict[str, Any] = {}
        exec(compile(recipe(heading, number), f"docs/after.md: {heading}", "exec"), names)
        return names

    return run_recipe


@pytest.fixture
def datasets(left_out, tmp_path, monkeypatch) -> None:
    """Hugging Face's library, with a cache of its own: it keeps what it has read."""
    needs("datasets", left_out)
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def needs(module: str, left_out: Callable[[str], NoReturn]) -> None:
    if importlib.util.find_spec(module) is None:
        left_out(module)


def is_of(colour: str, picture: Image.Image) -> bool:
    """Whether a picture has this colour, as JPEG keeps it."""
    seen = picture.convert("RGB").getpixel((4, 4))
    expected = Image.new("RGB", (1, 1), colour).getpixel((0, 0))
    return all(abs(one - other) < 8 for one, other in zip(seen, expected, strict=True))


@pytest.mark.parametrize("images", [Images.copy, Images.link])
def test_pandas_opens_a_picture(run, images, left_out):
    """The first path of the table is the first image of the first property."""
    needs("pandas", left_out)
    assert is_of(COLOURS["a/1.jpg"], run("pandas", Format.huggingface, images=images)["picture"])


@pytest.mark.parametrize("images", [Images.copy, Images.link])
def test_duckdb_finds_every_picture(run, images):
    """Each path of the query is a file that opens."""
    found = run("DuckDB", Format.huggingface, images=images)["images"]
    if images == "link":  # A page that was saved as .jpg is linked too, and no picture.
        found = [row for row in found if not row[2].endswith("page.jpg")]
    assert len(found) == len(OPENED)
    for _, _, path in found:
        with Image.open(path) as picture:
            assert picture.size == (8, 8)


def test_the_table_is_read_as_it_is_and_as_it_was(pictures, tmp_path):
    """pyiceberg alone, without this program: rows, an earlier snapshot, and SQL of DuckDB."""
    settings = pictures.settings.model_copy(update={"embedding_model": None})
    bring_up_to_date(settings, pictures.catalog, TablePlace(tmp_path / "table"))
    names: dict[str, Any] = {"folder": tmp_path / "table"}
    exec(compile(recipe("A table with snapshots"), "docs/after.md", "exec"), names)
    assert names["rows"]["property_id"].to_pylist() == ["c", "d", "a", "b"]
    assert names["before"]["property_id"].to_pylist() == ["a", "b"]
    assert names["floors"] == [(2, 4)]


def test_huggingface_decodes_embedded_pictures(run, datasets):
    """``Image()`` is the column's own feature: nothing is to be cast, and what is missing is None."""
    names = run("Hugging Face", Format.huggingface, folder="embedded", images=Images.embed)
    assert is_of(COLOURS["a/1.jpg"], names["picture"])
    pictures = dict(zip(names["rows"][1]["image_names"], names["rows"][1]["images"], strict=True))
    assert is_of(COLOURS["b/1.jpg"], pictures["b/1.jpg"])
    assert pictures["b/gone.jpg"] is None


@pytest.mark.parametrize("images", [Images.copy, Images.link])
def test_huggingface_opens_pictures_by_their_uris(run, images, datasets):
    """Copies and links become ``Image()`` by one cast."""
    names = run("Hugging Face", Format.huggingface, number=1, images=images)
    assert is_of(COLOURS["a/1.jpg"], names["picture"])
    assert names["rows"][1]["image_uris"][1] is None


def test_huggingface_reads_an_export_anew_that_was_brought_up_to_date(run, pictures, datasets):
    """Its cache asks when each file changed: only if the card names no files."""
    assert run("Hugging Face", Format.huggingface, number=1)["rows"]["text"][0] is not None
    pictures.describe(
        pictures.keys[0], lambda rows: [{**row, "description": None, "status": "failed"} for row in rows]
    )
    assert run("Hugging Face", Format.huggingface, number=1)["rows"]["text"][0] is None


def test_tasks_of_label_studio_name_files_that_it_serves(run, tmp_path):
    """Its import format is a list of tasks with ``data``; each URL is a file below its document root."""
    url = "/data/local-files/?d=lines/"
    run("Label Studio", Format.jsonl, folder="lines", images=Images.copy, image_base_url=url)
    tasks = json.loads((tmp_path / "tasks.json").read_text())
    assert [task["data"]["property_id"] for task in tasks] == ["a", "b", "c", "d"]
    urls = [url for task in tasks for url in task["data"]["images"]]
    assert len(urls) == len(OPENED)
    for url in urls:
        assert urlsplit(url).path == "/data/local-files/"
        served = (tmp_path / parse_qs(urlsplit(url).query)["d"][0]).resolve()
        assert served.is_relative_to(tmp_path / "lines")
        with Image.open(served) as picture:
            assert picture.size == (8, 8)


def test_answers_of_label_studio_become_verdicts(run, pictures, tmp_path):
    """An unchanged field is right, a changed one corrected; skipped, or taken once more, nothing is kept."""
    run("Label Studio", Format.jsonl, folder="lines", images=Images.copy)
    answers = json.loads((tmp_path / "tasks.json").read_text())[1:3]
    for task in answers:
        result = task["predictions"][0]["result"]
        is_skipped = task["data"]["property_id"] == "c"
        task["annotations"] = [{"result": result, "was_cancelled": is_skipped}]
    answers[0]["annotations"][0]["result"][0]["value"]["text"] = ["3"]
    (tmp_path / "answers.json").write_text(json.dumps(answers))
    exec(compile(recipe("Label Studio", 1), "docs/after.md", "exec"), {})
    taken = [take_verdicts(pictures.settings, pictures.catalog, tmp_path / "verdicts.jsonl") for _ in (1, 2)]
    assert taken == [TakenVerdicts(1, 0, 0), TakenVerdicts(0, 1, 0)]
    verdict = verdicts(pictures.settings.home)["b"]
    assert (verdict.right, verdict.wrong) == (("has_pool",), ("floors",))
    assert verdict.true_fields == {"floors": 3, "has_pool": False}
    assert (verdict.weight, verdict.by_chance) == (0, False)


def test_samples_of_fiftyone_name_files_that_open(run, tmp_path):
    """Its format on disk is two files of JSON; each sample's path is relative to their folder."""
    run("FiftyOne", Format.jsonl, folder="lines", images=Images.copy)
    samples = json.loads((tmp_path / "lines" / "samples.json").read_text())["samples"]
    assert len(samples) == len(OPENED)
    for sample in samples:
        assert not Path(sample["filepath"]).is_absolute()
        with Image.open(tmp_path / "lines" / sample["filepath"]) as picture:
            assert picture.size == (8, 8)
