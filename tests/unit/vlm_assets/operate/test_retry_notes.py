"""What the triage says of partitions that the retries know."""

from resources.state.database import ControlState
from sensors.retry_ledger import Attempts, Entry
from vlm_assets.assets.partition_state import State
from vlm_assets.operate.retry_notes import RetryNotes


def test_what_was_given_up_says_so_in_words(tmp_path):
    """Never the mark by which the retries know what they told last."""
    entries = {
        "a": Entry("a", attempts=5, given_up=True, told="interrupted"),
        "b": Entry("b", attempts=1, given_up=True, told="person: 1f2e3d"),
    }
    state = ControlState(tmp_path)
    assert Attempts(state).write(entries, read={})
    notes = RetryNotes(state)
    assert notes.of("rows", "a", State.INTERRUPTED) == (
        State.GIVEN_UP,
        "failed 5 times in a row without progress: it is not tried again by itself",
    )
    assert notes.of("rows", "b", State.NOT_STARTED) == (
        State.GIVEN_UP,
        "failed once in a row without progress: it is not tried again by itself",
    )
