"""The controller against simulated requests: known costs, known acceptance, time that only simulated work takes."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import pytest

from forerun.control import planner as planner_module
from forerun.control.acceptance import AcceptanceTable, RequestRates
from forerun.control.controller import Ask, Controller, StepLoad, StepTimes
from forerun.control.cost import CostCurve, StepCosts
from forerun.control.planner import Plan, Planner
from forerun.control.speculator import Speculator
from forerun.drafters.base import NOTHING, Budget, DraftContext, Drafter, DrafterSource, Policy, Proposal
from forerun.errors import EngineFault, ForerunError
from forerun.types import Draft
from tests.helpers.drafting import context
from tests.helpers.engines import QuietDrafter

NUM_IDS = 50
LOAD = StepLoad(num_decoding=1, num_prompt_rows=0, num_seqs=1, context_len=100.0)
OVERHEAD_S = 2e-4


@dataclass
class Simulation:
    """A request whose tokens are random, a drafter that knows them, and a target whose passes take what they take.

    Attributes:
        pass_s: seconds of a pass by its rows.
        acceptance: probability that a node is right given that its parent is, by step and depth (from 0).
        draft_step_s: seconds of one draft step; 0 is a free drafter.
        k: nodes of a proposal at most.
        ask_s: seconds that asking takes, whatever is proposed.
    """

    pass_s: Callable[[int], float]
    acceptance: Callable[[int, int], float]
    draft_step_s: float = 0.0
    k: int = 8
    ask_s: float = 0.0
    policy: Policy = "adaptive"
    seed: int = 1
    now: float = 0.0
    step: int = 0
    tokens: int = 0
    counts: list[int] = field(default_factory=list)
    num_draft_steps: int = 0

    # As a source
    name = "simulated"
    reads_rows = False
    memory_bytes = 0

    @property
    def is_free(self) -> bool:
        return self.draft_step_s == 0.0

    @property
    def priors(self) -> tuple[float, ...]:
        return (0.5,) * 8

    def clear(self) -> None:
        pass

    def open(self, context: DraftContext) -> Drafter:
        return SimulatedDrafter(self)

    def planner(self, curve: CostCurve | None = None) -> Planner:
        """The planner of a request, and a controller for it."""
        curve = curve or CostCurve(tuple(range(1, 65)), tuple(self.pass_s(rows) for rows in range(1, 65)), 0, 0.0, 0.0)
        self.controller = Controller(lambda: StepCosts(curve), 64, 64)
        return opened([self])

    def plan(self, planner: Planner, max_nodes: int) -> Plan:
        """A step of one request.

        Raises:
            EngineFault: what the plan says was wrong with the drafters.
        """
        [plan] = self.controller.plan(LOAD, [Ask(planner, max_nodes)])
        if isinstance(plan, ForerunError):
            raise plan
        return plan

    def run(self, planner: Planner, num_steps: int) -> float:
        """Tokens per second over some steps."""
        rng = random.Random(self.seed)
        began, tokens = self.now, self.tokens
        for _ in range(num_steps):
            self.truth = [rng.randrange(NUM_IDS) for _ in range(self.k + 1)]
            self.rng = rng
            step_began = self.now
            plan = self.plan(planner, self.k)
            draft_s = self.now - step_began
            draft = plan.draft
            num_right = 0
            while num_right < draft.num_nodes and draft.token_ids[num_right] == self.truth[num_right]:
                num_right += 1
            emitted = self.truth[: num_right + 1]
            forward_s = self.pass_s(1 + draft.num_nodes)
            self.now += forward_s + OVERHEAD_S
            planner.advance(plan, emitted)
            plan = replace(plan, draft_s=draft_s)  # by the simulation's clock
            times = StepTimes(forward_s, self.now - step_began)
            self.controller.learn(LOAD, [planner], [plan], [len(emitted)], times)
            self.tokens += len(emitted)
            self.counts.append(draft.num_nodes)
            self.step += 1
        return (self.tokens - tokens) / (self.now - began)


def opened(sources: Sequence[DrafterSource]) -> Planner:
    planner = Speculator(sources).open(context([1]))
    assert planner is not None
    return planner


class SimulatedDrafter(QuietDrafter):
    def __init__(self, simulation: Simulation) -> None:
        self.simulation = simulation

    def propose(self, budget: Budget) -> Proposal:
        sim = self.simulation
        sim.now += sim.ask_s
        guess: list[int] = []
        survival = 1.0
        for depth in range(min(sim.k, budget.max_nodes)):
            survival *= budget.rate(min(depth, 7))
            if not sim.is_free and survival < budget.min_survivals[depth]:
                break
            sim.now += sim.draft_step_s
            sim.num_draft_steps += 1
            right = sim.rng.random() < sim.acceptance(sim.step, depth)
            guess.append(sim.truth[depth] if right else NUM_IDS)
        cells = tuple(min(depth, 7) for depth in range(len(guess)))
        num_steps = 0 if sim.is_free else len(guess)
        return Proposal(Draft.chain(tuple(guess), "simulated"), cells, num_steps, num_steps * sim.draft_step_s)


def cheap_rows(rows: int) -> float:
    """A pass that gets dearer slowly, then faster."""
    return 2.5e-3 * (1.0 + 0.05 * (rows - 1) + 0.1 * max(0, rows - 8))


def dear_rows(rows: int) -> float:
    return 2.5e-3 * (1.0 + 0.8 * (rows - 1))


def best_fixed(pass_s: Callable[[int], float], a: float, draft_step_s: float = 0.0, k: int = 8) -> float:
    """Tokens per second of the best fixed number of nodes."""
    return max(
        sum(a**depth for depth in range(count + 1)) / (pass_s(1 + count) + OVERHEAD_S + count * draft_step_s)
        for count in range(k + 1)
    )


@pytest.mark.parametrize("a", [0.1, 0.3, 0.5, 0.7, 0.9])
@pytest.mark.parametrize("pass_s", [cheap_rows, dear_rows])
def test_free_drafts_within_three_percent_of_the_best_fixed_count(pass_s: Callable[[int], float], a: float) -> None:
    simulation = Simulation(pass_s, lambda step, depth: a)
    planner = simulation.planner()
    simulation.run(planner, 200)
    assert simulation.run(planner, 4000) > 0.97 * best_fixed(pass_s, a)


@pytest.mark.parametrize(("a", "draft_step_s"), [(0.9, 1e-4), (0.8, 3e-4), (0.6, 3e-4), (0.2, 1e-3), (0.5, 2.5e-3)])
def test_drafts_that_cost_time_within_three_percent_of_the_best(a: float, draft_step_s: float) -> None:
    simulation = Simulation(cheap_rows, lambda step, depth: a, draft_step_s)
    planner = simulation.planner()
    simulation.run(planner, 200)
    assert simulation.run(planner, 4000) > 0.97 * best_fixed(cheap_rows, a, draft_step_s)


def test_f060_a_losing_drafter_is_off_within_64_steps_and_probes_cost_half_a_percent() -> None:
    simulation = Simulation(cheap_rows, lambda step, depth: 0.02, 1e-3)
    planner = simulation.planner()
    simulation.run(planner, 64)
    drafted = simulation.num_draft_steps
    rate = simulation.run(planner, 2000)
    assert rate > 0.985 / (cheap_rows(1) + OVERHEAD_S)
    assert 0 < simulation.num_draft_steps - drafted < 2000 // 16 * 8


@pytest.mark.parametrize("draft_step_s", [0.0, 2e-4])
def test_recovers_within_100_steps_of_a_change(draft_step_s: float) -> None:
    simulation = Simulation(cheap_rows, lambda step, depth: 0.03 if step < 1000 else 0.9, draft_step_s)
    planner = simulation.planner()
    simulation.run(planner, 1000)
    assert sum(simulation.counts[-100:]) < 100
    simulation.run(planner, 100)
    assert simulation.run(planner, 500) > 0.95 * best_fixed(cheap_rows, 0.9, draft_step_s)


def test_a_wrong_curve_is_corrected() -> None:
    # Rows were thought to be free, and are not.
    simulation = Simulation(dear_rows, lambda step, depth: 0.4)
    planner = simulation.planner(CostCurve.flat(2.5e-3))
    simulation.run(planner, 300)
    assert simulation.run(planner, 1000) > 0.97 / (dear_rows(1) + OVERHEAD_S)


def test_never_more_than_k_and_fixed_is_exactly_k() -> None:
    for policy in ("adaptive", "fixed"):
        simulation = Simulation(cheap_rows, lambda step, depth: 0.95, k=3, policy=policy)  # type: ignore[arg-type]
        simulation.run(simulation.planner(), 200)
        assert max(simulation.counts) == 3
        assert policy == "adaptive" or set(simulation.counts) == {3}


def test_a_worthless_second_drafter_changes_next_to_nothing() -> None:
    def rate(num_worthless: int) -> float:
        good = Simulation(cheap_rows, lambda step, depth: 0.8)
        bad = Simulation(cheap_rows, lambda step, depth: 0.0, seed=9)
        sources = [good, *[bad] * num_worthless]
        curve = CostCurve(tuple(range(1, 65)), tuple(cheap_rows(rows) for rows in range(1, 65)), 0, 0.0, 0.0)
        good.planner(curve)
        planner = opened(sources)
        bad.rng, bad.truth = random.Random(2), [0] * 9
        return good.run(planner, 3000)

    assert rate(1) > 0.98 * rate(0)


def test_a_text_with_nothing_to_draft_from_costs_two_percent() -> None:
    """Asking takes a tenth of a pass here and never helps."""
    simulation = Simulation(dear_rows, lambda step, depth: 0.05, ask_s=2.5e-4)
    planner = simulation.planner()
    simulation.run(planner, 100)
    plain = 1.0 / (dear_rows(1) + OVERHEAD_S)
    assert simulation.run(planner, 2000) > 0.975 * plain


def test_who_gains_does_not_rest() -> None:
    simulation = Simulation(cheap_rows, lambda step, depth: 0.7, ask_s=2.5e-4)
    planner = simulation.planner()
    simulation.run(planner, 1000)
    assert 0 < simulation.counts[200:].count(0) < 10  # to see what a plain step takes


def test_decisions_say_what_was_expected_and_why() -> None:
    simulation = Simulation(cheap_rows, lambda step, depth: 0.9)
    planner = simulation.planner()
    simulation.run(planner, 300)
    simulation.truth, simulation.rng = [1] * 9, random.Random(0)
    decision = simulation.plan(planner, 8).decision
    assert decision is not None
    assert decision.reason == "pays"
    assert decision.num_proposed == 8
    assert 4.0 < decision.expected_tokens < 9.0
    assert decision.expected_s == pytest.approx(cheap_rows(9) + OVERHEAD_S, rel=0.1)
    assert simulation.plan(planner, 0).decision.reason == "silent"  # type: ignore[union-attr]


def test_free_drafters_are_told_what_can_not_pay() -> None:
    """Of dear rows each must bring what it costs; where the third row is free, two together may pay for the second."""
    told: list[float] = []

    class Listening(QuietDrafter):
        def propose(self, budget: Budget) -> Proposal:
            told.extend(budget.min_survivals)
            return NOTHING

    for pass_s, least in ((dear_rows, 0.8), (lambda rows: 2.5e-3 * (1.0 if rows == 1 else 1.2), 0.2 / 8)):
        told.clear()
        simulation = Simulation(pass_s, lambda step, depth: 0.9)
        simulation.open = lambda context: Listening()  # type: ignore[method-assign]
        plan = simulation.plan(simulation.planner(), 8)
        assert told == pytest.approx([least * 2.5e-3 / (2.5e-3 + OVERHEAD_S)] * 8)
        assert plan.decision is not None
        assert (plan.decision.reason, plan.draft.num_nodes) == ("silent", 0)
        assert plan.decision.expected_s == pytest.approx(2.5e-3 + OVERHEAD_S)


def test_a_drafter_that_breaks_its_promises_is_a_fault() -> None:
    class Liar(QuietDrafter):
        def __init__(self, proposal: Proposal) -> None:
            self.proposal = proposal

        def propose(self, budget: Budget) -> Proposal:
            return self.proposal

    cases = (
        (Proposal(Draft.chain((1, 2, 3), "liar"), (0, 0, 0)), "proposed 3 nodes, more than the 2"),
        (Proposal(Draft.chain((1, 2), "liar"), (0,)), "gave 1 cells for 2 nodes"),
        (Proposal(Draft((1, 1), (-1, -1), ("liar",) * 2, (None,) * 2), (0, 0)), "two siblings"),
    )
    for proposal, message in cases:
        simulation = Simulation(cheap_rows, lambda step, depth: 0.9)
        simulation.open = lambda context, proposal=proposal: Liar(proposal)  # type: ignore[method-assign]
        with pytest.raises(EngineFault, match=message):
            simulation.plan(simulation.planner(), 2)


def test_drafters_are_closed_once_also_when_another_fails_to_open() -> None:
    closed: list[str] = []

    class Closing(QuietDrafter):
        def close(self) -> None:
            closed.append("closed")

    good = Simulation(cheap_rows, lambda step, depth: 0.9)
    good.open = lambda context: Closing()  # type: ignore[method-assign]
    bad = Simulation(cheap_rows, lambda step, depth: 0.9)

    def fail(context: DraftContext) -> Drafter:
        raise EngineFault("no")

    bad.open = fail  # type: ignore[method-assign]
    with pytest.raises(EngineFault):
        Speculator([good, bad]).open(context([1]))
    assert closed == ["closed"]


def test_scores_hold_only_below_what_was_emitted() -> None:
    """A tree's nodes count where their parent was emitted and the next token is known, verified or not."""
    table = AcceptanceTable((0.5,) * 5)
    before = [table.rate(cell) for cell in range(5)]
    rates = RequestRates(table)
    lane = planner_module._Lane.__new__(planner_module._Lane)
    lane.rates = rates
    draft = Draft((1, 2, 5, 3, 4), (-1, -1, 0, 1, 3), ("x",) * 5, (None,) * 5)
    lane.score(Proposal(draft, (0, 1, 2, 3, 4)), [2, 3])
    after = [table.rate(cell) for cell in range(5)]
    signs = [(now > then) - (now < then) for now, then in zip(after, before, strict=True)]
    assert signs == [-1, 1, 0, 1, 0]


