"""The slow and obvious sampler, in numpy. Every bit of the native one is tested against it."""

from __future__ import annotations

import numpy as np

from forerun.errors import EngineFault
from forerun.sampling import math64, noise
from forerun.sampling.distribution import NO_IDS, Law, Race, check_count, check_mask, check_token_ids, is_cut
from forerun.sampling.history import PathHistory
from forerun.sampling.noise import Stream
from forerun.types import BoolArray, Float32Array, Float64Array, Int32Array, SamplingParams, TokenLogprob, UInt32Array


class ReferenceSampler:
    """`RowSampler` in numpy.

    Args:
        vocab_size: V.
    """

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size

    def law(
        self,
        logits_V: Float32Array,
        params: SamplingParams,
        history: PathHistory,
        banned_ids: Int32Array = NO_IDS,
        allowed: UInt32Array | None = None,
    ) -> Law:
        """See `RowSampler.law`."""
        try:
            x_V = processed_logits(logits_V, self.vocab_size, params, history, banned_ids, allowed)
        except ValueError as error:
            raise EngineFault(f"the row of position {history.num_tokens}: {error}") from None
        if params.is_greedy:
            return Law.point(int(x_V.argmax()))
        w_V = math64.exp((x_V - x_V.max()) * (1.0 / params.temperature))
        kept_ids: Int32Array = np.arange(self.vocab_size, dtype=np.int32)
        if 0 < params.top_k < self.vocab_size:
            kept_ids = np.sort(_order(x_V)[: params.top_k])
        if params.top_p < 1.0:
            kept_ids = _top_p(w_V, kept_ids, params.top_p)
        if params.min_p > 0.0:
            kept_ids = kept_ids[w_V[kept_ids] >= params.min_p]
        weights = w_V[kept_ids]
        total = math64.lane_sum(weights)
        return Law(kept_ids if is_cut(params, self.vocab_size) else None, weights, total)

    def sample(self, law: Law, key: int, pos: int, stream: Stream = Stream.SHARED, committed_len: int = 0) -> Race:
        """See `RowSampler.sample`."""
        if law.only_id is not None:
            return Race(law.only_id, None)
        token_ids, ratios = _ratios(law, key, pos, stream, committed_len)
        winner = int(ratios.argmin())  # the first of equals is the lowest id
        return Race(int(token_ids[winner]), ratios.item(winner) * law.total)

    def draw(
        self, law: Law, key: int, pos: int, count: int, stream: Stream = Stream.SHARED, committed_len: int = 0
    ) -> tuple[int, ...]:
        """See `RowSampler.draw`."""
        check_count(count)
        if law.only_id is not None:
            return (law.only_id,)
        token_ids, ratios = _ratios(law, key, pos, stream, committed_len)
        return tuple(token_ids[np.lexsort((token_ids, ratios))[:count]].tolist())

    def score(self, law: Law, key: int, pos: int, token_id: int) -> float | None:
        """See `RowSampler.score`."""
        weight = law.weight(token_id)
        if weight == 0.0 or law.only_id is not None:
            return None
        e = noise.exponentials(key, np.array((token_id,), np.uint64), pos, 0, Stream.SHARED).item(0)
        return e / weight * law.total

    def coin(self, key: int, node: int, committed_len: int) -> float:
        """See `RowSampler.coin`."""
        return noise.uniforms(key, np.array((node,), np.uint64), 0, committed_len, Stream.COIN).item(0)

    def logprobs(self, logits_V: Float32Array, token_id: int, num_top: int) -> TokenLogprob:
        """See `RowSampler.logprobs`."""
        try:
            x_V = _widened(logits_V, self.vocab_size)
            check_token_ids([token_id], self.vocab_size)
            max_x = _max_of(x_V)
        except ValueError as error:
            raise EngineFault(f"log-probabilities: {error}") from None
        log_total = math64.log(np.array((math64.lane_sum(math64.exp(x_V - max_x)),))).item(0)
        values_V = (x_V - max_x) - log_total
        top = tuple((int(i), values_V.item(i)) for i in _order(x_V)[:num_top])
        return TokenLogprob(token_id, values_V.item(token_id), top)

    def top_ids(self, logits_V: Float32Array, n: int) -> Int32Array:
        """See `RowSampler.top_ids`."""
        if len(logits_V) != self.vocab_size:
            raise EngineFault(
                f"the largest logits: logits has {len(logits_V)} entries, but the vocabulary has {self.vocab_size}"
            )
        x_V = logits_V.astype(np.float64)
        x_V[np.isnan(x_V)] = -np.inf
        return _order(x_V)[:n]


