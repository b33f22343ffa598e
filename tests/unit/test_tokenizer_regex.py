"""Which regular expressions are trusted, and that those which are do not make the library's matcher give up."""

from __future__ import annotations

import random

import pytest
import tokenizers
from tokenizers import pre_tokenizers

from forerun.models.tokenizer_pre import PRE_RULES
from forerun.models.tokenizer_regex import HardRegexError, check_regex

# They repeat what varies, in ways that a simple rule can't tell from harmful ones. Nobody judges what is in the table.
TOO_HARD = frozenset(("afmoe", "exaone-moe", "superbpe"))


@pytest.mark.parametrize("name", sorted(PRE_RULES))
def test_the_expressions_of_known_families_are_fine_but_for_a_few(name: str) -> None:
    fine = True
    for regex in PRE_RULES[name].splits:
        try:
            check_regex(regex)
        except HardRegexError:
            fine = False
    assert fine == (name not in TOO_HARD)


@pytest.mark.parametrize(
    "regex",
    [
        "",
        "a|",
        "(?:)",
        r"[]a]+",
        r"[^]\]]+\]",
        r"[a[b-d]&&[^\]]]*x",
        r"a{2}{3}",
        r"\d{1,3}(?=(?:\d{3})*\b)",
        r"(?=(\d{3})+(?!\d))",
        r"\s+(?!\S)",
        r"x{,4}y{2,}",
        r"a{b}{,}",
        r"(?i)ab|(?-i:c)",
        r"(?<name>a)(?>b+)",
        r"a*+b?+c",
        r"\p{Han}+|\P{^L}\x{3042}\u3042\x41\012\n",
        r".{0,60000}q",
    ],
)
def test_harmless_expressions_are_fine(regex: str) -> None:
    check_regex(regex)


@pytest.mark.parametrize(
    ("regex", "why"),
    [
        ("(a*)*b", "repeats something that varies"),
        ("(a|a)+b", "repeats something that varies"),
        ("((.+)+)+", "repeats something that varies"),
        (r"(\w+\s?)*$", "repeats something that varies"),
        ("(?:a?){50}", "repeats something that varies"),
        ("a{1,3}+", "repeats something that varies"),  # after an interval, + repeats in this syntax
        ("a+*", "repeats something that varies"),
        ("(a++)*b", "repeats something that varies"),
        ("(?=(a+)+b)", "repeats something that varies"),
        ("a*a*b", "2 repeats before something that can fail"),
        (".*?.*?x", "2 repeats before something that can fail"),
        ("a+(?!b+c)", "2 repeats before something that can fail"),
        ("a+b*+c", "2 repeats before something that can fail"),
        ("(?:x|a+b+)c", "2 repeats before something that can fail"),
        ("a{0,60000}b+c", "2 repeats before something that can fail"),
        ("a?" * 13, "more than 4096 choices"),
        ("((a{100}){100}){100}", "counts to more than 1000"),
        (r"(a)\1", "which is not supported"),
        (r"(?<n>a\g<n>?)", "which is not supported"),
        ("(?~a)", "which is not supported"),
        ("(?x)a b", "which is not supported"),
        (r"\X+", "which is not supported"),
        ("(?(1)a|b)", "which is not supported"),
        ("*a", "repeats nothing"),
        ("(a", "leaves a group open"),
        ("a)", "closes a group that is not open"),
        ("[[a]", "leaves a class of characters open"),
        ("\\", "which is not supported"),
        ("(?:" * 60 + ")" * 60, "nested more than 50 deep"),
        ("a" * 20_001, "has 20001 characters"),
    ],
)
def test_dangerous_expressions_are_refused(regex: str, why: str) -> None:
    with pytest.raises(HardRegexError, match=why):
        check_regex(regex)


_ATOMS = ["a", "b", "[ab]", ".", "[^b]", r"\w", r"\s", " ", "(?:a|b)", "(?:ab)", "(?:a|ab)", "(a)", "$", r"\b", "(?=a)"]
_ATOMS += ["(?!b)", "(?<=a)", "(?>a+)", "(?i:A)", r"\p{L}"]
_QUANTIFIERS = ["", "", "*", "+", "?", "*?", "+?", "{2}", "{1,3}", "{2,}", "{0,20}", "*+", "++", "?+"]


def _expression(rng: random.Random, depth: int = 0) -> str:
    alternatives = []
    for _ in range(rng.choice([1, 1, 2])):
        parts = []
        for _ in range(rng.randrange(1, 5)):
            is_atom = depth > 1 or rng.random() < 0.75
            atom = (
                rng.choice(_ATOMS) if is_atom else rng.choice(["(?:", "(?=", "(?!"]) + _expression(rng, depth + 1) + ")"
            )
            parts.append(atom + rng.choice(_QUANTIFIERS))
        alternatives.append("".join(parts))
    return "|".join(alternatives)


def test_the_matcher_never_gives_up_on_what_is_trusted() -> None:
    """It does so after ten million steps from one place; what is linear in the run needs some thousands here."""
    rng = random.Random(5)
    num_trusted = 0
    while num_trusted < 150:
        regex = _expression(rng)
        try:
            check_regex(regex)
            splitter = pre_tokenizers.Split(tokenizers.Regex(regex), behavior="isolated")
        except Exception:  # not trusted, or no expression
            continue
        num_trusted += 1
        for text in ("a" * 1000, "ab" * 500, "a" * 500 + "b" * 500, " " * 500 + "a" * 500):
            splitter.pre_tokenize_str(text)


def test_the_matcher_gives_up_on_what_is_not() -> None:
    splitter = pre_tokenizers.Split(tokenizers.Regex("(x+x+)+y"), behavior="isolated")
    with pytest.raises(BaseException, match="retry-limit-in-match over"):
        splitter.pre_tokenize_str("x" * 60)
