"""Finds token names in a text: control tokens where they are allowed, user-defined tokens everywhere."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class NameRule:
    """What besides its letters belongs to a token's name, as tokenizer.json's `added_tokens` define it.

    Attributes:
        strips_left: whitespace before the name goes with it.
        strips_right: whitespace after the name goes with it.
        single_word: inside a longer word the name means nothing.
    """

    strips_left: bool = False
    strips_right: bool = False
    single_word: bool = False


_PLAIN = NameRule()
_SPACE = re.compile(r"\s*")


class NameFinder:
    """Finds the leftmost name, and of those that begin there the longest. Immutable.

    Args:
        ids: each name and its id; an empty name can't be found.
        rules: by id, for names that are more than their letters.

    >>> list(NameFinder({"<a>": 7, "<a>>": 8}).cut("x<a>>y"))
    [(None, 'x'), (8, '<a>>'), (None, 'y')]
    """

    def __init__(self, ids: Mapping[str, int], rules: Mapping[int, NameRule] | None = None) -> None:
        self._ids = {name: token_id for name, token_id in ids.items() if name}
        self._rules = rules or {}
        # By a name's first two characters. Thousands of names may share the first one.
        lengths: dict[str, set[int]] = defaultdict(set)
        for name in self._ids:
            lengths[name[:2]].add(len(name))
        self._lengths = {start: sorted(found, reverse=True) for start, found in lengths.items()}
        firsts = "".join(sorted({name[0] for name in self._ids}))
        self._first = re.compile(f"[{re.escape(firsts)}]") if firsts else None

    def cut(self, text: str) -> Iterator[tuple[int | None, str]]:
        """Yields (id, name with the whitespace that goes with it) or (None, text between); never an empty text."""
        done = 0
        for start, end, token_id in self._spans(text):
            if start > done:
                yield None, text[done:start]
            yield token_id, text[start:end]
            done = end
        if done < len(text):
            yield None, text[done:]

    def _spans(self, text: str) -> Iterator[tuple[int, int, int]]:
        done = search_from = 0
        while found := self._search(text, search_from):
            start, end = found
            token_id = self._ids[text[start:end]]
            rule = self._rules.get(token_id, _PLAIN)
            search_from = end
            if rule.single_word and (_is_word(text[start - 1 : start]) or _is_word(text[end : end + 1])):
                continue
            if rule.strips_left:
                start = done + len(text[done:start].rstrip())
            if rule.strips_right:
                search_from = end = _after_space(text, end)
            yield start, end, token_id
            done = end

    def _search(self, text: str, begin: int) -> tuple[int, int] | None:
        """Where the next name begins and ends."""
        for match in self._first.finditer(text, begin) if self._first else ():
            start = match.start()
            for length in (*self._lengths.get(text[start : start + 2], ()), 1):
                if text[start : start + length] in self._ids:
                    return start, start + length
        return None


def _after_space(text: str, begin: int) -> int:
    match = _SPACE.match(text, begin)
    return match.end() if match else begin


def _is_word(char: str) -> bool:
    return char.isalnum() or char == "_"
