"""What a target pass takes, by its rows and its context: a measured curve, corrected by what steps really take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

MAX_ROWS = 64
# A size's newest step weighs this much, and more the longer the size was not run.
SIZE_SMOOTHING, SIZE_SMOOTHING_PER_STEP, MAX_SIZE_SMOOTHING = 1.0 / 8.0, 1.0 / 256.0, 0.5
# Slower, so that a wrong entry of the curve is blamed on its size and not on the machine.
DRIFT_SMOOTHING = 1.0 / 64.0
OVERHEAD_SMOOTHING = 1.0 / 16.0
# Every so many steps all corrections of sizes move this share back: what was seen long ago may not hold any more.
RELAX_STEPS, RELAX_SHARE = 16, 1.0 / 64.0
# What a plain step takes is the measure of everything, so it is tried when none was run for so many steps, and sooner
# after one that took something else than expected.
PLAIN_STEPS, SURPRISED_PLAIN_STEPS, PLAIN_SURPRISE = 256, 16, 0.15
MAX_SURPRISE = 3.0  # a step counts as at most this many times slower or faster than expected: a page fault is no trend
# Until steps have been seen: Python around a pass.
DEFAULT_OVERHEAD_S = 2e-4


@dataclass(frozen=True, slots=True)
class CostCurve:
    """Seconds of a pass, as measured.

    Attributes:
        num_rows: the measured sizes, ascending, the first is 1.
        seconds: of a pass of each size at context_len.
        context_len: tokens in the cache while measuring.
        per_token_s: seconds more for each token of context.
        per_token_row_s: seconds more for each token of context and row.
    """

    num_rows: tuple[int, ...]
    seconds: tuple[float, ...]
    context_len: int
    per_token_s: float
    per_token_row_s: float

    @staticmethod
    def flat(seconds: float) -> CostCurve:
        """A pass that takes the same whatever its size."""
        return CostCurve((1, MAX_ROWS), (seconds, seconds), 0, 0.0, 0.0)

    def by_rows(self) -> tuple[float, ...]:
        """Seconds at context_len for 0 to MAX_ROWS rows: straight lines between the measured sizes, and beyond them.

        >>> CostCurve((1, 3), (1.0, 2.0), 0, 0.0, 0.0).by_rows()[1:5]
        (1.0, 1.5, 2.0, 2.5)
        """
        return tuple(_interpolate(self.num_rows, self.seconds, rows) for rows in range(MAX_ROWS + 1))


def _interpolate(xs: Sequence[int], ys: Sequence[float], x: int) -> float:
    right = next((i for i, known in enumerate(xs) if known >= x), len(xs) - 1)
    right = max(right, 1)
    left = right - 1
    share = (x - xs[left]) / (xs[right] - xs[left])
    return max(ys[left] + share * (ys[right] - ys[left]), 0.0)


class StepCosts:
    """Predicts steps from a curve, and learns from those that were run.

    A correction for all sizes follows the machine (clock, neighbours); one per size follows the curve's own error.
    """

    def __init__(self, curve: CostCurve) -> None:
        self.curve = curve
        self._base = curve.by_rows()
        self._drift = 1.0
        self._corrections = [1.0] * len(self._base)
        self._overhead_s = DEFAULT_OVERHEAD_S
        self._num_steps = 0
        self._last_run = [0] * len(self._base)
        self._plain_steps = PLAIN_STEPS

    def step_s(self, num_rows: int, context_len: int) -> float:
        """Seconds a step of this many rows should take, drafting apart."""
        return self._pass_s(num_rows, context_len) + self._overhead_s

    def steps_s(self, max_rows: int, context_len: int) -> list[float]:
        """The same for 0 to max_rows rows, at once."""
        curve, drift, overhead = self.curve, self._drift, self._overhead_s
        extra = context_len - curve.context_len
        fixed, per_row = extra * curve.per_token_s, extra * curve.per_token_row_s
        pairs = zip(self._base[: max_rows + 1], self._corrections, strict=False)
        return [
            max(base + fixed + per_row * rows, 0.5 * base) * correction * drift + overhead
            for rows, (base, correction) in enumerate(pairs)
        ]

    def learn(self, num_rows: int, context_len: int, forward_s: float, overhead_s: float) -> None:
        """Takes in a step: seconds of its pass, and of everything else but drafting, which counts for plain steps."""
        surprise = forward_s / self._pass_s(num_rows, context_len)
        surprise = min(max(surprise, 1.0 / MAX_SURPRISE), MAX_SURPRISE)
        self._drift *= 1.0 + DRIFT_SMOOTHING * (surprise - 1.0)
        num_stale = self._num_steps - self._last_run[num_rows]
        gain = min(SIZE_SMOOTHING + SIZE_SMOOTHING_PER_STEP * num_stale, MAX_SIZE_SMOOTHING)
        self._corrections[num_rows] *= 1.0 + gain * (surprise - 1.0)
        if num_rows == 1:
            self._plain_steps = PLAIN_STEPS if abs(surprise - 1.0) < PLAIN_SURPRISE else SURPRISED_PLAIN_STEPS
            # What comes on top where several tokens are emitted is no part of a plain step.
            self._overhead_s += OVERHEAD_SMOOTHING * (min(overhead_s, forward_s) - self._overhead_s)
        self._num_steps += 1
        self._last_run[num_rows] = self._num_steps
        if self._num_steps % RELAX_STEPS == 0:
            self._corrections = [c + RELAX_SHARE * (1.0 - c) for c in self._corrections]

    @property
    def is_plain_due(self) -> bool:
        """Whether a plain step should be run to see what it takes."""
        return self._num_steps - self._last_run[1] >= self._plain_steps

    def _pass_s(self, num_rows: int, context_len: int) -> float:
        curve = self.curve
        base = self._base[num_rows]
        extra = context_len - curve.context_len
        seconds = base + extra * (curve.per_token_s + curve.per_token_row_s * num_rows)
        return max(seconds, 0.5 * base) * self._corrections[num_rows] * self._drift
