"""Frozen data that crosses boundaries. Knows no model, no cache, no numpy backend and no file.

Shape legend: R rows whose logits are wanted, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from numbers import Integral, Real
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from forerun.errors import EngineFault, RequestError

Float32Array = npt.NDArray[np.float32]
Float64Array = npt.NDArray[np.float64]
Int32Array = npt.NDArray[np.int32]
UInt32Array = npt.NDArray[np.uint32]
UInt64Array = npt.NDArray[np.uint64]
BoolArray = npt.NDArray[np.bool_]

FinishReason = Literal["stop", "length"]
VerifyRule = Literal["coupled", "token", "block", "rrsw", "traversal"]
NoiseStream = Literal["shared", "draft"]
Pruning = Literal["any", "prefix_only"]
_STREAMS, _PRUNINGS = get_args(NoiseStream), get_args(Pruning)
NextKind = Literal["plain", "bonus", "correction"]

PAGE_TOKENS = 16  # tokens per KV page; kernels know the same number
MAX_DRAFT_NODES = 64  # one 64-bit ancestor word per node
CHAIN_PARENTS = tuple(range(-1, MAX_DRAFT_NODES))  # of the longest chain
MAX_LOGPROBS = 20  # alternatives per token that a request may ask for
MAX_SEED = 2**64 - 1
MAX_GENERATED_SEED = 2**53 - 1  # JavaScript clients keep it
# Below this, dividing by the temperature can only reproduce the argmax, so it is the argmax.
MIN_TEMPERATURE = 1e-5


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """What one request asks for; the request's law of each token follows from it (`sampling.distribution`).

    Attributes:
        max_tokens: tokens to emit at most; None means until the context limit.
        temperature: 0 is greedy. Values below `MIN_TEMPERATURE` act as 0.
        top_k: keep the k most likely ids, 0 is off.
        top_p: keep the shortest most-likely prefix whose mass reaches top_p, 1 is off.
        min_p: keep ids with p >= min_p * max p, 0 is off.
        repetition_penalty: divides positive and multiplies negative logits of ids seen in prompt or output, 1 is off.
        presence_penalty: subtracted once from ids seen in the output.
        frequency_penalty: subtracted per occurrence in the output.
        logit_bias: added to the raw logits, by token id.
        min_tokens: stop ids are banned until this many tokens are emitted.
        ignore_eos: the model's own end-of-text ids do not end the output.
        stop: strings that end the output; they are cut from the text.
        stop_token_ids: further ids that end the output, like end-of-text ids.
        seed: 0 to 2**64 - 1; None draws one, which the result reports.
        logprobs: alternatives to report per token (0 reports the chosen token alone); None reports nothing.
        prompt_logprobs: the same for the tokens of the prompt.

    Raises:
        RequestError: a value is out of range or of another type; the message names the field and what is right.
    """

    max_tokens: int | None = None
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    min_tokens: int = 0
    ignore_eos: bool = False
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    seed: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None

    def __post_init__(self) -> None:
        for name, low, high in _WHOLE_FIELDS:
            value = getattr(self, name)
            if value is not None or name not in _OPTIONAL_FIELDS:
                object.__setattr__(self, name, _whole_number(name, value, low, high))
        for name, least, most in _NUMBER_FIELDS:
            object.__setattr__(self, name, _number(name, getattr(self, name), least, most))
        if not isinstance(self.logit_bias, Mapping):
            raise RequestError(f"logit_bias is {self.logit_bias!r}, but must map token ids to numbers", "logit_bias")
        # A copy, because what was checked here must still hold when it is used.
        biases = {i: _number(f"logit_bias[{i}]", bias, -1e4, 1e4) for i, bias in self.logit_bias.items()}
        object.__setattr__(self, "logit_bias", biases)
        if not isinstance(self.ignore_eos, bool):
            raise RequestError(f"ignore_eos is {self.ignore_eos!r}, but must be True or False", "ignore_eos")
        # A single string is a sequence of strings to Python: of its characters, which nobody means.
        if isinstance(self.stop, str) or not all(isinstance(text, str) for text in self.stop):
            raise RequestError(f"stop is {self.stop!r}, but must be a tuple of strings", "stop")
        if not all(self.stop):
            raise RequestError("stop strings must not be empty", "stop")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(f"min_tokens is {self.min_tokens}, more than max_tokens {self.max_tokens}", "min_tokens")

    @property
    def is_greedy(self) -> bool:
        """Whether every token is the argmax of its law."""
        return self.temperature < MIN_TEMPERATURE


# Names of fields, and the least and the largest value they may have.
_WHOLE_FIELDS: tuple[tuple[str, int, int | None], ...] = (
    ("max_tokens", 1, None),
    ("top_k", 0, None),
    ("min_tokens", 0, None),
    ("seed", 0, MAX_SEED),
    ("logprobs", 0, MAX_LOGPROBS),
    ("prompt_logprobs", 0, MAX_LOGPROBS),
)
_OPTIONAL_FIELDS = frozenset(("max_tokens", "seed", "logprobs", "prompt_logprobs"))
_NUMBER_FIELDS: tuple[tuple[str, float, float], ...] = (
    ("temperature", 0.0, 1e6),
    ("top_p", 0.0, 1.0),
    ("min_p", 0.0, 1.0),
    ("repetition_penalty", 1e-3, 1e3),
    ("presence_penalty", -100.0, 100.0),
    ("frequency_penalty", -100.0, 100.0),
)


def _whole_number(name: str, value: object, low: int, high: int | None) -> int:
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise _bad_value(name, value, "a whole number")
    _check_range(name, value, low, high)
    return int(value)


def _number(name: str, value: object, low: float, high: float) -> float:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise _bad_value(name, value, "a number")
    _check_range(name, value, low, high)
    return float(value)


def _check_range(name: str, value: Any, low: float, high: float | None) -> None:
    # Written so that NaN fails too.
    if not (value >= low and (high is None or value <= high)):
        raise _bad_value(name, value, f"at least {low}" if high is None else f"between {low} and {high}")


def _bad_value(name: str, value: object, wanted: str) -> RequestError:
    return RequestError(f"{name} is {value!r}, but must be {wanted}", name.split("[")[0])


@dataclass(frozen=True, slots=True)
class DraftTraits:
    """What decides which verification rules are exact for a draft, or for every draft that a drafter makes.

    A draft without sampled nodes suits every rule; the other fields are about drafts that have some.

    Attributes:
        has_sampled: nodes were drawn from a law that they carry.
        is_mixed: fixed nodes stand beside sampled ones in one draft.
        is_tree: a node may have several children.
        stream: the noise stream that sampled nodes were drawn with.
        pruning: see `Draft`.
        with_replacement: see `Draft`.
    """

    has_sampled: bool = False
    is_mixed: bool = False
    is_tree: bool = False
    stream: NoiseStream = "shared"
    pruning: Pruning = "any"
    with_replacement: bool = False


@dataclass(frozen=True, slots=True)
class Draft:
    """Proposed tokens as a tree; a chain is a tree. Set by the drafter, read by everyone after it.

    Siblings stand in the order in which they were drawn. Only the drafter can know the last three fields, and rules
    other than `coupled` are exact only if they are true.

    Attributes:
        token_ids: one target id per node.
        parents: index of each node's parent, -1 for the root (the last committed token). Parents come first.
        origins: the drafter that proposed each node.
        q_rows: per node the law [V] float64 it was drawn from, or None for a fixed (one-hot) proposal. Siblings drawn
            without replacement carry the same array, the law that the first of them was drawn from.
        stream: the noise stream that sampled nodes were drawn with.
        pruning: `prefix_only` if it was decided before a node was drawn that it would be in the draft, from the tokens
            up to its parent and the laws along them. `any` if its own token, a sibling's, a later one or another
            branch had a say: nodes dropped because they came out unlikely, or the best N of many kept.
        with_replacement: siblings were drawn independently of each other, so that they may be equal.
    """

    token_ids: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()
    origins: tuple[str, ...] = ()
    q_rows: tuple[Float64Array | None, ...] = ()
    stream: NoiseStream = "shared"
    pruning: Pruning = "any"
    with_replacement: bool = False

    @staticmethod
    def chain(token_ids: tuple[int, ...], origin: str) -> Draft:
        """A chain of fixed proposals."""
        n = len(token_ids)
        return Draft(token_ids, tuple(range(-1, n - 1)), (origin,) * n, (None,) * n)

    @property
    def num_nodes(self) -> int:
        """Proposed tokens."""
        return len(self.token_ids)

    @property
    def is_chain(self) -> bool:
        """Whether each node's parent is the node before it."""
        return self.parents == CHAIN_PARENTS[: len(self.parents)]

    @property
    def traits(self) -> DraftTraits:
        """What the draft is, as rules look at it."""
        has_sampled = any(q_V is not None for q_V in self.q_rows)
        return DraftTraits(
            has_sampled=has_sampled,
            is_mixed=has_sampled and any(q_V is None for q_V in self.q_rows),
            is_tree=not self.is_chain,
            stream=self.stream,
            pruning=self.pruning,
            with_replacement=self.with_replacement,
        )

    def children(self, node: int) -> tuple[int, ...]:
        """Children of a node in draw order; -1 is the root."""
        return tuple(i for i, parent in enumerate(self.parents) if parent == node)

    def drafted_prob(self, node: int) -> float:
        """The probability of a node's token in the law that its row holds; 1.0 for a fixed node."""
        q_V = self.q_rows[node]
        return 1.0 if q_V is None else q_V.item(self.token_ids[node])

    def check_integrity(self) -> None:
        """Raises EngineFault unless parents precede children, lengths agree, siblings differ and the rest is known."""
        n = self.num_nodes
        if not (len(self.parents) == len(self.origins) == len(self.q_rows) == n):
            raise EngineFault("draft arrays differ in length")
        if n > MAX_DRAFT_NODES:
            raise EngineFault(f"draft has {n} nodes, more than {MAX_DRAFT_NODES}")
        if self.is_chain:
            return
        if any(not -1 <= parent < node for node, parent in enumerate(self.parents)):
            raise EngineFault("a draft node precedes its parent")
        if not self.with_replacement and len(set(zip(self.parents, self.token_ids, strict=True))) != n:
            raise EngineFault("two siblings of a draft propose the same token")
        if self.stream not in _STREAMS or self.pruning not in _PRUNINGS:
            raise EngineFault(f"a draft of stream {self.stream!r} and pruning {self.pruning!r} has no meaning")


