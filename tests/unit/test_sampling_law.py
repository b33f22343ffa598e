"""The law of a row against hand-made examples, on both samplers."""

from __future__ import annotations

import math

import numpy as np
import pytest

from forerun.errors import EngineFault
from forerun.sampling import make_sampler
from forerun.sampling.distribution import NO_IDS, Law, RowSampler, argmax_suffices
from forerun.sampling.history import History, PathHistory
from forerun.types import MIN_TEMPERATURE, SamplingParams


@pytest.fixture(params=["native", "numpy"])
def sampler(request: pytest.FixtureRequest) -> RowSampler:
    return make_sampler(5, request.param)


def none_seen(params: SamplingParams) -> PathHistory:
    return History(params, ()).along()


def law(sampler: RowSampler, logits: list[float], banned: tuple[int, ...] = (), **params: object) -> Law:
    wanted = SamplingParams(**{"temperature": 1.0, **params})
    return sampler.law(np.array(logits, np.float32), wanted, none_seen(wanted), np.array(banned, np.int32))


def kept(row_law: Law) -> list[int]:
    return list(range(len(row_law.weights))) if row_law.token_ids is None else row_law.token_ids.tolist()


LOGITS = [math.log(p) for p in (0.1, 0.4, 0.2, 0.25, 0.05)]


def test_temperature_divides_the_logits(sampler: RowSampler) -> None:
    row_law = law(sampler, LOGITS, temperature=0.5)
    assert row_law.token_ids is None
    squares = np.array((0.1, 0.4, 0.2, 0.25, 0.05)) ** 2
    assert row_law.dense(5) == pytest.approx(squares / squares.sum(), rel=1e-6)
    assert [row_law.prob(i) for i in range(5)] == row_law.dense(5).tolist()


def test_each_filter_keeps_what_its_definition_says(sampler: RowSampler) -> None:
    assert kept(law(sampler, LOGITS, top_k=2)) == [1, 3]
    assert kept(law(sampler, LOGITS, top_p=0.64)) == [1, 3]
    assert kept(law(sampler, LOGITS, top_p=0.66)) == [1, 2, 3]
    assert kept(law(sampler, LOGITS, top_p=0.0)) == [1]
    assert kept(law(sampler, LOGITS, min_p=0.3)) == [1, 2, 3]
    assert kept(law(sampler, LOGITS, min_p=1.0)) == [1]
    assert law(sampler, LOGITS, top_k=2).dense(5) == pytest.approx([0, 0.4 / 0.65, 0, 0.25 / 0.65, 0], rel=1e-6)


def test_each_filter_acts_on_what_the_one_before_left(sampler: RowSampler) -> None:
    # After top-k 2 the mass of id 1 is .4 / .65 = .615, so top_p = .6 is reached by it alone.
    assert kept(law(sampler, LOGITS, top_p=0.6)) == [1, 3]
    assert kept(law(sampler, LOGITS, top_k=2, top_p=0.6)) == [1]


def test_filters_that_are_off_leave_no_id_list(sampler: RowSampler) -> None:
    for params in ({}, {"top_k": 0}, {"top_k": 5}, {"top_k": 2**40}, {"top_p": 1.0}, {"min_p": 0.0}):
        assert law(sampler, LOGITS, **params).token_ids is None


def test_ties_go_to_the_lowest_ids(sampler: RowSampler) -> None:
    ties = [1.0, 2.0, 2.0, 2.0, 1.0]
    assert kept(law(sampler, ties, temperature=0.0)) == [1]
    assert kept(law(sampler, ties, top_k=2)) == [1, 2]
    assert kept(law(sampler, ties, top_k=4)) == [0, 1, 2, 3]
    assert kept(law(sampler, ties, top_p=0.01)) == [1]
    assert kept(law(sampler, [0.0, -0.0, 0.0, -1.0, -1.0], temperature=0.0)) == [0]
    assert kept(law(sampler, [-0.0, 0.0, 0.0, -1.0, -1.0], top_k=1)) == [0]


def test_bias_and_bans_act_before_everything_else(sampler: RowSampler) -> None:
    """F003."""
    assert kept(law(sampler, LOGITS, logit_bias={4: 100.0}, temperature=0.0)) == [4]
    assert law(sampler, LOGITS, logit_bias={1: -100.0}).prob(1) < 1e-40
    banned = law(sampler, LOGITS, banned=(1, 3), top_k=2)
    assert kept(banned) == [0, 2]
    assert kept(law(sampler, LOGITS, banned=(1,), temperature=0.0)) == [3]
    assert law(sampler, LOGITS, banned=(1,)).dense(5) == pytest.approx(
        [0.1 / 0.6, 0, 0.2 / 0.6, 0.25 / 0.6, 0.05 / 0.6], rel=1e-6
    )
    assert kept(law(sampler, LOGITS, banned=(1,), logit_bias={1: 100.0}, temperature=0.0)) == [3]


def penalised(sampler: RowSampler, params: SamplingParams, history: History, path: tuple[int, ...] = ()) -> list[float]:
    """log p up to a constant, relative to the id 4 that is never seen."""
    row = np.array((1.0, 2.0, -1.0, 0.5, 0.0), np.float32)
    p_V = sampler.law(row, params, history.along(path)).dense(5)
    return np.log(p_V / p_V[4]).tolist()


