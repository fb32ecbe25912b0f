"""vlm_durable/journal/segments.py: one digest for one set."""

from hypothesis import given
from hypothesis import strategies as st

from vlm_durable.journal.segments import key_set_digest


@given(st.sets(st.text(max_size=3), max_size=6), st.sets(st.text(max_size=3), max_size=6), st.randoms())
def test_digests_are_equal_exactly_where_sets_are(left, right, shuffle):
    """Order never matters, and no two sets (separators in ids included) share a digest."""
    mixed = list(left)
    shuffle.shuffle(mixed)
    assert key_set_digest(mixed) == key_set_digest(left)
    assert (key_set_digest(left) == key_set_digest(right)) == (left == right)
