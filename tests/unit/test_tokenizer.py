from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.errors import LoadError, RequestError
from forerun.models.tokenizer import Tokenizer
from tests.helpers.gguf_files import vocabulary
from tests.helpers.toy_spm import spm_metadata, wordpiece_metadata
from tests.helpers.toy_vocab import CONTROL, TOY, USER_DEFINED, metadata, tokenizer

TOOL_CALL = TOY.vocab_size - 1


@given(st.text())
@settings(max_examples=200, deadline=None)
def test_a_byte_vocabulary_gives_every_text_back(text: str) -> None:
    ids = TOY.encode(text)
    assert TOY.decode(ids) == text
    assert b"".join(map(TOY.token_bytes, ids)) == text.encode()


def test_merges_are_applied_within_the_splits_of_the_rule() -> None:
    pieces = [TOY.token_bytes(i) for i in TOY.encode("in the 12  3")]
    assert pieces == [b"in", b" the", b" ", b"1", b"2", b" ", b" ", b"3"]


def test_rules_differ_in_what_they_split() -> None:
    tokens, merges, types = vocabulary(330)
    extra = {"tokens": [*tokens, "Ġ1", "12", "123", "xyz", "é"], "token_type": [*types, 1, 1, 1, 1, 1]}
    extra["merges"] = [*merges, "Ġ 1", "1 2", "12 3", "Ã ©"]
    extra["tokens"][-1] = "Ã©"

    def pieces(pre: str, text: str) -> list[bytes]:
        toy = tokenizer(pre=pre, **extra)
        return [toy.token_bytes(i) for i in toy.encode(text, add_bos=False)]

    assert pieces("gpt-2", " 1") == [b" 1"]
    assert pieces("smollm", " 1") == [b" ", b"1"]
    assert pieces("smollm", "1231") == [b"1", b"2", b"3", b"1"]
    assert pieces("gpt-2", "1231") == [b"123", b"1"]
    assert pieces("qwen2", "1231") == [b"1", b"2", b"3", b"1"]
    assert pieces("llama-bpe", "1231") == [b"123", b"1"]
    # No merge leads to "xyz"; one family takes whole tokens all the same.
    assert pieces("llama-bpe", "xyz") == [b"xyz"]
    assert pieces("gpt-2", "xyz") == [b"x", b"y", b"z"]
    assert pieces("qwen2", "e\u0301") == ["é".encode()]
    assert pieces("gpt-2", "e\u0301") == [b"e", b"\xcc", b"\x81"]


@pytest.mark.parametrize("make", [metadata, spm_metadata, wordpiece_metadata])
def test_a_tokenizer_lets_go_of_the_file_s_metadata(make: Callable[[], dict[str, Any]]) -> None:
    class Metadata(dict[str, Any]):
        """A dictionary that can be watched."""

    keys = Metadata(make())
    watched = weakref.ref(keys)
    toy = Tokenizer.from_gguf(keys)
    del keys
    gc.collect()
    assert watched() is None
    assert toy.decode(toy.encode("the"), continues=False) == "the"


def test_control_names_in_text_stay_text_unless_allowed_f049() -> None:
    text = "a<|im_end|>\n<|im_start|>system"
    plain, special = TOY.encode(text), TOY.encode(text, allow_special=True)
    assert not TOY.special_ids.intersection(plain)
    assert TOY.decode(plain) == text
    assert [i for i in special if i in TOY.special_ids] == [2, 1]
    assert TOY.decode(special) == "a\nsystem"
    assert TOY.decode(special, skip_special=False) == text


def test_longer_control_names_win() -> None:
    data = metadata()
    names, types = data["tokenizer.ggml.tokens"], data["tokenizer.ggml.token_type"]
    toy = tokenizer(tokens=[*names, "<|im_end|>>"], token_type=[*types, CONTROL])
    assert toy.encode("<|im_end|>>", allow_special=True) == [len(names)]


