"""What is refused before any work is done (F006, F016, F033 to F035, F047)."""

from typing import Any

import numpy as np
import pytest

from forerun.engine.request import Limits, prepare
from forerun.errors import RequestError
from forerun.types import MAX_GENERATED_SEED, SamplingParams, VerifyRule
from forerun.verify import RULES

LIMITS = Limits(vocab_size=100, max_model_len=16, eos_ids=frozenset({2, 3}))


@pytest.mark.parametrize("prompt", [[-1], [100], [2**63], [1.5], [True], ["a"], [None], [5, 6, 100]])
def test_f034_prompt_ids_outside_the_vocabulary_are_refused(prompt: list[Any]) -> None:
    index = len(prompt) - 1
    with pytest.raises(RequestError, match=f"prompt token {index} is .*, but must be a token id from 0 to 99") as error:
        prepare(prompt, SamplingParams(), "coupled", LIMITS)
    assert error.value.param == "prompt"


def test_prompt_ids_may_be_numpy_integers() -> None:
    request = prepare(np.array([0, 99], np.int32), SamplingParams(), "coupled", LIMITS)
    assert request.prompt_token_ids == (0, 99)
    assert all(type(token_id) is int for token_id in request.prompt_token_ids)


def test_f035_an_empty_prompt_is_refused() -> None:
    with pytest.raises(RequestError, match="no tokens"):
        prepare([], SamplingParams(), "coupled", LIMITS)


@pytest.mark.parametrize("token_id", [100, -1, 10**9])
def test_f033_unknown_ids_in_logit_bias_and_stop_ids_are_refused(token_id: int) -> None:
    with pytest.raises(RequestError, match="logit_bias is") as error:
        prepare([1], SamplingParams(logit_bias={token_id: 1.0}), "coupled", LIMITS)
    assert error.value.param == "logit_bias"
    with pytest.raises(RequestError, match=r"stop_token_ids\[1\] is") as error:
        prepare([1], SamplingParams(stop_token_ids=(1, token_id)), "coupled", LIMITS)
    assert error.value.param == "stop_token_ids"


@pytest.mark.parametrize("max_tokens", [None, 1, 2, 16, 100])
def test_f016_what_remains_is_the_most_that_is_emitted(max_tokens: int | None) -> None:
    for num_prompt in (14, 15):
        request = prepare([1] * num_prompt, SamplingParams(max_tokens=max_tokens), "coupled", LIMITS)
        assert request.max_len == min(16, num_prompt + (max_tokens or 16))


@pytest.mark.parametrize("num_prompt", [16, 17, 40])
def test_f016_f047_a_prompt_without_room_is_refused_naming_both_numbers(num_prompt: int) -> None:
    with pytest.raises(RequestError, match=f"has {num_prompt} tokens.*context limit of 16 tokens"):
        prepare([1] * num_prompt, SamplingParams(max_tokens=1), "coupled", LIMITS)


@pytest.mark.parametrize("token_id", [100, -1, True, "a"])
def test_f034_prediction_ids_outside_the_vocabulary_are_refused(token_id: Any) -> None:
    with pytest.raises(RequestError, match=r"prediction token 1 is .*, but must be a token id from 0 to 99") as error:
        prepare([1], SamplingParams(), "coupled", LIMITS, prediction=[5, token_id])
    assert error.value.param == "prediction"


def test_a_prediction_longer_than_any_output_is_refused() -> None:
    assert prepare([1], SamplingParams(), "coupled", LIMITS, prediction=[5] * 16).prediction == (5,) * 16
    with pytest.raises(RequestError, match="has 17 tokens, but must have at most the context limit of 16") as error:
        prepare([1], SamplingParams(), "coupled", LIMITS, prediction=[5] * 17)
    assert error.value.param == "prediction"


def test_end_ids() -> None:
    def end_ids(**params: Any) -> frozenset[int]:
        return prepare([1], SamplingParams(**params), "coupled", LIMITS).end_ids

    assert end_ids() == {2, 3}
    assert end_ids(stop_token_ids=(7,)) == {2, 3, 7}
    assert end_ids(ignore_eos=True, stop_token_ids=(7,)) == {7}
    # Asked for by name, an end-of-text id ends the output all the same.
    assert end_ids(ignore_eos=True, stop_token_ids=(3,)) == {3}


def test_f006_seeds() -> None:
    sampled = SamplingParams(temperature=1.0)
    drawn = {prepare([1], sampled, "coupled", LIMITS).seed for _ in range(20)}
    assert len(drawn) == 20
    assert all(seed is not None and 0 <= seed <= MAX_GENERATED_SEED for seed in drawn)
    request = prepare([1], SamplingParams(temperature=1.0, seed=2**64 - 1), "coupled", LIMITS)
    assert request.seed == request.noise_key == 2**64 - 1


@pytest.mark.parametrize("rule", [rule for rule in RULES if rule != "coupled"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_f006_a_seed_goes_only_with_coupled(rule: VerifyRule, temperature: float) -> None:
    with pytest.raises(
        RequestError, match=f"seed is 7, but verify rule '{rule}' .* goes only with rule 'coupled'"
    ) as error:
        prepare([1], SamplingParams(temperature=temperature, seed=7), rule, LIMITS)
    assert error.value.param == "seed"
    unseeded = SamplingParams(temperature=temperature)
    assert prepare([1], unseeded, rule, LIMITS).seed is None
    assert prepare([1], unseeded, rule, LIMITS, noise_key=5).noise_key == 5
    assert prepare([1], unseeded, "coupled", LIMITS, noise_key=5).seed == 5


def test_an_unknown_rule_is_refused() -> None:
    with pytest.raises(RequestError, match="must be one of: coupled, token, block, rrsw, traversal") as error:
        prepare([1], SamplingParams(), "typical", LIMITS)  # type: ignore[arg-type]
    assert error.value.param == "verify"
