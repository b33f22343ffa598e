"""The GGUF reader against files of the `gguf` package and against broken and hostile ones (F052, F053, F059)."""

from __future__ import annotations

import struct
import tracemalloc
from pathlib import Path

import gguf
import numpy as np
import pytest

from forerun.errors import LoadError
from forerun.models.gguf import read_gguf
from forerun.models.gguf_header import TENSOR_TYPES
from forerun.models.loader import load_model
from forerun.ops.formats import FORMATS, dequantize
from tests.helpers.blocks import random_weight, write_weights
from tests.helpers.gguf_files import CHAT_TEMPLATE, vocabulary, write_gguf, write_tiny_llama

U8, U32, F32, BOOL, STRING, ARRAY, U64 = 0, 4, 6, 7, 8, 9, 10


def text(value: str | bytes) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def entry(key: str | bytes, kind: int, payload: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + payload


def tensor(name: str, dims: list[int], type_id: int = 0, offset: int = 0) -> bytes:
    numbers = struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, type_id, offset)
    return text(name) + numbers


def header(
    metadata: list[bytes],
    tensors: list[bytes],
    *,
    num_metadata: int | None = None,
    num_tensors: int | None = None,
    version: int = 3,
) -> bytes:
    counts = (
        len(tensors) if num_tensors is None else num_tensors,
        len(metadata) if num_metadata is None else num_metadata,
    )
    return b"GGUF" + struct.pack("<IQQ", version, *counts) + b"".join(metadata + tensors)


def file_of(tmp_path: Path, raw: bytes) -> Path:
    path = tmp_path / "model.gguf"
    path.write_bytes(raw)
    return path


def with_data(raw: bytes, num_bytes: int, alignment: int = 32) -> bytes:
    return raw + bytes(-len(raw) % alignment + num_bytes)


@pytest.mark.parametrize("fmt", ["f32", "f16", "q4_0", "q4_1", "q8_0"])
def test_reads_what_the_reference_writer_wrote(tmp_path: Path, fmt: str) -> None:
    path = write_tiny_llama(tmp_path / "tiny.gguf", fmt=fmt)
    file = read_gguf(path)
    reference = gguf.GGUFReader(path)
    assert list(file.tensors) == [t.name for t in reference.tensors]
    for expected in reference.tensors:
        found = file.tensors[expected.name]
        dims = tuple(int(n) for n in reversed(expected.shape))
        assert found.shape == (dims if len(dims) == 2 else (1, *dims))
        assert found.format == expected.tensor_type.name.lower()
        np.testing.assert_array_equal(found.data, np.ascontiguousarray(expected.data).reshape(-1).view(np.uint8))
        assert not found.data.flags.writeable
    assert list(file.metadata) == [key for key in reference.fields if not key.startswith("GGUF.")]
    for key, found_value in file.metadata.items():
        value = reference.fields[key].contents()
        assert type(found_value) is type(value)
        assert found_value == value
    tokens, merges, _ = vocabulary(320)
    assert file.metadata["tokenizer.ggml.tokens"] == tokens
    assert file.metadata["tokenizer.ggml.merges"] == merges
    assert file.metadata["tokenizer.chat_template"] == CHAT_TEMPLATE


@pytest.mark.parametrize("version", [2, 3])
def test_f059_reads_a_file_with_a_tensor_of_each_supported_type(tmp_path: Path, version: int) -> None:
    weights = {fmt: random_weight(fmt, 3, 512, seed=i, name=f"a.{fmt}") for i, fmt in enumerate(FORMATS)}
    (path,) = write_weights(tmp_path / "all.gguf", weights.values())
    raw = bytearray(path.read_bytes())
    raw[4] = version
    path.write_bytes(raw)
    file = read_gguf(path)
    assert list(file.tensors) == [f"a.{fmt}" for fmt in FORMATS]
    for fmt, weight in weights.items():
        found = file.tensors[f"a.{fmt}"]
        assert (found.name, found.format, found.shape) == (weight.name, fmt, (3, 512))
        np.testing.assert_array_equal(found.data, weight.data)
        np.testing.assert_array_equal(dequantize(found), dequantize(weight))


