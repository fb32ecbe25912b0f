"""The extensions of this repository are found as any other would be."""

import tomllib
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from vlm_assets.assets.truth import REVIEWS
from vlm_assets.config.extensions import (
    KEPT_IN_HOMES,
    installed,
    left_by_missing,
)
from vlm_assets.config.settings import (
    _OF_EXTENSIONS,
    EXTENSIONS,
    SettingsError,
    load_settings,
    loaded_extensions,
    own_settings,
)
from vlm_durable.files.layout import Home
from vlm_training.training_settings import TrainingSettings


def test_the_extensions_of_this_repository_are_installed() -> None:
    """Each is found by its entry point, and every command of theirs is one that there is."""
    loaded_extensions.cache_clear()
    assert [extension.package for extension in installed()] == ["vlm_cluster", "vlm_results", "vlm_training"]
    commands = {name for extension in installed() for name in extension.commands}
    assert commands == {"changes", "devices node", "explore", "export", "review", "search"}


def test_the_core_knows_what_each_keeps_in_a_home(tmp_path: Path) -> None:
    """Where one is missing, this list alone says that its files are there; installed ones hold up nothing."""
    kept = {one.name: one for one in KEPT_IN_HOMES}
    for point in entry_points(group=EXTENSIONS):
        assert point.load()().assets == (kept[point.name].assets if point.name in kept else ())
    files = [tmp_path / name for name in kept["results"].files]
    assert {tmp_path / REVIEWS, Home(tmp_path).word_index.parent} <= set(files)
    for path in (tmp_path / REVIEWS, tmp_path / "description_model" / "v" / "config.json"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("{}")
    assert list(left_by_missing(Home(tmp_path))) == []
    distributions = Path(__file__).resolve().parents[2] / "distributions"
    for one in KEPT_IN_HOMES:
        about = tomllib.loads((distributions / one.name / "pyproject.toml").read_text())["project"]
        assert about["name"] == one.distribution
        assert list(about["entry-points"][EXTENSIONS]) == [one.name]


def test_settings_of_extensions_are_set_and_refused_as_all_others(tmp_path: Path, monkeypatch) -> None:
    """Each extension adds some, which need no other; a slip in a name of theirs is told as any."""
    own = {extension.package: own_settings(extension.settings) for extension in installed()}
    assert own == {
        "vlm_cluster": ["ray_address"],
        "vlm_results": ["truth", "guarantee", "guarantee_risk", "table", "table_catalog"],
        "vlm_training": ["variants"],
    }
    of_extensions = {name: extension.package for extension in installed() for name in own[extension.package]}
    assert {
        name: package.replace("vlm_", "vlm-assets-") for name, package in of_extensions.items()
    } == _OF_EXTENSIONS, "a core without one of them names what to install"
    monkeypatch.setenv("VLM_ASSETS_VARIANTS", "variants.yaml")
    settings = load_settings(home=tmp_path)
    assert TrainingSettings.part_of(settings).variants == Path.cwd() / "variants.yaml"
    assert all(isinstance(settings, extension.settings) for extension in installed())
    monkeypatch.setenv("VLM_ASSETS_GARANTEE", "roof>=0.95")
    with pytest.raises(
        SettingsError, match=r"VLM_ASSETS_GARANTEE is set .* Did you mean VLM_ASSETS_GUARANTEE\?"
    ):
        load_settings(home=tmp_path)
