"""The promise on small random models: equal ids and log-probabilities, bit for bit, whatever computes them how.

The reference decodes plainly with the scalar kernels on one thread and the prompt in chunks of 64. Everything else must
give what it gives: every instruction set of this machine, threads, chunks, drafters and lengths of drafts.
"""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from typing import Any

import pytest

import forerun._native as _native
from forerun import LLM, SamplingParams
from forerun.drafters.spec import Speculation
from forerun.types import MAX_DRAFT_NODES
from tests.helpers.engines import Answer, right, tree, wrong_from
from tests.helpers.gguf_files import EOS_ID, write_tiny_llama
from tests.helpers.scripted import (
    alternating,
    answer,
    complete,
    fork,
    hole,
    noise,
    open_llm,
    scripted,
    shifted,
    stuttering,
)

ISAS = _native.available_isas()
BEST_ISA = ISAS[-1]
THREADS = (1, 2, 3, 4)
CHUNKS = (1, 7, 64, 256)
DEPTHS = (1, 2, 4, 8, 16)
VOCAB_SIZE = 500  # no multiple of a tile
SEED = 12345
PROMPT = "the cat and the dog and the cat and the"

GREEDY: dict[str, Any] = {"ignore_eos": True}
SAMPLED: dict[str, Any] = {"temperature": 0.9, "seed": SEED, "ignore_eos": True}
PARAMS: dict[str, dict[str, Any]] = {
    "greedy": GREEDY,
    "sampled": SAMPLED,
    "temperature": SAMPLED | {"temperature": 1.7},
    "top_k": SAMPLED | {"top_k": 5},
    "top_p": SAMPLED | {"top_p": 0.7},
    "min_p": SAMPLED | {"min_p": 0.2},
    "repetition": GREEDY | {"repetition_penalty": 1.4},
    "repetition sampled": SAMPLED | {"repetition_penalty": 0.8},
    "presence": GREEDY | {"presence_penalty": 1.5},
    "presence sampled": SAMPLED | {"presence_penalty": -2.0},
    "frequency": GREEDY | {"frequency_penalty": 0.5},
    "frequency sampled": SAMPLED | {"frequency_penalty": -1.0},
    "logit_bias": GREEDY | {"logit_bias": {84: -100.0, 120: 3.0}, "frequency_penalty": 0.2},
    "logit_bias sampled": SAMPLED | {"logit_bias": {84: -100.0, 120: 4.0}},
    "min_tokens": {"logit_bias": {EOS_ID: 100.0}, "min_tokens": 17},
    "min_tokens sampled": {"temperature": 1.0, "seed": SEED, "logit_bias": {EOS_ID: 6.0}, "min_tokens": 9},
    "ignore_eos": SAMPLED | {"logit_bias": {EOS_ID: 6.0}},
    "end of text": {"temperature": 1.0, "seed": SEED, "logit_bias": {EOS_ID: 3.5}},
    "stop": {"temperature": 1.5, "seed": SEED, "stop": ("h\x17", "\x17$", "cccq")},
    "stop_token_ids": {"temperature": 1.0, "seed": SEED, "stop_token_ids": tuple(range(90, 110))},
    "no logprobs": SAMPLED | {"logprobs": None},
    "most logprobs": SAMPLED | {"logprobs": 20},
    "seed": SAMPLED | {"seed": 2**64 - 1, "logprobs": 0},
    "everything": {
        "temperature": 0.8, "seed": SEED, "top_k": 60, "top_p": 0.95, "min_p": 0.01, "repetition_penalty": 1.1,
        "presence_penalty": 0.3, "frequency_penalty": 0.2, "logit_bias": {84: -2.0, EOS_ID: 4.0}, "min_tokens": 9,
        "stop": ("zzzz", "\N{REPLACEMENT CHARACTER}q"), "stop_token_ids": (33,),
    },
}  # fmt: skip

