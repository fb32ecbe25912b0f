"""The sum of the microbatches' gradients does not depend on how many ranks computed them."""

import pytest
import torch

from vlm_training.ranks import Ranks, TreeSum, bounds


@pytest.mark.parametrize("microbatches", [1, 3, 4, 8])
def test_the_tree_is_the_same_for_any_number_of_ranks(microbatches: int) -> None:
    """1, 2, 3 or 4 ranks: each microbatch once, in order, so that the rounding is the same."""
    for world in (1, 2, 3, 4):
        rounds = zip(
            *(Ranks(rank, world).own_microbatches(microbatches) for rank in range(world)), strict=True
        )
        pushed = [one for together in rounds for one in together][:microbatches]
        assert pushed == list(range(microbatches))
    parts = [torch.randn(1000, generator=torch.Generator().manual_seed(n)) for n in range(microbatches)]
    tree = TreeSum()
    for part in parts:
        tree.push([part.clone()])
    assert torch.allclose(tree.total()[0], torch.stack(parts).sum(0), atol=1e-5)


def test_four_are_added_in_pairs() -> None:
    """(a + b) + (c + d): the order that every number of ranks keeps."""
    a, b, c, d = (torch.tensor([value]) for value in (1e8, 1.0, -1e8, 1.0))
    tree = TreeSum()
    for one in (a, b, c, d):
        tree.push([one.clone()])
    assert tree.total()[0] == (a + b) + (c + d)


def test_a_batch_is_cut_without_loss() -> None:
    """Every sample number stands in one microbatch, also where there are fewer than microbatches."""
    for size in (1, 3, 8, 10):
        assert [one for part in bounds(5, 5 + size, 4) for one in part] == list(range(5, 5 + size))
