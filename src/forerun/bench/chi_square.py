"""Pearson's chi-square test of counts against a known law."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

MIN_EXPECTED = 5.0  # cells that expect less are put together


@dataclass(frozen=True, slots=True)
class ChiSquare:
    """The result of a test.

    Attributes:
        statistic: sum of (observed - expected)^2 / expected.
        dof: cells after pooling, less one.
        p_value: chance of a statistic at least as large under the law.
    """

    statistic: float
    dof: int
    p_value: float


def chi_square(counts: Sequence[int], law: Sequence[float]) -> ChiSquare:
    """Tests counts against a law over the same cells.

    A count where the law has nothing is impossible, so its p-value is 0. Cells that expect fewer than MIN_EXPECTED are
    pooled into one.

    Args:
        counts: observations per cell.
        law: probability per cell; sums to 1.
    """
    total = sum(counts)
    if any(count and not p for count, p in zip(counts, law, strict=True)):
        return ChiSquare(math.inf, 1, 0.0)
    cells = [(count, total * p) for count, p in zip(counts, law, strict=True) if p]
    large = [cell for cell in cells if cell[1] >= MIN_EXPECTED]
    small = [cell for cell in cells if cell[1] < MIN_EXPECTED]
    if small:
        pooled = (sum(count for count, _ in small), sum(expected for _, expected in small))
        if pooled[1] >= MIN_EXPECTED or not large:
            large.append(pooled)
        else:
            large.sort(key=lambda cell: cell[1])
            large[0] = (large[0][0] + pooled[0], large[0][1] + pooled[1])
    statistic = sum((count - expected) ** 2 / expected for count, expected in large)
    dof = len(large) - 1
    return ChiSquare(statistic, dof, survival(statistic, dof) if dof else 1.0)


def survival(x: float, dof: int) -> float:
    """P(chi-square of dof degrees of freedom >= x), by the finite sums for whole and half-whole shapes.

    >>> round(survival(3.841458820694124, 1), 10), round(survival(18.307038053275146, 10), 10)
    (0.05, 0.05)
    """
    half = x / 2.0
    if half <= 0.0:
        return 1.0
    # Terms of the sum are half^s e^-half / Gamma(s + 1), for s = 0, 1, ... or 1/2, 3/2, ..., below dof / 2.
    start = 0.0 if dof % 2 == 0 else 0.5
    tail = 0.0 if dof % 2 == 0 else math.erfc(math.sqrt(half))
    count = dof // 2
    terms = (math.exp((start + i) * math.log(half) - half - math.lgamma(start + i + 1.0)) for i in range(count))
    return min(1.0, tail + math.fsum(terms))
