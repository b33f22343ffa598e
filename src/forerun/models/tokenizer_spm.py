"""SentencePiece's scored byte-pair encoding from a GGUF file (`llama`): Llama 2, Mistral, Gemma, Phi 3.

Characters are joined to the neighbour with which they make the token of the highest score, the leftmost of equals,
until nothing more joins; what is no token then becomes bytes. Spaces are spelled U+2581, and most files want one in
front of every text.
"""

from __future__ import annotations

import heapq
import itertools
import re
from collections.abc import Sequence
from functools import lru_cache

from forerun.errors import LoadError
from forerun.models.tokenizer_codec import SPACE_MARK, Codec, byte_names, piece_bytes
from forerun.models.tokenizer_gguf import (
    PREFIX,
    TYPE_BYTE,
    TYPE_NORMAL,
    TYPE_UNKNOWN,
    TYPE_UNUSED,
    TYPE_USER_DEFINED,
    GgufVocabulary,
    get_list,
)
from forerun.models.tokenizer_names import NameFinder, NameRule

_NUM_CACHED_WORDS = 1 << 15
_MAX_CACHED_CHARS = 32


def spm_codec(file: GgufVocabulary) -> Codec:
    """The codec of a `llama` vocabulary.

    Raises:
        LoadError: the scores are missing or don't fit the tokens, there is neither a token for every byte nor one for
            what is unknown, or the file wants texts normalised.
    """
    for key in ("precompiled_charsmap", "remove_extra_whitespaces"):
        if file.metadata.get(PREFIX + key):
            raise LoadError(f"{PREFIX}{key} is set, but texts are not normalised in a 'llama' vocabulary")
    segmenter = _Segmenter(file)
    adds_space = file.flag("add_space_prefix", True)
    name_rules = _name_rules(file)
    user_defined = file.ids_of(TYPE_USER_DEFINED)
    finder = NameFinder({file.tokens[i]: i for i in user_defined}, name_rules)
    named = file.special_ids.union(user_defined)
    tokens = file.tokens

    def encode(text: str, continues: bool) -> list[int]:
        # As llama.cpp has it, the space goes in front of what follows a special or user-defined token, too.
        ids: list[int] = []
        for token_id, piece in finder.cut(text):
            if token_id is None:
                segmenter.extend(ids, f" {piece}" if adds_space else piece)
            else:
                ids.append(token_id)
        return ids

    def token_bytes(token_id: int) -> bytes:
        token = tokens[token_id]
        return token.encode("utf-8", "replace") if token_id in named else piece_bytes(token)

    return Codec(
        tokens=tokens,
        special_ids=file.special_ids,
        encode=encode,
        token_bytes=token_bytes,
        drops_space=adds_space,
        name_rules=name_rules,
        adds_bos=True,
    )


def _name_rules(file: GgufVocabulary) -> dict[int, NameRule]:
    """Phi 3's control tokens take the whitespace after them along; GGUF files tell this by the model's name alone."""
    name = str(file.metadata.get("general.name", "")).lower()
    if "phi-3" not in name and "phi3" not in name:
        return {}
    named = file.special_ids.union(file.ids_of(TYPE_USER_DEFINED))
    ordinary = {"<unk>", "<s>", "<|endoftext|>"}
    return {i: NameRule(strips_right=True) for i in named if file.tokens[i] not in ordinary}