def test_user_defined_tokens_are_part_of_the_text() -> None:
    assert TOY.encode("<tool_call>x") == [TOOL_CALL, *TOY.encode("x")]
    assert TOY.decode([TOOL_CALL]) == "<tool_call>"


def test_a_control_token_of_plain_letters_is_no_merge_result() -> None:
    data = metadata(pre="llama-bpe")
    data["tokenizer.ggml.tokens"] = [*data["tokenizer.ggml.tokens"], "PAD"]
    data["tokenizer.ggml.token_type"] = [*data["tokenizer.ggml.token_type"], CONTROL]
    toy = Tokenizer.from_gguf(data)
    assert toy.vocab_size - 1 not in toy.encode("PAD", add_bos=False)


def test_a_control_token_is_no_merge_result_even_where_the_merges_spell_it_f049() -> None:
    data = metadata()
    tokens, types = data["tokenizer.ggml.tokens"], data["tokenizer.ggml.token_type"]
    merges = [*data["tokenizer.ggml.merges"], "P A", "PA D"]
    toy = tokenizer(tokens=[*tokens, "PA", "PAD"], token_type=[*types, 1, CONTROL], merges=merges)
    assert [toy.token_bytes(i) for i in toy.encode("PAD")] == [b"PA", b"D"]


def test_names_that_end_a_turn_are_control_tokens_whatever_the_file_says_f049() -> None:
    data = metadata()
    tokens, types = data["tokenizer.ggml.tokens"], data["tokenizer.ggml.token_type"]
    toy = tokenizer(tokens=[*tokens, "<|eot_id|>"], token_type=[*types, USER_DEFINED])
    assert len(tokens) in toy.special_ids
    assert len(tokens) not in toy.encode("<|eot_id|>")
    assert toy.eos_ids == (2, 0, len(tokens))


def test_a_message_end_is_no_end_where_there_are_ends_of_turns() -> None:
    data = metadata()
    tokens, types = data["tokenizer.ggml.tokens"], data["tokenizer.ggml.token_type"]
    harmony = ["<|end|>", "<|return|>", "<|call|>"]
    for more, ends in ((harmony[:1], (2, 0, 331)), (harmony, (2, 0, 332, 333))):
        toy = tokenizer(tokens=[*tokens, *more], token_type=[*types, *[CONTROL] * len(more)])
        assert toy.eos_ids == ends


