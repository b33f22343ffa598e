"""Chooses what each step drafts, over all requests that run, and learns from what steps take."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from forerun.control.candidates import choose_nodes, least_survival
from forerun.control.cost import StepCosts
from forerun.control.planner import Asked, Plan, Planner, Terms
from forerun.errors import ForerunError, RequestError, as_fault

BOUND_STEPS = 16  # steps for which the terms of a load hold
MAX_NODES_PRICED = 64
MAX_STRETCH = 2.5  # how much longer than a step of plain decoding one with rows of prompts may be
MIN_STEP_S = 0.013  # and how long at least: few rows at a time make prompts slow, and nobody sees the difference
MIN_PROMPT_ROWS = 8
PROMPT_ROWS = 32  # where nobody knows what steps take


@dataclass(frozen=True, slots=True)
class StepLoad:
    """A step without drafts.

    Attributes:
        num_decoding: sequences whose next token is decoded, a row each.
        num_prompt_rows: rows of prompts.
        num_seqs: sequences with rows, those of prompts included.
        context_len: tokens that a row sees, on the average.
        num_present: requests that are there, waiting ones too, as far as they could run together.
    """

    num_decoding: int
    num_prompt_rows: int
    num_seqs: int
    context_len: float
    num_present: int = 0

    @property
    def num_rows(self) -> int:
        """Rows of the step."""
        return self.num_decoding + self.num_prompt_rows


@dataclass(frozen=True, slots=True)
class Ask:
    """A request that may draft in a step.

    Attributes:
        planner: its drafters.
        max_nodes: nodes at most, 0 for none.
    """

    planner: Planner
    max_nodes: int


@dataclass(frozen=True, slots=True)
class StepTimes:
    """What a step took, in seconds; the drafts apart, whose times the plans have.

    Attributes:
        forward_s: its pass.
        total_s: all of it, drafting included.
    """

    forward_s: float
    total_s: float


class Controller:
    """The decisions of one engine.

    Args:
        costs: gives what steps take; called when it is needed first, because measuring takes time.
        chunk: prompt rows of a pass at most.
        max_rows: rows of a pass at most.
    """

    def __init__(self, costs: Callable[[], StepCosts], chunk: int, max_rows: int) -> None:
        self._find_costs = costs
        self._chunk = chunk
        self._costs: StepCosts | None = None
        self._max_rows = max_rows
        self._num_plans = 0
        self._known_seconds: dict[tuple[int, int], tuple[int, Sequence[float]]] = {}

    def measure(self) -> StepCosts:
        """What steps take; measured now, unless it is known."""
        if self._costs is None:
            self._costs = self._find_costs()
        return self._costs

    def prompt_rows(self, num_decoding: int, num_present: int, context_len: int) -> int:
        """Rows of prompts that a step may have beside the last tokens of so many requests.

        Whoever decodes waits for the whole step. It may become `MAX_STRETCH` times as long as it would be if all that
        are present were decoding, which is what they wait for, or `MIN_STEP_S`.

        Args:
            num_decoding: requests whose next token is decoded.
            num_present: these, and those that would.
            context_len: tokens that the rows of the prompts see.
        """
        most = min(self._chunk, self._max_rows - num_decoding)
        if num_decoding == 0:
            return most
        if self._costs is None:
            return min(most, PROMPT_ROWS)
        costs = self._costs
        num_present = max(num_present, num_decoding)
        longest_s = max(MAX_STRETCH * costs.step_s(num_present, num_present, costs.context_len), MIN_STEP_S)
        low, high = min(most, MIN_PROMPT_ROWS), most
        while low < high:
            middle = (low + high + 1) // 2
            num_rows = num_decoding + middle
            mean_len = (num_decoding * costs.context_len + middle * context_len) / num_rows
            if costs.step_s(num_rows, num_decoding + 1, mean_len) <= longest_s:
                low = middle
            else:
                high = middle - 1
        return low

    def plan(self, load: StepLoad, asks: Sequence[Ask]) -> list[Plan | ForerunError]:
        """Asks the requests' drafters and chooses among all that they propose.

        Returns:
            For each request its plan, or what was wrong with its drafters.
        """
        most = max(self._max_rows - load.num_rows, 0)
        if sum([ask.max_nodes for ask in asks]) > most:
            # Whoever insists on its nodes takes no more than its part of the rows.
            asks = [Ask(ask.planner, min(ask.max_nodes, most // len(asks))) for ask in asks]
        terms = self._terms(load, asks) if any(ask.planner.needs_costs for ask in asks) else None
        all_asked = [_asked(ask, terms) for ask in asks]
        spoken = [i for i, asked in enumerate(all_asked) if isinstance(asked, Asked) and asked.spoken]
        price = terms.price_tok_per_s if terms else None
        plans: list[Plan | ForerunError] = [
            ask.planner.silent(asked, terms.plain_s if terms else None, price) if isinstance(asked, Asked) else asked
            for ask, asked in zip(asks, all_asked, strict=True)
        ]
        if not spoken:
            return plans
        costs = self._costs if terms else None
        takes_paying = costs is not None and not (load.num_prompt_rows == 0 and costs.is_due(load.num_rows))
        choices = choose_nodes(
            [asks[i].planner.candidates for i in spoken],
            [asks[i].max_nodes for i in spoken],
            takes_paying,
            costs,
            load.num_rows,
            load.num_seqs,
            load.context_len,
            self._max_rows,
            price or 0.0,
        )
        expected_s = None
        if costs is not None:
            num_nodes = sum(len(choice[0]) for choice in choices)
            expected_s = costs.step_s(load.num_rows + num_nodes, load.num_seqs, load.context_len)
        for i, choice in zip(spoken, choices, strict=True):
            asked = all_asked[i]
            assert isinstance(asked, Asked)
            plans[i] = asks[i].planner.settle(asked, choice, expected_s, price)
        return plans

    def learn(
        self,
        load: StepLoad,
        planners: Sequence[Planner],
        plans: Sequence[Plan],
        counts: Sequence[int],
        times: StepTimes,
    ) -> None:
        """Takes in what a step took.

        Args:
            load: the step without its drafts.
            planners: of the requests that were planned for.
            plans: of each.
            counts: tokens that each emitted.
            times: what the step took.
        """
        costs = self._costs
        if costs is None or not load.num_decoding:
            return
        plain_s = costs.step_s(load.num_rows, load.num_seqs, load.context_len)
        draft_s = sum([plan.draft_s for plan in plans])
        num_nodes = sum([plan.draft.num_nodes for plan in plans])
        is_plain = num_nodes == 0 and load.num_prompt_rows == 0
        overhead_s = times.total_s - times.forward_s - draft_s
        costs.learn(load.num_rows + num_nodes, load.num_seqs, load.context_len, is_plain, times.forward_s, overhead_s)
        token_s = self._decode_s(costs, load) / load.num_decoding
        longer_s = times.total_s - draft_s - plain_s
        for planner, plan, count in zip(planners, plans, counts, strict=True):
            share = plan.draft.num_nodes / num_nodes if num_nodes else 1.0 / load.num_decoding
            planner.learn(plan, count, token_s, plan.draft_s + longer_s * share, times.total_s / plain_s)

    def _terms(self, load: StepLoad, asks: Sequence[Ask]) -> Terms | None:
        try:
            costs = self.measure()
        except RequestError:
            return None  # no pages are free to measure with: until there are, nothing is known to pay
        seconds = self._seconds(costs, load)
        # What everybody makes together, of late or by plain decoding, whichever is more; and no less than all that are
        # present would, since those who aren't decoding yet wait for the time that others take.
        tokens = sum([ask.planner.speed for ask in asks]) + load.num_decoding - len(asks)
        num_present = max(load.num_present, load.num_decoding)
        price = max(
            max(tokens, float(load.num_decoding)) / self._decode_s(costs, load),
            num_present / costs.step_s(num_present, num_present, load.context_len),
        )
        most_nodes = max([ask.max_nodes for ask in asks])
        return Terms(price, seconds, least_survival(seconds[: most_nodes + 1], price))

    def _seconds(self, costs: StepCosts, load: StepLoad) -> Sequence[float]:
        """Of the step with 0, 1, ... nodes."""
        self._num_plans += 1
        key = (load.num_rows, load.num_seqs)
        known = self._known_seconds.get(key)
        if known is not None and self._num_plans < known[0] + BOUND_STEPS:
            return known[1]
        seconds = costs.steps_s(load.num_rows, MAX_NODES_PRICED, load.num_seqs, load.context_len)
        if len(self._known_seconds) > MAX_NODES_PRICED:
            self._known_seconds.clear()
        self._known_seconds[key] = (self._num_plans, seconds)
        return seconds

    @staticmethod
    def _decode_s(costs: StepCosts, load: StepLoad) -> float:
        """Of the step without drafts and prompts."""
        return costs.step_s(load.num_decoding, load.num_decoding, load.context_len)


def _asked(ask: Ask, terms: Terms | None) -> Asked | ForerunError:
    try:
        return ask.planner.ask(ask.max_nodes, terms)
    except Exception as error:
        return as_fault(error, "a drafter failed")