def test_penalties_count_prompt_output_and_path(sampler: RowSampler) -> None:
    """F004: repetition sees the prompt too; presence and frequency see output and path alone."""
    params = SamplingParams(temperature=1.0, repetition_penalty=2.0, presence_penalty=0.25, frequency_penalty=0.5)
    history = History(params, [0, 2, 2])
    for token_id in (1, 1, 2):
        history.append(token_id)
    assert penalised(sampler, params, history) == pytest.approx([0.5, 1.0 - 0.25 - 1.0, -2.0 - 0.25 - 0.5, 0.5, 0.0])
    along = penalised(sampler, params, history, (1, 3))
    assert along == pytest.approx([0.5, 1.0 - 0.25 - 1.5, -2.75, 0.25 - 0.25 - 0.5, 0.0])
    assert penalised(sampler, params, history)[3] == pytest.approx(0.5)  # the path left no trace


def test_negative_penalties_encourage(sampler: RowSampler) -> None:
    params = SamplingParams(temperature=1.0, frequency_penalty=-1.0)
    history = History(params, [3])
    history.append(0)
    assert penalised(sampler, params, history) == pytest.approx([2.0, 2.0, -1.0, 0.5, 0.0])


@pytest.mark.parametrize("temperature", [0.0, 1e-38, 5e-324, 1e-8, MIN_TEMPERATURE / 2, MIN_TEMPERATURE, 1e-4])
def test_tiny_temperatures_act_as_greedy(sampler: RowSampler, temperature: float) -> None:
    """F040."""
    for logits in (LOGITS, [-3e38, -np.inf, 3.4e38, 3.3e38, 0.0]):
        row_law = law(sampler, logits, banned=(0,), temperature=temperature)
        assert sampler.sample(row_law, 1, 2).token_id == int(np.argmax(np.where(np.arange(5) == 0, -np.inf, logits)))


def test_top_k_one_equals_greedy(sampler: RowSampler) -> None:
    for key in range(20):
        assert sampler.sample(law(sampler, LOGITS, top_k=1), key, 0).token_id == 1


@pytest.mark.parametrize(
    ("logits", "banned", "bias", "message"),
    [
        ([0.0, np.nan, 0.0, np.nan, 0.0], (), {}, "position 3: the logits hold NaN at token id 1"),
        ([0.0, 0.0, -np.nan, 0.0, 0.0], (), {}, "the logits hold NaN at token id 2"),
        ([0.0, 0.0, 0.0, 0.0, np.inf], (), {}, r"the logits hold \+inf at token id 4"),
        ([-np.inf] * 5, (), {}, "no token is allowed"),
        ([0.0] * 5, (0, 1, 2, 3, 4), {}, "no token is allowed"),
        ([0.0] * 5, (5,), {}, "token id 5 lies outside the vocabulary of 5"),
        ([0.0] * 5, (-1,), {}, "token id -1 lies outside"),
        ([0.0] * 5, (), {2**40: 1.0}, "token id 1099511627776 lies outside"),
        ([0.0] * 4, (), {}, "logits has 4 entries, but the vocabulary has 5"),
    ],
)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rows_without_a_law_are_named(
    sampler: RowSampler,
    logits: list[float],
    banned: tuple[int, ...],
    bias: dict[int, float],
    message: str,
    temperature: float,
) -> None:
    params = SamplingParams(temperature=temperature, logit_bias=bias)
    history = History(params, (1, 2)).along((3,))
    with pytest.raises(EngineFault, match=message):
        sampler.law(np.array(logits, np.float32), params, history, np.array(banned, np.int32))


def test_a_law_without_mass_is_refused(sampler: RowSampler) -> None:
    with pytest.raises(EngineFault, match="no positive weight"):
        sampler.sample(Law(None, np.zeros(5), 1.0), 0, 0)
    with pytest.raises(EngineFault, match="no positive weight"):
        sampler.sample(Law(np.array((1, 2), np.int32), np.zeros(2), 1.0), 0, 0)


def test_laws_outlive_the_sampler_s_next_call(sampler: RowSampler) -> None:
    for params in ({}, {"top_k": 3}, {"temperature": 0.0}):
        first = law(sampler, LOGITS, **params)
        before = first.dense(5).tolist()
        law(sampler, LOGITS[::-1], **params)
        assert first.dense(5).tolist() == before


def test_a_point_law_draws_its_id_without_noise(sampler: RowSampler) -> None:
    point = Law.point(3)
    assert (point.prob(3), point.prob(2), point.prob(4)) == (1.0, 0.0, 0.0)
    assert sampler.sample(point, 1, 2).token_id == 3
    assert sampler.sample(point, 1, 2).score is None
    assert sampler.score(point, 1, 2, 3) is None


def test_scores_are_what_the_race_compares(sampler: RowSampler) -> None:
    row_law = law(sampler, LOGITS, top_k=3)
    for key in range(30):
        race = sampler.sample(row_law, key, 4)
        scores = {i: sampler.score(row_law, key, 4, i) for i in range(5)}
        assert scores[0] is scores[4] is None
        assert race.score == scores[race.token_id] == min(scores[i] for i in (1, 2, 3))


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        (SamplingParams(), True),
        (SamplingParams(top_k=3, min_p=0.5), True),
        (SamplingParams(temperature=1.0), False),
        (SamplingParams(logit_bias={1: 1.0}), False),
        (SamplingParams(repetition_penalty=1.1), False),
    ],
)
def test_argmax_is_the_whole_law_only_of_plain_greedy_rows(params: SamplingParams, expected: bool) -> None:
    assert argmax_suffices(params) is expected


def test_no_ids_is_empty() -> None:
    assert NO_IDS.dtype == np.int32
    assert len(NO_IDS) == 0
