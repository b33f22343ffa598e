"""Field cases that need a trained model: the demo model on one thread, through the public API."""

from __future__ import annotations

from typing import Any

import pytest

from forerun import LLM, SamplingParams
from forerun.models.store import known_model, path_of
from tests.helpers.engines import right
from tests.helpers.scripted import complete, noise, scripted

pytestmark = pytest.mark.real_model

VOCAB_SIZE = 49152


@pytest.fixture(scope="module")
def llm() -> LLM:
    """The demo model, once it is known to be there: no test fetches it."""
    if not path_of(known_model("demo")).is_file():
        pytest.skip("the demo model is not in the cache; fetch it with: forerun pull demo")
    return LLM("demo", threads=1, max_model_len=512)


def test_f004_penalties_differ_and_count_no_rejected_draft(llm: LLM) -> None:
    prompt = "Say tree again and again: tree"
    laws: dict[str, dict[str, Any]] = {
        "none": {},
        **{f"frequency {value}": {"frequency_penalty": value} for value in (-2.0, 2.0)},
        **{f"presence {value}": {"presence_penalty": value} for value in (-2.0, 2.0)},
        "repetition": {"repetition_penalty": 1.3},
    }
    texts = {}
    for name, law in laws.items():
        params = SamplingParams(max_tokens=32, ignore_eos=True, logprobs=1, **law)
        plain = complete(llm, prompt, params)
        for plan in (noise(4, VOCAB_SIZE), right(8)):
            completion = complete(llm, prompt, params, scripted(plain.token_ids, plan, VOCAB_SIZE))
            assert completion.token_ids == plain.token_ids
            assert completion.logprobs == plain.logprobs
        texts[name] = plain.text
    # Encouraging what is said anyway changes nothing; discouraging it does, each in its own way.
    assert len({texts[name] for name in ("none", "frequency 2.0", "presence 2.0", "repetition")}) == 4
    assert texts["frequency -2.0"].count("tree") >= texts["none"].count("tree") > texts["frequency 2.0"].count("tree")


@pytest.mark.parametrize("spec", ["off", "ngram:k=8,policy=fixed"])
def test_f027_emoji_and_other_scripts_are_streamed_whole(llm: LLM, spec: str) -> None:
    line = "🎉 café 日本語 🇩🇪 한국어 👩‍🚀 naïve 🎉 café 日本語 🇩🇪 한국어 👩‍🚀 naïve 🎉 café"
    prompt = llm.encode(line)
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    shown = [event.text for event in llm.stream(prompt, params, speculation=spec)]
    completion = complete(llm, prompt, params)
    assert "".join(shown) == completion.text
    assert "日本語" in completion.text
    assert completion.text.rstrip("\N{REPLACEMENT CHARACTER}").count("\N{REPLACEMENT CHARACTER}") == 0
    assert all("\N{REPLACEMENT CHARACTER}" not in piece for piece in shown[:-1])
