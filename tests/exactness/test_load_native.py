"""Requests that run together on the native backend give each the bits that it gives alone, without a cache.

The tiny model goes through everything. The demo model has a smaller load by default; with FORERUN_TEST_LOAD=full it is
200 requests of up to 3,000 tokens for each seed, which takes about ten minutes.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from forerun import LLM, Completion, SamplingParams
from forerun.engine.jobs import Job
from forerun.models.store import known_model, path_of
from forerun.models.structured import Structured
from tests.helpers.gguf_files import write_tiny_llama
from tests.helpers.load import Served, serve

IS_FULL = os.environ.get("FORERUN_TEST_LOAD") == "full"
LAWS: tuple[dict[str, Any], ...] = (
    {"logprobs": 2},
    {},
    {"temperature": 0.9, "logprobs": 0},
    {"temperature": 1.2, "top_k": 40, "min_p": 0.01},
    {"temperature": 0.7, "top_p": 0.9, "repetition_penalty": 1.2, "logprobs": 3},
    {"presence_penalty": 0.5, "frequency_penalty": 0.3},
    {"temperature": 1.0, "logit_bias": {40: 2.0, 50: -3.0}},
    {"temperature": 0.8, "stop": ("e", "the ")},
    {"temperature": 1.1, "stop_token_ids": (30,), "min_tokens": 3},
    {"prompt_logprobs": 1},
)


def content(completion: Completion) -> dict[str, Any]:
    return {key: value for key, value in asdict(completion).items() if key != "stats"}


FORMS = (
    Structured.json_schema(
        {
            "type": "object",
            "properties": {
                "name": {"type": "string", "maxLength": 12},
                "sizes": {"type": "array", "items": {"type": "integer"}, "maxItems": 4},
            },
            "required": ["name", "sizes"],
            "additionalProperties": False,
        }
    ),
    Structured.json_object(compact=True),
    Structured.regex(r"[a-z]{2,9}( [a-z]{2,9}){0,6}\."),
    Structured.choice(["yes", "no", "it depends on the harbour"]),
)
SPECS = (
    "off", "auto", "ngram:policy=fixed,k=5", "suffix", "self:layers=1,k=3", "self:layers=1,policy=fixed,k=3",
    "lookahead+ngram",
)  # fmt: skip


class Load:
    """Random requests for a model, and what each gives alone.

    Args:
        llm: serves them.
        alone: the same model, plain, one at a time, without a cache.
        rng: decides.
        text_ids: makes a text of so many tokens.
        lengths: of prompts.
        outputs: lengths of outputs at most.
        forms: what some outputs must look like.
    """

    def __init__(
        self,
        llm: LLM,
        alone: LLM,
        rng: random.Random,
        text_ids: Callable[[int], list[int]],
        specs: Sequence[str],
        lengths: Sequence[int],
        outputs: Sequence[int],
        forms: Sequence[Structured] = (),
    ) -> None:
        self.llm, self.alone, self.rng = llm, alone, rng
        self._text_ids, self._specs, self._lengths, self._outputs = text_ids, specs, lengths, outputs
        self._forms = forms
        self._shared = [text_ids(max(lengths) // 3 + 40) for _ in range(2)]

    def job(self) -> Job:
        rng = self.rng
        prompt = self._text_ids(rng.choice(self._lengths))
        if rng.random() < 0.4:
            prompt = (rng.choice(self._shared) + prompt)[: max(self._lengths)]
        law = rng.choice(LAWS)
        form = rng.choice(self._forms) if self._forms and rng.random() < 0.2 else None
        params = SamplingParams(
            max_tokens=max(rng.choice(self._outputs), law.get("min_tokens", 1)),
            seed=rng.randrange(2**40),
            ignore_eos=form is None and rng.random() < 0.5,
            **law,
        )
        return self.llm.job(
            prompt,
            params,
            speculation=rng.choice(self._specs),
            k=rng.choice((None, None, 3)),
            priority=rng.choice((0, 0, 1)),
            grammar=form,
        )

    def run(self, num_jobs: int, cancelled: float) -> list[Served]:
        jobs = [self.job() for _ in range(num_jobs)]
        engine = self.llm.engine
        served = serve(engine, jobs, self.rng, arrival=0.2, cancelled=cancelled, check=engine.check_integrity)
        for job, one in zip(jobs, served, strict=True):
            assert one.error is None
            request = job.request
            form = request.grammar and request.grammar.wanted
            (expected,) = self.alone.generate([request.prompt_token_ids], request.params, grammar=form)
            if one.is_cancelled:
                assert one.token_ids == expected.token_ids[: len(one.token_ids)]
                continue
            assert one.completion is not None
            assert content(one.completion) == content(expected)
            assert "".join(event.text for event in one.events) == expected.text
        load = engine.load
        assert (load.num_running, load.num_waiting, load.num_used_pages) == (0, 0, 0)
        return served


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("models") / "tiny.gguf", vocab_size=300, fmt="q8_0")


@pytest.fixture(scope="module")
def alone(path: Path) -> LLM:
    return LLM(path, threads=1, max_model_len=256, prefix_cache=False)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    "engine",
    [
        {"threads": 1, "kv_tokens": 256, "max_running": 16},
        {"threads": 2, "kv_tokens": 256, "chunk": 7, "max_running": 5},
        {"threads": 2, "kv_tokens": 2048, "max_running": 32},
    ],
    ids=["few pages", "few at once", "many"],
)
def test_a_tiny_model_under_any_load(path: Path, alone: LLM, engine: dict[str, Any], seed: int) -> None:
    rng = random.Random(seed)
    llm = LLM(path, max_model_len=256, **engine)
    specs = [*SPECS, f"draft:model={path},k=3", f"draft:model={path},k=2,width=2,policy=fixed"]
    load = Load(
        llm,
        alone,
        rng,
        lambda n: [rng.randrange(5, 260) for _ in range(n)],
        specs,
        lengths=(1, 5, 16, 17, 60, 150),
        outputs=(1, 3, 20, 80),
    )
    served = load.run(40, cancelled=0.03)
    if engine["max_running"] == 16:
        assert llm.engine.load.num_preemptions > 0
    if engine["max_running"] == 32:
        assert any(one.completion is not None and one.completion.stats.cached_tokens for one in served)
    assert sum(one.completion.stats.accepted_tokens for one in served if one.completion is not None) > 20


@pytest.mark.real_model
@pytest.mark.parametrize("seed", range(3 if IS_FULL else 1))
def test_the_demo_model_under_load(seed: int) -> None:
    demo = path_of(known_model("demo"))
    if not demo.exists():
        pytest.skip("the demo model is not in the cache; `forerun pull demo` gets it")
    rng = random.Random(seed)
    length, kv_tokens = (4096, 4096) if IS_FULL else (640, 640)
    llm = LLM("demo", max_model_len=length, kv_tokens=kv_tokens, max_running=16)
    alone = LLM("demo", max_model_len=length, prefix_cache=False)
    words = llm.tokenizer.encode(Path(__file__).read_text())

    def text_ids(n: int) -> list[int]:
        start = rng.randrange(len(words))
        return (words[start:] + words * (n // len(words) + 1))[:n]

    lengths = (1, 20, 100, 300, 1000, 3000) if IS_FULL else (1, 20, 100, 300)
    specs = ("off", "auto", "auto", "ngram", "suffix", "lookahead", "recycling")
    load = Load(llm, alone, rng, text_ids, specs, lengths, (1, 10, 60, 150) if IS_FULL else (1, 10, 40), FORMS)
    served = load.run(200 if IS_FULL else 24, cancelled=0.01)
    assert any(one.completion is not None and one.completion.stats.cached_tokens for one in served)
    if IS_FULL:
        assert llm.engine.load.num_preemptions > 0