def test_request_odds_are_the_requests_own_and_bounded() -> None:
    table = AcceptanceTable((0.5,))
    easy, other = RequestRates(table), RequestRates(table)
    for _ in range(300):
        easy.record(0, True)
    assert easy.rate(0) > table.rate(0)
    assert other.rate(0) == pytest.approx(table.rate(0))
    rate = table.rate(0)
    assert easy.rate(0) <= 4 * rate / (1 - rate + 4 * rate) + 1e-12


def known_drafter(name: str, rate: float, num_nodes: int) -> Planner:
    """The planner of a request with a free drafter whose nodes are right at a rate."""
    simulation = Simulation(cheap_rows, lambda step, depth: rate)
    chain = Draft.chain(tuple(range(num_nodes)), name)

    class Certain(QuietDrafter):
        def propose(self, budget: Budget) -> Proposal:
            return Proposal(chain, (0,) * num_nodes)

    simulation.open = lambda context: Certain()  # type: ignore[method-assign]
    return Planner([(simulation, AcceptanceTable((rate,)))], context([1]))


def counts(curve: Callable[[int], float], rates: Sequence[float], num_plain: int = 0) -> list[int]:
    """Nodes that requests of these acceptance rates get in one step, beside some that don't draft."""
    costs = CostCurve(tuple(range(1, 65)), tuple(curve(rows) for rows in range(1, 65)), 0, 0.0, 0.0)
    controller = Controller(lambda: StepCosts(costs), 64, 256)
    asks = [Ask(known_drafter("known", rate, 4), 8) for rate in rates]
    num_decoding = len(rates) + num_plain
    plans = controller.plan(StepLoad(num_decoding, 0, num_decoding, 0.0), asks)
    return [plan.draft.num_nodes for plan in plans if isinstance(plan, Plan)]


