"""`quantization_config`: what is read of it, and what is refused by name."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest

from forerun.errors import LoadError
from forerun.models.hf_config import read_hf_config
from forerun.models.hf_json import JsonKeys
from forerun.models.hf_quant import Packing, read_packing
from tests.helpers.hf_folders import tiny_config
from tests.helpers.packers import AWQ, GPTQ, compressed_config


def packing_of(config: Any, key: str = "quantization_config") -> Packing | None:
    return read_packing(JsonKeys("config.json", {key: config}, {}))


# As the tools write them, keys that change nothing included.
AUTO_GPTQ = {
    "batch_size": 1,
    "bits": 4,
    "block_name_to_quantize": None,
    "damp_percent": 0.1,
    "dataset": None,
    "desc_act": True,
    "exllama_config": {"version": 1},
    "group_size": 128,
    "model_file_base_name": "model",
    "pad_token_id": None,
    "quant_method": "gptq",
    "sym": True,
    "tokenizer": None,
    "true_sequential": True,
    "use_cuda_fp16": False,
}
GPTQ_MODEL = {
    "bits": 4,
    "checkpoint_format": "gptq_v2",
    "desc_act": False,
    "dynamic": {"-:.*down_proj": {}},
    "group_size": 32,
    "lm_head": False,
    "meta": {"quantizer": ["gptqmodel:1.4.0"], "static_groups": False},
    "pack_dtype": "int32",
    "quant_method": "gptq",
    "sym": False,
    "is_marlin_format": False,
}


@pytest.mark.parametrize(
    ("config", "packing", "words"),
    [
        (None, None, None),
        (AUTO_GPTQ, Packing("gptq", 4, 128, True, True), "gptq, 4 bits, groups of 128"),
        (GPTQ_MODEL, Packing("gptq", 4, 32, False, False), "gptq, 4 bits, groups of 32"),
        (
            GPTQ | {"bits": 8, "group_size": -1},
            Packing("gptq", 8, None, False, True),
            "gptq, 8 bits, one group per row",
        ),
        ({"quant_method": "gptq", "bits": 4, "group_size": 64}, Packing("gptq", 4, 64, True, True), None),
        (GPTQ | {"format": "gptq_v2"}, Packing("gptq", 4, 128, False, False), None),
        (GPTQ | {"checkpoint_format": "GPTQ"}, Packing("gptq", 4, 128, False, True), None),
        (AWQ, Packing("awq", 4, 128, False), "awq, 4 bits, groups of 128"),
        (AWQ | {"version": "GEMM", "modules_to_not_convert": ["lm_head"]}, Packing("awq", 4, 128, False), None),
        (
            {"quant_method": "awq", "w_bit": 4, "q_group_size": 64, "zero_point": True, "version": "gemm"},
            Packing("awq", 4, 64, False),
            None,
        ),
        (
            compressed_config(),
            Packing("compressed-tensors", 4, 128, False),
            "compressed-tensors, 4 bits, groups of 128",
        ),
        (compressed_config(8, None, True), Packing("compressed-tensors", 8, None, True), None),
        (compressed_config(sparsity_config={"format": "dense"}), Packing("compressed-tensors", 4, 128, False), None),
    ],
)
def test_what_tools_write_is_read(config: Any, packing: Packing | None, words: str | None) -> None:
    assert packing_of(config) == packing
    assert words is None or str(packing) == words


def test_what_transformers_writes_is_read() -> None:
    written = pytest.importorskip("transformers.utils.quantization_config")
    for stated, packing in (
        (written.AwqConfig(bits=4, group_size=64), Packing("awq", 4, 64, False)),
        (written.AwqConfig(bits=4, backend="gemm_triton"), Packing("awq", 4, 128, False)),
        (written.GPTQConfig(bits=4, group_size=64, desc_act=True), Packing("gptq", 4, 64, True, True)),
        (written.GPTQConfig(bits=8, sym=False, format="gptq_v2"), Packing("gptq", 8, 128, False, False)),
    ):
        assert packing_of(json.loads(json.dumps(stated.to_dict()))) == packing


def test_the_older_key_of_compressed_tensors() -> None:
    assert packing_of(compressed_config(), "compression_config") == Packing("compressed-tensors", 4, 128, False)


def compressed_with(path: list[str], value: Any) -> dict[str, Any]:
    config = copy.deepcopy(compressed_config())
    node = config
    for key in path[:-1]:
        node = node[key]
    node[path[-1]] = value
    return config


SCHEME = ["config_groups", "group_0"]


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        ({"quant_method": "fp8"}, "quant_method is 'fp8', but must be one of gptq, awq, compressed-tensors"),
        ({"quant_method": ["gptq"]}, "quant_method is a list of 1, but must be a string"),
        ({"bits": 4}, "quant_method is missing"),
        (GPTQ | {"bits": 3}, "bits is 3, but must be 4 or 8"),
        (GPTQ | {"bits": "4"}, "bits is '4', but must be a whole number"),
        ({"quant_method": "gptq", "group_size": 128}, "bits is missing"),
        (GPTQ | {"group_size": 0}, "group_size is 0, but must be a whole number from 1"),
        (GPTQ | {"group_size": -2}, "group_size is -2, but must be a whole number from 1"),
        (GPTQ | {"group_size": 64.0}, "group_size is 64.0, but must be a whole number from 1"),
        (GPTQ | {"group_size": None}, "group_size is missing"),
        (GPTQ | {"checkpoint_format": "marlin"}, "checkpoint_format is 'marlin', but must be gptq or gptq_v2"),
        (GPTQ | {"checkpoint_format": 2}, "checkpoint_format is 2, but must be gptq or gptq_v2"),
        (GPTQ | {"checkpoint_format": "gptq", "format": "gptq_p"}, "format is 'gptq_p', but must be gptq or gptq_v2"),
        (GPTQ | {"is_marlin_format": True}, "is_marlin_format is True, which is not supported"),
        (GPTQ | {"pack_dtype": "int16"}, "pack_dtype is 'int16', which is not supported"),
        (GPTQ | {"dynamic": {"+:.*up": {"bits": 8}}}, "dynamic has settings of its own for '+:.*up'"),
        (GPTQ | {"dynamic": [1]}, "dynamic is a list of 1, but must be an object"),
        (GPTQ | {"sym": "yes"}, "sym is 'yes', but must be true or false"),
        (AWQ | {"bits": 8}, "bits is 8, but must be 4"),
        (AWQ | {"version": "gemv"}, "version is 'gemv', but must be gemm"),
        (AWQ | {"zero_point": False}, "zero_point is False, which is not supported"),
        (AWQ | {"backend": "llm-awq"}, "backend is 'llm-awq', whose layout is not supported"),
        (compressed_config(2), "weights: key num_bits is 2, but must be 4 or 8"),
        (compressed_config(format="int-quantized"), "format is 'int-quantized', which is not supported"),
        (compressed_config(quantization_status="frozen"), "quantization_status is 'frozen', which is not supported"),
        (compressed_config(kv_cache_scheme={"num_bits": 8}), "kv_cache_scheme is an object, which is not supported"),
        (compressed_config(sparsity_config={"format": "sparse-24-bitmask"}), "sparsity_config: key format is"),
        (compressed_config(config_groups={}), "config_groups has 0 entries, but only one is supported"),
        (compressed_config(config_groups={"a": {}, "b": {}}), "config_groups has 2 entries"),
        (compressed_config(config_groups={"a": None}), "config_groups says nothing of weights"),
        (compressed_config(config_groups={"a": {}}), "config_groups says nothing of weights"),
        (compressed_with([*SCHEME, "input_activations"], {"num_bits": 8}), "input_activations is an object, which is"),
        (compressed_with([*SCHEME, "weights", "type"], "float"), "type is 'float', which is not supported"),
        (compressed_with([*SCHEME, "weights", "strategy"], "block"), "strategy is 'block', which is not supported"),
        (compressed_with([*SCHEME, "weights", "group_size"], None), "group_size is missing"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(config: Any, problem: str) -> None:
    with pytest.raises(LoadError) as caught:
        packing_of(config)
    assert problem in str(caught.value)
    assert str(caught.value).startswith("config.json: quantization_config")


def test_a_model_with_parts_says_it_in_either_place() -> None:
    text = tiny_config(model_type="gemma3_text", head_dim=8, query_pre_attn_scalar=8)
    whole = {"model_type": "gemma3", "text_config": text, "quantization_config": AWQ}
    inner = {"model_type": "gemma3", "text_config": text | {"quantization_config": AWQ}}
    for data in (whole, inner):
        assert read_hf_config("c", data).packing == Packing("awq", 4, 128, False)
    assert read_hf_config("c", {"model_type": "gemma3", "text_config": text}).packing is None
