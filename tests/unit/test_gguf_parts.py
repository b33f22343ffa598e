"""Models in several GGUF files: the reference writer's parts are one model, and parts that don't fit are refused."""

from __future__ import annotations

import struct
from functools import partial
from pathlib import Path

import gguf
import numpy as np
import pytest

from forerun.errors import LoadError
from forerun.models.gguf import read_gguf
from forerun.models.loader import load_model
from forerun.ops.base import Weight
from tests.helpers.blocks import random_weight, write_weights
from tests.helpers.gguf_files import write_tiny_llama

U16, I32, F32, BOOL, STRING = 2, 5, 6, 7, 8
NUM_TENSORS = 5
FORMATS = ("q4_k", "f32", "q5_0", "q6_k", "bf16")


def weights() -> list[Weight]:
    return [random_weight(fmt, 2, 256, seed=i, name=f"t.{i}") for i, fmt in enumerate(FORMATS)]


@pytest.fixture
def paths(tmp_path: Path) -> list[Path]:
    """Parts of 2, 2 and 1 tensors, written by the reference package."""
    return write_weights(tmp_path / "model.gguf", weights(), {"general.name": "in parts"}, max_tensors=2)


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def part(
    tensors: list[str],
    number: int,
    *,
    count: int = 2,
    total: int = 2,
    extra: dict[str, tuple[int, bytes]] | None = None,
    drop: str = "",
    alignment: int = 32,
) -> bytes:
    """A file by hand: tensors of 8 float32, `extra` replaces or adds (type, bytes) of metadata entries."""
    entries = {
        "split.no": (U16, struct.pack("<H", number)),
        "split.count": (U16, struct.pack("<H", count)),
        "split.tensors.count": (I32, struct.pack("<i", total)),
        "general.alignment": (4, struct.pack("<I", alignment)),
    } | (extra or {})
    entries.pop(drop, None)
    raw = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(entries))
    raw += b"".join(text(key) + struct.pack("<I", kind) + payload for key, (kind, payload) in entries.items())
    step = max(32, alignment)
    for i, name in enumerate(tensors):
        raw += text(name) + struct.pack("<IQIQ", 1, 8, 0, i * step)
    raw += bytes(-len(raw) % alignment)
    return raw + b"".join(np.full(8, i, "<f4").tobytes().ljust(step, b"\0") for i in range(len(tensors)))


def pair(folder: Path, first: bytes, second: bytes) -> Path:
    (folder / "m-00002-of-00002.gguf").write_bytes(second)
    path = folder / "m-00001-of-00002.gguf"
    path.write_bytes(first)
    return path


def test_the_first_part_opens_all(paths: list[Path]) -> None:
    assert [path.name for path in paths] == [f"model-0000{i}-of-00003.gguf" for i in (1, 2, 3)]
    file = read_gguf(paths[0])
    assert file.path == paths[0]
    assert file.metadata["general.name"] == "in parts"
    assert file.metadata["split.count"] == 3
    assert list(file.tensors) == [f"t.{i}" for i in range(NUM_TENSORS)]
    for expected in weights():
        found = file.tensors[expected.name]
        assert (found.format, found.shape) == (expected.format, expected.shape)
        np.testing.assert_array_equal(found.data, expected.data)
        assert not found.data.flags.owndata
        assert not found.data.flags.writeable


def test_arrays_of_every_part_outlive_their_files(paths: list[Path]) -> None:
    tensors = read_gguf(paths[0]).tensors
    for path in paths:
        path.unlink()
    assert all(tensors[expected.name].data.tobytes() == expected.data.tobytes() for expected in weights())


@pytest.mark.parametrize("number", [2, 3])
def test_another_part_is_refused_with_the_name_of_the_first(paths: list[Path], number: int) -> None:
    with pytest.raises(LoadError, match=f"is part {number} of a model in 3 parts; open the first, {paths[0]}$"):
        read_gguf(paths[number - 1])


@pytest.mark.parametrize("number", [2, 3])
def test_f052_a_missing_part_is_named(paths: list[Path], number: int) -> None:
    paths[number - 1].unlink()
    message = f"{paths[0]} is part 1 of 3, but part {number} is missing: {paths[number - 1]} does not exist"
    with pytest.raises(LoadError) as caught:
        read_gguf(paths[0])
    assert str(caught.value) == message


@pytest.mark.parametrize("number", [1, 2, 3])
def test_f052_a_part_that_is_cut_is_named(paths: list[Path], number: int) -> None:
    path = paths[number - 1]
    raw = path.read_bytes()
    for length in (0, 10, 40, len(raw) - 600):
        path.write_bytes(raw[:length])
        with pytest.raises(LoadError, match=f"^{path} is "):
            read_gguf(paths[0])


@pytest.mark.parametrize("name", ["model.gguf", "model-1-of-3.gguf", "model-00001-of-00004.gguf"])
def test_the_first_part_under_another_name_is_refused(paths: list[Path], name: str) -> None:
    renamed = paths[0].rename(paths[0].with_name(name))
    with pytest.raises(
        LoadError, match=r"is part 1 of a model in 3 parts, so its name must be \w+-00001-of-00003.gguf"
    ):
        read_gguf(renamed)


