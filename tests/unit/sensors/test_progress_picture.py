"""When the picture of all partitions is drawn anew."""

from sensors.progress_picture import Drawn


def test_while_something_works_a_picture_is_drawn_every_ten_minutes() -> None:
    """Not at every tick: the event log keeps each of them."""
    drawn = Drawn("a", "a", at=1000.0)
    assert not drawn.is_due("b", works=True, now=1599.0)
    assert drawn.is_due("b", works=True, now=1600.0)
    assert drawn.is_due("a", works=True, now=1600.0)
    assert not drawn.is_due("a", works=False, now=9999.0)
    assert Drawn.from_cursor("not json") == Drawn.from_cursor(None) == Drawn()
