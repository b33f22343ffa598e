"""What a target pass takes, by its rows and its context: a measured curve, corrected by what steps really take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import forerun._native as _native

MAX_ROWS = 64
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


class StepCosts(_native.StepCosts):
    """Predicts steps from a curve, and learns from those that were run.

    A correction for all sizes follows the machine (clock, neighbours); one per size follows the curve's own error.
    `step_s` is what a step should take, drafting apart, by its rows, its sequences and the tokens that each of these
    has on the average; `steps_s` the same for several numbers of rows. More rows than the curve has cost what those of
    its upper half do. `learn` takes in a step: seconds of its pass, and of everything else but drafting, which counts
    for steps of one row per sequence. `is_due` says that a step of so many rows should be run to see what it takes:
    what plain steps take is the measure of everything.

    Attributes:
        context_len: tokens at which the curve was measured.
    """

    def __init__(self, curve: CostCurve) -> None:
        self.context_len = curve.context_len
        super().__init__(
            curve.by_rows(), curve.context_len, curve.per_token_s, curve.per_token_row_s, DEFAULT_OVERHEAD_S
        )
