"""The file of variants is validated when it is read, and a wrong value is named with what would do."""

from pathlib import Path

import pytest

from vlm_assets.config.engine_choice import require_models
from vlm_assets.config.settings import EXAMPLE_MODEL, SettingsError, load_settings
from vlm_training.variants import Variant, read_variants

TINY = """
variants:
  tiny:
    base: example
    data: truth
    steps: 60
    batch: 8
    learning_rate: 0.001
    seed: 1
    method: full
    objective: default
"""


def variants(folder: Path, text: str) -> dict[str, Variant]:
    path = folder / "variants.yaml"
    path.write_text(text)
    return dict(read_variants(load_settings(home=folder / "home", variants=path)))


def test_a_variant_is_read_as_it_is_written(tmp_path: Path) -> None:
    """The names that others rely on."""
    (tiny,) = variants(tmp_path, TINY).values()
    assert (tiny.steps, tiny.batch, tiny.learning_rate, tiny.seed) == (60, 8, 0.001, 1)
    assert tiny.base_model == str(EXAMPLE_MODEL)
    assert tiny.parts == 4


def test_a_name_may_be_a_number(tmp_path: Path) -> None:
    """YAML reads one without quotes as such, and what was trained under it is still meant."""
    assert list(variants(tmp_path, TINY.replace("tiny:", "2026:"))) == ["2026"]


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ("steps: 60", "stepps: 60", r"variants\.tiny\.stepps: "),
        ("steps: 60", "steps: 60\n    epochs: 2", "steps or epochs, one of them"),
        ("method: full", "method: half", r"method: Input should be 'full' or 'lora'"),
        ("batch: 8", "batch: 0", "batch: .*greater than 0"),
        ("tiny:", "../tiny:", "cannot be a file name"),
        ("tiny:", "v.copy:", r"variants\.yaml: .*'v\.copy' cannot be a file name.* Rename it"),
        ("variants:", "models:", "holds one object `variants`"),
        ("  tiny:", "  - tiny:", "variants.yaml"),
        ("data: truth", "data: truth\n    partitions: [a]", "partitions are of descriptions"),
    ],
)
def test_a_wrong_value_is_named(tmp_path: Path, before: str, after: str, said: str) -> None:
    """The file, the variant, the value and what would do, before anything is trained."""
    with pytest.raises(SettingsError, match=said):
        variants(tmp_path, TINY.replace(before, after))


def test_no_model_has_a_name_that_no_variant_can_have(tmp_path: Path) -> None:
    """The files of variant `v.copy` would be second copies of those of `v`; its folder can still be named."""
    settings = load_settings(home=tmp_path, model="variant:v.copy")
    with pytest.raises(SettingsError, match=r"cannot be a file name.*VLM_ASSETS_MODEL=/.*/v\.copy"):
        require_models(settings)


def test_without_a_file_there_are_none(tmp_path: Path) -> None:
    """Nobody who trains nothing has an asset for it; a file that is missing is an error."""
    assert not read_variants(load_settings(home=tmp_path))
    with pytest.raises(SettingsError, match=r"VARIANTS=.*cannot be read"):
        read_variants(load_settings(home=tmp_path, variants=tmp_path / "none.yaml"))
