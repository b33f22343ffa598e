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
        self._pattern = _pattern(self._ids) if self._ids else None

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
        while self._pattern and (match := self._pattern.search(text, search_from)):
            token_id = self._ids[match.group()]
            rule = self._rules.get(token_id, _PLAIN)
            start, end = match.span()
            search_from = end
            if rule.single_word and (_is_word(text[start - 1 : start]) or _is_word(text[end : end + 1])):
                continue
            if rule.strips_left:
                start = done + len(text[done:start].rstrip())
            if rule.strips_right:
                search_from = end = len(text) - len(text[end:].lstrip())
            yield start, end, token_id
            done = end


def _is_word(char: str) -> bool:
    return char.isalnum() or char == "_"


def _pattern(names: Mapping[str, int]) -> re.Pattern[str]:
    """Longest name first. Grouped by first character, so that thousands of names cost nothing where none can begin."""
    groups: dict[str, list[str]] = defaultdict(list)
    for name in sorted(names, key=len, reverse=True):
        groups[name[0]].append(re.escape(name[1:]))
    return re.compile("|".join(f"{re.escape(first)}(?:{'|'.join(rests)})" for first, rests in groups.items()))
