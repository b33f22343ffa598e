"""Structured output under speculation: tokens and log-probabilities of plain decoding, and only what was asked (F010).

The reference decodes by the definition, with a grammar that starts anew for every token; small vocabularies meet every
rule and shape of draft, a random Llama with a vocabulary of bytes meets JSON.
"""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from typing import Any

import numpy as np
import pytest
from jsonschema import Draft202012Validator

from forerun import LLM, Completion, RequestError, SamplingParams, Structured
from forerun.drafters.spec import Speculation
from forerun.engine.jobs import Job
from forerun.engine.request import prepare
from forerun.models.grammar import Grammar, GrammarCompiler
from forerun.models.store import KNOWN_MODELS, path_of
from forerun.sampling import make_sampler
from forerun.sampling.distribution import is_allowed
from forerun.sampling.history import History
from forerun.types import Draft, VerifyRule
from tests.helpers.engines import (
    EOS,
    NUM_TEXT_IDS,
    Answer,
    FakeEngine,
    FakeTokenizer,
    Plan,
    Scripted,
    right,
    tree,
    wrong_from,
)
from tests.helpers.fake_target import VOCAB_SIZE, prefix_logits
from tests.helpers.gguf_files import EOS_ID, write_tiny_llama
from tests.helpers.model_drafter import ModelDrafter
from tests.helpers.scripted import alternating, fork, hole, noise, scripted, shifted

# ---- 32 ids: every rule, and the law itself ----


class SpellingTokenizer(FakeTokenizer):
    """With what a grammar needs."""

    bos_id = None

    def encode(self, text: str, *, add_bos: bool = True, continues: bool = False) -> list[int]:
        ids = {self.token_bytes(token_id): token_id for token_id in range(1, NUM_TEXT_IDS)}
        return [ids[bytes([byte])] for byte in text.encode() if bytes([byte]) in ids]


COMPILER = GrammarCompiler(SpellingTokenizer(), VOCAB_SIZE)  # type: ignore[arg-type]
PROMPT = [4, 7]
SMALL = {
    "regex": Structured.regex("(a|bc|def){2,6}g?"),
    "letters": Structured.regex("[a-p]{3,}é*"),
    "choice": Structured.choice(["abcd", "abce", "bc", "p"]),
    "lark": Structured.lark('start: "a" start "b" | "c" /[d-g]{1,3}/'),
}
FITS = {
    "regex": r"(a|bc|def){2,6}g?",
    "letters": r"[a-p]{3,}é*",
    "choice": "abcd|abce|bc|p",
    "lark": r"(a)*c[d-g]{1,3}(b)*",
}


@pytest.fixture(scope="module")
def engine() -> FakeEngine:
    """With the native sampler, which masks in another way than the reference."""
    return FakeEngine(max_model_len=64, sampler=make_sampler(VOCAB_SIZE))


def allowed_after(grammar: Grammar, token_ids: list[int]) -> list[int]:
    state = grammar.open()
    state.advance(token_ids)
    mask_V = state.mask_after()
    return [token_id for token_id in range(VOCAB_SIZE) if is_allowed(mask_V, token_id)]


def decode_by_definition(grammar: Grammar, params: SamplingParams, seed: int) -> tuple[tuple[int, ...], str]:
    """Token by token, with what isn't allowed banned by name."""
    sampler = make_sampler(VOCAB_SIZE, "numpy")
    output: list[int] = []
    while True:
        history = History(params, PROMPT)
        for token_id in output:
            history.append(token_id)
        allowed = allowed_after(grammar, output)
        if len(output) < params.min_tokens and set(allowed) - {EOS}:
            allowed = [token_id for token_id in allowed if token_id != EOS]
        banned = np.array([token_id for token_id in range(VOCAB_SIZE) if token_id not in allowed], np.int32)
        law = sampler.law(prefix_logits([*PROMPT, *output]), params, history.along(), banned)
        output.append(sampler.sample(law, seed, len(PROMPT) + len(output)).token_id)
        if output[-1] == EOS:
            return tuple(output), "stop"
        if len(output) == params.max_tokens:
            return tuple(output), "length"


