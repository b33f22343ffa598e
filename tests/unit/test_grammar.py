"""A grammar's state along a draft tree: a function of the path, whatever was asked before."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from forerun.errors import EngineFault, RequestError
from forerun.models.grammar import GrammarCompiler, GrammarState
from forerun.models.structured import Structured
from forerun.models.tokenizer import Tokenizer
from forerun.sampling.distribution import count_allowed, is_allowed
from forerun.types import UInt32Array
from tests.helpers.gguf_files import vocabulary
from tests.helpers.toy_spm import UNUSED, spm
from tests.helpers.toy_vocab import TOY, metadata

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 5},
        "kind": {"enum": ["the", "this", "other thing"]},
        "numbers": {"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 3},
        "ok": {"type": "boolean"},
    },
    "required": ["name", "kind", "numbers", "ok"],
    "additionalProperties": False,
}
WANTED = {
    "schema": Structured.json_schema(SCHEMA),
    "compact": Structured.json_schema(SCHEMA, compact=True),
    "object": Structured.json_object(),
    "regex": Structured.regex("(the|and){1,3} [0-9]{2}( é+)?"),
    "choice": Structured.choice(["the hand", "the handle", "another one"]),
    "lark": Structured.lark('start: "(" start ")" | "the " /[a-z]{1,4}/ | ""'),
}
LETTERS = '▁{}[]:,()"abcdefghijklmnoprstuvwxyz0123456789.-+\\'
VOCABULARIES = {"bpe": TOY, "spm": spm(), "no bytes": spm(("▁t", "the", *LETTERS), has_bytes=False)}
COMPILERS = {name: GrammarCompiler(tokenizer, tokenizer.vocab_size + 40) for name, tokenizer in VOCABULARIES.items()}


def allowed_ids(mask_V: UInt32Array) -> list[int]:
    return [token_id for token_id in range(32 * len(mask_V)) if is_allowed(mask_V, token_id)]


def fresh_mask(wanted: Structured, compiler: GrammarCompiler, token_ids: list[int]) -> UInt32Array:
    """The mask after some tokens, by a state that has seen nothing else."""
    state = compiler.compile(wanted).open()
    state.advance(token_ids)
    return state.mask_after()


def walk(wanted: Structured, compiler: GrammarCompiler, seed: int, length: int = 60) -> list[int]:
    """Tokens that the grammar allows one after the other, up to an end-of-text id or a length."""
    rng = random.Random(seed)
    state = compiler.compile(wanted).open()
    ids: list[int] = []
    while len(ids) < length and not ({0, 2} & set(ids[-1:])):
        ids.append(rng.choice(allowed_ids(state.mask_after())))
        state.advance(ids[-1:])
    return ids


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
@pytest.mark.parametrize("name", WANTED)
def test_masks_depend_on_the_path_alone(name: str, vocabulary: str) -> None:
    """Trees of right, allowed and random tokens, asked in any order, with and without asking what is forced."""
    if vocabulary == "no bytes" and name in ("regex", "lark"):
        pytest.skip("needs letters that this vocabulary has not")
    wanted, compiler, tokenizer = WANTED[name], COMPILERS[vocabulary], VOCABULARIES[vocabulary]
    for seed in range(6):
        rng = random.Random(seed)
        truth = walk(wanted, compiler, seed, 30)
        state = compiler.compile(wanted).open()
        at = 0
        while at < len(truth):
            if rng.random() < 0.5:
                forced = state.forced_ids()
                assert all(is_allowed(state.mask_after(forced[:i]), forced[i]) for i in range(len(forced)))
            for _ in range(4):
                path = truth[at : at + rng.randrange(4)]
                if rng.random() < 0.5:
                    path.append(rng.randrange(tokenizer.vocab_size))
                mask_V = state.mask_after(path)
                reached = follow(wanted, compiler, truth[:at], path)
                if reached is None:
                    assert count_allowed(mask_V) == 32 * len(mask_V)
                elif is_by_masks(wanted, compiler, truth[:at], path):
                    assert np.array_equal(mask_V, reached), (truth[:at], path)
            num = rng.randrange(1, 4)
            state.advance(truth[at : at + num])
            at += num
        assert state.is_finished or truth[-1] not in tokenizer.eos_ids


def follow(wanted: Structured, compiler: GrammarCompiler, done: list[int], path: list[int]) -> UInt32Array | None:
    """The mask after a path by a fresh state; None where the grammar forbids the path or it has ended."""
    if {0, 2} & set(path):
        return None
    state = compiler.compile(wanted).open()
    state.advance(done)
    try:
        state.advance(path)
    except EngineFault:
        return None
    return state.mask_after()


def is_by_masks(wanted: Structured, compiler: GrammarCompiler, done: list[int], path: list[int]) -> bool:
    """Whether each token of the path is one that the mask before it allows: nobody is asked about the others."""
    state = compiler.compile(wanted).open()
    state.advance(done)
    for token_id in path:
        if not is_allowed(state.mask_after(), token_id):
            return False
        state.advance([token_id])
    return True


@pytest.mark.parametrize("vocabulary", ["bpe", "spm"])
@pytest.mark.parametrize("name", WANTED)
def test_ends_are_allowed_exactly_where_the_output_could_end(name: str, vocabulary: str) -> None:
    """In both vocabularies: every end-of-text id or none, and nothing but them once nothing else can follow."""
    wanted, compiler, tokenizer = WANTED[name], COMPILERS[vocabulary], VOCABULARIES[vocabulary]
    for seed in range(10):
        truth = walk(wanted, compiler, seed)
        state = compiler.compile(wanted).open()
        for at, token_id in enumerate(truth):
            mask_V = state.mask_after()
            ends = [is_allowed(mask_V, end) for end in tokenizer.eos_ids]
            assert len(set(ends)) == 1
            text = b"".join(map(tokenizer.token_bytes, truth[:at])) if ends[0] else None
            if state.is_finished:
                assert set(allowed_ids(mask_V)) == set(tokenizer.eos_ids)
            assert text is None or not text.startswith(b"{") or text.endswith(b"}")
            state.advance([token_id])
        assert not any(i >= tokenizer.vocab_size for i in allowed_ids(fresh_mask(wanted, compiler, [])))


def test_control_tokens_are_never_text() -> None:
    """Their names are bytes like others, but a string can't be continued with them."""
    state = COMPILERS["bpe"].compile(Structured.json_object()).open()
    state.advance(TOY.encode('{"', add_bos=False))
    mask_V = state.mask_after()
    assert not any(is_allowed(mask_V, special) for special in TOY.special_ids)
    assert is_allowed(mask_V, TOY.encode("<", add_bos=False)[0])


