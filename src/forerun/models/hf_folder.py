"""Opens a Hugging Face folder: config.json, safetensors and the tensors' names there.

The weights are used as they lie in the mapped files. Gemma's norms are an exception: stored without the 1 that its code
adds, they get it here, as a GGUF file has it. Quantised matrices are the other: `hf_packed` writes them as blocks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from forerun.errors import LoadError
from forerun.models.column_order import settle_columns
from forerun.models.config import EMBEDDING, HEAD, ModelConfig
from forerun.models.decoder import tensor_shapes
from forerun.models.family import Family
from forerun.models.hf_config import HfModel, read_hf_config
from forerun.models.hf_json import read_object
from forerun.models.hf_packed import packed_modules
from forerun.models.hf_quant import Packing
from forerun.models.hf_text import read_chat_template, read_tokenizer
from forerun.models.opened import OpenModel
from forerun.models.safetensors import StoredTensor, read_folder
from forerun.ops.base import Weight
from forerun.ops.formats import dequantize

CONFIG_FILE = "config.json"

# How the names of the decoder's tensors begin: (of embedding, layers and last norm; of the LM head).
_PLAIN_PREFIXES = (("model.", "lm_head."),)
_PART_PREFIXES = (
    ("language_model.model.", "language_model.lm_head."),
    ("model.language_model.", "lm_head."),
)
_OTHER_PARTS = ("vision_tower.", "multi_modal_projector.", "model.vision_tower.", "model.multi_modal_projector.")
# Frequencies that early releases stored along; the config says them too.
_DERIVED = ".rotary_emb.inv_freq"

_MODULES: Mapping[str, str] = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
# Where attention and feed-forward part are followed by norms.
_POST_NORMED: Mapping[str, str] = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_FUSED: Mapping[str, str] = {"ffn_up": "mlp.gate_up_proj"}


def open_folder(folder: Path, max_len: int | None = None) -> OpenModel:
    """Opens a folder, checks its config and every tensor's name, type and shape.

    Args:
        folder: with config.json and safetensors.
        max_len: the longest text the model will run on; None is its whole context.
    Raises:
        LoadError: a file is missing, malformed or cut short, the model is of a kind or has a setting that is not
            supported, or its tensors are not those the config asks for.
    """
    data = read_object(folder / CONFIG_FILE)
    model = read_hf_config(str(folder / CONFIG_FILE), data, max_len)
    stored = read_folder(folder)
    prefix, head_name = _prefixes(stored, model.is_part)
    packed = {} if model.packing is None else packed_modules(folder, stored, model.packing)
    is_tied = head_name not in packed and _is_tied(stored, model.config, prefix, head_name)
    config = replace(model.config, is_tied=is_tied)
    names = {ours: _name_in_folder(ours, model.family, prefix, head_name) for ours in _shapes(model, config)}
    known = set(names.values()) | ({head_name} if config.is_tied else set())
    known |= {part for name in names.values() if name in packed for part in packed[name].tensor_names}
    _require_no_others(folder, stored, known, model.is_part)
    tensors = {}
    for ours, shape in _shapes(model, config).items():
        module = packed.get(names[ours])
        weight = module.weight(shape) if module else _checked(folder, stored, names[ours], shape)
        adds_one = config.architecture == "gemma3" and ours.endswith("norm.weight")
        tensors[ours] = _plus_one(weight) if adds_one else weight
    settled = settle_columns(tensors, config.num_layers)
    packed_ours = [ours for ours, name in names.items() if name in packed]
    return OpenModel(
        family=model.family,
        config=config,
        tensors=settled,
        read_tokenizer=partial(read_tokenizer, folder, data, config.vocab_size),
        read_chat_template=partial(read_chat_template, folder),
        packing=None if model.packing is None else _described(model.packing, packed_ours, tensors, settled),
    )


def _prefixes(stored: Mapping[str, StoredTensor], is_part: bool) -> tuple[str, str]:
    """(what stands before the names of embedding, layers and last norm; the head's whole name)."""
    options = [*_PART_PREFIXES, *_PLAIN_PREFIXES] if is_part else _PLAIN_PREFIXES
    for prefix, head in options:
        if f"{prefix}embed_tokens.weight" in stored:
            return prefix, f"{head}weight"
    return options[-1][0], f"{options[-1][1]}weight"


def _is_tied(stored: Mapping[str, StoredTensor], config: ModelConfig, prefix: str, head_name: str) -> bool:
    """Whether the embedding is the head (F055). A file that says so but holds another head means that one."""
    head, embedding = stored.get(head_name), stored.get(f"{prefix}embed_tokens.weight")
    if head is None or embedding is None or not config.is_tied:
        return config.is_tied
    return head.dtype == embedding.dtype and np.array_equal(head.data, embedding.data)


def _shapes(model: HfModel, config: ModelConfig) -> dict[str, tuple[int, int]]:
    """(N, K) of every tensor there must be, by our names."""
    shapes = tensor_shapes(model.family, config, ())
    if model.has_output_bias:
        shapes |= {f"blk.{index}.attn_output.bias": (1, config.hidden_size) for index in range(config.num_layers)}
    return shapes


def _name_in_folder(ours: str, family: Family, prefix: str, head_name: str) -> str:
    if ours == EMBEDDING:
        return f"{prefix}embed_tokens.weight"
    if ours == HEAD:
        return head_name
    if not ours.startswith("blk."):
        return f"{prefix}norm.weight"
    _, index, part, kind = ours.split(".")
    is_post_normed = "post_attention_norm" in family.layer_norms
    modules = dict(_MODULES) | dict(_POST_NORMED if is_post_normed else {}) | dict(_FUSED if family.is_fused else {})
    return f"{prefix}layers.{index}.{modules[part]}.{kind}"


def _require_no_others(folder: Path, stored: Mapping[str, StoredTensor], known: set[str], is_part: bool) -> None:
    for name, tensor in stored.items():
        is_other_part = is_part and name.startswith(_OTHER_PARTS)
        if name not in known and not is_other_part and not name.endswith(_DERIVED):
            raise LoadError(f"{tensor.path}: tensor {name} is not part of the architecture as it is supported")


def _checked(folder: Path, stored: Mapping[str, StoredTensor], name: str, shape: tuple[int, int]) -> Weight:
    tensor = stored.get(name)
    if tensor is None:
        raise LoadError(f"{folder}: tensor {name} is missing")
    expected = shape[1:] if name.endswith((".bias", "norm.weight")) else shape
    if tensor.shape != expected:
        raise LoadError(f"{tensor.path}: tensor {name} has shape {tensor.shape}, but {CONFIG_FILE} asks for {expected}")
    return tensor.weight()


def _described(
    packing: Packing, names: Sequence[str], tensors: Mapping[str, Weight], settled: Mapping[str, Weight]
) -> str:
    """How quantised matrices are stored, and how many of them are too unlike any format but float32 to be held in it.

    Args:
        packing: as the config says.
        names: of the quantised matrices.
        tensors, settled: before and after their orders were made to fit.
    """
    order = ", act-order" if any(tensors[name].columns is not None for name in names) else ""
    num_expanded = sum(settled[name].format == "f32" for name in names)
    return f"{packing}{order}" + (f"; {num_expanded} matrices expanded to float32" if num_expanded else "")


def _plus_one(weight: Weight) -> Weight:
    values = dequantize(weight) + 1
    return Weight(weight.name, "f32", weight.shape, values.reshape(-1).view(np.uint8))