def forbidden(k: int, seed: int) -> Plan:
    """The right token beside ids that no grammar here allows, and more below each of them."""
    rng = random.Random(seed)

    def plan(future: list[int], max_nodes: int) -> Draft:
        ids, parents = [], []
        for node in range(min(k, max_nodes)):
            parents.append(rng.randrange(-1, node))
            taken = {ids[n] for n in range(node) if parents[n] == parents[node]}
            wanted = [future[0], EOS, VOCAB_SIZE - 1, VOCAB_SIZE - 2, *range(1, VOCAB_SIZE - 2)]
            ids.append(next(i for i in wanted if i not in taken))
        return Draft(tuple(ids), tuple(parents), ("forbidden",) * len(ids), (None,) * len(ids))

    return plan


SMALL_PLANS: dict[str, Plan] = {
    "right": right(6),
    "wrong": wrong_from(6, 2),
    "tree": tree(9, 3),
    "forbidden": forbidden(8, 4),
    "ends": hole(5, 1, EOS),
    "noise": noise(6, VOCAB_SIZE),
}
LAWS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"temperature": 1.3},
    "penalties": {"temperature": 0.9, "frequency_penalty": 0.7, "repetition_penalty": 1.2, "top_p": 0.9},
    "bias": {"logit_bias": {1: 3.0, 5: 2.0}},
    "min_tokens": {"temperature": 1.1, "min_tokens": 4},
    "min_tokens greedy": {"min_tokens": 9},
}


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("name", SMALL)
def test_drafts_change_nothing_f010(engine: FakeEngine, name: str, law: str) -> None:
    grammar = COMPILER.compile(SMALL[name])
    for seed in (1, 2, 3):
        params = SamplingParams(max_tokens=20, seed=seed, logprobs=2, **LAWS[law])
        plain = Answer.of(engine.run(PROMPT, params, grammar=grammar))
        assert (plain.token_ids, plain.finish_reason) == decode_by_definition(grammar, params, seed)
        if plain.finish_reason == "stop":
            assert re.fullmatch(FITS[name], plain.text)
        truth = (*plain.token_ids, *range(1, 30))
        drafts = [Scripted(truth, plan) for plan in SMALL_PLANS.values()]
        shared = ModelDrafter(seed, (2, 2), "shared")
        for drafter in (*drafts, shared, "ngram:k=4,min=1,policy=fixed", "suffix", "grammar", "auto"):
            assert Answer.of(engine.run(PROMPT, params, drafter, grammar=grammar)) == plain, str(drafter)[:60]


@pytest.mark.parametrize("rule", ["token", "block", "rrsw", "traversal"])
def test_ratio_rules_keep_the_greedy_output_and_the_grammar(engine: FakeEngine, rule: VerifyRule) -> None:
    for name, wanted in SMALL.items():
        grammar = COMPILER.compile(wanted)
        params = SamplingParams(max_tokens=20)
        plain = Answer.of(engine.run(PROMPT, params, grammar=grammar))
        branching = (2, 2) if rule in ("rrsw", "traversal") else (1, 1, 1)
        for key in range(5):
            got = Answer.of(engine.run(PROMPT, params, ModelDrafter(key, branching), rule, key, grammar=grammar))
            assert got == plain
            sampled = SamplingParams(max_tokens=20, temperature=1.5)
            answer = engine.run(PROMPT, sampled, ModelDrafter(key, branching), rule, key, grammar=grammar)
            assert answer.finish_reason == "length" or re.fullmatch(FITS[name], answer.text)


SHAPES: dict[VerifyRule, tuple[int, ...]] = {
    "coupled": (2, 1),
    "token": (1, 1),
    "block": (1, 1),
    "rrsw": (2, 1),
    "traversal": (2, 1),
}


@pytest.mark.parametrize("rule", SHAPES)
def test_outputs_have_the_masked_law(engine: FakeEngine, rule: VerifyRule) -> None:
    """Four choices: the law of whole outputs is the product of renormalised rows; keys are fixed."""
    grammar = COMPILER.compile(SMALL["choice"])
    params = SamplingParams(max_tokens=8, temperature=1.4)
    want = whole_law(grammar, params)
    num_runs = 800
    counts: Counter[tuple[int, ...]] = Counter()
    for key in range(num_runs):
        drafter = ModelDrafter(key, SHAPES[rule], "shared" if rule == "coupled" else "draft")
        counts[engine.run(PROMPT, params, drafter, rule, key, grammar=grammar).token_ids] += 1
    assert set(counts) <= set(want)
    kept = {output: prob for output, prob in want.items() if prob * num_runs >= 5}
    rest = 1.0 - sum(kept.values())
    chi_square = sum((counts[output] - num_runs * prob) ** 2 / (num_runs * prob) for output, prob in kept.items())
    if rest * num_runs >= 5:
        other = num_runs - sum(counts[output] for output in kept)
        chi_square += (other - num_runs * rest) ** 2 / (num_runs * rest)
    assert len(kept) > 3
    assert chi_square < len(kept) + 4.5 * (2 * len(kept)) ** 0.5


