"""The architectures this version can run. One more is a model file and a line here."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from forerun.errors import LoadError
from forerun.models import llama
from forerun.models.config import ModelConfig, read_architecture
from forerun.models.gguf import GgufFile
from forerun.models.weights import WeightSource
from forerun.ops.base import AttentionSpec, Ops, T, Weight
from forerun.types import Float32Array


class ModelWeights(Protocol):
    """What every architecture's weights can list, for counting."""

    def matrices(self) -> Iterator[Weight]:
        """Every matrix once."""

    def norms(self) -> Iterator[Float32Array]:
        """Every norm vector."""


class Forward(Protocol):
    """A forward pass written in `ops`; an architecture's own weights go in as they came from its build_weights."""

    def __call__(self, ops: Ops[T], weights: Any, config: ModelConfig) -> T:
        """The raw logits of a pass: [R, V]."""


@dataclass(frozen=True, slots=True)
class Architecture:
    """What a model file offers.

    Attributes:
        tensor_shapes: the tensors a GGUF file must hold, (N, K) by name.
        build_weights: its weights from those tensors.
        attention_spec: what its attention layers have in common.
        forward: its forward pass.
    """

    tensor_shapes: Callable[[ModelConfig], Mapping[str, tuple[int, int]]]
    build_weights: Callable[[WeightSource, ModelConfig], ModelWeights]
    attention_spec: Callable[[ModelConfig], AttentionSpec]
    forward: Forward


# By `general.architecture` of a GGUF file.
ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": Architecture(llama.tensor_shapes, llama.build_weights, llama.attention_spec, llama.forward),
}


def find_architecture(file: GgufFile) -> Architecture:
    """The entry a file's `general.architecture` names.

    Raises:
        LoadError: there is none; the message lists those there are.
    """
    name = read_architecture(file)
    if name not in ARCHITECTURES:
        known = ", ".join(sorted(ARCHITECTURES))
        raise LoadError(f"{file.path}: architecture {name} is not supported; supported: {known}")
    return ARCHITECTURES[name]
