"""What a target pass takes, by its rows and its context: a measured curve, corrected by what steps really take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

MAX_ROWS = 64
SMOOTHING = 1.0 / 16.0
MAX_SURPRISE = 3.0  # a step that took more than this times what was expected says nothing about the next one
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
        """Takes in a step: seconds of its pass, and of everything else but drafting."""
        expected = self._pass_s(num_rows, context_len)
        if not 0.0 < forward_s < MAX_SURPRISE * expected:
            return
        surprise = forward_s / expected
        self._drift *= 1.0 + SMOOTHING * (surprise - 1.0)
        self._corrections[num_rows] *= 1.0 + SMOOTHING * (surprise - 1.0)
        self._overhead_s += SMOOTHING * (min(overhead_s, forward_s) - self._overhead_s)

    def _pass_s(self, num_rows: int, context_len: int) -> float:
        curve = self.curve
        base = self._base[num_rows]
        extra = context_len - curve.context_len
        seconds = base + extra * (curve.per_token_s + curve.per_token_row_s * num_rows)
        return max(seconds, 0.5 * base) * self._corrections[num_rows] * self._drift
