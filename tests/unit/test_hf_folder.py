from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from forerun.errors import LoadError
from forerun.models.hf_folder import open_folder
from forerun.models.loader import load_model
from forerun.ops.formats import dequantize
from tests.helpers.hf_folders import (
    HIDDEN,
    TEMPLATE,
    tiny_config,
    tiny_tensors,
    write_json,
    write_safetensors,
    write_tiny_folder,
)

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
END, STOP = 2, 3


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_tiny_folder(tmp_path / "tiny")


def with_tensors(folder: Path, changes: dict[str, np.ndarray | None], **config: Any) -> Path:
    """The folder with other tensors; None takes one out."""
    tensors = {name: array for name, array in (tiny_tensors() | changes).items() if array is not None}
    write_safetensors(folder / "model.safetensors", tensors)
    write_json(folder / "config.json", tiny_config(**config))
    return folder


def refusal(folder: Path) -> str:
    with pytest.raises(LoadError) as caught:
        load_model(folder)
    assert str(folder) in str(caught.value)
    return str(caught.value)


def test_a_tied_model(folder: Path) -> None:
    model = load_model(folder)
    assert model.path == folder
    assert model.config.is_tied
    assert model.weights.head is model.weights.embedding
    np.testing.assert_array_equal(dequantize(model.weights.layers[1].attn_k), _tensor(1, "self_attn.k_proj"))
    np.testing.assert_array_equal(model.weights.layers[1].ffn_norm, _tensor(1, "post_attention_layernorm"))


def _tensor(layer: int, module: str) -> np.ndarray:
    return tiny_tensors()[f"model.layers.{layer}.{module}.weight"]


@pytest.mark.parametrize(
    ("says_tied", "head", "is_tied"),
    [
        (True, "same", True),
        (True, "other", False),
        (False, "same", False),
        (False, "other", False),
    ],
)
def test_f055_a_head_beside_the_embedding(folder: Path, says_tied: bool, head: str, is_tied: bool) -> None:
    array = tiny_tensors()[EMBEDDING] * (1 if head == "same" else 2)
    model = load_model(with_tensors(folder, {HEAD: array}, tie_word_embeddings=says_tied))
    assert model.config.is_tied == is_tied
    np.testing.assert_array_equal(dequantize(model.weights.head), array)


def test_f055_an_untied_model_without_a_head_is_refused(folder: Path) -> None:
    assert "tensor lm_head.weight is missing" in refusal(with_tensors(folder, {}, tie_word_embeddings=False))


@pytest.mark.parametrize(
    ("changes", "config", "problem"),
    [
        ({"model.layers.1.mlp.up_proj.weight": None}, {}, "tensor model.layers.1.mlp.up_proj.weight is missing"),
        ({EMBEDDING: None}, {}, "tensor model.embed_tokens.weight is missing"),
        ({"model.norm.weight": None}, {}, "tensor model.norm.weight is missing"),
        ({"model.layers.2.mlp.up_proj.weight": np.ones((2, 2), np.float32)}, {}, "tensor model.layers.2.mlp.up_proj"),
        ({"model.layers.0.self_attn.q_proj.bias": np.ones(HIDDEN, np.float32)}, {}, "q_proj.bias is not part"),
        ({}, {"attention_bias": True}, "tensor model.layers.0.self_attn.q_proj.bias is missing"),
        ({}, {"num_hidden_layers": 3}, "tensor model.layers.2.self_attn.q_proj.weight is missing"),
        ({}, {"vocab_size": 299}, r"shape (300, 32), but config.json asks for (299, 32)"),
        ({}, {"intermediate_size": 47}, r"shape (48, 32), but config.json asks for (47, 32)"),
        ({"model.norm.weight": np.ones((1, HIDDEN), np.float32)}, {}, "asks for (32,)"),
        ({"model.norm.weight": np.ones(HIDDEN, np.int64)}, {}, "tensor model.norm.weight has dtype I64"),
    ],
)
def test_tensors_that_do_not_fit(
    folder: Path, changes: dict[str, np.ndarray | None], config: dict[str, Any], problem: str
) -> None:
    assert problem in refusal(with_tensors(folder, changes, **config))


