"""What the KV cache keeps of earlier texts changes no bit of what comes: warm answers equal cold ones with ==."""

from __future__ import annotations

import random
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from forerun import LLM, Completion, SamplingParams
from forerun.types import PAGE_TOKENS
from tests.helpers.gguf_files import write_tiny_llama

MAX_LEN = 256
LAWS: tuple[dict[str, Any], ...] = (
    {"logprobs": 2},
    {"logprobs": 2, "temperature": 0.9, "seed": 5},
    {"temperature": 1.0, "seed": 6, "top_k": 20, "repetition_penalty": 1.2},
)
SPECS = ("off", "auto", "ngram:policy=fixed,k=5", "suffix:policy=fixed,k=6", "self:layers=1,policy=fixed,k=3")


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("models") / "tiny.gguf", vocab_size=300, fmt="q8_0")


@pytest.fixture(scope="module")
def cold(path: Path) -> LLM:
    return LLM(path, threads=1, max_model_len=MAX_LEN, prefix_cache=False)


def content(completion: Completion) -> dict[str, Any]:
    return {key: value for key, value in asdict(completion).items() if key not in ("stats", "seed")}


@pytest.mark.parametrize("prompt_len", range(17, 17 + PAGE_TOKENS))
def test_a_text_goes_on_where_the_cache_ends(path: Path, cold: LLM, prompt_len: int) -> None:
    """Whatever the page's slot that the last token would take: no pass has seen it, so its page is not known."""
    llm = LLM(path, threads=1, max_model_len=MAX_LEN)
    params = SamplingParams(max_tokens=12, ignore_eos=True, logprobs=1)
    ids = [5 + 7 * i % 200 for i in range(prompt_len)]
    num_known = 0
    for _ in range(3):
        (completion,) = llm.generate([ids], params)
        assert completion.stats.cached_tokens == num_known // PAGE_TOKENS * PAGE_TOKENS
        assert content(completion) == content(cold.generate([ids], params)[0])
        num_known = len(ids) + len(completion.token_ids) - 1
        ids = [*ids, *completion.token_ids, 7, 8, 9]


@pytest.mark.parametrize("seed", range(3))
def test_warm_answers_equal_cold_ones(path: Path, cold: LLM, seed: int) -> None:
    """Texts that begin alike in a cache too small for all of them, some abandoned in the middle."""
    rng = random.Random(seed)
    llm = LLM(path, threads=rng.choice([1, 2]), chunk=rng.choice([3, 16, 64]), max_model_len=MAX_LEN)
    texts = [[rng.randrange(5, 260) for _ in range(70)] for _ in range(3)]
    num_cached = 0
    for _ in range(40):
        base = rng.choice(texts)
        prompt = base[: rng.randrange(1, len(base) + 1)] + [rng.randrange(5, 260) for _ in range(rng.randrange(3))]
        params = SamplingParams(max_tokens=rng.randrange(1, 40), ignore_eos=True, **rng.choice(LAWS))
        speculation = rng.choice(SPECS)
        if rng.random() < 0.2:
            events = llm.stream(prompt, params, speculation=speculation)
            for _ in range(rng.randrange(4)):
                next(events, None)
            events.close()  # type: ignore[attr-defined]
        else:
            (completion,) = llm.generate([prompt], params, speculation=speculation)
            assert content(completion) == content(cold.generate([prompt], params)[0])
            assert completion.stats.cached_tokens < len(prompt)
            num_cached += completion.stats.cached_tokens
            if rng.random() < 0.3:
                texts[rng.randrange(3)] = [*prompt, *completion.token_ids][:100]
        llm.engine.pages.check_integrity()
        assert llm.engine.pages.num_free == llm.engine.pages.num_pages
    assert num_cached > 150


def test_nothing_is_kept_where_that_was_asked_for(cold: LLM) -> None:
    params = SamplingParams(max_tokens=4, ignore_eos=True)
    for _ in range(2):
        assert cold.generate([list(range(5, 60))], params)[0].stats.cached_tokens == 0
    assert cold.engine.pages.num_kept == 0
