from __future__ import annotations

from decimal import Decimal, localcontext
from fractions import Fraction

import numpy as np

from forerun import _native
from forerun.sampling import math64


def arguments() -> np.ndarray:
    rng = np.random.default_rng(1)
    near_halves = np.log(2) * (np.arange(1, 400) - 0.5)
    return -np.concatenate((
        [0.0, 5e-324, 1e-300, 2.0**-53, 708.0, 707.999], rng.random(1000) * 2, rng.random(1000) * 708, near_halves
    ))  # fmt: skip


def test_exp_is_accurate_to_one_unit_in_the_last_place() -> None:
    x = arguments()
    with localcontext() as context:
        context.prec = 40
        for value, got in zip(x.tolist(), math64.exp(x).tolist(), strict=True):
            want = Decimal(value).exp()
            assert abs(Decimal(got) - want) < want * Decimal(2) ** -52


def test_exp_at_its_ends() -> None:
    x = np.array([0.0, -0.0, -708.0000001, -1e300, -np.inf])
    assert math64.exp(x).tolist() == [1.0, 1.0, 0.0, 0.0, 0.0]
    assert [_native.sampling_exp(v) for v in x] == [1.0, 1.0, 0.0, 0.0, 0.0]


def test_log_is_accurate_also_near_one() -> None:
    rng = np.random.default_rng(2)
    x = np.concatenate((
        rng.random(1000), 2.0 ** -(rng.random(300) * 60), rng.random(100) * 1e5,
        1 - np.arange(1, 200) * 2.0**-53, [2.0**-53, 0.5, 2**0.5, 0.5**0.5, 1.0, 1.5],
    ))  # fmt: skip
    with localcontext() as context:
        context.prec = 40
        for value, got in zip(x.tolist(), math64.log(x).tolist(), strict=True):
            want = Decimal(value).ln()
            assert abs(Decimal(got) - want) <= abs(want) * Decimal(2) ** -52


def test_negative_log_exceeds_one_minus_u() -> None:
    """The race skips ids by this bound, with a slack of 2^-40."""
    u = 1 - np.arange(1, 20_000, 7) * 2.0**-53
    assert (-math64.log(u) * (1 + 2.0**-45) >= 1 - u).all()


def test_native_exp_and_log_equal_the_reference() -> None:
    x = arguments()
    assert [_native.sampling_exp(v) for v in x] == math64.exp(x).tolist()
    u = np.random.default_rng(3).random(3000) + 2.0**-60
    assert [_native.sampling_log(v) for v in u] == math64.log(u).tolist()


def test_lane_sum_adds_in_sixteen_lanes_and_a_tree() -> None:
    for size in (0, 1, 15, 16, 17, 100):
        values = np.random.default_rng(size).random(size) ** 9
        lanes = [0.0] * 16
        for i, value in enumerate(values.tolist()):
            lanes[i % 16] += value
        for half in (8, 4, 2, 1):
            lanes = [lanes[j] + lanes[j + half] for j in range(half)]
        assert math64.lane_sum(values) == lanes[0]


def test_lane_sum_of_fractions_is_exact() -> None:
    assert math64.lane_sum(np.array([Fraction(1, 3)] * 20, dtype=object)) == Fraction(20, 3)