def test_reads_every_kind_of_value(tmp_path: Path) -> None:
    scalars = {0: ("<B", 200), 1: ("<b", -3), 2: ("<H", 60000), 3: ("<h", -300), 4: ("<I", 2**32 - 1), 5: ("<i", -7)}
    scalars |= {6: ("<f", 0.5), 7: ("<?", True), 10: ("<Q", 2**64 - 1), 11: ("<q", -(2**63)), 12: ("<d", 0.1)}
    metadata = [entry(f"scalar.{kind}", kind, struct.pack(code, value)) for kind, (code, value) in scalars.items()]
    metadata += [
        entry(f"array.{kind}", ARRAY, struct.pack("<IQ", kind, 2) + 2 * struct.pack(code, value))
        for kind, (code, value) in scalars.items()
    ]
    metadata.append(entry("empty", ARRAY, struct.pack("<IQ", STRING, 0)))
    metadata.append(entry("words", ARRAY, struct.pack("<IQ", STRING, 3) + text("") + text("é") + text("\n")))
    file = read_gguf(file_of(tmp_path, header(metadata, [])))
    for kind, (_, value) in scalars.items():
        assert file.metadata[f"scalar.{kind}"] == value
        assert type(file.metadata[f"scalar.{kind}"]) is type(value)
        assert file.metadata[f"array.{kind}"] == [value, value]
    assert file.metadata["empty"] == []
    assert file.metadata["words"] == ["", "é", "\n"]


@pytest.mark.parametrize("alignment", [1, 8, 64, 4096])
def test_data_starts_at_the_stated_alignment(tmp_path: Path, alignment: int) -> None:
    raw = header([entry("general.alignment", U32, struct.pack("<I", alignment))], [tensor("a", [4])])
    raw += bytes(-len(raw) % alignment) + np.arange(4, dtype="<f4").tobytes()
    data = read_gguf(file_of(tmp_path, raw)).tensors["a"].data
    assert data.tobytes() == np.arange(4, dtype="<f4").tobytes()


def test_version_2_is_the_same_layout(tmp_path: Path) -> None:
    assert "a" in read_gguf(file_of(tmp_path, with_data(header([], [tensor("a", [4])], version=2), 16))).tensors


