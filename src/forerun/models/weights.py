"""From the tensors of a file to the weights of a model: every one accounted for, in the format asked for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from forerun.errors import ConfigError, LoadError
from forerun.models.config import EMBEDDING, HEAD
from forerun.models.gguf import GgufFile
from forerun.ops.base import Quant, Weight
from forerun.ops.formats import FORMATS, converts, dequantize, requantize, target_format
from forerun.types import Float32Array


def require_tensors(file: GgufFile, shapes: Mapping[str, tuple[int, int]]) -> None:
    """Checks that a file holds exactly these tensors.

    Args:
        file: an open file.
        shapes: (N, K) by name; vectors are (1, K).
    Raises:
        LoadError: a tensor is missing, has another shape, or is one the forward pass would ignore.
    """
    for name in file.tensors:
        if name not in shapes:
            raise LoadError(f"{file.path}: tensor {name} is not part of the architecture as it is supported")
    for name, shape in shapes.items():
        weight = file.tensors.get(name)
        if weight is None:
            raise LoadError(f"{file.path}: tensor {name} is missing")
        if weight.shape != shape:
            raise LoadError(f"{file.path}: tensor {name} has shape {weight.shape}, but the metadata ask for {shape}")


@dataclass(frozen=True, slots=True)
class WeightSource:
    """Hands out a file's tensors in the format asked for.

    Attributes:
        tensors: matrices by name.
        quant: None keeps each matrix as the file has it.
    """

    tensors: Mapping[str, Weight]
    quant: Quant | None

    def vector(self, name: str) -> Float32Array:
        """The weights of a norm, or a bias: [K] float32."""
        # Its own copy: whoever keeps a norm would keep the whole mapped file.
        return dequantize(self.tensors[name]).reshape(-1).copy()

    def matrix(self, name: str) -> Weight:
        """A matrix of a layer."""
        return requantize(self.tensors[name], self.quant, is_head=False)

    def head(self, name: str) -> Weight:
        """The embedding or the LM head."""
        return requantize(self.tensors[name], self.quant, is_head=True)


def require_effect(path: Path, tensors: Mapping[str, Weight], quant: Quant | None) -> None:
    """Checks that a choice of `quant` does something for a model: nobody is to think of weights that are not served.

    Args:
        path: of the model, for the message.
        tensors: all of it, by name; vectors are (1, K).
        quant: what was asked for; None asks for nothing.
    Raises:
        ConfigError: it would change no matrix, and not because all have its format.
    """
    if quant is None:
        return
    matrices = {name: weight for name, weight in tensors.items() if weight.shape[0] > 1}
    heads = (EMBEDDING, HEAD)
    if any(converts(weight, quant, is_head=name in heads) for name, weight in matrices.items()):
        return
    if all(weight.format == target_format(quant, is_head=name in heads) for name, weight in matrices.items()):
        return
    formats = Counter(weight.format for weight in matrices.values()).most_common()
    shown = ", ".join(f"{count} {fmt}" for fmt, count in formats)
    is_any_float = any(FORMATS[weight.format].block_len == 1 for weight in matrices.values())
    why = "rows of floats are no multiple of 32 weights" if is_any_float else "all are as small already"
    raise ConfigError(
        f"{path}: quant {quant} would change none of the matrices ({shown}), because {why}; use auto, or f32 to "
        "expand them"
    )


def split_rows(weight: Weight, sizes: Mapping[str, int]) -> list[Weight]:
    """A matrix cut into bands of rows, which are views of its bytes.

    Args:
        weight: [N, K], N the sum of the sizes.
        sizes: how many rows each band has, by the name it gets; in the order of the rows.
    """
    num_rows, row_len = weight.shape
    row_bytes = weight.data.nbytes // num_rows
    bands, start = [], 0
    for name, size in sizes.items():
        data = weight.data[start * row_bytes : (start + size) * row_bytes]
        bands.append(replace(weight, name=name, shape=(size, row_len), data=data))
        start += size
    return bands
