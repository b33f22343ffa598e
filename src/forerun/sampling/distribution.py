"""The law of a token: one definition for plain decoding, every verified row and the bonus row.

From a row's raw float32 logits, in this order, in float64:

1. `logit_bias` is added.
2. Ids seen in prompt, output or path: x / r if x > 0 else x * r, with r the repetition penalty; then, for ids seen in
   output or path, minus the presence penalty, minus the frequency penalty times the number of occurrences.
3. Banned ids, and those that a mask of allowed ids leaves out, become -inf.
4. Greedy: all mass on the largest x, ties to the lowest id, and nothing below applies. Else
   w = exp((x - max x) (1 / T)).
5. top-k keeps the k largest x, ties to the lowest ids (off at 0 and from the vocabulary's size on).
6. top-p orders by w descending, id ascending, adds in that order and keeps the shortest prefix whose sum reaches
   top_p times the sum of what top-k left, at least one id (off at 1).
7. min-p keeps w >= min_p times the largest w, which is 1 (off at 0).
8. p = w / (sum of what is left).

Sums 6 and 8 run in 16 lanes over the kept ids in ascending order (`math64.lane_sum`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from forerun.errors import EngineFault
from forerun.sampling.history import PathHistory, uses_history
from forerun.sampling.noise import Stream
from forerun.types import (
    MAX_DRAFT_NODES,
    Float32Array,
    Float64Array,
    Int32Array,
    SamplingParams,
    TokenLogprob,
    UInt32Array,
)

NO_IDS: Int32Array = np.empty(0, np.int32)
MASK_BITS = 32  # ids per word of a mask of allowed ids


@dataclass(frozen=True, slots=True, eq=False)
class Law:
    """A law over token ids: p(id) = weight / total.

    A law that a sampler made may read its row whenever it is asked, so it must be done with before the row changes:
    the rows of a pass last until the next pass of the same model. Who needs it longer keeps `weights` or `dense`,
    which are the caller's from then on.

    Attributes:
        token_ids: [N] int32 ascending, or None when weights are indexed by token id (nothing was cut).
        weights: [N] float64, not negative, not necessarily normalised.
        total: the sum of the weights, positive.
    """

    token_ids: Int32Array | None
    weights: Float64Array
    total: float

    @staticmethod
    def point(token_id: int) -> Law:
        """All mass on one id."""
        return _Point(token_id)

    @property
    def only_id(self) -> int | None:
        """The id of a law that keeps a single one, else None. Drawing from such a law takes no noise."""
        if self.token_ids is None or len(self.token_ids) != 1:
            return None
        return self.token_ids.item(0)

    def index(self, token_id: int) -> int | None:
        """Where the weight of an id is, None when it isn't kept."""
        if self.token_ids is None:
            return token_id
        at = int(self.token_ids.searchsorted(token_id))
        return at if at < len(self.token_ids) and self.token_ids[at] == token_id else None

    def weight(self, token_id: int) -> float:
        """The weight of an id, 0 when it isn't kept."""
        at = self.index(token_id)
        return 0.0 if at is None else self.weights.item(at)

    def prob(self, token_id: int) -> float:
        """p(id)."""
        return self.weight(token_id) / self.total

    def dense(self, vocab_size: int) -> Float64Array:
        """p as a new array [V] float64."""
        if self.token_ids is None:
            return self.weights / self.total
        p_V = np.zeros(vocab_size, self.weights.dtype)
        p_V[self.token_ids] = self.weights / self.total
        return p_V


class _Point(Law):
    """All mass on one id, with arrays for those alone who ask for them.

    Greedy decoding makes one per row, right after a pass that has left neither data nor code in the processor's
    caches; what numpy would do for each then takes far longer than its arithmetic.
    """

    __slots__ = ("_only_id",)
    _only_id: int

    def __init__(self, token_id: int) -> None:
        object.__setattr__(self, "_only_id", token_id)

    @property
    def token_ids(self) -> Int32Array:
        return np.array((self._only_id,), np.int32)

    @property
    def weights(self) -> Float64Array:
        return np.ones(1)

    @property
    def total(self) -> float:
        return 1.0

    @property
    def only_id(self) -> int:
        return self._only_id

    def weight(self, token_id: int) -> float:
        return 1.0 if token_id == self._only_id else 0.0

    def prob(self, token_id: int) -> float:
        return self.weight(token_id)


@dataclass(frozen=True, slots=True)
class Race:
    """The outcome of a draw: argmin over the law of E(id) / p(id), with E the address's exponential noise.

    Attributes:
        token_id: the winner, ties to the lowest id.
        score: E / p of the winner, computed as (E / weight) * total; None when the law keeps a single id.
    """

    token_id: int
    score: float | None


