"""`RowSampler` on the compiled module: the same bits as `ReferenceSampler`, in microseconds."""

from __future__ import annotations

import numpy as np

import forerun._native as _native
from forerun.errors import EngineFault
from forerun.sampling import noise
from forerun.sampling.distribution import NO_IDS, Law, Race, check_count, check_token_ids, is_cut
from forerun.sampling.history import PathHistory
from forerun.sampling.noise import Stream
from forerun.types import Float32Array, Float64Array, Int32Array, SamplingParams, TokenLogprob

_MAX_PREPARED = 1024  # requests whose prepared parameters are remembered


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
        # By identity; the parameters are kept beside, so that an identity isn't used again.
        self._prepared: dict[int, tuple[SamplingParams, _native.LawParams]] = {}

    def law(
        self, logits_V: Float32Array, params: SamplingParams, history: PathHistory, banned_ids: Int32Array = NO_IDS
    ) -> Law:
        """See `RowSampler.law`."""
        base = history.base
        path_ids = np.array(history.path_ids, np.int32) if base.is_counting and history.path_ids else NO_IDS
        # A law that nothing cuts is written where the caller gets it.
        weights_V = self._weights_V if is_cut(params, self.vocab_size) else np.empty(self.vocab_size)
        try:
            num_kept, has_ids, total = self._native.law(
                logits_V, self._prepare(params), base.ids, base.output_counts, path_ids, banned_ids,
                self._ids_V, weights_V,
            )  # fmt: skip
        except ValueError as error:
            raise EngineFault(f"the row of position {history.num_tokens}: {error}") from None
        if not has_ids:
            return Law(None, weights_V, total)
        return Law(self._ids_V[:num_kept].copy(), weights_V[:num_kept].copy(), total)

    def sample(self, law: Law, key: int, pos: int, stream: Stream = Stream.SHARED, committed_len: int = 0) -> Race:
        """See `RowSampler.sample`."""
        only_id = law.only_id
        if only_id is not None:
            return Race(only_id, None)
        noise.check_address(key, pos, committed_len)
        try:
            if law.token_ids is None:
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

    def _prepare(self, params: SamplingParams) -> _native.LawParams:
        known = self._prepared.get(id(params))
        if known is not None:
            return known[1]
        if len(self._prepared) == _MAX_PREPARED:
            self._prepared.clear()
        check_token_ids(params.logit_bias, self.vocab_size)
        prepared = _native.LawParams(
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
        self._prepared[id(params)] = (params, prepared)
        return prepared
