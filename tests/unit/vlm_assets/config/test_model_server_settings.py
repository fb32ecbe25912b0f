"""A model server in the settings: what is refused, what is shown, and what it means for finished work."""

import pytest

from vlm_assets.assets.fingerprint import description_parts, digest_of
from vlm_assets.config.resource_settings import build_vision_language_model
from vlm_assets.config.settings import SettingsError, load_settings
from vlm_engine.images.images import DECODING
from vlm_engine.protocol import ModelLoadError


@pytest.fixture(autouse=True)
def no_key(monkeypatch):
    # Set and unset, so that what a test exports goes with it.
    monkeypatch.setenv("VLM_ASSETS_SERVER_KEY", "")
    monkeypatch.delenv("VLM_ASSETS_SERVER_KEY")


def settings_of(tmp_path, **overrides):
    return load_settings(home=tmp_path, **overrides)


def parts(settings):
    return description_parts(settings, build_vision_language_model(settings))


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"engine": "transformers", "server_url": "http://h/v1"}, "SERVER_URL is for the engine 'server'"),
        ({"engine": "transformers", "server_command": "vllm"}, "SERVER_COMMAND is for the engine 'server'"),
        ({"engine": "server", "server_key": "k"}, "SERVER_URL is not set"),
        (
            {"engine": "server", "server_url": "http://host:8000/v1", "server_command": "vllm serve"},
            "names one that runs already",
        ),
        ({"engine": "server", "server_url": "host:8000"}, "of the form http://HOST:PORT/v1"),
        ({"engine": "server", "server_url": "http://me:secret@host/v1"}, "without a name or a password"),
        ({"engine": "vllm"}, "'transformers' or 'server'"),
        ({"server_url": "http://h/v1", "image_tokens": 9}, "IMAGE_TOKENS decides how a server is started"),
        (
            {"server_command": "s --port {port}", "processor_options": '{"do_image_splitting": false}'},
            r"PROCESSOR_OPTIONS must reach the server, .* has no {processor_options}: add",
        ),
        ({"engine": "transformers", "devices_per_model": 2}, "DEVICES_PER_MODEL is for the engine 'server'"),
        ({"server_command": "s {port}", "devices_per_model": 2}, "`--tensor-parallel-size {devices}`"),
        ({"server_url": "http://h/v1", "devices_per_model": 2}, "DEVICES_PER_MODEL decides how a server"),
        ({"processor_options": "[1]"}, "give a JSON object, such as"),
        ({"processor_options": "{"}, "give a JSON object, such as"),
    ],
)
def test_settings_that_would_be_ignored_are_refused(tmp_path, wrong, sentence):
    """A server that is named and not used, or a key for nobody, costs weeks: it is refused at load."""
    with pytest.raises(SettingsError, match=sentence):
        settings_of(tmp_path, **wrong)


def test_key_is_shown_nowhere(tmp_path):
    """Dagster shows a resource's fields to everyone who sees its page."""
    url = "http://host:8000/v1/"
    settings = settings_of(tmp_path, engine="server", server_url=url, server_key="open sesame")
    model = build_vision_language_model(settings)
    assert "sesame" not in f"{settings!r} {model!r}"
    assert model.server.key == "open sesame"
    assert model.server.url == "http://host:8000/v1"


def test_what_decides_how_images_are_shown_is_in_the_fingerprint(tmp_path):
    """Rows of other resolutions or processor options mean something else; how JSON is written does not."""
    plain = settings_of(tmp_path)
    known = {
        "max_images": 12, "max_new_tokens": 512, "max_pixels": 1_048_576, "image_tokens": None,
        "processor_options": "{}", "images": DECODING, "thinking": False,
    }  # fmt: skip
    assert parts(plain)["decoding"] == digest_of(known)
    assert parts(plain)["model"].startswith("sha256:")
    options = [{"image_tokens": 3000}, {"processor_options": '{"a": 1, "b": 2}'}, {"max_pixels": 300_000}]
    others = {parts(settings_of(tmp_path, **one))["decoding"] for one in options}
    assert len({parts(plain)["decoding"], *others}) == 4
    assert parts(settings_of(tmp_path, processor_options='{"b":2,"a":1}'))["decoding"] in others


def test_server_is_another_fingerprint_and_its_room_is_not(tmp_path):
    """Rows of a server are told from rows of this process; memory and ports make no difference."""
    command = "vllm serve {model} --port {port}"
    plain, server, roomy, small = (
        parts(settings_of(tmp_path, **overrides))
        for overrides in (
            {},
            {"engine": "server", "server_command": command},
            {"engine": "server", "server_command": f"{command} --max-num-seqs 8", "server_requests": 8},
            {"engine": "server", "server_command": f"{command} --quantization fp8"},
        )
    )
    assert plain["decoding"] != server["decoding"] == roomy["decoding"] != small["decoding"]
    assert plain["model"] == server["model"]


def test_server_that_is_down_is_said_before_a_device_is_leased(tmp_path):
    """What a run is about to describe with is asked first, and the sentence says what to start."""
    settings = settings_of(tmp_path, engine="server", server_url="http://127.0.0.1:9/v1")
    with pytest.raises(ModelLoadError, match="Start it"):
        parts(settings)


def test_command_that_cannot_be_read_is_named(tmp_path):
    """An open quote in the template is a sentence that names the setting."""
    settings = settings_of(tmp_path, engine="server", server_command="vllm serve '{model}")
    with pytest.raises(ModelLoadError, match="SERVER_COMMAND"):
        parts(settings)
