"""Folders as transformers saves them: its logits, those of the GGUF file of the same model, and the native backend's.

Tolerance against transformers: see `test_architectures`. A folder and a GGUF file hold the same float32 weights and
give the same constants, so their logits differ by the order of sums alone: Llama's heads are stored in another order.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel
from transformers.utils import logging

from forerun.models.loader import load_model
from forerun.ops.torch import TorchExecutor
from tests.helpers import hf_models as hf
from tests.helpers.hf_to_gguf import write_hf_gguf
from tests.helpers.native import executor_config, native, text_logits
from tests.helpers.toy_llama import pages_for
from tests.parity.test_architectures import (
    FORMS,
    NUM_TOKENS,
    ORIGINAL,
    SCALINGS,
    TOLERANCE,
    Build,
    executor,
    logits_in_pieces,
    longrope,
    reference_logits,
    tokens_of,
)

GGUF_TOLERANCE = 1e-5
TABLE = pages_for(2 * NUM_TOKENS)

MORE_FORMS: dict[str, Build] = {
    "qwen2, two layers of three with a window": lambda: hf.small_qwen2(
        use_sliding_window=True, sliding_window=7, max_window_layers=1
    ),
    "qwen3, layers told apart": lambda: hf.small_qwen3(
        use_sliding_window=True,
        sliding_window=7,
        layer_types=["full_attention", "sliding_attention", "full_attention"],
    ),
    "qwen3 with biases": lambda: hf.small_qwen3(attention_bias=True),
    "olmo2 with biases": lambda: hf.small_olmo2(attention_bias=True),
    "gemma3 with another scale and yarn": lambda: hf.small_gemma3(
        {"rope_type": "yarn", "rope_theta": 5000.0, "factor": 8.0, "original_max_position_embeddings": ORIGINAL},
        query_pre_attn_scalar=60,
    ),
    "llama with GELU": lambda: hf.small_llama(hidden_act="gelu_pytorch_tanh"),
    "llama, yarn as DeepSeek has it": lambda: hf.small_llama(
        {
            "rope_type": "yarn",
            "rope_theta": 5000.0,
            "factor": 8.0,
            "original_max_position_embeddings": ORIGINAL,
            "mscale": 1.5,
            "mscale_all_dim": 0.5,
        }
    ),
}


@pytest.fixture(autouse=True)
def _quiet_transformers() -> None:
    logging.set_verbosity_error()
    logging.disable_progress_bar()


def saved(model: PreTrainedModel, folder: Path, **options: Any) -> Path:
    model.save_pretrained(folder, **options)
    return folder


def folder_logits(folder: Path, max_len: int | None = None, num_tokens: int = NUM_TOKENS) -> np.ndarray:
    return logits_in_pieces(executor(folder, max_len), tokens_of(num_tokens), [0, num_tokens])


def quantised_logits(path: Path, quant: str) -> np.ndarray:
    model = load_model(path, quant)
    target = TorchExecutor(executor_config(model, "f32", max_rows=NUM_TOKENS), model.forward)
    return logits_in_pieces(target, tokens_of(), [0, NUM_TOKENS])


def assert_close(got: np.ndarray, expected: np.ndarray, tolerance: float = TOLERANCE) -> None:
    np.testing.assert_allclose(got, expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize("build", FORMS.values(), ids=FORMS.keys())
def test_f057_a_folder_equals_transformers_and_the_gguf_file(build: Build, tmp_path: Path) -> None:
    model, folder = build(), tmp_path / "folder"
    got = folder_logits(saved(model, folder))
    assert_close(got, reference_logits(model, tokens_of()))
    write_hf_gguf(model, tmp_path / "model.gguf", writes_head=not model.config.tie_word_embeddings)
    assert_close(got, folder_logits(tmp_path / "model.gguf"), GGUF_TOLERANCE)
    target = native(folder, "scalar", kv_type="f32", max_rows=NUM_TOKENS)
    assert_close(text_logits(target, tokens_of(), TABLE, [NUM_TOKENS]), got)


@pytest.mark.parametrize("build", MORE_FORMS.values(), ids=MORE_FORMS.keys())
def test_what_a_gguf_file_can_not_say(build: Build, tmp_path: Path) -> None:
    model = build()
    got = folder_logits(saved(model, tmp_path))
    assert_close(got, reference_logits(model, tokens_of()))
    target = native(tmp_path, "scalar", kv_type="f32", max_rows=NUM_TOKENS)
    assert_close(text_logits(target, tokens_of(), TABLE, [NUM_TOKENS]), got)


@pytest.mark.parametrize("build", SCALINGS.values(), ids=SCALINGS.keys())
def test_f058_scaled_rope_equals_transformers(build: Build, tmp_path: Path) -> None:
    model = build()
    assert_close(folder_logits(saved(model, tmp_path)), reference_logits(model, tokens_of()))


@pytest.mark.parametrize(
    ("num_tokens", "max_len"), [(ORIGINAL, ORIGINAL), (NUM_TOKENS, ORIGINAL + 1), (NUM_TOKENS, None)]
)
@pytest.mark.parametrize("rotated", [1.0, 0.75])
def test_f058_longrope_takes_its_factors_by_the_length_limit(
    num_tokens: int, max_len: int | None, rotated: float, tmp_path: Path
) -> None:
    rope = longrope(int(16 * rotated)) | {"partial_rotary_factor": rotated}
    model = hf.small_phi3(rope, hidden_size=128, original_max_position_embeddings=ORIGINAL)
    got = folder_logits(saved(model, tmp_path), max_len, num_tokens)
    assert_close(got, reference_logits(model, tokens_of(num_tokens)))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", ["llama", "qwen2 tied", "qwen3", "gemma3", "phi3", "olmo2", "olmo3"])
def test_halves_in_many_files(name: str, dtype: str, tmp_path: Path) -> None:
    model = FORMS[name]().to(getattr(torch, dtype))
    saved(model, tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 3
    loaded = load_model(tmp_path)
    assert {weight.format for weight in loaded.weights.matrices()} == {{"bfloat16": "bf16", "float16": "f16"}[dtype]}
    # Loaded anew, because the frequencies of RoPE were rounded in this one too.
    reference = type(model).from_pretrained(tmp_path, dtype=torch.float32, attn_implementation="eager")
    expected = reference_logits(reference, tokens_of())
    assert_close(folder_logits(tmp_path), expected)
    target = native(tmp_path, "scalar", kv_type="f32", max_rows=NUM_TOKENS)
    assert_close(text_logits(target, tokens_of(), TABLE, [NUM_TOKENS]), expected)


@pytest.mark.parametrize("quant", ["q8", "q4", "bf16", "f32"])
@pytest.mark.parametrize("name", ["llama", "gemma3", "phi3"])
def test_quantised_like_the_gguf_file(name: str, quant: str, tmp_path: Path) -> None:
    model = FORMS[name]()
    saved(model, tmp_path / "folder")
    write_hf_gguf(model, tmp_path / "model.gguf", writes_head=not model.config.tie_word_embeddings)
    folder, file = (load_model(tmp_path / path, quant) for path in ("folder", "model.gguf"))
    assert folder.tensor_formats == file.tensor_formats
    assert folder.weight_bytes == file.weight_bytes
    assert folder.num_parameters == file.num_parameters
    assert_close(*(quantised_logits(tmp_path / path, quant) for path in ("folder", "model.gguf")), GGUF_TOLERANCE)


def rewrite(folder: Path, changes: dict[str, Any], *dropped: str) -> None:
    path = folder / "config.json"
    data = {key: value for key, value in json.loads(path.read_text()).items() if key not in dropped}
    path.write_text(json.dumps(data | changes))


@pytest.mark.parametrize("name", ["llama, as in Llama 3.1", "qwen2, yarn"])
def test_keys_from_before_rope_parameters(name: str, tmp_path: Path) -> None:
    model = SCALINGS[name]()
    saved(model, tmp_path)
    rope = json.loads((tmp_path / "config.json").read_text())["rope_parameters"]
    rope["type"], base = rope.pop("rope_type"), rope.pop("rope_theta")
    rewrite(tmp_path, {"rope_scaling": rope, "rope_theta": base}, "rope_parameters", "layer_types")
    assert_close(folder_logits(tmp_path), reference_logits(model, tokens_of()))


def test_gemma_and_olmo_from_before_layer_types(tmp_path: Path) -> None:
    gemma, olmo = SCALINGS["gemma3, linear"](), SCALINGS["olmo3, yarn"]()
    for model, folder in ((gemma, tmp_path / "gemma"), (olmo, tmp_path / "olmo")):
        saved(model, folder)
        rope = json.loads((folder / "config.json").read_text())["rope_parameters"]["full_attention"]
        base = rope.pop("rope_theta")
        rewrite(folder, {"rope_scaling": rope, "rope_theta": base}, "rope_parameters", "layer_types")
        assert_close(folder_logits(folder), reference_logits(model, tokens_of()))


def test_f055_a_tied_config_with_another_head_means_that_head(tmp_path: Path) -> None:
    model = hf.small_llama()
    saved(model, tmp_path)
    rewrite(tmp_path, {"tie_word_embeddings": True})
    assert_close(folder_logits(tmp_path), reference_logits(model, tokens_of()))
    reloaded = type(model).from_pretrained(tmp_path, attn_implementation="eager")
    assert_close(reference_logits(reloaded, tokens_of()), reference_logits(model, tokens_of()))


def test_old_mistral_has_the_window_of_its_class(tmp_path: Path) -> None:
    saved(hf.small_mistral(sliding_window=None), tmp_path)
    assert load_model(tmp_path).attentions[0].window is None
    rewrite(tmp_path, {"max_position_embeddings": 8192}, "sliding_window")
    assert load_model(tmp_path).attentions[0].window == 4096
