"""Reads safetensors files, one or several that make up a model. The tensors' bytes stay in the mapped files.

    8 bytes     length of the header, little-endian
    header      JSON: {name: {"dtype": "F16", "shape": [2, 3], "data_offsets": [begin, end]}, "__metadata__": {...}}
    data        the tensors without gaps; offsets count from its beginning

Of several files, `model.safetensors.index.json` says which tensor lies in which. Formats that run code when they are
opened are not read at all.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np

from forerun.errors import LoadError, shown
from forerun.models.hf_json import parse_object, read_object
from forerun.ops.base import Weight
from forerun.ops.dequantise import UInt8Array

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

_PREFIX_BYTES = 8
_MAX_HEADER_BYTES = 100_000_000  # the limit of the format's own library
_MAX_RANK = 8
_MAX_NAME_CHARS = 512
_FORMATS: Mapping[str, str] = {"F32": "f32", "F16": "f16", "BF16": "bf16"}
_ITEM_BYTES: Mapping[str, int] = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0"), 1),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 2),
    **dict.fromkeys(("U32", "I32", "F32"), 4),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 8),
}
_PICKLES = (".bin", ".pt", ".pth", ".ckpt")


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor of a file, whose bytes are known to lie in it.

    Attributes:
        path: the file.
        name: the tensor's name.
        dtype: its type by the format's name, such as `BF16`.
        shape: its shape.
        data: [bytes] uint8, a view of the mapped file; the map is closed when the last view is gone.
    """

    path: Path
    name: str
    dtype: str
    shape: tuple[int, ...]
    data: UInt8Array

    def weight(self) -> Weight:
        """The tensor as a matrix; a vector of K numbers has the shape (1, K).

        Raises:
            LoadError: its type is not F32, F16 or BF16, it is no vector or matrix, or it is empty.
        """
        if self.dtype not in _FORMATS:
            raise LoadError(f"{self.path}: tensor {self.name} has dtype {self.dtype}, but must be F32, F16 or BF16")
        if len(self.shape) not in (1, 2) or 0 in self.shape:
            raise LoadError(f"{self.path}: tensor {self.name} has shape {self.shape}, but must be a vector or a matrix")
        shape = (1, self.shape[0]) if len(self.shape) == 1 else (self.shape[0], self.shape[1])
        return Weight(self.name, _FORMATS[self.dtype], shape, self.data)


def read_safetensors(path: Path) -> dict[str, StoredTensor]:
    """Maps a file and reads its header.

    Returns:
        The tensors by name, in the header's order. Their bytes are not looked at.
    Raises:
        LoadError: the file is missing, cut short or too long (F054), or its header is malformed.
    """
    data = _map(path)
    size = len(data)
    header_bytes = int.from_bytes(data[:_PREFIX_BYTES], "little")
    if not 2 <= header_bytes <= min(size - _PREFIX_BYTES, _MAX_HEADER_BYTES):
        raise LoadError(
            f"{path} is truncated or no safetensors file: its header takes {header_bytes} bytes, "
            f"but the file has {size} and a header at most {_MAX_HEADER_BYTES}"
        )
    data_start = _PREFIX_BYTES + header_bytes
    header = parse_object(data[_PREFIX_BYTES:data_start], f"the header of {path}")
    header.pop("__metadata__", None)
    spans = {name: _read_span(path, name, entry) for name, entry in header.items()}
    _require_whole(path, spans, size - data_start, size)
    everything = np.frombuffer(data, np.uint8)
    return {
        name: StoredTensor(path, name, span.dtype, span.shape, everything[data_start + span.begin :][: span.num_bytes])
        for name, span in spans.items()
    }


def read_folder(folder: Path) -> dict[str, StoredTensor]:
    """The tensors of a model: of `model.safetensors`, else of the files that the index names.

    Raises:
        LoadError: there is neither, a file can't be read, or files and index do not agree; names file and tensor.
    """
    if (folder / SINGLE_FILE).exists():
        return read_safetensors(folder / SINGLE_FILE)
    if not (folder / INDEX_FILE).exists():
        raise _no_weights(folder)
    owners = _read_index(folder / INDEX_FILE)
    tensors: dict[str, StoredTensor] = {}
    for file_name in dict.fromkeys(owners.values()):
        for name, tensor in read_safetensors(folder / file_name).items():
            if name in tensors:
                raise LoadError(f"{tensor.path}: tensor {name} is in {tensors[name].path} as well")
            if owners.get(name) != file_name:
                says = f"is in {owners[name]}" if name in owners else "is in no file"
                raise LoadError(f"{tensor.path}: tensor {name} {says} according to {INDEX_FILE}")
            tensors[name] = tensor
    for name, file_name in owners.items():
        if name not in tensors:
            raise LoadError(f"{folder / file_name}: tensor {name} is missing, but {INDEX_FILE} says it is there")
    return tensors


