"""Byte-pair encoding from a GGUF file: over bytes, or over characters with bytes for the rest."""

from __future__ import annotations

import difflib
from collections.abc import Callable

import tokenizers
from tokenizers import models, normalizers, pre_tokenizers

from forerun.errors import LoadError, shown
from forerun.models.tokenizer_codec import SPACE_MARK, Codec, alphabet_bytes, piece_bytes
from forerun.models.tokenizer_gguf import (
    PREFIX,
    TYPE_BYTE,
    TYPE_UNUSED,
    TYPE_USER_DEFINED,
    GgufVocabulary,
    get_list,
)
from forerun.models.tokenizer_library import library_encode, library_errors
from forerun.models.tokenizer_pre import PRE_RULES, RAW_NAMES


def gpt2_codec(file: GgufVocabulary) -> Codec:
    """The codec of a `gpt2` vocabulary: of bytes, but for a few names of characters.

    Raises:
        LoadError: `tokenizer.ggml.pre` is missing or unknown, or merges and tokens don't fit.
    """
    name = _pre_name(file)
    if name in RAW_NAMES:
        return _raw_codec(file, adds_bos=False)
    rule = PRE_RULES[name]
    bpe = tokenizers.Tokenizer(_model(file, ignore_merges=rule.ignore_merges))
    bpe.pre_tokenizer = rule.pre_tokenizer()
    if rule.is_nfc:
        bpe.normalizer = normalizers.NFC()
    return _codec(file, bpe, alphabet_bytes, adds_bos=rule.adds_bos)


def gemma4_codec(file: GgufVocabulary) -> Codec:
    """The codec of a `gemma4` vocabulary; LoadError where merges and tokens don't fit."""
    return _raw_codec(file, adds_bos=True)


def _raw_codec(file: GgufVocabulary, *, adds_bos: bool) -> Codec:
    """Merges run over whole lines."""
    bpe = tokenizers.Tokenizer(_model(file, byte_fallback=True))
    bpe.normalizer = normalizers.Replace(" ", SPACE_MARK)
    # No token has a line break and anything else in it, so this changes no id. It keeps the merges' queues short.
    bpe.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex(r"[^\n]+|\n+"), behavior="isolated")
    return _codec(file, bpe, piece_bytes, adds_bos=adds_bos)


def _codec(
    file: GgufVocabulary, bpe: tokenizers.Tokenizer, ordinary_bytes: Callable[[str], bytes], *, adds_bos: bool
) -> Codec:
    user_defined = file.ids_of(TYPE_USER_DEFINED)
    bpe.add_tokens([tokenizers.AddedToken(file.tokens[i], normalized=False) for i in user_defined])
    named = file.special_ids.union(user_defined)
    tokens = file.tokens

    def token_bytes(token_id: int) -> bytes:
        token = tokens[token_id]
        return token.encode("utf-8", "replace") if token_id in named else ordinary_bytes(token)

    return Codec(
        tokens=tokens,
        special_ids=file.special_ids,
        encode=library_encode(bpe),
        token_bytes=token_bytes,
        adds_bos=adds_bos,
    )


def _model(file: GgufVocabulary, *, ignore_merges: bool = False, byte_fallback: bool = False) -> models.BPE:
    """The merges, without those that would spell a control or byte token: no text becomes one by accident."""
    unmergeable = file.special_ids.union(file.ids_of(TYPE_BYTE))
    names = {file.tokens[i] for i in unmergeable}
    vocab = {
        token: i for i, token in enumerate(file.tokens) if i not in file.special_ids and file.types[i] != TYPE_UNUSED
    }
    merges: list[tuple[str, str]] = []
    for merge in get_list(file.metadata, PREFIX + "merges", str):
        # The first character is never the separator: a token may begin with a space.
        middle = merge.find(" ", 1)
        left, right = (merge[:middle], merge[middle + 1 :]) if middle > 0 else (merge, "")
        if names.isdisjoint((left, right, left + right)):
            merges.append((left, right))
    # What the library says names the merge.
    with library_errors(lambda words: LoadError(f"{PREFIX}merges does not fit {PREFIX}tokens: {words}")):
        return models.BPE(vocab, merges, ignore_merges=ignore_merges, byte_fallback=byte_fallback)


def _pre_name(file: GgufVocabulary) -> str:
    name = file.metadata.get(PREFIX + "pre")
    known = sorted({*PRE_RULES, *RAW_NAMES})
    if isinstance(name, str) and name in known:
        return name
    found = "is missing" if name is None else f"is {shown(name)}"
    near = difflib.get_close_matches(str(name)[:100], known, cutoff=0.75) or ("gpt-2", "llama-bpe", "qwen2")
    raise LoadError(
        f"{PREFIX}pre {found}, but must be one of {len(known)} known names, such as {', '.join(near)}: "
        "another rule would give other token ids"
    )
