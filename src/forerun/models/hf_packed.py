"""The tensors that stand for one quantised matrix in a folder, by method; what their numbers mean is in `ops.regroup`.

Codes and zero points are packed in 32-bit words, the first in the lowest bits. With N outputs, K inputs, G groups and
P codes in a word there are

    gptq                 qweight [K / P, N] along the inputs, qzeros [G, N / P] along the outputs, scales [G, N];
                         g_idx [K], the group of each input, where it is not simply the next group_size inputs
    awq                  qweight [K, N / P], qzeros [G, N / P], scales [G, N]; in a word the outputs are interleaved
    compressed-tensors   weight_packed [N, K / P], weight_zero_point [N / P, G], weight_scale [N, G], weight_shape [2];
                         weight_g_idx [K] as above

The words are read where they lie in the mapped file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from forerun.errors import LoadError
from forerun.models.hf_quant import Method, Packing
from forerun.models.safetensors import StoredTensor
from forerun.ops.base import Weight
from forerun.ops.dequantise import UInt8Array
from forerun.ops.formats import dequantize
from forerun.ops.regroup import Grouped, regroup
from forerun.types import Float32Array, Int32Array

UInt32Array = npt.NDArray[np.uint32]

# Which of a word's codes the outputs 0 to 7 have in AWQ's order.
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)


@dataclass(frozen=True, slots=True)
class _Names:
    """What follows a module's name in those of its tensors."""

    codes: str
    zeros: str
    scales: str
    group_of: str
    shape: str | None = None


_PLAIN_NAMES = _Names(".qweight", ".qzeros", ".scales", ".g_idx")
_NAMES: Mapping[Method, _Names] = {
    "gptq": _PLAIN_NAMES,
    "awq": _PLAIN_NAMES,
    "compressed-tensors": _Names(
        ".weight_packed", ".weight_zero_point", ".weight_scale", ".weight_g_idx", ".weight_shape"
    ),
}


def packed_modules(folder: Path, stored: Mapping[str, StoredTensor], packing: Packing) -> dict[str, PackedModule]:
    """The modules of a folder whose matrices are quantised, by the names the matrices would have if they weren't."""
    suffix = _NAMES[packing.method].codes
    modules = [name.removesuffix(suffix) for name in stored if name.endswith(suffix)]
    return {f"{module}.weight": PackedModule(folder, stored, packing, module) for module in modules}


