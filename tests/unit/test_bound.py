"""A model bound to a backend: whatever is wrong with a part of it names the file."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from forerun.engine.llm import LLM
from forerun.errors import LoadError
from tests.fuzz.bases_gguf import gguf_model
from tests.fuzz.image import TYPE_IDS
from tests.fuzz.parts import Sizes


def test_a_weight_that_can_not_be_packed_names_file_and_tensor(tmp_path: Path) -> None:
    image = gguf_model("llama", "smollm", "q4_0", Sizes(hidden=64, inner=96, layers=1, dim=16))
    tensor = next(tensor for tensor in image.tensors if tensor.kind == TYPE_IDS["q4_0"])
    tensor.data = np.float16(9000).tobytes() + tensor.data[2:]
    path = tmp_path / "model.gguf"
    path.write_bytes(image.pack()[0])
    with pytest.raises(
        LoadError, match=r"model\.gguf: tensor token_embd\.weight can't be packed: a Q4_0 scale is above"
    ):
        LLM(path, threads=1)


def test_a_weight_that_can_not_be_converted_names_file_and_tensor(tmp_path: Path) -> None:
    image = gguf_model("llama", "smollm", "f16")
    image.tensors[0].data = b"\xff\xff" + image.tensors[0].data[2:]
    path = tmp_path / "model.gguf"
    path.write_bytes(image.pack()[0])
    with pytest.raises(
        LoadError, match=r"model\.gguf: tensor token_embd\.weight holds a value that is not a finite number"
    ):
        LLM(path, quant="q8", threads=1)
