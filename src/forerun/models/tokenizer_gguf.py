"""Reads the vocabulary of a GGUF file: the keys `tokenizer.ggml.*`, checked. Knows no family's rules."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from forerun.errors import LoadError, shown
from forerun.models.tokenizer_codec import END_NAMES

# Values of tokenizer.ggml.token_type, as the GGUF specification numbers them.
TYPE_NORMAL, TYPE_UNKNOWN, TYPE_CONTROL, TYPE_USER_DEFINED, TYPE_UNUSED, TYPE_BYTE = range(1, 7)

PREFIX = "tokenizer.ggml."


@dataclass(frozen=True, slots=True)
class GgufVocabulary:
    """A file's tokens and what it says about them.

    Attributes:
        metadata: all of the file's metadata.
        tokens: the entry of every id.
        types: the kind of every token, a `TYPE_*`.
        special_ids: control and unknown tokens, the begin token and the ends, whatever their type.
        bos_id: the begin token, or None.
        own_ends: what the file names as ends (eos, eot, eom); None for each it leaves out.
    """

    metadata: Mapping[str, Any]
    tokens: Sequence[str]
    types: Sequence[int]
    special_ids: frozenset[int]
    bos_id: int | None
    own_ends: tuple[int | None, ...]

    def flag(self, name: str, default: bool) -> bool:
        """The boolean `tokenizer.ggml.<name>`; a LoadError where it is something else."""
        return bool(get(self.metadata, PREFIX + name, bool)) if PREFIX + name in self.metadata else default

    def ids_of(self, kind: int) -> list[int]:
        """The tokens of one type that are not special."""
        return [i for i, found in enumerate(self.types) if found == kind and i not in self.special_ids]


def read_vocabulary(metadata: Mapping[str, Any], default_ids: Mapping[str, int]) -> GgufVocabulary:
    """Reads tokens, types and the ids of begin and end.

    Args:
        metadata: the file's metadata.
        default_ids: what "bos" and "eos" are where the file leaves them out and the family has a convention.
    Raises:
        LoadError: a key is missing or malformed; names the key.
    """
    tokens = get_list(metadata, PREFIX + "tokens", str)
    types = get_list(metadata, PREFIX + "token_type", int)
    if len(types) != len(tokens):
        raise LoadError(f"{PREFIX}token_type has {len(types)} entries, but {PREFIX}tokens has {len(tokens)}")
    ids = {name: _token_id(metadata, name, len(tokens)) for name in ("bos", "eos", "eot", "eom")}
    for name, token_id in default_ids.items():
        if ids[name] is None and token_id < len(tokens):
            ids[name] = token_id
    # Some files mark their begin and end tokens as ordinary ones.
    special = {i for i, kind in enumerate(types) if kind in (TYPE_CONTROL, TYPE_UNKNOWN) or tokens[i] in END_NAMES}
    special |= {i for i in ids.values() if i is not None}
    own_ends = (ids["eos"], ids["eot"], ids["eom"])
    return GgufVocabulary(metadata, tokens, types, frozenset(special), ids["bos"], own_ends)


def get(metadata: Mapping[str, Any], key: str, kind: type) -> Any:
    """The value of a key.

    Raises:
        LoadError: it is missing or of another type.
    """
    value = metadata.get(key)
    if not isinstance(value, kind):
        found = "is missing" if value is None else f"is of type {type(value).__name__}"
        raise LoadError(f"{key} {found}, but must be of type {kind.__name__}")
    return value


def get_list(metadata: Mapping[str, Any], key: str, item_kind: type) -> list[Any]:
    """The values of an array.

    Raises:
        LoadError: it is missing, no array, or holds values of another type.
    """
    values: list[Any] = get(metadata, key, list)
    if not all(map(item_kind.__instancecheck__, values)):
        raise LoadError(f"{key} must hold nothing but {item_kind.__name__} values")
    return values


def _token_id(metadata: Mapping[str, Any], name: str, vocab_size: int) -> int | None:
    key = f"{PREFIX}{name}_token_id"
    value = metadata.get(key)
    if value is None:
        return None
    if not isinstance(value, int) or not 0 <= value < vocab_size:
        raise LoadError(f"{key} is {shown(value)}, but must be an id between 0 and {vocab_size - 1}")
    return value
