"""The models' settings as Dagster hands them on."""

import pytest

from resources.vlm.resource import ModelServerChoice


@pytest.mark.parametrize(("said", "key"), [("", None), ("secret", "secret")])
def test_a_key_that_is_set_to_nothing_is_none(monkeypatch, said, key):
    """An empty VLM_ASSETS_SERVER_KEY= in a file of settings is no key, and no header that HTTP refuses."""
    monkeypatch.setenv("VLM_ASSETS_SERVER_KEY", said)
    choice = ModelServerChoice(state_directory="state", key_variable="VLM_ASSETS_SERVER_KEY").choice()
    assert choice.key == key
