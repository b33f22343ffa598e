"""Requests that run together give what each gives alone, whatever else runs, comes, goes or takes their pages."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from forerun.engine.jobs import Job
from forerun.engine.request import prepare
from forerun.errors import EngineFault
from forerun.types import SamplingParams
from tests.helpers.engines import Answer, Drafts, FakeEngine, Scripted, decode_naively, right, tree, wrong_from
from tests.helpers.fake_target import VOCAB_SIZE
from tests.helpers.load import Served, serve

CHANGES: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 0.9},
    {"temperature": 1.5, "top_k": 5, "min_p": 0.02},
    {"temperature": 0.7, "top_p": 0.8, "repetition_penalty": 1.3},
    {"presence_penalty": 0.7, "frequency_penalty": 0.4},
    {"temperature": 1.0, "logit_bias": {3: 2.0, 5: -4.0}},
    {"stop": ("bc", "na")},
    {"temperature": 1.1, "stop_token_ids": (7,), "min_tokens": 4},
    {"logprobs": 3},
    {"temperature": 0.8, "logprobs": 0},
)
SPECS: tuple[str | None, ...] = (None, "ngram", "suffix", "ngram+suffix", "ngram:policy=fixed", "lookahead", "auto")


class LoadedEngine:
    """A `FakeEngine` that serves many, and its random requests."""

    def __init__(self, seed: int, num_jobs: int, kv_tokens: int, max_running: int, chunk: int) -> None:
        self.rng = random.Random(seed)
        self.fake = FakeEngine(256, chunk, kv_tokens=kv_tokens, max_running=max_running)
        self.prompts, self.params, self.jobs = [], [], []
        speculators = {spec: self.fake.speculator(spec) for spec in SPECS}
        shared = [[self.rng.randrange(1, VOCAB_SIZE) for _ in range(60)] for _ in range(2)]
        for _ in range(num_jobs):
            prompt = [self.rng.randrange(1, VOCAB_SIZE) for _ in range(self.rng.choice((1, 3, 16, 17, 40, 120)))]
            if self.rng.random() < 0.5:
                prompt = self.rng.choice(shared)[: self.rng.choice((16, 33, 60))] + prompt
            changes = self.rng.choice(CHANGES)
            params = SamplingParams(
                max_tokens=max(self.rng.choice((1, 2, 9, 40, 90)), changes.get("min_tokens", 1)),
                seed=self.rng.randrange(2**40),
                ignore_eos=self.rng.random() < 0.5,
                **changes,
            )
            request = prepare(prompt, params, "coupled", self.fake.limits)
            spec = self.rng.choice(SPECS)
            drafts: Drafts = self._scripted(prompt, params) if self.rng.random() < 0.3 else spec
            speculator = speculators[spec] if drafts is spec else self.fake.speculator(drafts)
            self.prompts.append(prompt)
            self.params.append(params)
            self.jobs.append(
                Job(request, speculator, k=self.rng.choice((None, None, 2)), priority=self.rng.choice((0, 0, 1)))
            )

    def _scripted(self, prompt: list[int], params: SamplingParams) -> Scripted:
        """Drafts by somebody who knows what will come."""
        assert params.seed is not None
        truth = [*decode_naively(prompt, params, params.seed).token_ids, *range(1, 20)]
        return Scripted(truth, self.rng.choice((right(3), wrong_from(4, 2), tree(6, self.rng.randrange(1000)))))

    def expected(self, place: int) -> Answer:
        seed = self.params[place].seed
        assert seed is not None
        return decode_naively(self.prompts[place], self.params[place], seed)

    def check(self, served: list[Served]) -> None:
        """Every answer is that of the definition, or the beginning of it where its caller left."""
        for place, one in enumerate(served):
            expected = self.expected(place)
            assert one.error is None
            if one.is_cancelled:
                assert one.token_ids == expected.token_ids[: len(one.token_ids)]
            else:
                assert one.completion is not None
                assert Answer.of(one.completion) == expected
                assert "".join(event.text for event in one.events) == expected.text


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("kv_tokens", "max_running", "chunk"), [(256, 16, 64), (256, 5, 7), (2048, 16, 64), (600, 16, 200)]
)
def test_f023_any_load_gives_each_request_what_it_gives_alone(
    seed: int, kv_tokens: int, max_running: int, chunk: int
) -> None:
    loaded = LoadedEngine(seed, 60, kv_tokens, max_running, chunk)
    served = serve(
        loaded.fake.engine, loaded.jobs, loaded.rng, cancelled=0.05, check=loaded.fake.engine.check_integrity
    )
    loaded.check(served)
    load = loaded.fake.engine.load
    assert (load.num_running, load.num_waiting, load.num_used_pages) == (0, 0, 0)
    if kv_tokens == 256 and max_running == 16:
        assert load.num_preemptions > 1
    assert any(one.is_cancelled for one in served)
    assert max(len(batch.page_tables) for batch in loaded.fake.target.passes) > 3
    assert any(one.completion is not None and one.completion.stats.cached_tokens for one in served)
    assert any(one.completion is not None and one.completion.stats.accepted_tokens for one in served)


def test_f022_f072_everything_cancelled_leaves_nothing() -> None:
    loaded = LoadedEngine(7, 40, 512, 16, 64)
    engine = loaded.fake.engine
    ids = [engine.submit(job) for job in loaded.jobs]
    for _ in range(12):
        engine.step()
    assert engine.load.num_running > 3
    assert engine.load.num_waiting > 3
    for run_id in ids:
        engine.cancel(run_id)
        engine.check_integrity()
    load = engine.load
    assert (load.num_running, load.num_waiting, load.num_used_pages) == (0, 0, 0)
    assert not engine.has_work
    assert engine.step() == []


def test_a_request_that_breaks_its_pass_breaks_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = LoadedEngine(3, 30, 2048, 16, 64)
    fake = loaded.fake
    forward = fake.target.forward
    poison = 6  # whoever has it twice in a row in its rows

    def fail(batch: Any) -> Any:
        ids = batch.token_ids.tolist()
        if any(a == b == poison for a, b in pairwise(ids)):
            raise EngineFault("poisoned")
        return forward(batch)

    monkeypatch.setattr(fake.target, "forward", fail)
    bad = Job(prepare([poison] * 5, SamplingParams(max_tokens=5), "coupled", fake.limits))
    jobs = [job for job, prompt in zip(loaded.jobs, loaded.prompts, strict=True) if poison not in prompt]
    answers = [loaded.expected(place) for place, prompt in enumerate(loaded.prompts) if poison not in prompt]
    clean = [place for place, answer in enumerate(answers) if poison not in answer.token_ids]
    assert len(clean) > 3
    mixed = [jobs[place] for place in clean]
    plain = [replace(job, speculator=None) for job in mixed]  # a draft may hold anything
    served = serve(fake.engine, [bad, *plain, bad], loaded.rng, arrival=0.9, check=fake.engine.check_integrity)
    for place, one in zip(clean, served[1:-1], strict=True):
        assert one.completion is not None
        assert Answer.of(one.completion) == answers[place]
    for one in (served[0], served[-1]):
        assert isinstance(one.error, EngineFault)
    assert fake.engine.load.num_used_pages == 0


@pytest.mark.parametrize("rule", ["token", "block", "rrsw", "traversal"])
def test_ratio_rules_run_beside_others(rule: Any) -> None:
    """What they give depends on their steps; greedy, it is the same whatever runs beside them."""
    loaded = LoadedEngine(11, 20, 300, 16, 64)
    fake = loaded.fake
    params = SamplingParams(max_tokens=30, ignore_eos=True)
    mine = [
        Job(prepare([5, 6, 7, n], params, rule, fake.limits, noise_key=n), fake.speculator("ngram")) for n in range(4)
    ]
    served = serve(fake.engine, [*mine, *loaded.jobs], loaded.rng, arrival=0.9, check=fake.engine.check_integrity)
    for n, one in enumerate(served[:4]):
        assert one.completion is not None
        assert Answer.of(one.completion) == decode_naively([5, 6, 7, n], params, 0)


def test_prompt_log_probabilities_are_those_of_the_definition_cached_or_not() -> None:
    from tests.helpers.fake_target import prefix_logits

    fake = FakeEngine(256, 16)
    prompt = [3 + n % 20 for n in range(75)]
    params = SamplingParams(max_tokens=4, prompt_logprobs=2, ignore_eos=True)
    plain = replace(params, prompt_logprobs=None)
    for job_params in (plain, params, params):
        completion = fake.run(prompt, job_params)
    assert completion.stats.cached_tokens == 0
    assert completion.prompt_logprobs is not None
    assert completion.prompt_logprobs[0] is None
    for place in range(1, len(prompt)):
        expected = fake.sampler.logprobs(prefix_logits(prompt[:place]), prompt[place], 2)
        assert completion.prompt_logprobs[place] == expected
    assert completion.token_ids == fake.run(prompt, plain).token_ids
    assert fake.run(prompt, plain).stats.cached_tokens == 64


@pytest.mark.parametrize("num_steps", [1, 3, 7, 20])
def test_prompt_log_probabilities_survive_preemption(num_steps: int) -> None:
    """In the middle of the prompt, where half of them are read, and after it."""
    fake = FakeEngine(256, 16, max_running=1)
    prompt = [3 + n % 20 for n in range(100)]
    params = SamplingParams(max_tokens=60, prompt_logprobs=1, ignore_eos=True)
    alone = FakeEngine(256, 16).run(prompt, params)
    mine = fake.engine.submit(Job(prepare(prompt, params, "coupled", fake.limits), priority=1))
    events = [event for _ in range(num_steps) for _, event in fake.engine.step()]
    urgent = Job(prepare([1, 2], SamplingParams(max_tokens=3), "coupled", fake.limits))
    fake.engine.submit(urgent)
    while fake.engine.has_work:
        events += [event for run_id, event in fake.engine.step() if run_id == mine]
    completion = events[-1].completion  # type: ignore[union-attr]
    assert completion is not None
    assert completion.stats.num_preemptions == 1
    assert completion.prompt_logprobs == alone.prompt_logprobs
    assert completion.token_ids == alone.token_ids


def test_salts_share_nothing() -> None:
    fake = FakeEngine()
    prompt = [3 + n % 20 for n in range(50)]
    params = SamplingParams(max_tokens=3, ignore_eos=True)

    def cached(salt: str) -> int:
        job = Job(prepare(prompt, params, "coupled", fake.limits, salt=salt))
        *_, (_, last) = fake.engine.run(job)
        assert last.completion is not None
        return last.completion.stats.cached_tokens

    assert [cached(salt) for salt in ("", "a", "a", "b", "", "b")] == [0, 0, 48, 0, 48, 48]
