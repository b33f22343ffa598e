"""Tokenizers of other families, from their own tokenizer.json, against the `tokenizers` library on the same files.

The library is what forerun builds on, too. What is checked is what forerun adds: control tokens apart from text, begin
tokens, the bytes of tokens, and the rules by which a GGUF file of the same family is read.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import pytest
import tokenizers

from forerun.models.gguf import read_gguf
from forerun.models.store import KNOWN_MODELS, path_of
from forerun.models.tokenizer import Tokenizer
from tests.helpers.conformance import FAMILIES, conformance_file
from tests.helpers.texts import MODEL_TEXTS, random_texts

TEXTS = (*MODEL_TEXTS, *random_texts(60, seed=9))
NORMAL, CONTROL, USER_DEFINED = 1, 3, 4
# Two are enough: the rules of all are compared elsewhere.
PRE_NAMES = {"llama3_1": "llama-bpe", "qwen3": "qwen2"}
# Known models of a family, and names that stand in only one of the two files. That of Gemma has runs of space marks as
# added tokens, which it finds before spaces are spelled so.
MODELS: dict[str, tuple[str, tuple[str, ...]]] = {
    "qwen3": ("qwen-coder-0.5b", ("<think>", "</think>")),
    "gemma3": ("gemma3-270m", ("\u2581",)),
}


@dataclass(frozen=True, slots=True)
class Family:
    name: str
    content: str
    library: tokenizers.Tokenizer
    own: Tokenizer

    def library_ids(self, text: str) -> list[int]:
        ids: list[int] = self.library.encode(text, add_special_tokens=False).ids
        return ids


# Of the module, so that tests run family by family and only one is held in memory.
@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> Family:
    content = conformance_file(f"tokenizers/{request.param}/tokenizer.json").read_text("utf-8")
    config = json.loads(conformance_file(f"tokenizers/{request.param}/tokenizer_config.json").read_text("utf-8"))
    own = Tokenizer.from_tokenizer_json(content, config)
    return Family(request.param, content, tokenizers.Tokenizer.from_str(content), own)


def test_ids_equal_the_library_f050(family: Family) -> None:
    for text in TEXTS:
        assert family.own.encode(text, allow_special=True, add_bos=False) == family.library_ids(text), text


def test_text_gives_no_control_token_f049(family: Family) -> None:
    for text in TEXTS:
        ids = family.own.encode(text, add_bos=False)
        assert family.own.special_ids.isdisjoint(ids)
        assert family.own.decode(ids) == family.library.decode(ids, skip_special_tokens=False)


def test_prompts_begin_as_the_files_say_f048(family: Family) -> None:
    expected = family.library.encode("Hello", add_special_tokens=True).ids
    if family.name == "deepseek_v3":
        expected = [0, *expected]  # its tokenizer_config.json asks for the begin token, which the template lacks
    assert family.own.encode("Hello") == expected
    if (bos_id := family.own.bos_id) is not None:
        again = family.own.encode(f"{family.own.token_text(bos_id)}Hello", allow_special=True)
        assert again.count(bos_id) == 1


@pytest.mark.parametrize("family", PRE_NAMES, indirect=True)
def test_gguf_ids_equal_the_library_f050(family: Family) -> None:
    data: dict[str, Any] = json.loads(family.content)
    added = {entry["id"]: entry for entry in data["added_tokens"]}
    tokens = {i: token for token, i in data["model"]["vocab"].items()} | {i: e["content"] for i, e in added.items()}
    kinds = {i: CONTROL if entry["special"] else USER_DEFINED for i, entry in added.items()}
    keys = {
        "model": "gpt2",
        "pre": PRE_NAMES[family.name],
        "tokens": [tokens.get(i, f"[PAD{i}]") for i in range(max(tokens) + 1)],
        "token_type": [kinds.get(i, NORMAL) for i in range(max(tokens) + 1)],
        "merges": [m if isinstance(m, str) else " ".join(m) for m in data["model"]["merges"]],
    }
    tokenizer = Tokenizer.from_gguf({f"tokenizer.ggml.{key}": value for key, value in keys.items()})
    for text in TEXTS:
        assert tokenizer.encode(text, allow_special=True) == family.library_ids(text), text


@pytest.mark.parametrize("family", MODELS, indirect=True)
def test_a_known_models_file_equals_its_familys_f050(family: Family) -> None:
    model, names = MODELS[family.name]
    path = path_of(KNOWN_MODELS[model])
    if not path.is_file():
        pytest.skip(f"{model} is not in the cache; fetch it with: forerun pull {model}")
    tokenizer = Tokenizer.from_gguf(read_gguf(path).metadata)
    for text in TEXTS:
        if not any(name in text for name in names):
            assert tokenizer.encode(text, allow_special=True, add_bos=False) == family.library_ids(text), text
