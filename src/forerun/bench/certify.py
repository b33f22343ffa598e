"""The exactness certificate: this model, this drafter, this rule, on this machine.

Two questions, each with a control that must fail, because a check that can't fail proves nothing.

*Equality*: does speculation emit the very tokens, text and log-probabilities of plain decoding? Asked over prompts and
over each sampling parameter; under a rule that keeps the law alone, of greedy requests alone. Control: an answer with
another seed must be told apart.

*Law*: are the first tokens of many seeds distributed as the model says? Exact probabilities come from plain passes
over every beginning of a truncated law; counts come from requests through the whole engine with speculation. Control:
the same counts against the law of another temperature must be refused.
"""

from __future__ import annotations

import itertools
import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from forerun.bench.chi_square import ChiSquare, chi_square
from forerun.bench.prompts import Prompt, pick, spec_bench
from forerun.drafters.spec import OFF, Speculation
from forerun.engine.completion import Completion
from forerun.engine.jobs import Job
from forerun.engine.llm import LLM
from forerun.engine.request import prepare
from forerun.types import SamplingParams, VerifyRule
from forerun.verify import RULES

# False alarms over all law tests of a certificate stay below 1e-4: there are NUM_LAW_TESTS of them.
NUM_LAW_TESTS = 3
ALPHA = 1e-4 / (2 * NUM_LAW_TESTS)

EQUALITY_TOKENS = 64
NUM_PROMPTS = 13
_SEED = 20_240_817
PARAMETERS: Mapping[str, dict[str, Any]] = {
    "greedy": {},
    "greedy, penalties": {"repetition_penalty": 1.2, "frequency_penalty": 0.3},
    "greedy, min_tokens": {"min_tokens": 8},
    "temperature": {"temperature": 0.8},
    "top_k": {"temperature": 1.0, "top_k": 20},
    "top_p": {"temperature": 1.0, "top_p": 0.9},
    "min_p": {"temperature": 1.2, "min_p": 0.05},
    "penalties": {"temperature": 0.9, "repetition_penalty": 1.1, "presence_penalty": 0.5, "frequency_penalty": 0.2},
    "logit_bias": {"temperature": 0.8, "logit_bias": {0: -100.0, 11: 2.0}},
}

LAW_PROMPT = "one two three four. one two three four. one two three"
LAW_DEPTH = 3  # tokens whose joint law is tested
LAW_TOP_K = 6
LAW_TEMPERATURE = 1.5
CONTROL_TEMPERATURE = 1.0
DRAFT_ROOM = 2  # tokens beyond them, so that drafts have room
MIN_LAW_RUNS, MAX_LAW_RUNS = 2000, 40_000


@dataclass(frozen=True, slots=True)
class Check:
    """One line of a certificate.

    Attributes:
        name: what was checked.
        passed: whether it came out as it must; a control must fail the check it is made for.
        detail: what was found.
    """

    name: str
    passed: bool
    detail: str


@dataclass(frozen=True, slots=True)
class Certificate:
    """All lines, and how far the drafter was at work while they were checked.

    Attributes:
        checks: in order.
        num_drafted: nodes verified.
        num_accepted: of these accepted.
        seconds: what it took.
    """

    checks: tuple[Check, ...]
    num_drafted: int
    num_accepted: int
    seconds: float

    @property
    def passed(self) -> bool:
        """Whether every line passed."""
        return all(check.passed for check in self.checks)


@dataclass(slots=True)
class _Work:
    num_drafted: int = 0
    num_accepted: int = 0

    def add(self, completion: Completion) -> Completion:
        self.num_drafted += completion.stats.drafted_tokens
        self.num_accepted += completion.stats.accepted_tokens
        return completion


