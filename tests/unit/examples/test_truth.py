"""What is true of example properties: drawn the same each time, alike within a kind, rare values there."""

import numpy as np

from examples.evaluation import lift
from examples.training_data import classes
from examples.truth import FIELDS, RARE, draw_truth, known


def test_the_same_seed_and_index_give_the_same_truth() -> None:
    """Any number of properties can be had on demand, and again."""
    assert draw_truth("example", 7, 11) == draw_truth("example", 7, 11)
    others = [draw_truth("example", 8, 11), draw_truth("example", 7, 12), draw_truth("training", 7, 11)]
    assert all(other.summary != draw_truth("example", 7, 11).summary for other in others)


def test_every_value_occurs_and_rare_ones_are_rare() -> None:
    """Recall of a rare value can be measured, and guessing the usual one does not pay everywhere."""
    truths = [known(draw_truth("example", 1, index)) for index in range(2000)]
    for name, values in classes().items():
        assert {truth[name] for truth in truths} == set(values)
    for name, value in RARE.items():
        assert 0.02 < np.mean([truth[name] == value for truth in truths]) < 0.15


def test_the_truth_itself_has_neighbours_that_agree() -> None:
    """The lift of 0.5 asked of the embeddings is within reach: the fields as they are reach more than 0.6."""
    truths = [draw_truth("example", 7, index) for index in range(240)]
    rows = [known(truth) for truth in truths]
    columns = [[row[name] == value for row in rows] for name, values in classes().items() for value in values]
    one_hot = np.array(columns, dtype=np.float32).T / np.sqrt(len(FIELDS))
    assert lift(one_hot, truths) > 0.6


def test_embeddings_that_say_nothing_have_no_lift() -> None:
    """The measure is zero, give or take chance, for random directions."""
    truths = [draw_truth("example", 7, index) for index in range(240)]
    noise = np.random.default_rng(0).normal(size=(240, 64)).astype(np.float32)
    assert abs(lift(noise, truths)) < 0.1
