"""The controller's arithmetic once more, slowly and obviously: the same numbers as csrc/control.cpp, bit by bit."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from forerun.control.cost import DEFAULT_OVERHEAD_S, CostCurve

PRIOR_WEIGHT = 5.0  # observations that a prior rate counts for
DECAY = 0.99  # an observation counts half after about 70 more of its cell
MAX_LOG_ODDS = math.log(4.0)
ODDS_STEP = 0.1  # step of the stochastic gradient on a request's log-odds
_MIN_RATE, _MAX_RATE = 1e-3, 1.0 - 1e-3
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


class SlowTable:
    """See `control.acceptance.AcceptanceTable`."""

    def __init__(self, priors: Sequence[float]) -> None:
        self.priors = tuple(priors)
        self.trials = [0.0] * len(self.priors)
        self.successes = [0.0] * len(self.priors)

    def rate(self, cell: int) -> float:
        rate = (PRIOR_WEIGHT * self.priors[cell] + self.successes[cell]) / (PRIOR_WEIGHT + self.trials[cell])
        return min(max(rate, _MIN_RATE), _MAX_RATE)

    def record(self, cell: int, is_right: bool) -> None:
        self.trials[cell] = DECAY * self.trials[cell] + 1.0
        self.successes[cell] = DECAY * self.successes[cell] + is_right


class SlowRates:
    """See `control.acceptance.RequestRates`."""

    def __init__(self, table: SlowTable) -> None:
        self.table = table
        self.log_odds = 0.0

    def rate(self, cell: int) -> float:
        rate, factor = self.table.rate(cell), math.exp(self.log_odds)
        return rate * factor / (1.0 - rate + rate * factor)

    def record(self, cell: int, is_right: bool) -> None:
        log_odds = self.log_odds + ODDS_STEP * (is_right - self.rate(cell))
        self.log_odds = min(max(log_odds, -MAX_LOG_ODDS), MAX_LOG_ODDS)
        self.table.record(cell, is_right)

    def score(
        self, token_ids: Sequence[int], parents: Sequence[int], cells: Sequence[int], emitted: Sequence[int]
    ) -> None:
        depth_of = {-1: 0}  # nodes on the emitted path
        for node, cell in enumerate(cells):
            depth = depth_of.get(parents[node])
            if depth is None or depth >= len(emitted):
                continue
            is_right = token_ids[node] == emitted[depth]
            self.record(cell, is_right)
            if is_right:
                depth_of[node] = depth + 1


class SlowCosts:
    """See `control.cost.StepCosts`."""

    def __init__(self, curve: CostCurve) -> None:
        self.curve = curve
        self.base = curve.by_rows()
        self.drift = 1.0
        self.corrections = [1.0] * len(self.base)
        self.overhead_s = DEFAULT_OVERHEAD_S
        self.num_steps = 0
        self.last_run = [0] * len(self.base)
        self.plain_steps = PLAIN_STEPS

    def pass_s(self, num_rows: int, num_seqs: int, context_len: float) -> float:
        curve, last = self.curve, len(self.base) - 1
        half = len(self.base) // 2
        more = max(num_rows - last, 0) * ((self.base[-1] - self.base[half]) / (last - half))
        base = self.base[min(num_rows, last)] + more
        extra_per_seq, extra = context_len - curve.context_len, context_len * num_seqs - curve.context_len
        seconds = base + extra * curve.per_token_s + extra_per_seq * curve.per_token_row_s * num_rows
        return max(seconds, 0.5 * base) * self.corrections[min(num_rows, last)] * self.drift

    def step_s(self, num_rows: int, num_seqs: int, context_len: float) -> float:
        return self.pass_s(num_rows, num_seqs, context_len) + self.overhead_s * num_seqs

    def learn(
        self, num_rows: int, num_seqs: int, context_len: float, is_plain: bool, forward_s: float, overhead_s: float
    ) -> None:
        surprise = forward_s / self.pass_s(num_rows, num_seqs, context_len)
        surprise = min(max(surprise, 1.0 / MAX_SURPRISE), MAX_SURPRISE)
        self.drift *= 1.0 + DRIFT_SMOOTHING * (surprise - 1.0)
        self.num_steps += 1
        if num_rows < len(self.base):
            num_stale = self.num_steps - 1 - self.last_run[num_rows]
            gain = min(SIZE_SMOOTHING + SIZE_SMOOTHING_PER_STEP * num_stale, MAX_SIZE_SMOOTHING)
            self.corrections[num_rows] *= 1.0 + gain * (surprise - 1.0)
            self.last_run[num_rows] = self.num_steps
        if is_plain:
            self.plain_steps = PLAIN_STEPS if abs(surprise - 1.0) < PLAIN_SURPRISE else SURPRISED_PLAIN_STEPS
            self.overhead_s += OVERHEAD_SMOOTHING * (min(overhead_s, forward_s) / num_seqs - self.overhead_s)
        if self.num_steps % RELAX_STEPS == 0:
            self.corrections = [c + RELAX_SHARE * (1.0 - c) for c in self.corrections]

    def is_due(self, num_rows: int) -> bool:
        return num_rows < len(self.base) and self.num_steps - self.last_run[num_rows] >= self.plain_steps


@dataclass
class SlowCandidates:
    """See `control.candidates.Candidates`.

    Attributes:
        path_of: per node its tokens from the root.
        rates: acceptance of each node given its parent's.
        sources: proposal, and node there, whose it is.
        is_fixed: whether it must be verified whatever it costs.
    """

    path_of: list[tuple[int, ...]] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    sources: list[tuple[int, int]] = field(default_factory=list)
    is_fixed: list[bool] = field(default_factory=list)
    num_proposals: int = 0

    def merge(
        self, token_ids: Sequence[int], parents: Sequence[int], cells: Sequence[int], is_fixed: bool, rates: SlowRates
    ) -> None:
        paths: list[tuple[int, ...]] = []
        for node, (token_id, parent, cell) in enumerate(zip(token_ids, parents, cells, strict=True)):
            paths.append((*(paths[parent] if parent >= 0 else ()), token_id))
            rate, source = rates.rate(cell), (self.num_proposals, node)
            if paths[node] not in self.path_of:
                self.path_of.append(paths[node])
                self.rates.append(rate)
                self.sources.append(source)
                self.is_fixed.append(is_fixed)
                continue
            known = self.path_of.index(paths[node])
            self.is_fixed[known] |= is_fixed
            if rate > self.rates[known]:
                self.rates[known], self.sources[known] = rate, source
        self.num_proposals += 1

    def parent(self, node: int) -> int:
        above = self.path_of[node][:-1]
        return self.path_of.index(above) if above else -1

    def survivals(self) -> list[float]:
        out: list[float] = []
        for node, rate in enumerate(self.rates):
            parent = self.parent(node)
            total = 0.0
            for other in range(len(self.rates)):
                total += self.rates[other] if self.parent(other) == parent else 0.0
            above = 1.0 if parent < 0 else out[parent]
            out.append(above * rate / max(1.0, total))
        return out

    def order(self, max_nodes: int) -> list[int]:
        """The order in which nodes are taken."""
        survivals = self.survivals()
        order = sorted(range(len(self.rates)), key=lambda node: (not self.is_fixed[node], -survivals[node], node))
        return order[:max_nodes]

    def take(self, order: Sequence[int]) -> Chosen:
        """The choice of these nodes."""
        survivals, kept = self.survivals(), sorted(order)
        tokens = 0.0
        for node in order:
            tokens += survivals[node]
        return (
            tuple(self.path_of[node][-1] for node in kept),
            tuple(kept.index(self.parent(node)) if self.parent(node) >= 0 else -1 for node in kept),
            tuple(self.sources[node][0] for node in kept),
            tuple(self.sources[node][1] for node in kept),
            len(self.rates),
            sum(self.is_fixed),
            1.0 + tokens,
        )


Chosen = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], tuple[int, ...], int, int, float]


def slow_choose(
    candidates: Sequence[SlowCandidates],
    max_nodes: Sequence[int],
    takes_paying: bool,
    costs: SlowCosts | None,
    num_rows: int,
    num_seqs: int,
    context_len: float,
    max_rows: int,
    price: float,
) -> list[Chosen]:
    """See `control.candidates.choose_nodes`."""
    orders = [request.order(limit) for request, limit in zip(candidates, max_nodes, strict=True)]
    fixed = [sum(request.is_fixed[node] for node in order) for request, order in zip(candidates, orders, strict=True)]
    counts = list(fixed)
    if costs is not None and takes_paying:
        pool = sorted(
            (-request.survivals()[node], i, place)
            for i, (request, order) in enumerate(zip(candidates, orders, strict=True))
            for place, node in enumerate(order)
            if place >= fixed[i]
        )
        first = num_rows + sum(fixed)
        tokens, values = 0.0, [-price * costs.step_s(first, num_seqs, context_len)]
        for count in range(1, min(len(pool), max_rows - first) + 1):
            tokens -= pool[count - 1][0]
            values.append(tokens - price * costs.step_s(first + count, num_seqs, context_len))
        for _, i, _ in pool[: values.index(max(values))]:
            counts[i] += 1
    return [request.take(order[:count]) for request, order, count in zip(candidates, orders, counts, strict=True)]
