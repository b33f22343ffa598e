"""Native laws, draws and log-probabilities equal the numpy reference in every bit, on every instruction set."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
import pytest

from forerun import _native
from forerun.errors import EngineFault
from forerun.sampling import make_sampler
from forerun.sampling.distribution import Law
from forerun.sampling.history import History
from forerun.sampling.noise import Stream
from forerun.types import Float32Array, SamplingParams
from tests.helpers.isa_levels import ISA_LEVELS, at_level


@pytest.fixture(params=ISA_LEVELS, autouse=True)
def isa_level(request: pytest.FixtureRequest) -> Iterator[int]:
    yield from at_level(request.param)


def rows(vocab_size: int) -> dict[str, Float32Array]:
    rng = np.random.default_rng(vocab_size)
    natural = (rng.standard_normal(vocab_size) * 3).astype(np.float32)
    natural[rng.integers(0, vocab_size, 5)] += np.float32(6)
    masked = natural.copy()
    masked[rng.random(vocab_size) < 0.9] = -np.inf
    masked[vocab_size // 2] = 1.0
    one = np.full(vocab_size, -np.inf, np.float32)
    one[vocab_size - 1] = -7.5
    return {
        "natural": natural,
        "ties": rng.integers(0, 3, vocab_size).astype(np.float32),
        "equal": np.full(vocab_size, -2.5, np.float32),
        "ascending": np.linspace(-20, 5, vocab_size).astype(np.float32),
        "masked": masked,
        "one": one,
        "huge": (natural * np.float32(1e37)).astype(np.float32),
        "subnormal": (natural * np.float32(1e-42)).astype(np.float32),
        "far apart": (natural * np.float32(200)).astype(np.float32),
        "zeros": np.where(rng.random(vocab_size) < 0.5, np.float32(0.0), np.float32(-0.0)),
    }


FILTERS = [
    dict(zip(("top_k", "top_p", "min_p"), values, strict=True))
    for values in itertools.product((0, 1, 5, 10**9), (1.0, 0.0, 0.3, 0.95), (0.0, 0.05, 1.0))
]


def assert_same_law(got: Law, want: Law) -> None:
    assert (got.token_ids is None) == (want.token_ids is None)
    if want.token_ids is not None:
        assert got.token_ids.dtype == want.token_ids.dtype == np.int32
        assert got.token_ids.tolist() == want.token_ids.tolist()
    assert got.weights.tobytes() == want.weights.tobytes()
    assert got.total == want.total


@pytest.mark.parametrize("vocab_size", [1, 7, 16, 300])
def test_laws_and_draws_equal_for_every_filter_and_row(vocab_size: int) -> None:
    native, reference = make_sampler(vocab_size), make_sampler(vocab_size, "numpy")
    for temperature, (name, row), filters in itertools.product((0.0, 0.7), rows(vocab_size).items(), FILTERS):
        params = SamplingParams(temperature=temperature, **filters)
        history = History(params, ()).along()
        got, want = native.law(row, params, history), reference.law(row, params, history)
        assert_same_law(got, want)
        for pos in (0, 99):
            assert native.sample(got, 2**63 + 5, pos) == reference.sample(want, 2**63 + 5, pos), name


@pytest.mark.parametrize("temperature", [1e-5, 1e-4, 1.0, 1e6])
def test_laws_equal_at_extreme_temperatures(temperature: float) -> None:
    native, reference = make_sampler(300), make_sampler(300, "numpy")
    for row, filters in itertools.product(rows(300).values(), ({}, {"top_p": 0.9}, {"top_k": 20, "min_p": 0.1})):
        params = SamplingParams(temperature=temperature, **filters)
        history = History(params, ()).along()
        assert_same_law(native.law(row, params, history), reference.law(row, params, history))


def test_laws_equal_with_bias_penalties_and_bans() -> None:
    rng = np.random.default_rng(4)
    native, reference = make_sampler(60), make_sampler(60, "numpy")
    for case in range(250):
        params = SamplingParams(
            temperature=float(rng.choice((0.0, 0.8))),
            top_k=int(rng.choice((0, 10))),
            top_p=float(rng.choice((1.0, 0.9))),
            min_p=float(rng.choice((0.0, 0.02))),
            repetition_penalty=float(rng.choice((1.0, 1.3, 0.9, 1e3))),
            presence_penalty=float(rng.choice((0.0, 0.4, -2.0))),
            frequency_penalty=float(rng.choice((0.0, 0.7, -1.5))),
            logit_bias={int(i): float(b) for i, b in zip(rng.integers(0, 60, 3), rng.normal(0, 20, 3), strict=True)},
        )
        history = History(params, rng.integers(0, 60, 10).tolist())
        for token_id in rng.integers(0, 60, 20).tolist():
            history.append(token_id)
        path = history.along(tuple(rng.integers(0, 60, int(rng.integers(0, 5))).tolist()))
        banned = rng.integers(0, 60, int(rng.integers(0, 4))).astype(np.int32)
        row = list(rows(60).values())[case % 10]
        if not np.isfinite(np.delete(row, banned)).any():
            continue
        got, want = native.law(row, params, path, banned), reference.law(row, params, path, banned)
        assert_same_law(got, want)
        assert native.sample(got, case, 3) == reference.sample(want, case, 3)


@pytest.mark.parametrize(
    "filters", [{}, {"top_k": 40, "top_p": 0.95}, {"top_k": 5000}, {"top_p": 0.999}, {"min_p": 1e-4}]
)
def test_laws_and_draws_equal_over_a_whole_vocabulary(filters: dict[str, float]) -> None:
    vocab_size = 49_153  # one more than a multiple of every vector
    native, reference = make_sampler(vocab_size), make_sampler(vocab_size, "numpy")
    for name in ("natural", "ascending", "ties"):
        params = SamplingParams(temperature=1.3, **filters)
        history = History(params, ()).along()
        row = rows(vocab_size)[name]
        got, want = native.law(row, params, history), reference.law(row, params, history)
        assert_same_law(got, want)
        for key in range(3):
            assert native.sample(got, key, 12) == reference.sample(want, key, 12)


def test_draws_equal_for_any_weights() -> None:
    """Also for weights at the ends of the range, in any order, and few enough that ids collide in one vector."""
    rng = np.random.default_rng(6)
    native, reference = make_sampler(500), make_sampler(500, "numpy")
    for case in range(200):
        size = int(rng.integers(1, 400))
        weights = 10.0 ** rng.uniform(-300, 0, size) if case % 3 else rng.random(size)
        weights[rng.random(size) < 0.3] = 0.0
        weights[size // 2] = 2.0**-1020 if case % 5 == 0 else 1.0
        token_ids = None if case % 2 else np.sort(rng.permutation(500)[:size]).astype(np.int32)
        law = Law(token_ids, weights, 1.5)
        for stream, committed_len in ((Stream.SHARED, 0), (Stream.RESIDUAL, 77)):
            got = native.sample(law, case, 31, stream, committed_len)
            assert got == reference.sample(law, case, 31, stream, committed_len)
        winner = native.sample(law, case, 31)
        assert native.score(law, case, 31, winner.token_id) == reference.score(law, case, 31, winner.token_id)


def test_draws_of_several_equal_for_any_weights() -> None:
    rng = np.random.default_rng(7)
    native, reference = make_sampler(500), make_sampler(500, "numpy")
    for case in range(200):
        size = int(rng.integers(1, 400))
        weights = 10.0 ** rng.uniform(-300, 0, size) if case % 3 else rng.random(size)
        weights[rng.random(size) < 0.3] = 0.0
        weights[size // 2] = 2.0**-1020 if case % 5 == 0 else 1.0
        token_ids = None if case % 2 else np.sort(rng.permutation(500)[:size]).astype(np.int32)
        law = Law(token_ids, weights, 1.5)
        for count in (1, 2, 5, 64):
            got = native.draw(law, case, 31, count, Stream.DRAFT, 77)
            assert got == reference.draw(law, case, 31, count, Stream.DRAFT, 77)
            assert len(got) == min(count, np.count_nonzero(weights))
            assert all(type(token_id) is int for token_id in got)
        assert got[0] == native.sample(law, case, 31, Stream.DRAFT, 77).token_id


def test_draws_of_several_equal_over_a_whole_vocabulary() -> None:
    native, reference = make_sampler(49_153), make_sampler(49_153, "numpy")
    weights = np.exp(3 * np.random.default_rng(8).standard_normal(49_153))
    law = Law(None, weights, weights.sum().item())
    for count in (2, 64):
        assert native.draw(law, 3, 12, count) == reference.draw(law, 3, 12, count)


def test_draws_of_several_equal_where_every_ratio_overflows() -> None:
    native, reference = make_sampler(70), make_sampler(70, "numpy")
    law = Law(None, np.r_[0.0, 0.0, np.full(68, 1e-320)], 1.0)
    assert native.draw(law, 1, 0, 5) == reference.draw(law, 1, 0, 5) == (2, 3, 4, 5, 6)


def test_nothing_to_draw_is_refused() -> None:
    with pytest.raises(ValueError, match="nothing is to be drawn"):
        _native.sampling_draw(np.ones(3), 1, 2, 0, Stream.SHARED, 0)
    with pytest.raises(ValueError, match="ids and weights differ in length"):
        _native.sampling_draw_of(np.arange(2, dtype=np.int32), np.ones(3), 1, 2, 0, Stream.SHARED, 1)


def test_draws_equal_where_every_ratio_overflows() -> None:
    """Ratios of +inf are ties: the lowest id wins."""
    native, reference = make_sampler(70), make_sampler(70, "numpy")
    for key in range(20):
        law = Law(None, np.r_[0.0, 0.0, np.full(68, 1e-320)], 1.0)
        assert native.sample(law, key, 0) == reference.sample(law, key, 0)


def test_top_k_tells_neighbouring_float64_apart() -> None:
    """A later id must beat the least one kept, be it by one unit in the last place."""
    params = SamplingParams(temperature=1.0, top_k=1, logit_bias={1000: 2.0**-52})
    law = make_sampler(1200).law(np.ones(1200, np.float32), params, History(params, ()).along())
    assert law.only_id == 1000


def test_coins_equal() -> None:
    native, reference = make_sampler(2), make_sampler(2, "numpy")
    assert [native.coin(3, node, 5) for node in range(64)] == [reference.coin(3, node, 5) for node in range(64)]


@pytest.mark.parametrize("vocab_size", [1, 7, 300, 49_153])
def test_logprobs_equal(vocab_size: int) -> None:
    native, reference = make_sampler(vocab_size), make_sampler(vocab_size, "numpy")
    for row in rows(vocab_size).values():
        for token_id in (0, vocab_size - 1):
            assert native.logprobs(row, token_id, 20) == reference.logprobs(row, token_id, 20)


@pytest.mark.parametrize("vocab_size", [1, 2, 7, 127, 128, 129, 257, 300, 1500, 49_153])
def test_top_ids_equal(vocab_size: int) -> None:
    native, reference = make_sampler(vocab_size), make_sampler(vocab_size, "numpy")
    rng = np.random.default_rng(vocab_size)
    cases = rows(vocab_size)
    cases["descending"] = -cases["ascending"]
    holes = cases["natural"].copy()
    holes[rng.random(vocab_size) < 0.3] = np.nan
    holes[rng.random(vocab_size) < 0.1] = -np.inf
    holes[vocab_size // 2] = np.inf
    cases |= {"holes": holes, "nothing": np.full(vocab_size, np.nan, np.float32)}
    for name, row in cases.items():
        for n in (1, 2, 8, 33):
            got = native.top_ids(row, n)
            assert got.dtype == np.int32
            assert got.tolist() == reference.top_ids(row, n).tolist(), (name, n)


def test_top_ids_orders_by_value_then_id_and_takes_what_is_not_a_number_last() -> None:
    row = np.array([1.0, np.nan, 3.0, -np.inf, 3.0, 0.0, -0.0, np.inf], np.float32)
    for sampler in (make_sampler(8), make_sampler(8, "numpy")):
        assert sampler.top_ids(row, 8).tolist() == [7, 2, 4, 0, 5, 6, 1, 3]
        assert sampler.top_ids(row, 20).tolist() == [7, 2, 4, 0, 5, 6, 1, 3]
        assert sampler.top_ids(row, 0).tolist() == []
        with pytest.raises(EngineFault, match="logits has 7 entries, but the vocabulary has 8"):
            sampler.top_ids(row[:7], 2)


def test_levels_beyond_the_cpu_are_refused() -> None:
    for level in (-1, ISA_LEVELS.stop):
        with pytest.raises(ValueError, match="instruction set level"):
            _native.sampling_set_isa_level(level)
