"""Token ids of the known models' own files against those that llama.cpp was recorded to give (F049, F050)."""

from __future__ import annotations

import unicodedata
from functools import cache

import pytest

from forerun.models.gguf import read_gguf
from forerun.models.store import KNOWN_MODELS, path_of
from forerun.models.tokenizer import Tokenizer
from tests.helpers.record_llama_cpp import COMPOSING_MODELS, IDS, load, model_texts

TEXTS = model_texts()
RECORD = load(IDS, TEXTS)


@cache
def tokenizer(name: str) -> Tokenizer:
    path = path_of(KNOWN_MODELS[name])
    if not path.is_file():
        pytest.skip(f"{name} is not in the cache; fetch it with: forerun pull {name}")
    return Tokenizer.from_gguf(read_gguf(path).metadata)


def test_every_known_model_is_recorded() -> None:
    assert RECORD["models"].keys() == KNOWN_MODELS.keys()


@pytest.mark.parametrize("name", KNOWN_MODELS)
@pytest.mark.parametrize("allow_special", [False, True])
def test_ids_equal_llama_cpp_f049_f050(name: str, allow_special: bool) -> None:
    record = RECORD["ids"][RECORD["models"][name]]
    for i, text in enumerate(TEXTS):
        expected = record["special"].get(str(i)) if allow_special else None
        ids = tokenizer(name).encode(text, allow_special=allow_special, add_bos=False)
        if "</s>" not in text:  # for llama.cpp a control token, whatever the file says
            assert ids == (expected or record["plain"][i]), text
        if not allow_special:
            assert tokenizer(name).special_ids.isdisjoint(ids)


@pytest.mark.parametrize("name", KNOWN_MODELS)
def test_decoding_gives_the_text_back(name: str) -> None:
    for text in TEXTS:
        expected = unicodedata.normalize("NFC", text) if name in COMPOSING_MODELS else text
        if name == "gemma3-270m":
            expected = text.replace("\u2581", " ")  # is a space in its vocabulary
        assert tokenizer(name).decode(tokenizer(name).encode(text, add_bos=False)) == expected
