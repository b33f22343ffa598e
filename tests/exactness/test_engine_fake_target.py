"""Speculation changes nothing but speed: every parameter, every kind of draft, against naive decoding.

The target is `FakeTarget`, whose logits change when a row sees anything but its own prefix. Guards F001 to F008, F011
and F013 to F020.
"""

import random
from typing import Any

import pytest

from forerun.engine.jobs import Job
from forerun.engine.request import prepare
from forerun.types import MAX_DRAFT_NODES, SamplingParams
from tests.helpers.engines import (
    EOS,
    Answer,
    FakeEngine,
    Scripted,
    decode_naively,
    right,
    tree,
    wrong_from,
)
from tests.helpers.fake_target import VOCAB_SIZE

SEED = 12345
PROMPT = [3, 4, 5, 6, 3, 4, 5, 7, 9, 3, 4]
GREEDY: dict[str, Any] = {"ignore_eos": True}
SAMPLED: dict[str, Any] = {"temperature": 0.9, "seed": SEED, "ignore_eos": True}

PARAMS = {
    "greedy": GREEDY,
    "sampled": SAMPLED,
    "eos": {"temperature": 1.2, "seed": SEED, "logit_bias": {EOS: 1.0}},
    "top_k": SAMPLED | {"top_k": 3},
    "top_p": SAMPLED | {"top_p": 0.8},
    "min_p": SAMPLED | {"min_p": 0.2},
    "repetition": GREEDY | {"repetition_penalty": 1.3},
    "repetition sampled": SAMPLED | {"repetition_penalty": 1.3},
    "presence": GREEDY | {"presence_penalty": 1.5},
    "presence negative": GREEDY | {"presence_penalty": -2.0},
    "frequency": GREEDY | {"frequency_penalty": 0.6},
    "frequency sampled": SAMPLED | {"frequency_penalty": -0.3},
    "bias": GREEDY | {"logit_bias": {5: 4.0, 7: -100.0}},
    "bias sampled": SAMPLED | {"logit_bias": {5: 2.0, 7: -100.0}},
    "min_tokens": {"logit_bias": {EOS: 100.0}, "min_tokens": 17},
    "min_tokens sampled": {"temperature": 1.0, "seed": SEED, "min_tokens": 13, "logit_bias": {EOS: 2.5}},
    "min_tokens greedy": {"stop_token_ids": tuple(range(1, 24)), "min_tokens": 12},
    "stop ids": {"temperature": 1.0, "seed": SEED, "stop_token_ids": (8, 12)},
    "everything": {
        "temperature": 0.8, "seed": SEED, "top_k": 20, "top_p": 0.95, "min_p": 0.01, "repetition_penalty": 1.1,
        "presence_penalty": 0.3, "frequency_penalty": 0.2, "logit_bias": {4: 1.0}, "min_tokens": 9,
        "stop": ("zz", "bca"),
    },
}  # fmt: skip


def params_of(name: str, **more: Any) -> SamplingParams:
    return SamplingParams(**({"max_tokens": 40, "logprobs": 3} | PARAMS[name] | more))


def scripted(answer: Answer, plan: Any) -> Scripted:
    """A drafter that knows the answer, and goes on beyond its end with what would never be asked for."""
    rng = random.Random(1)
    return Scripted([*answer.token_ids, *(rng.randrange(VOCAB_SIZE) for _ in range(100))], plan)


@pytest.fixture(scope="module")
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.mark.parametrize("name", PARAMS)
def test_every_parameter_with_every_kind_of_draft(engine: FakeEngine, name: str) -> None:
    params = params_of(name)
    expected = decode_naively(PROMPT, params, SEED)
    assert Answer.of(engine.run(PROMPT, params)) == expected
    plans = [
        right(4), right(16), wrong_from(4, 0), wrong_from(5, 2), tree(1, 1), tree(7, 2), tree(16, 3), tree(30, 4),
    ]  # fmt: skip
    for plan in plans:
        assert Answer.of(engine.run(PROMPT, params, scripted(expected, plan))) == expected
    for spec in (
        "ngram:k=8,policy=fixed", "ngram:k=3,min=1,max=2", "suffix:k=8,policy=fixed,min_prob=0.01", "suffix:k=20",
        "suffix:k=5,tree=off,policy=fixed+ngram",
    ):  # fmt: skip
        assert Answer.of(engine.run(PROMPT, params, spec)) == expected