ONE = [tensor("a", [4])]
HUGE = 2**60
# What is wrong with the file: (bytes, what the message must say).
HOSTILE: dict[str, tuple[bytes, str]] = {
    "empty file": (b"", "is empty"),
    "wrong magic": (b"GGML" + bytes(100), "not a GGUF file: it starts with b'GGML'"),
    "part of the magic": (b"GG", "not a GGUF file"),
    "version 1": (header([], [], version=1), "version 1"),
    "version 99": (header([], [], version=99), "version 99"),
    "big-endian": (header([], [], version=3 << 24), "big-endian"),
    "tensor count": (header([], [], num_tensors=HUGE), "the tensor count is 1152921504606846976"),
    "metadata count": (header([], [], num_metadata=HUGE), "the metadata count is 1152921504606846976"),
    "count of 64 bits": (header([], [], num_tensors=2**64 - 1), "the tensor count is 18446744073709551615"),
    "key length": (header([struct.pack("<Q", 2**63) + bytes(64)], []), "takes 9223372036854775808 bytes"),
    "empty key": (header([entry("", U8, b"\0"), bytes(40)], []), "has 0 characters"),
    "long key": (header([entry("k" * 2000, U8, b"\0")], []), "has 2000 characters"),
    "key with escapes": (header([entry("k\x1b[2J", U8, b"\0")], []), "can't be printed"),
    "key not UTF-8": (header([entry(b"\xff\xfe", U8, b"\0")], []), "is not UTF-8"),
    "value not UTF-8": (header([entry("k", STRING, text(b"\xc3"))], []), "key k is not UTF-8"),
    "entry not UTF-8": (
        header([entry("k", ARRAY, struct.pack("<IQ", STRING, 2) + text("a") + text(b"\xc3"))], []),
        "entry 1 of key k is not UTF-8",
    ),
    "duplicate key": (header([entry("k", U8, b"\0")] * 2, []), "key k occurs twice"),
    "value type": (header([entry("k", 13, bytes(8))], []), "key k has value type 13"),
    "element type": (header([entry("k", ARRAY, struct.pack("<IQ", 77, 1) + bytes(8))], []), "value type 77"),
    "boolean of 2": (header([entry("k", BOOL, b"\2")], []), "neither 0 nor 1"),
    "nested array": (header([entry("k", ARRAY, struct.pack("<IQ", ARRAY, 1) + bytes(64))], []), "array of arrays"),
    "array length": (header([entry("k", ARRAY, struct.pack("<IQ", U32, HUGE))], []), "the length of key k is"),
    "strings length": (header([entry("k", ARRAY, struct.pack("<IQ", STRING, HUGE))], []), "the length of key k is"),
    "string past the end": (
        header([entry("k", ARRAY, struct.pack("<IQ", STRING, 2) + text("a") + struct.pack("<Q", 2**63))], []),
        "entry 1 of key k lies past the end",
    ),
    "strings cut": (
        header([entry("k", ARRAY, struct.pack("<IQ", STRING, 2) + text("abcdefghijkl") + b"\1\0")], []),
        "entry 1 of key k lies past the end",
    ),
    "alignment 0": (header([entry("general.alignment", U32, bytes(4))], []), "general.alignment is 0"),
    "alignment 3": (header([entry("general.alignment", U32, struct.pack("<I", 3))], []), "general.alignment is 3"),
    "alignment text": (
        header([entry("general.alignment", STRING, text("3\x1b2"))], []),
        r"general.alignment is '3\\x1b2'",
    ),
    "alignment huge": (
        with_data(header([entry("general.alignment", U64, struct.pack("<Q", 2**62))], ONE), 16),
        "its tensors end at byte",
    ),
    "no dimensions": (header([], [tensor("a", []), bytes(40)]), "tensor a has 0 dimensions"),
    "dimension count": (header([], [text("a") + struct.pack("<I", 2**31) + bytes(40)]), "has 2147483648 dimensions"),
    "dimension 0": (with_data(header([], [tensor("a", [0])]), 16), "which no file can hold"),
    "dimension -1": (with_data(header([], [tensor("a", [2**64 - 1])]), 16), "which no file can hold"),
    "product wraps to 4": (
        with_data(header([], [tensor("a", [2**62 + 1, 4])]), 16),
        "which no file can hold",
    ),
    "dimension 2^62": (with_data(header([], [tensor("a", [2**62])]), 16), "its tensors end at byte 1844674407370955"),
    "three dimensions": (with_data(header([], [tensor("a", [2, 2, 2])]), 64), "tensor a has 3 dimensions"),
    "offset": (with_data(header([], [tensor("a", [4], offset=2**63)]), 16), "its tensors end at byte 92233720368"),
    "offset not aligned": (with_data(header([], [tensor("a", [4], offset=4)]), 64), "is not aligned to 32"),
    "overlap": (
        with_data(header([], [tensor("a", [64]), tensor("b", [4], offset=32)]), 256),
        "tensor b overlaps another",
    ),
    "duplicate tensor": (
        with_data(header([], [tensor("a", [4]), tensor("a", [4], offset=32)]), 64),
        "tensor a occurs twice",
    ),
    "row of half a block": (
        with_data(header([], [tensor("a", [48, 2], type_id=8)]), 512),
        "tensor a of .* has rows of 48 weights",
    ),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_f053_hostile_headers_are_refused(tmp_path: Path, name: str) -> None:
    raw, message = HOSTILE[name]
    path = file_of(tmp_path, raw)
    tracemalloc.start()
    try:
        with pytest.raises(LoadError, match=message) as caught:
            read_gguf(path)
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()
    assert str(path) in str(caught.value)


def test_f053_an_array_longer_than_any_vocabulary_is_refused(tmp_path: Path) -> None:
    num_entries = 2**22 + 1
    path = file_of(tmp_path, header([entry("k", ARRAY, struct.pack("<IQ", U8, num_entries) + bytes(num_entries))], []))
    with pytest.raises(LoadError, match="key k has 4194305 entries, more than 4194304"):
        read_gguf(path)


@pytest.mark.parametrize("type_id", [9, 15, 22, 28, 34, 40, 99])
def test_f059_unsupported_tensor_types_are_named(tmp_path: Path, type_id: int) -> None:
    names = {9: "Q8_1", 15: "Q8_K", 22: "IQ2_S", 28: "F64", 34: "TQ1_0", 40: "NVFP4", 99: "99"}
    # So large that a reader that trusted the size first would call the file truncated.
    path = file_of(tmp_path, header([], [tensor("blk.0.attn_q.weight", [2**20, 2**20], type_id=type_id)]))
    message = rf"tensor blk\.0\.attn_q\.weight has type {names[type_id]}, which is not supported; supported: F32, F16"
    with pytest.raises(LoadError, match=message):
        read_gguf(path)


def test_f059_type_names_are_those_of_the_reference() -> None:
    known = {int(kind): kind.name for kind in gguf.GGMLQuantizationType}
    assert {type_id: known.get(type_id, name) for type_id, name in TENSOR_TYPES.items()} == dict(TENSOR_TYPES)


def test_f052_a_file_cut_anywhere_is_refused(tmp_path: Path) -> None:
    raw = write_tiny_llama(tmp_path / "whole.gguf", fmt="q8_0").read_bytes()
    header_len = raw.index(b"token_embd.weight")
    for length in [*range(0, 64), *range(64, header_len, 97), *range(header_len, len(raw), 4999), len(raw) - 1]:
        path = file_of(tmp_path, raw[:length])
        with pytest.raises(LoadError, match=r"model\.gguf"):
            read_gguf(path)


def test_f052_a_header_cut_at_any_byte_is_refused(tmp_path: Path) -> None:
    words = struct.pack("<IQ", STRING, 2) + text("one") + text("two")
    numbers = struct.pack("<IQ3I", U32, 3, 1, 2, 3)
    values = [("text", STRING, text("value")), ("words", ARRAY, words), ("numbers", ARRAY, numbers), ("b", BOOL, b"\1")]
    for last in range(len(values)):  # each kind of value as the last one
        raw = header([entry(*value) for value in values[: last + 1]], [])
        assert len(read_gguf(file_of(tmp_path, raw)).metadata) == last + 1
        for length in range(len(raw)):
            with pytest.raises(LoadError, match=r"model\.gguf"):
                read_gguf(file_of(tmp_path, raw[:length]))


def test_f052_cut_data_names_sizes_and_the_first_tensor_cut(tmp_path: Path) -> None:
    metadata: list[bytes] = []
    tensors = [tensor("a", [8]), tensor("b", [8], offset=32), tensor("c", [8], offset=64)]
    raw = with_data(header(metadata, tensors), 96)
    assert len(read_gguf(file_of(tmp_path, raw)).tensors) == 3
    path = file_of(tmp_path, raw[:-40])
    message = rf"is truncated: its tensors end at byte {len(raw)}, but the file has {len(raw) - 40} \(b is the first"
    with pytest.raises(LoadError, match=message):
        read_gguf(path)


def test_f052_flipped_bytes_load_or_are_refused(tmp_path: Path) -> None:
    raw = write_tiny_llama(tmp_path / "whole.gguf", fmt="q4_1", num_layers=1).read_bytes()
    data_start = raw.index(b"output_norm.weight") + 64
    rng = np.random.default_rng(0)
    refused = 0
    for _ in range(500):
        flipped = bytearray(raw)
        for position in rng.integers(0, data_start, rng.integers(1, 4)):
            flipped[position] = rng.integers(0, 256)
        try:
            load_model(file_of(tmp_path, bytes(flipped)))
        except LoadError:
            refused += 1
    assert 20 < refused < 500  # most flips hit the text of a token


def test_missing_files_and_folders_are_load_errors(tmp_path: Path) -> None:
    with pytest.raises(LoadError, match="can't be read: No such file"):
        read_gguf(tmp_path / "absent.gguf")
    with pytest.raises(LoadError, match="can't be read: Is a directory"):
        read_gguf(tmp_path)


def test_arrays_outlive_the_file_object(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "one.gguf", {}, {"a": np.arange(6, dtype=np.float32).reshape(2, 3)})
    weight = read_gguf(path).tensors["a"]
    path.unlink()
    assert weight.data.view("<f4").tolist() == [0, 1, 2, 3, 4, 5]