def certify(
    llm: LLM,
    speculation: Speculation,
    rule: VerifyRule,
    *,
    max_s: float,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Certificate:
    """Checks a model with a drafter and a rule.

    Args:
        llm: the loaded model.
        speculation: who drafts.
        rule: the verification rule.
        max_s: seconds it may take, about; less time means fewer prompts and seeds, never fewer kinds of checks.
        progress: called with (percent done, 100).

    Raises:
        RequestError: the drafter doesn't fit the model, or the rule isn't exact for its drafts.
    """
    began = time.perf_counter()
    llm.speculator(speculation, rule)
    work = _Work()

    def report(share: float) -> None:
        progress(int(100 * share), 100)

    equality = _check_equality(llm, speculation, rule, work, 0.4 * max_s, lambda share: report(0.4 * share))
    law = _check_law(llm, speculation, rule, work, 0.55 * max_s, lambda share: report(0.4 + 0.6 * share))
    at_work = Check(
        "the drafter was at work", work.num_drafted > 0, f"{work.num_accepted} of {work.num_drafted} nodes accepted"
    )
    seconds = time.perf_counter() - began
    return Certificate((*equality, *law, at_work), work.num_drafted, work.num_accepted, seconds)


def _check_equality(
    llm: LLM,
    speculation: Speculation,
    rule: VerifyRule,
    work: _Work,
    max_s: float,
    report: Callable[[float], None],
) -> list[Check]:
    is_path_exact = RULES[rule].is_path_exact
    names = [name for name, fields in PARAMETERS.items() if is_path_exact or "temperature" not in fields]
    prompts = pick(spec_bench(), 1)[:NUM_PROMPTS]
    different: dict[str, list[str]] = {name: [] for name in names}
    counts = dict.fromkeys(names, 0)
    began = time.perf_counter()
    is_told_apart = False
    # Parameters take turns before prompts do, so that little time leaves out prompts and no parameter.
    for index, (prompt, name) in enumerate(itertools.product(prompts, names)):
        if index >= len(names) and time.perf_counter() - began > max_s:
            break
        params = _params(name, seed=_SEED + index if is_path_exact else None)
        plain = _ask(llm, prompt, params, OFF, "coupled")
        other = work.add(_ask(llm, prompt, params, speculation, rule))
        counts[name] += 1
        if _difference(plain, other):
            different[name].append(f"prompt {prompt.name}: {_difference(plain, other)}")
        if not is_told_apart and not params.is_greedy:
            moved = _ask(llm, prompt, replace(params, seed=_SEED - 1), OFF, "coupled")
            is_told_apart = bool(_difference(plain, moved))
        report((index + 1) / (len(prompts) * len(names)))
    checks = [
        Check(f"equal: {name}", not found, found[0] if found else f"{counts[name]} answers equal")
        for name, found in different.items()
    ]
    if is_path_exact:
        detail = "differs, as it must" if is_told_apart else "was not told apart"
        checks.append(Check("control: an answer with another seed", is_told_apart, detail))
    return checks


def _check_law(
    llm: LLM,
    speculation: Speculation,
    rule: VerifyRule,
    work: _Work,
    max_s: float,
    report: Callable[[float], None],
) -> list[Check]:
    prompt = tuple(llm.encode(LAW_PROMPT))
    law = exact_law(llm, prompt, LAW_TEMPERATURE)
    counts = _sample(llm, prompt, speculation, rule, work, max_s, report)
    num_runs = sum(counts.values())
    marginals = {f"token {i + 1}": _marginal(law, counts, i) for i in range(1, LAW_DEPTH)}
    tests = {"all tokens together": _test(law, counts)} | {
        name: _test(*marginal) for name, marginal in marginals.items()
    }
    checks = [Check(f"law: {name}", test.p_value >= ALPHA, _describe(test, num_runs)) for name, test in tests.items()]
    control = _test(exact_law(llm, prompt, CONTROL_TEMPERATURE), counts)
    name = f"control: the law of temperature {CONTROL_TEMPERATURE}"
    return [*checks, Check(name, control.p_value < ALPHA, f"refused, as it must be: {_describe(control, num_runs)}")]


def exact_law(llm: LLM, prompt: Sequence[int], temperature: float) -> dict[tuple[int, ...], float]:
    """The joint law of the first LAW_DEPTH tokens, from one plain pass per beginning."""
    law: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(LAW_DEPTH):
        longer: dict[tuple[int, ...], float] = {}
        for beginning, p in law.items():
            for token_id, q in _next_law(llm, (*prompt, *beginning), temperature).items():
                longer[(*beginning, token_id)] = p * q
        law = longer
    return law


def _next_law(llm: LLM, token_ids: Sequence[int], temperature: float) -> dict[int, float]:
    """The truncated law of the next token, from the log-probabilities that plain decoding reports."""
    params = SamplingParams(max_tokens=1, logprobs=LAW_TOP_K, ignore_eos=True)
    (completion,) = llm.generate(list(token_ids), params)
    assert completion.logprobs is not None
    top = completion.logprobs[0].top[:LAW_TOP_K]
    weights = [math.exp((logprob - top[0][1]) / temperature) for _, logprob in top]
    return {token_id: weight / sum(weights) for (token_id, _), weight in zip(top, weights, strict=True)}


def _sample(
    llm: LLM,
    prompt: tuple[int, ...],
    speculation: Speculation,
    rule: VerifyRule,
    work: _Work,
    max_s: float,
    report: Callable[[float], None],
) -> Counter[tuple[int, ...]]:
    """How often each beginning came, over noise keys 0, 1, ..."""
    params = SamplingParams(
        max_tokens=LAW_DEPTH + DRAFT_ROOM, temperature=LAW_TEMPERATURE, top_k=LAW_TOP_K, ignore_eos=True
    )
    speculator = llm.speculator(speculation, rule)
    counts: Counter[tuple[int, ...]] = Counter()
    began = time.perf_counter()
    for key in range(MAX_LAW_RUNS):
        if key >= MIN_LAW_RUNS and time.perf_counter() - began > max_s:
            break
        *_, (_, last) = llm.engine.run(Job(prepare(prompt, params, rule, llm.limits, noise_key=key), speculator))
        assert last.completion is not None
        counts[work.add(last.completion).token_ids[:LAW_DEPTH]] += 1
        report(max(key / MAX_LAW_RUNS, min(1.0, (time.perf_counter() - began) / max_s)))
    return counts


def _marginal(
    law: Mapping[tuple[int, ...], float], counts: Mapping[tuple[int, ...], int], index: int
) -> tuple[dict[tuple[int, ...], float], dict[tuple[int, ...], int]]:
    """Law and counts of one token alone."""
    small_law: dict[tuple[int, ...], float] = {}
    small_counts: dict[tuple[int, ...], int] = {}
    for path, p in law.items():
        small_law[path[index : index + 1]] = small_law.get(path[index : index + 1], 0.0) + p
    for path, count in counts.items():
        small_counts[path[index : index + 1]] = small_counts.get(path[index : index + 1], 0) + count
    return small_law, small_counts


def _test(law: Mapping[tuple[int, ...], float], counts: Mapping[tuple[int, ...], int]) -> ChiSquare:
    paths = sorted({*law, *counts})
    return chi_square([counts.get(path, 0) for path in paths], [law.get(path, 0.0) for path in paths])


def _describe(test: ChiSquare, num_runs: int) -> str:
    return f"chi-square {test.statistic:.1f} with {test.dof} degrees, p = {test.p_value:.2g}, {num_runs} seeds"


def _params(name: str, seed: int | None) -> SamplingParams:
    return SamplingParams(max_tokens=EQUALITY_TOKENS, logprobs=2, seed=seed, **PARAMETERS[name])


def _ask(llm: LLM, prompt: Prompt, params: SamplingParams, speculation: Speculation, rule: VerifyRule) -> Completion:
    if llm.has_chat_template:
        messages = [{"role": "user", "content": prompt.text}]
        return llm.chat(messages, params, speculation=speculation, verify=rule)
    return llm.generate(prompt.text, params, speculation=speculation, verify=rule)[0]


def _difference(one: Completion, other: Completion) -> str:
    """What differs first, empty when nothing does."""
    if one.token_ids != other.token_ids:
        pairs = zip(one.token_ids, other.token_ids, strict=False)
        at = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one.token_ids), len(other.token_ids)))
        return f"token {at} differs"
    for name in ("text", "finish_reason", "logprobs"):
        if getattr(one, name) != getattr(other, name):
            return f"{name} differs"
    return ""
