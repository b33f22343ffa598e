"""What an output may be asked to look like: what is understood, and what is refused in one sentence (F037)."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from forerun.errors import RequestError
from forerun.models.grammar import MAX_COMPILED, GrammarCompiler, _Vocabulary
from forerun.models.structured import MAX_DEPTH, MAX_LINKS, MAX_SOURCE_CHARS, MAX_SPACE, Structured
from forerun.models.tokenizer import Tokenizer
from forerun.sampling.distribution import is_allowed
from tests.helpers.toy_spm import WORDPIECES, spm, wordpiece_metadata
from tests.helpers.toy_vocab import TOY

schema, lark, regex, choice = Structured.json_schema, Structured.lark, Structured.regex, Structured.choice
COMPILER = GrammarCompiler(TOY, TOY.vocab_size)


def accepts(wanted: Structured, text: str, tokenizer: Tokenizer = TOY, compiler: GrammarCompiler = COMPILER) -> bool:
    """Whether each token of the text may follow the one before, and the end may follow the last."""
    state = compiler.compile(wanted).open()
    ids = _Vocabulary(tokenizer)(text)
    for token_id in (*ids, tokenizer.eos_ids[0]):
        if not is_allowed(state.mask_after(), token_id):
            return False
        state.advance([token_id])
    return True


def nested(depth: int) -> dict[str, Any]:
    value: dict[str, Any] = {}
    for _ in range(depth):
        value = {"items": value}
    return value


def chain(length: int) -> dict[str, Any]:
    links = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(length)}
    return {"$ref": "#/$defs/d0", "$defs": {**links, f"d{length}": {"type": "string"}}}


HOSTILE: dict[str, tuple[Callable[[], Structured], str]] = {
    "no text": (lambda: schema(""), "is no JSON text"),
    "a list": (lambda: schema("[]"), "must be an object"),
    "false": (lambda: schema("false"), "must be an object"),
    "a list, not as text": (lambda: schema([]), "must be an object"),  # type: ignore[arg-type]
    "no JSON value": (lambda: schema({"const": {1, 2}}), "is no JSON value"),
    "not a number": (lambda: schema({"const": float("nan")}), "is no JSON value"),
    "not": (lambda: schema({"not": {}}), 'Unimplemented keys: ."not".'),
    "unknown type": (lambda: schema({"type": "banana"}), "Invalid type: banana"),
    "type of a wrong type": (lambda: schema({"type": 5}), "type must be a string"),
    "properties of a wrong type": (lambda: schema({"properties": [1]}), "properties must be an object"),
    "unknown format": (lambda: schema({"type": "string", "format": "nope"}), "Unknown format: nope"),
    "uniqueItems": (lambda: schema({"type": "array", "uniqueItems": True}), "Unimplemented keys"),
    "if": (lambda: schema({"if": {"type": "string"}, "then": {}}), "Unimplemented keys"),
    "oneOf": (lambda: schema({"oneOf": [{"type": "string"}, {"minLength": 2}]}), "oneOf constraints"),
    "no way to hold": (lambda: schema({"type": "string", "minLength": 5, "maxLength": 2}), "Unsatisfiable"),
    "empty enum": (lambda: schema({"enum": []}), "Unsatisfiable"),
    "unresolvable": (lambda: schema({"$ref": "#/nowhere"}), "does not exist"),
    "remote": (lambda: schema({"$ref": "http://127.0.0.1:1/x"}), "does not fetch"),
    "only itself": (lambda: schema({"$ref": "#"}), "describes no text"),
    "each other": (lambda: schema({"allOf": [{"$ref": "#"}]}), "describes no text"),
    "2 MB": (lambda: schema(json.dumps({"description": "x" * 2_000_000})), f"at most {MAX_SOURCE_CHARS}"),
    "2 MB, not as text": (lambda: schema({"description": "x" * 2_000_000}), f"at most {MAX_SOURCE_CHARS}"),
    "deep": (lambda: schema(nested(500)), f"nested more than {MAX_DEPTH} deep"),
    "deep text": (lambda: schema("[" * 100_000), f"nested more than {MAX_DEPTH} deep"),
    "long chain": (lambda: schema(chain(2900)), f"at most {MAX_LINKS}"),
    "long chain in a grammar": (lambda: lark(f"start: %json {json.dumps(chain(2900))}"), f"at most {MAX_LINKS}"),
    "many remainders": (lambda: schema({"type": "integer", "multipleOf": 99999989}), "too many remainders"),
    "many remainders together": (
        lambda: schema({"type": "integer", "allOf": [{"multipleOf": 9973}, {"multipleOf": 9967}]}),
        "too many remainders",
    ),
    "many remainders in a grammar": (
        lambda: lark('start: %json {"type": "integer", "multipleOf": 99999989}'),
        "too many remainders",
    ),
    "endless divisor": (lambda: schema({"type": "number", "multipleOf": float("1e-300")}), "too many"),
    "bad pattern": (lambda: schema({"type": "string", "pattern": "(("}), "unclosed group"),
    "look-around": (lambda: schema({"type": "string", "pattern": "(?!x)"}), "look-around"),
    "options inside": (lambda: schema({"x-guidance": {"lenient": True}}), "options are given beside"),
    "empty regex": (lambda: regex(""), "must be a text that is not empty"),
    "bad regex": (lambda: regex("(a"), "unclosed group"),
    "backreference": (lambda: regex(r"(a)\1"), "backreferences are not supported"),
    "no text fits": (lambda: regex(r"[^\s\S]"), "describes no text"),
    "regex, deep": (lambda: regex("(" * 3000 + "a" + ")" * 3000), "can't be used"),
    "lone surrogate": (lambda: regex("\ud800"), "lone surrogate"),
    "no choice": (lambda: choice([]), "at least one text"),
    "no texts": (lambda: choice(["a", 3]), "must hold texts"),  # type: ignore[list-item]
    "empty choice": (lambda: choice(["a", ""]), "not empty"),
    "a text for a choice": (lambda: choice("yes"), "must be a list"),
    "empty grammar": (lambda: lark(" \n"), "not empty"),
    "grammar, half": (lambda: lark("start: ("), "Expected token"),
    "no start": (lambda: lark('x: "a"'), "no start rule"),
    "start is start": (lambda: lark("start: start"), "describes no text"),
    "grammar, deep": (lambda: lark("start: " + "(" * 3000 + '"a"' + ")" * 3000), "too deeply nested"),
    "grammar, long": (lambda: lark("\n".join(f"r{i}: r{i + 1}" for i in range(5000))), f"at most {MAX_LINKS}"),
    "grammar, doubling": (
        lambda: lark("start: R0\n" + "\n".join(f"R{i}: R{i + 1} R{i + 1}" for i in range(40)) + '\nR40: "a"'),
        "too big",
    ),
    "unknown control token": (lambda: lark("start: <|nope|>"), "unknown special token"),
    "id beyond": (lambda: lark("start: <[1000000]>"), "too large"),
    "temperature": (lambda: lark('start: a\na[temperature=0.5]: "x"'), "parameter of the request"),
    "stop": (lambda: lark('start: a\na[capture, stop="x"]: /y*/'), "parameter of the request"),
    "unknown kind": (lambda: Structured("yaml"), "must be one of"),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("name", HOSTILE)
def test_what_cannot_be_had_is_refused_in_one_sentence_f037(name: str) -> None:
    make, message = HOSTILE[name]
    with pytest.raises(RequestError, match=message) as error:
        COMPILER.compile(make())
    assert error.value.param == "grammar"
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 500
    assert accepts(choice(["a"]), "a")  # and the next one is served


@pytest.mark.parametrize(
    ("wanted", "right", "wrong"),
    [
        (Structured.json_object(), ["{}", '{"a": [1, 2.5e3, null, true, {"b": "\\u0001 é"}]}'], ["[]", "{", "{} x"]),
        (Structured.json_object(compact=True), ['{"a":1,"b":[2,3]}'], ['{"a": 1}']),
        (schema({"type": "integer"}), ["0", "-12"], ["1.5", "01", '"1"']),
        (schema('{"enum": ["a b", 1, null]}'), ['"a b"', "1", "null"], ['"a"', "2"]),
        (schema({"type": "integer", "multipleOf": 7}), ["14", "0"], ["15"]),
        (schema({"type": "number", "multipleOf": 0.25}), ["0.75", "2"], ["0.3"]),
        (schema({"type": "string", "uniqueItems": True, "format": "nope"}, lenient=True), ['"x"'], ["x"]),
        (
            schema({"oneOf": [{"type": "string"}, {"type": "string", "minLength": 2}]}, one_of_is_any_of=True),
            ['"x"'],
            ["1"],
        ),
        (schema(chain(MAX_LINKS - 1)), ['"x"'], ["1"]),
        (schema({"type": "object", "properties": {"a": {"$ref": "#"}}}), ['{"a": {"a": {}}}'], ['{"a": 1}']),
        (regex("[ab]{2,3}c?"), ["ab", "abac", "bbb"], ["a", "abab", "c"]),
        (regex("^(yes|no)$"), ["yes", "no"], ["yesno", ""]),
        (regex("a/b\\/[/]"), ["a/b//"], ["a/b/"]),
        (regex("x*"), ["", "xxx"], ["y"]),
        (choice(["yes", "no", "note"]), ["yes", "no", "note"], ["not", "y", "yesno"]),
        (choice(["a\"b\\c\n/x'", "日本", "\x00\x1b"]), ["a\"b\\c\n/x'", "日本", "\x00\x1b"], ["日"]),
        (choice([f"c{i}" for i in range(5000)]), ["c0", "c4999", "c77"], ["c5000"]),
        (lark('start: "a" x "a"\nx: "b" x "b" | "c"'), ["aca", "abbcbba"], ["abca", "ac"]),
    ],
    ids=lambda value: value.kind if isinstance(value, Structured) else None,
)
def test_texts_are_told_apart(wanted: Structured, right: list[str], wrong: list[str]) -> None:
    assert [text for text in right if not accepts(wanted, text)] == []
    assert [text for text in wrong if accepts(wanted, text)] == []


def test_sentencepiece_vocabularies_spell_everything() -> None:
    tokenizer = spm()
    compiler = GrammarCompiler(tokenizer, tokenizer.vocab_size)
    wanted = schema({"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]})
    for text in ('{"a":"the hand"}', '{"a": "\u00df {}"}'):  # letters that are bytes here
        assert accepts(wanted, text, tokenizer, compiler)
    assert not accepts(wanted, '{"b":1}', tokenizer, compiler)


def test_a_vocabulary_that_cannot_end_is_refused() -> None:
    tokenizer = Tokenizer.from_gguf(wordpiece_metadata())
    with pytest.raises(RequestError, match="no end-of-text token"):
        GrammarCompiler(tokenizer, len(WORDPIECES)).compile(choice(["the"]))


def test_a_vocabulary_that_cannot_spell_it_is_refused() -> None:
    tokenizer = spm(has_bytes=False)
    with pytest.raises(RequestError, match="none that this model's vocabulary can write"):
        GrammarCompiler(tokenizer, tokenizer.vocab_size).compile(choice(["\u00df"]))


@pytest.mark.parametrize(
    ("wanted", "text", "message"),
    [
        (schema({"type": "object", "properties": {f"r{i}": {} for i in range(2000)}}), "{", "items; max is 2000"),
        (regex("(a{1000}){1000}"), "aaaa", "too many expressions constructed"),
    ],
    ids=["optional", "repeated"],
)
def test_what_takes_too_much_work_later_ends_its_request_then(wanted: Structured, text: str, message: str) -> None:
    """Some things are looked at when they may come next."""
    state = COMPILER.compile(wanted).open()
    ids = TOY.encode(text, add_bos=False)
    with pytest.raises(RequestError, match=f"takes more work than is allowed: .*{message}"):
        [state.mask_after(ids[:end]) for end in range(len(ids) + 1)]
    assert accepts(choice(["a"]), "a")


def test_white_space_ends_f010() -> None:
    state = COMPILER.compile(Structured.json_object()).open()
    space = TOY.encode("{ ", add_bos=False, continues=True)[-1]
    state.advance(TOY.encode("{", add_bos=False, continues=True))
    for _ in range(MAX_SPACE):
        assert is_allowed(state.mask_after(), space)
        state.advance([space])
    assert not is_allowed(state.mask_after(), space)


def test_grammars_are_kept_within_bounds() -> None:
    compiler = GrammarCompiler(TOY, TOY.vocab_size)
    first = compiler.compile(choice(["a"]))
    assert compiler.compile(choice(["a", "a"])) is first
    for number in range(MAX_COMPILED - 1):
        compiler.compile(choice([str(number)]))
    assert compiler.compile(choice(["a"])) is first  # used again, so the next one takes another's place
    compiler.compile(choice(["one more"]))
    assert compiler.compile(choice(["a"])) is first
    assert len(compiler._known) == MAX_COMPILED
