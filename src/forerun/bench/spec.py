"""Speculation against plain decoding on the same prompts: who is faster, where, and by how much.

Arms take turns prompt by prompt, so that whatever the machine does falls on all alike. Before each repeat everything
that requests share is forgotten. Rates are decode tokens over decode seconds, from sums; the prompt's time is apart.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from forerun.bench.prompts import Prompt
from forerun.bench.resample import Interval, interval
from forerun.drafters.spec import OFF, Speculation
from forerun.engine.completion import Completion
from forerun.engine.llm import LLM, OnStep
from forerun.types import Float64Array, SamplingParams, StepRecord

PLAIN, AUTO = "plain", "auto"
ALL = "all"
MAX_DEPTH = 16


@dataclass(slots=True)
class Tally:
    """Sums over answers.

    Attributes:
        tokens: decoded tokens, each answer's first apart: that is the prompt's.
        decode_s, prefill_s: seconds.
        passes: target passes of decoding.
        rows: rows of these passes.
        trials, successes: by depth from 1, how often a node there was tested and accepted; index 0 is unused.
    """

    tokens: int = 0
    decode_s: float = 0.0
    prefill_s: float = 0.0
    prompt_tokens: int = 0
    passes: int = 0
    rows: int = 0
    trials: list[int] = field(default_factory=lambda: [0] * (MAX_DEPTH + 1))
    successes: list[int] = field(default_factory=lambda: [0] * (MAX_DEPTH + 1))

    def add_step(self, record: StepRecord) -> None:
        """Counts one step."""
        if record.kind == "prefill":
            return
        self.rows += record.num_rows
        num_accepted = len(record.verdict.accepted)
        num_tested = num_accepted + (record.verdict.next_kind == "correction")
        for depth in range(1, min(num_tested, MAX_DEPTH) + 1):
            self.trials[depth] += 1
            self.successes[depth] += depth <= num_accepted

    def add_answer(self, completion: Completion) -> None:
        """Counts one answer."""
        stats = completion.stats
        self.tokens += stats.completion_tokens - 1
        self.decode_s += stats.decode_s
        self.prefill_s += stats.prefill_s
        self.prompt_tokens += stats.prompt_tokens
        self.passes += stats.target_passes

    def add(self, other: Tally) -> None:
        """Counts what another one counted."""
        for name in ("tokens", "decode_s", "prefill_s", "prompt_tokens", "passes", "rows"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.trials = [a + b for a, b in zip(self.trials, other.trials, strict=True)]
        self.successes = [a + b for a, b in zip(self.successes, other.successes, strict=True)]

    @property
    def tok_per_s(self) -> float:
        """Decode tokens per decode second."""
        return self.tokens / self.decode_s if self.decode_s else 0.0

    @property
    def tokens_per_pass(self) -> float:
        """tau: tokens per target pass."""
        return self.tokens / self.passes if self.passes else 0.0

    @property
    def rows_per_token(self) -> float:
        """Verified rows per token; 1 is plain decoding."""
        return self.rows / self.tokens if self.tokens else 0.0

    def acceptance(self) -> list[float | None]:
        """By depth from 1: the share of tested nodes that were accepted, None where fewer than 10 were tested."""
        pairs = zip(self.trials[1:], self.successes[1:], strict=True)
        rates = [wins / trials if trials >= 10 else None for trials, wins in pairs]
        while rates and rates[-1] is None:
            rates.pop()
        return rates


@dataclass(slots=True)
class Comparison:
    """What was measured.

    Attributes:
        prompts: those that were answered.
        tallies: by arm, one for each prompt, summed over the repeats.
        warm: the same of one more round in which shared state was kept; empty when not asked for.
        different: (arm, prompt name) of answers that were not plain decoding's though the rule promises it.
        num_repeats: rounds.
        seconds: what all of it took.
    """

    prompts: list[Prompt]
    tallies: dict[str, list[Tally]]
    warm: dict[str, list[Tally]] = field(default_factory=dict)
    different: list[tuple[str, str]] = field(default_factory=list)
    num_repeats: int = 0
    seconds: float = 0.0

    def keep_first(self, num_prompts: int) -> None:
        """Forgets all prompts but the first so many."""
        del self.prompts[num_prompts:]
        for tallies in self.tallies.values():
            del tallies[num_prompts:]

    @property
    def categories(self) -> list[str]:
        """In the order in which they come."""
        return list(dict.fromkeys(prompt.category for prompt in self.prompts))

    def tally(self, arm: str, category: str = ALL, tallies: Mapping[str, list[Tally]] | None = None) -> Tally:
        """The sum over a category's prompts."""
        total = Tally()
        for prompt, tally in zip(self.prompts, (tallies or self.tallies)[arm], strict=True):
            if category in (ALL, prompt.category):
                total.add(tally)
        return total

    def speedup(self, arm: str, category: str = ALL) -> Interval:
        """Decode rate of an arm over plain decoding's, with its interval by resampling prompts."""
        chosen = [i for i, prompt in enumerate(self.prompts) if category in (ALL, prompt.category)]
        plain, other = (
            np.array([(self.tallies[name][i].tokens, self.tallies[name][i].decode_s) for i in chosen])
            for name in (PLAIN, arm)
        )

        def ratio(indices: npt.NDArray[np.int64]) -> Float64Array:
            plain_sums, other_sums = plain[indices].sum(axis=-2), other[indices].sum(axis=-2)
            with np.errstate(divide="ignore", invalid="ignore"):
                rates = (other_sums[..., 0] / other_sums[..., 1]) / (plain_sums[..., 0] / plain_sums[..., 1])
            # Answers of a single token have nothing to decode.
            return np.where(np.isfinite(rates), rates, 1.0)

        return interval(len(chosen), ratio)