@dataclass(frozen=True, slots=True)
class NodeTest:
    """One test of a verdict, for records and the viewer. Set by the verification rule.

    Attributes:
        node: index into the draft.
        accepted: whether the node survived.
        p: the target's probability of the node's token.
        q: its probability in the law that its row holds; 1.0 for a fixed proposal.
        score: the race score E/p of the node's token under `coupled` (None when greedy), else the coin u that decided
            (None for a node that was kept with one below it).
    """

    node: int
    accepted: bool
    p: float
    q: float
    score: float | None


@dataclass(frozen=True, slots=True)
class Verdict:
    """What verification returns. Set by the rule.

    Attributes:
        accepted: node indices of the accepted path, root first.
        next_token_id: the token every step adds after the path.
        next_kind: `plain` without a draft, `bonus` when a leaf was reached, else `correction`.
        next_p: the target's probability of the next token.
        next_score: its race score, None when greedy or when the rule has no race.
        tests: the nodes that were tested, in order.
    """

    accepted: tuple[int, ...]
    next_token_id: int
    next_kind: NextKind
    next_p: float
    next_score: float | None = None
    tests: tuple[NodeTest, ...] = ()


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log-probabilities of one emitted token: log-softmax (float64) of the row's raw logits.

    Attributes:
        token_id: the emitted token.
        logprob: its log-probability.
        top: the most likely (id, logprob) pairs, as many as asked for, ties by lowest id.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class ForwardOutput:
    """What a target pass returns. The arrays are the caller's until the next pass of the same target.

    Attributes:
        logits: [R, V] float32, raw.
        argmax: [R] int32, ties to the lowest id.
    """

    logits: Float32Array
    argmax: Int32Array

    @property
    def argmax_ids(self) -> list[int]:
        """The same as a list."""
        ids: list[int] = self.argmax.tolist()
        return ids

    def part(self, begin: int, end: int) -> ForwardOutput:
        """The rows [begin, end)."""
        return ForwardOutput(self.logits[begin:end], self.argmax[begin:end])


