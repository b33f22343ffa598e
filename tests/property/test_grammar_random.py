"""Outputs under random schemas validate, end, and are the same with drafts."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from forerun import LLM, SamplingParams, Structured
from forerun.models.grammar import GrammarCompiler
from forerun.sampling.distribution import is_allowed
from tests.helpers.engines import Answer
from tests.helpers.gguf_files import write_tiny_llama
from tests.helpers.toy_vocab import TOY

COMPILER = GrammarCompiler(TOY, TOY.vocab_size)
WORDS = st.sampled_from(["the", "a b", "é", 'quo"te', "", "line\nbreak", "x" * 9])

VALUES = st.lists(st.one_of(WORDS, st.integers(-5, 5), st.none()), min_size=1, max_size=4)
PAIRS = st.tuples(st.integers(0, 6), st.integers(0, 6)).map(sorted)

SCALARS = st.one_of(
    PAIRS.map(lambda ends: {"type": "integer", "minimum": -ends[1], "maximum": 17 * ends[0]}),
    PAIRS.map(lambda ends: {"type": "string", "minLength": ends[0], "maxLength": ends[1]}),
    st.sampled_from([1, 5, 7]).map(lambda divisor: {"type": "integer", "multipleOf": divisor}),
    st.sampled_from([0.5, 0.25]).map(lambda divisor: {"type": "number", "multipleOf": divisor}),
    VALUES.map(lambda values: {"enum": values}),
    WORDS.map(lambda value: {"const": value}),
    st.sampled_from(
        [
            {"type": "boolean"},
            {"type": "null"},
            {"type": ["integer", "null"]},
            {"type": "string", "format": "date"},
            {"type": "string", "pattern": "^[a-f]{2,4}(-[0-9])?$"},
        ]
    ),
)


def deeper(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    names = st.lists(st.sampled_from(["a", "the name", "b-c", "é"]), unique=True, max_size=3)

    def objects(names: list[str], schemas: list[Any], num_required: int) -> dict[str, Any]:
        return {
            "type": "object",
            "properties": dict(zip(names, schemas, strict=False)),
            "required": names[:num_required],
            "additionalProperties": False,
        }

    def arrays(items: Any, a: int, b: int) -> dict[str, Any]:
        return {"type": "array", "items": items, "minItems": min(a, b), "maxItems": max(a, b)}

    return st.one_of(
        st.builds(objects, names, st.lists(inner, min_size=3, max_size=3), st.integers(0, 3)),
        st.builds(arrays, inner, st.integers(0, 3), st.integers(0, 3)),
        st.builds(lambda schemas: {"anyOf": schemas}, st.lists(inner, min_size=1, max_size=3)),
    )


SCHEMAS = st.recursive(SCALARS, deeper, max_leaves=6).filter(lambda schema: json.dumps(schema) != "{}")


def written(wanted: Structured, seed: int) -> str:
    """A random output: what closes something is liked, so that it ends."""
    state = COMPILER.compile(wanted).open()
    rng = random.Random(seed)
    ids: list[int] = []
    while True:
        mask_V = state.mask_after()
        allowed = [token_id for token_id in range(TOY.vocab_size) if is_allowed(mask_V, token_id)]
        ends = [token_id for token_id in allowed if token_id in TOY.eos_ids]
        if ends and (len(ends) == len(allowed) or rng.random() < 0.3):
            return TOY.decode(ids, continues=True)
        choices = [token_id for token_id in allowed if token_id not in ends]
        closing = [token_id for token_id in choices if TOY.token_bytes(token_id)[:1] in b'"]}']
        ids.append(rng.choice(closing if closing and rng.random() < 0.2 else choices))
        state.advance(ids[-1:])
        assert len(ids) < 5000


@settings(max_examples=120, deadline=None, derandomize=True)
@given(schema=SCHEMAS, seed=st.integers(0, 10**6), compact=st.booleans())
def test_outputs_validate(schema: dict[str, Any], seed: int, compact: bool) -> None:
    text = written(Structured.json_schema(schema, compact=compact), seed)
    Draft202012Validator(schema).validate(json.loads(text))


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    return LLM(write_tiny_llama(tmp_path_factory.mktemp("random") / "tiny.gguf", fmt="q8_0", num_layers=1), threads=1)


@settings(max_examples=30, deadline=None, derandomize=True)
@given(schema=SCHEMAS, seed=st.integers(0, 10**6), temperature=st.sampled_from([0.0, 1.0]))
def test_drafts_change_nothing_whatever_the_schema_f010(
    llm: LLM, schema: dict[str, Any], seed: int, temperature: float
) -> None:
    form = Structured.json_schema(schema, compact=True)
    params = SamplingParams(max_tokens=60, temperature=temperature, seed=seed, logprobs=1)
    plain, *others = (
        llm.generate(["the"], params, speculation=speculation, grammar=form)[0]
        for speculation in ("off", "grammar:policy=fixed", "ngram:k=6,min=1,policy=fixed+grammar:policy=fixed", "auto")
    )
    assert [Answer.of(other) for other in others] == [Answer.of(plain)] * len(others)
    if plain.finish_reason == "stop":
        Draft202012Validator(schema).validate(json.loads(plain.text))
