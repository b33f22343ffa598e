"""Counter-based noise: every draw of a request is a function of its seed and of where the draw is used.

The generator is Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011).
Key: the low and the high half of the 64-bit seed. Counter: (index, position, committed_len, stream), 32 bits each.
A uniform is u = (n + 1/2) 2^-52 with n the top 52 bits of (word 1 : word 0), so 0 < u < 1 strictly.

| stream   | index      | position          | committed_len         | read by |
|----------|------------|-------------------|-----------------------|---------|
| SHARED   | token id   | the token's index | 0                     | plain sampling, `coupled`, its drafters |
| DRAFT    | token id   | node index        | length before a step  | drafters for the ratio rules |
| COIN     | node index | 0                 | length before a step  | acceptance tests of the ratio rules |
| RESIDUAL | token id   | the token's index | length before a step  | draws of the ratio rules from what is left |

Only SHARED is keyed by position alone: a ratio rule whose noise came back in a later step would be biased, while
committed_len grows with every step. DRAFT is keyed by the (first) node that a draw is for, not by its position: a rule
that tests leaves first would be biased if two branches were drawn with the same noise.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np

from forerun.errors import EngineFault
from forerun.sampling import math64
from forerun.types import Float64Array, UInt64Array

_LOW = np.uint64(0xFFFFFFFF)
_SHIFT = np.uint64(32)
_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (0x9E3779B9, 0xBB67AE85)
_NUM_ROUNDS = 10


class Stream(IntEnum):
    """Which use of the noise a draw belongs to."""

    SHARED = 0
    DRAFT = 1
    COIN = 2
    RESIDUAL = 3


def philox4x32(counter: UInt64Array, key: int) -> UInt64Array:
    """Philox4x32-10 of each counter.

    Args:
        counter: [N, 4] uint64, each entry below 2^32.
        key: 64 bits; its low half is key word 0.

    Returns:
        [N, 4] uint64, four 32-bit words per counter.
    """
    c0, c1, c2, c3 = counter.T
    k0, k1 = key & 0xFFFFFFFF, key >> 32
    for _ in range(_NUM_ROUNDS):
        p0, p1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (p1 >> _SHIFT) ^ c1 ^ np.uint64(k0), p1 & _LOW, (p0 >> _SHIFT) ^ c3 ^ np.uint64(k1), p0 & _LOW
        k0, k1 = (k0 + _WEYL[0]) & 0xFFFFFFFF, (k1 + _WEYL[1]) & 0xFFFFFFFF
    return np.stack((c0, c1, c2, c3), axis=1)


def uniforms(key: int, indices: UInt64Array, position: int, committed_len: int, stream: Stream) -> Float64Array:
    """The uniforms of a request (key is its seed) at each index: [N] float64 in (0, 1)."""
    check_address(key, position, committed_len)
    counter = np.empty((len(indices), 4), np.uint64)
    counter[:, 0] = indices
    counter[:, 1:] = (position, committed_len, int(stream))
    words = philox4x32(counter, key)
    n = ((words[:, 1] << _SHIFT) | words[:, 0]) >> np.uint64(12)
    return (n.astype(np.float64) + 0.5) * 2.0**-52


def exponentials(key: int, indices: UInt64Array, position: int, committed_len: int, stream: Stream) -> Float64Array:
    """Independent Exp(1) draws, E = -log u of `uniforms`: [N] float64, positive."""
    return -math64.log(uniforms(key, indices, position, committed_len, stream))


def check_address(key: int, position: int, committed_len: int) -> None:
    """Raises EngineFault unless the seed fits 64 bits and the counters fit 32."""
    if not (0 <= key < 1 << 64 and 0 <= position < 1 << 32 and 0 <= committed_len < 1 << 32):
        raise EngineFault(f"noise address ({key}, {position}, {committed_len}) does not fit 64, 32 and 32 bits")