def _ratios(law: Law, key: int, pos: int, stream: Stream, committed_len: int) -> tuple[Int32Array, Float64Array]:
    """The ids of positive weight, ascending, and E / weight of each."""
    token_ids = np.arange(len(law.weights), dtype=np.int32) if law.token_ids is None else law.token_ids
    token_ids = token_ids[law.weights > 0.0]
    if len(token_ids) == 0:
        raise EngineFault("the law has no positive weight")
    e = noise.exponentials(key, token_ids.astype(np.uint64), pos, committed_len, stream)
    with np.errstate(over="ignore"):  # a weight near 2^-1022 scores +inf
        return token_ids, e / law.weights[law.weights > 0.0]


def processed_logits(
    logits_V: Float32Array,
    vocab_size: int,
    params: SamplingParams,
    history: PathHistory,
    banned_ids: Int32Array,
    allowed: UInt32Array | None = None,
) -> Float64Array:
    """Steps 1 to 3 of `sampling.distribution`: [V] float64 with at least one finite entry.

    Raises:
        ValueError: see `RowSampler.law`.
    """
    counts = history.output_counts()
    check_token_ids(list(params.logit_bias), vocab_size)
    check_token_ids(list(counts), vocab_size)
    check_token_ids(banned_ids.tolist(), vocab_size)
    unmasked_V = None if allowed is None else _unpacked(allowed, vocab_size)
    x_V = _widened(logits_V, vocab_size)
    for token_id, bias in params.logit_bias.items():
        x_V[token_id] += bias
    for token_id, count in counts.items():
        x = x_V.item(token_id)
        if params.repetition_penalty != 1.0:
            x = x / params.repetition_penalty if x > 0.0 else x * params.repetition_penalty
        if count > 0:
            x = (x - params.presence_penalty) - params.frequency_penalty * count
        x_V[token_id] = x
    x_V[banned_ids] = -np.inf
    if unmasked_V is not None:
        x_V[~unmasked_V] = -np.inf
    _max_of(x_V)
    return x_V


def _unpacked(allowed: UInt32Array, vocab_size: int) -> BoolArray:
    """A mask of allowed ids as [V] bool."""
    check_mask(allowed, vocab_size)
    words = allowed.astype("<u4").view(np.uint8)
    unmasked_V: BoolArray = np.unpackbits(words, bitorder="little")[:vocab_size].astype(np.bool_)
    if not unmasked_V.any():
        raise ValueError("the mask of allowed ids allows no token")
    return unmasked_V


def _widened(logits_V: Float32Array, vocab_size: int) -> Float64Array:
    if len(logits_V) != vocab_size:
        raise ValueError(f"logits has {len(logits_V)} entries, but the vocabulary has {vocab_size}")
    x_V = logits_V.astype(np.float64)
    bad = np.flatnonzero(~(x_V < np.inf))
    if len(bad):
        raise ValueError(f"the logits hold {'NaN' if np.isnan(x_V[bad[0]]) else '+inf'} at token id {bad[0]}")
    return x_V


def _max_of(x_V: Float64Array) -> float:
    max_x: float = x_V.max().item()
    if max_x == -np.inf:
        raise ValueError("no token is allowed")
    return max_x


def _order(values: Float64Array) -> Int32Array:
    """Indices by value descending, ties by index ascending."""
    return np.lexsort((np.arange(len(values)), -values)).astype(np.int32)


def _top_p(w_V: Float64Array, token_ids: Int32Array, top_p: float) -> Int32Array:
    kept = w_V[token_ids]
    order = _order(kept)
    reached = np.cumsum(kept[order]) >= top_p * math64.lane_sum(kept)
    num_kept = int(reached.argmax()) + 1 if reached.any() else len(order)
    return np.sort(token_ids[order[:num_kept]])
