"""Folders of GPTQ, AWQ and compressed-tensors against transformers with the same weights in float32.

Tolerance: that of `test_architectures`; the weights are the same numbers, so only the order of sums differs. A zero
point that is off by one or an order that is left out shows as more than 0.1.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers.utils import logging

from forerun._native import available_isas
from forerun.models.loader import load_model
from tests.helpers import hf_models as hf
from tests.helpers.hf_quantised import write_quantised
from tests.helpers.native import assert_same_bits, native, text_logits
from tests.helpers.packers import AWQ, GPTQ, compressed_config, pack_awq, pack_compressed, pack_gptq
from tests.helpers.toy_llama import pages_for
from tests.parity.test_architectures import (
    NUM_TOKENS,
    TOLERANCE,
    executor,
    logits_in_pieces,
    reference_logits,
    tokens_of,
)

TABLE = pages_for(2 * NUM_TOKENS)
SIZES: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 192, "head_dim": 32}
MODELS = {
    "llama": lambda: hf.small_llama(**SIZES),
    "llama with biases": lambda: hf.small_llama(attention_bias=True, **SIZES),
    "qwen2": lambda: hf.small_qwen2(hidden_size=128, intermediate_size=192, tie_word_embeddings=True),
    "phi3": lambda: hf.small_phi3(hidden_size=128, intermediate_size=192),
}
# config, packer, how the weights are rounded, formats of the matrices of a layer
V2 = partial(pack_gptq, checkpoint_format="gptq_v2")
METHODS: dict[str, tuple[dict[str, Any], Any, dict[str, Any], set[str]]] = {
    "gptq": (GPTQ | {"group_size": 64}, pack_gptq, {"group_size": 64}, {"q5_0"}),
    "gptq symmetric": (GPTQ | {"group_size": 32, "sym": True}, pack_gptq, {"is_symmetric": True}, {"q4_0"}),
    "gptq_v2, a group per row": (
        GPTQ | {"group_size": -1, "checkpoint_format": "gptq_v2"},
        V2,
        {"group_size": None},
        {"q5_0"},
    ),
    "gptq, act-order": (
        GPTQ | {"group_size": 64, "desc_act": True},
        pack_gptq,
        {"group_size": 64, "has_order": True},
        {"q5_0"},
    ),
    "gptq symmetric, act-order": (
        GPTQ | {"group_size": 32, "desc_act": True, "sym": True},
        pack_gptq,
        {"is_symmetric": True, "has_order": True},
        {"q4_0"},
    ),
    "gptq, 8 bits": (
        GPTQ | {"bits": 8, "group_size": 32, "sym": True},
        pack_gptq,
        {"num_bits": 8, "is_symmetric": True},
        {"q8_0"},
    ),
    "gptq, 8 bits, any zero point": (GPTQ | {"bits": 8, "group_size": 32}, pack_gptq, {"num_bits": 8}, {"f32"}),
    "awq": (AWQ | {"group_size": 64}, pack_awq, {"group_size": 64}, {"q5_0"}),
    "compressed-tensors": (
        compressed_config(4, 32, True),
        partial(pack_compressed, is_symmetric=True),
        {"is_symmetric": True},
        {"q4_0"},
    ),
    "compressed-tensors, any zero point, an order": (
        compressed_config(4, 64),
        partial(pack_compressed, writes_order=True),
        {"group_size": 64, "has_order": True},
        {"q5_0"},
    ),
}


@pytest.fixture(autouse=True)
def _quiet_transformers() -> None:
    logging.set_verbosity_error()
    logging.disable_progress_bar()


def assert_close(got: np.ndarray, expected: np.ndarray, tolerance: float = TOLERANCE) -> None:
    np.testing.assert_allclose(got, expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", MODELS)
def test_the_logits_are_those_of_the_same_weights_in_float32(name: str, method: str, tmp_path: Path) -> None:
    config, pack, how, formats = METHODS[method]
    model = MODELS[name]()
    write_quantised(model, tmp_path, config, pack, **how)
    loaded = load_model(tmp_path)
    in_layers = [weight.format for layer in loaded.weights.layers for weight in (layer.attn_q, layer.ffn_down)]
    assert set(in_layers) == formats
    expected = reference_logits(model, tokens_of())
    assert_close(logits_in_pieces(executor(tmp_path), tokens_of(), [0, NUM_TOKENS]), expected)
    target = native(tmp_path, "scalar", kv_type="f32", quant="f32", max_rows=NUM_TOKENS)
    assert_close(text_logits(target, tokens_of(), TABLE, [NUM_TOKENS]), expected)
    # Packed: activations have eight bits then, which moves these logits by some 5 % of their size.
    packed = text_logits(native(tmp_path, "scalar", kv_type="f32"), tokens_of(), TABLE, [10])
    assert np.abs(packed - expected).mean() < 0.1 * np.abs(expected).mean()


@pytest.mark.parametrize("method", ["gptq, act-order", "gptq symmetric, act-order", "awq"])
def test_one_set_of_bits(method: str, tmp_path: Path) -> None:
    config, pack, how, _ = METHODS[method]
    write_quantised(MODELS["llama with biases"](), tmp_path, config, pack, **how)
    tokens = tokens_of()[:41]
    want = text_logits(native(tmp_path, "scalar"), tokens, TABLE, [41])
    for isa in available_isas():
        for threads in (1, 2):
            for sizes in ([41], [1], [2, 3, 5, 7, 24], [17, 24]):
                got = text_logits(native(tmp_path, isa, threads), tokens, TABLE, sizes)
                assert_same_bits(got, want, (isa, threads, sizes))
