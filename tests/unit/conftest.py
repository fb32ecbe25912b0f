"""Fixtures that the tests of several packages share."""

from __future__ import annotations

from tests.support.activity import (  # noqa: F401 - fixtures
    steps,
)
from tests.support.command_line import (  # noqa: F401 - fixtures
    call,
)
from tests.support.homes import (  # noqa: F401 - fixtures
    asked_again,
    commit,
    dataset,
    empty,
    made,
    published,
    refuse,
    two_sets,
    uneven,
)
from tests.support.pictures import pictures  # noqa: F401 - a fixture
