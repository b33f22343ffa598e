"""The controller's arithmetic in C++ against the slow one, bit by bit, and what it refuses."""

from __future__ import annotations

import random

import pytest

from forerun._native import StepCosts as NativeCosts
from forerun.control.acceptance import AcceptanceTable, RequestRates
from forerun.control.candidates import Candidates
from forerun.control.cost import CostCurve, StepCosts
from tests.helpers.control_reference import SlowCandidates, SlowCosts, SlowRates, SlowTable

NUM_CELLS = 6
PRIORS = (0.02, 0.2, 0.5, 0.8, 0.97, 1.0)
Nodes = tuple[list[int], list[int], list[int]]


def random_nodes(rng: random.Random, num_nodes: int, is_chain: bool) -> Nodes:
    """Token ids, parents and cells; of few ids, so that proposals share paths and siblings may be equal."""
    parents = [node - 1 if is_chain else rng.randrange(-1, node) for node in range(num_nodes)]
    return [rng.randrange(3) for _ in parents], parents, [rng.randrange(NUM_CELLS) for _ in parents]


def random_curve(rng: random.Random) -> CostCurve:
    seconds = [rng.uniform(1.0, 3.0)]
    for _ in range(4):
        seconds.append(seconds[-1] + rng.choice((0.0, 0.02, 0.2, 1.0)))
    return CostCurve((1, 2, 4, 8, 64), tuple(seconds), 100, 1e-3, 1e-4)


@pytest.mark.parametrize("seed", range(60))
def test_the_controllers_numbers_are_those_of_the_slow_one(seed: int) -> None:
    """A request with several drafters: merging, choosing, scoring and learning, over many steps."""
    rng = random.Random(seed)
    curve = random_curve(rng)
    costs, slow_costs = StepCosts(curve), SlowCosts(curve)
    tables, slow_tables = ([make(PRIORS) for _ in range(3)] for make in (AcceptanceTable, SlowTable))
    rates, slow_rates = [RequestRates(t) for t in tables], [SlowRates(t) for t in slow_tables]
    candidates = Candidates()
    counts = set()
    for _ in range(120):
        proposals = [random_nodes(rng, rng.choice((0, 1, 3, 9)), rng.random() < 0.5) for _ in rates]
        candidates.clear()
        slow = SlowCandidates()
        for own, slow_own, nodes in zip(rates, slow_rates, proposals, strict=True):
            is_fixed = rng.random() < 0.1
            candidates.merge(*nodes, is_fixed, own)
            slow.merge(*nodes, is_fixed, slow_own)
        max_nodes, context_len, price = rng.randrange(1, 20), rng.randrange(0, 3000), rng.uniform(0.1, 1.5)
        takes_paying, has_costs = rng.random() < 0.9, rng.random() < 0.9
        got = candidates.choose(max_nodes, takes_paying, costs if has_costs else None, context_len, price)
        assert got == slow.choose(max_nodes, takes_paying, slow_costs if has_costs else None, context_len, price)
        counts.add(len(got[0]))
        emitted = [rng.randrange(3) for _ in range(rng.randrange(1, 6))]
        for own, slow_own, nodes in zip(rates, slow_rates, proposals, strict=True):
            own.score(*nodes, emitted)
            slow_own.score(*nodes, emitted)
            assert [own.rate(cell) for cell in range(NUM_CELLS)] == [slow_own.rate(cell) for cell in range(NUM_CELLS)]
        step = (rng.choice((1, 1 + len(got[0]))), context_len, rng.uniform(0.2, 12.0), rng.uniform(0.0, 0.3))
        costs.learn(*step)
        slow_costs.learn(*step)
        assert costs.steps_s(64, context_len) == [slow_costs.step_s(rows, context_len) for rows in range(65)]
        assert costs.is_plain_due == slow_costs.is_plain_due
    assert len(counts) > 3


def test_what_is_no_proposal_is_refused_and_changes_nothing() -> None:
    table = AcceptanceTable((0.5, 0.5))
    rates, candidates = RequestRates(table), Candidates()
    candidates.merge([1, 2], [-1, 0], [0, 1], True, rates)
    good = candidates.choose(8, False, None, 0, 0.0)
    for nodes, error, message in (
        (([1], [-1], []), ValueError, "differ in length"),
        (([1], [], [0]), ValueError, "differ in length"),
        (([1, 2], [-1, 1], [0, 0]), ValueError, "precedes its parent"),
        (([1, 2], [-1, -2], [0, 0]), ValueError, "precedes its parent"),
        (([9, 1], [-1, -1], [0, 2]), IndexError, "no acceptance cell 2 among 2"),
        (([9, 1], [-1, -1], [0, -1]), IndexError, "no acceptance cell -1 among 2"),
    ):
        with pytest.raises(error, match=message):
            candidates.merge(*nodes, True, rates)
        assert candidates.choose(8, False, None, 0, 0.0) == good
        if error is ValueError:
            with pytest.raises(error, match=message):
                rates.score(*nodes, [1])
    for cell in (-1, 2):
        with pytest.raises(IndexError):
            rates.rate(cell)
        with pytest.raises(IndexError):
            table.record(cell, True)


def test_costs_know_their_sizes() -> None:
    costs = StepCosts(CostCurve.flat(1.0))
    for num_rows in (-1, 65):
        with pytest.raises(IndexError, match="no cost of"):
            costs.step_s(num_rows, 0)
        with pytest.raises(IndexError, match="no cost of"):
            costs.learn(num_rows, 0, 1.0, 0.0)
    assert len(costs.steps_s(100, 0)) == 65
    with pytest.raises(ValueError, match="a pass of one row"):
        NativeCosts([1.0], 0, 0.0, 0.0, 0.0)


def test_a_request_keeps_its_table() -> None:
    rates = RequestRates(AcceptanceTable((0.25,)))
    assert rates.rate(0) == 0.25


def test_of_equal_counts_the_least_is_chosen() -> None:
    rates, candidates = RequestRates(AcceptanceTable((0.5,))), Candidates()
    candidates.merge([1], [-1], [0], False, rates)
    for second_row_s, count in ((0.5, 0), (0.49, 1)):
        costs = NativeCosts([0.0, 1.0, 1.0 + second_row_s], 0, 0.0, 0.0, 0.0)
        assert len(candidates.choose(8, True, costs, 0, 1.0)[0]) == count


def test_as_many_are_chosen_as_there_are_costs_for() -> None:
    rates, candidates = RequestRates(AcceptanceTable((1.0,))), Candidates()
    for first_id in (0, 100):
        candidates.merge(range(first_id, first_id + 60), range(-1, 59), [0] * 60, False, rates)
    costs = StepCosts(CostCurve.flat(1.0))
    for max_nodes in (40, 63, 200):
        assert len(candidates.choose(max_nodes, True, costs, 0, 1e-6)[0]) == min(max_nodes, 63)