# Why a step drafted what it did: `fixed` nodes were asked for whatever they cost, `pays` and `plain` answer what was
# proposed, `probe` refreshes what is known of a drafter that doesn't pay, `silent` had no proposal, `resting` asked
# nobody.
DecisionReason = Literal["fixed", "pays", "plain", "probe", "silent", "resting"]


@dataclass(frozen=True, slots=True)
class Decision:
    """What the controller expected of a step when it chose the nodes. Set by `control`.

    Attributes:
        reason: why these nodes and no others.
        num_proposed: nodes the drafters proposed, merged; the draft holds those that were kept.
        expected_tokens: tokens the step should emit.
        expected_s: seconds the step should take; None while costs aren't measured.
        price_tok_per_s: tokens per second the engine makes otherwise, which a node must beat; None likewise.
    """

    reason: DecisionReason
    num_proposed: int
    expected_tokens: float
    expected_s: float | None
    price_tok_per_s: float | None


@dataclass(frozen=True, slots=True)
class StepTimings:
    """Where one step's time went, in seconds of a monotonic clock."""

    draft_s: float
    forward_s: float
    verify_s: float
    total_s: float


@dataclass(frozen=True, slots=True)
class StepRecord:
    """What one step did. Set by `engine.step`; metrics, traces and the page read it.

    Attributes:
        step: counts from 0 within a request; step 0 is the prompt's.
        kind: `prefill` for the pass over the prompt's last chunk, `decode` after it.
        committed_len: tokens of prompt and output before the step.
        num_rows: the request's rows of the target pass.
        num_pass_rows: all rows of it, those of other requests included.
        draft: what was proposed.
        rule: the verification rule of the step: the request's, or `coupled` for a draft without sampled nodes.
        verdict: what was accepted and what followed.
        emitted: ids that went to the caller after stop handling.
        timings: measured times; the pass and the whole step are those of all requests together.
        decision: why this was drafted; None where nobody could draft.
    """

    step: int
    kind: Literal["prefill", "decode"]
    committed_len: int
    num_rows: int
    num_pass_rows: int
    draft: Draft
    rule: VerifyRule
    verdict: Verdict
    emitted: tuple[int, ...]
    timings: StepTimings
    decision: Decision | None = None

    def to_json(self) -> dict[str, Any]:
        """A plain dictionary for one line of a trace file."""
        tests = {test.node: test for test in self.verdict.tests}
        nodes = []
        for node, token_id in enumerate(self.draft.token_ids):
            test = tests.get(node)
            nodes.append(
                {
                    "token_id": token_id,
                    "parent": self.draft.parents[node],
                    "origin": self.draft.origins[node],
                    "p": test.p if test else None,
                    "q": test.q if test else self.draft.drafted_prob(node),
                    "accepted": bool(test and test.accepted),
                    "tested": test is not None,
                    "score": test.score if test else None,
                }
            )
        return {
            "step": self.step,
            "kind": self.kind,
            "committed_len": self.committed_len,
            "num_rows": self.num_rows,
            "num_pass_rows": self.num_pass_rows,
            "rule": self.rule,
            "draft": nodes,
            "accepted": list(self.verdict.accepted),
            "next": {
                "token_id": self.verdict.next_token_id,
                "kind": self.verdict.next_kind,
                "p": self.verdict.next_p,
                "score": self.verdict.next_score,
            },
            "emitted": list(self.emitted),
            "decision": None if self.decision is None else asdict(self.decision),
            "timings": {
                "draft_s": self.timings.draft_s,
                "forward_s": self.timings.forward_s,
                "verify_s": self.timings.verify_s,
                "total_s": self.timings.total_s,
            },
        }
