"""Damaged GGUF files load or are refused with a LoadError; nothing else ever happens (F052, F053)."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np

from forerun.errors import LoadError
from forerun.models.gguf import read_gguf
from forerun.ops.formats import FORMATS, dequantize, requantize
from tests.helpers.blocks import random_weight, write_weights

NUM_CASES = 2000
# Values that break arithmetic on sizes, and every number that means something in a header.
NUMBERS = [*range(42), 255, 256, 257, 2**16 - 1, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**62, 2**63 - 1, 2**63, 2**64 - 1]

Mutation = Callable[[bytearray, int, np.random.Generator], None]


def cut(raw: bytearray, header_len: int, rng: np.random.Generator) -> None:
    del raw[rng.integers(0, len(raw)) if rng.random() < 0.5 else rng.integers(0, header_len) :]


def flip_bits(raw: bytearray, header_len: int, rng: np.random.Generator) -> None:
    for position in rng.integers(0, header_len, rng.integers(1, 4)):
        raw[position] ^= 1 << int(rng.integers(0, 8))


def set_bytes(raw: bytearray, header_len: int, rng: np.random.Generator) -> None:
    for position in rng.integers(0, header_len, rng.integers(1, 8)):
        raw[position] = rng.integers(0, 256)


def set_number(raw: bytearray, header_len: int, rng: np.random.Generator) -> None:
    size = int(rng.choice([1, 2, 4, 8]))
    position = int(rng.integers(0, header_len - size))
    raw[position : position + size] = struct.pack("<Q", NUMBERS[rng.integers(0, len(NUMBERS))])[:size]


def change_number(raw: bytearray, header_len: int, rng: np.random.Generator) -> None:
    """Finds a small 64-bit number, as lengths, dimensions and offsets are, and moves it a little."""
    starts = [at for at in range(4, header_len - 8) if 0 < struct.unpack_from("<Q", raw, at)[0] < 1 << 16]
    at = starts[rng.integers(0, len(starts))]
    value = struct.unpack_from("<Q", raw, at)[0] + int(rng.choice([-256, -32, -2, -1, 1, 2, 32, 256]))
    struct.pack_into("<Q", raw, at, value % 2**64)


def remove_run(raw: bytearray, header_len: int, rng: np.random.Generator) -> None:
    start = int(rng.integers(0, header_len))
    del raw[start : start + int(rng.integers(1, 64))]


def repeat_run(raw: bytearray, header_len: int, rng: np.random.Generator) -> None:
    start, at = rng.integers(0, header_len, 2)
    raw[at:at] = raw[start : start + int(rng.integers(1, 64))]


def set_data(raw: bytearray, header_len: int, rng: np.random.Generator) -> None:
    """Any bytes in the tensors: scales become infinite or no numbers."""
    for position in rng.integers(header_len, len(raw), 40):
        raw[position] = rng.choice([0, 0x7C, 0x7F, 0x80, 0xFC, 0xFF])


MUTATIONS: list[Mutation] = [
    cut,
    flip_bits,
    set_bytes,
    set_number,
    change_number,
    change_number,
    remove_run,
    repeat_run,
    set_data,
]


def valid_models(folder: Path) -> list[list[Path]]:
    """Files of a few types each, and one model in parts; small enough that most mutations hit something."""
    metadata = {"general.alignment": 32, "some.words": ["a", "é", ""], "some.numbers": [1, 2, 3], "some.text": "text"}
    names = list(FORMATS)
    models = []
    for i in range(0, len(names), 4):
        weights = [random_weight(fmt, 2, 256, name=fmt) for fmt in names[i : i + 4]]
        models.append(write_weights(folder / f"m{i}.gguf", weights, metadata))
    weights = [random_weight(fmt, 1, 256, name=fmt) for fmt in ("q4_0", "q6_k", "iq4_xs")]
    models.append(write_weights(folder / "parts.gguf", weights, metadata, max_tensors=1))
    return models


def use(path: Path) -> int:
    """Reads a file and every weight of it; the number of tensors.

    Raises:
        LoadError: the file is refused. A matrix that can't be converted is caught here.
    """
    file = read_gguf(path)
    for weight in file.tensors.values():
        values = dequantize(weight)
        assert values.shape == weight.shape
        assert values.dtype == np.float32
        for quant in ("bf16", "q8", "q4"):
            try:
                made = requantize(weight, quant, is_head=False)  # type: ignore[arg-type]
                assert made is weight or np.isfinite(values).all()
            except LoadError as error:
                assert weight.name in str(error)  # noqa: PT017
    return len(file.tensors)


def header_len(raw: bytes) -> int:
    """Up to the data of the first tensor, whose name is the last but a few bytes in these files."""
    last_name = max(raw.rfind(struct.pack("<Q", len(name)) + name.encode()) for name in FORMATS)
    return last_name + 64


def test_f052_f053_damaged_files_load_or_are_refused(tmp_path: Path) -> None:
    models = valid_models(tmp_path)
    contents = {path: path.read_bytes() for model in models for path in model}
    assert [use(model[0]) for model in models] == [4] * (len(models) - 1) + [3]
    rng = np.random.default_rng(0)
    loaded = refused = 0
    for case in range(NUM_CASES):
        model = models[case % len(models)]
        path = model[rng.integers(0, len(model))]
        raw = bytearray(contents[path])
        mutation = MUTATIONS[rng.integers(0, len(MUTATIONS))]
        mutation(raw, min(header_len(contents[path]), len(raw)), rng)
        path.write_bytes(raw)
        try:
            use(model[0])
            loaded += 1
        except LoadError as error:
            assert str(path) in str(error)  # noqa: PT017
            refused += 1
        except Exception as error:
            raise AssertionError(f"case {case} ({mutation.__name__}): {error!r}") from error
        path.write_bytes(contents[path])
    assert min(loaded, refused) > NUM_CASES // 8  # most damage to a header shows
