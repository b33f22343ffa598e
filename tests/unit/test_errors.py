from __future__ import annotations

import doctest

import forerun.errors
from forerun.errors import one_line, shown


def test_examples_are_true() -> None:
    assert doctest.testmod(forerun.errors) == doctest.TestResults(failed=0, attempted=2)


def test_what_is_shown_is_short_and_printable() -> None:
    for value in (
        "\x1b[2J" * 100,
        "\ud800",
        "\u202e",
        b"\xff" * 1000,
        10**5000,
        -(10**40),
        {"a": "b" * 1000},
        [0] * 1000,
    ):
        assert len(shown(value)) <= 80
        assert shown(value).isprintable()
        assert len(one_line(repr(value) if isinstance(value, bytes) else shown(value), 50)) <= 50
    assert one_line("\ud800 \u202e\n\n  x\t") == "\\ud800 \\u202e x"
    assert one_line("x" * 301) == "x" * 297 + "..."