def whole_law(grammar: Grammar, params: SamplingParams) -> dict[tuple[int, ...], float]:
    """The exact law of the outputs."""
    sampler = make_sampler(VOCAB_SIZE, "numpy")
    done: dict[tuple[int, ...], float] = {}
    open_outputs: dict[tuple[int, ...], float] = {(): 1.0}
    while open_outputs:
        longer: dict[tuple[int, ...], float] = {}
        for output, prob in open_outputs.items():
            p_V = sampler.law(prefix_logits([*PROMPT, *output]), params, History(params, PROMPT).along()).dense(
                VOCAB_SIZE
            )
            allowed = allowed_after(grammar, list(output))
            total = sum(p_V[token_id] for token_id in allowed)
            for token_id in allowed:
                into = done if token_id == EOS else longer
                into[(*output, token_id)] = prob * p_V[token_id] / total
        open_outputs = longer
    return done


def test_requests_that_run_together_keep_their_own_grammars() -> None:
    """Also where pages are short, so that requests give them back and go on later."""
    fake = FakeEngine(max_model_len=64, kv_tokens=64, sampler=make_sampler(VOCAB_SIZE))
    requests, expected = [], []
    forms = {**SMALL, "free": None, "long": Structured.regex("([a-p]{3}é){6,}")}
    for seed, name in enumerate([*forms, *forms, "long", "long", "free"]):
        form = forms[name]
        grammar = None if form is None else COMPILER.compile(form)
        params = SamplingParams(max_tokens=40, temperature=1.1, seed=seed)
        requests.append(prepare([4, 7, *range(seed)], params, "coupled", fake.limits, grammar=grammar))
        expected.append(fake.run([4, 7, *range(seed)], params, grammar=grammar).token_ids)
    speculator = fake.speculator("ngram:k=4,min=1,policy=fixed+grammar:policy=fixed")
    got: dict[int, tuple[int, ...]] = {}
    for place, event in fake.engine.run(*(Job(request, speculator) for request in requests)):
        if event.completion is not None:
            got[place] = event.completion.token_ids
    assert [got[place] for place in range(len(requests))] == expected
    assert fake.engine.load.num_preemptions > 0


def test_a_grammar_that_fails_ends_its_own_request_alone() -> None:
    """It is found out in a step that others run in too."""
    fake = FakeEngine(max_model_len=64, sampler=make_sampler(VOCAB_SIZE))
    fails = COMPILER.compile(Structured.regex("(a|b){3}é{2}[.]"))  # this vocabulary has no full stop
    works = COMPILER.compile(SMALL["choice"])
    params = SamplingParams(max_tokens=25)
    expected = fake.run(PROMPT, params, grammar=works).token_ids
    ids = [
        fake.engine.submit(Job(prepare(PROMPT, params, "coupled", fake.limits, grammar=grammar)))
        for grammar in (works, fails, works)
    ]
    last: dict[int, Any] = {}
    while fake.engine.has_work:
        last |= dict(fake.engine.step())
    assert isinstance(last[ids[1]], RequestError)
    assert "none that this model's vocabulary can write" in str(last[ids[1]])
    assert [last[i].completion.token_ids for i in (ids[0], ids[2])] == [expected] * 2
    fake.engine.check_integrity()


def test_min_tokens_waits_as_long_as_the_grammar_can(engine: FakeEngine) -> None:
    """An output that can go on does so; one that is complete ends, min_tokens or not."""
    grammar = COMPILER.compile(Structured.regex("a{1,5}"))
    ends = {1: -5.0, EOS: 20.0}
    assert engine.run(PROMPT, SamplingParams(max_tokens=20, logit_bias=ends), grammar=grammar).text == "a"
    for min_tokens, text in ((3, "aaa"), (5, "aaaaa"), (6, "aaaaa"), (15, "aaaaa")):
        params = SamplingParams(max_tokens=20, logit_bias=ends, min_tokens=min_tokens)
        for drafts in (None, "grammar:policy=fixed", Scripted((1, 1, 1, 1, 1, EOS, *range(1, 9)), right(4))):
            if isinstance(drafts, Scripted) and text != "aaaaa":
                continue
            completion = engine.run(PROMPT, params, drafts, grammar=grammar)
            assert (completion.text, completion.finish_reason) == (text, "stop")