@dataclass(frozen=True, slots=True)
class _Span:
    """What a header says of a tensor: type, shape, and where its bytes begin in the data."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    num_bytes: int


def _map(path: Path) -> mmap.mmap:
    try:
        with path.open("rb") as file:
            if len(file.read(_PREFIX_BYTES)) < _PREFIX_BYTES:
                raise LoadError(
                    f"{path} is truncated: it has fewer than the {_PREFIX_BYTES} bytes of a header's length"
                )
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise LoadError(f"{path} can't be read: {error.strerror}") from error


def _read_span(path: Path, name: str, entry: Any) -> _Span:
    if not _is_name(name):
        raise LoadError(f"{path} is malformed: it has a tensor whose name is {shown(name)}")
    fields: dict[str, Any] = entry if isinstance(entry, dict) else {}
    dtype, shape, offsets = fields.get("dtype"), fields.get("shape"), fields.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in _ITEM_BYTES:
        raise LoadError(f"{path}: tensor {name} has dtype {shown(dtype)}, which is unknown")
    if not _are_sizes(shape) or len(shape) > _MAX_RANK:
        raise LoadError(f"{path} is malformed: tensor {name} has shape {_listed(shape)}")
    if not _are_sizes(offsets) or len(offsets) != 2:
        raise LoadError(f"{path} is malformed: tensor {name} has data_offsets {_listed(offsets)}")
    num_bytes = math.prod(shape) * _ITEM_BYTES[dtype]
    if offsets[1] - offsets[0] != num_bytes:
        raise LoadError(f"{path} is malformed: tensor {name} takes {num_bytes} bytes, but has data_offsets {offsets}")
    return _Span(dtype, tuple(shape), offsets[0], num_bytes)


def _listed(values: Any) -> str:
    """What should be a short list of sizes, as a message shows it."""
    return f"[{', '.join(map(shown, values))}]" if isinstance(values, list) and len(values) < 4 else shown(values)


def _are_sizes(values: Any) -> TypeGuard[list[int]]:
    return isinstance(values, list) and all(type(value) is int and 0 <= value < 1 << 63 for value in values)


def _require_whole(path: Path, spans: Mapping[str, _Span], data_bytes: int, size: int) -> None:
    """The tensors must fill the data exactly, one after the other."""
    end = 0
    for name, span in sorted(spans.items(), key=lambda item: (item[1].begin, item[1].num_bytes)):
        if span.begin != end:
            problem = "overlaps another one" if span.begin < end else "comes after a gap"
            raise LoadError(f"{path} is malformed: tensor {name} {problem}")
        end += span.num_bytes
    if end != data_bytes:
        what = "is truncated" if end > data_bytes else "is too long"
        raise LoadError(f"{path} {what}: by its header it has {size - data_bytes + end} bytes, but the file has {size}")


def _read_index(path: Path) -> dict[str, str]:
    """The file of each tensor, by the tensor's name."""
    weight_map = read_object(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise LoadError(f"{path} is malformed: weight_map must say for each tensor in which file it is")
    for name, file_name in weight_map.items():
        if not _is_name(name):
            raise LoadError(f"{path} is malformed: weight_map has a tensor whose name is {shown(name)}")
        if not isinstance(file_name, str) or not _is_plain(file_name):
            raise LoadError(
                f"{path}: weight_map puts tensor {name} in {shown(file_name)}, "
                "but must name a .safetensors file in the same folder"
            )
    return dict(weight_map)


def _is_name(name: str) -> bool:
    """What can stand in a message."""
    return name.isprintable() and 0 < len(name) <= _MAX_NAME_CHARS


def _is_plain(file_name: str) -> bool:
    """The name of a file that can lie in no other folder."""
    has_no_folder = not set(file_name) & set("/\\:")
    return _is_name(file_name) and len(file_name) < 256 and has_no_folder and file_name.endswith(".safetensors")


def _no_weights(folder: Path) -> LoadError:
    pickled = sorted(path.name for path in folder.iterdir() if path.suffix in _PICKLES)
    if pickled:
        return LoadError(
            f"{folder} has its weights in {pickled[0]}, a pickle, which could run code of its own when it is opened; "
            "only safetensors files are read"
        )
    return LoadError(f"{folder} has neither {SINGLE_FILE} nor {INDEX_FILE}")
