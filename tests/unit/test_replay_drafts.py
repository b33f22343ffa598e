"""benchmarks/replay_drafts.py: a replay takes the steps that serving takes."""

from __future__ import annotations

import pytest

from benchmarks.replay_drafts import ALL, Recorded, emitted_of, replay
from forerun.control.speculator import Speculator
from forerun.types import Draft, SamplingParams
from tests.helpers.engines import EOS, FakeEngine, Scripted, ScriptedSource, decode_naively, right

PROMPT = [3, 4, 5, 6, 3, 4, 5, 7, 9, 3, 4]
MAX_TOKENS = 40


def recorded(params: SamplingParams, category: str = "a", seed: int = 5) -> Recorded:
    answer = decode_naively(PROMPT, params, seed)
    return Recorded(category, tuple(PROMPT), answer.token_ids, frozenset({EOS}), params, MAX_TOKENS)


@pytest.mark.parametrize("spec", ["ngram:k=8,policy=fixed", "suffix:k=8,policy=fixed"])
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_takes_the_passes_that_serving_takes(spec: str, temperature: float) -> None:
    engine = FakeEngine()
    params = SamplingParams(max_tokens=MAX_TOKENS, temperature=temperature, seed=5)
    stats = engine.run(PROMPT, params, spec).stats
    speculator = engine.speculator(spec)
    assert speculator is not None
    tally = replay(speculator, [recorded(params)])[ALL]
    assert tally.tokens == stats.completion_tokens - 1
    assert tally.passes == stats.target_passes
    assert tally.rows == stats.target_passes + stats.drafted_tokens


def test_sums_by_category_and_time_by_the_curve() -> None:
    params = SamplingParams(max_tokens=MAX_TOKENS, ignore_eos=True)
    requests = [recorded(params, "a"), recorded(params, "b")]
    truth = requests[0].token_ids
    source = ScriptedSource(lambda context: Scripted([*truth, *[1] * 80], right(4)))
    tallies = replay(Speculator([source]), requests)
    assert list(tallies) == [ALL, "a", "b"]
    assert tallies["a"] == tallies["b"]
    # 39 tokens after the first: seven steps of five, and one of four, for which no more than three nodes have room.
    assert tallies[ALL].tokens == 78
    assert tallies[ALL].passes == 16
    assert tallies[ALL].rows == 78
    assert tallies[ALL].time == pytest.approx(2 * (7 * 1.2 + 1.15))
    assert tallies[ALL].to_json()["tau"] == pytest.approx(4.875)


def test_an_answer_of_one_token_has_no_steps() -> None:
    one = Recorded("a", (1,), (2,), frozenset(), SamplingParams(), MAX_TOKENS)
    assert list(replay(Speculator([]), [one])) == [ALL]


def test_emits_the_longest_right_path_and_what_follows() -> None:
    tree = Draft((4, 5, 6, 5), (-1, 0, 1, -1), ("x",) * 4, (None,) * 4)
    assert emitted_of(tree, [4, 5, 7, 8]) == (4, 5, 7)
    assert emitted_of(tree, [5, 5, 7]) == (5, 5)
    assert emitted_of(tree, [9, 9]) == (9,)
    assert emitted_of(tree, [4, 5]) == (4, 5)
    assert emitted_of(Draft(), [3]) == (3,)
