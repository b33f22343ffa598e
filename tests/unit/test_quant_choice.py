"""`quant`: what each choice makes of each file, that none is ignored, and that floats become halves."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from forerun import LLM, SamplingParams
from forerun.errors import ConfigError
from forerun.models.loader import LoadedModel, load_model
from forerun.ops.formats import dequantize
from tests.helpers.gguf_files import write_tiny_llama
from tests.helpers.hf_folders import tiny_config, tiny_tensors, write_json, write_safetensors, write_tiny_folder

FLOATS = ("f32", "f16", "bf16")
# What a layer's matrices and the head are served as.
SERVED = {"f32": ("f32", "f32"), "bf16": ("bf16", "bf16"), "q8": ("q8_0", "q8_0"), "q4": ("q4_1", "q8_0")}


def gguf_of(folder: Path, fmt: str) -> Path:
    return write_tiny_llama(folder / f"{fmt}.gguf", fmt=fmt)


def folder_of(folder: Path, fmt: str) -> Path:
    """The tiny folder with matrices of a float format, and an inner size of whole blocks."""
    made = write_tiny_folder(folder / fmt, intermediate_size=64)
    tensors = tiny_tensors()
    for name, array in tensors.items():
        if name.endswith(("gate_proj.weight", "up_proj.weight")):
            tensors[name] = np.resize(array, (64, array.shape[1]))
        elif name.endswith("down_proj.weight"):
            tensors[name] = np.resize(array, (array.shape[0], 64))
    if fmt == "f16":
        tensors = {name: array.astype(np.float16) for name, array in tensors.items()}
    elif fmt == "bf16":
        tensors = {name: (array.view(np.uint32) >> 16).astype(np.uint16) for name, array in tensors.items()}
    write_safetensors(made / "model.safetensors", tensors)
    return made


def formats_of(model: LoadedModel) -> tuple[set[str], str]:
    embedding, *layers = model.weights.matrices()
    return {weight.format for weight in layers}, embedding.format


@pytest.mark.parametrize("write", [gguf_of, folder_of])
@pytest.mark.parametrize("fmt", FLOATS)
def test_floats_are_served_as_asked(tmp_path: Path, write: Callable[[Path, str], Path], fmt: str) -> None:
    path = write(tmp_path, fmt)
    assert formats_of(load_model(path)) == ({fmt}, fmt)
    for quant, (layer, head) in SERVED.items():
        assert formats_of(load_model(path, quant)) == ({layer}, head), quant


def test_bf16_of_floats_is_rounded_to_nearest_even(tmp_path: Path) -> None:
    path = gguf_of(tmp_path, "f32")
    exact, rounded = load_model(path), load_model(path, "bf16")
    for before, after in zip(exact.weights.matrices(), rounded.weights.matrices(), strict=True):
        values = dequantize(before).astype(np.float64)
        step = np.ldexp(1.0, np.frexp(values)[1] - 8)  # eight significant bits
        np.testing.assert_array_equal(dequantize(after), np.rint(values / step) * step)


@pytest.mark.parametrize(
    ("fmt", "quant"),
    [("q4_0", "bf16"), ("q4_0", "q8"), ("q4_0", "q4"), ("q4_1", "bf16"), ("q4_1", "q8"), ("q8_0", "bf16")],
)
def test_a_choice_that_would_change_nothing_is_refused(tmp_path: Path, fmt: str, quant: str) -> None:
    path = gguf_of(tmp_path, fmt)
    says = rf"^{path}: quant {quant} would change none of the matrices \(15 {fmt}\), because all are as small already; "
    for load in (load_model, lambda path, quant: LLM(path, quant=quant)):
        with pytest.raises(ConfigError, match=says + "use auto, or f32 to expand them$"):
            load(path, quant)


def test_what_already_is_as_asked_is_not_refused(tmp_path: Path) -> None:
    q4 = write_tiny_llama(tmp_path / "q4.gguf", fmt="q4_1", head_fmt="q8_0")
    for path, quant in ((q4, "q4"), (gguf_of(tmp_path, "q8_0"), "q8"), (gguf_of(tmp_path, "bf16"), "bf16")):
        assert formats_of(load_model(path, quant)) == formats_of(load_model(path))


def test_a_part_that_is_converted_is_enough(tmp_path: Path) -> None:
    """A quantised file with a head of floats; and codes that the choice makes smaller."""
    path = write_tiny_llama(tmp_path / "model.gguf", fmt="q4_1", head_fmt="f16")
    assert formats_of(load_model(path, "q8")) == ({"q4_1"}, "q8_0")
    assert formats_of(load_model(gguf_of(tmp_path, "q8_0"), "q4")) == ({"q4_1"}, "q8_0")


def test_a_draft_model_takes_the_targets_choice_where_it_applies(tmp_path: Path) -> None:
    llm, params = LLM(gguf_of(tmp_path, "f32"), quant="bf16", threads=1), SamplingParams(max_tokens=8)
    plain = llm.generate("the cat", params)[0]
    for fmt in ("q4_0", "f32"):
        drafted = llm.generate("the cat", params, speculation=f"draft:model={gguf_of(tmp_path, fmt)},k=3")[0]
        assert drafted.token_ids == plain.token_ids
        assert drafted.stats.drafted_tokens > 0


def test_rows_that_fit_no_block_are_told(tmp_path: Path) -> None:
    folder = write_tiny_folder(tmp_path / "odd")
    tensors = {}
    for name, array in tiny_tensors().items():
        shape = tuple({32: 36, 48: 40, 16: 18}.get(size, size) for size in array.shape)
        tensors[name] = np.resize(array, shape)
    sizes = {"hidden_size": 36, "intermediate_size": 40, "num_attention_heads": 2, "num_key_value_heads": 1}
    write_json(folder / "config.json", tiny_config(**sizes))
    write_safetensors(folder / "model.safetensors", tensors)
    with pytest.raises(ConfigError, match="because rows of floats are no multiple of 32 weights"):
        load_model(folder, "q8")
    assert formats_of(load_model(folder, "bf16")) == ({"bf16"}, "bf16")
