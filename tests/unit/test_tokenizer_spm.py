from __future__ import annotations

import itertools
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.errors import LoadError
from forerun.models.tokenizer import Tokenizer
from tests.helpers.toy_spm import CONTROL, LETTERS, NORMAL, PIECES, UNUSED, USER_DEFINED, spm, spm_metadata

TOY = spm()
FIRST = 3 + 256  # id of the first piece


def texts(toy: Tokenizer, text: str, **options: Any) -> list[str]:
    return [toy.token_text(i) for i in toy.encode(text, add_bos=False, **options)]


def test_the_highest_score_joins_first_and_the_leftmost_of_equals() -> None:
    toy = spm([("ab", -1.0), ("bc", -2.0), ("abc", -9.0), ("aa", -1.0), *((c, -20.0) for c in "abc▁")])
    assert texts(toy, "abc") == ["▁", "abc"]
    assert texts(toy, "bca") == ["▁", "bc", "a"]
    assert texts(toy, "aaa") == ["▁", "aa", "a"]
    toy = spm([("ab", -2.0), ("bc", -1.0), ("abc", -9.0), *((c, -20.0) for c in "abc▁")], add_space_prefix=False)
    assert texts(toy, "abc") == ["abc"]
    assert texts(toy, "abab") == ["ab", "ab"]


def test_spaces_are_spelled_out_and_one_is_put_in_front() -> None:
    assert texts(TOY, "the") == ["▁the"]
    assert texts(TOY, " the  the") == ["▁", "▁the", "▁", "▁the"]
    assert texts(TOY, "") == []
    bare = spm(add_space_prefix=False)
    assert texts(bare, "he the") == ["he", "▁the"]


def test_what_is_no_token_becomes_bytes() -> None:
    assert TOY.encode("ü", add_bos=False) == [FIRST + len(PIECES), 3 + 0xC3, 3 + 0xBC]
    assert TOY.token_text(FIRST + len(PIECES)) == "▁"
    assert texts(TOY, "<0x41>") == ["▁", "<0x3C>", "0", "x", "4", "1", "<0x3E>"]


def test_without_bytes_neighbouring_unknown_characters_are_one_token() -> None:
    toy = spm(has_bytes=False)
    assert texts(toy, "aüöb ü") == ["▁a", "<unk>", "b", "▁", "<unk>"]
    assert texts(toy, "üö  ü") == ["▁", "<unk>", "▁▁", "<unk>"]


def test_control_tokens_are_no_joined_text_f049() -> None:
    pieces = [("<s", -1.0), ("/s", -1.0), *((c, -20.0) for c in "<s>/▁ab")]
    toy = spm(pieces, extra=[("ab", CONTROL)])
    for text in ("<s>", "</s>", "<unk>", "ab", "<s>a</s>"):
        assert not toy.special_ids.intersection(toy.encode(text, add_bos=False)), text
        assert toy.decode(toy.encode(text)) == text
    assert toy.encode("<s>a</s>", allow_special=True)[0] == 1


def test_user_defined_tokens_are_matched_first() -> None:
    toy = spm(extra=[("<t>", USER_DEFINED), ("<t>>", USER_DEFINED), ("in", USER_DEFINED)], add_space_prefix=False)
    assert texts(toy, "he<t>>in<t>re") == ["he", "<t>>", "in", "<t>", "re"]


def test_unused_tokens_are_steps_but_no_ends() -> None:
    pieces = [("ab", -1.0), ("abc", -3.0), *((c, -20.0) for c in "abc▁")]
    data = spm_metadata(pieces, add_space_prefix=False)
    data["tokenizer.ggml.token_type"][FIRST] = UNUSED
    toy = Tokenizer.from_gguf(data)
    assert texts(toy, "abc") == ["abc"]
    assert texts(toy, "abb") == ["a", "b", "b"]


def test_a_special_token_starts_anew_with_a_space() -> None:
    assert texts(TOY, "the<s>the", allow_special=True) == ["▁the", "<s>", "▁the"]


def test_phi_3_control_tokens_take_the_whitespace_after_them_along() -> None:
    data = spm_metadata(extra=[("<|user|>", CONTROL)])
    for name, expected in (("Phi-3-mini", ["<|user|>", "▁the"]), ("other", ["<|user|>", "▁", "<0x0A>", "t", "he"])):
        toy = Tokenizer.from_gguf(data | {"general.name": name})
        assert texts(toy, "<|user|>\nthe", allow_special=True) == expected
        assert "".join(piece for _, piece in toy.split_special("<|user|>\nthe")) == "<|user|>\nthe"
        assert texts(toy, "<s> the", allow_special=True) == ["<s>", "▁", "▁the"]


@pytest.mark.parametrize(("flag", "first"), [(None, [1]), (True, [1]), (False, [])])
def test_begin_and_end_tokens_have_conventional_ids_f048(flag: bool | None, first: list[int]) -> None:
    toy = spm(add_bos_token=flag)
    assert (toy.bos_id, toy.eos_ids) == (1, (2,))
    assert toy.encode("the") == [*first, FIRST + 6]
    assert toy.encode("<s>the", allow_special=True) == [1, FIRST + 6]


TEXT = st.text(
    alphabet=st.one_of(st.sampled_from(LETTERS[1:] + "   \n\t日ü👍"), st.characters(codec="utf-8")), max_size=60
)