PLANS = {
    **{f"itself {k}": right(k) for k in (*DEPTHS, MAX_DRAFT_NODES - 1)},
    **{f"noise {k}": noise(k, VOCAB_SIZE) for k in DEPTHS},
    "right, then wrong": wrong_from(8, 3),
    "hole": hole(9, 2, 84),
    "end in the middle": hole(9, 4, EOS_ID),
    "too early": shifted(6, 1),
    "stuttering": stuttering(5),
    "alternating": alternating(right(3), noise(7, VOCAB_SIZE), hole(16, 7, 84), fork(4, VOCAB_SIZE)),
    "tree": tree(20, 4),
    "fork": fork(8, VOCAB_SIZE),
}
LOOKUP = [
    *(f"ngram:k={k},policy={policy}" for k in DEPTHS for policy in ("adaptive", "fixed")),
    *("suffix", "suffix:k=16,policy=fixed", "suffix:k=63,min_prob=0.001,policy=fixed", "suffix:k=4,tree=off"),
]

OWN_LAYERS = [
    "self:layers=1,k=4,policy=fixed",
    "self:layers=0-0.2-2,k=3,width=2,policy=fixed",
    "self:layers=3,k=8",
    "self",
]


def params_of(name: str, **changes: Any) -> SamplingParams:
    return SamplingParams(**({"max_tokens": 40, "logprobs": 3} | PARAMS[name] | changes))


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(
        tmp_path_factory.mktemp("matrix") / "tiny.gguf", fmt="q4_0", head_fmt="q8_0", num_layers=3, hidden_size=128,
        intermediate_size=160, num_heads=4, num_kv_heads=2, vocab_size=VOCAB_SIZE, context_length=1024, tied=False,
    )  # fmt: skip


@pytest.fixture(scope="module")
def reference(path: Path) -> LLM:
    return open_llm(path, "scalar", threads=1, chunk=64)


@pytest.fixture(scope="module")
def machines(path: Path) -> list[LLM]:
    """Every instruction set, each with another chunk."""
    return [open_llm(path, isa, threads=1, chunk=CHUNKS[i % 4]) for i, isa in enumerate(reversed(ISAS))]


def speculations(expected: Answer, names: Any = PLANS) -> list[Speculation]:
    return [scripted(expected.token_ids, PLANS[name], VOCAB_SIZE) for name in names]


@pytest.mark.parametrize("name", PARAMS)
def test_every_parameter_with_every_drafter(reference: LLM, machines: list[LLM], name: str) -> None:
    params = params_of(name)
    expected = answer(reference, PROMPT, params)
    # Each drafter meets each machine with one parameter or another.
    turns = itertools.cycle(machines[list(PARAMS).index(name) % len(machines) :] + machines)
    for speculation in ("off", *LOOKUP, *OWN_LAYERS, *speculations(expected)):
        assert answer(next(turns), PROMPT, params, speculation) == expected, str(speculation)[:80]


def test_the_parameters_do_what_their_names_say(reference: LLM) -> None:
    """Or the matrix would compare one and the same output again and again."""
    plain = {name: answer(reference, PROMPT, params_of(name)) for name in PARAMS}
    neutral = {"no logprobs": "sampled", "most logprobs": "sampled"}
    for name, other in neutral.items():
        assert plain[name].token_ids == plain[other].token_ids
    distinct = [expected.token_ids for name, expected in plain.items() if name not in neutral]
    assert len(set(distinct)) == len(distinct)
    stopped = {name for name, expected in plain.items() if expected.finish_reason == "stop"}
    assert stopped == {
        "min_tokens", "min_tokens sampled", "end of text", "stop", "stop_token_ids", "everything"
    }  # fmt: skip
    assert all(8 < len(plain[name].token_ids) < 40 for name in stopped)
    assert EOS_ID in plain["ignore_eos"].token_ids[:10]


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("threads", THREADS)
def test_every_instruction_set_with_every_thread_and_chunk(path: Path, reference: LLM, isa: str, threads: int) -> None:
    for chunk in CHUNKS:
        llm = open_llm(path, isa, threads=threads, chunk=chunk)
        for name in ("greedy", "everything"):
            params = params_of(name, max_tokens=24)
            expected = answer(reference, PROMPT, params)
            others = speculations(expected, ["itself 16", "alternating"])
            for speculation in ("off", "ngram:k=8,policy=fixed", *others):
                assert answer(llm, PROMPT, params, speculation) == expected, (chunk, name, str(speculation)[:80])


