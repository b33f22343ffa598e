"""Damaged headers and config.json files load or are refused with a LoadError; nothing else ever happens (F054)."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from forerun.errors import LoadError
from forerun.models.hf_folder import open_folder
from forerun.models.safetensors import read_safetensors
from forerun.ops.formats import dequantize
from tests.helpers.hf_folders import header_of, tiny_config, tiny_tensors, write_safetensors, write_tiny_folder
from tests.helpers.packers import GPTQ, gptq_tensors

NUM_CASES = 1500
NUMBERS = [0, 1, -1, 2, 3, 7, 255, 2**31 - 1, 2**31, 2**32, 2**53 + 1, 2**63 - 1, 2**63, 2**64, 10**40, 10**400]
NUMBERS_AS_TEXT = [*map(str, NUMBERS), "1e400", "-1e400", "1e-400", "NaN", "-Infinity", "0.0", "2.5", "-0.0"]
VALUES = [None, True, "", "x", "sliding_attention", [], {}, [1], [[]], {"rope_type": "yarn"}, 1.5, *NUMBERS]

Mutation = Callable[[bytes, np.random.Generator], bytes]


def cut(text: bytes, rng: np.random.Generator) -> bytes:
    return text[: rng.integers(0, len(text))]


def set_bytes(text: bytes, rng: np.random.Generator) -> bytes:
    raw = bytearray(text)
    for position in rng.integers(0, len(raw), rng.integers(1, 4)):
        raw[position] = rng.integers(0, 256)
    return bytes(raw)


def set_number(text: bytes, rng: np.random.Generator) -> bytes:
    found = list(re.finditer(rb"-?\d+(\.\d+)?", text))
    match = found[rng.integers(0, len(found))]
    value = NUMBERS_AS_TEXT[rng.integers(0, len(NUMBERS_AS_TEXT))].encode()
    return text[: match.start()] + value + text[match.end() :]


def change_number(text: bytes, rng: np.random.Generator) -> bytes:
    found = list(re.finditer(rb"\d+", text))
    match = found[rng.integers(0, len(found))]
    value = int(match.group()) + int(rng.choice([-4, -1, 1, 4, 64]))
    return text[: match.start()] + str(value).encode() + text[match.end() :]


def repeat_run(text: bytes, rng: np.random.Generator) -> bytes:
    start, at = rng.integers(0, len(text), 2)
    return text[:at] + text[start : start + rng.integers(1, 40)] + text[at:]


def set_value(text: bytes, rng: np.random.Generator) -> bytes:
    """Another value, of any type, somewhere in the tree."""
    data = json.loads(text)
    node: Any = data
    while True:
        keys = list(node) if isinstance(node, dict) else range(len(node))
        key = keys[rng.integers(0, len(keys))]
        if not isinstance(node[key], dict | list) or not node[key] or rng.random() < 0.3:
            break
        node = node[key]
    node[key] = VALUES[rng.integers(0, len(VALUES))]
    return json.dumps(data).encode()


def drop_key(text: bytes, rng: np.random.Generator) -> bytes:
    data = json.loads(text)
    del data[list(data)[rng.integers(0, len(data))]]
    return json.dumps(data).encode()


MUTATIONS: list[Mutation] = [cut, set_bytes, set_number, change_number, repeat_run, set_value, set_value, drop_key]


def configs() -> list[bytes]:
    """One for every kind of window and of RoPE."""
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 32.0}
    longrope = {"type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    llama3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    kinds = {"full_attention": yarn | {"rope_theta": 5e5}, "sliding_attention": {"rope_type": "default"}}
    types = ["sliding_attention", "full_attention"]
    return [
        json.dumps(tiny_config(**changes)).encode()
        for changes in (
            {"rope_scaling": llama3, "mlp_bias": False},
            {"model_type": "mistral", "sliding_window": 16, "rope_scaling": yarn, "head_dim": 8},
            {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1},
            {"model_type": "gemma3_text", "rope_parameters": kinds, "layer_types": types, "sliding_window": 16},
            {"model_type": "phi3", "rope_scaling": longrope, "original_max_position_embeddings": 64},
        )
    ]


def use(folder: Path) -> None:
    """Opens the folder and reads every weight; raises LoadError."""
    for tensor in read_safetensors(folder / "model.safetensors").values():
        if tensor.dtype != "I32":
            assert dequantize(tensor.weight()).size == np.prod(tensor.shape)
    for weight in open_folder(folder).tensors.values():
        assert dequantize(weight).shape == weight.shape


def run_cases(folder: Path, tensors: Mapping[str, np.ndarray], all_configs: list[bytes], num_cases: int) -> None:
    """Damages the header, or one of these configs, of a folder that is fine."""
    weights, config = folder / "model.safetensors", folder / "config.json"
    header, data = json.dumps(header_of(tensors)).encode(), b"".join(array.tobytes() for array in tensors.values())
    whole_config = config.read_bytes()
    use(folder)
    rng = np.random.default_rng(0)
    loaded = refused = 0
    for case in range(num_cases):
        mutation = MUTATIONS[rng.integers(0, len(MUTATIONS))]
        is_header = case % 2 == 0
        text = mutation(header if is_header else all_configs[case // 2 % len(all_configs)], rng)
        length = len(text) if rng.random() < 0.9 else NUMBERS[rng.integers(0, 13)] % 2**64
        weights.write_bytes(
            length.to_bytes(8, "little") + text + data
            if is_header
            else len(header).to_bytes(8, "little") + header + data
        )
        config.write_bytes(whole_config if is_header else text)
        try:
            use(folder)
            loaded += 1
        except LoadError as error:
            assert str(folder) in str(error)  # noqa: PT017
            assert len(str(error)) < 600  # noqa: PT017
            str(error).encode()
            refused += 1
        except Exception as error:
            raise AssertionError(f"case {case} ({mutation.__name__}): {error!r}") from error
    assert loaded > num_cases // 50  # what hits spaces and harmless keys
    assert refused > num_cases // 4


def test_f054_damaged_folders_load_or_are_refused(tmp_path: Path) -> None:
    run_cases(write_tiny_folder(tmp_path / "tiny"), tiny_tensors(), configs(), NUM_CASES)


def test_f054_damaged_quantised_folders_load_or_are_refused(tmp_path: Path) -> None:
    config = {"quantization_config": GPTQ | {"group_size": 32, "dynamic": {}, "checkpoint_format": "gptq"}}
    folder, tensors = write_tiny_folder(tmp_path / "tiny", **config), gptq_tensors(tiny_tensors())
    write_safetensors(folder / "model.safetensors", tensors)
    run_cases(folder, tensors, [json.dumps(tiny_config(**config)).encode()], NUM_CASES // 3)
