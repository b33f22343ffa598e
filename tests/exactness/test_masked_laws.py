"""A mask of allowed ids in the law: the same bits on both samplers, and no other law than the definition's."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
import pytest

from forerun.errors import EngineFault
from forerun.sampling import make_sampler
from forerun.sampling.distribution import RowSampler, is_allowed, num_mask_words
from forerun.sampling.history import History
from forerun.types import BoolArray, Float32Array, SamplingParams, UInt32Array
from tests.exactness.test_sampling_native import FILTERS, assert_same_law, rows
from tests.helpers.isa_levels import ISA_LEVELS, at_level

SIZES = [1, 7, 31, 32, 33, 127, 128, 129, 160, 300]


@pytest.fixture(params=ISA_LEVELS)
def isa_level(request: pytest.FixtureRequest) -> Iterator[int]:
    yield from at_level(request.param)


def packed(unmasked_V: BoolArray, beyond: bool = False) -> UInt32Array:
    """A bit per id, lowest first; those beyond the vocabulary are as wanted."""
    bits = np.full(32 * num_mask_words(len(unmasked_V)), beyond)
    bits[: len(unmasked_V)] = unmasked_V
    return np.packbits(bits, bitorder="little").view("<u4").astype(np.uint32)


def masks(row: Float32Array) -> dict[str, BoolArray]:
    """Masks that leave at least one id of the row."""
    rng = np.random.default_rng(len(row))
    usable = np.flatnonzero(row > -np.inf)
    few = np.zeros(len(row), bool)
    few[rng.choice(usable, min(3, len(usable)), replace=False)] = True
    one = np.zeros(len(row), bool)
    one[usable[-1]] = True
    half = rng.random(len(row)) < 0.5
    half[usable[0]] = True
    most = np.ones(len(row), bool)
    most[int(row.argmax())] = len(usable) == 1
    return {"few": few, "one": one, "half": half, "most": most, "all": np.ones(len(row), bool)}


@pytest.mark.usefixtures("isa_level")
@pytest.mark.parametrize("vocab_size", SIZES)
def test_masked_laws_and_draws_are_the_references(vocab_size: int) -> None:
    native, reference = make_sampler(vocab_size), make_sampler(vocab_size, "numpy")
    for (name, row), temperature in itertools.product(rows(vocab_size).items(), (0.0, 0.7)):
        for (kind, unmasked_V), filters in itertools.product(masks(row).items(), FILTERS[:: 5 if temperature else 40]):
            params = SamplingParams(temperature=temperature, **filters)
            history = History(params, ()).along()
            allowed = packed(unmasked_V, beyond=kind == "half")
            got = native.law(row, params, history, allowed=allowed)
            want = reference.law(row, params, history, allowed=allowed)
            assert_same_law(got, want)
            assert native.sample(got, 5, 9) == reference.sample(want, 5, 9), (name, kind)
            assert unmasked_V[native.sample(got, 5, 9).token_id]


@pytest.mark.usefixtures("isa_level")
def test_a_mask_bans_what_it_leaves_out() -> None:
    """Beside bias, penalties and bans, to the bit."""
    rng = np.random.default_rng(12)
    for backend, case in itertools.product(("native", "numpy"), range(100)):
        sampler = make_sampler(300, backend)  # type: ignore[arg-type]
        params = SamplingParams(
            temperature=float(rng.choice((0.0, 0.9))),
            top_k=int(rng.choice((0, 10))),
            top_p=float(rng.choice((1.0, 0.9))),
            repetition_penalty=float(rng.choice((1.0, 1.3))),
            frequency_penalty=float(rng.choice((0.0, 0.7))),
            logit_bias={int(i): 3.0 for i in rng.integers(0, 300, int(rng.integers(0, 3)))},
        )
        history = History(params, rng.integers(0, 300, 10).tolist()).along((3, 299))
        row = rows(300)["natural"]
        unmasked_V = rng.random(300) < (0.02 if case % 2 else 0.9)
        unmasked_V[[7, 8, 9]] = True
        banned = rng.integers(10, 300, int(rng.integers(0, 3))).astype(np.int32)
        masked = sampler.law(row, params, history, banned, packed(unmasked_V))
        both = np.concatenate((banned, np.flatnonzero(~unmasked_V).astype(np.int32)))
        assert_same_law(masked, sampler.law(row, params, history, both))


@pytest.fixture(params=["native", "numpy"])
def sampler(request: pytest.FixtureRequest) -> RowSampler:
    return make_sampler(40, request.param)


def test_the_law_is_the_renormalised_rest(sampler: RowSampler) -> None:
    """p(id | allowed) = p(id) / p(all that is allowed), for every set that a few ids can form."""
    params = SamplingParams(temperature=1.3)
    history = History(params, ()).along()
    row = rows(40)["natural"]
    p_V = sampler.law(row, params, history).dense(40)
    ids = [0, 5, 31, 32, 39]
    for size in range(1, len(ids) + 1):
        for chosen in itertools.combinations(ids, size):
            unmasked_V = np.isin(np.arange(40), chosen)
            law = sampler.law(row, params, history, allowed=packed(unmasked_V))
            want = np.where(unmasked_V, p_V, 0.0) / p_V[unmasked_V].sum()
            assert law.dense(40) == pytest.approx(want, rel=1e-12, abs=0)


def test_ties_under_a_mask_go_to_the_lowest_allowed_id(sampler: RowSampler) -> None:
    params = SamplingParams(temperature=0.0)
    row = np.full(40, 2.0, np.float32)
    row[[1, 33]] = 7.0
    for allowed_ids, winner in (((33, 1), 1), ((33, 2, 30), 33), ((39, 38, 4), 4)):
        allowed = packed(np.isin(np.arange(40), allowed_ids))
        law = sampler.law(row, params, History(params, ()).along(), allowed=allowed)
        assert law.only_id == winner
        assert [i for i in range(40) if is_allowed(allowed, i)] == sorted(allowed_ids)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_masks_that_leave_nothing_or_do_not_fit_are_refused(sampler: RowSampler, temperature: float) -> None:
    params = SamplingParams(temperature=temperature)
    history = History(params, ()).along()
    row = np.zeros(40, np.float32)
    row[3] = -np.inf
    nothing, beyond = np.zeros(2, np.uint32), np.array([0, 1 << 8], np.uint32)
    for allowed in (nothing, beyond):
        with pytest.raises(EngineFault, match="position 0: the mask of allowed ids allows no token"):
            sampler.law(row, params, history, allowed=allowed)
    for num_words in (0, 1, 3):
        message = f"the mask of allowed ids has {num_words} words, but the vocabulary takes 2"
        with pytest.raises(EngineFault, match=message):
            sampler.law(row, params, history, allowed=np.ones(num_words, np.uint32))
    with pytest.raises(EngineFault, match="position 0: no token is allowed"):
        sampler.law(row, params, history, allowed=np.array([8, 0], np.uint32))
    row[20] = np.nan  # where the mask doesn't look
    with pytest.raises(EngineFault, match="the logits hold NaN at token id 20"):
        sampler.law(row, params, history, allowed=np.array([4, 0], np.uint32))
