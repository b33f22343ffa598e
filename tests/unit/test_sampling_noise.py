from __future__ import annotations

import numpy as np
import pytest

from forerun import _native
from forerun.errors import EngineFault
from forerun.sampling import make_sampler, noise
from forerun.sampling.distribution import Law
from forerun.sampling.noise import Stream

ONES = 0xFFFFFFFF
# Known answers that Random123, the generator's first implementation, publishes for philox4x32-10: counter, key, output.
KNOWN = [
    ((0, 0, 0, 0), 0, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((ONES, ONES, ONES, ONES), 2**64 - 1, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        0x299F31D0_A4093822,
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "words"), KNOWN)
def test_philox_gives_the_published_answers(counter: tuple[int, ...], key: int, words: tuple[int, ...]) -> None:
    assert tuple(noise.philox4x32(np.array([counter], np.uint64), key)[0].tolist()) == words
    assert _native.sampling_philox(*counter, key) == words


def test_a_uniform_is_made_of_words_one_and_zero() -> None:
    """With counter 0 and key 0: n = top 52 bits of (e169c58d : 6627e8d5)."""
    n = 0xE169C58D6627E8D5 >> 12
    assert make_sampler(1, "numpy").coin(0, 0, 0) != (n + 0.5) * 2.0**-52  # the coin's stream is in the counter
    u = noise.uniforms(0, np.zeros(1, np.uint64), 0, 0, Stream.SHARED)[0]
    assert u == (n + 0.5) * 2.0**-52 == _native.sampling_uniform(0, 0, 0, 0, 0)


def test_native_uniforms_equal_the_reference() -> None:
    rng = np.random.default_rng(0)
    indices = rng.integers(0, 2**32, 200, dtype=np.uint64)
    for stream in Stream:
        key = int(rng.integers(0, 2**64, dtype=np.uint64))
        pos, committed_len = int(rng.integers(2**32)), int(rng.integers(2**32))
        expected = noise.uniforms(key, indices, pos, committed_len, stream)
        assert (expected > 0).all()
        assert (expected < 1).all()
        got = [_native.sampling_uniform(key, int(i), pos, committed_len, stream) for i in indices]
        assert got == expected.tolist()


def test_every_part_of_an_address_matters() -> None:
    law = Law(None, np.ones(5000), 5000.0)
    sampler = make_sampler(5000)
    base = (12345, 7, Stream.DRAFT, 3)
    others = [(12346, 7, Stream.DRAFT, 3), (12345 + 2**40, 7, Stream.DRAFT, 3), (12345, 8, Stream.DRAFT, 3),
              (12345, 7, Stream.RESIDUAL, 3), (12345, 7, Stream.DRAFT, 4)]  # fmt: skip
    assert sampler.sample(law, *base) == sampler.sample(law, *base)
    assert sampler.sample(law, *base).score not in [sampler.sample(law, *other).score for other in others]
    coins = {sampler.coin(1, 2, 3), sampler.coin(2, 2, 3), sampler.coin(1, 3, 3), sampler.coin(1, 2, 4)}
    assert len(coins) == 4


@pytest.mark.parametrize("backend", ["native", "numpy"])
def test_addresses_beyond_the_counter_are_refused(backend: str) -> None:
    sampler, law = make_sampler(2, backend), Law(None, np.ones(2), 2.0)
    for key, pos, committed_len in [(-1, 0, 0), (2**64, 0, 0), (0, 2**32, 0), (0, 0, -1)]:
        with pytest.raises(EngineFault, match="does not fit"):
            sampler.sample(law, key, pos, Stream.DRAFT, committed_len)
