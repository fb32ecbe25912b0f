"""The order of a training is a function of (seed, number), and a sample too many or too few is noticed."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vlm_training.order import LeakDetector, LeakError, SampleOrder, seed_of


@settings(deadline=None, max_examples=50)
@given(count=st.integers(1, 60), seed=st.integers(0, 2**31), epochs=st.integers(1, 3))
def test_each_sample_comes_once_an_epoch(count: int, seed: int, epochs: int) -> None:
    """No sample is repeated or left out in an epoch, and the sum of the marks says so."""
    order = SampleOrder(count, seed)
    delivered = 0
    for epoch in range(epochs):
        numbers = range(epoch * count, (epoch + 1) * count)
        assert sorted(order.index(number) for number in numbers) == list(range(count))
        delivered += sum(order.mark(number, order.index(number)) for number in numbers)
        LeakDetector(order).check_run((epoch + 1) * count, delivered)


def test_the_order_is_always_the_same() -> None:
    """A later version of numpy or of this program must not change it: running trainings stand on it."""
    order = SampleOrder(10, 3)
    assert [order.index(number) for number in range(10)] == [5, 1, 6, 2, 4, 8, 9, 0, 7, 3]
    assert order.digest() == "7b048aefeb164079"
    assert seed_of("sample", 1, 2) == 2156795547554447777


@settings(deadline=None, max_examples=50)
@given(data=st.data())
def test_a_repeated_or_missing_sample_is_noticed(data: st.DataObject) -> None:
    """Whichever sample takes the place of another, in a batch or over the run."""
    order = SampleOrder(20, 5)
    number, since = data.draw(st.integers(0, 39)), data.draw(st.integers(0, 40))
    other = data.draw(st.integers(0, 19).filter(lambda index: index != order.index(number)))
    marks = [order.mark(one, order.index(one)) for one in range(40)]
    before = since, sum(marks[:since])
    LeakDetector(order).check_run(40, sum(marks), since=before)
    marks[number] = order.mark(number, other)
    start = number // 8 * 8
    with pytest.raises(LeakError):
        LeakDetector(order).check_batch(start, start + 8, sum(marks[start : start + 8]))
    with pytest.raises(LeakError):
        LeakDetector(order).check_run(40, sum(marks))
    with pytest.raises(LeakError):
        LeakDetector(order).check_run(40, sum(marks), since=before)


def test_each_epoch_has_an_order_of_its_own() -> None:
    """The same order epoch after epoch would train on the same batches again, and a seed has its own too."""
    order = SampleOrder(50, 3)
    epochs = [tuple(order.index(epoch * 50 + at) for at in range(50)) for epoch in range(6)]
    other = tuple(SampleOrder(50, 4).index(at) for at in range(50))
    assert len({*epochs, other}) == 7
    # Those that are like shuffles share a place by chance in 1 of 50.
    same_places = sum(epochs[0][at] == one[at] for one in (*epochs[1:], other) for at in range(50))
    assert same_places < 20


@settings(deadline=None, max_examples=30)
@given(seed=st.integers(0, 2**31), data=st.data())
def test_samples_that_are_exchanged_between_epochs_are_noticed(seed: int, data: st.DataObject) -> None:
    """Each is trained on twice in two epochs, but one twice in the first, and another twice in the second."""
    order = SampleOrder(12, seed)
    twice, never = data.draw(st.lists(st.integers(0, 11), min_size=2, max_size=2, unique=True))
    delivered = 0
    for number in range(24):
        index = order.index(number)
        if number < 12 and index == never:
            index = twice
        elif number >= 12 and index == twice:
            index = never
        delivered += order.mark(number, index)
    with pytest.raises(LeakError):
        LeakDetector(order).check_run(24, delivered)
