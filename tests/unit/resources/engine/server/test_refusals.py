"""What each error of a server means for a property; the bodies are those that servers send."""

import json

import pytest

from resources.engine.protocol import EngineLostError, RequestTooLargeError
from resources.engine.server.refusals import (
    BusyServerError,
    FailingServerError,
    FieldRefusedError,
    RequestRefusedError,
    ServerRefusesError,
    refusal,
)

VLLM_TOO_LONG = (
    '{"error":{"message":"This model\'s maximum context length is 4096 tokens. However, you requested 4600'
    " tokens (4088 in the messages, 512 in the completion). Please reduce the length of the messages or"
    ' completion.","type":"BadRequestError","param":null,"code":400}}'
)
VLLM_TOO_MANY_TOKENS = (
    '{"error":{"message":"The decoder prompt (length 9183) is longer than the maximum model length of 8192.'
    ' Make sure that `max_model_len` is no smaller than the number of text tokens plus multimodal tokens."}}'
)
VLLM_TOO_MANY_IMAGES = '{"object":"error","message":"At most 1 image(s) may be provided in one prompt."}'


def refused(status, text, *, retry_after=None, without=frozenset()):
    url = "http://127.0.0.1:1/v1"
    return refusal(status, text, retry_after=retry_after, url=url, model="house", without=without)


@pytest.mark.parametrize(
    ("status", "text", "kind"),
    [
        (400, VLLM_TOO_LONG, "prompt_too_long"),
        (400, VLLM_TOO_MANY_TOKENS, "prompt_too_long"),
        (400, VLLM_TOO_MANY_IMAGES, "prompt_too_long"),
        (400, "the request exceeds the available context size", "prompt_too_long"),
        (413, "<html>Request Entity Too Large</html>", "prompt_too_long"),
        (500, '{"error":"CUDA out of memory. Tried to allocate 2 GiB"}', "out_of_memory"),
    ],
)
def test_too_much_is_asked_again_with_fewer_images(status, text, kind):
    """What servers say of too long a prompt leads to the ladder's rung with fewer images."""
    error = refused(status, text)
    assert isinstance(error, RequestTooLargeError)
    assert error.kind == kind


def test_refused_field_is_named():
    """A server without guided decoding is asked without it; without what it names, and nothing else."""
    fastapi = json.dumps({"detail": "Unexpected fields in the request: {'top_k', 'repetition_penalty'}"})
    error = refused(422, fastapi)
    assert isinstance(error, FieldRefusedError)
    assert set(error.fields) == {"top_k", "repetition_penalty"}
    schema = refused(400, '{"error":{"message":"Grammar error: Unimplemented keys: [\\"multipleOf\\"]"}}')
    assert isinstance(schema, FieldRefusedError)
    assert schema.fields == ("response_format",)


def test_field_that_was_not_sent_is_not_dropped_again():
    """The same refusal without the field is final, so that asking comes to an end."""
    error = refused(400, "no json_schema here", without={"response_format"})
    assert isinstance(error, RequestRefusedError)
    assert "no json_schema here" in str(error)


@pytest.mark.parametrize("status", [429, 503])
def test_busy_server_says_how_long(status):
    """The wait that the server asks for is carried on."""
    error = refused(status, "slow down", retry_after="7")
    assert isinstance(error, BusyServerError)
    assert error.retry_after == "7"


@pytest.mark.parametrize("status", [500, 502, 504, 408, 302, 402, 405, 451])
def test_failing_server_may_answer_the_next_time(status):
    """A server's own failure is worth another try, and so is whatever is not about the request."""
    assert isinstance(refused(status, "Internal Server Error"), FailingServerError)


@pytest.mark.parametrize(
    ("status", "setting"), [(401, "SERVER_KEY"), (403, "SERVER_KEY"), (404, "SERVER_MODEL")]
)
def test_what_every_request_would_meet_ends_the_run(status, setting):
    """A wrong key or model is one clear sentence, not a thousand failed rows."""
    error = refused(status, '{"error":{"message":"nope"}}')
    assert isinstance(error, ServerRefusesError)
    assert isinstance(error, EngineLostError)
    assert f"VLM_ASSETS_{setting}" in str(error)
    assert "nope" in str(error)


def test_other_refusals_are_final():
    """What is refused for what it is would be refused again."""
    assert isinstance(refused(400, "bad image"), RequestRefusedError)
    assert isinstance(refused(415, "no image"), RequestRefusedError)
