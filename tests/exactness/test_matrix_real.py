"""The promise on the demo model: a cross-section of what the tiny models go through in full.

The scalar kernels need about a tenth of a second per token here. So they are the reference of short texts, and of long
ones it is plain decoding on one thread with the best instruction set, which the short ones have shown to be the same.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest

import forerun._native as _native
from forerun import LLM, SamplingParams
from forerun.drafters.spec import Speculation
from forerun.models.store import known_model, path_of
from tests.helpers.engines import Answer, Plan, right, tree, wrong_from
from tests.helpers.scripted import alternating, answer, complete, fork, hole, noise, open_llm, scripted, shifted

pytestmark = pytest.mark.real_model

ISAS = _native.available_isas()
MAX_MODEL_LEN = 512
VOCAB_SIZE = 49152
EOS_ID = 2
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

PLANS = {
    "itself": right(8),
    "noise": noise(8, VOCAB_SIZE),
    "right, then wrong": wrong_from(8, 3),
    "hole": hole(9, 2, 84),
    "end in the middle": hole(9, 4, EOS_ID),
    "too early": shifted(5, 1),
    "fork": fork(8, VOCAB_SIZE),
    "tree": tree(20, 5),
    "alternating": alternating(right(16), noise(3, VOCAB_SIZE), hole(8, 5, 28)),
}

Open = Callable[..., LLM]


@pytest.fixture(scope="module")
def open_demo() -> Open:
    """Opens the demo model, once it is known to be there: no test fetches it."""
    if not path_of(known_model("demo")).is_file():
        pytest.skip("the demo model is not in the cache; fetch it with: forerun pull demo")
    return lambda isa=ISAS[-1], **options: open_llm("demo", isa, **{"max_model_len": MAX_MODEL_LEN, **options})


@pytest.fixture(scope="module")
def plain(open_demo: Open) -> LLM:
    """The reference of long texts."""
    return open_demo(threads=1, chunk=64)


@pytest.fixture(scope="module")
def served(open_demo: Open) -> LLM:
    """What a user has who asks for nothing in particular, but on two threads."""
    return open_demo(threads=2)


def ids_of(llm: LLM, text: str) -> list[int]:
    return llm.tokenizer.encode(text, allow_special=True)


def script(expected: Answer, plan: Plan) -> Speculation:
    return scripted(expected.token_ids, plan, VOCAB_SIZE)


def test_every_instruction_set_thread_and_chunk(open_demo: Open) -> None:
    reference = open_demo("scalar", threads=1, chunk=64)
    assert reference.limits.vocab_size == VOCAB_SIZE
    prompt = ids_of(reference, CODE)[:12]
    greedy, sampled = SamplingParams(**GREEDY, max_tokens=12), SamplingParams(**EVERYTHING, max_tokens=9)
    plain, drawn = (answer(reference, prompt, params) for params in (greedy, sampled))
    slow = open_demo("scalar", threads=2, chunk=256)
    assert answer(slow, prompt, sampled, script(drawn, fork(8, VOCAB_SIZE))) == drawn
    for isa, (threads, chunk) in itertools.product(ISAS[1:], ((1, 256), (2, 1), (3, 7), (4, 64))):
        llm = open_demo(isa, threads=threads, chunk=chunk)
        assert answer(llm, prompt, greedy) == plain
        assert answer(llm, prompt, greedy, script(plain, right(16))) == plain
        assert answer(llm, prompt, sampled, "ngram:k=4,policy=fixed") == drawn
        assert answer(llm, prompt, sampled, script(drawn, fork(4, VOCAB_SIZE))) == drawn


@pytest.mark.parametrize(
    ("text", "law"), [(COPY, GREEDY), (PROSE, SAMPLED), (CODE, EVERYTHING)], ids=["copy", "prose", "code"]
)
def test_every_drafter(open_demo: Open, plain: LLM, text: str, law: dict[str, Any]) -> None:
    served = open_demo(threads=1)
    prompt = ids_of(plain, text)
    params = SamplingParams(**law, max_tokens=32)
    expected = answer(plain, prompt, params)
    for spec in ("off", "ngram:k=1,policy=fixed", "ngram:k=2", "ngram:k=8", "ngram:k=16,policy=fixed"):
        assert answer(served, prompt, params, spec) == expected, spec
    for name, plan in PLANS.items():
        assert answer(served, prompt, params, script(expected, plan)) == expected, name


@pytest.mark.parametrize("law", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_f011_the_model_drafting_for_itself_is_always_right(plain: LLM, served: LLM, law: dict[str, Any]) -> None:
    prompt = ids_of(plain, PROSE)
    params = SamplingParams(**law, max_tokens=40)
    expected = answer(plain, prompt, params)
    for k in (1, 4, 8):
        own = complete(served, prompt, params, script(expected, right(k)))
        assert Answer.of(own) == expected
        assert own.stats.accepted_tokens == own.stats.drafted_tokens > 0
        assert own.stats.target_passes == -(-39 // (k + 1))


@pytest.mark.parametrize(("quant", "kv"), [("auto", "f32"), ("q8", "f16"), ("q4", "f16"), ("f32", "f32")])
def test_every_conversion(open_demo: Open, quant: str, kv: str) -> None:
    reference = open_demo(ISAS[len(ISAS) // 2 - 1], quant=quant, kv=kv, threads=1, chunk=64)
    other = open_demo(quant=quant, kv=kv, threads=2, chunk=7)
    prompt = ids_of(reference, COPY)[:16]
    params = SamplingParams(**SAMPLED, max_tokens=12)
    expected = answer(reference, prompt, params)
    assert answer(other, prompt, params, "ngram:k=8,policy=fixed") == expected
    assert answer(other, prompt, params, script(expected, fork(5, VOCAB_SIZE))) == expected
    own = complete(other, prompt, params, script(expected, right(10)))
    assert Answer.of(own) == expected
    assert own.stats.accepted_tokens == own.stats.drafted_tokens == 10


def test_a_long_text_crosses_blocks_of_attention(plain: LLM, served: LLM) -> None:
    prompt = ids_of(plain, PROSE * 12)[:240]
    assert len(prompt) == 240
    params = SamplingParams(**SAMPLED, max_tokens=40)
    expected = answer(plain, prompt, params)
    assert answer(served, prompt, params, "ngram:k=16,policy=fixed") == expected
    for plan in (right(31), fork(16, VOCAB_SIZE)):
        assert answer(served, prompt, params, script(expected, plan)) == expected
