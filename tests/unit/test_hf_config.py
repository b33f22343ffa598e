from __future__ import annotations

import math
from typing import Any

import pytest

from forerun.errors import LoadError
from forerun.models.hf_config import MODEL_TYPES, HfModel, read_hf_config
from tests.helpers.hf_folders import tiny_config

LONGROPE = {"type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def read(max_len: int | None = None, **changes: Any) -> HfModel:
    return read_hf_config("config.json", tiny_config(**changes), max_len)


def windows(**changes: Any) -> list[int | None]:
    return [spec.window for spec in read(**changes).config.attentions]


def without(*keys: str, **changes: Any) -> dict[str, Any]:
    return {key: value for key, value in tiny_config(**changes).items() if key not in keys}


def test_sizes_and_constants() -> None:
    config = read().config
    assert (config.architecture, config.num_layers, config.hidden_size, config.intermediate_size) == (
        "llama",
        2,
        32,
        48,
    )
    assert (config.num_heads, config.num_kv_heads, config.head_dim, config.vocab_size) == (4, 2, 8, 300)
    assert (config.context_length, config.rms_eps, config.is_tied, config.activation) == (256, 1e-5, True, "silu")
    spec = config.attentions[0]
    assert (spec.rope_style, spec.window, spec.scale) == ("neox", None, 8**-0.5)
    assert spec.inv_freq == pytest.approx([1.0, 0.1, 0.01, 0.001])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"head_dim": 2048}, "key head_dim is 2048, but must be a whole number from 1 to 1024"),
        ({"num_hidden_layers": 4097}, "key num_hidden_layers is 4097, but must be a whole number from 1 to 4096"),
        ({"num_attention_heads": 2**13}, "num_attention_heads is 8192, but must be a whole number from 1 to 4096"),
        ({"hidden_size": 2**31 - 1}, "hidden_size is 2147483647, but must be a whole number from 1 to 131072"),
        ({"intermediate_size": 2**31 - 1}, "intermediate_size is 2147483647, but must be a whole number from 1 to 10"),
        ({"vocab_size": 2**31 - 1}, "vocab_size is 2147483647, but must be a whole number from 1 to 4194304"),
        ({"head_dim": 1024, "num_attention_heads": 16}, "heads of 16384 numbers are not supported with a hidden size"),
        ({"intermediate_size": 32 * 257}, "a feed-forward part of 8224 numbers is not supported with a hidden size"),
    ],
)
def test_sizes_beyond_all_models_are_refused(changes: dict[str, int], message: str) -> None:
    with pytest.raises(LoadError, match=message):
        read(**changes)


def test_absent_keys_are_what_the_classes_say() -> None:
    config = read_hf_config("x", without("num_key_value_heads", "rms_norm_eps", "rope_theta", "hidden_act")).config
    assert (config.num_kv_heads, config.rms_eps, config.activation) == (4, 1e-6, "silu")
    gemma = read_hf_config("x", {"model_type": "gemma3_text"}).config
    assert (gemma.num_layers, gemma.head_dim, gemma.vocab_size, gemma.is_tied) == (26, 256, 262208, True)
    assert [spec.window for spec in gemma.attentions[4:7]] == [4096, None, 4096]
    assert gemma.attentions[0].inv_freq[1] == pytest.approx(10000 ** (-1 / 128))
    assert gemma.attentions[5].inv_freq[1] == pytest.approx(1000000 ** (-1 / 128))
    assert not read_hf_config("x", without("tie_word_embeddings")).config.is_tied


def test_every_default_is_that_of_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    for model_type, kind in MODEL_TYPES.items():
        config = transformers.AutoConfig.for_model(model_type)
        for key, value in kind.defaults.items():
            if key in ("rope_theta", "rope_local_base_freq"):
                rope = config.rope_parameters
                rope = rope.get("full_attention" if key == "rope_theta" else "sliding_attention", rope)
                assert rope["rope_theta"] == value, (model_type, key)
            elif key == "sliding_window_pattern":
                assert config.layer_types.index("full_attention") + 1 == value, model_type
            elif not (key == "sliding_window" and model_type.startswith("qwen")):  # None unless it is used
                assert getattr(config, "hidden_act" if key == "hidden_act" else key) == value, (model_type, key)


