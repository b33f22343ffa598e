"""Chooses what each step of a request drafts, and learns from what came of it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from forerun.control.acceptance import AcceptanceTable, RequestRates
from forerun.control.candidates import Candidates, least_survival
from forerun.control.cost import StepCosts
from forerun.control.worth import Worth
from forerun.drafters.base import NOTHING, Budget, DraftContext, Drafter, DrafterSource, Proposal
from forerun.errors import EngineFault
from forerun.types import MAX_DRAFT_NODES, Decision, DecisionReason, Draft, ForwardOutput, StepTimings

NO_DRAFT = Draft()
PRICE_SMOOTHING = 1.0 / 32.0
# Drafters that cost time and don't pay are tried now and then; trying takes at most this share of the time.
PROBE_SHARE = 0.005
MIN_PROBE_STEPS = 16
_NO_MINIMA = (0.0,) * MAX_DRAFT_NODES
BOUND_STEPS = 16  # steps for which a bound of what may pay holds


@dataclass(frozen=True, slots=True)
class Plan:
    """What a step drafts.

    Attributes:
        draft: the chosen nodes.
        decision: why; None where nobody was asked.
        proposals: what each of the request's drafters proposed, chosen or not.
        context_len: tokens in the cache at the step.
    """

    draft: Draft
    decision: Decision | None
    proposals: tuple[Proposal, ...]
    context_len: int


class _Lane:
    """One drafter of a request, with what is known of it."""

    def __init__(self, source: DrafterSource, table: AcceptanceTable, drafter: Drafter) -> None:
        self.source = source
        self.rates = RequestRates(table)
        self.drafter = drafter
        self.step_s: float | None = None  # of one of its passes; None until it was seen
        self.num_silent = 0  # steps since a drafter that costs time proposed something

    def propose(self, max_nodes: int, min_survivals: Sequence[float]) -> Proposal:
        """Asks the drafter, unless it may propose nothing, and learns what asking costs.

        Raises:
            EngineFault: the drafter broke its promises.
        """
        if not max_nodes:
            self.num_silent += 1
            return NOTHING
        proposal = self.drafter.propose(Budget(max_nodes, min_survivals, self.rates.rate))
        if proposal is NOTHING:
            self.num_silent += 1
            return proposal
        num_nodes = proposal.draft.num_nodes
        if num_nodes > max_nodes:
            raise EngineFault(
                f"drafter {self.source.name} proposed {num_nodes} nodes, more than the {max_nodes} it may"
            )
        if len(proposal.cells) != num_nodes:
            raise EngineFault(f"drafter {self.source.name} gave {len(proposal.cells)} cells for {num_nodes} nodes")
        proposal.draft.check_integrity()
        if proposal.num_steps:
            seconds = proposal.steps_s / proposal.num_steps
            self.step_s = seconds if self.step_s is None else self.step_s + 0.125 * (seconds - self.step_s)
        self.num_silent = 0 if proposal.draft.num_nodes else self.num_silent + 1
        return proposal

    def merge(self, proposal: Proposal, is_fixed: bool, candidates: Candidates) -> None:
        """Adds a proposal to the candidates.

        Raises:
            EngineFault: a node has a cell that there isn't.
        """
        draft = proposal.draft
        try:
            candidates.merge(draft.token_ids, draft.parents, proposal.cells, is_fixed, self.rates)
        except IndexError as error:
            raise EngineFault(f"drafter {self.source.name}: {error}") from error

    def score(self, proposal: Proposal, emitted: Sequence[int]) -> None:
        """Compares a proposal, verified or not, with the tokens that came: what was emitted doesn't depend on it."""
        if proposal.cells:
            draft = proposal.draft
            self.rates.score(draft.token_ids, draft.parents, proposal.cells, emitted)