class _Segmenter:
    """The joining of characters. Safe to share between threads."""

    def __init__(self, file: GgufVocabulary) -> None:
        joined = (TYPE_NORMAL, TYPE_UNUSED, TYPE_USER_DEFINED)
        ids = [i for i, kind in enumerate(file.types) if kind in joined and i not in file.special_ids]
        scores = _scores(file)
        self._ids = {file.tokens[i]: i for i in ids}
        self._costs = {file.tokens[i]: -scores[i] for i in ids}
        self._unused = {file.tokens[i] for i in file.ids_of(TYPE_UNUSED)}
        self._byte_ids, self._unknown_id = _fallback(file)
        self._word_start = _word_start(self._ids)
        self._cached = lru_cache(_NUM_CACHED_WORDS)(self._segment)

    def extend(self, ids: list[int], text: str) -> None:
        """Adds a text's ids. Adjacent characters that are unknown become one unknown token."""
        for word in self._word_start.split(text.replace(" ", SPACE_MARK)):
            found = self._cached(word) if len(word) <= _MAX_CACHED_CHARS else self._segment(word)
            if self._byte_ids:
                ids += found
                continue
            for token_id in found:
                if token_id != self._unknown_id or ids[-1:] != [token_id]:
                    ids.append(token_id)

    def _segment(self, word: str) -> tuple[int, ...]:
        symbols, parts = self._join(word)
        ids: list[int] = []
        pending = symbols[::-1]
        while pending:
            symbol = pending.pop()
            if symbol in parts:  # an unused token is a step on the way, never an end
                pending += parts[symbol][::-1]
            elif symbol in self._ids:
                ids.append(self._ids[symbol])
            elif self._byte_ids:
                ids += [self._byte_ids[byte] for byte in symbol.encode()]
            else:
                ids.append(self._unknown_id)
        return tuple(ids)

    def _join(self, word: str) -> tuple[list[str], dict[str, tuple[str, str]]]:
        """The symbols that are left, and what unused tokens among them were made of."""
        symbols = list(word)  # "" once a symbol has been joined to one before it
        after = [*range(1, len(word)), -1]
        before = list(range(-1, len(word) - 1))
        parts: dict[str, tuple[str, str]] = {}
        queue: list[tuple[float, int, int, str]] = []

        def offer(left: int, right: int) -> None:
            token = symbols[left] + symbols[right]
            cost = self._costs.get(token)
            if cost is not None:
                heapq.heappush(queue, (cost, left, right, token))
                if token in self._unused:
                    parts[token] = (symbols[left], symbols[right])

        for left in range(len(word) - 1):
            offer(left, left + 1)
        while queue:
            _, left, right, token = heapq.heappop(queue)
            # Symbols only grow or vanish, so equal lengths mean that neither has changed since the offer.
            if not symbols[left] or not symbols[right] or len(symbols[left]) + len(symbols[right]) != len(token):
                continue
            symbols[left], symbols[right] = token, ""
            after[left] = after[right]
            if after[left] >= 0:
                before[after[left]] = left
                offer(left, after[left])
            if before[left] >= 0:
                offer(before[left], left)
        return [symbol for symbol in symbols if symbol], parts


def _scores(file: GgufVocabulary) -> Sequence[float]:
    scores = get_list(file.metadata, PREFIX + "scores", float)
    if len(scores) != len(file.tokens):
        raise LoadError(f"{PREFIX}scores has {len(scores)} entries, but {PREFIX}tokens has {len(file.tokens)}")
    return scores


def _fallback(file: GgufVocabulary) -> tuple[list[int], int]:
    """(ids of the 256 bytes, or nothing; id of the unknown token, or -1), of which one is there."""
    bytes_by_name = {file.tokens[i]: i for i in file.ids_of(TYPE_BYTE)}
    byte_ids = [bytes_by_name.get(name, -1) for name in byte_names()]
    if -1 not in byte_ids:
        return byte_ids, -1
    unknown = [i for i, kind in enumerate(file.types) if kind == TYPE_UNKNOWN]
    if not unknown:
        raise LoadError(
            f"{PREFIX}tokens has neither a token for every byte (<0x00> to <0xFF>) nor an unknown token, "
            "but one is needed for characters outside the vocabulary"
        )
    return [], unknown[0]


def _word_start(tokens: dict[str, int]) -> re.Pattern[str]:
    """Matches where a text may be cut without changing any id: before a space mark that no token reaches across."""
    marked = [token for token in tokens if SPACE_MARK in token[1:]]
    inside = {char for token in marked for char, following in itertools.pairwise(token) if following == SPACE_MARK}
    never = f"(?<![{re.escape(''.join(sorted(inside)))}])" if inside else ""
    return re.compile(f"(?!^){never}(?={SPACE_MARK})")
