from __future__ import annotations

import numpy as np
import pytest

from forerun.sampling.history import History, uses_history
from forerun.types import SamplingParams

PENALISED = SamplingParams(presence_penalty=0.5)


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        (SamplingParams(), False),
        (SamplingParams(temperature=1.0, logit_bias={1: 2.0}), False),
        (SamplingParams(repetition_penalty=1.1), True),
        (SamplingParams(presence_penalty=-0.1), True),
        (SamplingParams(frequency_penalty=0.1), True),
    ],
)
def test_only_penalties_use_history(params: SamplingParams, expected: bool) -> None:
    assert uses_history(params) is expected


def test_counts_follow_prompt_output_and_path() -> None:
    history = History(PENALISED, [5, 5, 7])
    history.append(7)
    history.append(9)
    history.append(9)
    assert history.along().output_counts() == {5: 0, 7: 1, 9: 2}
    assert history.along((9, 4, 5)).output_counts() == {5: 1, 7: 1, 9: 3, 4: 1}
    assert history.along((9, 4, 5)).num_tokens == 9
    assert history.along().output_counts() == {5: 0, 7: 1, 9: 2}  # a path leaves no trace


def test_many_ids_grow_the_arrays() -> None:
    history = History(PENALISED, range(1000, 1300))
    for token_id in (*range(1250, 1400), 1000):
        history.append(token_id)
    counts = history.along().output_counts()
    assert len(counts) == 400
    assert {token_id for token_id, count in counts.items() if count} == {1000, *range(1250, 1400)}
    assert history.ids.dtype == history.output_counts.dtype == np.int32


def test_without_penalties_nothing_is_counted() -> None:
    history = History(SamplingParams(temperature=1.0), [1, 2, 3])
    history.append(4)
    assert history.along((8,)).output_counts() == {}
    assert history.along((8,)).num_tokens == 5
