"""Token ids of real vocabularies against llama.cpp's own test files (F050)."""

from __future__ import annotations

import pytest

from forerun.errors import LoadError
from forerun.models.gguf import read_gguf
from forerun.models.tokenizer import Tokenizer
from tests.helpers.conformance import conformance_file

NAMES = (
    *("bert-bge", "command-r", "deepseek-coder", "deepseek-llm", "falcon", "gemma-4", "gpt-2", "llama-bpe"),
    *("llama-spm", "mpt", "phi-3", "qwen2", "qwen35", "refact", "starcoder"),
)
SEPARATOR = "\n__ggml_vocab_test__\n"


@pytest.mark.parametrize("name", NAMES)
def test_ids_equal_llama_cpp_f050(name: str) -> None:
    path = conformance_file(f"ggml-vocab-{name}.gguf")
    tokenizer = Tokenizer.from_gguf(read_gguf(path).metadata)
    texts = conformance_file(f"{path.name}.inp").read_bytes().decode().split(SEPARATOR)
    lines = conformance_file(f"{path.name}.out").read_text().splitlines()
    assert len(texts) - len(lines) in (0, 1)  # most end in a separator
    assert len(lines) > 40
    for text, line in zip(texts, lines, strict=False):
        ids = tokenizer.encode(text, add_bos=False)
        assert ids == [int(word) for word in line.split()], text
        if name != "bert-bge":  # which forgets case, accents and spaces
            assert tokenizer.decode(ids) == text


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("aquila", "tokenizer.ggml.pre is missing, but must be one of"),
        ("gpt-neox", "tokenizer.ggml.pre is missing, but must be one of"),
        ("nomic-bert-moe", "tokenizer.ggml.model is 't5', but must be one of 'gpt2', 'gemma4', 'llama', 'bert'"),
    ],
)
def test_what_a_file_leaves_open_is_not_guessed_f050(name: str, words: str) -> None:
    metadata = read_gguf(conformance_file(f"ggml-vocab-{name}.gguf")).metadata
    with pytest.raises(LoadError, match=words):
        Tokenizer.from_gguf(metadata)
