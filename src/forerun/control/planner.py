"""Gathers what the drafters of one request propose for a step, and learns from what came of it."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

from forerun.control.acceptance import AcceptanceTable, RequestRates
from forerun.control.candidates import Candidates
from forerun.control.worth import Worth
from forerun.drafters.base import NOTHING, Budget, DraftContext, Drafter, DrafterSource, Proposal
from forerun.errors import EngineFault
from forerun.types import MAX_DRAFT_NODES, Decision, DecisionReason, Draft, ForwardOutput

NO_DRAFT = Draft()
PRICE_SMOOTHING = 1.0 / 32.0
# Drafters that cost time and don't pay are tried now and then; trying takes at most this share of the time.
PROBE_SHARE = 0.005
MIN_PROBE_STEPS = 16
_NO_MINIMA = (0.0,) * MAX_DRAFT_NODES


@dataclass(frozen=True, slots=True)
class Plan:
    """What a step drafts.

    Attributes:
        draft: the chosen nodes.
        decision: why; None where nobody was asked.
        proposals: what each of the request's drafters proposed, chosen or not.
        draft_s: seconds that asking them took.
    """

    draft: Draft
    decision: Decision | None = None
    proposals: tuple[Proposal, ...] = ()
    draft_s: float = 0.0


NO_PLAN = Plan(NO_DRAFT)


@dataclass(frozen=True, slots=True)
class Terms:
    """What the nodes of a step are worth and cost. Set by the controller, the same for all requests of a step.

    Attributes:
        price_tok_per_s: tokens per second that the engine makes otherwise.
        seconds: of the step with 0, 1, ... nodes.
        free_minimum: what the likeliest node must survive with for any draft to pay.
    """

    price_tok_per_s: float
    seconds: Sequence[float]
    free_minimum: float

    @property
    def plain_s(self) -> float:
        """Seconds of the step without drafts."""
        return self.seconds[0]


@dataclass(frozen=True, slots=True)
class Asked:
    """What the drafters of a request said for a step; its `Candidates` hold the nodes.

    Attributes:
        proposals: what each drafter proposed.
        spoken: the drafts of those that proposed something.
        is_probe: whether a drafter was only tried out.
        reason: why nothing was proposed; None where something was.
        draft_s: seconds that asking took.
    """

    proposals: tuple[Proposal, ...]
    spoken: tuple[Draft, ...]
    is_probe: bool
    reason: DecisionReason | None
    draft_s: float


# Of one request: see `control.candidates`.
Choice = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], tuple[int, ...], int, int, float]


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
    """One request's drafters and what is known of them. Which nodes are verified is the `Controller`'s choice.

    Args:
        sources: who drafts, with their acceptance tables.
        context: of the request.

    Attributes:
        candidates: what was proposed for the step that is being planned, merged.
        needs_costs: whether any drafter's nodes are verified only if they pay.
    """

    def __init__(self, sources: Sequence[tuple[DrafterSource, AcceptanceTable]], context: DraftContext) -> None:
        self.candidates = Candidates()
        self._stream = context.stream
        self._lanes: list[_Lane] = []
        self._tokens = self._units = 0.0  # decayed sums over steps
        self._worth = Worth()
        try:
            for source, table in sources:
                drafter = source.open(context)
                if drafter is not None:
                    self._lanes.append(_Lane(source, table, drafter))
        except BaseException:
            self.close()
            raise
        self._reads_rows = any(lane.source.reads_rows for lane in self._lanes)
        self._nobody = (NOTHING,) * len(self._lanes)
        self.needs_costs = any(lane.source.policy == "adaptive" for lane in self._lanes)
        # Drafters that take time are tried rarely anyhow, and fixed ones are asked whatever they cost.
        self._may_rest = all(lane.source.is_free and lane.source.policy == "adaptive" for lane in self._lanes)

    @property
    def has_drafters(self) -> bool:
        """Whether anybody may ever propose something for this request."""
        return bool(self._lanes)

    @property
    def speed(self) -> float:
        """Tokens of this request in the time of a plain step, of late."""
        return self._tokens / self._units if self._units else 1.0

    def ask(self, max_nodes: int, terms: Terms | None) -> Asked:
        """Asks the drafters, for at most max_nodes nodes; 0 asks nobody.

        Args:
            max_nodes: nodes that the step may have.
            terms: what they are worth; None where everything proposed is verified whatever it costs.

        Raises:
            EngineFault: a drafter broke its promises.
        """
        if max_nodes < 1:
            return Asked(self._nobody, (), False, "silent", 0.0)
        if terms is not None and self._may_rest and not self._worth.asks():
            return Asked(self._nobody, (), False, "resting", 0.0)
        began = time.perf_counter()
        candidates = self.candidates
        candidates.clear()
        proposals, spoken = [], []
        is_probe = False
        for lane in self._lanes:
            min_survivals, is_tried = self._min_survivals(lane, max_nodes, terms)
            proposal = lane.propose(len(min_survivals), min_survivals)
            is_probe |= is_tried
            proposals.append(proposal)
            if proposal.cells:
                lane.merge(proposal, self._must_keep(lane, proposal), candidates)
                spoken.append(proposal.draft)
        reason: DecisionReason | None = None if spoken else "silent"
        return Asked(tuple(proposals), tuple(spoken), is_probe, reason, time.perf_counter() - began)

    def silent(self, asked: Asked, plain_s: float | None, price: float | None) -> Plan:
        """The plan of a step for which nothing was proposed."""
        return Plan(
            NO_DRAFT, Decision(asked.reason or "silent", 0, 1.0, plain_s, price), asked.proposals, asked.draft_s
        )

    def settle(self, asked: Asked, choice: Choice, expected_s: float | None, price: float | None) -> Plan:
        """The plan of a step for which nodes were proposed, and these were chosen."""
        token_ids, parents, owners, nodes, num_proposed, num_fixed, expected_tokens = choice
        count, spoken = len(token_ids), asked.spoken
        reason: DecisionReason = "fixed" if count == num_fixed else "probe" if asked.is_probe else "pays"
        decision = Decision(reason if count else "plain", num_proposed, expected_tokens, expected_s, price)
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
        return Plan(draft, decision, asked.proposals, asked.draft_s)

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

    def learn(self, plan: Plan, num_emitted: int, token_s: float, excess_s: float, units: float) -> None:
        """Takes in what a step took.

        Args:
            plan: of the step.
            num_emitted: tokens of this request.
            token_s: seconds in which the engine makes a token by plain decoding.
            excess_s: seconds by which the step was longer for this request's drafts.
            units: how long the step was, in plain steps.
        """
        self._tokens += num_emitted - PRICE_SMOOTHING * self._tokens
        self._units += units - PRICE_SMOOTHING * self._units
        expected_tokens = plan.decision.expected_tokens if plan.decision else 1.0
        self._worth.learn(token_s, token_s + excess_s, num_emitted, expected_tokens)

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

    def _min_survivals(self, lane: _Lane, max_nodes: int, terms: Terms | None) -> tuple[Sequence[float], bool]:
        """What each node must bring to pay for drafting and verifying it, and whether the drafter is only tried out.

        There is none where not even a node that is always right would pay.
        """
        if lane.source.policy == "fixed" or terms is None:
            return _NO_MINIMA[:max_nodes], False
        if lane.source.is_free:
            return (terms.free_minimum,) * max_nodes, False
        if lane.step_s is None:
            return (0.0,), True
        probe_steps = math.ceil(lane.step_s / (PROBE_SHARE * terms.plain_s))
        if lane.num_silent >= max(probe_steps, MIN_PROBE_STEPS):
            return (0.0,), True
        # A draft step takes everybody's time.
        price, seconds = terms.price_tok_per_s, terms.seconds
        if price * (lane.step_s + max(seconds[1] - seconds[0], 0.0)) >= 1.0:
            return (), False
        steps = range(min(max_nodes, len(seconds) - 1))
        return [price * (lane.step_s + max(seconds[n + 1] - seconds[n], 0.0)) for n in steps], False