class PackedModule:
    """One module whose matrix is quantised.

    Args:
        folder: for messages.
        stored: the folder's tensors.
        packing: how they are stored.
        module: the module's name, such as `model.layers.0.mlp.down_proj`.
    """

    def __init__(self, folder: Path, stored: Mapping[str, StoredTensor], packing: Packing, module: str) -> None:
        self._folder = folder
        self._stored = stored
        self._packing = packing
        self._module = module
        self._names = _NAMES[packing.method]

    @property
    def tensor_names(self) -> set[str]:
        """Those that the folder holds and `weight` accounts for; of a bias that adds nothing too, which some have."""
        names = self._names
        known = [names.codes, names.zeros, names.scales, names.group_of, *([names.shape] if names.shape else [])]
        bias = self._stored.get(f"{self._module}.bias")
        if bias is not None and not dequantize(bias.weight()).any():
            known.append(".bias")
        return {self._module + name for name in known if self._module + name in self._stored}

    def weight(self, shape: tuple[int, int]) -> Weight:
        """The matrix [N, K], its values as they are stored.

        Raises:
            LoadError: a tensor is missing or has another type or shape than the config asks for, or an input belongs
                to a group that is not there.
        """
        num_groups = -(-shape[1] // (self._packing.group_size or shape[1]))
        per_word = 32 // self._packing.num_bits
        for what, size in zip(("outputs", "inputs"), shape, strict=True):
            if size % per_word:
                raise LoadError(
                    f"{self._folder}: {self._module} has {size} {what}, but must have a multiple of {per_word}"
                )
        by_method = {"gptq": self._gptq, "awq": self._awq, "compressed-tensors": self._compressed}
        return regroup(by_method[self._packing.method](shape, num_groups, per_word))

    def _gptq(self, shape: tuple[int, int], num_groups: int, per_word: int) -> Grouped:
        num_rows, row_len = shape
        packed = self._words(self._names.codes, (row_len // per_word, num_rows))
        zeros = self._words(self._names.zeros, (num_groups, num_rows // per_word))
        return Grouped(
            name=f"{self._module}.weight",
            num_bits=self._packing.num_bits,
            scales=self._floats((num_groups, num_rows)).T,
            zeros=self._unpack(self._plus_one(zeros)).T,
            group_of=self._group_of(row_len, num_groups),
            codes=lambda start, stop: self._unpack(packed[:, start:stop].T),
        )

    def _plus_one(self, zeros: UInt32Array) -> UInt32Array:
        """Zero points as they are meant.

        The subtraction of one and its undoing are those of whole words, borrows between the codes included: so it is in
        the library that writes these files, and a zero point of 0 survives it. Some writers leave the subtraction out
        and don't say so. Where zero points are the middle code by definition, that shows.
        """
        ones = np.uint32((2**32 - 1) // (2**self._packing.num_bits - 1))  # in each code
        middle = ones << np.uint32(self._packing.num_bits - 1)
        is_meant = not self._packing.is_less_one or (self._packing.is_symmetric and bool((zeros == middle).all()))
        return zeros if is_meant else zeros + ones

    def _awq(self, shape: tuple[int, int], num_groups: int, per_word: int) -> Grouped:
        num_rows, row_len = shape
        packed = self._words(self._names.codes, (row_len, num_rows // per_word))
        zeros = self._words(self._names.zeros, (num_groups, num_rows // per_word))
        return Grouped(
            name=f"{self._module}.weight",
            num_bits=self._packing.num_bits,
            scales=self._floats((num_groups, num_rows)).T,
            zeros=_unpack_awq(zeros.T),
            group_of=self._group_of(row_len, num_groups),
            codes=lambda start, stop: _unpack_awq(packed[:, start // per_word : stop // per_word].T),
        )

    def _compressed(self, shape: tuple[int, int], num_groups: int, per_word: int) -> Grouped:
        num_rows, row_len = shape
        self._check_stated_shape(shape)
        packed = self._words(self._names.codes, (num_rows, row_len // per_word))
        zeros = np.full((num_rows, num_groups), 1 << (self._packing.num_bits - 1), np.uint8)
        if not self._packing.is_symmetric:
            zeros = self._unpack(self._words(self._names.zeros, (num_rows // per_word, num_groups)).T).T
        return Grouped(
            name=f"{self._module}.weight",
            num_bits=self._packing.num_bits,
            scales=self._floats((num_rows, num_groups)),
            zeros=zeros,
            group_of=self._group_of(row_len, num_groups),
            codes=lambda start, stop: self._unpack(packed[start:stop]),
        )

    def _check_stated_shape(self, shape: tuple[int, int]) -> None:
        name = self._names.shape
        if name is None or self._module + name not in self._stored:
            return
        stated = tuple(self._numbers(name, "I64", (2,)).view("<i8").tolist())
        if stated != shape:
            raise LoadError(
                f"{self._folder}: tensor {self._module}{name} says {stated}, but config.json asks for {shape}"
            )

    def _unpack(self, words: UInt32Array) -> UInt8Array:
        """[A, W] words of any strides to [A, W * codes per word]."""
        packed = np.ascontiguousarray(words, "<u4").view(np.uint8)
        if self._packing.num_bits == 8:
            return packed
        codes = np.empty((*packed.shape, 2), np.uint8)
        np.bitwise_and(packed, 15, out=codes[:, :, 0])
        np.right_shift(packed, 4, out=codes[:, :, 1])
        return codes.reshape(len(packed), -1)

    def _group_of(self, row_len: int, num_groups: int) -> Int32Array:
        name = self._names.group_of
        plain = (np.arange(row_len) // (self._packing.group_size or row_len)).astype(np.int32)
        if self._module + name not in self._stored:
            return plain
        group_of = self._numbers(name, "I32", (row_len,)).view("<i4")
        if (group_of == group_of[0]).all() and group_of[0] in (-1, 0):  # never filled in: the plain order
            return plain
        if group_of.min() < 0 or group_of.max() >= num_groups:
            raise LoadError(
                f"{self._folder}: tensor {self._module}{name} names group {group_of.min()} to {group_of.max()}, "
                f"but there are {num_groups}"
            )
        return group_of

    def _words(self, name: str, shape: tuple[int, int]) -> UInt32Array:
        return self._numbers(name, "I32", shape).view("<u4").reshape(shape)

    def _floats(self, shape: tuple[int, int]) -> Float32Array:
        tensor = self._tensor(self._names.scales, shape)
        scales = dequantize(tensor.weight())
        if not np.isfinite(scales).all():
            raise LoadError(f"{tensor.path}: tensor {tensor.name} has a scale that is not a finite number")
        return scales

    def _numbers(self, name: str, dtype: str, shape: tuple[int, ...]) -> UInt8Array:
        tensor = self._tensor(name, shape)
        if tensor.dtype != dtype:
            raise LoadError(f"{tensor.path}: tensor {tensor.name} has dtype {tensor.dtype}, but must be {dtype}")
        return tensor.data

    def _tensor(self, name: str, shape: tuple[int, ...]) -> StoredTensor:
        tensor = self._stored.get(self._module + name)
        if tensor is None:
            raise LoadError(f"{self._folder}: tensor {self._module}{name} is missing")
        if tensor.shape != shape:
            raise LoadError(
                f"{tensor.path}: tensor {tensor.name} has shape {tensor.shape}, but for {self._packing} must be {shape}"
            )
        return tensor


def _unpack_awq(words: UInt32Array) -> UInt8Array:
    """[W, K] words of any strides to [8 W, K] codes of four bits."""
    words = np.ascontiguousarray(words, "<u4")
    codes = np.empty((words.shape[0], len(_AWQ_ORDER), words.shape[1]), np.uint8)
    for output, at in enumerate(_AWQ_ORDER):
        codes[:, output] = words >> np.uint32(4 * at) & np.uint32(15)
    return codes.reshape(-1, words.shape[1])
