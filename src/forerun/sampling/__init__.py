"""From a row of logits to a law, and from a law and counter-based noise to a token.

`distribution` defines the law, `noise` the randomness and `math64` the arithmetic; `reference` and `native` implement
them.
"""

from __future__ import annotations

from typing import Literal

from forerun.sampling.distribution import RowSampler
from forerun.sampling.reference import ReferenceSampler

SamplerBackend = Literal["native", "numpy"]


def make_sampler(vocab_size: int, backend: SamplerBackend = "native") -> RowSampler:
    """A sampler for one thread; `numpy` needs no compiled module and returns the same bits."""
    if backend == "numpy":
        return ReferenceSampler(vocab_size)
    from forerun.sampling.native import NativeSampler  # only here, so that numpy works without the module

    return NativeSampler(vocab_size)