def compare_arms(
    llm: LLM,
    arms: Mapping[str, Speculation],
    prompts: Sequence[Prompt],
    params: SamplingParams,
    *,
    num_repeats: int,
    max_s: float | None,
    is_warm: bool = False,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Comparison:
    """Answers every prompt by every arm.

    Args:
        llm: the loaded model.
        arms: by name; PLAIN is added.
        prompts: in order; where time is short, the last ones are left out.
        params: of every answer; the model's own end of text is honoured.
        num_repeats: rounds, at least 1.
        max_s: seconds that all rounds may take, about; None has no limit.
        is_warm: runs one more round that keeps what requests share.
        progress: called with answers done and in all.

    Raises:
        RequestError: a prompt can't be served.
    """
    arms = {PLAIN: OFF, **arms}
    began = time.perf_counter()
    num_rounds = num_repeats + is_warm
    comparison = Comparison(list(prompts), {arm: [Tally() for _ in prompts] for arm in arms})
    _warm_up(llm, arms, prompts[0])
    done = 0
    for index in range(num_rounds):
        if index < num_repeats:
            _clear(llm, arms)
            tallies = comparison.tallies
        else:
            tallies = comparison.warm = {arm: [Tally() for _ in comparison.prompts] for arm in arms}
        for number, prompt in enumerate(list(comparison.prompts)):
            for arm, tally in _answers(llm, arms, prompt, params, number + index, comparison):
                tallies[arm][number].add(tally)
                done += 1
                progress(done, len(comparison.prompts) * len(arms) * num_rounds)
            is_late = max_s is not None and (time.perf_counter() - began) * num_rounds > max_s
            if index == 0 and is_late and number + 1 >= len(comparison.categories):
                comparison.keep_first(number + 1)
                break
    comparison.num_repeats = num_repeats
    comparison.seconds = time.perf_counter() - began
    return comparison


def _warm_up(llm: LLM, arms: Mapping[str, Speculation], prompt: Prompt) -> None:
    """Lets each arm load and measure what it needs, so that no answer pays for it."""
    for speculation in arms.values():
        _ask(llm, prompt, SamplingParams(max_tokens=4), speculation, lambda record: None)


def _clear(llm: LLM, arms: Mapping[str, Speculation]) -> None:
    for speculation in arms.values():
        speculator = llm.speculator(speculation)
        if speculator is not None:
            speculator.clear()


def _answers(
    llm: LLM,
    arms: Mapping[str, Speculation],
    prompt: Prompt,
    params: SamplingParams,
    turn: int,
    comparison: Comparison,
) -> Iterator[tuple[str, Tally]]:
    """The prompt's answer by each arm; who goes first changes from turn to turn."""
    names = list(arms)
    start = turn % len(names)
    token_ids = {}
    for arm in names[start:] + names[:start]:
        tally = Tally()
        completion = _ask(llm, prompt, params, arms[arm], tally.add_step)
        tally.add_answer(completion)
        token_ids[arm] = completion.token_ids
        yield arm, tally
    comparison.different += [(arm, prompt.name) for arm, ids in token_ids.items() if ids != token_ids[PLAIN]]


def _ask(llm: LLM, prompt: Prompt, params: SamplingParams, speculation: Speculation, on_step: OnStep) -> Completion:
    """One answer, through the chat template where the model has one."""
    llm.engine.pages.forget()  # or only the first arm would compute the prompt
    ask = [{"role": "user", "content": prompt.text}] if llm.has_chat_template else prompt.text
    *_, last = llm.stream(ask, params, speculation=speculation, on_step=on_step)
    assert last.completion is not None
    return last.completion
