"""A GGUF file as it is laid out. Everything that a file says of itself can be a lie; nothing is checked."""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from typing import Any

BOOL, STRING, ARRAY = 7, 8, 9
U32, F32 = 4, 6
# Layout of each scalar by its type number.
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", BOOL: "B", 10: "Q", 11: "q", 12: "d"}
# As gguf-split and converters write them: weights in a block, and bytes.
BLOCKS = {
    0: ("f32", 1, 4), 1: ("f16", 1, 2), 2: ("q4_0", 32, 18), 3: ("q4_1", 32, 20), 6: ("q5_0", 32, 22),
    7: ("q5_1", 32, 24), 8: ("q8_0", 32, 34), 10: ("q2_k", 256, 84), 11: ("q3_k", 256, 110), 12: ("q4_k", 256, 144),
    13: ("q5_k", 256, 176), 14: ("q6_k", 256, 210), 20: ("iq4_nl", 32, 18), 23: ("iq4_xs", 256, 136),
    30: ("bf16", 1, 2), 39: ("mxfp4", 32, 17),
}  # fmt: skip
TYPE_IDS = {name: kind for kind, (name, _, _) in BLOCKS.items()}


@dataclass
class Lie:
    """A string that states another length than it has."""

    data: bytes
    stated_len: int


Text = bytes | Lie


@dataclass
class Array:
    """Values of one type; `stated_kind` and `stated_len` are what the file says of them, None the truth."""

    kind: int
    items: list[Any]
    stated_kind: int | None = None
    stated_len: int | None = None


@dataclass
class Entry:
    """A metadata entry; `kind` is how the value lies in the file, `stated_kind` what the file says."""

    key: Text
    kind: int
    value: Any  # number, boolean, Text or Array
    stated_kind: int | None = None


@dataclass
class Tensor:
    """An entry of the table of tensors and its bytes; `offset` None is where they lie."""

    name: Text
    dims: list[int]  # fastest first
    kind: int
    data: bytes
    offset: int | None = None
    stated_rank: int | None = None


@dataclass
class Image:
    """One file."""

    entries: list[Entry] = field(default_factory=list)
    tensors: list[Tensor] = field(default_factory=list)
    magic: bytes = b"GGUF"
    version: int = 3
    alignment: int = 32
    num_entries: int | None = None
    num_tensors: int | None = None

    def pack(self) -> tuple[bytes, list[int]]:
        """The file, and the places between its parts, where cutting it says most."""
        out = bytearray(self.magic + struct.pack("<I", self.version % 2**32))
        cuts = [0, 4, 8]
        for stated, real in ((self.num_tensors, len(self.tensors)), (self.num_entries, len(self.entries))):
            out += _u64(real if stated is None else stated)
            cuts.append(len(out))
        for entry in self.entries:
            out += _text(entry.key) + _u32(entry.kind if entry.stated_kind is None else entry.stated_kind)
            out += _value(entry.kind, entry.value)
            cuts.append(len(out))
        data, offsets = self._data()
        for tensor, offset in zip(self.tensors, offsets, strict=True):
            rank = len(tensor.dims) if tensor.stated_rank is None else tensor.stated_rank
            out += _text(tensor.name) + _u32(rank) + b"".join(map(_u64, tensor.dims)) + _u32(tensor.kind)
            out += _u64(offset if tensor.offset is None else tensor.offset)
            cuts.append(len(out))
        out += bytes(-len(out) % self.alignment)
        cuts += [len(out) + offset for offset in offsets]
        return bytes(out + data), cuts

    def _data(self) -> tuple[bytes, list[int]]:
        out, offsets = bytearray(), []
        for tensor in self.tensors:
            offsets.append(len(out))
            out += tensor.data + bytes(-len(tensor.data) % self.alignment)
        return bytes(out), offsets


def number(kind: int, value: Any) -> bytes:
    """A scalar; whole numbers wrap around, floats that are too large become infinite."""
    layout = SCALARS[kind]
    if layout in "fd":
        try:
            return struct.pack(f"<{layout}", value)
        except OverflowError:
            return struct.pack(f"<{layout}", float("inf"))
    size = struct.calcsize(layout)
    return (int(value) % (1 << 8 * size)).to_bytes(size, "little")


def _value(kind: int, value: Any) -> bytes:
    if kind == STRING:
        return _text(value)
    if kind == ARRAY:
        stated_kind = value.kind if value.stated_kind is None else value.stated_kind
        stated_len = len(value.items) if value.stated_len is None else value.stated_len
        return _u32(stated_kind) + _u64(stated_len) + b"".join(_value(value.kind, item) for item in value.items)
    return number(kind, value)


def _text(text: Text) -> bytes:
    data, length = (text, len(text)) if isinstance(text, bytes) else (text.data, text.stated_len)
    return _u64(length) + data


def _u32(value: int) -> bytes:
    return struct.pack("<I", value % 2**32)


def _u64(value: int) -> bytes:
    return struct.pack("<Q", value % 2**64)