DRAFTERS = (
    "recycling",
    "recycling:k=20,width=5,depth=8,policy=fixed",
    "lookahead",
    "lookahead:w=5,n=4,g=4",
    "prediction",
    "prediction:k=63,max=16,policy=fixed",
    "auto",
    "ngram:policy=fixed+recycling:policy=fixed+lookahead:w=3+prediction:policy=fixed",
)


def edited(token_ids: tuple[int, ...]) -> list[int]:
    """A text that the output follows for a while, leaves, and finds again; with an end id in it."""
    ids = [*token_ids[:9], 17, *token_ids[10:20], *token_ids[23:30], 5, 6, *token_ids[30:]]
    return [*ids, EOS, *ids[::-1]]


@pytest.mark.parametrize("spec", DRAFTERS)
@pytest.mark.parametrize("name", PARAMS)
def test_every_parameter_with_every_drafter(engine: FakeEngine, name: str, spec: str) -> None:
    params = params_of(name)
    expected = decode_naively(PROMPT, params, SEED)
    assert Answer.of(engine.run(PROMPT, params, spec, prediction=edited(expected.token_ids))) == expected


@pytest.mark.parametrize("spec", DRAFTERS)
def test_every_drafter_is_right_now_and_then(engine: FakeEngine, spec: str) -> None:
    """One that never is would pass the test above."""
    params = params_of("greedy", max_tokens=100)
    expected = decode_naively(PROMPT, params, SEED).token_ids
    assert engine.run(PROMPT, params, spec, prediction=edited(expected)).stats.accepted_tokens > 5


@pytest.mark.parametrize("prompt", [[4], [EOS, 4, EOS, 4], [EOS, EOS]])
@pytest.mark.parametrize("spec", DRAFTERS)
def test_f001_f017_f018_drafters_on_any_text(engine: FakeEngine, prompt: list[int], spec: str) -> None:
    params = params_of("eos")
    expected = decode_naively(prompt, params, SEED)
    assert Answer.of(engine.run(prompt, params, spec)) == expected


@pytest.mark.parametrize("prediction", [(7,), (EOS,), (EOS, 3, 4), (3,) * 256])
def test_any_prediction(engine: FakeEngine, prediction: tuple[int, ...]) -> None:
    params = params_of("sampled")
    expected = decode_naively(PROMPT, params, SEED)
    for spec in ("prediction:policy=fixed", "auto"):
        assert Answer.of(engine.run(PROMPT, params, spec, prediction=prediction)) == expected


@pytest.mark.parametrize("spec", DRAFTERS)
@pytest.mark.parametrize("num_prompt", [100, 126, 127])
def test_f015_drafters_at_the_context_limit(num_prompt: int, spec: str) -> None:
    engine = FakeEngine(max_model_len=128)
    prompt = [1 + i % 7 for i in range(num_prompt)]
    params = params_of("greedy", max_tokens=None, logprobs=None)
    expected = decode_naively(prompt, params, SEED, max_model_len=128)
    prediction = edited(expected.token_ids)[:128]
    assert Answer.of(engine.run(prompt, params, spec, prediction=prediction)) == expected


@pytest.mark.parametrize("spec", ["recycling:policy=fixed", "lookahead", "auto"])
def test_f021_f024_what_earlier_requests_left_changes_nothing(engine: FakeEngine, spec: str) -> None:
    speculator = engine.speculator(spec)
    for name in ("greedy", "sampled", "greedy"):
        params = params_of(name)
        expected = decode_naively(PROMPT, params, SEED)
        *_, (_, last) = engine.engine.run(Job(prepare(PROMPT, params, "coupled", engine.limits), speculator))
        assert last.completion is not None
        assert Answer.of(last.completion) == expected


