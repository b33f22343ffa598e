"""Interleaved rounds, and the statistics that are taken from them.

Arms take turns within a round, so a noisy moment hits all of them; every second round runs in reverse order, so a
slow drift cancels. A turn gives one number, the median of its repetitions; an arm's result is the median and the
quartiles of its rounds.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol


class Process(Protocol):
    """What has a turn: a worker or a server."""

    def cpu_seconds(self) -> float:
        """Processor time so far."""
        ...


Key = tuple[Any, ...]  # names a result: what was measured, of which arm, at which size

_QUIET_SHARE = 0.05  # of the CPUs' time may go to other processes
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
        worker: the process that does the work; all others should be idle meanwhile.
        run: gives the repetitions' values.
        num_rounds: rounds it takes part in, the first ones.
        has_warm_up: one unrecorded run before the first round.
    """

    key: Key
    worker: Process
    run: Callable[[], Iterable[float]]
    num_rounds: int
    has_warm_up: bool = True


@dataclass(frozen=True, slots=True)
class Measured:
    """What the rounds gave.

    Attributes:
        values: one value per round, by the turns' keys.
        idle_cpu_share: processor time that idle workers used while another had its turn, per second of a turn.
        other_cpu_share: processor time that other processes, or other machines on the same host, took of the pinned
            CPUs during turns, of all there was.
    """

    values: dict[Key, list[float]]
    idle_cpu_share: float
    other_cpu_share: float

    def summary(self, key: Key) -> Summary:
        """Median and quartiles of one turn."""
        return Summary.of(self.values[key])

    @property
    def is_quiet(self) -> bool:
        """Whether other processes left the CPUs alone. Engines whose threads spin lose far more when they don't."""
        return self.other_cpu_share <= _QUIET_SHARE


@dataclass(slots=True)
class _CpuWatch:
    """Who used the processors during turns, in seconds."""

    workers: list[Process]
    turn_s: float = 0.0
    idle_s: float = 0.0
    other_s: float = 0.0

    @contextmanager
    def turn_of(self, active: Process) -> Iterator[None]:
        """Counts what happens inside."""
        start_s, own_s, busy_s, worker_s = self._read()
        yield
        end_s, own_end_s, busy_end_s, worker_end_s = self._read()
        used_s = {worker: worker_end_s[worker] - worker_s[worker] for worker in self.workers}
        self.turn_s += end_s - start_s
        self.idle_s += sum(seconds for worker, seconds in used_s.items() if worker is not active)
        self.other_s += busy_end_s - busy_s - (own_end_s - own_s) - sum(used_s.values())

    def _read(self) -> tuple[float, float, float, dict[Process, float]]:
        workers_s = {worker: worker.cpu_seconds() for worker in self.workers}
        return time.perf_counter(), time.process_time(), busy_seconds(Path("/proc/stat").read_text()), workers_s


def busy_seconds(proc_stat: str) -> float:
    """Seconds that the CPUs of this process were not idle since boot, from the text of /proc/stat.

    Time that a hypervisor gave to others counts as busy.
    """
    cpus = {f"cpu{number}" for number in os.sched_getaffinity(0)}
    ticks = 0
    for line in proc_stat.splitlines():
        name, *fields = line.split()
        if name in cpus:
            user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, fields[:8])
            ticks += user + nice + system + irq + softirq + steal
    return ticks / os.sysconf("SC_CLK_TCK")


def interleave(turns: Sequence[Turn], on_turn: Callable[[Turn], None] = lambda turn: None) -> Measured:
    """Runs every turn in each of its rounds."""
    values: dict[Key, list[float]] = {turn.key: [] for turn in turns}
    watch = _CpuWatch(list(dict.fromkeys(turn.worker for turn in turns)))
    for turn in turns:
        if turn.has_warm_up:
            turn.run()
            on_turn(turn)
    for number in range(max(turn.num_rounds for turn in turns)):
        round_turns = [turn for turn in turns if number < turn.num_rounds]
        for turn in round_turns if number % 2 == 0 else reversed(round_turns):
            time.sleep(_SETTLE_S)
            with watch.turn_of(turn.worker):
                values[turn.key].append(statistics.median(turn.run()))
            on_turn(turn)
    cpu_s = watch.turn_s * len(os.sched_getaffinity(0))
    return Measured(values, watch.idle_s / watch.turn_s, max(0.0, watch.other_s / cpu_s))
