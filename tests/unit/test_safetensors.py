from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from forerun.errors import LoadError
from forerun.models.safetensors import INDEX_FILE, SINGLE_FILE, read_folder, read_safetensors
from forerun.ops.formats import dequantize
from tests.helpers.hf_folders import header_of, write_json, write_safetensors

A = np.arange(6, dtype=np.float32).reshape(2, 3)
B = np.array([1.5, -2.0], np.float16)
TENSORS = {"a": A, "b": B}
BYTES = A.tobytes() + B.tobytes()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write_safetensors(tmp_path / SINGLE_FILE, TENSORS)


def refusal(path: Path) -> str:
    with pytest.raises(LoadError) as caught:
        read_safetensors(path)
    assert str(path) in str(caught.value)
    return str(caught.value)


def header(**changes: Any) -> dict[str, Any]:
    """The header of TENSORS with another entry for `b`."""
    stated = header_of(TENSORS)
    stated["b"] |= changes
    return stated


def test_values_types_and_shapes(path: Path) -> None:
    tensors = read_safetensors(path)
    assert list(tensors) == ["a", "b"]
    a, b = tensors["a"].weight(), tensors["b"].weight()
    assert (a.name, a.format, a.shape) == ("a", "f32", (2, 3))
    assert (b.format, b.shape) == ("f16", (1, 2))
    np.testing.assert_array_equal(dequantize(a), A)
    np.testing.assert_array_equal(dequantize(b), [[1.5, -2.0]])


def test_bfloat16_at_an_odd_address(tmp_path: Path) -> None:
    ones = np.full((1, 3), 0x3F80, np.uint16)
    stated = header_of({"x": ones})
    for padding in range(4):
        text = json.dumps(stated).encode() + b" " * padding
        tensors = read_safetensors(write_safetensors(tmp_path / "x", {"x": ones}, text))
        np.testing.assert_array_equal(dequantize(tensors["x"].weight()), [[1.0, 1.0, 1.0]])


def test_bytes_are_views_of_the_map(path: Path) -> None:
    data = read_safetensors(path)["a"].data
    assert not data.flags.writeable
    assert data.base is not None


@pytest.mark.parametrize("num_bytes", [1, 4, 20])
def test_f054_a_short_file_is_refused_with_both_sizes(path: Path, num_bytes: int) -> None:
    whole = path.read_bytes()
    path.write_bytes(whole[:-num_bytes])
    message = refusal(path)
    assert "truncated" in message
    assert str(len(whole)) in message
    assert str(len(whole) - num_bytes) in message


def test_f054_a_long_file_is_refused(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\0")
    assert "too long" in refusal(path)


@pytest.mark.parametrize("length", [0, 1, 10_000, 2**60, 2**64 - 1])
def test_f054_an_impossible_header_length(path: Path, length: int) -> None:
    path.write_bytes(length.to_bytes(8, "little") + path.read_bytes()[8:])
    assert f"takes {length} bytes" in refusal(path)


@pytest.mark.parametrize("content", [b"", b"\0" * 7])
def test_a_file_without_a_header(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    assert "truncated" in refusal(path)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (b'{"a"', "not valid JSON"),
        (b"[]", "must be a JSON object"),
        (b'{"a": 1, "a": 1}', "'a' occurs twice"),
        (b'{"\xff": 1}', "not valid JSON"),
        (b"[" * 100_000, "not valid JSON"),
        (b'{"a": ' + b"9" * 5000 + b"}", "not valid JSON"),
        (b'{"a": 1}', "dtype None"),
        (b'{"\\ud800": {}}', "a tensor whose name is"),
        (b'{"": {}}', "a tensor whose name is"),
    ],
)
def test_a_header_that_is_none(tmp_path: Path, text: bytes, problem: str) -> None:
    assert problem in refusal(write_safetensors(tmp_path / "x", {}, text))


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"dtype": "F12"}, "has dtype 'F12', which is unknown"),
        ({"dtype": ["F16"]}, "which is unknown"),
        ({"dtype": "F32"}, "takes 8 bytes"),
        ({"shape": [3]}, "takes 6 bytes"),
        ({"shape": [-2]}, "has shape"),
        ({"shape": [2.0]}, "has shape"),
        ({"shape": [True, 2]}, "has shape"),
        ({"shape": [1] * 9 + [2]}, "has shape"),
        ({"shape": [2**62, 2**62]}, "takes"),
        ({"shape": "2"}, "has shape"),
        ({"data_offsets": [24]}, "has data_offsets"),
        ({"data_offsets": [28, 24]}, "takes 4 bytes"),
        ({"data_offsets": [-4, 0]}, "has data_offsets"),
        ({"data_offsets": [20, 24]}, "tensor b overlaps another one"),
        ({"data_offsets": [0, 4]}, "overlaps another one"),
        ({"data_offsets": [26, 30]}, "tensor b comes after a gap"),
        ({"data_offsets": [2**62, 2**62 + 4]}, "tensor b comes after a gap"),
    ],
)
def test_an_entry_that_can_not_be(tmp_path: Path, changes: dict[str, Any], problem: str) -> None:
    message = refusal(write_safetensors(tmp_path / "x", TENSORS, header(**changes), BYTES))
    assert problem in message
    assert " b " in message or "overlaps" in message


