"""Folders of GPTQ, AWQ and compressed-tensors against transformers with the same weights in float32.

Tolerance: that of `test_architectures`; the weights are the same numbers, so only the order of sums differs. A zero
point that is off by one or an order that is left out shows as more than 0.1.
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from transformers import PreTrainedModel
from transformers.utils import logging

from forerun._native import available_isas
from forerun.errors import LoadError
from forerun.models.loader import LoadedModel, load_model
from tests.helpers import hf_models as hf
from tests.helpers.hf_folders import write_safetensors
from tests.helpers.hf_quantised import write_quantised
from tests.helpers.native import assert_same_bits, native, text_logits
from tests.helpers.packers import (
    AWQ,
    GPTQ,
    compressed_config,
    named,
    pack_awq,
    pack_compressed,
    pack_gptq,
    quantised,
    values_of,
)
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


# ---- what else is in such folders ------------------------------------------------------------------------------------

ACT_ORDER, _PACK, ACT_ORDER_HOW, _FORMATS = METHODS["gptq, act-order"]


def check(folder: Path, model: PreTrainedModel) -> LoadedModel:
    """Both backends compute what the model computes."""
    expected = reference_logits(model, tokens_of())
    assert_close(logits_in_pieces(executor(folder), tokens_of(), [0, NUM_TOKENS]), expected)
    target = native(folder, "scalar", kv_type="f32", quant="f32", max_rows=NUM_TOKENS)
    assert_close(text_logits(target, tokens_of(), TABLE, [NUM_TOKENS]), expected)
    text_logits(native(folder, "scalar"), tokens_of()[:3], TABLE, [3])
    return load_model(folder)


def test_act_order_is_named_and_costs_no_bytes(tmp_path: Path) -> None:
    plain, ordered = tmp_path / "plain", tmp_path / "ordered"
    write_quantised(MODELS["llama"](), plain, *METHODS["gptq"][:2], **METHODS["gptq"][2])
    write_quantised(MODELS["llama"](), ordered, ACT_ORDER, pack_gptq, **ACT_ORDER_HOW)
    assert load_model(plain).packing == "gptq, 4 bits, groups of 64"
    assert load_model(ordered).packing == "gptq, 4 bits, groups of 64, act-order"
    assert load_model(ordered).weight_bytes == load_model(plain).weight_bytes
    layer = load_model(ordered).weights.layers[0]
    assert layer.attn_q.columns is not None
    assert layer.attn_output.columns is not None
    assert layer.ffn_down.columns is None  # in the order of the rows of gate and up


@pytest.mark.parametrize("name", ["llama", "phi3"])
@pytest.mark.parametrize("skipped", [("v_proj", "up_proj", "o_proj"), ("down_proj",), ("q_proj", "k_proj", "v_proj")])
def test_matrices_that_were_not_quantised(name: str, skipped: tuple[str, ...], tmp_path: Path) -> None:
    model = MODELS[name]()
    write_quantised(model, tmp_path, ACT_ORDER, pack_gptq, skipped=skipped, **ACT_ORDER_HOW)
    loaded = check(tmp_path, model)
    # What lies beside a matrix that has no order gives up its own.
    assert loaded.packing is not None
    if name == "llama" and "v_proj" in skipped and "q_proj" not in skipped:
        assert loaded.packing == "gptq, 4 bits, groups of 64, act-order; 9 matrices expanded to float32"
    else:
        assert loaded.packing == "gptq, 4 bits, groups of 64, act-order"


def test_orders_that_disagree_are_expanded_and_said(tmp_path: Path) -> None:
    model = MODELS["qwen2"]()
    write_quantised(model, tmp_path, ACT_ORDER, pack_gptq, order_of=lambda module: module, **ACT_ORDER_HOW)
    loaded = check(tmp_path, model)
    assert loaded.packing == "gptq, 4 bits, groups of 64, act-order; 15 matrices expanded to float32"
    assert loaded.tensor_formats["q5_0"] == 6  # o and down of each layer


@pytest.mark.parametrize("is_said_tied", [False, True])
def test_a_quantised_head(is_said_tied: bool, tmp_path: Path) -> None:
    """It is the head whatever the config says (F055)."""
    model = MODELS["llama"]()
    made = quantised(model.lm_head.weight.detach().numpy(), 64, has_order=True)
    head = named("lm_head", pack_gptq(made))
    write_quantised(model, tmp_path, ACT_ORDER | {"lm_head": True}, pack_gptq, **ACT_ORDER_HOW)
    tensors = {name: tensor for name, tensor in read_arrays(tmp_path).items() if name != "lm_head.weight"}
    write_safetensors(tmp_path / "model.safetensors", tensors | head)
    if is_said_tied:
        rewrite(tmp_path, tie_word_embeddings=True)
    model.lm_head.weight.data = torch.from_numpy(values_of(made))
    loaded = check(tmp_path, model)
    assert not loaded.config.is_tied
    assert loaded.weights.head.format == "q5_0"


def test_biases_that_add_nothing_are_left_out_and_others_refused(tmp_path: Path) -> None:
    """Early tools gave every linear map a bias."""
    model = MODELS["llama"]()
    sizes = {"self_attn.q_proj": 128, "self_attn.o_proj": 128, "mlp.gate_proj": 192, "mlp.down_proj": 128}
    zeros = {
        f"model.layers.{i}.{module}.bias": np.zeros(size, np.float16)
        for i in range(3)
        for module, size in sizes.items()
    }
    write_quantised(model, tmp_path, ACT_ORDER, pack_gptq, extra=zeros, **ACT_ORDER_HOW)
    check(tmp_path, model)
    zeros["model.layers.1.mlp.down_proj.bias"][7] = 0.25
    write_safetensors(tmp_path / "model.safetensors", read_arrays(tmp_path) | zeros)
    with pytest.raises(LoadError, match=r"tensor model\.layers\.1\.mlp\.down_proj\.bias is not part of the arch"):
        load_model(tmp_path)


def test_a_folder_without_its_config_or_tensors(tmp_path: Path) -> None:
    write_quantised(MODELS["llama"](), tmp_path, ACT_ORDER, pack_gptq, **ACT_ORDER_HOW)
    tensors = read_arrays(tmp_path)
    del tensors["model.layers.2.mlp.up_proj.scales"]
    write_safetensors(tmp_path / "model.safetensors", tensors)
    with pytest.raises(LoadError, match=r"tensor model\.layers\.2\.mlp\.up_proj\.scales is missing"):
        load_model(tmp_path)
    rewrite(tmp_path, quantization_config=None)
    with pytest.raises(LoadError, match=r"tensor model\.layers\.\S+ is not part of the architecture"):
        load_model(tmp_path)


def read_arrays(folder: Path) -> dict[str, np.ndarray]:
    """Copies, by a reader that is not ours."""
    return dict(load_file(folder / "model.safetensors"))


def rewrite(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
