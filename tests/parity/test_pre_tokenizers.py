"""Where families cut texts, against what llama.cpp was recorded to do and against their own files (F050)."""

from __future__ import annotations

import json
from itertools import accumulate, pairwise
from typing import Any

import pytest
import tokenizers

from forerun.errors import LoadError
from forerun.models.tokenizer import Tokenizer
from forerun.models.tokenizer_pre import PRE_RULES, RAW_NAMES
from tests.helpers.conformance import conformance_file
from tests.helpers.record_llama_cpp import PIECES, load, raw_vocabulary
from tests.helpers.texts import MODEL_TEXTS, RULE_TEXTS, random_texts

RECORD = load(PIECES, RULE_TEXTS)

# Texts in which llama.cpp only comes near a family's own expression. Its regex library knows no case beyond ASCII, and
# several rules leave out case or marks altogether.
_NO_CASE_BEYOND_ASCII = {"ÉtéÀla ÇA école"}
_NO_MARKS = {"हिन्दी नमस्ते", "မြန် ខ្មែរ ລາວ", "e\u0301 n\u0303o \u0301x", "Vie\u0323\u0302t a\u0308B"}
_NO_CASE = {"CamelCase HTTPServer xY", "ABCdef ABC deF", *_NO_CASE_BEYOND_ASCII}
_ODD_SPACES = {"\u00a0x\u2003y\u3000z \u2028"}  # lie in a range of the families' expressions
_GPT4O = _NO_CASE_BEYOND_ASCII | _NO_MARKS
# It cuts digits off together with the text before them, so spaces before digits come out one by one.
_TINY_AYA = _NO_CASE | {"a  1   22 \t3b", "abc中文def日本GHI", "Vie\u0323\u0302t a\u0308B"}
APPROXIMATED = {
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2", "minimax-m2", "talkie", "tekken"), _GPT4O),
    "granite-embed-multi-97m": _NO_CASE_BEYOND_ASCII,
    "youtu": _NO_CASE | {"Vie\u0323\u0302t a\u0308B"},
    **dict.fromkeys(("tiny_aya", "cohere2moe"), _TINY_AYA),
    "kimi-k2": _NO_CASE | _NO_MARKS | {"豈㐀𠜎 々〆"},
    "superbpe": {"١٢٣٤٥ ९८७"},
    **dict.fromkeys(("deepseek-llm", "deepseek-coder"), _ODD_SPACES),
}


def recorded(name: str) -> dict[str, list[str]]:
    lengths = RECORD["lengths"][RECORD["names"][name]]
    ends = [pairwise(accumulate(of_text, initial=0)) for of_text in lengths]
    return {text: [text[a:b] for a, b in of_text] for text, of_text in zip(RULE_TEXTS, ends, strict=True)}


def test_every_name_of_llama_cpp_is_known_or_refused_by_name_f050() -> None:
    refused = {name for name, rule in RECORD["names"].items() if rule is None}
    assert RECORD["names"].keys() - PRE_RULES - RAW_NAMES == refused
    assert refused.isdisjoint({*PRE_RULES, *RAW_NAMES})
    for name in refused:
        data = {"model": "gpt2", "pre": name, "tokens": ["a"], "token_type": [1], "merges": []}
        with pytest.raises(LoadError, match=f"tokenizer.ggml.pre is '{name}', but must be one of"):
            Tokenizer.from_gguf({f"tokenizer.ggml.{key}": value for key, value in data.items()})


@pytest.mark.parametrize("name", PRE_RULES)
def test_pieces_equal_llama_cpp_f050(name: str) -> None:
    cut = PRE_RULES[name].pre_tokenizer().pre_tokenize_str
    differing = {
        text
        for text, expected in recorded(name).items()
        if [text[start:end] for _, (start, end) in cut(text)] != expected
    }
    assert differing == APPROXIMATED.get(name, set())


@pytest.mark.parametrize("name", sorted(RAW_NAMES))
def test_raw_pieces_equal_llama_cpp_f050(name: str) -> None:
    tokens, merges = raw_vocabulary()
    data = {"model": "gpt2", "pre": name, "tokens": tokens, "token_type": [1] * len(tokens), "merges": merges}
    tokenizer = Tokenizer.from_gguf({f"tokenizer.ggml.{key}": value for key, value in data.items()})
    assert not tokenizer.adds_bos
    for text, expected in recorded(name).items():
        ids = tokenizer.encode(text)
        assert [tokenizer.token_text(i) for i in ids] == [piece.replace(" ", "\u2581") for piece in expected]
        assert tokenizer.decode(ids) == text


FAMILY_RULES = {
    "deepseek_v3": "deepseek-v3",
    "gptoss": "gpt-4o",
    "llama3_1": "llama-bpe",
    "qwen3": "qwen2",
}


@pytest.mark.parametrize(("family", "name"), FAMILY_RULES.items())
def test_rules_are_those_of_the_families_files_f050(family: str, name: str) -> None:
    data: dict[str, Any] = json.loads(conformance_file(f"tokenizers/{family}/tokenizer.json").read_text("utf-8"))
    vocabulary = {"model": data["model"] | {"vocab": {}, "merges": []}, "added_tokens": [], "post_processor": None}
    theirs = tokenizers.Tokenizer.from_str(json.dumps(data | vocabulary)).pre_tokenizer
    rule = PRE_RULES[name]
    ours = rule.pre_tokenizer()
    for text in (*MODEL_TEXTS, *random_texts(200, seed=3)):
        assert ours.pre_tokenize_str(text) == theirs.pre_tokenize_str(text)
    assert rule.is_nfc == (data["normalizer"] == {"type": "NFC"})
    assert rule.ignore_merges == bool(data["model"].get("ignore_merges"))