@pytest.mark.parametrize("k", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("chunk", [1, 7, 64])
@pytest.mark.parametrize("name", ["greedy", "sampled"])
def test_f001_f002_every_k_and_chunk(name: str, chunk: int, k: int) -> None:
    engine = FakeEngine(chunk=chunk)
    params = params_of(name)
    expected = decode_naively(PROMPT, params, SEED)
    assert Answer.of(engine.run(PROMPT, params, scripted(expected, right(k)))) == expected
    assert Answer.of(engine.run(PROMPT, params, scripted(expected, tree(k, k)))) == expected
    for drafter in ("ngram", "suffix"):
        assert Answer.of(engine.run(PROMPT, params, f"{drafter}:k={k},policy=fixed")) == expected


@pytest.mark.parametrize("num_prompt", [1, 2, 15, 16, 17, 31, 32, 33])
def test_f002_prompt_lengths_around_a_page(engine: FakeEngine, num_prompt: int) -> None:
    rng = random.Random(num_prompt)
    prompt = [rng.randrange(1, VOCAB_SIZE) for _ in range(num_prompt)]
    params = params_of("sampled", max_tokens=20)
    expected = decode_naively(prompt, params, SEED)
    for plan in (right(5), tree(9, 5), wrong_from(3, 1)):
        assert Answer.of(engine.run(prompt, params, scripted(expected, plan))) == expected


@pytest.mark.parametrize("prompt", [[4], [4] * 50, [4, 9] * 20, [EOS, 4, EOS, 4], list(range(1, 30))])
@pytest.mark.parametrize(
    "spec",
    [
        "ngram:k=8,policy=fixed", "ngram:k=1", "ngram:k=63,max=1", "ngram:min=3,max=3",
        "suffix:k=8,policy=fixed", "suffix:k=63,min_prob=0.001,policy=fixed", "suffix:depth=1", "suffix:k=1,tree=off",
    ],
)  # fmt: skip
def test_f001_f018_lookup_on_any_text(engine: FakeEngine, prompt: list[int], spec: str) -> None:
    for name in ("greedy", "eos"):
        params = params_of(name)
        expected = decode_naively(prompt, params, SEED)
        assert Answer.of(engine.run(prompt, params, spec)) == expected


@pytest.mark.parametrize("policy", ["fixed", "adaptive"])
def test_f024_earlier_outputs_change_nothing_but_speed(engine: FakeEngine, policy: str) -> None:
    speculator = engine.speculator(f"suffix:k=12,policy={policy}")
    expected = {name: decode_naively(PROMPT, params_of(name), SEED) for name in PARAMS}
    passes = []
    for _ in range(2):
        for name in PARAMS:
            request = prepare(PROMPT, params_of(name), "coupled", engine.limits)
            completion = [*engine.engine.run(Job(request, speculator))][-1][1].completion
            assert completion is not None
            assert Answer.of(completion) == expected[name]
            passes.append(completion.stats.target_passes)
    # The second time every answer is one that was given before.
    assert sum(passes[len(PARAMS) :]) < 0.6 * sum(passes[: len(PARAMS)])


def test_f006_seeds_reproduce_and_differ(engine: FakeEngine) -> None:
    params = params_of("sampled")
    first = engine.run(PROMPT, params)
    assert first.seed == SEED
    assert engine.run(PROMPT, params).token_ids == first.token_ids
    assert engine.run(PROMPT, params_of("sampled", seed=SEED + 1)).token_ids != first.token_ids
    unseeded = engine.run(PROMPT, params_of("sampled", seed=None))
    assert unseeded.seed is not None
    assert engine.run(PROMPT, params_of("sampled", seed=unseeded.seed)).token_ids == unseeded.token_ids


def test_f008_top_k_1_is_greedy(engine: FakeEngine) -> None:
    greedy = engine.run(PROMPT, params_of("greedy"))
    sampled = engine.run(PROMPT, params_of("sampled", top_k=1), "ngram")
    assert sampled.token_ids == greedy.token_ids


def test_f011_right_drafts_are_all_accepted(engine: FakeEngine) -> None:
    for name in ("greedy", "sampled", "repetition sampled"):
        params = params_of(name)
        expected = decode_naively(PROMPT, params, SEED)
        for k in (1, 4, 8):
            stats = engine.run(PROMPT, params, scripted(expected, right(k))).stats
            assert stats.accepted_tokens == stats.drafted_tokens
            assert stats.target_passes == -(-39 // (k + 1))


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 5, 6, 7, 8, 19])
@pytest.mark.parametrize("plan", [right(6), tree(12, 7)], ids=["chain", "tree"])
def test_f013_max_tokens_are_delivered_and_counted(engine: FakeEngine, max_tokens: int, plan: Any) -> None:
    params = params_of("greedy", max_tokens=max_tokens)
    expected = decode_naively(PROMPT, params, SEED)
    completion = engine.run(PROMPT, params, scripted(decode_naively(PROMPT, params_of("greedy"), SEED), plan))
    assert Answer.of(completion) == expected
    assert completion.finish_reason == "length"
    assert completion.stats.completion_tokens == max_tokens
    assert completion.stats.accepted_tokens <= max_tokens - 1


