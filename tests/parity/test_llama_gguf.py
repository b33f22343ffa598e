"""A llama GGUF file gives the logits of the same weights in the layout they were trained in (F057)."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest

from forerun.models.loader import load_model
from forerun.ops.base import ExecutorConfig
from forerun.ops.torch import TorchExecutor
from tests.helpers.gguf_files import tiny_llama_metadata, tiny_llama_tensors, write_gguf, write_tiny_llama
from tests.helpers.toy_llama import chain_batch, pages_for

FORMATS = ("f32", "f16", "q4_0", "q4_1", "q8_0")
EPS = 1e-5
NUM_TOKENS = 200


def logits_of(path: Path, token_ids: list[int]) -> np.ndarray:
    """Logits [M, V] of every position by the reference backend."""
    model = load_model(path)
    pages = pages_for(len(token_ids))
    config = ExecutorConfig(
        vocab_size=model.config.vocab_size,
        hidden_size=model.config.hidden_size,
        num_layers=model.config.num_layers,
        attentions=model.attentions,
        max_rows=len(token_ids),
        num_pages=len(pages),
        kv_type="f32",
    )
    return TorchExecutor(config, model.forward).forward(chain_batch(token_ids, pages)).logits.copy()


def file_rows(matrix: np.ndarray, num_heads: int) -> np.ndarray:
    """Rows in the file's order: row 2i is row i of the head's first half, row 2i + 1 row i of its second."""
    head_dim = matrix.shape[0] // num_heads
    order = np.arange(head_dim).reshape(2, -1).T.reshape(-1)
    return matrix.reshape(num_heads, head_dim, -1)[:, order].reshape(matrix.shape)


def rounded(values: np.ndarray, fmt: str) -> np.ndarray:
    """What a file in this format holds of a tensor. Blocks run along rows, so the order of the rows is all the same."""
    kind = gguf.GGMLQuantizationType[fmt.upper()]
    return values if values.ndim == 1 else gguf.quants.dequantize(gguf.quants.quantize(values, kind), kind)


def reference_logits(
    tensors: dict[str, np.ndarray], token_ids: list[int], num_heads: int, num_kv_heads: int, theta: float
) -> np.ndarray:
    """The plain formulas in float64 on weights in training order, where RoPE pairs i with i + D/2: [M, V]."""
    weights = {name: values.astype(np.float64) for name, values in tensors.items()}
    head = weights.get("output.weight", weights["token_embd.weight"])
    rows = len(token_ids)
    x = weights["token_embd.weight"][token_ids]

    def norm(values: np.ndarray, name: str) -> np.ndarray:
        return values / np.sqrt((values**2).mean(axis=1, keepdims=True) + EPS) * weights[name]

    def turned(flat: np.ndarray) -> np.ndarray:
        dim = weights["blk.0.attn_k.weight"].shape[0] // num_kv_heads
        first, second = np.split(flat.reshape(rows, -1, dim), 2, axis=2)
        angle = np.arange(rows)[:, None, None] * theta ** (-np.arange(dim // 2) * 2 / dim)
        cos, sin = np.cos(angle), np.sin(angle)
        return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=2)

    for layer in range(1 + max(int(name.split(".")[1]) for name in weights if name.startswith("blk."))):
        blk = f"blk.{layer}."
        h = norm(x, blk + "attn_norm.weight")
        q, k, v = (h @ weights[f"{blk}attn_{part}.weight"].T for part in "qkv")
        q, k = turned(q), np.repeat(turned(k), num_heads // num_kv_heads, axis=1)
        v = np.repeat(v.reshape(rows, num_kv_heads, -1), num_heads // num_kv_heads, axis=1)
        scores = np.einsum("ihd,jhd->hij", q, k) / np.sqrt(q.shape[2])
        scores = np.where(np.tri(rows, dtype=bool), scores, -np.inf)
        probs = np.exp(scores - scores.max(axis=2, keepdims=True))
        probs /= probs.sum(axis=2, keepdims=True)
        x = x + np.einsum("hij,jhd->ihd", probs, v).reshape(rows, -1) @ weights[blk + "attn_output.weight"].T
        h = norm(x, blk + "ffn_norm.weight")
        gate, up = h @ weights[blk + "ffn_gate.weight"].T, h @ weights[blk + "ffn_up.weight"].T
        x = x + (gate / (1 + np.exp(-gate)) * up) @ weights[blk + "ffn_down.weight"].T
    return norm(x, "output_norm.weight") @ head.T


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(4, 2), (4, 4), (4, 1)])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("fmt", FORMATS)
def test_f057_file_logits_equal_those_of_the_training_layout(
    tmp_path: Path, num_heads: int, num_kv_heads: int, tied: bool, fmt: str
) -> None:
    tensors = tiny_llama_tensors(num_heads=num_heads, num_kv_heads=num_kv_heads, tied=tied)
    in_file = {
        name: file_rows(values, num_heads if "attn_q" in name else num_kv_heads)
        if "attn_q" in name or "attn_k" in name
        else values
        for name, values in tensors.items()
    }
    metadata = tiny_llama_metadata(num_heads=num_heads, num_kv_heads=num_kv_heads)
    metadata["llama.rope.freq_base"] = 500.0  # so that every pair turns visibly within the test's positions
    path = write_gguf(tmp_path / "model.gguf", metadata, in_file, fmt=fmt)
    token_ids = np.random.default_rng(5).integers(0, 320, NUM_TOKENS).tolist()
    stored = {name: rounded(values, fmt) for name, values in tensors.items()}
    expected = reference_logits(stored, token_ids, num_heads, num_kv_heads, 500.0)
    # float32 against float64 over two layers: about 1e-5 on logits of spread 2.5. Rows of q or k out of place, or a
    # code read wrongly, are off by more than 0.5.
    np.testing.assert_allclose(logits_of(path, token_ids), expected, atol=1e-3, rtol=0)


def test_tiny_models_have_spread_logits(tmp_path: Path) -> None:
    token_ids = np.random.default_rng(7).integers(0, 320, 64).tolist()
    for seed in range(3):
        logits = logits_of(write_tiny_llama(tmp_path / "model.gguf", seed=seed), token_ids)
        assert 2 < logits.std() < 3.5
        # The tied head must not merely repeat the token it was given.
        assert (logits.argmax(axis=1) == token_ids).mean() < 0.5
