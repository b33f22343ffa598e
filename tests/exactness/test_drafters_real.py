"""A real target with real models that draft for it: one of the same vocabulary, one of another.

Asked for by FORERUN_TEST_MODELS, as the larger models of test_matrix_real.py are: it takes minutes.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pytest

from forerun import LLM, Completion, SamplingParams
from forerun.models.store import known_model, path_of
from tests.exactness.test_matrix_real import LARGER

TARGET, SAME_VOCABULARY, OTHER_VOCABULARY = "qwen-coder-1.5b", "qwen-coder-0.5b", "demo"

pytestmark = [
    pytest.mark.real_model,
    pytest.mark.skipif(TARGET not in LARGER, reason=f"takes minutes; ask for it with FORERUN_TEST_MODELS={TARGET}"),
]

QUESTIONS = (
    "Write a Python function that merges two sorted lists.",
    "Name the planets of the solar system in order, one a line.",
)
LAWS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"temperature": 0.8, "seed": 7},
    "everything": {"temperature": 1.1, "seed": 3, "top_k": 50, "top_p": 0.9, "repetition_penalty": 1.1},
}
SPECS = (
    f"draft:model={SAME_VOCABULARY},policy=fixed,k=4",
    f"draft:model={SAME_VOCABULARY}+suffix",
    f"foreign:model={OTHER_VOCABULARY},policy=fixed,k=4",
)


@pytest.fixture(scope="module")
def llm() -> LLM:
    for name in (TARGET, SAME_VOCABULARY, OTHER_VOCABULARY):
        if not path_of(known_model(name)).is_file():
            pytest.skip(f"{name} is not in the cache; fetch it with: forerun pull {name}")
    return LLM(TARGET, max_model_len=512)


def answers(llm: LLM, law: str, speculation: str) -> list[Completion]:
    params = SamplingParams(max_tokens=48, logprobs=2, **LAWS[law])
    return [
        llm.chat([{"role": "user", "content": question}], params, speculation=speculation) for question in QUESTIONS
    ]


def content(completion: Completion) -> dict[str, Any]:
    """All but times and counts, and the seed, which is drawn anew where none is given."""
    return {key: value for key, value in asdict(completion).items() if key not in ("stats", "seed")}


@pytest.fixture(scope="module")
def plain(llm: LLM) -> dict[str, list[Completion]]:
    return {law: answers(llm, law, "off") for law in LAWS}


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("speculation", SPECS)
def test_the_tokens_are_the_targets_own(
    llm: LLM, plain: dict[str, list[Completion]], speculation: str, law: str
) -> None:
    drafted = answers(llm, law, speculation)
    assert [content(answer) for answer in drafted] == [content(answer) for answer in plain[law]]
    assert sum(answer.stats.drafted_tokens for answer in drafted) > 0
    if law == "greedy":
        assert sum(answer.stats.accepted_tokens for answer in drafted) > 0