def test_parts_under_each_others_names_are_refused(paths: list[Path]) -> None:
    second, third = paths[1].read_bytes(), paths[2].read_bytes()
    paths[1].write_bytes(third)
    paths[2].write_bytes(second)
    with pytest.raises(LoadError, match=f"{paths[1]} is not part 2 of the model in {paths[0]}: split.no is 2, not 1"):
        read_gguf(paths[0])


def test_a_part_that_is_no_part_is_refused(paths: list[Path], tmp_path: Path) -> None:
    write_tiny_llama(tmp_path / "whole").rename(paths[2])
    with pytest.raises(LoadError, match=f"{paths[2]} is malformed: split.count is missing, but must be a number"):
        read_gguf(paths[0])


def test_a_first_part_may_hold_metadata_only(tmp_path: Path) -> None:
    assert list(read_gguf(pair(tmp_path, part([], 0), part(["a", "b"], 1))).tensors) == ["a", "b"]


def test_each_part_has_its_own_alignment(tmp_path: Path) -> None:
    first, second = part(["a", "b"], 0, total=4, alignment=256), part(["c", "d"], 1, total=4, alignment=8)
    tensors = read_gguf(pair(tmp_path, first, second)).tensors
    assert [weight.data.view("<f4")[0] for weight in tensors.values()] == [0, 1, 0, 1]


@pytest.mark.parametrize("count", [0, 1])
def test_a_merged_model_is_one_file_under_any_name(tmp_path: Path, count: int) -> None:
    path = tmp_path / "merged.gguf"
    path.write_bytes(part(["a", "b"], 0, count=count))
    assert list(read_gguf(path).tensors) == ["a", "b"]


def short(value: int) -> tuple[int, bytes]:
    return U16, struct.pack("<H", value)


# What is wrong with the two parts: (first, second, what the message must say).
HOSTILE: dict[str, tuple[bytes, bytes, str]] = {
    "tensor in both": (
        part(["a", "b"], 0, total=4),
        part(["c", "a"], 1, total=4),
        r"m-00002-of-00002.gguf is malformed: tensor a is in .*m-00001-of-00002.gguf as well",
    ),
    "too few tensors": (part(["a"], 0, total=3), part(["b"], 1, total=3), "count is 3, but its 2 parts hold 2 tensors"),
    "too many tensors": (part(["a"], 0, total=1), part(["b"], 1, total=1), "count is 1, but its 2 parts hold 2"),
    "totals differ": (part(["a"], 0), part(["b"], 1, total=3), "split.tensors.count is 3, not 2"),
    "counts differ": (part(["a"], 0), part(["b"], 1, count=3), "not part 2 of .*: split.count is 3, not 2"),
    "second says it is the first": (part(["a"], 0), part(["b"], 0), "not part 2 of .*: split.no is 0, not 1"),
    "no number": (part(["a"], 0, drop="split.no"), part(["b"], 1), "1-of-00002.gguf is malformed: split.no is missing"),
    "no total": (part(["a"], 0, drop="split.tensors.count"), part(["b"], 1), "split.tensors.count is missing"),
    "second without total": (
        part(["a"], 0),
        part(["b"], 1, drop="split.tensors.count"),
        "2.gguf is malformed: split.t",
    ),
    "number past the count": (part(["a"], 2), part(["b"], 1), "split.no is 2, but must be a number from 0 to 1"),
    "negative total": (part(["a"], 0, total=-1), part(["b"], 1), "split.tensors.count is -1, but must be a number"),
    "count of 2^32": (
        part(["a"], 0, extra={"split.count": (10, struct.pack("<Q", 2**32))}),
        part(["b"], 1),
        "split.count is 4294967296, but must be a number from 0 to 65535",
    ),
    "count is text": (
        part(["a"], 0, extra={"split.count": (STRING, text("\x1b[2J" * 100))}),
        part(["b"], 1),
        r"split.count is '\\x1b\[2J.{60,80}, but must be a number",
    ),
    "count is true": (part(["a"], 0, extra={"split.count": (BOOL, b"\1")}), part(["b"], 1), "split.count is True"),
    "count is a float": (
        part(["a"], 0, extra={"split.count": (F32, struct.pack("<f", 2))}),
        part(["b"], 1),
        "split.count is 2.0, but must be a number",
    ),
    "most parts": (
        part(["a"], 0, extra={"split.count": short(65535)}),
        part(["b"], 1),
        "name must be m-00001-of-65535",
    ),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_f053_parts_that_do_not_agree_are_refused(tmp_path: Path, name: str) -> None:
    first, second, message = HOSTILE[name]
    with pytest.raises(LoadError, match=message):
        read_gguf(pair(tmp_path, first, second))


def test_a_model_in_parts_is_the_same_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = load_model(write_tiny_llama(tmp_path / "whole.gguf", fmt="q8_0"))
    monkeypatch.setattr(gguf, "GGUFWriter", partial(gguf.GGUFWriter, split_max_tensors=7))
    write_tiny_llama(tmp_path / "cut.gguf", fmt="q8_0")
    parts = load_model(tmp_path / "cut-00001-of-00003.gguf")
    assert parts.config == whole.config
    assert parts.weight_bytes == whole.weight_bytes
    assert parts.tensor_formats == whole.tensor_formats
    for one, other in zip(parts.weights.matrices(), whole.weights.matrices(), strict=True):
        np.testing.assert_array_equal(one.data, other.data)
