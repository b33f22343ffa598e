from __future__ import annotations

import json
import math

import numpy as np
import pytest

from forerun.errors import EngineFault
from forerun.sampling import make_sampler
from forerun.sampling.distribution import RowSampler


@pytest.fixture(params=["native", "numpy"])
def sampler(request: pytest.FixtureRequest) -> RowSampler:
    return make_sampler(6, request.param)


ROW = np.array([1.0, 3.0, -2.0, 3.0, 0.5, -np.inf], np.float32)


def test_logprobs_are_the_log_softmax_of_the_raw_row(sampler: RowSampler) -> None:
    total = math.log(sum(math.exp(x) for x in ROW.tolist()))
    entry = sampler.logprobs(ROW, 4, 3)
    assert entry.token_id == 4
    assert entry.logprob == pytest.approx(0.5 - total, abs=1e-14)
    assert [token_id for token_id, _ in entry.top] == [1, 3, 0]
    assert [value for _, value in entry.top] == pytest.approx([3 - total, 3 - total, 1 - total], abs=1e-14)
    json.dumps(entry.logprob, allow_nan=False)


def test_chosen_and_listed_values_of_an_id_are_equal(sampler: RowSampler) -> None:
    """F005."""
    listed = dict(sampler.logprobs(ROW, 0, 6).top)
    assert {i: sampler.logprobs(ROW, i, 0).logprob for i in range(6)} == listed
    assert sampler.logprobs(ROW, 2, 0).top == ()


def test_more_alternatives_than_ids_lists_all(sampler: RowSampler) -> None:
    assert [token_id for token_id, _ in sampler.logprobs(ROW, 0, 20).top] == [1, 3, 0, 4, 2, 5]


def test_a_masked_id_has_minus_infinity(sampler: RowSampler) -> None:
    """F038: the caller that writes JSON replaces it."""
    assert sampler.logprobs(ROW, 5, 0).logprob == -math.inf


def test_a_certain_token_has_zero(sampler: RowSampler) -> None:
    row = np.array([0, -np.inf, -np.inf, -np.inf, -np.inf, -np.inf], np.float32)
    assert sampler.logprobs(row, 0, 0).logprob == 0.0


@pytest.mark.parametrize(
    ("row", "token_id", "message"),
    [
        ([0, np.nan, 0, 0, 0, 0], 0, "the logits hold NaN at token id 1"),
        ([0, np.inf, 0, 0, 0, 0], 0, r"the logits hold \+inf at token id 1"),
        ([-np.inf] * 6, 0, "no token is allowed"),
        ([0] * 6, 6, "token id 6 lies outside the vocabulary of 6"),
        ([0] * 7, 0, "logits has 7 entries, but the vocabulary has 6"),
    ],
)
def test_rows_without_a_law_are_named(sampler: RowSampler, row: list[float], token_id: int, message: str) -> None:
    with pytest.raises(EngineFault, match=message):
        sampler.logprobs(np.array(row, np.float32), token_id, 2)
