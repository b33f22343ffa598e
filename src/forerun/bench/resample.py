"""Intervals by resampling: what a figure would have been, had the prompts been others of their kind."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from forerun.types import Float64Array

NUM_RESAMPLES = 2000
CONFIDENCE = 0.95

Statistic = Callable[[npt.NDArray[np.int64]], Float64Array]


@dataclass(frozen=True, slots=True)
class Interval:
    """A figure with its interval, CONFIDENCE wide."""

    value: float
    low: float
    high: float

    def to_json(self) -> dict[str, Any]:
        """Plain values, five significant digits."""
        return {name: float(f"{getattr(self, name):.5g}") for name in ("value", "low", "high")}


def interval(num_items: int, statistic: Statistic) -> Interval:
    """A statistic of all items, and where it lies for items drawn with replacement.

    Args:
        num_items: items in all.
        statistic: of chosen items, given as indices [..., num_items]; reduces the last axis.
    """
    samples = np.random.default_rng(0).integers(0, num_items, (NUM_RESAMPLES, num_items))
    low, high = np.quantile(statistic(samples), [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return Interval(float(statistic(np.arange(num_items))), float(low), float(high))
