"""Every kind of failed row is decided on: tried again by itself, or left to a person."""

from pathlib import Path
from typing import get_args

from resources.engine import failure_kinds
from resources.engine.failure_kinds import TRANSIENT_KINDS
from resources.images.images import ImageErrorKind

ENGINE = Path(failure_kinds.__file__)


def test_only_known_kinds_are_transient():
    """A kind that is renamed in the engine must not silently become permanent."""
    sources = [path.read_text() for path in ENGINE.parent.rglob("*.py") if path != ENGINE]
    for kind in TRANSIENT_KINDS - set(get_args(ImageErrorKind)):
        assert any(f'"{kind}"' in source for source in sources), kind


def test_what_a_person_must_put_right_is_not_tried_again():
    """Missing, damaged or forbidden images, and answers that come out the same."""
    permanent = {"missing", "denied", "unreadable", "too_large", "truncated", "schema_mismatch", "no_images"}
    assert not permanent & TRANSIENT_KINDS
    assert {"io_error", "timed_out", "engine_error", "out_of_memory"} <= TRANSIENT_KINDS
