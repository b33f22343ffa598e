"""What each family splits, worked out by hand from its rule."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.models.tokenizer_pre import PRE_RULES, PreRule


def pieces(name: str, text: str) -> list[str]:
    return [text[start:end] for _, (start, end) in PRE_RULES[name].pre_tokenizer().pre_tokenize_str(text)]


CASES = [
    ("gpt-2", "I'll I'LL", ["I", "'ll", " I", "'", "LL"]),
    ("gpt-2", "a  b 1234x \n\n", ["a", " ", " b", " 1234", "x", " \n\n"]),
    ("smollm", "a  12", ["a", "  ", "1", "2"]),
    ("starcoder", "x 1b", ["x", " ", "1", "b"]),
    ("command-r", "$12", ["$", "1", "2"]),
    ("llama-bpe", "I'LL do12345", ["I", "'LL", " do", "123", "45"]),
    ("llama-bpe", "(a.\n\nb \n c", ["(a", ".\n\n", "b", " \n", " c"]),
    ("dbrx", "1234", ["123", "4"]),
    ("qwen2", "I'M 123\t\tx", ["I", "'M", " ", "1", "2", "3", "\t", "\tx"]),
    ("qwen2", "Vie\u0323\u0302t", ["Vie", "\u0323\u0302", "t"]),
    ("qwen35", "Vie\u0323\u0302t", ["Vie\u0323\u0302t"]),
    ("minicpm5", "12345", ["123", "45"]),
    ("seed-coder", "a.\nb", ["a", ".", "\n", "b"]),
    ("bailingmoe", "b'S !!\nx", ["b", "'S", " !!\n", "x"]),
    ("tekken", "HelloWorld ABCdef", ["Hello", "World", " ABCdef"]),
    ("tekken", "a/b don't 12", ["a", "/b", " don", "'t", " ", "1", "2"]),
    ("gpt-4o", "don't HeLLO'S1234", ["don't", " He", "LLO'S", "123", "4"]),
    ("gpt-4o", "a./\n/b", ["a", "./\n/", "b"]),
    ("deepseek-v3", "abc12345 .x中文abc", ["abc", "123", "45", " .", "x", "中文", "abc"]),
    ("deepseek-v3", "#if (a)", ["#if", " (", "a", ")"]),
    ("deepseek-llm", "a\n\n1234 b", ["a", "\n", "\n", "1234", " b"]),
    # The rule for marks has the ASCII letters in a range of its own, so it cuts words at the others.
    ("deepseek-llm", "été 中文。 x", ["é", "t", "é", " ", "中文", "。", " x"]),
    ("deepseek-coder", "ab12 !?x", ["ab", "1", "2", " !?", "x"]),
    ("falcon", "a 12345!b", ["a", " ", "123", "45", "!", "b"]),
    ("bloom", "Hi, you (x)", ["Hi", ",", " you", " (", "x", ")"]),
    ("bloom", "a12", ["a12"]),
    ("viking", "a12", ["a", "1", "2"]),
    ("jais-2", " " * 1024 + "b", [*(" " * 2**power for power in range(9, -1, -1)), " b"]),
    ("laguna", "a \n\n b", ["a", " ", "\n\n", " b"]),
    ("ufakzeka", "Ali'nin it'sx", ["Ali", "'nin", " it", "'sx"]),
    ("exaone-moe", "in a bcd  ef.\n\ng", ["in a bcd", " ", " ef", ".\n", "\n", "g"]),
    ("youtu", "한글ab中文，DeF'S12", ["한글", "ab", "中文", "，", "De", "F'S", "1", "2"]),
    ("kimi-k2", "aB中文c Été'S 1234", ["a", "B", "中文", "c", " Été'S", " ", "123", "4"]),
    ("tiny_aya", "1234567 1234a", ["1", "234", "567", " ", "123", "4", "a"]),
    ("spark2_5", "x.\n\n1234 y", ["x", ".", "\n", "\n", "1", "2", "3", "4", " y"]),
    ("afmoe", "a  1234 中b 123", ["a", " ", " ", "1", "234", " ", "中", "b", " ", "123"]),
    ("superbpe", "the cat 12345 sat", ["the cat ", "12", "345", " sat"]),
    ("chameleon", "a     b!2\n IMGIMGABZ", ["a", "    ", " b", "!", "2", "\n", " ", "IMGIMGABZ"]),
]


@pytest.mark.parametrize(("name", "text", "expected"), CASES)
def test_pieces_are_those_of_the_rule_f050(name: str, text: str, expected: list[str]) -> None:
    assert pieces(name, text) == expected


@pytest.mark.parametrize(
    ("name", "own"),
    [
        ("superbpe", (r"\p{N}+", r"(?=(\d{3})+(?!\d))")),
        ("tiny_aya", (r"\d{1,3}(?=(?:\d{3})*\b)", *PRE_RULES["gpt-4o"].splits)),
    ],
)
def test_grouping_of_digits_is_that_of_the_families_slower_expressions(name: str, own: tuple[str, ...]) -> None:
    slow, fast = PreRule(own).pre_tokenizer(), PRE_RULES[name].pre_tokenizer()
    rng = random.Random(3)
    for _ in range(5000):
        text = "".join(rng.choices("1234567890" * 3 + "½²٣ a,_é", k=rng.randrange(1, 24)))
        # An expression that matches nothing between two characters leaves an empty piece.
        expected = [piece for piece in slow.pre_tokenize_str(text) if piece[0]]
        assert fast.pre_tokenize_str(text) == expected, text


@pytest.mark.parametrize("name", PRE_RULES)
@given(
    text=st.text(alphabet=st.one_of(st.sampled_from(" \n\r\tabZ019'’.,!/_中é\u0301👍|"), st.characters()), max_size=40)
)
@settings(max_examples=30, deadline=None)
def test_no_rule_loses_text(name: str, text: str) -> None:
    text = text.encode("utf-8", "ignore").decode()
    assert "".join(pieces(name, text)) == text


@pytest.mark.parametrize(
    ("name", "same"),
    [
        *(("llama3", "llama-bpe"), ("llama-v3", "llama-bpe"), ("falcon3", "llama-bpe"), ("pixtral", "llama-bpe")),
        *(("refact", "smollm"), ("phi-2", "gpt-2"), ("poro-chat", "bloom"), ("megrez", "qwen2"), ("olmo", "mpt")),
    ],
)
def test_aliases_are_one_rule(name: str, same: str) -> None:
    assert PRE_RULES[name] == PRE_RULES[same]


def test_what_else_differs_between_families() -> None:
    composing = {name for name, rule in PRE_RULES.items() if rule.is_nfc}
    assert composing == {"qwen2", "megrez", "command-r", "mpt", "olmo"}
    beginning = {name for name, rule in PRE_RULES.items() if rule.adds_bos}
    llama3 = {"llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "lfm2", "midm-2.0", "jina-v5-nano"}
    assert beginning == llama3 | {"tekken", "chameleon"}
    whole = {name for name, rule in PRE_RULES.items() if rule.ignore_merges}
    gpt4o = {"gpt-4o", "llama4", "granite-embed-multi-97m"}
    assert whole == llama3 | gpt4o | {"tekken", "glm4", "glm5", "minicpm5", "youtu", "kimi-k2"}
