"""An engine over the fake target, a reference that decodes naively, and drafters that do as they are told."""

from __future__ import annotations

import codecs
import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from forerun.control.cost import CostCurve, StepCosts
from forerun.control.speculator import Speculator
from forerun.drafters.base import Budget, DraftContext, Drafter, DraftTarget, Policy, Proposal
from forerun.drafters.spec import Speculation
from forerun.engine.completion import Completion, StreamEvent
from forerun.engine.engine import Engine
from forerun.engine.jobs import Job
from forerun.engine.request import Limits, prepare
from forerun.kv.pages import PageManager, num_pages_for
from forerun.models.bound import BindSettings
from forerun.models.grammar import Grammar
from forerun.sampling.distribution import NO_IDS, RowSampler
from forerun.sampling.history import History
from forerun.sampling.reference import ReferenceSampler
from forerun.types import Draft, ForwardOutput, SamplingParams, TokenLogprob, VerifyRule
from tests.helpers.fake_target import VOCAB_SIZE, FakeTarget, prefix_logits

EOS = 0
NUM_TEXT_IDS = 30  # the last two rows pad the vocabulary

# Letters and pairs of them, so that stop strings may end inside a token; the two halves of a character.
_LETTERS = [bytes([ord("a") + i]) for i in range(16)]
_BYTES = [b"<eos>", *_LETTERS, *(a + b for a, b in itertools.pairwise(_LETTERS[:12])), b"\xc3", b"\xa9"]


class FakeTokenizer:
    """As much of a tokenizer as the engine needs."""

    vocab_size = NUM_TEXT_IDS
    special_ids = frozenset({EOS})
    eos_ids = (EOS,)

    def token_bytes(self, token_id: int) -> bytes:
        return _BYTES[token_id]


class SteadyCosts(StepCosts):
    """Costs that learn nothing from the machine the test runs on, so that what is drafted doesn't depend on it."""

    def learn(self, *args: object, **keywords: object) -> None:
        pass


def steady_costs() -> StepCosts:
    """Rows are nearly free, so guesses pay."""
    return SteadyCosts(CostCurve((1, 64), (1e-6, 2e-6), 0, 0.0, 0.0))


@dataclass
class ScriptedSource:
    """A drafter of a test's own; what it proposes is verified whole."""

    make: Callable[[DraftContext], Drafter]
    name: str = "scripted"
    policy: Policy = "fixed"
    priors: tuple[float, ...] = (0.5,)
    reads_rows: bool = False
    is_free: bool = True
    memory_bytes: int = 0

    def open(self, context: DraftContext) -> Drafter:
        return self.make(context)

    def clear(self) -> None:
        pass


Drafts = str | Callable[[DraftContext], Drafter] | None


class FakeEngine:
    """Runs requests on a `FakeTarget`; one object for many, so that every request finds a used cache."""

    def __init__(
        self,
        max_model_len: int = 256,
        chunk: int = 64,
        *,
        kv_tokens: int = 0,
        max_running: int = 16,
        sampler: RowSampler | None = None,
        target: type[FakeTarget] = FakeTarget,
        costs: Callable[[], StepCosts] = steady_costs,
    ) -> None:
        self.limits = Limits(VOCAB_SIZE, max_model_len, frozenset({EOS}))
        self.pages = PageManager(num_pages_for(max(max_model_len, kv_tokens)))
        self.target = target(self.pages.num_pages)
        self.sampler, self.tokenizer = sampler or ReferenceSampler(VOCAB_SIZE), FakeTokenizer()
        self.engine = Engine(
            self.target,  # type: ignore[arg-type]
            self.sampler,
            self.tokenizer,  # type: ignore[arg-type]
            self.pages,
            costs,
            chunk,
            max_running,
        )

    def speculator(self, drafts: Drafts) -> Speculator | None:
        """Whoever drafts: a spec, what makes a request's drafter, or nobody."""
        if drafts is None:
            return None
        settings = BindSettings("native", "cpu", "auto", "f16", threads=1, max_rows=64)
        max_len = self.limits.max_model_len
        target = DraftTarget(self.target, self.sampler, self.tokenizer, VOCAB_SIZE, max_len, settings)  # type: ignore[arg-type]
        if isinstance(drafts, str):
            sources = [options.bind(target) for options in Speculation.parse(drafts).drafters]
        else:
            sources = [ScriptedSource(drafts)]
        return Speculator(sources)

    def events(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        drafts: Drafts = None,
        rule: VerifyRule = "coupled",
        noise_key: int | None = None,
        prediction: Sequence[int] = (),
        grammar: Grammar | None = None,
    ) -> list[StreamEvent]:
        request = prepare(prompt, params, rule, self.limits, noise_key, prediction, grammar=grammar)
        events = [event for _, event in self.engine.run(Job(request, self.speculator(drafts)))]
        self.engine.check_integrity()
        assert self.pages.num_free == self.pages.num_pages
        return events

    def run(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        drafts: Drafts = None,
        rule: VerifyRule = "coupled",
        noise_key: int | None = None,
        prediction: Sequence[int] = (),
        grammar: Grammar | None = None,
    ) -> Completion:
        completion = self.events(prompt, params, drafts, rule, noise_key, prediction, grammar)[-1].completion
        assert completion is not None
        return completion


