"""The controller's arithmetic in C++ against the slow one, bit by bit, and what it refuses."""

from __future__ import annotations

import random

import pytest

from forerun._native import StepCosts as NativeCosts
from forerun.control.acceptance import AcceptanceTable, RequestRates
from forerun.control.candidates import Candidates, choose_nodes
from forerun.control.cost import CostCurve, StepCosts
from tests.helpers.control_reference import SlowCandidates, SlowCosts, SlowRates, SlowTable, slow_choose

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
    """Requests with several drafters: merging, choosing among all, scoring and learning, over many steps."""
    rng = random.Random(seed)
    curve = random_curve(rng)
    costs, slow_costs = StepCosts(curve), SlowCosts(curve)
    tables, slow_tables = ([make(PRIORS) for _ in range(3)] for make in (AcceptanceTable, SlowTable))
    rates, slow_rates = [RequestRates(t) for t in tables], [SlowRates(t) for t in slow_tables]
    requests = [Candidates() for _ in range(3)]
    counts = set()
    for _ in range(80):
        slow_requests = []
        for candidates in requests:
            candidates.clear()
            slow = SlowCandidates()
            for own, slow_own in zip(rates, slow_rates, strict=True):
                nodes, is_fixed = random_nodes(rng, rng.choice((0, 1, 3, 9)), rng.random() < 0.5), rng.random() < 0.1
                candidates.merge(*nodes, is_fixed, own)
                slow.merge(*nodes, is_fixed, slow_own)
            slow_requests.append(slow)
        count = rng.randrange(1, 4)
        max_nodes = [rng.randrange(0, 20) for _ in range(count)]
        takes_paying, has_costs = rng.random() < 0.9, rng.random() < 0.9
        num_rows, context_len, price = count + rng.choice((0, 0, 60)), rng.uniform(0, 3000), rng.uniform(0.1, 1.5)
        terms = (num_rows, count, context_len, rng.choice((num_rows + 4, 256)), price)
        got = choose_nodes(requests[:count], max_nodes, takes_paying, costs if has_costs else None, *terms)
        slow_terms = (takes_paying, slow_costs if has_costs else None, *terms)
        assert got == slow_choose(slow_requests[:count], max_nodes, *slow_terms)
        counts.add(len(got[0][0]))
        emitted = [rng.randrange(3) for _ in range(rng.randrange(1, 6))]
        for own, slow_own in zip(rates, slow_rates, strict=True):
            nodes = random_nodes(rng, rng.choice((0, 1, 3, 9)), rng.random() < 0.5)
            own.score(*nodes, emitted)
            slow_own.score(*nodes, emitted)
            assert [own.rate(cell) for cell in range(NUM_CELLS)] == [slow_own.rate(cell) for cell in range(NUM_CELLS)]
        is_plain = rng.random() < 0.3
        step = (
            num_rows + rng.choice((0, 3)),
            count,
            context_len,
            is_plain,
            rng.uniform(0.2, 12.0),
            rng.uniform(0.0, 0.3),
        )
        costs.learn(*step)
        slow_costs.learn(*step)
        expected = [slow_costs.step_s(rows, count, context_len) for rows in range(80)]
        assert costs.steps_s(0, 80, count, context_len) == expected
        assert costs.is_due(num_rows) == slow_costs.is_due(num_rows)
    assert len(counts) > 3


def test_what_is_no_proposal_is_refused_and_changes_nothing() -> None:
    table = AcceptanceTable((0.5, 0.5))
    rates, candidates = RequestRates(table), Candidates()
    candidates.merge([1, 2], [-1, 0], [0, 1], True, rates)
    good = fixed_nodes(candidates)
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
        assert fixed_nodes(candidates) == good
        if error is ValueError:
            with pytest.raises(error, match=message):
                rates.score(*nodes, [1])
    for cell in (-1, 2):
        with pytest.raises(IndexError):
            rates.rate(cell)
        with pytest.raises(IndexError):
            table.record(cell, True)


def fixed_nodes(candidates: Candidates) -> object:
    return choose_nodes([candidates], [8], False, None, 1, 1, 0.0, 64, 0.0)


def num_chosen(candidates: Candidates, max_nodes: int, costs: NativeCosts, price: float, max_rows: int = 64) -> int:
    [choice] = choose_nodes([candidates], [max_nodes], True, costs, 1, 1, 0.0, max_rows, price)
    return len(choice[0])


def test_costs_go_on_as_their_upper_half_does() -> None:
    costs = NativeCosts([float(rows) for rows in range(65)], 0, 0.0, 0.0, 0.0)
    assert costs.step_s(100, 1, 0.0) == 100.0
    with pytest.raises(IndexError, match="no cost of -1 rows"):
        costs.step_s(-1, 1, 0.0)
    with pytest.raises(IndexError, match="no cost of -1 rows"):
        costs.learn(-1, 1, 0.0, False, 1.0, 0.0)
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
        assert num_chosen(candidates, 8, costs, 1.0) == count


def test_as_many_are_chosen_as_there_are_rows_for() -> None:
    rates, candidates = RequestRates(AcceptanceTable((1.0,))), Candidates()
    for first_id in (0, 100):
        candidates.merge(range(first_id, first_id + 60), range(-1, 59), [0] * 60, False, rates)
    costs = StepCosts(CostCurve.flat(1.0))
    for max_nodes in (40, 63, 200):
        assert num_chosen(candidates, max_nodes, costs, 1e-6) == min(max_nodes, 63)


def test_limits_that_are_not_one_per_request_are_refused() -> None:
    with pytest.raises(ValueError, match="one limit per request"):
        choose_nodes([Candidates()], [], True, None, 1, 1, 0.0, 64, 1.0)
