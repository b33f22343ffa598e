"""Small whole GGUF models: every architecture, tensor type and kind of vocabulary, and models in parts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from forerun.models.decoder import tensor_shapes
from forerun.models.registry import ARCHITECTURES
from forerun.ops.formats import FORMATS
from tests.fuzz.image import ARRAY, BOOL, F32, STRING, TYPE_IDS, U32, Array, Entry, Image, Tensor
from tests.fuzz.parts import CONTEXT, SMALL, Base, Sizes, decoder_config
from tests.fuzz.vocabularies import gguf_vocabulary
from tests.helpers.blocks import HALVES, random_weight

# By architecture: what a file may hold beside the tensors that it must.
_OPTIONAL = {
    "llama": {"blk.0.attn_q.bias", "blk.0.attn_output.bias", "rope_freqs.weight"},
    "phi3": {"rope_factors_long.weight", "rope_factors_short.weight"},
}
_MORE_KEYS: Mapping[str, dict[str, Any]] = {
    "gemma3": {"attention.sliding_window": 16, "rope.scaling.type": "linear", "rope.scaling.factor": 2.0},
    "llama": {"attention.sliding_window": 24},
    "olmo2": {"attention.sliding_window": 16, "attention.sliding_window_pattern": [True, False]},
    "phi3": {"rope.scaling.original_context_length": 64, "rope.scaling.attn_factor": 1.2},
    "qwen3": {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": 4.0,
        "rope.scaling.original_context_length": 32,
        "rope.scaling.yarn_beta_fast": 32.0,
    },
}
_GGUF_VOCABULARIES = {"gemma3": "gemma4", "llama": "smollm", "olmo2": "bert", "phi3": "llama", "qwen2": "qwen2"}
# Whole blocks of every type.
_BLOCKY = Sizes(hidden=64, inner=96, layers=1, heads=4, kv_heads=2, dim=16)
_SUPER_BLOCKY = Sizes(hidden=256, inner=256, layers=1, heads=8, kv_heads=4, dim=32)


def gguf_bases() -> Iterator[Base]:
    """Every one; the same in every process."""
    for architecture in ARCHITECTURES:
        image = gguf_model(architecture, _GGUF_VOCABULARIES.get(architecture, "llama-bpe"))
        yield Base(f"gguf {architecture}", {"m.gguf": image}, "m.gguf")
    for fmt, block in FORMATS.items():
        sizes = _SUPER_BLOCKY if block.block_len == 256 else _BLOCKY
        image = gguf_model("llama", "llama" if fmt == "q8_0" else "smollm", fmt, sizes)
        yield Base(f"gguf {fmt}", {"m.gguf": image}, "m.gguf")
    for fmt, count in (("f32", 3), ("q4_0", 2)):
        parts = split(gguf_model("llama", "smollm", fmt, _BLOCKY if fmt == "q4_0" else SMALL), count)
        yield Base(f"gguf {fmt} in {count} parts", dict(parts), next(iter(parts)))


def gguf_model(architecture: str, vocabulary: str, fmt: str = "f32", sizes: Sizes = SMALL) -> Image:
    """A whole model in one file, its matrices in one format."""
    tokens = gguf_vocabulary(vocabulary)
    vocab_size = len(tokens["tokenizer.ggml.tokens"])
    keys = {
        "block_count": sizes.layers,
        "context_length": CONTEXT,
        "embedding_length": sizes.hidden,
        "feed_forward_length": sizes.inner,
        "attention.head_count": sizes.heads,
        "attention.head_count_kv": sizes.kv_heads,
        "attention.key_length": sizes.dim,
        "attention.value_length": sizes.dim,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.dimension_count": sizes.dim,
        "rope.freq_base": 10000.0,
        "vocab_size": vocab_size,
    } | _MORE_KEYS.get(architecture, {})
    metadata = {"general.architecture": architecture, "general.name": "tiny", "general.alignment": 32}
    metadata |= {f"{architecture}.{key}": value for key, value in keys.items()}
    shapes = tensor_shapes(
        ARCHITECTURES[architecture], decoder_config(architecture, sizes, vocab_size), _OPTIONAL.get(architecture, set())
    )
    return Image(
        [entry(key, value) for key, value in (metadata | tokens).items()],
        [_tensor(name, shape, fmt, seed) for seed, (name, shape) in enumerate(shapes.items())],
    )


def entry(key: str, value: Any) -> Entry:
    """A metadata entry as converters write it."""
    kind, packed = _value(value)
    return Entry(key.encode(), kind, packed)


def _value(value: Any) -> tuple[int, Any]:
    if isinstance(value, str):
        return STRING, value.encode("utf-8", "surrogatepass")
    if isinstance(value, list):
        return ARRAY, Array(_value(value[0])[0], [_value(item)[1] for item in value])
    kind = BOOL if isinstance(value, bool) else U32 if isinstance(value, int) else F32
    return kind, value


def _tensor(name: str, shape: tuple[int, int], fmt: str, seed: int) -> Tensor:
    num_rows, row_len = shape
    if num_rows == 1:
        values = np.random.default_rng(seed).uniform(0.5, 1.5, row_len).astype("<f4")
        return Tensor(name.encode(), [row_len], TYPE_IDS["f32"], values.tobytes())
    weight = random_weight(fmt, num_rows, row_len, seed=seed, name=name)
    blocks = weight.data.reshape(-1, FORMATS[fmt].block_bytes)
    for offset in HALVES.get(fmt, ()):
        scales = blocks[:, offset : offset + 2].copy().view("<f2") / 64  # so that activations stay finite
        blocks[:, offset : offset + 2] = scales.astype("<f2").view(np.uint8)
    return Tensor(name.encode(), [row_len, num_rows], TYPE_IDS[fmt], blocks.tobytes())


def split(image: Image, count: int) -> dict[str, Image]:
    """The same model in parts, as gguf-split cuts it: metadata in the first one only."""
    parts = {}
    step = -(-len(image.tensors) // count)
    for number in range(count):
        keys = [("split.no", number), ("split.count", count), ("split.tensors.count", len(image.tensors))]
        own = image.entries if number == 0 else image.entries[:1]
        tensors = image.tensors[number * step : (number + 1) * step]
        name = f"m-{number + 1:05}-of-{count:05}.gguf"
        parts[name] = Image([*own, *(entry(key, value) for key, value in keys)], tensors)
    return parts
