"""What services say of their progress is heard by whoever listens, and costs nothing where nobody does."""

import pytest

from vlm_assets.services.progress import doing, doing_each, listen_to_progress, stop_listening


@pytest.fixture
def heard():
    """Listens, until the test is over."""
    activities: list[tuple[str, int, int]] = []
    listen_to_progress(lambda *activity: activities.append(activity))
    yield activities
    stop_listening()


def test_each_step_is_said_before_it_is_done(heard):
    """Guards: what is shown is what takes long now, not what is over."""
    steps = doing_each("copying files", ["a", "b"])
    assert next(steps) == "a"
    assert heard == [("copying files", 0, 2)]
    assert list(steps) == ["b"]
    assert heard[1:] == [("copying files", 1, 2)]


def test_nobody_need_listen(heard):
    """Guards: a sensor of Dagster calls the same services as a command."""
    stop_listening()
    doing("copying files")
    assert heard == []
