"""`RowSampler` on the compiled module: the same bits as `ReferenceSampler`, in microseconds."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

import forerun._native as _native
from forerun.errors import EngineFault
from forerun.sampling import noise
from forerun.sampling.distribution import NO_IDS, Law, Race, check_count, check_mask, check_token_ids, is_cut
from forerun.sampling.history import PathHistory, uses_history
from forerun.sampling.noise import Stream
from forerun.types import Float32Array, Float64Array, Int32Array, SamplingParams, TokenLogprob, UInt32Array

_NO_MASK: UInt32Array = np.empty(0, np.uint32)
_MAX_PREPARED = 1024  # requests whose prepared parameters are remembered


class RowLaw(Law):
    """The law of a row at a temperature, with nothing changed and nothing cut, computed from the row when asked for.

    Written down, its weights take twice the row's memory, and that right after a pass which has left nothing in the
    processor's caches. Few ask for more than a draw and a probability.

    Args:
        native: the compiled part, which holds the row.
        vocab_size: V.
    """

    __slots__ = ("_vocab_size", "_weights_V", "native")
    native: _native.RowLaw
    _vocab_size: int
    _weights_V: Float64Array | None

    def __init__(self, native: _native.RowLaw, vocab_size: int) -> None:
        object.__setattr__(self, "native", native)
        object.__setattr__(self, "_vocab_size", vocab_size)
        object.__setattr__(self, "_weights_V", None)

    @property
    def token_ids(self) -> None:
        """None: nothing was cut."""
        return None

    @property
    def weights(self) -> Float64Array:
        """[V] float64, written at the first call."""
        if self._weights_V is not None:
            return self._weights_V
        weights_V = np.empty(self._vocab_size)
        self.native.weights(weights_V)
        object.__setattr__(self, "_weights_V", weights_V)
        return weights_V

    @property
    def total(self) -> float:
        """The sum of the weights."""
        return self.native.total

    @property
    def only_id(self) -> None:
        """None: nothing was cut."""
        return None

    def weight(self, token_id: int) -> float:
        """The weight of an id.

        Raises:
            IndexError: the id lies outside the vocabulary.
        """
        return self.native.weight(token_id)


@dataclass(frozen=True, slots=True)
class _Prepared:
    """What is known of a request's parameters before there is a row."""

    params: SamplingParams
    native: _native.LawParams
    is_cut: bool
    is_plain: bool  # neither history nor bias changes a row, and nothing is cut


