"""The promise on real models: a cross-section of what the tiny models go through in full.

The demo model is tested wherever it is in the cache. The larger ones are asked for by FORERUN_TEST_MODELS, names with
commas or `all`: they take minutes.

The scalar kernels need from a tenth of a second to two per token here. So they are the reference of short texts, and of
long ones it is plain decoding on one thread with the best instruction set, which the short ones have shown to be the
same.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

import forerun._native as _native
from forerun import LLM, SamplingParams
from forerun.drafters.spec import Speculation
from forerun.models.store import KNOWN_MODELS, known_model, path_of
from tests.helpers.engines import Answer, Plan, right, tree, wrong_from
from tests.helpers.scripted import alternating, answer, complete, fork, hole, noise, open_llm, scripted, shifted

pytestmark = pytest.mark.real_model

ISAS = _native.available_isas()
MACHINES = ((1, 256), (2, 1), (3, 7), (4, 64))  # threads and chunk
MAX_MODEL_LEN = 640
DEMO = "demo"
ASKED_FOR = os.environ.get("FORERUN_TEST_MODELS", "")
LARGER = [name for name in KNOWN_MODELS if name != DEMO] if ASKED_FOR == "all" else ASKED_FOR.split(",")
COPY = (
    "<|im_start|>user\nSay it again: the boats leave at six, the boats leave at seven.<|im_end|>\n"
    "<|im_start|>assistant\n"
)
PROSE = "The harbour office opens at seven, but the boats have usually left by then. Marta unlocks the door,"
CODE = "def area(width, height):\n    return width * height\n\n\ndef volume(width, height, depth):\n    return"

GREEDY: dict[str, Any] = {"logprobs": 3, "ignore_eos": True}
SAMPLED: dict[str, Any] = GREEDY | {"temperature": 0.8, "seed": 7}
EVERYTHING: dict[str, Any] = {
    "temperature": 0.9, "seed": 3, "top_k": 100, "top_p": 0.95, "min_p": 0.01, "repetition_penalty": 1.1,
    "presence_penalty": 0.2, "frequency_penalty": 0.1, "logit_bias": {28: 1.0}, "min_tokens": 5, "stop": ("zzz",),
    "stop_token_ids": (1000,), "logprobs": 20,
}  # fmt: skip
# Each parameter of a request by itself; what depends on the model is in `laws`.
PARAMS: dict[str, dict[str, Any]] = {
    "greedy": GREEDY,
    "sampled": SAMPLED,
    "temperature": SAMPLED | {"temperature": 1.7},
    "top_k": SAMPLED | {"top_k": 5},
    "top_p": SAMPLED | {"top_p": 0.7},
    "min_p": SAMPLED | {"min_p": 0.1},
    "repetition": GREEDY | {"repetition_penalty": 1.4},
    "repetition sampled": SAMPLED | {"repetition_penalty": 0.9},
    "presence": GREEDY | {"presence_penalty": 3.0},
    "presence sampled": SAMPLED | {"presence_penalty": -2.0},
    "frequency": GREEDY | {"frequency_penalty": 2.0},
    "frequency sampled": SAMPLED | {"frequency_penalty": -1.0},
    "logit_bias": GREEDY | {"logit_bias": {284: 6.0, 1000: 4.0}},
    "logit_bias sampled": SAMPLED | {"logit_bias": {284: 6.0, 1000: -100.0}},
    "no logprobs": SAMPLED | {"logprobs": None},
    "most logprobs": SAMPLED | {"logprobs": 20},
    "seed": SAMPLED | {"seed": 2**64 - 1, "logprobs": 0},
    "everything": EVERYTHING,
}
OF_THE_MODEL = ("min_tokens", "min_tokens sampled", "end of text", "stop", "stop_token_ids")

Open = Callable[..., LLM]


@dataclass(frozen=True)
class Size:
    """How much of a text a model gets.

    Attributes:
        prompt, tokens: of what the scalar kernels compute too.
        long_prompt: beyond a block of attention, and close to the end of a sliding window.
    """

    prompt: int
    tokens: int
    long_prompt: int


SIZES = {
    DEMO: Size(12, 12, 240),
    "gemma3-270m": Size(12, 8, 500),
    "qwen-coder-0.5b": Size(8, 8, 240),
    "qwen-coder-1.5b": Size(6, 6, 240),
}


@pytest.fixture(scope="module", params=[DEMO, *filter(None, LARGER)])
def model(request: pytest.FixtureRequest) -> str:
    """A model that is in the cache; no test fetches one."""
    name: str = request.param
    if not path_of(known_model(name)).is_file():
        pytest.skip(f"{name} is not in the cache; fetch it with: forerun pull {name}")
    return name


@pytest.fixture(scope="module")
def open_model(model: str) -> Open:
    return lambda isa=ISAS[-1], **options: open_llm(model, isa, **{"max_model_len": MAX_MODEL_LEN, **options})


@pytest.fixture(scope="module")
def plain(open_model: Open) -> LLM:
    """The reference of long texts."""
    return open_model(threads=1, chunk=64)


@pytest.fixture(scope="module")
def served(open_model: Open) -> LLM:
    """What a user has who asks for nothing in particular, but on two threads."""
    return open_model(threads=2)


@pytest.fixture(scope="module")
def other(open_model: Open) -> LLM:
    """Another instruction set, and in all else as different as it can be."""
    return open_model(ISAS[max(len(ISAS) - 2, 0)], threads=3, chunk=7)


def ids_of(llm: LLM, text: str) -> list[int]:
    return llm.tokenizer.encode(text, allow_special=True)


def script(llm: LLM, expected: Answer, plan: Plan) -> Speculation:
    return scripted(expected.token_ids, plan, llm.limits.vocab_size)


def plans(llm: LLM) -> dict[str, Plan]:
    vocab_size, eos_id = llm.limits.vocab_size, min(llm.limits.eos_ids)
    return {
        "itself": right(8),
        "noise": noise(8, vocab_size),
        "right, then wrong": wrong_from(8, 3),
        "hole": hole(9, 2, 84),
        "end in the middle": hole(9, 4, eos_id),
        "too early": shifted(5, 1),
        "fork": fork(8, vocab_size),
        "tree": tree(20, 5),
        "alternating": alternating(right(16), noise(3, vocab_size), hole(8, 5, 28)),
    }


def laws(llm: LLM, prompt: list[int], max_tokens: int) -> dict[str, dict[str, Any]]:
    """The parameters that end an output, made so that they do."""
    eos_id = min(llm.limits.eos_ids)
    greedy = answer(llm, prompt, SamplingParams(**GREEDY, max_tokens=max_tokens))
    middle = len(greedy.text) // 2
    wants_end = {"logprobs": 3, "logit_bias": {eos_id: 100.0}}
    return {
        "min_tokens": wants_end | {"min_tokens": 5},
        "min_tokens sampled": wants_end | {"min_tokens": 5, "temperature": 0.8, "seed": 7},
        "end of text": wants_end,
        "stop": GREEDY | {"stop": (greedy.text[middle : middle + 2],)},
        "stop_token_ids": GREEDY | {"stop_token_ids": (greedy.token_ids[max_tokens // 2],)},
    }


@pytest.mark.skipif(not ASKED_FOR, reason="larger models take minutes: FORERUN_TEST_MODELS names them, or says all")
def test_larger_models_are_known_by_name() -> None:
    for name in LARGER:
        assert name in SIZES


def test_every_instruction_set_thread_and_chunk(model: str, open_model: Open) -> None:
    size = SIZES[model]
    reference = open_model("scalar", threads=1, chunk=64)
    prompt = ids_of(reference, CODE)[: size.prompt]
    greedy, sampled = (SamplingParams(**law, max_tokens=size.tokens) for law in (GREEDY, EVERYTHING))
    plain, drawn = (answer(reference, prompt, params) for params in (greedy, sampled))
    del reference
    slow = open_model("scalar", threads=2, chunk=5)
    assert answer(slow, prompt, sampled, script(slow, drawn, fork(8, slow.limits.vocab_size))) == drawn
    del slow
    for isa, (threads, chunk) in itertools.product(ISAS[1:], MACHINES):
        llm = open_model(isa, threads=threads, chunk=chunk)
        assert answer(llm, prompt, greedy) == plain
        assert answer(llm, prompt, greedy, script(llm, plain, right(16))) == plain
        assert answer(llm, prompt, sampled, "ngram:k=4,policy=fixed") == drawn
        assert answer(llm, prompt, sampled, script(llm, drawn, fork(4, llm.limits.vocab_size))) == drawn


@pytest.mark.parametrize(
    ("text", "law"), [(COPY, GREEDY), (PROSE, SAMPLED), (CODE, EVERYTHING)], ids=["copy", "prose", "code"]
)
def test_every_drafter(plain: LLM, served: LLM, text: str, law: dict[str, Any]) -> None:
    prompt = ids_of(plain, text)
    params = SamplingParams(**law, max_tokens=32)
    expected = answer(plain, prompt, params)
    for spec in ("off", "ngram:k=1,policy=fixed", "ngram:k=2", "ngram:k=8", "ngram:k=16,policy=fixed"):
        assert answer(served, prompt, params, spec) == expected, spec
    for spec in ("self:k=4,policy=fixed", "self:layers=0-4.8-17,k=3,policy=fixed", "self:layers=6+ngram"):
        assert answer(served, prompt, params, spec) == expected, spec
    for name, plan in plans(plain).items():
        assert answer(served, prompt, params, script(plain, expected, plan)) == expected, name


@pytest.mark.parametrize("name", [*PARAMS, *OF_THE_MODEL])
def test_every_parameter(plain: LLM, served: LLM, other: LLM, name: str) -> None:
    prompt = ids_of(plain, PROSE)
    law = PARAMS[name] if name in PARAMS else laws(plain, prompt, 16)[name]
    params = SamplingParams(**law, max_tokens=16)
    expected = answer(plain, prompt, params)
    if name in OF_THE_MODEL:
        assert expected.finish_reason == "stop"
        assert len(expected.token_ids) < 16
    for llm in (served, other):
        for plan in (right(5), hole(8, 2, 84), fork(4, plain.limits.vocab_size), tree(12, 3)):
            assert answer(llm, prompt, params, script(plain, expected, plan)) == expected
        for spec in ("off", "ngram:k=8,policy=fixed"):
            assert answer(llm, prompt, params, spec) == expected, spec


@pytest.mark.parametrize("law", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_f011_the_model_drafting_for_itself_is_always_right(plain: LLM, served: LLM, law: dict[str, Any]) -> None:
    prompt = ids_of(plain, PROSE)
    params = SamplingParams(**law, max_tokens=40)
    expected = answer(plain, prompt, params)
    for k in (1, 4, 8):
        own = complete(served, prompt, params, script(plain, expected, right(k)))
        assert Answer.of(own) == expected
        assert own.stats.accepted_tokens == own.stats.drafted_tokens > 0
        assert own.stats.target_passes == -(-39 // (k + 1))


@pytest.mark.parametrize(("quant", "kv"), [("auto", "f32"), ("q4", "f16"), ("f32", "f32")])
def test_every_conversion(model: str, open_model: Open, quant: str, kv: str) -> None:
    if model != DEMO and quant != "auto":
        pytest.skip("conversions are the demo model's to show; this one needs gigabytes more for them")
    reference = open_model(ISAS[len(ISAS) // 2 - 1], quant=quant, kv=kv, threads=1, chunk=64)
    other = open_model(quant=quant, kv=kv, threads=2, chunk=7)
    prompt = ids_of(reference, COPY)[:16]
    params = SamplingParams(**SAMPLED, max_tokens=12)
    expected = answer(reference, prompt, params)
    assert answer(other, prompt, params, "ngram:k=8,policy=fixed") == expected
    assert answer(other, prompt, params, script(other, expected, fork(5, other.limits.vocab_size))) == expected
    own = complete(other, prompt, params, script(other, expected, right(10)))
    assert Answer.of(own) == expected
    assert own.stats.accepted_tokens == own.stats.drafted_tokens == 10


def test_a_long_text_crosses_blocks_of_attention(model: str, plain: LLM, served: LLM) -> None:
    num_prompt = SIZES[model].long_prompt
    prompt = ids_of(plain, PROSE * 30)[:num_prompt]
    assert len(prompt) == num_prompt
    params = SamplingParams(**SAMPLED, max_tokens=40)
    expected = answer(plain, prompt, params)
    assert answer(served, prompt, params, "ngram:k=16,policy=fixed") == expected
    for plan in (right(31), fork(16, plain.limits.vocab_size)):
        assert answer(served, prompt, params, script(plain, expected, plan)) == expected