@dataclass(frozen=True)
class Answer:
    """What a request's answer must be, in what can be compared."""

    token_ids: tuple[int, ...]
    text: str
    finish_reason: str
    logprobs: tuple[TokenLogprob, ...] | None

    @staticmethod
    def of(completion: Completion) -> Answer:
        assert len(completion.token_ids) == completion.stats.completion_tokens
        assert completion.logprobs is None or len(completion.logprobs) == len(completion.token_ids)
        return Answer(completion.token_ids, completion.text, completion.finish_reason, completion.logprobs)


def decode_naively(prompt: Sequence[int], params: SamplingParams, seed: int, max_model_len: int = 256) -> Answer:
    """The answer by the definition: one token at a time, no cache, the whole text searched after each token."""
    sampler = ReferenceSampler(VOCAB_SIZE)
    ends = set(params.stop_token_ids) | (set() if params.ignore_eos else {EOS})
    output: list[int] = []
    logprobs = []
    while True:
        logits = prefix_logits([*prompt, *output])
        history = History(params, prompt)
        for token_id in output:
            history.append(token_id)
        banned = np.array(sorted(ends), np.int32) if len(output) < params.min_tokens else NO_IDS
        law = sampler.law(logits, params, history.along(), banned)
        output.append(sampler.sample(law, seed, len(prompt) + len(output)).token_id)
        logprobs.append(sampler.logprobs(logits, output[-1], params.logprobs or 0))
        shown = [t for t in output if t not in ends]
        reason = None
        starts = [start for start in map(_text(shown, is_final=False).find, params.stop) if start >= 0]
        if output[-1] in ends or starts:
            reason = "stop"
        elif len(output) == params.max_tokens or len(prompt) + len(output) == max_model_len:
            reason = "length"
        text = _text(shown, is_final=True)[: min(starts, default=None)]
        if reason:
            return Answer(tuple(output), text, reason, tuple(logprobs) if params.logprobs is not None else None)


def _text(token_ids: Sequence[int], *, is_final: bool) -> str:
    """The text of some tokens; an unfinished character at the end is text only when nothing follows any more."""
    data = b"".join(_BYTES[t] for t in token_ids if t != EOS and t < NUM_TEXT_IDS)
    return codecs.getincrementaldecoder("utf-8")("replace").decode(data, is_final)


Plan = Callable[[list[int], int], Draft]  # (what will follow, max nodes) -> draft


class QuietDrafter:
    """A drafter that keeps nothing; subclasses propose."""

    def advance(self, token_ids: Sequence[int]) -> None:
        pass

    def observe(self, draft: Draft, rows: ForwardOutput) -> None:
        pass

    def close(self) -> None:
        pass


@dataclass
class Scripted(QuietDrafter):
    """Drafts from knowledge of what plain decoding emits.

    Attributes:
        truth: what plain decoding emits, and then anything.
        plan: makes the draft.
    """

    truth: Sequence[int]
    plan: Plan
    num_advanced: int = 0
    asked: list[int] = field(default_factory=list)

    def __call__(self, context: DraftContext) -> Drafter:
        return Scripted(self.truth, self.plan)

    def propose(self, budget: Budget) -> Proposal:
        self.asked.append(budget.max_nodes)
        draft = self.plan(list(self.truth[self.num_advanced :]), budget.max_nodes)
        return Proposal(draft, (0,) * draft.num_nodes)

    def advance(self, token_ids: Sequence[int]) -> None:
        assert list(token_ids) == list(self.truth[self.num_advanced : self.num_advanced + len(token_ids)])
        self.num_advanced += len(token_ids)


def right(k: int) -> Plan:
    """k nodes that plain decoding will emit, whatever it then does with them."""
    return lambda future, max_nodes: Draft.chain(tuple(future[: min(k, max_nodes)]), "right")


def wrong_from(k: int, num_right: int) -> Plan:
    """A chain of k nodes of which the first num_right are right."""

    def plan(future: list[int], max_nodes: int) -> Draft:
        ids = [t if i < num_right else (t + 1) % VOCAB_SIZE for i, t in enumerate(future[: min(k, max_nodes)])]
        return Draft.chain(tuple(ids), "wrong")

    return plan


def tree(k: int, seed: int) -> Plan:
    """A random tree of k nodes with the right path somewhere in it, out of place, as far as chance has it."""
    rng = random.Random(seed)

    def plan(future: list[int], max_nodes: int) -> Draft:
        token_ids: list[int] = []
        parents: list[int] = []
        depth_on_path = {-1: 0}  # nodes whose path is right so far
        for node in range(min(k, max_nodes)):
            parent = rng.choice([*range(-1, node), *depth_on_path])
            siblings = {token_ids[n] for n in range(node) if parents[n] == parent}
            token_id = rng.choice([t for t in range(VOCAB_SIZE) if t not in siblings])
            wanted = future[depth_on_path[parent]] if parent in depth_on_path else None
            if wanted is not None and wanted not in siblings and rng.random() < 0.7:
                token_id = wanted
            if token_id == wanted:
                depth_on_path[node] = depth_on_path[parent] + 1
            token_ids.append(token_id)
            parents.append(parent)
        return Draft(tuple(token_ids), tuple(parents), ("tree",) * len(parents), (None,) * len(parents))

    return plan
