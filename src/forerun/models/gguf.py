"""Reads GGUF models, in one file or in parts. The tensors' bytes stay in the mapped files.

    NAME-00001-of-00003.gguf    split.no 0, split.count 3, split.tensors.count, all metadata, some tensors or none
    NAME-00002-of-00003.gguf    split.no 1, split.count 3, split.tensors.count, more tensors
    NAME-00003-of-00003.gguf    ...

This is how llama.cpp's gguf-split cuts a model. A model is opened by its first part; of the others only the split keys
and the tensors are used. `models.gguf_header` reads the single file.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from forerun.errors import LoadError, shown
from forerun.models.gguf_header import GgufHeader, MetadataValue, read_header
from forerun.ops.base import Weight

__all__ = ["GgufFile", "MetadataValue", "read_gguf"]

_SPLIT_NO, _SPLIT_COUNT, _SPLIT_TENSORS = "split.no", "split.count", "split.tensors.count"
_MAX_PARTS = (1 << 16) - 1  # the file holds 16-bit numbers
_MAX_TENSORS = (1 << 31) - 1
_PART_NAME = re.compile(r"(.+)-([0-9]{5})-of-([0-9]{5})\.gguf", re.DOTALL)


@dataclass(frozen=True, slots=True)
class GgufFile:
    """An open model. A map is closed when the last array that views it is gone.

    Attributes:
        path: where it lies, the first part if it is in parts.
        metadata: values by key, in file order.
        tensors: matrices by name, in file order. A vector of K numbers is a matrix of shape (1, K).
    """

    path: Path
    metadata: Mapping[str, MetadataValue]
    tensors: Mapping[str, Weight]


def read_gguf(path: Path) -> GgufFile:
    """Maps a file, and the other parts where it is the first of several, and reads their headers.

    Raises:
        LoadError: a file is missing, no GGUF file, truncated, malformed, or holds a tensor of a type or rank that is
            not supported; or it is another part than the first; or the parts do not belong together. Tensor bytes are
            not looked at.
    """
    first = read_header(path)
    tensors: dict[str, Weight] = {}
    owners: dict[str, Path] = {}
    for part in _read_parts(first):
        for name, weight in _bind_tensors(part).items():
            if name in tensors:
                raise LoadError(f"{part.path} is malformed: tensor {name} is in {owners[name]} as well")
            tensors[name], owners[name] = weight, part.path
    return GgufFile(path, first.metadata, tensors)


def _read_parts(first: GgufHeader) -> list[GgufHeader]:
    """All parts of a model, in order, with numbers, names and counts that agree."""
    # A model that was merged from its parts says that it is in 0 of them.
    count = _split_value(first, _SPLIT_COUNT, _MAX_PARTS) if _SPLIT_COUNT in first.metadata else 0
    if count < 2:
        return [first]
    number = _split_value(first, _SPLIT_NO, count - 1) + 1
    num_tensors = _split_value(first, _SPLIT_TENSORS, _MAX_TENSORS)
    paths = _part_paths(first.path, number, count)
    if number != 1:
        raise LoadError(f"{first.path} is part {number} of a model in {count} parts; open the first, {paths[0]}")
    for i, path in enumerate(paths, 1):
        if not os.path.exists(path):
            raise LoadError(f"{first.path} is part 1 of {count}, but part {i} is missing: {path} does not exist")
    parts = [first, *(read_header(path) for path in paths[1:])]
    _require_agreement(parts, num_tensors)
    return parts


def _require_agreement(parts: list[GgufHeader], num_tensors: int) -> None:
    first, count = parts[0], len(parts)
    for i, part in enumerate(parts):
        for key, expected in ((_SPLIT_COUNT, count), (_SPLIT_NO, i), (_SPLIT_TENSORS, num_tensors)):
            found = _split_value(part, key, _MAX_TENSORS)
            if found != expected:
                raise LoadError(
                    f"{part.path} is not part {i + 1} of the model in {first.path}: {key} is {found}, not {expected}"
                )
    total = sum(len(part.tensors) for part in parts)
    if total != num_tensors:
        raise LoadError(
            f"{first.path} is malformed: {_SPLIT_TENSORS} is {num_tensors}, but its {count} parts hold {total} tensors"
        )


def _split_value(header: GgufHeader, key: str, maximum: int) -> int:
    value = header.metadata.get(key)
    if type(value) is not int or not 0 <= value <= maximum:
        found = "missing" if value is None else shown(value)
        raise LoadError(f"{header.path} is malformed: {key} is {found}, but must be a number from 0 to {maximum}")
    return value


def _part_paths(path: Path, number: int, count: int) -> list[Path]:
    """The files of a model in parts, from the name of one of them."""
    match = _PART_NAME.fullmatch(path.name)
    if match is None or (int(match[2]), int(match[3])) != (number, count):
        expected = _part_name(match[1] if match else "NAME", number, count)
        raise LoadError(f"{path} is part {number} of a model in {count} parts, so its name must be {expected}")
    return [path.with_name(_part_name(match[1], i, count)) for i in range(1, count + 1)]


def _part_name(name: str, number: int, count: int) -> str:
    return f"{name}-{number:05}-of-{count:05}.gguf"


def _bind_tensors(header: GgufHeader) -> dict[str, Weight]:
    """Views of a file's tensor data, which must lie within it, aligned and without overlaps."""
    path, size = header.path, len(header.data)
    expected_size, first_cut = header.data_start, ""
    for info in sorted(header.tensors, key=lambda info: info.offset):
        start = header.data_start + info.offset
        if info.offset % header.alignment:
            raise LoadError(f"{path} is malformed: tensor {info.name} is not aligned to {header.alignment} bytes")
        if start < expected_size:
            raise LoadError(f"{path} is malformed: tensor {info.name} overlaps another one")
        expected_size = start + info.num_bytes
        if expected_size > size:
            first_cut = first_cut or info.name
    if first_cut:
        raise LoadError(
            f"{path} is truncated: its tensors end at byte {expected_size}, but the file has {size} "
            f"({first_cut} is the first one cut)"
        )
    everything = np.frombuffer(header.data, np.uint8)
    tensors: dict[str, Weight] = {}
    for info in header.tensors:
        if info.name in tensors:
            raise LoadError(f"{path} is malformed: tensor {info.name} occurs twice")
        start = header.data_start + info.offset
        tensors[info.name] = Weight(info.name, info.format, info.shape, everything[start : start + info.num_bytes])
    return tensors
