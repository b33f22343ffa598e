"""WordPiece from a GGUF file (`bert`): words, and in them the longest tokens from the left."""

from __future__ import annotations

import tokenizers
from tokenizers import models, normalizers, pre_tokenizers

from forerun.errors import LoadError
from forerun.models.tokenizer_codec import SPACE_MARK, Codec, piece_bytes
from forerun.models.tokenizer_gguf import PREFIX, GgufVocabulary, get
from forerun.models.tokenizer_library import library_encode

_CONTINUED = "##"
_DEFAULT_UNKNOWN_ID = 100
# A longer word is unknown, in BERT's own tokenizer and ever since.
_MAX_WORD_CHARS = 100


def wordpiece_codec(file: GgufVocabulary) -> Codec:
    """The codec of a `bert` vocabulary.

    A GGUF file marks the beginnings of words, where BERT itself marks the continuations. Texts come back lower-case
    and with single spaces, as far as the vocabulary lost what they were.

    Raises:
        LoadError: the unknown token is outside the vocabulary.
    """
    unknown_id = _unknown_id(file)
    special = file.special_ids | {unknown_id}
    tokens = file.tokens
    vocab = {_bert_spelling(token): i for i, token in enumerate(tokens) if i not in special}
    unknown = tokens[unknown_id]
    vocab[unknown] = unknown_id
    model = models.WordPiece(
        vocab, unk_token=unknown, max_input_chars_per_word=_MAX_WORD_CHARS, continuing_subword_prefix=_CONTINUED
    )
    wordpiece = tokenizers.Tokenizer(model)
    lowercase = file.flag("normalizer.lowercase", True)
    strip_accents = file.flag("normalizer.strip_accents", lowercase)
    wordpiece.normalizer = normalizers.BertNormalizer(lowercase=lowercase, strip_accents=strip_accents)
    wordpiece.pre_tokenizer = pre_tokenizers.BertPreTokenizer()

    def token_bytes(token_id: int) -> bytes:
        token = tokens[token_id]
        return token.encode("utf-8", "replace") if token_id in special else piece_bytes(token)

    return Codec(
        tokens=tokens,
        special_ids=special,
        encode=library_encode(wordpiece),
        token_bytes=token_bytes,
        drops_space=True,
        adds_bos=True,
    )


def _bert_spelling(token: str) -> str:
    return token[1:] if token.startswith(SPACE_MARK) else _CONTINUED + token


def _unknown_id(file: GgufVocabulary) -> int:
    key = PREFIX + "unknown_token_id"
    unknown_id: int = get({key: _DEFAULT_UNKNOWN_ID} | dict(file.metadata), key, int)
    if not 0 <= unknown_id < len(file.tokens):
        raise LoadError(f"{key} is {unknown_id}, but must be an id between 0 and {len(file.tokens) - 1}")
    return unknown_id
