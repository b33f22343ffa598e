"""When a request's drafters are not asked any more, and when again."""

from __future__ import annotations

import pytest

from forerun.control.worth import PEEK_STEPS, REST_STEPS, TRIAL_STEPS, WAKE_TOKENS, Worth


def run(worth: Worth, num_steps: int, step_s: float, num_emitted: int = 1, expected_tokens: float = 1.0) -> list[bool]:
    """Steps beside plain ones of a second; whether the drafters were asked for each."""
    asked = []
    for _ in range(num_steps):
        asked.append(worth.asks())
        worth.learn(1.0, step_s, num_emitted, expected_tokens)
    return asked


def test_a_losing_request_rests_after_a_trial_and_is_tried_again() -> None:
    worth = Worth()
    assert all(run(worth, TRIAL_STEPS, 1.05))
    rest = run(worth, REST_STEPS - 1, 1.0)
    assert sum(rest) == REST_STEPS // PEEK_STEPS - 1
    assert all(run(worth, TRIAL_STEPS, 1.05))
    assert not worth.asks()


@pytest.mark.parametrize(("step_s", "num_emitted"), [(1.01, 1), (1.9, 2), (0.9, 1)])
def test_who_loses_next_to_nothing_or_gains_goes_on(step_s: float, num_emitted: int) -> None:
    assert all(run(Worth(), 1000, step_s, num_emitted))


def test_a_promise_ends_the_rest() -> None:
    worth = Worth()
    run(worth, TRIAL_STEPS + 10, 1.05)
    assert not worth.asks()
    worth.learn(1.0, 1.5, 3, WAKE_TOKENS)
    assert all(run(worth, TRIAL_STEPS, 1.5, 3, 3.0))


def test_a_hitch_counts_as_one_plain_step() -> None:
    worth = Worth()
    run(worth, 20, 1.5, 2)  # a gain of half a step each
    worth.learn(1.0, 1e6, 1, 1.0)
    assert all(run(worth, 500, 1.5, 2))