def test_f061_rows_go_to_whom_they_bring_most_and_to_nobody_when_all_are_dear() -> None:
    assert counts(cheap_rows, [0.9]) == [4]
    few = counts(cheap_rows, [0.9, 0.3, 0.9])
    assert few[0] == few[2] > few[1]
    # A row takes as long whoever it is for: the more requests run, the more everybody's time is worth.
    assert counts(dear_rows, [0.8]) == [1]
    assert counts(dear_rows, [0.8] * 16) == [0] * 16
    assert counts(dear_rows, [0.8], num_plain=15) == [0]
    rising = [sum(counts(cheap_rows, [0.6] * num)) / num for num in (1, 4, 16, 40)]
    assert rising == sorted(rising, reverse=True)
    assert rising[0] > rising[-1]


def test_prompts_beside_streams_are_bounded_by_what_steps_take() -> None:
    costs = CostCurve(tuple(range(1, 65)), tuple(4.0 * cheap_rows(rows) for rows in range(1, 65)), 0, 0.0, 0.0)
    controller = Controller(lambda: StepCosts(costs), 200, 256)
    assert controller.prompt_rows(0, 1, 0) == 200
    assert controller.prompt_rows(4, 5, 0) == 32  # until costs are known
    known = controller.measure()
    for num_decoding in (1, 4, 16):
        rows = controller.prompt_rows(num_decoding, num_decoding, 0)
        assert controller.prompt_rows(num_decoding, 32, 0) > rows
        longest_s = 2.5 * known.step_s(num_decoding, num_decoding, 0.0)
        assert known.step_s(num_decoding + rows, num_decoding + 1, 0.0) <= longest_s
        assert known.step_s(num_decoding + rows + 1, num_decoding + 1, 0.0) > longest_s
    assert controller.prompt_rows(255, 255, 0) == 1
