"""Interleaved rounds, and the statistics that are taken from them.

Arms take turns within a round, so a noisy moment hits all of them; every second round runs in reverse order, so a
slow drift cancels. A turn gives one number, the median of its repetitions; an arm's result is the median and the
quartiles of its rounds.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.wire import Worker

Key = tuple[Any, ...]  # names a result: what was measured, of which arm, at which size

_SETTLE_S = 0.02  # thread pools spin for a few milliseconds after their last pass


@dataclass(frozen=True, slots=True)
class Summary:
    """Median and quartiles of the rounds of one arm."""

    median: float
    q1: float
    q3: float
    num_rounds: int

    @staticmethod
    def of(values: Sequence[float]) -> Summary:
        """Quartiles by linear interpolation between the values; one value is its own quartiles."""
        if len(values) == 1:
            return Summary(values[0], values[0], values[0], 1)
        q1, middle, q3 = statistics.quantiles(values, n=4, method="inclusive")
        return Summary(middle, q1, q3, len(values))

    def scaled(self, factor: float) -> Summary:
        """The same in another unit."""
        return Summary(self.median * factor, self.q1 * factor, self.q3 * factor, self.num_rounds)

    def inverted(self, numerator: float) -> Summary:
        """numerator / value: tokens per second from seconds."""
        return Summary(numerator / self.median, numerator / self.q3, numerator / self.q1, self.num_rounds)

    def to_json(self) -> dict[str, Any]:
        """Plain values, five significant digits."""
        numbers = {"median": self.median, "q1": self.q1, "q3": self.q3}
        return {**{name: round_to(value) for name, value in numbers.items()}, "rounds": self.num_rounds}


def round_to(value: float, digits: int = 5) -> float:
    """The value with so many significant digits."""
    return float(f"{value:.{digits}g}")


@dataclass(frozen=True, slots=True)
class Turn:
    """What one arm measures in a round.

    Attributes:
        key: names the result.
        worker: does the work; all others should be idle meanwhile.
        run: gives the repetitions' values.
        num_rounds: rounds it takes part in, the first ones.
        has_warm_up: one unrecorded run before the first round.
    """

    key: Key
    worker: Worker
    run: Callable[[], Iterable[float]]
    num_rounds: int
    has_warm_up: bool = True


@dataclass(slots=True)
class Measured:
    """What the rounds gave.

    Attributes:
        values: one value per round, by the turns' keys.
        idle_cpu_share: processor time that idle workers used while another had its turn, over that time.
    """

    values: dict[Key, list[float]]
    idle_cpu_share: float

    def summary(self, key: Key) -> Summary:
        """Median and quartiles of one turn."""
        return Summary.of(self.values[key])


def interleave(turns: Sequence[Turn], on_turn: Callable[[Turn], None] = lambda turn: None) -> Measured:
    """Runs every turn in each of its rounds."""
    values: dict[Key, list[float]] = {turn.key: [] for turn in turns}
    workers = list(dict.fromkeys(turn.worker for turn in turns))
    idle_cpu_s = turn_s = 0.0
    for turn in turns:
        if turn.has_warm_up:
            turn.run()
            on_turn(turn)
    for number in range(max(turn.num_rounds for turn in turns)):
        round_turns = [turn for turn in turns if number < turn.num_rounds]
        for turn in round_turns if number % 2 == 0 else reversed(round_turns):
            time.sleep(_SETTLE_S)
            others = [worker for worker in workers if worker is not turn.worker]
            cpu_before_s = sum(worker.cpu_seconds() for worker in others)
            start_s = time.perf_counter()
            values[turn.key].append(statistics.median(turn.run()))
            turn_s += time.perf_counter() - start_s
            idle_cpu_s += sum(worker.cpu_seconds() for worker in others) - cpu_before_s
            on_turn(turn)
    return Measured(values, idle_cpu_s / turn_s)
