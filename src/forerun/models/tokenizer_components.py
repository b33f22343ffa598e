"""The components of a tokenizer.json: taken out of their sequences, and checked for what they could cost.

The library believes such a file. Normalizers that make a text longer, one after another, fill any memory with a short
text; regular expressions can keep it busy for ever; a dropout makes ids a matter of chance.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping
from typing import Any

from forerun.errors import LoadError, shown
from forerun.models.tokenizer_pre import PRE_RULES
from forerun.models.tokenizer_regex import HardRegexError, check_regex

MAX_STEPS = 32  # normalizers and pre-tokenizers; real files have at most six
MAX_GROWTH = 256  # how many times longer they may make a text together
MAX_PIECE_CHARS = 1024  # of a piece that is looked for at every place of a text
MAX_WORD_CHARS = 1000  # of a word of which all parts are looked up
# What known families have is harmless where no simple rule can tell it, too.
_KNOWN_REGEXES = frozenset(regex for rule in PRE_RULES.values() for regex in rule.splits)
_BYTE_GROWTH = 4  # bytes of a character, each of which becomes one


def steps_of(component: Any, key: str) -> Iterator[dict[str, Any]]:
    """A component's parts in order, out of the sequences in which they may be nested."""
    if not isinstance(component, dict):
        return
    if component.get("type") == "Sequence":
        for part in component.get(key) or ():
            yield from steps_of(part, key)
    else:
        yield component


def check_components(data: Mapping[str, Any]) -> None:
    """Accepts what costs time and memory in proportion to the text.

    Args:
        data: content of a tokenizer.json, of which the model is an object.
    Raises:
        LoadError: it does not, or the same text may get different ids; says what is too much.
    """
    # Not by their types: the library also reads components that don't state one.
    found = [*_objects(data.get("normalizer")), *_objects(data.get("pre_tokenizer"))]
    if len(found) > 2 * MAX_STEPS:
        raise LoadError(f"tokenizer.json has more than {MAX_STEPS} normalizers and pre-tokenizers")
    growth = 1.0
    for part in [*found, *_objects(data.get("decoder"))]:
        _check_pattern(part)
    for part in found:
        growth *= _growth(part)
    if growth > MAX_GROWTH:
        raise LoadError(f"the normalizers of tokenizer.json make a text more than {MAX_GROWTH} times longer")
    _check_model(data["model"])


def _objects(tree: Any) -> list[dict[str, Any]]:
    """Every object in a tree, however deep."""
    found, pending = [], [tree]
    while pending:
        node = pending.pop()
        if isinstance(node, dict):
            found.append(node)
        pending += node.values() if isinstance(node, dict) else node if isinstance(node, list) else ()
    return found


def _check_pattern(part: Mapping[str, Any]) -> None:
    regex = part.get("Regex")
    if isinstance(regex, str) and regex not in _KNOWN_REGEXES:
        try:
            check_regex(regex)
        except HardRegexError as error:
            raise LoadError(
                f"a regular expression of tokenizer.json, {shown(regex)}, may take too long on some text: {error}"
            ) from error


def _growth(part: Mapping[str, Any]) -> float:
    """How many times longer a component may make a text."""
    pattern, content, kind = part.get("pattern"), part.get("content"), part.get("type")
    if isinstance(pattern, dict) and isinstance(content, str):
        found = pattern.get("String")
        if found == "":
            raise LoadError("a normalizer of tokenizer.json replaces a text of no characters")
        return max(1.0, len(content) / len(found)) if isinstance(found, str) else 1.0 + len(content)
    if isinstance(part.get("prepend"), str) and len(part["prepend"]) > MAX_PIECE_CHARS:
        raise LoadError(f"a normalizer of tokenizer.json puts more than {MAX_PIECE_CHARS} characters before a text")
    if isinstance(part.get("precompiled_charsmap"), str):
        return _longest_mapped(part["precompiled_charsmap"])
    return _BYTE_GROWTH if kind == "ByteLevel" or "trim_offsets" in part else 1.0


def _longest_mapped(charsmap: str) -> float:
    """Bytes of the longest text that a character is replaced by.

    SentencePiece's format: the length of a trie in four bytes, the trie, and texts that end in a zero byte.
    """
    try:
        blob = base64.b64decode(charsmap)
    except ValueError:
        blob = b""
    texts_start = 4 + int.from_bytes(blob[:4], "little")
    if not 8 <= texts_start <= len(blob):
        raise LoadError("precompiled_charsmap of tokenizer.json is no map of characters")
    return max(1.0, float(max(map(len, blob[texts_start:].split(b"\0")))))


def _check_model(model: Mapping[str, Any]) -> None:
    dropout, word_chars, vocab = model.get("dropout"), model.get("max_input_chars_per_word"), model["vocab"]
    if dropout:
        raise LoadError(f"model.dropout of tokenizer.json is {shown(dropout)}, but ids must not be a matter of chance")
    if isinstance(word_chars, int) and word_chars > MAX_WORD_CHARS:
        raise LoadError(
            f"model.max_input_chars_per_word of tokenizer.json is {shown(word_chars)}, more than {MAX_WORD_CHARS}"
        )
    if isinstance(vocab, list) and any(len(piece) > MAX_PIECE_CHARS for piece, _ in vocab):
        raise LoadError(f"model.vocab of tokenizer.json has a piece of more than {MAX_PIECE_CHARS} characters")