class NativeSampler:
    """`RowSampler` in C++. It owns its scratch; the arrays of a law that it returns are the caller's.

    Args:
        vocab_size: V.
    """

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self._native = _native.Sampler(vocab_size)
        self._ids_V: Int32Array = np.empty(vocab_size, np.int32)
        self._weights_V: Float64Array = np.empty(vocab_size)
        # By identity; the parameters are kept inside, so that an identity isn't used again.
        self._prepared: dict[int, _Prepared] = {}

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
            prepared = self._prepare(params)
            if prepared.is_plain and len(banned_ids) == 0 and allowed is None:
                return RowLaw(self._native.row_law(logits_V, params.temperature), self.vocab_size)
            if allowed is None:
                allowed = _NO_MASK
            else:
                check_mask(allowed, self.vocab_size)
            return self._written_law(logits_V, prepared, history, banned_ids, allowed)
        except ValueError as error:
            raise EngineFault(f"the row of position {history.num_tokens}: {error}") from None

    def _written_law(
        self,
        logits_V: Float32Array,
        prepared: _Prepared,
        history: PathHistory,
        banned_ids: Int32Array,
        allowed: UInt32Array,
    ) -> Law:
        base = history.base
        path_ids = np.array(history.path_ids, np.int32) if base.is_counting and history.path_ids else NO_IDS
        # A law that nothing cuts is written where the caller gets it.
        weights_V = self._weights_V if prepared.is_cut else np.empty(self.vocab_size)
        num_kept, has_ids, total = self._native.law(
            logits_V,
            prepared.native,
            base.ids,
            base.output_counts,
            path_ids,
            banned_ids,
            allowed,
            self._ids_V,
            weights_V,
        )
        if not has_ids:
            return Law(None, weights_V, total)
        if num_kept == 1:
            return Law.point(self._ids_V.item(0))
        return Law(self._ids_V[:num_kept].copy(), weights_V[:num_kept].copy(), total)

    def sample(self, law: Law, key: int, pos: int, stream: Stream = Stream.SHARED, committed_len: int = 0) -> Race:
        """See `RowSampler.sample`."""
        only_id = law.only_id
        if only_id is not None:
            return Race(only_id, None)
        noise.check_address(key, pos, committed_len)
        try:
            if isinstance(law, RowLaw):
                token_id, ratio = law.native.race(key, pos, committed_len, stream)
            elif law.token_ids is None:
                token_id, ratio = _native.sampling_race(law.weights, key, pos, committed_len, stream)
            else:
                token_id, ratio = _native.sampling_race_of(law.token_ids, law.weights, key, pos, committed_len, stream)
        except ValueError as error:
            raise EngineFault(str(error)) from None
        return Race(token_id, ratio * law.total)

    def draw(
        self, law: Law, key: int, pos: int, count: int, stream: Stream = Stream.SHARED, committed_len: int = 0
    ) -> tuple[int, ...]:
        """See `RowSampler.draw`."""
        check_count(count)
        only_id = law.only_id
        if only_id is not None:
            return (only_id,)
        noise.check_address(key, pos, committed_len)
        address = (key, pos, committed_len, stream)
        try:
            if isinstance(law, RowLaw):
                return tuple(law.native.draw(*address, count))
            if law.token_ids is None:
                return tuple(_native.sampling_draw(law.weights, *address, count))
            return tuple(_native.sampling_draw_of(law.token_ids, law.weights, *address, count))
        except ValueError as error:
            raise EngineFault(str(error)) from None

    def score(self, law: Law, key: int, pos: int, token_id: int) -> float | None:
        """See `RowSampler.score`."""
        weight = law.weight(token_id)
        if weight == 0.0 or law.only_id is not None:
            return None
        noise.check_address(key, pos, 0)
        e: float = -_native.sampling_log(_native.sampling_uniform(key, token_id, pos, 0, Stream.SHARED))
        return e / weight * law.total

    def coin(self, key: int, node: int, committed_len: int) -> float:
        """See `RowSampler.coin`."""
        noise.check_address(key, 0, committed_len)
        return _native.sampling_uniform(key, node, 0, committed_len, Stream.COIN)

    def logprobs(self, logits_V: Float32Array, token_id: int, num_top: int) -> TokenLogprob:
        """See `RowSampler.logprobs`."""
        num_top = min(num_top, self.vocab_size)
        ids, values = np.empty(num_top, np.int32), np.empty(num_top)
        try:
            logprob = self._native.logprobs(logits_V, token_id, ids, values)
        except ValueError as error:
            raise EngineFault(f"log-probabilities: {error}") from None
        return TokenLogprob(token_id, logprob, tuple(zip(ids.tolist(), values.tolist(), strict=True)))

    def top_ids(self, logits_V: Float32Array, n: int) -> Int32Array:
        """See `RowSampler.top_ids`."""
        ids = np.empty(min(n, self.vocab_size), np.int32)
        try:
            self._native.top_ids(logits_V, ids)
        except ValueError as error:
            raise EngineFault(f"the largest logits: {error}") from None
        return ids

    def _prepare(self, params: SamplingParams) -> _Prepared:
        known = self._prepared.get(id(params))
        if known is not None:
            return known
        if len(self._prepared) == _MAX_PREPARED:
            self._prepared.clear()
        check_token_ids(params.logit_bias, self.vocab_size)
        native = _native.LawParams(
            temperature=params.temperature,
            is_greedy=params.is_greedy,
            top_k=params.top_k,
            top_p=params.top_p,
            min_p=params.min_p,
            repetition_penalty=params.repetition_penalty,
            presence_penalty=params.presence_penalty,
            frequency_penalty=params.frequency_penalty,
            bias_ids=list(params.logit_bias.keys()),
            biases=[float(bias) for bias in params.logit_bias.values()],
        )
        cuts = is_cut(params, self.vocab_size)
        is_plain = not cuts and not params.logit_bias and not uses_history(params)
        prepared = self._prepared[id(params)] = _Prepared(params, native, cuts, is_plain)
        return prepared
