"""What a model server is asked for one property: the body of a chat completion, and what it may refuse of it.

What lives here: the body's form, and which parts can go without. What does not: sending it (``engine.py``),
and what a refusal means (``refusals.py``). Term: OpenAI's chat completions.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final

from resources.engine.protocol import Attempt, sampling_seed

SCHEMA_NAME: Final = "description"

OPTIONAL_FIELDS: Final[Mapping[str, tuple[str, ...]]] = {
    "response_format": ("response_format", "json_schema", "grammar", "guided", "structured output"),
    "stream_options": ("stream_options", "include_usage"),
    "repetition_penalty": ("repetition_penalty",),
    "top_k": ("top_k",),
    "seed": ("seed",),
}
"""What a server need not know, and the words by which its refusal names it.

Without ``response_format`` answers are validated all the same. The neutral ``repetition_penalty`` and
``top_k`` keep away what a model's own ``generation_config.json`` would add: servers apply it unasked, and it
breaks JSON and makes the second attempt, at another temperature, the first again.
"""


def chat_request(
    urls: Sequence[str],
    *,
    model: str,
    prompt: str,
    json_schema: Mapping[str, Any],
    property_id: str,
    attempt: Attempt,
    without: Collection[str] = (),
) -> dict[str, Any]:
    """The body for one property: its images in order, then the question. without: fields to leave out."""
    content: list[dict[str, Any]] = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    content.append({"type": "text", "text": prompt})
    body: dict[str, Any] = {
        "model": model,
        "messages": [{"role": "user", "content": content}],
        "max_tokens": attempt.max_new_tokens,
        "temperature": attempt.temperature,
        "top_p": 1.0,
        "stream": True,
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": SCHEMA_NAME, "schema": json_schema, "strict": True},
        },
        "stream_options": {"include_usage": True},
        "repetition_penalty": 1.0,
        "top_k": -1,
        "seed": sampling_seed(attempt.seed, property_id, attempt.number),
    }
    return {name: value for name, value in body.items() if name not in without}


def proof_request(model: str) -> dict[str, Any]:
    """The shortest question that takes a token to answer."""
    content = [{"type": "text", "text": "Hello"}]
    return {
        "model": model,
        "messages": [{"role": "user", "content": content}],
        "max_tokens": 1,
        "temperature": 0.0,
        "stream": True,
    }


def named_fields(refusal: str, without: Collection[str]) -> list[str]:
    """The optional fields, of those that were sent, that a refusal's text names."""
    text = refusal.lower()
    return [
        name
        for name, words in OPTIONAL_FIELDS.items()
        if name not in without and any(word in text for word in words)
    ]
