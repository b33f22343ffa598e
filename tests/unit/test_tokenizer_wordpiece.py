from __future__ import annotations

import pytest
import tokenizers
from tokenizers import models, normalizers, pre_tokenizers

from forerun.errors import LoadError
from tests.helpers.toy_spm import CONTROL, NORMAL, WORDPIECES, wordpiece

TOY = wordpiece()


def texts(text: str, **options: bool) -> list[str]:
    return [TOY.token_text(i) for i in TOY.encode(text, add_bos=False, **options)]


def test_the_longest_tokens_from_the_left() -> None:
    assert texts("The unwantable running") == ["▁the", "▁un", "want", "able", "▁runn", "ing"]
    assert texts("unwant,the!") == ["▁un", "want", "▁,", "▁the", "▁!"]
    assert texts("  thÉx\n日the") == ["[UNK]", "▁日", "▁the"]
    assert texts("thé") == ["▁the"]


def test_a_word_that_does_not_come_out_is_unknown() -> None:
    assert texts("unwanted the") == ["[UNK]", "▁the"]
    assert texts("the" + "ing" * 40) == ["[UNK]"]
    assert texts("want") == ["[UNK]"]


def test_control_names_are_no_tokens_unless_allowed_f049() -> None:
    assert "[CLS]" not in texts("[CLS] the [SEP]")
    assert texts("[CLS] the[SEP]", allow_special=True) == ["[CLS]", "▁the", "[SEP]"]


def test_a_control_token_spelled_like_a_word_is_no_word_f049() -> None:
    toy = wordpiece(tokens=[*WORDPIECES[:-1], "▁mask"], token_type=[*[CONTROL] * 4, *[NORMAL] * 8, CONTROL])
    assert toy.encode("the mask", add_bos=False) == [4, 1]


def test_the_class_token_begins_a_text_once_f048() -> None:
    assert TOY.encode("the") == [2, 4]
    assert TOY.encode("[CLS]the", allow_special=True) == [2, 4]


def test_words_come_back_with_single_spaces_f028() -> None:
    assert TOY.decode(TOY.encode("the  unwant, running")) == "the unwant , running"
    assert TOY.decode(TOY.encode("the the")[2:], continues=True) == " the"


def test_ids_equal_the_reference_in_its_own_spelling_f050() -> None:
    vocab = {
        token.removeprefix("▁") if token.startswith(("▁", "[")) else f"##{token}": i
        for i, token in enumerate(WORDPIECES)
    }
    reference = tokenizers.Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    reference.normalizer = normalizers.BertNormalizer()
    reference.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    for text in ("The UNWANT able, running! 日本", "the\u200bthe \ufffd the\x00", "ing un##able", "", "a" * 300):
        assert TOY.encode(text, add_bos=False) == reference.encode(text).ids, text


def test_case_is_kept_where_the_file_says_so() -> None:
    cased = wordpiece(**{"normalizer.lowercase": False})
    assert cased.encode("The the thé", add_bos=False) == [1, 4, 1]


def test_an_unknown_token_outside_the_vocabulary_is_refused() -> None:
    with pytest.raises(LoadError, match=r"tokenizer\.ggml\.unknown_token_id is 99, but must be an id between 0 and 12"):
        wordpiece(unknown_token_id=99)
