"""Fixtures that the tests of several packages share."""

from __future__ import annotations

from tests.unit.activity import (  # noqa: F401 - fixtures
    steps,
)
from tests.unit.command_line import (  # noqa: F401 - fixtures
    call,
)
from tests.unit.homes import (  # noqa: F401 - fixtures
    commit,
    dataset,
    empty,
    made,
    published,
    refuse,
    uneven,
)
