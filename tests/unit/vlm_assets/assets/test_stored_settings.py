"""Which files of the program all machines over one store must have alike: those that make rows."""

import shutil

import pytest

from vlm_assets.assets.stored_settings import code_digest, sources_of_rows
from vlm_assets.config.settings import CHECKOUT

MAKES_ROWS = {
    "property_descriptions": (
        "vlm_engine/prompt.py",
        "vlm_engine/ladder.py",
        "vlm_engine/schema.py",
        "vlm_engine/transformers/guided.py",
        "vlm_engine/server/chat_completions.py",
        "vlm_engine/images/images.py",
        "vlm_engine/images/worker.py",
        "vlm_durable/journal/segments.py",
        "vlm_assets/assets/property_descriptions.py",
        "vlm_assets/assets/description_work.py",
        "vlm_assets/assets/joined_sets.py",
        "vlm_assets/__init__.py",
    ),
    "property_embeddings": ("resources/text_embedding.py", "vlm_assets/assets/property_embeddings.py"),
}


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """A copy of the program, to change."""
    folder = tmp_path_factory.mktemp("checkout")
    for package in ("vlm_durable", "vlm_engine", "vlm_catalog", "resources", "sensors", "vlm_assets"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(CHECKOUT / package, folder / package, ignore=ignored)
    return folder


def changed_digest(asset, checkout, names):
    """The digest with a comment added to some files, which are then put back."""
    before = {name: (checkout / name).read_bytes() for name in names}
    for name, content in before.items():
        (checkout / name).write_bytes(content + b"# A typo is mended.\n")
    try:
        return code_digest(asset, checkout)
    finally:
        for name, content in before.items():
            (checkout / name).write_bytes(content)


@pytest.mark.parametrize("asset", MAKES_ROWS)
def test_only_a_change_in_what_makes_rows_parts_the_machines(asset, checkout):
    """A typo that is mended in the doctor on one machine makes no other machine refuse its runs."""
    same = code_digest(asset)
    watching = ("vlm_assets/services/doctor/examination.py", "sensors/alerts.py", "vlm_assets/definitions.py")
    assert changed_digest(asset, checkout, watching) == same, "wherever the checkout lies"
    for name in MAKES_ROWS[asset][:2]:
        assert changed_digest(asset, checkout, [name]) != same, name


@pytest.mark.parametrize("asset", MAKES_ROWS)
def test_all_that_decides_a_row_counts(asset):
    """Prompt, schema, ladder, guided decoding, images, journal: with other code, other rows may come out."""
    assert set(MAKES_ROWS[asset]) <= set(sources_of_rows(asset))
