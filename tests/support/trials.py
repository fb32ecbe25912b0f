"""What a model answered, as trials and comparisons have it."""

from __future__ import annotations

from typing import Any

from vlm_engine.ladder import Described


def described(number: int, answer: dict[str, Any] | None, **more: Any) -> Described:
    """The result of a property, which failed where there is no answer. more: fields that are otherwise."""
    plain = {
        "property_id": f"p{number}", "ordinal": number, "status": "ok" if answer is not None else "failed",
        "error_kind": None, "error": None, "description": answer, "raw_text": None, "attempts": 1,
        "images_seen": 1, "images_failed": (), "prompt_tokens": 100, "output_tokens": 20,
        "finish_reason": "stop", "seconds": 1.0,
    }  # fmt: skip
    return Described(**plain | more)