def test_merges_over_characters_take_whole_lines_and_fall_back_to_bytes() -> None:
    pieces = ["▁", "a", "b", "\n", "▁a", "▁ab", "b▁a", "\n\n", "PAD"]
    tokens = ["<pad>", "<eos>", "<bos>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces, "P", "AD"]
    types = [CONTROL] * 3 + [6] * 256 + [1] * 11
    merges = ["▁ a", "b ▁a", "▁a b", "\n \n", "P AD", "< 0x41>"]
    keys = {"model": "gemma4", "tokens": tokens, "token_type": types, "merges": merges, "add_bos_token": False}
    data = {f"tokenizer.ggml.{key}": value for key, value in keys.items()} | {
        "tokenizer.ggml.bos_token_id": 2,
        "tokenizer.ggml.eos_token_id": 1,
    }
    toy = Tokenizer.from_gguf(data)
    assert toy.adds_bos  # this family's files that say otherwise are wrong
    found = [toy.token_text(i) for i in toy.encode(" ab ab", add_bos=False)]
    assert found == ["▁a", "b▁a", "b"]  # the better merge reaches across words
    assert [toy.token_text(i) for i in toy.encode("a\n\n\nb", add_bos=False)] == ["a", "\n\n", "\n", "b"]
    assert toy.encode("é", add_bos=False) == [3 + 0xC3, 3 + 0xA9]
    assert toy.decode(toy.encode(" é\n a日", add_bos=False)) == " é\n a日"


@pytest.mark.parametrize(
    ("adds", "add_bos", "count"), [(True, None, 1), (False, None, 0), (False, True, 1), (True, False, 0)]
)
def test_exactly_one_begin_token_f048(adds: bool, add_bos: bool | None, count: int) -> None:
    toy = tokenizer(add_bos_token=adds)
    assert toy.encode("hi", add_bos=add_bos).count(1) == count
    once_written = toy.encode("<|im_start|>hi", allow_special=True, add_bos=add_bos)
    assert once_written.count(1) == 1


def test_begin_token_defaults_and_absence() -> None:
    assert tokenizer(pre="llama-bpe", add_bos_token=None).adds_bos
    assert not tokenizer(add_bos_token=None).adds_bos
    without = tokenizer(bos_token_id=None, add_bos_token=True)
    assert without.bos_id is None
    assert without.encode("") == []
    with pytest.raises(RequestError, match="no begin token"):
        without.encode("hi", add_bos=True)


def test_end_ids_are_the_files_own_then_the_known_ones() -> None:
    assert TOY.eos_ids == (2, 0)
    assert tokenizer(eos_token_id=0, eot_token_id=2).eos_ids == (0, 2)
    assert tokenizer(eos_token_id=TOOL_CALL).eos_ids == (TOOL_CALL, 0, 2)
    assert TOOL_CALL in tokenizer(eos_token_id=TOOL_CALL).special_ids


@pytest.mark.parametrize("text", ["\ud83d", "ab\ud83d", "\ude00\ud83d"])
def test_lone_surrogates_are_refused_f042(text: str) -> None:
    with pytest.raises(RequestError, match=r"lone surrogate \(U\+D[8E]"):
        TOY.encode(text)


@pytest.mark.parametrize("token_id", [-1, 331, 10**9])
def test_ids_outside_the_vocabulary_are_refused(token_id: int) -> None:
    with pytest.raises(RequestError, match=f"token id {token_id} is outside the vocabulary \\(0 to 330\\)"):
        TOY.token_bytes(token_id)


@pytest.mark.parametrize(
    ("name", "found", "near"),
    [
        ("default", "is 'default'", "such as gpt-2, llama-bpe, qwen2:"),
        ("smolm", "is 'smolm'", "such as smollm"),
        ("qwen-2", "is 'qwen-2'", "such as qwen2"),
        (None, "is missing", "such as gpt-2"),
        (["gpt-2"], "is a list of 1", "such as"),
        ("x" * 1000, "is 'xxx", "such as"),
    ],
)
def test_an_unknown_pre_tokenizer_is_refused_by_name_f050(name: object, found: str, near: str) -> None:
    with pytest.raises(LoadError, match=f"tokenizer.ggml.pre {found}.* but must be one of .*{near}") as caught:
        tokenizer(pre=name)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model": "rwkv"}, "tokenizer.ggml.model is 'rwkv', but must be one of 'gpt2', 'gemma4', 'llama', 'bert'"),
        ({"model": None}, "tokenizer.ggml.model is missing"),
        ({"tokens": None}, "tokenizer.ggml.tokens is missing"),
        ({"tokens": [1, 2]}, "tokenizer.ggml.tokens must hold nothing but str"),
        ({"token_type": [1]}, "tokenizer.ggml.token_type has 1 entries"),
        ({"merges": None}, "tokenizer.ggml.merges is missing"),
        ({"merges": ["nosuch token"]}, "tokenizer.ggml.merges does not fit"),
        ({"eos_token_id": 331}, "tokenizer.ggml.eos_token_id is 331"),
        ({"bos_token_id": -1}, "tokenizer.ggml.bos_token_id is -1"),
        ({"bos_token_id": "1"}, "tokenizer.ggml.bos_token_id is '1'"),
    ],
)
def test_malformed_files_are_refused_by_key(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(LoadError) as caught:
        tokenizer(**changes)
    assert words in str(caught.value)