def test_forced_tokens_are_the_usual_ones() -> None:
    state = COMPILERS["bpe"].compile(Structured.choice(["the other thing", "the other hand"])).open()
    forced = state.forced_ids()
    assert forced == tuple(TOY.encode("the other thing", add_bos=False))[: len(forced)]
    assert TOY.decode(forced, continues=True) == "the other"[: len(TOY.decode(forced, continues=True))]
    assert len(forced) > 1
    assert COMPILERS["no bytes"].compile(Structured.choice(["the"])).open().forced_ids() == ()


def test_a_vocabulary_that_lacks_a_few_bytes_still_has_usual_tokens() -> None:
    """Real ones lack control characters; only what may ask for one of them isn't forced."""
    tokens, merges, types = vocabulary(330)
    at = tokens.index(chr(256 + 4))
    tokens[at], types[at] = "<|unused|>", UNUSED
    gappy = Tokenizer.from_gguf(metadata(tokens=tokens, token_type=types, merges=merges))
    compiler = GrammarCompiler(gappy, gappy.vocab_size)
    the_other = tuple(gappy.encode("the other", add_bos=False))
    forced = compiler.compile(Structured.choice(["the other thing", "the other hand"])).open().forced_ids()
    assert forced[:3] == the_other[:3]
    for pattern, is_forced in ((r" the (\x04|x)", False), (" the (y|x)", True)):
        num_ways = count_allowed(compiler.compile(Structured.regex(pattern)).open().mask_after())
        assert (num_ways == 1) == is_forced
    with pytest.raises(RequestError, match="none that this model's vocabulary can write"):
        compiler.compile(Structured.choice(["\x04"]))


def test_nothing_is_left_of_a_request_in_the_next() -> None:
    grammar = COMPILERS["bpe"].compile(WANTED["schema"])
    before = grammar.open().mask_after()
    used = grammar.open()
    for token_id in walk(WANTED["schema"], COMPILERS["bpe"], 3):
        used.advance([token_id])
    assert np.array_equal(grammar.open().mask_after(), before)
    assert grammar.open().forced_ids() == grammar.open().forced_ids()


def test_what_the_grammar_forbids_is_a_fault_once_it_is_emitted() -> None:
    state: GrammarState = COMPILERS["bpe"].compile(Structured.choice(["yes"])).open()
    wrong = TOY.encode("q", add_bos=False)
    assert count_allowed(state.mask_after(wrong)) == 32 * len(state.mask_after())
    with pytest.raises(EngineFault, match="was emitted against the grammar"):
        state.advance(wrong)


def test_nothing_follows_an_end_of_text() -> None:
    state = COMPILERS["bpe"].compile(Structured.choice(["yes"])).open()
    yes = TOY.encode("yes", add_bos=False)
    assert count_allowed(state.mask_after([*yes, 2])) == 32 * len(state.mask_after())
    state.advance([*yes, 2])
    assert state.is_finished
    assert state.forced_ids() == ()