def test_an_output_bias_is_asked_for_in_every_layer(folder: Path) -> None:
    sizes = {"q": HIDDEN, "k": HIDDEN // 2, "v": HIDDEN // 2, "o": HIDDEN}
    names = {f"model.layers.{i}.self_attn.{part}_proj.bias": sizes[part] for i in (0, 1) for part in sizes}
    biases: dict[str, Any] = {name: np.ones(size, np.float32) for name, size in names.items()}
    assert load_model(with_tensors(folder, biases, attention_bias=True)).weights.layers[1].attn_output_bias is not None
    missing = "model.layers.1.self_attn.o_proj.bias"
    assert f"tensor {missing} is missing" in refusal(
        with_tensors(folder, biases | {missing: None}, attention_bias=True)
    )


def test_frequencies_that_were_stored_along_are_left_out(folder: Path) -> None:
    extra: dict[str, Any] = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(4, np.float32)}
    assert load_model(with_tensors(folder, extra)).num_parameters == load_model(with_tensors(folder, {})).num_parameters


@pytest.mark.parametrize("before", ["language_model.model.", "model.language_model.", "model."])
def test_the_text_part_of_gemma3_under_each_of_its_names(tmp_path: Path, before: str) -> None:
    text = tiny_config(model_type="gemma3_text", head_dim=8, query_pre_attn_scalar=8, rope_theta=5000.0)
    write_json(tmp_path / "config.json", {"model_type": "gemma3", "text_config": text})
    ones = np.full(8, 0.5, np.float32)
    plain = tiny_tensors()
    for i in (0, 1):
        names = ("self_attn.q_norm", "self_attn.k_norm")
        plain |= {f"model.layers.{i}.{name}.weight": ones for name in names}
        names = ("pre_feedforward_layernorm", "post_feedforward_layernorm")
        plain |= {f"model.layers.{i}.{name}.weight": np.full(HIDDEN, 0.25, np.float32) for name in names}
    tensors = {before + name.removeprefix("model."): array for name, array in plain.items()}
    others = {
        "vision_tower.patch.weight": np.ones((2, 2, 2), np.float32),
        "model.multi_modal_projector.weight": np.ones((2, 2), np.float32),
    }
    write_safetensors(tmp_path / "model.safetensors", tensors | others)
    model = load_model(tmp_path)
    assert model.config.architecture == "gemma3"
    np.testing.assert_array_equal(model.weights.layers[0].attn_q_norm, ones + 1)
    np.testing.assert_array_equal(model.weights.layers[0].ffn_norm, np.full(HIDDEN, 1.25))


def test_other_parts_belong_to_models_that_have_them(folder: Path) -> None:
    extra: dict[str, Any] = {"vision_tower.patch.weight": np.ones((2, 2), np.float32)}
    assert "tensor vision_tower.patch.weight is not part" in refusal(with_tensors(folder, extra))


def test_fused_tensors_are_views_of_the_file(tmp_path: Path) -> None:
    config = tiny_config(model_type="phi3", num_hidden_layers=1)
    tensors = {name: array for name, array in tiny_tensors().items() if ".layers." not in name or "norm" in name}
    tensors = {name: array for name, array in tensors.items() if ".layers.1." not in name}
    prefix = "model.layers.0."
    tensors |= {
        f"{prefix}self_attn.qkv_proj.weight": np.ones((64, HIDDEN), np.float32),
        f"{prefix}self_attn.o_proj.weight": np.ones((HIDDEN, HIDDEN), np.float32),
        f"{prefix}mlp.gate_up_proj.weight": np.ones((96, HIDDEN), np.float32),
        f"{prefix}mlp.down_proj.weight": np.ones((HIDDEN, 48), np.float32),
    }
    write_json(tmp_path / "config.json", config)
    write_safetensors(tmp_path / "model.safetensors", tensors)
    opened = open_folder(tmp_path)
    stored, layer = opened.tensors["blk.0.attn_qkv.weight"].data, load_model(tmp_path).weights.layers[0]
    assert not stored.flags.writeable
    for part, num_rows in ((layer.attn_q, 32), (layer.attn_k, 16), (layer.attn_v, 16), (layer.ffn_up, 48)):
        assert part.shape == (num_rows, HIDDEN)
        assert not part.data.flags.owndata
        assert not part.data.flags.writeable


@pytest.mark.parametrize("missing", ["config.json", "model.safetensors"])
def test_a_missing_file(folder: Path, missing: str) -> None:
    (folder / missing).unlink()
    assert missing in refusal(folder)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"{", "is not valid JSON"),
        (b"[]", "must be a JSON object"),
        (b"\xff", "is not UTF-8 text"),
        (b'{"model_type": "llama", "model_type": "llama"}', "key 'model_type' occurs twice"),
    ],
)
def test_a_config_that_is_none(folder: Path, content: bytes, problem: str) -> None:
    (folder / "config.json").write_bytes(content)
    message = refusal(folder)
    assert problem in message
    assert "config.json" in message