class RowSampler(Protocol):
    """What a row of logits is turned into. `ReferenceSampler` and `NativeSampler` agree in every bit.

    One thread at a time. `key` is the request's seed, 0 to 2^64 - 1; `pos` is the index that the drawn token takes in
    the request's whole token sequence.
    """

    vocab_size: int

    def law(
        self,
        logits_V: Float32Array,
        params: SamplingParams,
        history: PathHistory,
        banned_ids: Int32Array = NO_IDS,
        allowed: UInt32Array | None = None,
    ) -> Law:
        """The law of the next token, as long as the row keeps its contents; see `Law`.

        Args:
            logits_V: [V] float32, raw.
            params: the request's parameters.
            history: what precedes the token on its own path.
            banned_ids: [N] int32, ids that must not follow.
            allowed: [ceil(V / 32)] uint32, a bit per id that is set where the id may follow: bit i % 32 of word
                i // 32. Bits beyond the vocabulary mean nothing. None allows all ids.

        Raises:
            EngineFault: the row holds NaN or +inf, nothing is allowed, an id lies outside the vocabulary, or the mask
                has another number of words.
        """

    def sample(self, law: Law, key: int, pos: int, stream: Stream = Stream.SHARED, committed_len: int = 0) -> Race:
        """Draws from the law with the noise at (stream, pos, committed_len).

        Raises:
            EngineFault: no weight is positive, or the address is out of range.
        """

    def draw(
        self, law: Law, key: int, pos: int, count: int, stream: Stream = Stream.SHARED, committed_len: int = 0
    ) -> tuple[int, ...]:
        """The ids of the `count` least E / p in ascending order, ties by lowest id.

        That is a draw without replacement in the order of drawing, and its first id is that of `sample`. Ids whose p is
        0 are never drawn, so there may be fewer.

        Raises:
            EngineFault: as for `sample`, or count isn't from 1 to `MAX_DRAFT_NODES`.
        """

    def score(self, law: Law, key: int, pos: int, token_id: int) -> float | None:
        """The score that `sample` compared for one id; None where p is 0 or the law keeps a single id."""

    def coin(self, key: int, node: int, committed_len: int) -> float:
        """The uniform of a draft node's acceptance test, in (0, 1)."""

    def logprobs(self, logits_V: Float32Array, token_id: int, num_top: int) -> TokenLogprob:
        """Log-softmax of the raw row, float64: x - max x - log(sum of exp(x - max x) in 16 lanes).

        Ids whose logit is -inf have -inf; a caller that writes JSON must replace it.

        Raises:
            EngineFault: the row holds NaN or +inf, nothing but -inf, or the id lies outside the vocabulary.
        """

    def top_ids(self, logits_V: Float32Array, n: int) -> Int32Array:
        """The ids of the n largest logits, largest first, ties by lowest id; NaN counts as -inf.

        It orders whatever it gets and so refuses no row. The native one takes the time of reading it, for small n.

        Args:
            logits_V: [V] float32, raw.
            n: how many.

        Returns:
            [min(n, V)] int32, a new array.

        Raises:
            EngineFault: the row is not as long as the vocabulary.
        """


def argmax_suffices(params: SamplingParams) -> bool:
    """Whether `Law.point(argmax of the raw row)` is the law, as long as no id is banned."""
    return params.is_greedy and not params.logit_bias and not uses_history(params)


def is_cut(params: SamplingParams, vocab_size: int) -> bool:
    """Whether the law keeps a list of ids: it is greedy, or one of the steps 5 to 7 is on."""
    return params.is_greedy or 0 < params.top_k < vocab_size or params.top_p < 1.0 or params.min_p > 0.0


def check_count(count: int) -> None:
    """Raises EngineFault unless that many ids can be drawn at once."""
    if not 1 <= count <= MAX_DRAFT_NODES:
        raise EngineFault(f"{count} ids can't be drawn at once, only 1 to {MAX_DRAFT_NODES}")


def num_mask_words(vocab_size: int) -> int:
    """Words of a mask of allowed ids."""
    return -(-vocab_size // MASK_BITS)


def check_mask(allowed: UInt32Array, vocab_size: int) -> None:
    """Raises ValueError for a mask of another length than the vocabulary takes."""
    if len(allowed) != num_mask_words(vocab_size):
        raise ValueError(
            f"the mask of allowed ids has {len(allowed)} words, but the vocabulary takes {num_mask_words(vocab_size)}"
        )


def is_allowed(allowed: UInt32Array, token_id: int) -> bool:
    """The bit of an id."""
    return bool(allowed.item(token_id // MASK_BITS) >> token_id % MASK_BITS & 1)


def count_allowed(allowed: UInt32Array) -> int:
    """How many bits are set, those beyond the vocabulary included."""
    return int.from_bytes(allowed.tobytes(), "little").bit_count()


def check_token_ids(token_ids: Iterable[int], vocab_size: int) -> None:
    """Raises ValueError when an id lies outside the vocabulary."""
    for token_id in token_ids:
        if not 0 <= token_id < vocab_size:
            raise ValueError(f"token id {token_id} lies outside the vocabulary of {vocab_size}")
