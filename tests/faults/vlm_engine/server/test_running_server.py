"""What a server at an address says that it serves, and the sentences where it does not."""

import pytest

from vlm_engine.protocol import ModelLoadError
from vlm_engine.server.model_server import ServerAddress
from vlm_engine.server.running_server import (
    ServedModel,
    ServerUnreachableError,
    _listed,
    served_model,
)


@pytest.fixture
def address(stub):
    """Its port may have been an earlier stub's, whose list of models would still be cached."""
    _listed.cache_clear()
    return ServerAddress(stub.url, "secret")


def test_model_of_the_settings_is_taken_where_it_is_served(address, stub):
    """Among several models the one that the settings name is asked, whatever order they are listed in."""
    stub.models = [{"id": "other"}, {"id": "house", "root": "/models/house"}]
    assert served_model(address, None, "house") == ServedModel("house", "/models/house")
    assert served_model(address, "other", "house") == ServedModel("other")


def test_only_model_is_taken(address):
    """A server with one model needs no name."""
    assert served_model(address, None, "/home/me/model").name == "house"


def test_several_models_need_a_name(address, stub):
    """Nothing is guessed: the sentence names what there is, and the setting."""
    stub.models = [{"id": "one"}, {"id": "two"}]
    with pytest.raises(ModelLoadError, match=r"'one', 'two'.*VLM_ASSETS_SERVER_MODEL"):
        served_model(address, None, "house")
    with pytest.raises(ModelLoadError, match=r"does not serve 'three'"):
        served_model(address, "three", "house")


def test_server_that_lists_nothing_is_believed(address, stub):
    """transformers' server does not list a model that it was started with from a folder."""
    stub.models = []
    assert served_model(address, "/models/house", "house") == ServedModel("/models/house")
    with pytest.raises(ModelLoadError, match="nothing that it would name"):
        served_model(address, None, "house")


def test_server_that_is_down_is_said_to_be(address, stub):
    """Before a device is leased a person reads which server is to be started, and a run waits for it."""
    with pytest.raises(ServerUnreachableError, match=r"does not answer.*Start it"):
        served_model(ServerAddress("http://127.0.0.1:9/v1"), None, "house")
    stub.die()
    with pytest.raises(ServerUnreachableError, match=r"is not well \(503\)"):
        served_model(address, None, "house", ask_anew=True)


def test_what_is_no_model_server_is_said_to_be_none(address, stub):
    """An address without /v1, or of something else, is no crash."""
    stub.models = "nonsense"
    with pytest.raises(ModelLoadError, match="no OpenAI-compatible model server") as refused:
        served_model(address, None, "house")
    assert not isinstance(refused.value, ServerUnreachableError), "no time makes it one"


def test_revision_says_what_is_known_and_no_more():
    """The same model under the same name is the same revision, wherever it runs; another root is another."""
    assert ServedModel("house", "house").revision(None) == "served:house"
    assert ServedModel("house", "/a/m").revision(None) == "served:house root:m"
    assert ServedModel("house", "/b/m").revision(None) == "served:house root:m", "a folder may be moved"
    assert ServedModel("house").revision("abc") == "served:house said:abc"