def test_stop_ids_and_stop_strings_still_cut(engine: FakeEngine) -> None:
    grammar = COMPILER.compile(Structured.choice(["abcdefgh"]))
    plain = engine.run(PROMPT, SamplingParams(max_tokens=20), grammar=grammar)
    assert (plain.text, plain.finish_reason) == ("abcdefgh", "stop")
    for drafts in (None, "grammar:policy=fixed"):
        cut = engine.run(PROMPT, SamplingParams(max_tokens=20, stop=("ef",)), drafts, grammar=grammar)
        assert (cut.text, cut.finish_reason) == ("abcd", "stop")
        cut = engine.run(PROMPT, SamplingParams(max_tokens=2), drafts, grammar=grammar)
        assert (cut.finish_reason, len(cut.token_ids)) == ("length", 2)


def test_ignoring_the_end_of_text_is_refused(engine: FakeEngine) -> None:
    grammar = COMPILER.compile(SMALL["choice"])
    with pytest.raises(RequestError, match="ignore_eos is set, but the output ends where its choice does"):
        engine.run(PROMPT, SamplingParams(ignore_eos=True), grammar=grammar)


# ---- a random Llama and the demo model: JSON ----

JSON_VOCAB_SIZE = 520
PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "kind": {"enum": ["the cat", "the dog", "neither of them"]},
        "numbers": {
            "type": "array", "items": {"type": "integer", "minimum": -50, "maximum": 50}, "minItems": 2, "maxItems": 2,
        },
        "is_right": {"type": "boolean"},
    },
    "required": ["name", "kind", "numbers", "is_right"],
    "additionalProperties": False,
}  # fmt: skip
FORMS = {
    "schema": Structured.json_schema(PERSON),
    "compact": Structured.json_schema(PERSON, compact=True),
    "regex": Structured.regex(r"(the (cat|dog) and )*[0-9]{2}-[0-9]{2}"),
    "choice": Structured.choice(["the cat and the dog", "the cat and the hand", "\u00e9 no"]),
}
JSON_PROMPT = '{"name": "a", "kind": "the cat", "numbers": [1, 2], "is_right": true} {"name": "b", "kind": "the'
JSON_LAWS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"temperature": 0.9, "seed": 11},
    "filters": {"temperature": 1.2, "seed": 5, "top_k": 40, "top_p": 0.95, "frequency_penalty": 0.4},
}
SPECULATIONS = (
    "ngram:k=8,min=1,policy=fixed", "ngram", "suffix:k=16,policy=fixed", "grammar:policy=fixed", "grammar", "auto",
    "ngram:k=5,min=1,policy=fixed+grammar:policy=fixed+suffix:policy=fixed", "recycling",
    "self:layers=1,k=4,policy=fixed",
)  # fmt: skip


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    path = write_tiny_llama(
        tmp_path_factory.mktemp("grammar") / "tiny.gguf", fmt="q8_0", num_layers=2, vocab_size=JSON_VOCAB_SIZE,
        context_length=1024,
    )  # fmt: skip
    return LLM(path, threads=1)


def ask(
    llm: LLM, form: Structured, params: SamplingParams, speculation: str | Speculation = "off", **more: Any
) -> Completion:
    (completion,) = llm.generate([JSON_PROMPT], params, speculation=speculation, grammar=form, **more)
    return completion


def check_form(name: str, completion: Completion) -> None:
    """What was asked for, unless the limit cut it."""
    if completion.finish_reason == "length":
        return
    if name in ("schema", "compact"):
        Draft202012Validator(PERSON).validate(json.loads(completion.text))
    elif name == "regex":
        assert re.fullmatch(r"(the (cat|dog) and )*[0-9]{2}-[0-9]{2}", completion.text)
    else:
        assert completion.text in json.loads(FORMS["choice"].source)


