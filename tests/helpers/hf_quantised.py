"""Folders of small transformers models whose linear maps are quantised, and the model with their exact values."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from tests.helpers.hf_folders import write_safetensors
from tests.helpers.packers import Codes, named, quantised, values_of

# What a linear map reads: maps that read the same have the same order of inputs, as when they are quantised together.
_INPUTS = {"q_proj": "qkv", "k_proj": "qkv", "v_proj": "qkv", "qkv_proj": "qkv", "gate_proj": "up", "up_proj": "up"}


def write_quantised(
    model: PreTrainedModel,
    folder: Path,
    config: Mapping[str, Any],
    pack: Callable[[Codes], dict[str, np.ndarray]],
    *,
    skipped: tuple[str, ...] = (),
    order_of: Callable[[str], object] = lambda module: _INPUTS.get(module.split(".")[-1], module.split(".")[-1]),
    extra: Mapping[str, np.ndarray] | None = None,
    **how: Any,
) -> Path:
    """Rounds the linear maps of the layers of a model to codes, in the model itself too, and writes its folder.

    Args:
        model: float32.
        folder: to write.
        config: the `quantization_config`.
        pack: gives the tensors of one map.
        skipped: ends of the names of maps that stay as they are.
        order_of: maps of a layer for which it is equal have the same scattered groups, with has_order.
        extra: other tensors.
        how: of `packers.quantised`.
    """
    model.save_pretrained(folder)
    tensors: dict[str, np.ndarray] = {}
    maps = {
        name: part
        for name, part in model.named_modules()
        if isinstance(part, torch.nn.Linear) and ".layers." in name and not name.endswith(skipped or ("\0",))
    }
    for name, part in maps.items():
        layer = int(name.split(".layers.")[1].split(".")[0])
        seed = hash_of(f"{layer} {order_of(name)}")
        made = quantised(part.weight.detach().numpy(), seed=seed, **how)
        part.weight.data = torch.from_numpy(values_of(made))
        tensors |= named(name, pack(made))
    for name, value in model.state_dict().items():
        is_tied_head = name == "lm_head.weight" and model.config.tie_word_embeddings
        if name.removesuffix(".weight") not in maps and not is_tied_head:
            tensors[name] = value.numpy()
    write_safetensors(folder / "model.safetensors", tensors | dict(extra or {}))
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": dict(config)}))
    return folder


def hash_of(text: str) -> int:
    """A small number that is the same in every process."""
    return sum((i + 1) * byte for i, byte in enumerate(text.encode()))
