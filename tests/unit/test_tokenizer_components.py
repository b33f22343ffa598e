"""What a tokenizer.json may ask of the library: nothing that costs out of proportion, nothing left to chance."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest
import tokenizers

from forerun.errors import LoadError, RequestError
from forerun.models.tokenizer import Tokenizer
from forerun.models.tokenizer_components import check_components, steps_of
from forerun.models.tokenizer_library import library_errors
from forerun.models.tokenizer_pre import PRE_RULES
from tests.fuzz.vocabularies import json_vocabulary


def replacing(what: str, by: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": {"String": what}, "content": by}


def sequence(*steps: Any) -> dict[str, Any]:
    return {"type": "Sequence", "normalizers": list(steps)}


def charsmap(trie: bytes, texts: bytes, stated_len: int | None = None) -> dict[str, Any]:
    length = len(trie) if stated_len is None else stated_len
    blob = base64.b64encode(length.to_bytes(4, "little") + trie + texts).decode()
    return {"type": "Precompiled", "precompiled_charsmap": blob}


def read(kind: str = "byte-level", **changes: Any) -> Tokenizer:
    data = json_vocabulary(kind)
    model = changes.pop("model", {})
    return Tokenizer.from_tokenizer_json(json.dumps(data | changes | {"model": data["model"] | model}), vocab_size=400)


@pytest.mark.parametrize("kind", ["byte-level", "llama", "metaspace", "wordpiece"])
def test_the_usual_ones_are_fine(kind: str) -> None:
    check_components(json_vocabulary(kind))
    assert read(kind).encode("the rain in Spain")


def test_steps_lie_in_sequences() -> None:
    assert list(steps_of(sequence(replacing("a", "b"), sequence({"type": "NFC"})), "normalizers")) == [
        replacing("a", "b"),
        {"type": "NFC"},
    ]
    assert list(steps_of(None, "normalizers")) == []


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"normalizer": sequence(*[replacing("a", "a" * 30)] * 12)}, "make a text more than 256 times longer"),
        ({"normalizer": replacing("a", "b" * 1000)}, "make a text more than 256 times longer"),
        ({"normalizer": {"pattern": {"Regex": "."}, "content": "b" * 300}}, "make a text more than 256 times longer"),
        ({"normalizer": sequence(*[{"type": "ByteLevel"}] * 5)}, "make a text more than 256 times longer"),
        ({"normalizer": charsmap(bytes(8), b"a\0" + b"b" * 300)}, "make a text more than 256 times longer"),
        ({"normalizer": charsmap(bytes(8), b"a\0", 1 << 31)}, "is no map of characters"),
        ({"normalizer": {"type": "Precompiled", "precompiled_charsmap": "?"}}, "is no map of characters"),
        ({"normalizer": replacing("", "x")}, "replaces a text of no characters"),
        ({"normalizer": {"type": "Prepend", "prepend": "x" * 2000}}, "puts more than 1024 characters before"),
        ({"normalizer": sequence(*[{"type": "NFC"}] * 70)}, "more than 32 normalizers and pre-tokenizers"),
        (
            {"pre_tokenizer": {"type": "Split", "pattern": {"Regex": "(a*)*"}, "behavior": "Isolated"}},
            r"'\(a\*\)\*', may take too long on some text: it repeats something that varies",
        ),
        ({"decoder": {"type": "Replace", "pattern": {"Regex": "(a+)+"}, "content": ""}}, "may take too long"),
        ({"model": {"dropout": 0.1}}, "dropout of tokenizer.json is 0.1, but ids must not be a matter of chance"),
        ({"model": {"max_input_chars_per_word": 1 << 40}}, "is 1099511627776, more than 1000"),
        ({"model": {"vocab": [["a" * 2000, 0.0]]}}, "has a piece of more than 1024 characters"),
    ],
)
def test_what_costs_too_much_is_refused(changes: dict[str, Any], why: str) -> None:
    with pytest.raises(LoadError, match=why):
        read(**changes)


@pytest.mark.parametrize("name", sorted(PRE_RULES))
def test_expressions_of_known_families_are_fine(name: str) -> None:
    splits = [{"type": "Split", "pattern": {"Regex": regex}} for regex in PRE_RULES[name].splits]
    check_components(json_vocabulary("llama") | {"pre_tokenizer": {"type": "Sequence", "pretokenizers": splits}})


def test_a_charsmap_may_lengthen_a_little() -> None:
    data = json_vocabulary("llama")
    check_components(data | {"normalizer": charsmap(bytes(8), "ab\0ﷺ\0".encode())})


def test_a_hole_in_the_ids_costs_nothing() -> None:
    added = [*json_vocabulary("byte-level")["added_tokens"], {"id": (1 << 22) - 1, "content": "x", "special": True}]
    with pytest.raises(LoadError, match="has the token id 4194303, but ids must be between 0 and 65535"):
        read(added_tokens=added)


def test_panics_of_the_library_are_errors_of_ours() -> None:
    def panic() -> None:
        tokenizers.normalizers.Replace("", "x").normalize_str("abc")
        splitter = tokenizers.pre_tokenizers.Split(tokenizers.Regex("(x+x+)+y"), behavior="isolated")
        splitter.pre_tokenize_str("x" * 60)

    with pytest.raises(BaseException) as caught:  # noqa: PT011 - its type has no name to import
        panic()
    assert not isinstance(caught.value, Exception)
    with pytest.raises(LoadError, match="could not: "), library_errors(lambda words: LoadError(f"could not: {words}")):
        panic()
    with pytest.raises(KeyboardInterrupt), library_errors(LoadError):
        raise KeyboardInterrupt
    with pytest.raises(RequestError), library_errors(LoadError):
        raise RequestError("as it is")


def test_a_text_that_the_library_cannot_encode_is_a_request_error() -> None:
    words = {"type": "WordLevel", "vocab": {"the": 0}, "unk_token": "missing"}
    data = json_vocabulary("wordpiece") | {"added_tokens": [], "model": words, "post_processor": None}
    tokenizer = Tokenizer.from_tokenizer_json(json.dumps(data))
    assert tokenizer.encode("the") == [0]
    with pytest.raises(RequestError, match="the model's tokenizer can't encode this text: WordLevel error"):
        tokenizer.encode("rain")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"decoder": {"type": ["x"] * 500}}, "the decoder of tokenizer.json is ['x', "),
        ({"version": "\x1b[2J"}, "can't be read by the tokenizers library"),
    ],
)
def test_messages_are_short_and_printable(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(LoadError) as caught:
        read(**changes)
    assert words in str(caught.value)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 500
