"""Token ids of fifteen real vocabularies against the ids that llama.cpp's own test expects (F050).

The files `ggml-vocab-*.gguf`, `.gguf.inp` and `.gguf.out` lie in the folder `models` of llama.cpp's sources, under the
MIT licence, and are looked for in ~/.cache/forerun/conformance or in FORERUN_CONFORMANCE_DIR.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from forerun.models.gguf import read_gguf
from forerun.models.tokenizer import Tokenizer

FOLDER = Path(os.environ.get("FORERUN_CONFORMANCE_DIR") or Path.home() / ".cache/forerun/conformance")
NAMES = (
    *("bert-bge", "command-r", "deepseek-coder", "deepseek-llm", "falcon", "gemma-4", "gpt-2", "llama-bpe"),
    *("llama-spm", "mpt", "phi-3", "qwen2", "qwen35", "refact", "starcoder"),
)
SEPARATOR = "\n__ggml_vocab_test__\n"


@pytest.mark.parametrize("name", NAMES)
def test_ids_equal_llama_cpp_f050(name: str) -> None:
    path = FOLDER / f"ggml-vocab-{name}.gguf"
    if not path.is_file():
        pytest.skip(f"{path} is not there; copy llama.cpp's models/ggml-vocab-* to {FOLDER}")
    tokenizer = Tokenizer.from_gguf(read_gguf(path).metadata)
    texts = Path(f"{path}.inp").read_bytes().decode().split(SEPARATOR)
    lines = Path(f"{path}.out").read_text().splitlines()
    assert len(texts) - len(lines) in (0, 1)  # most end in a separator
    assert len(lines) > 40
    for text, line in zip(texts, lines, strict=False):
        ids = tokenizer.encode(text, add_bos=False)
        assert ids == [int(word) for word in line.split()], text
        if name != "bert-bge":  # which forgets case, accents and spaces
            assert tokenizer.decode(ids) == text
