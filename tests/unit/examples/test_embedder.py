"""The shipped embedder: small, and with the words it finds what was asked for."""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import examples
from benchmarks.described_home import make_home
from benchmarks.search_quality import WAYS, Truths, r_precision, true_home
from examples.requests import HELD_OUT
from examples.truth import draw_truth
from vlm_assets.config.resource_settings import build_text_embedding_model
from vlm_assets.config.settings import Settings
from vlm_catalog.catalog import Catalog
from vlm_engine.devices.find import Device
from vlm_engine.schema import description_text
from vlm_results import search as search_module

FOLDER = Path(examples.__file__).with_name("embedder")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> tuple[Settings, Truths]:
    """The true texts of 240 properties, embedded."""
    return true_home(tmp_path_factory.mktemp("true"))


@pytest.fixture
def loaded(home: tuple[Settings, Truths], monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The embedder, loaded once for all searches."""
    embedder = build_text_embedding_model(home[0]).load(Device("cpu-search", "cpu", "search", None, ""))
    monkeypatch.setattr(
        search_module, "embed_text", lambda _, text: np.asarray(embedder.embed([text])[0], np.float32)
    )
    yield embedder
    embedder.close()


def test_the_folder_is_small_and_has_no_code() -> None:
    """It is shipped in the repository: under 2 MB, safetensors only, with its card."""
    files = {path: path.stat().st_size for path in FOLDER.rglob("*") if path.is_file()}
    assert sum(files.values()) < 2_000_000
    assert {"model.safetensors", "modules.json", "tokenizer.json", "README.md"} <= {
        file.name for file in files
    }
    assert not [file for file in files if file.suffix not in {".safetensors", ".json", ".md"}]


@pytest.mark.usefixtures("loaded")
def test_words_and_vectors_together_find_what_was_asked_for(home: tuple[Settings, Truths]) -> None:
    """Nine of ten hits are right, each way, on requests never learned from. Words cost vectors nothing."""
    settings, truths = home
    means = {
        way: float(np.mean([r_precision(settings, request, truths, way) for request in HELD_OUT]))
        for way in WAYS
    }
    assert min(means.values()) >= 0.9, means
    assert means["both"] >= max(means["words"], means["vectors"]) - 0.005, means


def test_a_name_that_the_embedder_does_not_know_is_found_by_words(loaded: Any, tmp_path: Path) -> None:
    """An embedder spells what it does not know, and the letters say little: the words must count for it."""
    rng, drawn = random.Random(5), [draw_truth("example", 8, index).model_dump() for index in range(120)]
    names = ["".join(rng.choice("bdfgklmnprst") + rng.choice("aeiou") for _ in range(3)) for _ in drawn]
    for truth, name in zip(drawn, names, strict=True):
        truth["summary"] += f" Known as {name}."
    settings = make_home(
        tmp_path,
        len(drawn),
        describe=drawn.__getitem__,
        embed=lambda some: np.asarray(loaded.embed([description_text(one) for one in some]), np.float32),
    )

    def found_first(by: tuple[str, ...]) -> int:
        catalog, some = Catalog.open(settings.home), range(0, len(drawn), 10)
        texts = {at: f"{drawn[at]['building_type'].replace('_', ' ')} {names[at]}" for at in some}
        return sum(
            search_module.search(settings, catalog, text=text, by=by).hits[0].ordinal == at
            for at, text in texts.items()
        )

    assert found_first(WAYS["both"]) >= 11, "of 12"
    assert found_first(WAYS["vectors"]) <= 6, "or these names are no test"
