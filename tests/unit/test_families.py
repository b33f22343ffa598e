"""What each family of decoders makes of a file's keys and tensors, and what it refuses by name (F055, F057, F059)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from forerun.errors import LoadError
from forerun.models.loader import LoadedModel, load_model
from forerun.models.registry import ARCHITECTURES
from forerun.models.rope import plain_rope
from forerun.ops.base import Weight
from tests.helpers.gguf_files import write_gguf

HIDDEN, INNER, HEADS, KV_HEADS, DIM, VOCAB, CONTEXT = 64, 96, 4, 2, 16, 40, 256
KV = KV_HEADS * DIM
METADATA: dict[str, Any] = {
    "block_count": 2,
    "context_length": CONTEXT,
    "embedding_length": HIDDEN,
    "feed_forward_length": INNER,
    "attention.head_count": HEADS,
    "attention.head_count_kv": KV_HEADS,
    "attention.layer_norm_rms_epsilon": 1e-6,
    "rope.freq_base": 1e6,
}
MATRICES = {
    "attn_q.weight": (HIDDEN, HIDDEN),
    "attn_k.weight": (KV, HIDDEN),
    "attn_v.weight": (KV, HIDDEN),
    "attn_output.weight": (HIDDEN, HIDDEN),
    "ffn_gate.weight": (INNER, HIDDEN),
    "ffn_up.weight": (INNER, HIDDEN),
    "ffn_down.weight": (HIDDEN, INNER),
}
PRE_NORMS = {"attn_norm.weight": (HIDDEN,), "ffn_norm.weight": (HIDDEN,)}
POST_NORMS = {"post_attention_norm.weight": (HIDDEN,), "post_ffw_norm.weight": (HIDDEN,)}
HEAD_NORMS = {"attn_q_norm.weight": (DIM,), "attn_k_norm.weight": (DIM,)}
BIASES = {"attn_q.bias": (HIDDEN,), "attn_k.bias": (KV,), "attn_v.bias": (KV,)}
FUSED = {
    "attn_qkv.weight": (HIDDEN + 2 * KV, HIDDEN),
    "attn_output.weight": (HIDDEN, HIDDEN),
    "ffn_up.weight": (2 * INNER, HIDDEN),
    "ffn_down.weight": (HIDDEN, INNER),
}
LAYERS: dict[str, dict[str, tuple[int, ...]]] = {
    "gemma3": MATRICES | PRE_NORMS | POST_NORMS | HEAD_NORMS,
    "llama": MATRICES | PRE_NORMS,
    "olmo2": MATRICES | POST_NORMS | {"attn_q_norm.weight": (HIDDEN,), "attn_k_norm.weight": (KV,)},
    "phi3": FUSED | PRE_NORMS,
    "qwen2": MATRICES | PRE_NORMS | BIASES,
    "qwen3": MATRICES | PRE_NORMS | HEAD_NORMS,
}
OWN_METADATA: dict[str, dict[str, Any]] = {"gemma3": {"attention.sliding_window": 32}}


def tensors_of(architecture: str, num_layers: int = 2) -> dict[str, np.ndarray]:
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (VOCAB, HIDDEN), "output_norm.weight": (HIDDEN,)}
    for layer in range(num_layers):
        shapes |= {f"blk.{layer}.{name}": shape for name, shape in LAYERS[architecture].items()}
    rng = np.random.default_rng(3)
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def load(
    tmp_path: Path,
    architecture: str,
    tensors: dict[str, np.ndarray] | None = None,
    fmt: str = "f32",
    quant: str = "auto",
    **changes: Any,
) -> LoadedModel:
    """Loads a file with some metadata changed; None leaves a key out."""
    metadata = METADATA | OWN_METADATA.get(architecture, {}) | changes
    path = write_gguf(
        tmp_path / "model.gguf",
        {f"{architecture}.{key}": value for key, value in metadata.items() if value is not None},
        tensors or tensors_of(architecture, metadata["block_count"]),
        fmt=fmt,
        architecture=architecture,
    )
    return load_model(path, quant)


def test_every_architecture_is_tested_here() -> None:
    assert LAYERS.keys() == ARCHITECTURES.keys()


@pytest.mark.parametrize("architecture", LAYERS)
def test_every_missing_tensor_is_named(tmp_path: Path, architecture: str) -> None:
    for name in tensors_of(architecture):
        tensors = tensors_of(architecture)
        del tensors[name]
        with pytest.raises(LoadError, match=f"tensor {name} is missing"):
            load(tmp_path, architecture, tensors)


@pytest.mark.parametrize("architecture", LAYERS)
def test_tensors_of_another_family_are_refused(tmp_path: Path, architecture: str) -> None:
    every = MATRICES | PRE_NORMS | POST_NORMS | HEAD_NORMS | BIASES | FUSED | {"ffn_gate_inp.weight": (2, HIDDEN)}
    optional = {*BIASES, "attn_output.bias"} if architecture == "llama" else set()
    for name, shape in every.items():
        if name not in LAYERS[architecture] and name not in optional:
            tensors = tensors_of(architecture) | {f"blk.1.{name}": np.ones(shape, np.float32)}
            with pytest.raises(LoadError, match=f"tensor blk.1.{name} is not part of the architecture"):
                load(tmp_path, architecture, tensors)


@pytest.mark.parametrize("architecture", LAYERS)
def test_the_weights_are_all_of_the_file(tmp_path: Path, architecture: str) -> None:
    tensors = tensors_of(architecture)
    model = load(tmp_path, architecture, tensors)
    assert model.num_parameters == sum(array.size for array in tensors.values())
    assert model.weight_bytes == 4 * model.num_parameters
    assert all(not weight.data.flags.owndata and not weight.data.flags.writeable for weight in model.weights.matrices())
    names = [weight.name for weight in model.weights.matrices()]
    assert len(names) == len(set(names)) == 15


@pytest.mark.parametrize("architecture", LAYERS)
def test_f055_heads_absent_and_present(tmp_path: Path, architecture: str) -> None:
    tied = load(tmp_path, architecture)
    assert tied.config.is_tied
    assert tied.weights.head is tied.weights.embedding
    untied = load(tmp_path, architecture, tensors_of(architecture) | {"output.weight": np.ones((VOCAB, HIDDEN), "f4")})
    assert not untied.config.is_tied
    assert untied.weights.head.name == "output.weight"


@pytest.mark.parametrize("architecture", LAYERS)
@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("attention.causal", False),
        ("attention.clamp_kqv", 8.0),
        ("attention.layer_norm_epsilon", 1e-5),
        ("attention.max_alibi_bias", 8.0),
        ("attention.scale", 0.125),
        ("attention.shared_kv_layers", 1),
        ("attention.temperature_scale", 0.5),
        ("attn_logit_softcapping", 50.0),
        ("embedding_scale", 12.0),
        ("expert_count", 8),
        ("final_logit_softcapping", 30.0),
        ("logit_scale", 0.0625),
        ("residual_scale", 0.2),
        ("rope.dimension_sections", [8, 4, 4, 0]),
        ("rope.scaling.yarn_log_multiplier", 0.1),
        ("swin_norm", True),
        ("use_parallel_residual", True),
    ],
)
def test_f059_settings_that_are_not_computed_are_refused(
    tmp_path: Path, architecture: str, key: str, value: Any
) -> None:
    with pytest.raises(LoadError, match=rf"key {architecture}\.{key} is .*, which is not supported"):
        load(tmp_path, architecture, **{key: value})


@pytest.mark.parametrize("architecture", ["llama", "phi3", "qwen2", "qwen3"])
@pytest.mark.parametrize(("key", "value"), [("attention.sliding_window_pattern", 6), ("rope.freq_base_swa", 1e4)])
def test_settings_of_another_family_are_refused(tmp_path: Path, architecture: str, key: str, value: Any) -> None:
    with pytest.raises(LoadError, match=rf"key {architecture}\.{key} is .*, which is not supported"):
        load(tmp_path, architecture, **{key: value})


@pytest.mark.parametrize("architecture", LAYERS)
def test_common_constants(tmp_path: Path, architecture: str) -> None:
    model = load(tmp_path, architecture)
    is_gemma = architecture == "gemma3"
    assert model.config.activation == ("gelu_tanh" if is_gemma else "silu")
    assert model.config.embedding_scale == (8.0 if is_gemma else 1.0)
    assert len(model.attentions) == 2
    for spec in model.attentions:
        assert (spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.scale) == (HEADS, KV_HEADS, DIM, 0.25)
        assert spec.rope_style == ("interleaved" if architecture == "llama" else "neox")
        assert spec.rope_magnitude == 1.0
        assert spec.inv_freq == plain_rope(1e4 if is_gemma else 1e6, DIM).inv_freq
        assert spec.window == (32 if is_gemma else None)


@pytest.mark.parametrize("architecture", ["llama", "phi3"])
@pytest.mark.parametrize(("stated", "window"), [(7, 7), (CONTEXT - 1, CONTEXT - 1), (CONTEXT, None), (0, None)])
def test_a_window_of_every_layer(tmp_path: Path, architecture: str, stated: int, window: int | None) -> None:
    model = load(tmp_path, architecture, **{"attention.sliding_window": stated})
    assert [spec.window for spec in model.attentions] == [window, window]


@pytest.mark.parametrize("architecture", ["qwen2", "qwen3"])
def test_a_window_of_unknown_layers_is_refused(tmp_path: Path, architecture: str) -> None:
    message = f"key {architecture}.attention.sliding_window is 32, but a {architecture} window is not supported"
    with pytest.raises(LoadError, match=message):
        load(tmp_path, architecture, **{"attention.sliding_window": 32})
    load(tmp_path, architecture, **{"attention.sliding_window": CONTEXT})


@pytest.mark.parametrize(
    ("architecture", "layers", "pattern", "full"),
    [
        ("gemma3", 13, None, [5, 11]),
        ("gemma3", 5, None, []),
        ("gemma3", 5, 2, [1, 3]),
        ("olmo2", 9, None, [3, 7]),
        ("olmo2", 4, [True, False, False, True], [1, 2]),
    ],
)
def test_layers_that_see_everything(
    tmp_path: Path, architecture: str, layers: int, pattern: Any, full: list[int]
) -> None:
    changes = {"block_count": layers, "attention.sliding_window": 32, "attention.sliding_window_pattern": pattern}
    changes |= {"rope.scaling.type": "linear", "rope.scaling.factor": 8.0}
    specs = load(tmp_path, architecture, **changes).attentions
    assert [layer for layer, spec in enumerate(specs) if spec.window is None] == full
    scaled = tuple(freq / 8 for freq in plain_rope(1e6, DIM).inv_freq)
    local = plain_rope(1e4 if architecture == "gemma3" else 1e6, DIM).inv_freq
    assert [spec.inv_freq for spec in specs] == [local if spec.window else scaled for spec in specs]


@pytest.mark.parametrize("pattern", [[True], [1, 0], 0])
@pytest.mark.parametrize("architecture", ["gemma3", "olmo2"])
def test_impossible_patterns_are_refused(tmp_path: Path, architecture: str, pattern: Any) -> None:
    changes = {"attention.sliding_window": 32, "attention.sliding_window_pattern": pattern}
    with pytest.raises(LoadError, match=rf"key {architecture}\.attention\.sliding_window_pattern is .*, but must be"):
        load(tmp_path, architecture, **changes)


def test_local_base_of_its_own(tmp_path: Path) -> None:
    for architecture in ("gemma3", "olmo2"):
        changes = {"attention.sliding_window": 32, "rope.freq_base_swa": 500.0}
        assert load(tmp_path, architecture, **changes).attentions[0].inv_freq == plain_rope(500.0, DIM).inv_freq


def test_gemma3_needs_its_window_and_a_rope_it_has_been_given(tmp_path: Path) -> None:
    with pytest.raises(LoadError, match=r"key gemma3\.attention\.sliding_window is missing"):
        load(tmp_path, "gemma3", **{"attention.sliding_window": None})
    with pytest.raises(LoadError, match=r"gemma3\.rope\.scaling\.type gives RoPE a magnitude of 1\.5"):
        load(tmp_path, "gemma3", **{"rope.scaling.attn_factor": 1.5})


def test_the_largest_gemma3_scales_scores_by_another_size(tmp_path: Path) -> None:
    """62 layers stand for 27B; its hidden size / heads, here 64 / 4, is not its head size, here 8."""
    tensors = {}
    for name, array in tensors_of("gemma3", 62).items():
        halves_columns = name.endswith("attn_output.weight")
        halves_rows = any(f".attn_{part}" in name for part in ("q", "k", "v", "q_norm", "k_norm"))
        tensors[name] = (
            array[: len(array) // 2] if halves_rows else array[:, : HIDDEN // 2] if halves_columns else array
        )
    assert load(tmp_path, "gemma3", tensors, block_count=62, **{"attention.key_length": 8, "attention.value_length": 8})
    spec = load_model(tmp_path / "model.gguf").attentions[0]
    assert (spec.head_dim, spec.scale) == (8, 0.25)


def test_phi3_rotates_a_part_of_a_head(tmp_path: Path) -> None:
    assert load(tmp_path, "phi3", **{"rope.dimension_count": 12}).attentions[0].inv_freq == plain_rope(1e6, 12).inv_freq
    for wrong, message in ((18, "is 18, but only the head size 16"), (7, "a rotated part of a head of 7 is odd")):
        with pytest.raises(LoadError, match=message):
            load(tmp_path, "phi3", **{"rope.dimension_count": wrong})


@pytest.mark.parametrize(("fmt", "quant"), [("f32", "auto"), ("q8_0", "auto"), ("q4_0", "auto"), ("f32", "q8")])
def test_phi3_splits_rows_as_they_are_stored(tmp_path: Path, fmt: str, quant: str) -> None:
    model = load(tmp_path, "phi3", fmt=fmt, quant=quant)
    layer = model.weights.layers[1]
    bands = (layer.attn_q, layer.attn_k, layer.attn_v, layer.ffn_gate, layer.ffn_up)
    assert [weight.shape[0] for weight in bands] == [HIDDEN, KV, KV, INNER, INNER]
    names = ["attn_q", "attn_k", "attn_v", "ffn_gate", "ffn_up"]
    assert [weight.name for weight in bands] == [f"blk.1.{name}.weight" for name in names]
    assert follow_each_other(layer.attn_q, layer.attn_k, layer.attn_v)
    assert follow_each_other(layer.ffn_gate, layer.ffn_up)
    if fmt == "f32" and quant == "auto":
        gate, up = np.split(tensors_of("phi3")["blk.1.ffn_up.weight"], 2)
        assert layer.ffn_gate.data.tobytes() == gate.tobytes()
        assert layer.ffn_up.data.tobytes() == up.tobytes()


def follow_each_other(*weights: Weight) -> bool:
    starts = [weight.data.__array_interface__["data"][0] for weight in weights]
    return all(starts[i] + weights[i].data.nbytes == starts[i + 1] for i in range(len(weights) - 1))


def test_f057_biases_lie_as_q_k_and_v_do(tmp_path: Path) -> None:
    tensors = tensors_of("qwen2")
    bias = load(tmp_path, "qwen2", tensors).weights.layers[1].qkv_bias
    np.testing.assert_array_equal(bias, np.concatenate([tensors[f"blk.1.attn_{part}.bias"] for part in "qkv"]))
    assert load(tmp_path, "llama").weights.layers[1].qkv_bias is None
    more = {f"blk.{layer}.attn_q.bias": np.ones(HIDDEN, np.float32) for layer in (0, 1)}
    with pytest.raises(LoadError, match=r"tensor blk\.0\.attn_k\.bias is missing"):
        load(tmp_path, "llama", tensors_of("llama") | more)
