"""How things are timed: arms interleaved, so that a noisy moment hits them all, and medians taken."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Mapping
from statistics import median
from typing import TypeVar

from forerun._native import stream_read_gb_per_s

Arm = TypeVar("Arm", bound=Hashable)

# Far above any last-level cache, so that reading it is reading memory.
_STREAM_BYTES = 256 << 20


def median_seconds(arms: Mapping[Arm, Callable[[], object]], repeats: int) -> dict[Arm, float]:
    """Median seconds of each arm; every arm runs once unmeasured, then once per round."""
    for run in arms.values():
        run()
    seconds: dict[Arm, list[float]] = {arm: [] for arm in arms}
    for _ in range(repeats):
        for arm, run in arms.items():
            start = time.perf_counter()
            run()
            seconds[arm].append(time.perf_counter() - start)
    return {arm: median(times) for arm, times in seconds.items()}


def stream_bytes_per_s(num_threads: int) -> float:
    """The rate at which so many native threads read memory, the best of a few passes."""
    return float(stream_read_gb_per_s(num_threads, _STREAM_BYTES)) * 1e9
