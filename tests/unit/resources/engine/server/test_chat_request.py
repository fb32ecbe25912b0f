"""What a server is asked."""

import json

import pytest

from resources.engine.protocol import Attempt
from resources.engine.server.chat_request import OPTIONAL_FIELDS, chat_request

SCHEMA = {"type": "object", "properties": {"storeys": {"type": "integer"}}, "required": ["storeys"]}


@pytest.fixture
def body():
    def build(property_id="a", *, without=(), **attempt):
        return chat_request(
            ["data:one", "data:two"],
            model="house",
            prompt="What is it?",
            json_schema=SCHEMA,
            property_id=property_id,
            attempt=Attempt(**{"number": 1, "max_new_tokens": 99, **attempt}),
            without=without,
        )

    return build


def test_images_come_in_order_before_the_question(body):
    """The server is asked as the engine in this process asks: images first, then the text, greedily."""
    asked = body()
    content = asked["messages"][0]["content"]
    assert [part["type"] for part in content] == ["image_url", "image_url", "text"]
    assert [part["image_url"]["url"] for part in content[:2]] == ["data:one", "data:two"]
    assert (asked["model"], asked["max_tokens"], asked["temperature"]) == ("house", 99, 0.0)
    assert asked["response_format"]["json_schema"]["schema"] == SCHEMA
    assert asked["stream"] is True
    assert asked["stream_options"] == {"include_usage": True}


def test_property_samples_alike_in_any_run(body):
    """Seeds derive from the property and the attempt, and fit the 63 bits that servers take."""
    seeds = {body(name, number=number)["seed"] for name in "abc" for number in (1, 2)}
    assert len(seeds) == 6
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert body("a")["seed"] == body("a")["seed"]


def test_sampling_that_a_model_ships_with_is_kept_away(body):
    """Penalties and cuts of generation_config.json, which servers apply unasked, would break JSON."""
    asked = body(temperature=0.7)
    assert (asked["temperature"], asked["top_p"]) == (0.7, 1.0)
    assert (asked["top_k"], asked["repetition_penalty"]) == (-1, 1.0)


def test_every_optional_field_can_go(body):
    """What a server need not know can be left out, and the rest stays."""
    asked = body(without=set(OPTIONAL_FIELDS))
    assert not set(asked) & set(OPTIONAL_FIELDS)
    assert {"model", "messages", "max_tokens", "temperature", "stream"} <= set(asked)
    json.dumps(asked)