@pytest.mark.parametrize("num_prompt", [1, 2, 15, 16, 17, 63, 64, 65, 255, 256, 257])
def test_f002_first_tokens_after_prompts_of_any_length(reference: LLM, machines: list[LLM], num_prompt: int) -> None:
    rng = random.Random(num_prompt)
    prompt = [rng.randrange(3, VOCAB_SIZE) for _ in range(num_prompt)]
    params = params_of("sampled", max_tokens=4, logprobs=20)
    expected = answer(reference, prompt, params)
    for llm in machines:
        for speculation in ("off", *speculations(expected, ["itself 4"])):
            assert answer(llm, prompt, params, speculation) == expected


@pytest.mark.parametrize("isa", ISAS)
def test_rejected_drafts_leave_nothing_behind_in_a_long_text(path: Path, reference: LLM, isa: str) -> None:
    """The text runs over many pages and from the first block of attention into the second, at 256 tokens."""
    llm = open_llm(path, isa, threads=2)
    rng = random.Random(3)
    prompt = [rng.randrange(3, VOCAB_SIZE) for _ in range(225)]
    params = params_of("sampled", max_tokens=60, repetition_penalty=1.1)
    expected = answer(reference, prompt, params)
    for name in ("noise 16", "hole", "fork", "itself 63"):
        (speculation,) = speculations(expected, [name])
        assert answer(llm, prompt, params, speculation) == expected, name


@pytest.mark.parametrize("name", ["greedy", "sampled", "temperature", "repetition", "frequency sampled"])
def test_f011_a_model_that_drafts_for_itself_is_always_right(reference: LLM, machines: list[LLM], name: str) -> None:
    params = params_of(name)
    expected = answer(reference, PROMPT, params)
    for llm, k in itertools.product(machines, (1, 4, 8, 63)):
        stats = complete(llm, PROMPT, params, scripted(expected.token_ids, right(k), VOCAB_SIZE)).stats
        assert stats.accepted_tokens == stats.drafted_tokens > 0
        assert stats.target_passes == -(-39 // (k + 1))


def test_random_drafts_are_nearly_all_rejected(machines: list[LLM]) -> None:
    params = params_of("temperature")
    expected = answer(machines[0], PROMPT, params)
    (speculation,) = speculations(expected, ["noise 8"])
    stats = complete(machines[0], PROMPT, params, speculation).stats
    assert stats.drafted_tokens > 200
    assert stats.accepted_tokens < 5


def test_f001_lookup_on_texts_that_repeat_themselves(reference: LLM, machines: list[LLM]) -> None:
    code = "def add(a, b):\n    return a + b\n"
    prompts: list[Any] = ["tree " * 25, "on off " * 15, code + "Repeat the code above.\n" + code[:12], [270]]
    specs = ("ngram:k=1", "ngram:k=4,max=1", "ngram:k=8,min=2,max=5", "ngram:k=63,policy=fixed", "suffix:k=12")
    num_accepted = 0
    for prompt, name in itertools.product(prompts, ("greedy", "sampled")):
        params = params_of(name, max_tokens=48, frequency_penalty=-2.0)
        expected = answer(reference, prompt, params)
        for llm, spec in zip(itertools.cycle(machines), specs):
            completion = complete(llm, prompt, params, spec)
            assert Answer.of(completion) == expected
            num_accepted += completion.stats.accepted_tokens
    assert num_accepted > 200  # so that what was compared are long accepted runs too