@pytest.mark.parametrize("missing", ["hidden_size", "vocab_size", "num_hidden_layers", "max_position_embeddings"])
def test_a_missing_key_is_named(missing: str) -> None:
    with pytest.raises(LoadError, match=f"key {missing} is missing"):
        read_hf_config("x", without(missing))


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"model_type": "mamba"}, "key model_type is 'mamba', which is not supported; supported: gemma3, gemma3_text"),
        ({"model_type": None}, "key model_type is missing"),
        ({"model_type": ["llama"]}, "key model_type is a list of 1, but must be a string"),
        ({"quantization_config": {"quant_method": "bitsandbytes"}}, "quant_method is 'bitsandbytes', but"),
        ({"quantization_config": {}}, "quantization_config: key quant_method is missing"),
        ({"quantization_config": "gptq"}, "key quantization_config is 'gptq', but must be an object"),
        ({"hidden_size": 33}, "hidden size of 33 does not divide into 4 heads"),
        ({"hidden_size": 0}, "key hidden_size is 0"),
        ({"hidden_size": "32"}, "key hidden_size is '32'"),
        ({"hidden_size": True}, "key hidden_size is True"),
        ({"num_key_value_heads": 3}, "can't share 3"),
        ({"num_hidden_layers": 10**9}, "key num_hidden_layers is 1000000000"),
        ({"num_hidden_layers": 10**4000}, "key num_hidden_layers is a huge number"),
        ({"head_dim": 7}, "head size of 7 is odd"),
        ({"head_dim": 2**30}, "key head_dim is 1073741824"),
        ({"rms_norm_eps": math.nan}, "key rms_norm_eps is nan"),
        ({"rms_norm_eps": 0}, "key rms_norm_eps is 0"),
        ({"hidden_act": "relu"}, "key hidden_act is 'relu'"),
        ({"tie_word_embeddings": "yes"}, "key tie_word_embeddings is 'yes'"),
        ({"attention_bias": 1}, "key attention_bias is 1"),
        ({"mlp_bias": True}, "key mlp_bias is True"),
        ({"num_local_experts": 8}, "key num_local_experts is 8"),
        ({"final_logit_softcapping": 30.0}, "key final_logit_softcapping is 30.0"),
        ({"rope_interleaved": True}, "key rope_interleaved is True"),
        ({"sliding_window": 64}, "key sliding_window is 64"),
        ({"query_pre_attn_scalar": 64}, "key query_pre_attn_scalar is 64"),
        ({"model_type": "mistral", "attention_bias": True}, "key attention_bias is True"),
        ({"model_type": "phi3", "attention_bias": True}, "key attention_bias is True"),
        ({"layer_types": ["full_attention"]}, "key layer_types is a list of 1, but must be a list of 2"),
        ({"layer_types": ["full_attention", "linear_attention"]}, "key layer_types has 'linear_attention'"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "key layer_types has 'sliding_attention'"),
        ({"model_type": "mistral", "layer_types": ["full_attention"] * 2}, "key layer_types has 'full_attention'"),
        ({"model_type": "gemma3"}, "key text_config is missing"),
        ({"model_type": "gemma3", "text_config": {"model_type": "llava"}}, "key model_type is 'llava'"),
        ({"model_type": "qwen2", "use_sliding_window": True, "max_window_layers": -1}, "key max_window_layers is -1"),
        ({"model_type": "gemma3_text", "use_bidirectional_attention": True}, "key use_bidirectional_attention is True"),
    ],
)
def test_refused_by_name(changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(LoadError, match=problem) as caught:
        read(**changes)
    assert str(caught.value).startswith("config.json")


@pytest.mark.parametrize(
    ("rope", "problem"),
    [
        ({"rope_type": "dynamic", "factor": 2.0}, "key rope_type is 'dynamic', but must be one of default, linear"),
        ({"type": "ntk"}, "key rope_type is 'ntk'"),
        ({"type": ["yarn"]}, "key rope_type is a list of 1"),
        ({"type": "su"}, "key rope_type is 'su'"),
        ({"type": "linear"}, "key factor is missing"),
        ({"type": "linear", "factor": -1.0}, "key factor is -1.0"),
        ({"type": "linear", "factor": 1e300}, r"key factor is 1e\+300"),
        ({"type": "linear", "factor": 2.0, "mrope_section": [1]}, "key mrope_section is not supported for rope_type"),
        ({"type": "default", "factor": 2.0}, "key factor is not supported for rope_type default"),
        ({"type": "default", "partial_rotary_factor": 0.5}, "key partial_rotary_factor is 0.5"),
        ({"rope_theta": 1.0}, "key rope_theta is 1.0, but must be above 1"),
        (YARN | {"truncate": False}, "key truncate is False"),
        (YARN | {"original_max_position_embeddings": 1}, "key original_max_position_embeddings is 1"),
        (LLAMA3 | {"high_freq_factor": 1.0}, "key high_freq_factor is 1.0, but must be above low_freq_factor"),
        ({**LONGROPE, "short_factor": [1.0] * 3}, "key short_factor is a list of 3, but must be a list of 4"),
        ({**LONGROPE, "long_factor": [1.0, 1.0, 0, 1.0]}, "key long_factor is 0"),
        ({**LONGROPE, "long_factor": None}, "key long_factor is None"),
        ({**LONGROPE, "short_mscale": 1.1}, "key short_mscale is not supported"),
        ({"full_attention": {"rope_type": "default"}}, "key full_attention is not supported"),
        ([], "is a list of 0, but must be an object"),
    ],
)
def test_f058_a_rope_that_is_not_understood_is_refused(rope: Any, problem: str) -> None:
    with pytest.raises(LoadError, match=problem) as caught:
        read(rope_scaling=rope)
    assert "config.json: " in str(caught.value)
    assert "rope_" in str(caught.value)


def test_f058_ropes_told_apart_know_two_kinds_only() -> None:
    kinds = {"full_attention": {"rope_type": "default"}, "chunked_attention": {"rope_type": "default"}}
    with pytest.raises(LoadError, match="has settings for 'chunked_attention'"):
        read(model_type="gemma3_text", rope_parameters=kinds)


def test_windows() -> None:
    assert windows(model_type="mistral", sliding_window=None) == [None, None]
    assert windows(model_type="mistral", sliding_window=16) == [16, 16]
    assert windows(model_type="mistral", sliding_window=256) == [None, None]
    assert windows(model_type="phi3", sliding_window=16) == [16, 16]
    assert windows(model_type="qwen2", sliding_window=16, max_window_layers=1) == [None, None]
    assert windows(model_type="qwen2", use_sliding_window=True, sliding_window=16, max_window_layers=1) == [None, 16]
    assert windows(model_type="gemma3_text", sliding_window=16, sliding_window_pattern=2) == [16, None]
    assert windows(model_type="olmo3", sliding_window=16, num_hidden_layers=4) == [16, 16, 16, None]


def test_phi3_has_its_own_names_of_longrope() -> None:
    rope = {"type": "su", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    stretched = {"model_type": "phi3", "rope_scaling": rope, "original_max_position_embeddings": 64}
    long, short = (read(max_len, **stretched).config.attentions[0] for max_len in (None, 64))
    assert long.inv_freq[0] == 0.5
    assert short.inv_freq[0] == 1.0
    assert long.rope_magnitude == short.rope_magnitude == pytest.approx(math.sqrt(1 + math.log(4) / math.log(64)))


def test_a_rotated_part_may_stand_beside_the_settings() -> None:
    spec = read(model_type="phi3", partial_rotary_factor=0.5).config.attentions[0]
    assert spec.inv_freq == pytest.approx([1.0, 0.01])
    with pytest.raises(LoadError, match="makes RoPE turn 3 numbers"):
        read(model_type="phi3", partial_rotary_factor=0.4)


def test_what_does_not_change_the_computation_is_fine() -> None:
    harmless = {"pretraining_tp": 1, "transformers.js_config": {"dtype": "q4"}, "rope_interleaved": False, "_x": None}
    assert read(**harmless, final_logit_softcapping=None, use_mrope=False).config == read().config


def test_the_text_part_of_gemma3() -> None:
    text = {"model_type": "gemma3_text", "hidden_size": 64, "num_hidden_layers": 7, "sliding_window": 16}
    text["rope_scaling"] = {"rope_type": "linear", "factor": 8.0}
    model = read_hf_config("x", {"model_type": "gemma3", "text_config": text, "vision_config": {}})
    assert model.is_part
    assert model.config.hidden_size == 64
    assert [spec.inv_freq[0] for spec in model.config.attentions[4:6]] == [1.0, 0.125]
