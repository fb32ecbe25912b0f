"""Which arguments of a server count for the fingerprint."""

import pytest

from resources.engine.server.answering import answering_arguments
from resources.engine.server.server_plan import VLLM_COMMAND


@pytest.mark.parametrize(
    "added",
    [
        "--gpu-memory-utilization 0.7 --max-num-seqs=64",
        "--allowed-local-media-path '/srv/my images' --disable-log-requests",
        "-tp 2 --enforce-eager --port 8123",
    ],
)
def test_room_and_places_change_no_fingerprint(added):
    """More memory, another port or folder, and finished work stays finished."""
    assert answering_arguments(f"{VLLM_COMMAND} {added}") == answering_arguments(VLLM_COMMAND)


def test_place_of_the_program_changes_no_fingerprint():
    """The same server from another environment is the same server."""
    moved = VLLM_COMMAND.replace("vllm", "/opt/servers/bin/vllm", 1)
    assert answering_arguments(moved) == answering_arguments(VLLM_COMMAND)


@pytest.mark.parametrize(
    "added",
    [
        "--quantization fp8",
        "--dtype float16",
        "--enforce-eager --quantization fp8",
        "--mm-processor-kwargs '{\"max_pixels\": 50176}'",
        "--chat-template other.jinja",
        "--some-option-of-tomorrow",
        "--disable-log-requests fp8",
    ],
)
def test_whatever_may_change_an_answer_counts(added):
    """Fewer bits, smaller images, another template, what is not known: rows of both are told apart."""
    assert answering_arguments(f"{VLLM_COMMAND} {added}") != answering_arguments(VLLM_COMMAND)


def test_word_after_a_flag_counts():
    """A flag takes no value: the model named after it is the model, wherever the flag stands."""
    assert answering_arguments("vllm serve --enforce-eager {model}") == ["vllm", "serve", "{model}"]
    assert answering_arguments("vllm --port {port} serve {model}") == ["vllm", "serve", "{model}"]
