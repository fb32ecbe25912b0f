"""When the picture of all partitions is drawn anew."""

import dagster as dg
import pytest

from resources.state.database import ControlState
from sensors.progress_picture import NAME, Drawn, build_progress_picture_sensor
from sensors.ticks import Ticks


def test_while_something_works_a_picture_is_drawn_every_half_hour() -> None:
    """Not at every tick: the event log keeps each of them."""
    drawn = Drawn("a", "a", at=1000.0)
    assert not drawn.is_due("b", works=True, now=2799.0)
    assert drawn.is_due("b", works=True, now=2800.0)
    assert drawn.is_due("a", works=True, now=2800.0)
    assert not drawn.is_due("a", works=False, now=9999.0)
    assert drawn.is_due("a", works=False, now=1001.0, pause="since noon")
    assert not drawn.is_due("b", works=True, now=1001.0, pause="since noon")
    assert Drawn.from_cursor("not json") == Drawn.from_cursor(None) == Drawn()


@pytest.mark.parametrize("sentence", ["paused since noon", None])
def test_a_tick_is_noted_at_its_end_and_in_a_pause_too(tmp_path, sentence) -> None:
    """One that fails each time counts as silent; one that has nothing to do does not."""

    def moved() -> str:
        raise ValueError("the catalogue does not read")

    @dg.asset
    def picture() -> None: ...

    def sensor(moved):
        return build_progress_picture_sensor(
            picture,
            draw=lambda: dg.AssetMaterialization("picture"),
            moved=moved,
            works=lambda: False,
            paused=lambda: sentence,
            ticks=Ticks(ControlState(tmp_path)),
        )

    with dg.DagsterInstance.ephemeral() as instance:
        with pytest.raises(ValueError, match="catalogue"):
            sensor(moved)(dg.build_sensor_context(instance))
        assert Ticks(ControlState(tmp_path)).last() == {}
        sensor(str)(dg.build_sensor_context(instance))
    assert list(Ticks(ControlState(tmp_path)).last()) == [NAME]