@pytest.mark.parametrize("k", [2, 5, 16])
def test_f014_end_of_text_at_every_offset_of_a_run(engine: FakeEngine, k: int) -> None:
    for offset in range(k + 1):
        # The first token comes with the prompt, so this puts end-of-text `offset` nodes into the first draft.
        params = SamplingParams(max_tokens=60, logit_bias={EOS: 100.0}, min_tokens=1 + offset, logprobs=0)
        expected = decode_naively(PROMPT, params, SEED)
        assert expected.token_ids[-1] == EOS
        assert len(expected.token_ids) == 2 + offset
        # The target agrees with what the draft has beyond it, too.
        events = engine.events(PROMPT, params, Scripted([*expected.token_ids, *[EOS] * 40], right(k)))
        completion = events[-1].completion
        assert completion is not None
        assert Answer.of(completion) == expected
        assert [t for event in events for t in event.token_ids] == list(expected.token_ids)
        assert completion.finish_reason == "stop"
        assert completion.stats.accepted_tokens == min(offset + 1, k)


@pytest.mark.parametrize("num_prompt", [20, 100, 120, 125, 126, 127])
@pytest.mark.parametrize("plan", [right(1), right(5), right(16), tree(16, 3), right(MAX_DRAFT_NODES)])
def test_f015_the_context_limit_ends_cleanly(num_prompt: int, plan: Any) -> None:
    engine = FakeEngine(max_model_len=128)
    prompt = [1 + i % 7 for i in range(num_prompt)]
    params = params_of("greedy", max_tokens=None, logprobs=None)
    expected = decode_naively(prompt, params, SEED, max_model_len=128)
    completion = engine.run(prompt, params, scripted(expected, plan))
    assert Answer.of(completion) == expected
    assert completion.finish_reason == "length"
    assert num_prompt + len(completion.token_ids) == 128


def test_f015_the_drafter_is_never_asked_for_more_than_there_is_room_for() -> None:
    engine = FakeEngine(max_model_len=32)
    drafter = scripted(decode_naively([4, 5], params_of("greedy"), SEED), right(3))
    params = params_of("greedy", max_tokens=None)
    engine.run([4, 5], params, lambda _: drafter)
    assert drafter.asked == [28, 24, 20, 16, 12, 8, 4]


@pytest.mark.parametrize(
    ("stop", "name"),
    [
        (("c",), "sampled"),
        (("ab", "bc"), "sampled"),
        (("ca", "aca", "b"), "greedy"),
        (("de", "e"), "frequency"),
        (("never there",), "sampled"),
        (("\N{LATIN SMALL LETTER E WITH ACUTE}",), "sampled"),
        (("\N{REPLACEMENT CHARACTER}",), "sampled"),
        (("ijk", "jkl", "klm"), "everything"),
    ],
)
def test_f020_stop_strings(engine: FakeEngine, stop: tuple[str, ...], name: str) -> None:
    for seed in range(6):
        params = params_of(name, stop=stop, seed=seed, logit_bias={28: 2.0, 29: 2.0})
        expected = decode_naively(PROMPT, params, seed)
        for plan in (right(6), tree(10, 1), wrong_from(6, 3)):
            events = engine.events(PROMPT, params, scripted(expected, plan))
            assert Answer.of(events[-1].completion) == expected  # type: ignore[arg-type]
            assert "".join(event.text for event in events) == expected.text


def test_padding_ids_have_no_text(engine: FakeEngine) -> None:
    params = params_of("greedy", logit_bias={31: 100.0}, max_tokens=3)
    completion = engine.run(PROMPT, params, "ngram:policy=fixed")
    assert completion.token_ids == (31, 31, 31)
    assert completion.text == ""