class Planner:
    """The controller of one request.

    Args:
        sources: who drafts, with their acceptance tables.
        costs: what steps take; None where every drafter is `fixed`, which needs none.
        context: of the request.
    """

    def __init__(
        self, sources: Sequence[tuple[DrafterSource, AcceptanceTable]], costs: StepCosts | None, context: DraftContext
    ) -> None:
        self._stream = context.stream
        self._costs = costs
        self._lanes: list[_Lane] = []
        self._tokens = self._seconds = 0.0  # decayed sums over steps
        self._free_minima = _NO_MINIMA
        self._num_plans = 0
        self._worth = Worth()
        self._candidates = Candidates()
        try:
            for source, table in sources:
                drafter = source.open(context)
                if drafter is not None:
                    self._lanes.append(_Lane(source, table, drafter))
        except BaseException:
            self.close()
            raise
        self._reads_rows = any(lane.source.reads_rows for lane in self._lanes)
        # Drafters that take time are tried rarely anyhow, and fixed ones are asked whatever they cost.
        self._may_rest = all(lane.source.is_free and lane.source.policy == "adaptive" for lane in self._lanes)

    def plan(self, max_nodes: int, context_len: int) -> Plan:
        """Asks the drafters and chooses, at most max_nodes nodes; max_nodes may be 0."""
        if max_nodes < 1:
            nothing = Decision("silent", 0, 1.0, None, None)
            return Plan(NO_DRAFT, nothing, (NOTHING,) * len(self._lanes), context_len)
        costs, price, plain_s = self._costs, None, None
        if costs is not None:
            plain_s = costs.step_s(1, context_len)
            price = max(1.0 / plain_s, self._tokens / self._seconds if self._seconds else 0.0)
            if self._may_rest and not self._worth.asks():
                resting = Decision("resting", 0, 1.0, plain_s, price)
                return Plan(NO_DRAFT, resting, (NOTHING,) * len(self._lanes), context_len)
            if self._num_plans % BOUND_STEPS == 0:
                seconds = costs.steps_s(max_nodes + 1, context_len)
                self._free_minima = (least_survival(seconds, price),) * MAX_DRAFT_NODES
            self._num_plans += 1
        candidates = self._candidates
        candidates.clear()
        proposals, spoken = [], []
        is_probe = False
        for lane in self._lanes:
            min_survivals, is_tried = self._min_survivals(lane, max_nodes, context_len, price)
            proposal = lane.propose(len(min_survivals), min_survivals)
            is_probe |= is_tried
            proposals.append(proposal)
            if proposal.cells:
                lane.merge(proposal, self._must_keep(lane, proposal), candidates)
                spoken.append(proposal.draft)
        if not spoken:
            silent = Decision("silent", 0, 1.0, plain_s, price)
            return Plan(NO_DRAFT, silent, tuple(proposals), context_len)
        takes_paying = costs is not None and not costs.is_plain_due
        token_ids, parents, owners, nodes, num_proposed, num_fixed, expected_tokens = candidates.choose(
            max_nodes, takes_paying, costs, context_len, price or 0.0
        )
        count = len(token_ids)
        reason: DecisionReason = "fixed" if count == num_fixed else "probe" if is_probe else "pays"
        decision = Decision(
            reason=reason if count else "plain",
            num_proposed=num_proposed,
            expected_tokens=expected_tokens,
            expected_s=costs.step_s(1 + count, context_len) if costs is not None else None,
            price_tok_per_s=price,
        )
        if len(spoken) == 1 and spoken[0].num_nodes == count:
            # A ratio rule has to know how nodes were drawn and why they are there. Only their drafter can say so, and
            # only of nodes that weren't merged with others' or chosen among.
            draft = spoken[0]
        elif count:
            origins = tuple([spoken[owner].origins[node] for owner, node in zip(owners, nodes, strict=True)])
            q_rows = tuple([spoken[owner].q_rows[node] for owner, node in zip(owners, nodes, strict=True)])
            draft = Draft(token_ids, parents, origins, q_rows, self._stream)
        else:
            draft = NO_DRAFT
        return Plan(draft, decision, tuple(proposals), context_len)

    @property
    def has_drafters(self) -> bool:
        """Whether anybody may ever propose something for this request."""
        return bool(self._lanes)

    def observe(self, draft: Draft, rows: ForwardOutput) -> None:
        """Shows a target pass to the drafters that read rows."""
        if self._reads_rows:
            for lane in self._lanes:
                if lane.source.reads_rows:
                    lane.drafter.observe(draft, rows)

    def advance(self, plan: Plan, emitted: Sequence[int]) -> None:
        """Takes in the tokens of a step; the prompt's has an empty plan."""
        for lane, proposal in zip(self._lanes, plan.proposals, strict=False):
            lane.score(proposal, emitted)
        for lane in self._lanes:
            lane.drafter.advance(emitted)

    def learn(self, plan: Plan, num_emitted: int, timings: StepTimings) -> None:
        """Takes in what a step took."""
        self._tokens += num_emitted - PRICE_SMOOTHING * self._tokens
        self._seconds += timings.total_s - PRICE_SMOOTHING * self._seconds
        if self._costs is not None:
            overhead_s = timings.total_s - timings.forward_s - timings.draft_s
            plain_s = self._costs.step_s(1, plan.context_len)
            self._costs.learn(1 + plan.draft.num_nodes, plan.context_len, timings.forward_s, overhead_s)
            expected_tokens = plan.decision.expected_tokens if plan.decision else 1.0
            self._worth.learn(plain_s, timings.total_s, num_emitted, expected_tokens)

    def close(self) -> None:
        """The request is over."""
        for lane in self._lanes:
            lane.drafter.close()

    def _must_keep(self, lane: _Lane, proposal: Proposal) -> bool:
        """Whether all of a proposal must be verified.

        Where sampled nodes are judged by a ratio, which of them are verified may not depend on what was drawn.
        """
        if self._stream == "shared" or lane.source.policy == "fixed":
            return lane.source.policy == "fixed"
        return any(q_V is not None for q_V in proposal.draft.q_rows)

    def _min_survivals(
        self, lane: _Lane, max_nodes: int, context_len: int, price: float | None
    ) -> tuple[Sequence[float], bool]:
        """What each node must bring to pay for drafting and verifying it, and whether the drafter is only tried out.

        There is none where not even a node that is always right would pay.
        """
        costs = self._costs
        if lane.source.policy == "fixed":
            return _NO_MINIMA[:max_nodes], False
        if lane.source.is_free or costs is None or price is None:
            return self._free_minima[:max_nodes], False
        if lane.step_s is None:
            return (0.0,), True
        plain_s = costs.step_s(1, context_len)
        probe_steps = math.ceil(lane.step_s / (PROBE_SHARE * plain_s))
        if lane.num_silent >= max(probe_steps, MIN_PROBE_STEPS):
            return (0.0,), True
        if price * (lane.step_s + max(costs.step_s(2, context_len) - plain_s, 0.0)) >= 1.0:
            return (), False
        seconds = costs.steps_s(max_nodes + 1, context_len)
        rows = range(1, max_nodes + 1)
        return [price * (lane.step_s + max(seconds[m + 1] - seconds[m], 0.0)) for m in rows], False