@pytest.mark.parametrize(
    ("array", "problem"),
    [
        (np.zeros((2, 2), np.int64), "has dtype I64, but must be F32, F16 or BF16"),
        (np.zeros((2, 2), np.uint8), "has dtype U8"),
        (np.zeros((2, 2, 2), np.float32), "must be a vector or a matrix"),
        (np.zeros((), np.float32), "must be a vector or a matrix"),
        (np.zeros((0, 2), np.float32), "must be a vector or a matrix"),
    ],
)
def test_a_tensor_that_is_no_weight_is_refused_when_it_is_used(tmp_path: Path, array: np.ndarray, problem: str) -> None:
    tensor = read_safetensors(write_safetensors(tmp_path / "x", {"odd": array}))["odd"]
    with pytest.raises(LoadError, match=f"tensor odd .*{problem}"):
        tensor.weight()


def write_shards(folder: Path, shards: dict[str, dict[str, np.ndarray]], **moved: str) -> None:
    owners = {name: file_name for file_name, tensors in shards.items() for name in tensors}
    for file_name, tensors in shards.items():
        write_safetensors(folder / file_name, tensors)
    write_json(folder / INDEX_FILE, {"metadata": {"total_size": 28}, "weight_map": owners | moved})


def test_several_files(tmp_path: Path) -> None:
    write_shards(tmp_path, {"x-1.safetensors": {"a": A}, "x-2.safetensors": {"b": B}})
    tensors = read_folder(tmp_path)
    assert sorted(tensors) == ["a", "b"]
    assert tensors["b"].path == tmp_path / "x-2.safetensors"


@pytest.mark.parametrize(
    ("moved", "problem"),
    [
        ({"b": "x-1.safetensors"}, "x-1.safetensors: tensor b is missing"),
        ({"c": "x-1.safetensors"}, "x-1.safetensors: tensor c is missing"),
        ({"a": "x-2.safetensors"}, "x-1.safetensors|tensor a is missing|according to"),
        ({"c": "x-3.safetensors"}, "x-3.safetensors can't be read"),
        ({"c": "../x-1.safetensors"}, "must name a .safetensors file in the same folder"),
        ({"c": "/etc/x.safetensors"}, "must name a .safetensors file in the same folder"),
        ({"c": "..\\x.safetensors"}, "must name a .safetensors file in the same folder"),
        ({"c": "x\0.safetensors"}, "must name a .safetensors file in the same folder"),
        ({"c": "pytorch_model.bin"}, "must name a .safetensors file in the same folder"),
        ({"c": 3}, "must name a .safetensors file in the same folder"),
    ],
)
def test_an_index_that_does_not_agree(tmp_path: Path, moved: dict[str, Any], problem: str) -> None:
    write_shards(tmp_path, {"x-1.safetensors": {"a": A}, "x-2.safetensors": {"b": B}}, **moved)
    with pytest.raises(LoadError, match=problem):
        read_folder(tmp_path)


def test_one_tensor_in_two_files(tmp_path: Path) -> None:
    write_shards(tmp_path, {"x-1.safetensors": {"a": A}, "x-2.safetensors": {"b": B, "a": A}}, a="x-1.safetensors")
    with pytest.raises(LoadError, match=r"x-2\.safetensors: tensor a is in .*x-1\.safetensors as well"):
        read_folder(tmp_path)


def test_a_tensor_the_index_lacks(tmp_path: Path) -> None:
    write_shards(tmp_path, {"x-1.safetensors": {"a": A}})
    write_safetensors(tmp_path / "x-1.safetensors", TENSORS)
    with pytest.raises(LoadError, match="tensor b is in no file according to"):
        read_folder(tmp_path)


def test_f054_a_shard_cut_short_names_it(tmp_path: Path) -> None:
    write_shards(tmp_path, {"x-1.safetensors": {"a": A}, "x-2.safetensors": {"b": B}})
    shard = tmp_path / "x-2.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(LoadError, match=r"x-2\.safetensors is truncated"):
        read_folder(tmp_path)


@pytest.mark.parametrize("index", [{}, {"weight_map": {}}, {"weight_map": ["a"]}])
def test_an_index_that_is_none(tmp_path: Path, index: dict[str, Any]) -> None:
    write_json(tmp_path / INDEX_FILE, index)
    with pytest.raises(LoadError, match="weight_map must say"):
        read_folder(tmp_path)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt"])
def test_a_pickle_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"\x80\x04")
    with pytest.raises(LoadError, match=f"has its weights in {name}, a pickle, which could run code") as caught:
        read_folder(tmp_path)
    assert "\n" not in str(caught.value)


def test_a_folder_without_weights(tmp_path: Path) -> None:
    with pytest.raises(LoadError, match=r"has neither model\.safetensors nor model\.safetensors\.index\.json"):
        read_folder(tmp_path)


def test_the_format_of_its_own_library(tmp_path: Path) -> None:
    library = pytest.importorskip("safetensors.numpy")
    library.save_file(TENSORS, tmp_path / SINGLE_FILE, {"format": "pt"})
    tensors = read_folder(tmp_path)
    np.testing.assert_array_equal(dequantize(tensors["a"].weight()), A)
    np.testing.assert_array_equal(dequantize(tensors["b"].weight()), B[None].astype(np.float32))
