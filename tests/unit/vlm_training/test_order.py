"""The order of a training is a function of (seed, number), and a sample too many or too few is noticed."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vlm_training.order import LeakError, SampleOrder, seed_of


@settings(deadline=None, max_examples=50)
@given(count=st.integers(1, 60), seed=st.integers(0, 2**31), epochs=st.integers(1, 3))
def test_each_sample_comes_once_an_epoch(count: int, seed: int, epochs: int) -> None:
    """No sample is repeated or left out in an epoch."""
    order = SampleOrder(count, seed)
    for epoch in range(epochs):
        numbers = range(epoch * count, (epoch + 1) * count)
        assert sorted(order.index(number) for number in numbers) == list(range(count))


def test_the_order_is_always_the_same() -> None:
    """A later version of numpy or of this program must not change it: running trainings stand on it."""
    order = SampleOrder(10, 3)
    assert [order.index(number) for number in range(10)] == [5, 1, 6, 2, 4, 8, 9, 0, 7, 3]
    assert order.digest() == "7b048aefeb164079"
    assert seed_of("sample", 1, 2) == 2156795547554447777


@pytest.mark.parametrize(
    ("numbers", "named"),
    [
        ((20, 20, 22), r"number 20 \(.* where sample number 21 "),
        ((20, 22), r"number 22 \(.* where sample number 21 "),
        ((20, 21), r"no sample where sample number 22 "),
        ((20, 22, 21), r"number 22 \(.* where sample number 21 "),
        ((20, 21, 22, 23), r"number 23 \(.* where no sample was due"),
        ((0, 21, 22), r"number 0 \(.* where sample number 20 "),
    ],
    ids=["twice", "skipped", "too few", "swapped", "too many", "of another epoch"],
)
def test_samples_that_are_not_the_planned_ones_are_named(numbers: tuple[int, ...], named: str) -> None:
    """Repeated, left out or exchanged: the first that differs, whatever comes after it."""
    order = SampleOrder(20, 5)
    with pytest.raises(LeakError, match=named):
        order.check(range(20, 23), [(number, order.index(number)) for number in numbers])


def test_a_number_with_the_index_of_another_is_named() -> None:
    """A loader's process that has another order than its rank, such as by another numpy."""
    order, other = SampleOrder(20, 5), SampleOrder(20, 6)
    order.check(range(20, 23), [(number, order.index(number)) for number in range(20, 23)])
    with pytest.raises(LeakError, match=rf"index {other.index(20)}\) where sample number 20 "):
        order.check(range(20, 23), [(number, other.index(number)) for number in range(20, 23)])


def test_each_epoch_has_an_order_of_its_own() -> None:
    """The same order epoch after epoch would train on the same batches again, and a seed has its own too."""
    order = SampleOrder(50, 3)
    epochs = [tuple(order.index(epoch * 50 + at) for at in range(50)) for epoch in range(6)]
    other = tuple(SampleOrder(50, 4).index(at) for at in range(50))
    assert len({*epochs, other}) == 7
    # Those that are like shuffles share a place by chance in 1 of 50.
    same_places = sum(epochs[0][at] == one[at] for one in (*epochs[1:], other) for at in range(50))
    assert same_places < 20
