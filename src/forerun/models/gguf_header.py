"""The header of one GGUF file: its named values and its table of tensors.

Nothing in a header is believed. Every count, length, dimension and offset is compared with the size of the file before
it is used, so a broken or hostile file costs time and memory in proportion to its own size at most, and ends in a
`LoadError` that names the file and the key or tensor.

    GGUF v3, little-endian
    magic "GGUF" | version u32 | tensor count u64 | metadata count u64
    metadata:    key string | type u32 | value                                       (string: length u64, UTF-8 bytes)
    tensors:     name string | number of dimensions u32 | dimensions u64... | type u32 | offset u64
    padding up to a multiple of general.alignment; offsets count from here
    tensor data

Version 2 has the same layout. Knows no architecture, no tokenizer and no second file.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from forerun.errors import LoadError, shown
from forerun.ops.formats import FORMATS, row_bytes

MetadataValue = str | int | float | bool | list[str] | list[int] | list[float] | list[bool]

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
ALIGNMENT_KEY = "general.alignment"

_BOOL, _STRING, _ARRAY = 7, 8, 9
_SCALARS: Mapping[int, np.dtype[Any]] = {
    0: np.dtype("<u1"),
    1: np.dtype("<i1"),
    2: np.dtype("<u2"),
    3: np.dtype("<i2"),
    4: np.dtype("<u4"),
    5: np.dtype("<i4"),
    6: np.dtype("<f4"),
    _BOOL: np.dtype("?"),
    10: np.dtype("<u8"),
    11: np.dtype("<i8"),
    12: np.dtype("<f8"),
}
# The least bytes an entry can take, so that a count can be compared with the size of the file.
_MIN_METADATA_BYTES = 8 + 1 + 4 + 1
_MIN_TENSOR_BYTES = 8 + 1 + 4 + 8 + 4 + 8
_MAX_ARRAY_LEN = 1 << 22  # entries of one array; the largest vocabularies have a sixteenth of it
_MAX_NAME_LEN = 512  # characters of a key or tensor name; real ones have less than a hundred

# Names of the tensor types; those whose lower-case name is in FORMATS can be read.
TENSOR_TYPES: Mapping[int, str] = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0", 9: "Q8_1", 10: "Q2_K", 11: "Q3_K",
    12: "Q4_K", 13: "Q5_K", 14: "Q6_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S",
    20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64",
    29: "IQ1_M", 30: "BF16", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4", 40: "NVFP4", 41: "Q1_0",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """An entry of the table of tensors, not yet compared with the size of the file.

    Attributes:
        name: of 1 to 512 printable characters.
        shape: (N, K); a vector of K numbers is a matrix of shape (1, K).
        format: a key of `ops.formats.FORMATS`.
        offset: of its first byte, from the start of the tensor data.
        num_bytes: of its data.
    """

    name: str
    shape: tuple[int, int]
    format: str
    offset: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """What one file says of itself. Set by `read_header`.

    Attributes:
        path: where it lies.
        data: the whole file, mapped.
        metadata: values by key, in file order.
        tensors: its tensors, in file order.
        data_start: where the tensor data start.
        alignment: what offsets are multiples of.
    """

    path: Path
    data: mmap.mmap
    metadata: Mapping[str, MetadataValue]
    tensors: tuple[TensorInfo, ...]
    data_start: int
    alignment: int


def read_header(path: Path) -> GgufHeader:
    """Maps a file and reads its header.

    Raises:
        LoadError: the file is missing, no GGUF file, cut within its header, malformed, or holds a tensor of a type or
            rank that is not supported.
    """
    cursor = _Cursor(path, _map(path))
    version = _read_version(cursor)
    if version not in VERSIONS:
        raise LoadError(f"{path} is GGUF version {version}, but only versions 2 and 3 can be read")
    num_tensors = cursor.count("the tensor count", _MIN_TENSOR_BYTES)
    num_metadata = cursor.count("the metadata count", _MIN_METADATA_BYTES)
    metadata = _read_metadata(cursor, num_metadata)
    alignment = _alignment(path, metadata)
    tensors = tuple(_read_tensor_info(cursor) for _ in range(num_tensors))
    return GgufHeader(path, cursor.data, metadata, tensors, -(-cursor.pos // alignment) * alignment, alignment)


def _map(path: Path) -> mmap.mmap:
    try:
        with path.open("rb") as file:
            head = file.read(len(MAGIC))
            if not head:
                raise LoadError(f"{path} is empty, not a GGUF file")
            if head != MAGIC:
                raise LoadError(f"{path} is not a GGUF file: it starts with {head!r}, not {MAGIC!r}")
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise LoadError(f"{path} can't be read: {error.strerror}") from error


@dataclass(slots=True)
class _Cursor:
    """A position in the mapped file; each read checks that the file reaches that far."""

    path: Path
    data: mmap.mmap
    pos: int = 0
    size: int = field(init=False)

    def __post_init__(self) -> None:
        self.size = len(self.data)

    def require(self, num_bytes: int, what: str) -> None:
        if num_bytes > self.size - self.pos:
            raise LoadError(
                f"{self.path} is truncated or malformed: {what} at byte {self.pos} takes {num_bytes} bytes, "
                f"but the file has {self.size}"
            )

    def u32(self, what: str) -> int:
        return int.from_bytes(self.take(4, what), "little")

    def u64(self, what: str) -> int:
        return int.from_bytes(self.take(8, what), "little")

    def take(self, num_bytes: int, what: str) -> bytes:
        self.require(num_bytes, what)
        start, self.pos = self.pos, self.pos + num_bytes
        return self.data[start : self.pos]

    def count(self, what: str, min_entry_bytes: int) -> int:
        """A count of entries that take at least so many bytes each."""
        number = self.u64(what)
        if number > (self.size - self.pos) // min_entry_bytes:
            raise LoadError(
                f"{self.path} is truncated or malformed: {what} is {number}, too many for the file's {self.size} bytes"
            )
        return number

    def string(self, what: str) -> str:
        return self._text(self.take(self.u64(f"the length of {what}"), what), what)

    def name(self, what: str) -> str:
        text = self.string(what)
        if not 0 < len(text) <= _MAX_NAME_LEN:
            raise LoadError(f"{self.path} is malformed: {what} has {len(text)} characters, not 1 to {_MAX_NAME_LEN}")
        if not text.isprintable():  # names end up in messages, and so in terminals
            raise LoadError(f"{self.path} is malformed: {what} holds characters that can't be printed")
        return text

    def strings(self, count: int, what: str) -> list[str]:
        """An array of strings. One tight loop: a vocabulary has hundreds of thousands of them."""
        data, size, pos = self.data, self.size, self.pos
        read_length = struct.Struct("<Q").unpack_from
        out = []
        try:
            for _ in range(count):
                (length,) = read_length(data, pos)
                start, pos = pos + 8, pos + 8 + length
                if pos > size:
                    break
                out.append(data[start:pos].decode())
        except struct.error:
            pos = size + 1
        except UnicodeDecodeError as error:
            raise LoadError(f"{self.path} is malformed: entry {len(out)} of {what} is not UTF-8") from error
        if pos > size:
            raise LoadError(
                f"{self.path} is truncated or malformed: entry {len(out)} of {what} lies past the end, "
                f"the file has {size} bytes"
            )
        self.pos = pos
        return out

    def numbers(self, count: int, dtype: np.dtype[Any], what: str) -> list[Any]:
        """An array of numbers or booleans."""
        raw = self.take(count * dtype.itemsize, what)
        if dtype == np.bool_ and raw.strip(b"\0\1"):
            raise LoadError(f"{self.path} is malformed: {what} holds a boolean that is neither 0 nor 1")
        values: list[Any] = np.frombuffer(raw, dtype).tolist()
        return values

    def _text(self, raw: bytes, what: str) -> str:
        try:
            return raw.decode()
        except UnicodeDecodeError as error:
            raise LoadError(f"{self.path} is malformed: {what} is not UTF-8") from error


def _read_version(cursor: _Cursor) -> int:
    cursor.take(len(MAGIC), "the magic")
    version = cursor.u32("the version")
    if version and not version & 0xFFFF:
        raise LoadError(f"{cursor.path} is a big-endian GGUF file, but only little-endian ones can be read")
    return version


def _read_metadata(cursor: _Cursor, count: int) -> dict[str, MetadataValue]:
    metadata: dict[str, MetadataValue] = {}
    for index in range(count):
        key = cursor.name(f"the key of metadata entry {index}")
        if key in metadata:
            raise LoadError(f"{cursor.path} is malformed: key {key} occurs twice")
        metadata[key] = _read_value(cursor, f"key {key}")
    return metadata


def _read_value(cursor: _Cursor, what: str) -> MetadataValue:
    kind = cursor.u32(f"the type of {what}")
    if kind == _STRING:
        return cursor.string(what)
    if kind == _ARRAY:
        return _read_array(cursor, what)
    value: bool | int | float = cursor.numbers(1, _dtype(cursor, kind, what), what)[0]
    return value


def _read_array(cursor: _Cursor, what: str) -> MetadataValue:
    kind = cursor.u32(f"the element type of {what}")
    if kind == _ARRAY:
        raise LoadError(f"{cursor.path} is not supported: {what} is an array of arrays")
    dtype = None if kind == _STRING else _dtype(cursor, kind, what)
    length = cursor.count(f"the length of {what}", dtype.itemsize if dtype else 8)
    if length > _MAX_ARRAY_LEN:
        raise LoadError(f"{cursor.path} is not supported: {what} has {length} entries, more than {_MAX_ARRAY_LEN}")
    return cursor.numbers(length, dtype, what) if dtype else cursor.strings(length, what)


def _dtype(cursor: _Cursor, kind: int, what: str) -> np.dtype[Any]:
    try:
        return _SCALARS[kind]
    except KeyError:
        raise LoadError(f"{cursor.path} is malformed: {what} has value type {kind}, which does not exist") from None


def _alignment(path: Path, metadata: Mapping[str, MetadataValue]) -> int:
    alignment = metadata.get(ALIGNMENT_KEY, DEFAULT_ALIGNMENT)
    if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
        raise LoadError(f"{path} is malformed: {ALIGNMENT_KEY} is {shown(alignment)}, but must be a power of two")
    return alignment


def _read_tensor_info(cursor: _Cursor) -> TensorInfo:
    path = cursor.path
    name = cursor.name("the name of a tensor")
    what = f"tensor {name}"
    num_dims = cursor.u32(f"the number of dimensions of {what}")
    if not 1 <= num_dims <= 4:
        raise LoadError(f"{path} is malformed: {what} has {num_dims} dimensions, but must have 1 to 4")
    dims = [cursor.u64(f"the dimensions of {what}") for _ in range(num_dims)]
    if min(dims) < 1 or math.prod(dims) >= 2**63:
        raise LoadError(f"{path} is malformed: {what} has dimensions {dims}, which no file can hold")
    type_id = cursor.u32(f"the type of {what}")
    offset = cursor.u64(f"the offset of {what}")
    type_name = TENSOR_TYPES.get(type_id, str(type_id))
    fmt = type_name.lower()
    if fmt not in FORMATS:
        supported = ", ".join(known.upper() for known in FORMATS)
        raise LoadError(f"{path}: {what} has type {type_name}, which is not supported; supported: {supported}")
    if num_dims > 2:
        raise LoadError(f"{path}: {what} has {num_dims} dimensions, but only vectors and matrices are supported")
    # The file lists the fastest dimension first.
    shape = (dims[1] if num_dims == 2 else 1, dims[0])
    return TensorInfo(name, shape, fmt, offset, shape[0] * row_bytes(f"{name} of {path}", fmt, shape[1]))
