"""Every rule through the whole engine, on a target of 32 ids: the law of whole outputs, and greedy outputs exactly.

Keys are fixed, so nothing here can flake; the same statistic must reject a drafter that lies about its law.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from forerun.control.speculator import Speculator
from forerun.drafters.base import Budget, Proposal
from forerun.engine.jobs import Job
from forerun.engine.request import prepare
from forerun.errors import EngineFault
from forerun.sampling.history import History
from forerun.sampling.native import NativeSampler
from forerun.types import Draft, SamplingParams, VerifyRule
from forerun.verify import RULES
from tests.helpers.engines import Answer, FakeEngine, Scripted, ScriptedSource, decode_naively, right, wrong_from
from tests.helpers.engines import tree as scripted_tree
from tests.helpers.fake_target import VOCAB_SIZE, prefix_logits
from tests.helpers.model_drafter import ModelDrafter

PROMPT = [4, 7]
RATIO_RULES: list[VerifyRule] = ["token", "block", "rrsw", "traversal"]
CHAIN, TREE = (1, 1), (2, 1)
NUM_RUNS = 3000
PARAMS = SamplingParams(max_tokens=5, temperature=1.2, top_k=3, ignore_eos=True)


class FastEngine(FakeEngine):
    """With the native sampler."""

    def __init__(self) -> None:
        super().__init__(max_model_len=32, sampler=NativeSampler(VOCAB_SIZE))


@pytest.fixture(scope="module")
def engine() -> FakeEngine:
    return FastEngine()


@pytest.fixture(scope="module")
def law() -> dict[tuple[int, ...], float]:
    """The exact law of the first four tokens."""
    sampler = NativeSampler(VOCAB_SIZE)
    history = History(PARAMS, PROMPT)
    law: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(4):
        longer: dict[tuple[int, ...], float] = {}
        for tokens, prob in law.items():
            p = sampler.law(prefix_logits([*PROMPT, *tokens]), PARAMS, history.along())
            assert p.token_ids is not None
            for token_id in p.token_ids.tolist():
                longer[(*tokens, token_id)] = prob * p.prob(token_id)
        law = longer
    return law


def outputs(
    engine: FakeEngine, rule: VerifyRule, make: Callable[[int], Any], num_runs: int
) -> Counter[tuple[int, ...]]:
    """How often each first four tokens came out, over as many noise keys."""
    counts: Counter[tuple[int, ...]] = Counter()
    for key in range(num_runs):
        request = prepare(PROMPT, PARAMS, rule, engine.limits, noise_key=key)
        *_, (_, last) = engine.engine.run(Job(request, engine.speculator(make(key))))
        assert last.completion is not None
        counts[last.completion.token_ids[:4]] += 1
    return counts


def excess(counts: Counter[tuple[int, ...]], law: dict[tuple[int, ...], float]) -> float:
    """By how many standard deviations the chi-square statistic exceeds its mean; rare outcomes count as one."""
    assert set(counts) <= set(law)
    num_runs = counts.total()
    common = [tokens for tokens, prob in law.items() if prob * num_runs >= 5]
    cells = [(counts[tokens], law[tokens] * num_runs) for tokens in common]
    rare = 1.0 - sum(law[tokens] for tokens in common)
    if rare * num_runs >= 1:
        cells.append((num_runs - sum(count for count, _ in cells), rare * num_runs))
    degrees = len(cells) - 1
    statistic = sum((count - expected) ** 2 / expected for count, expected in cells)
    return (statistic - degrees) / np.sqrt(2 * degrees)


DRAFTERS = {
    "token chain": ("token", CHAIN),
    "block chain": ("block", CHAIN),
    "block chain of three": ("block", (1, 1, 1)),
    "rrsw tree": ("rrsw", TREE),
    "traversal chain": ("traversal", CHAIN),
    "traversal tree": ("traversal", TREE),
    "traversal wide": ("traversal", (3,)),
}


@pytest.mark.parametrize("name", DRAFTERS)
def test_f007_outputs_follow_the_law(name: str, engine: FakeEngine, law: dict[tuple[int, ...], float]) -> None:
    rule, branching = DRAFTERS[name]
    counts = outputs(engine, rule, lambda key: ModelDrafter(key, branching), NUM_RUNS)  # type: ignore[arg-type]
    assert excess(counts, law) < 4


@pytest.mark.parametrize("rule", RATIO_RULES)
def test_a_drafter_that_lies_about_its_temperature_is_found(
    rule: VerifyRule, engine: FakeEngine, law: dict[tuple[int, ...], float]
) -> None:
    def make(key: int) -> ModelDrafter:
        return ModelDrafter(key, CHAIN, declared_temperature=0.7)

    assert excess(outputs(engine, rule, make, 1000), law) > 10


@pytest.mark.parametrize("branching", [CHAIN, TREE, (3, 2, 1)])
@pytest.mark.parametrize("stream", ["shared", "draft"])
def test_coupled_gives_the_tokens_of_plain_decoding(stream: Any, branching: tuple[int, ...]) -> None:
    engine = FakeEngine(max_model_len=64)
    num_accepted = Counter[str]()
    for key in range(12):
        params = SamplingParams(max_tokens=30, temperature=1.2, top_k=3, seed=key, ignore_eos=True, logprobs=0)
        completion = engine.run(PROMPT, params, ModelDrafter(key, branching, stream))
        assert Answer.of(completion) == decode_naively(PROMPT, params, key, max_model_len=64)
        num_accepted["accepted"] += completion.stats.accepted_tokens
    assert num_accepted["accepted"] > 30


def test_more_is_accepted_from_shared_noise() -> None:
    engine = FastEngine()
    params = SamplingParams(max_tokens=25, temperature=1.2, top_k=3, ignore_eos=True)

    def accepted(stream: Any) -> int:
        runs = (
            engine.run(PROMPT, params, ModelDrafter(key, CHAIN, stream), noise_key=key).stats.accepted_tokens
            for key in range(60)
        )
        return sum(runs)

    assert accepted("shared") > 1.3 * accepted("draft")


# ---- what every rule has in common --------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", RATIO_RULES)
@pytest.mark.parametrize("name", ["greedy", "penalties", "bias", "min_tokens"])
def test_greedy_output_is_that_of_plain_decoding(rule: VerifyRule, name: str) -> None:
    more: dict[str, Any] = {
        "greedy": {"ignore_eos": True},
        "penalties": {"repetition_penalty": 1.3, "frequency_penalty": 0.4, "ignore_eos": True},
        "bias": {"logit_bias": {5: 4.0, 7: -100.0}},
        "min_tokens": {"logit_bias": {0: 100.0}, "min_tokens": 7},
    }[name]
    engine = FakeEngine(max_model_len=64)
    params = SamplingParams(max_tokens=20, logprobs=2, **more)
    expected = decode_naively(PROMPT, params, 0, max_model_len=64)
    branchings = (CHAIN, (1,) * 4) if rule in ("token", "block") else (CHAIN, TREE, (3, 2))
    for key in range(3):
        for branching in branchings:
            completion = engine.run(PROMPT, params, ModelDrafter(key, branching, top_k=20), rule, noise_key=key)
            assert Answer.of(completion) == expected
            assert completion.seed is None


@pytest.mark.parametrize("rule", RATIO_RULES)
def test_fixed_drafts_are_served_by_coupled_and_said_to_be(rule: VerifyRule) -> None:
    """Any tree is fine then, and with the same key the tokens are those of plain decoding."""
    engine = FakeEngine()
    params = SamplingParams(max_tokens=30, temperature=0.9, ignore_eos=True, logprobs=1)
    expected = decode_naively(PROMPT, params, 77)
    truth = [*expected.token_ids, *[1] * 40]
    for make in (
        Scripted(truth, right(4)),
        Scripted(truth, wrong_from(5, 2)),
        Scripted(truth, scripted_tree(9, 3)),
        "ngram:policy=fixed",
        None,
    ):
        events = engine.events(PROMPT, params, make, rule, noise_key=77)
        completion = events[-1].completion
        assert completion is not None
        assert Answer.of(completion) == expected
        assert completion.seed is None
        assert {event.record.rule for event in events} == {"coupled"}


@pytest.mark.parametrize("rule", RATIO_RULES)
def test_records_name_the_rule_that_served(rule: VerifyRule) -> None:
    engine = FakeEngine(max_model_len=32)
    events = engine.events(PROMPT, PARAMS, ModelDrafter(3, CHAIN), rule, noise_key=3)
    served = [(event.record.draft.traits.has_sampled, event.record.rule) for event in events]
    assert served[0] == (False, "coupled")  # the prompt's own step
    assert set(served) >= {(True, rule)}
    for event in events:
        line = json.loads(json.dumps(event.record.to_json()))
        assert line["rule"] == event.record.rule


@pytest.mark.parametrize("rule", RATIO_RULES)
def test_a_draft_from_shared_noise_is_a_fault_that_harms_nothing(rule: VerifyRule) -> None:
    engine = FakeEngine(max_model_len=32)
    with pytest.raises(EngineFault, match=f"rule {rule} is exact for nodes sampled from draft noise only"):
        engine.run(PROMPT, PARAMS, ModelDrafter(3, CHAIN, "shared"), rule)
    assert engine.run(PROMPT, PARAMS, rule=rule).token_ids


def test_every_rule_is_run_here() -> None:
    assert ["coupled", *RATIO_RULES] == list(RULES)


class Echo(ModelDrafter):
    """Knows what a `ModelDrafter` of the same key draws, and proposes it as its own."""

    def propose(self, budget: Budget) -> Proposal:
        draft = super().propose(budget).draft
        return Proposal(Draft.chain(draft.token_ids, "echo"), (0,) * draft.num_nodes)


@pytest.mark.parametrize("rule", RATIO_RULES)
@pytest.mark.parametrize("other", [Echo(5, CHAIN), ModelDrafter(5, CHAIN, temperature=3.0), ModelDrafter(6, CHAIN)])
def test_a_tree_fed_by_a_sampling_drafter_and_another_is_a_fault(other: ModelDrafter, rule: VerifyRule) -> None:
    """Whose node it is depends on what was drawn, so nobody can say how the tree came about."""
    engine = FakeEngine(max_model_len=32, costs=lambda: pytest.fail("no costs are needed"))
    request = prepare(PROMPT, PARAMS, rule, engine.limits, noise_key=5)
    sources = [ScriptedSource(ModelDrafter(5, CHAIN)), ScriptedSource(other, name="other")]
    with pytest.raises(EngineFault, match=r"rule .* (is exact for|verifies)"):
        list(engine.engine.run(Job(request, Speculator(sources))))


@pytest.mark.parametrize("rule", RATIO_RULES)
def test_sampled_nodes_that_became_fixed_ones_are_served_by_coupled(rule: VerifyRule) -> None:
    engine = FakeEngine(max_model_len=32, costs=lambda: pytest.fail("no costs are needed"))
    request = prepare(PROMPT, PARAMS, rule, engine.limits, noise_key=5)
    sources = [ScriptedSource(Echo(5, CHAIN), name="other"), ScriptedSource(ModelDrafter(5, CHAIN))]
    events = [event for _, event in engine.engine.run(Job(request, Speculator(sources)))]
    assert {event.record.rule for event in events} == {"coupled"}
    assert sum(event.record.draft.num_nodes for event in events) > 0