@given(TEXT)
@settings(max_examples=300, deadline=None)
def test_a_vocabulary_with_bytes_gives_every_text_back_f028(text: str) -> None:
    text = text.replace("▁", "")  # a space is spelled with it, so it can't come back
    for toy in (TOY, spm(add_space_prefix=False)):
        ids = toy.encode(text)
        assert toy.decode(ids) == text
        tail = toy.decode(ids[2:], continues=True)
        assert text.endswith(tail.lstrip("\ufffd"))


def naive(toy: Tokenizer, scores: dict[str, float], unused: set[str], text: str) -> list[str]:
    """The definition: look at all pairs, join the best, begin anew."""
    symbols = list(text)
    made: dict[str, tuple[str, str]] = {}
    while True:
        pairs = [(-scores[a + b], i) for i, (a, b) in enumerate(itertools.pairwise(symbols)) if a + b in scores]
        if not pairs:
            break
        for a, b in itertools.pairwise(symbols):
            if a + b in unused:
                made[a + b] = (a, b)
        i = min(pairs)[1]
        symbols[i : i + 2] = [symbols[i] + symbols[i + 1]]

    def ends(symbol: str) -> list[str]:
        return [symbol] if symbol not in made else [end for part in made[symbol] for end in ends(part)]

    return [end for symbol in symbols for end in ends(symbol)]


@given(
    st.dictionaries(st.text("ab▁", min_size=2, max_size=5), st.integers(-4, 0), max_size=25),
    st.text("ab▁", max_size=25),
    st.integers(0, 3),
)
@settings(max_examples=500, deadline=None)
def test_joining_is_that_of_the_definition(joined: dict[str, int], text: str, num_unused: int) -> None:
    pieces = [(piece, float(score)) for piece, score in joined.items()]
    letters = [(c, -20.0) for c in "ab▁"]
    # Equal scores and one text from different parts; with one unused token at most, which parts it has is no question.
    unused = {piece for piece in list(joined)[: num_unused // 3] if len(piece) == 2}
    data = spm_metadata([*pieces, *letters], add_space_prefix=False)
    for i, (piece, _) in enumerate(pieces):
        if piece in unused:
            data["tokenizer.ggml.token_type"][FIRST + i] = UNUSED
    toy = Tokenizer.from_gguf(data)
    assert texts(toy, text.replace("▁", " ")) == naive(toy, dict([*pieces, *letters]), unused, text)


def test_long_texts_are_no_problem() -> None:
    # Anything quadratic takes minutes here.
    toy = spm(["aa", "aaaa", *LETTERS])
    assert len(toy.encode("a" * 60_000, add_bos=False)) == 15_001
    assert len(TOY.encode("the rain in the hat " * 3000, add_bos=False)) > 15_000


def test_ids_equal_sentencepiece_f050(tmp_path: Path) -> None:
    sentencepiece = pytest.importorskip("sentencepiece")
    rng = random.Random(5)
    words = ["the", "rain", "in", "spain", "stays", "mainly", "on", "plain", "and", "then", "there", "none", "inn"]
    lines = [" ".join(rng.choices(words, k=rng.randrange(3, 12))) + rng.choice([".", "  ", "!"]) for _ in range(400)]
    (tmp_path / "corpus").write_text("\n".join(lines))
    sentencepiece.SentencePieceTrainer.train(
        input=str(tmp_path / "corpus"),
        model_prefix=str(tmp_path / "m"),
        model_type="bpe",
        vocab_size=340,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        user_defined_symbols=["<tool>"],
        minloglevel=2,
    )
    reference = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "m.model"))
    toy = Tokenizer.from_gguf(_metadata_of(reference))
    alphabet = "thernaisp   .!\nÜ日👍"
    for text in lines + ["".join(rng.choices(alphabet, k=40)) for _ in range(200)]:
        assert toy.encode(text, add_bos=False) == reference.encode(text), text
        assert toy.decode(toy.encode(text)) == reference.decode(reference.encode(text))


def _metadata_of(reference: Any) -> dict[str, Any]:
    ids = range(reference.get_piece_size())
    kinds = [(reference.is_unknown, 2), (reference.is_control, 3), (reference.is_byte, 6), (reference.is_unused, 5)]
    types = [next((kind for has, kind in kinds if has(i)), NORMAL) for i in ids]
    tokens = [reference.id_to_piece(i) for i in ids]
    types[tokens.index("<tool>")] = USER_DEFINED
    keys = {"model": "llama", "tokens": tokens, "scores": [reference.get_score(i) for i in ids], "token_type": types}
    return {f"tokenizer.ggml.{key}": value for key, value in keys.items()}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"scores": None}, "tokenizer.ggml.scores is missing"),
        ({"scores": [0.0]}, "tokenizer.ggml.scores has 1 entries"),
        ({"scores": ["high"]}, "tokenizer.ggml.scores must hold nothing but float"),
        ({"remove_extra_whitespaces": True}, "tokenizer.ggml.remove_extra_whitespaces is set"),
        ({"precompiled_charsmap": [1, 2]}, "tokenizer.ggml.precompiled_charsmap is set"),
        ({"tokens": ["a"], "scores": [0.0], "token_type": [1]}, "neither a token for every byte"),
    ],
)
def test_malformed_files_are_refused_by_key(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(LoadError) as caught:
        spm(**changes)
    assert words in str(caught.value)