def test_every_end_that_generation_config_names_counts(folder: Path) -> None:
    assert load_model(folder).read_tokenizer().eos_ids == (END,)
    write_json(folder / "generation_config.json", {"eos_token_id": [STOP, 1]})
    tokenizer = load_model(folder).read_tokenizer()
    assert set(tokenizer.eos_ids) == {STOP, 1, END}
    assert tokenizer.eos_ids[0] == END  # what the tokenizer itself calls its end
    assert tokenizer.vocab_size == 300


def test_the_ends_of_config_json_count_where_generation_config_has_none(folder: Path) -> None:
    write_json(folder / "config.json", tiny_config(eos_token_id=[STOP]))
    assert set(load_model(folder).read_tokenizer().eos_ids) == {STOP, END}
    write_json(folder / "generation_config.json", {"eos_token_id": 1})
    assert set(load_model(folder).read_tokenizer().eos_ids) == {1, END}


@pytest.mark.parametrize("ends", ["2", [2, "3"], [2.0], {"id": 2}, True])
def test_ends_that_are_no_ids(folder: Path, ends: Any) -> None:
    write_json(folder / "generation_config.json", {"eos_token_id": ends})
    with pytest.raises(LoadError, match=r"eos_token_id in generation_config\.json is"):
        load_model(folder).read_tokenizer()


def test_special_tokens_map_fills_what_tokenizer_config_leaves_open(folder: Path) -> None:
    write_json(folder / "special_tokens_map.json", {"bos_token": {"content": "<s>"}, "eos_token": "<|stop|>"})
    write_json(folder / "tokenizer_config.json", {"bos_token": None, "eos_token": "<|im_end|>", "add_bos_token": True})
    tokenizer = load_model(folder).read_tokenizer()
    assert (tokenizer.bos_id, tokenizer.adds_bos, tokenizer.eos_ids[0]) == (0, True, END)


def test_a_folder_without_tokenizer_json_says_so(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    with pytest.raises(LoadError, match=r"has no tokenizer\.json"):
        load_model(folder).read_tokenizer()


def test_control_tokens_without_a_row_are_left_out_and_others_refused(folder: Path) -> None:
    data = json.loads((folder / "tokenizer.json").read_text())
    extra = data["added_tokens"][-1] | {"id": 300, "content": "<image>"}
    data["added_tokens"].append(extra)
    write_json(folder / "tokenizer.json", data)
    tokenizer = load_model(folder).read_tokenizer()
    assert tokenizer.vocab_size == 300
    assert "<image>" not in tokenizer.special_tokens
    extra["special"] = False
    write_json(folder / "tokenizer.json", data)
    with pytest.raises(LoadError, match=r"tokenizer\.json has 301 tokens, but the embedding only 300 rows"):
        load_model(folder).read_tokenizer()
    del data["added_tokens"]
    data["model"]["vocab"]["other"] = 300
    write_json(folder / "tokenizer.json", data)
    with pytest.raises(LoadError, match=r"tokenizer\.json has 301 tokens, but the embedding only 300 rows"):
        load_model(folder).read_tokenizer()


def template_of(folder: Path) -> str | None:
    model = load_model(folder)
    template = model.read_chat_template(model.read_tokenizer())
    return None if template is None else template.render([{"role": "user", "content": "hi"}])


def test_where_a_chat_template_is_found(folder: Path) -> None:
    config = folder / "tokenizer_config.json"
    assert template_of(folder) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "{{ eos_token }}"}]
    write_json(config, {"eos_token": "<|stop|>", "chat_template": named})
    assert template_of(folder) == "<|stop|>"
    (folder / "chat_template.jinja").write_text("from the file {{ messages[0].content }}")
    assert template_of(folder) == "from the file hi"
    (folder / "chat_template.jinja").unlink()
    write_json(config, {"eos_token": "<|stop|>"})
    assert template_of(folder) is None


@pytest.mark.parametrize(
    ("stated", "problem"),
    [
        ([{"name": "tool_use", "template": TEMPLATE}], "has tool_use, but no default"),
        ([], "has nothing, but no default"),
        (["default"], "has nothing, but no default"),
        ([{"name": "default", "template": 3}], "is 3, but must be a string"),
        (3, "is 3, but must be a string"),
    ],
)
def test_a_chat_template_that_is_none(folder: Path, stated: Any, problem: str) -> None:
    write_json(folder / "tokenizer_config.json", {"chat_template": stated})
    with pytest.raises(LoadError, match=problem):
        template_of(folder)
