"""Which steps may be taken, and what a state keeps, are functions of the numbers alone."""

import math

import pytest

from vlm_training.state import TrainingState, learning_rate


@pytest.mark.parametrize(
    ("loss", "norm", "why"),
    [
        (math.nan, 1.0, "loss is nan"),
        (math.inf, 1.0, "loss is inf"),
        (1.0, math.nan, "gradient is nan"),
        (1.0, 0.0, "dead"),
        (9.0, 1.0, r"9 where 1 is usual"),
    ],
)
def test_what_would_spoil_the_weights_is_refused(loss: float, norm: float, why: str) -> None:
    """NaN, infinity, a dead gradient and a spike against the running median: no step is taken."""
    state = TrainingState(losses=[1.0] * 20)
    assert why in (state.refusal(loss, norm) or "") or pytest.fail(str(state.refusal(loss, norm)))
    assert state.refusal(1.5, 0.1) is None


def test_the_first_losses_are_no_spikes() -> None:
    """Before enough is known of what is usual, only what is not finite is refused."""
    assert TrainingState(losses=[0.1] * 3).refusal(50.0, 1.0) is None


def test_a_state_comes_back_as_it_was() -> None:
    """Skips, metrics and history: what a checkpoint holds is what a resumed training goes on with."""
    state = TrainingState(order="x")
    state.count_step(0.5, consumed=8)
    state.skips[8] = ["p1", "p2"]
    state.note_metric(1, 0.4)
    assert TrainingState.from_json(state.as_json(), state.losses, state.samples) == state
    with pytest.raises(TypeError, match="lacks best"):
        TrainingState.from_json({n: v for n, v in state.as_json().items() if n != "best"}, [], [])


def test_the_rate_rises_and_falls() -> None:
    """The schedule is a function of the step, so there is nothing of it to restore."""
    rates = [learning_rate(1.0, step, 100) for step in range(100)]
    assert rates[0] < rates[5] == max(rates) and rates[-1] < 0.03
