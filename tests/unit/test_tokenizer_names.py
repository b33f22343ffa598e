from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.models.tokenizer_names import NameFinder, NameRule


def cut(text: str, *names: str, **rule: bool) -> list[tuple[int | None, str]]:
    rules = {i: NameRule(**rule) for i in range(len(names))}
    return list(NameFinder({name: i for i, name in enumerate(names)}, rules).cut(text))


def test_leftmost_then_longest() -> None:
    assert cut("xabcy", "bc", "ab", "abc") == [(None, "x"), (2, "abc"), (None, "y")]
    assert cut("abcd", "bcd", "ab") == [(1, "ab"), (None, "cd")]
    assert cut("a.b*", ".", "*") == [(None, "a"), (0, "."), (None, "b"), (1, "*")]


def test_nothing_to_find() -> None:
    assert cut("abc") == [(None, "abc")]
    assert cut("abc", "") == [(None, "abc")]
    assert cut("", "a") == []


def test_whitespace_goes_with_the_name() -> None:
    assert cut(" <a> \n<a> b", "<a>", strips_right=True) == [(None, " "), (0, "<a> \n"), (0, "<a> "), (None, "b")]
    assert cut("b \n<a> <a> ", "<a>", strips_left=True) == [(None, "b"), (0, " \n<a>"), (0, " <a>"), (None, " ")]
    assert cut(" <a> <a>", "<a>", strips_left=True, strips_right=True) == [(0, " <a> "), (0, "<a>")]


@pytest.mark.parametrize(
    ("text", "count"), [("ab", 1), ("xab", 0), ("ab1", 0), ("_ab", 0), ("(ab)-ab", 2), ("éab ab", 1)]
)
def test_a_single_word_is_none_inside_another(text: str, count: int) -> None:
    assert [token_id for token_id, _ in cut(text, "ab", single_word=True)].count(0) == count


@given(st.text("ab <", max_size=30), st.sets(st.text("ab<", max_size=3), max_size=5), st.booleans(), st.booleans())
@settings(max_examples=300, deadline=None)
def test_pieces_join_to_the_text(text: str, names: set[str], left: bool, right: bool) -> None:
    for rule in ({}, {"strips_left": left, "strips_right": right}):
        pieces = cut(text, *sorted(names), **rule)
        assert "".join(piece for _, piece in pieces) == text
        assert all(piece for _, piece in pieces)
        for name in names - {""}:
            assert all(name not in piece for token_id, piece in pieces if token_id is None)


def slow_cut(text: str, names: list[str]) -> list[tuple[int | None, str]]:
    """At every character the longest name that begins there."""
    pieces: list[tuple[int | None, str]] = []
    start = done = 0
    while start < len(text):
        name = max((name for name in names if name and text.startswith(name, start)), key=len, default="")
        if name:
            pieces += [(None, text[done:start])] * (done < start) + [(names.index(name), name)]
            done = start + len(name)
        start += len(name) or 1
    return pieces + [(None, text[done:])] * (done < len(text))


@given(st.text("ab<]-^\\", max_size=20), st.sets(st.text("ab<]-^\\", max_size=4), max_size=6))
@settings(max_examples=500, deadline=None)
def test_search_equals_the_slow_one(text: str, names: set[str]) -> None:
    assert cut(text, *sorted(names)) == slow_cut(text, sorted(names))