@pytest.mark.parametrize("law", JSON_LAWS)
@pytest.mark.parametrize("name", FORMS)
def test_json_is_the_same_with_and_without_drafts_f010(llm: LLM, name: str, law: str) -> None:
    params = SamplingParams(max_tokens=150, logprobs=3, **JSON_LAWS[law])
    plain = ask(llm, FORMS[name], params)
    assert plain.finish_reason == "stop" or name in ("schema", "regex")
    check_form(name, plain)
    size = JSON_VOCAB_SIZE
    plans = [right(8), wrong_from(8, 3), tree(12, 5), fork(6, size), noise(6, size), hole(9, 2, EOS_ID), shifted(5, 1)]
    plans.append(alternating(right(3), noise(7, size), hole(16, 7, 84)))
    drafts: list[str | Speculation] = [*SPECULATIONS, *(scripted(plain.token_ids, plan, size) for plan in plans)]
    for speculation in drafts:
        assert Answer.of(ask(llm, FORMS[name], params, speculation)) == Answer.of(plain), str(speculation)[:80]


def test_forced_tokens_cost_no_pass_of_their_own(llm: LLM) -> None:
    form = Structured.choice(["the cat and the dog and the hand and the other thing and nothing else"])
    plain = ask(llm, form, SamplingParams(max_tokens=100))
    fast = ask(llm, form, SamplingParams(max_tokens=100), "grammar:policy=fixed")
    assert Answer.of(fast) == Answer.of(plain)
    assert fast.stats.accepted_tokens == fast.stats.drafted_tokens > 10
    assert fast.stats.target_passes < 4 < plain.stats.target_passes


@pytest.mark.parametrize("rule", ["token", "block"])
def test_ratio_rules_give_what_was_asked_for(llm: LLM, rule: VerifyRule) -> None:
    for name, form in FORMS.items():
        greedy = SamplingParams(max_tokens=150)
        drafts = "self:layers=1,k=4,policy=fixed"
        assert Answer.of(ask(llm, form, greedy, drafts, verify=rule)) == Answer.of(ask(llm, form, greedy))
        for _ in range(2):
            check_form(name, ask(llm, form, SamplingParams(max_tokens=150, temperature=1.0), drafts, verify=rule))


def test_requests_with_and_without_a_grammar_do_not_touch_each_other(llm: LLM) -> None:
    params = SamplingParams(max_tokens=60, seed=4, temperature=1.0)
    free = llm.generate([JSON_PROMPT], params)[0].token_ids
    first = ask(llm, FORMS["schema"], params, "auto").token_ids
    with llm_stream(llm, params) as events:
        next(events)  # left in the middle
    assert llm.generate([JSON_PROMPT], params, speculation="auto")[0].token_ids == free
    assert ask(llm, FORMS["schema"], params, "auto").token_ids == first


def llm_stream(llm: LLM, params: SamplingParams) -> Any:
    from contextlib import closing

    return closing(llm.stream(JSON_PROMPT, params, speculation="auto", grammar=FORMS["schema"]))


def test_a_bad_schema_ends_its_own_request_alone_f037(llm: LLM) -> None:
    with pytest.raises(RequestError, match="Unimplemented keys"):
        ask(llm, Structured.json_schema({"not": {}}), SamplingParams())
    later = Structured.json_schema({"type": "object", "properties": {f"r{i}": {} for i in range(2000)}})
    with pytest.raises(RequestError, match="takes more work than is allowed"):
        ask(llm, later, SamplingParams(max_tokens=30), "auto")
    assert ask(llm, Structured.choice(["the"]), SamplingParams(), "auto").text == "the"


@pytest.mark.real_model
@pytest.mark.parametrize("law", ["greedy", "sampled"])
def test_the_demo_model_writes_json_f010(law: str) -> None:
    if not path_of(KNOWN_MODELS["demo"]).is_file():
        pytest.skip("the demo model is not in the cache; fetch it with: forerun pull demo")
    llm = demo()
    params = SamplingParams(max_tokens=200, logprobs=2, **JSON_LAWS[law])
    question = 'Describe yourself as JSON like {"name": "Bo", "kind": "the dog", "numbers": [1, 2], "is_right": true}.'
    messages = [{"role": "user", "content": question}]
    for name, form in FORMS.items():
        plain = llm.chat(messages, params, grammar=form)
        check_form(name, plain)
        for speculation in ("auto", "ngram:k=8,min=1,policy=fixed", "grammar:policy=fixed", "suffix:k=16,policy=fixed"):
            got = llm.chat(messages, params, grammar=form, speculation=speculation)
            assert Answer.of(got) == Answer.of(plain), (name, speculation)


_DEMO: list[LLM] = []


def demo() -> LLM:
    if not _DEMO:
        _DEMO.append(LLM("demo", max_model_len=1024))
    return _DEMO[0]
