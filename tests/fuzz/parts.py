"""What the fuzz has of a model before it becomes files: trees and tables, which edits can change."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from forerun.models.config import ModelConfig
from forerun.ops.base import AttentionSpec
from tests.fuzz.image import Image

CONTEXT = 128


@dataclass
class Json:
    """A JSON file as a tree."""

    tree: Any


@dataclass
class Safetensors:
    """A safetensors file; `stated_len` is what it says of its header's length, None the truth."""

    header: dict[str, Any]
    data: bytes
    stated_len: int | None = None


@dataclass
class Source:
    """A chat template."""

    text: str


Part = Image | Json | Safetensors | Source


@dataclass
class Base:
    """A model: its files by name, and which one is opened; "" opens the folder."""

    name: str
    parts: dict[str, Part]
    entry: str


@dataclass(frozen=True)
class Sizes:
    """Of a decoder."""

    hidden: int = 32
    inner: int = 48
    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    dim: int = 8


SMALL = Sizes()


def decoder_config(architecture: str, sizes: Sizes, vocab_size: int, *, is_tied: bool = False) -> ModelConfig:
    """As much of a config as the tensors' shapes depend on."""
    spec = AttentionSpec(sizes.heads, sizes.kv_heads, sizes.dim, 1.0, "neox", (1.0,) * (sizes.dim // 2))
    return ModelConfig(
        architecture=architecture,
        num_layers=sizes.layers,
        hidden_size=sizes.hidden,
        intermediate_size=sizes.inner,
        num_heads=sizes.heads,
        num_kv_heads=sizes.kv_heads,
        head_dim=sizes.dim,
        vocab_size=vocab_size,
        context_length=CONTEXT,
        rms_eps=1e-5,
        is_tied=is_tied,
        attentions=(spec,) * sizes.layers,
    )


def pack(part: Part) -> tuple[bytes, list[int]]:
    """A part as a file, and the places between its own parts."""
    if isinstance(part, Image):
        return part.pack()
    if isinstance(part, Json):
        return _json_bytes(part.tree), []
    if isinstance(part, Source):
        return part.text.encode("utf-8", "surrogatepass"), []
    header = _json_bytes(part.header)
    length = len(header) if part.stated_len is None else part.stated_len
    return (length % 2**64).to_bytes(8, "little") + header + part.data, [8, 8 + len(header)]


def _json_bytes(tree: object) -> bytes:
    return json.dumps(tree).encode()
