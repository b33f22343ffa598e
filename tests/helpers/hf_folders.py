"""Writes safetensors files and a small random Llama's folder, with a tokenizer and a chat template, byte by byte."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

HIDDEN, INNER, HEADS, KV_HEADS, LAYERS = 32, 48, 4, 2, 2
NAMES = ["<s>", "<|im_start|>", "<|im_end|>", "<|stop|>"]
CORPUS = ["the rain in spain falls mainly on the plain, user and assistant say: the rain in spain"] * 10
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_DTYPES = {"float32": "F32", "float16": "F16", "uint16": "BF16", "int32": "I32", "int64": "I64", "uint8": "U8"}


def header_of(tensors: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """What a header says of arrays that follow each other; 16-bit integers stand for BF16."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, array in tensors.items():
        span = [end, end + array.nbytes]
        header[name] = {"dtype": _DTYPES[array.dtype.name], "shape": list(array.shape), "data_offsets": span}
        end = span[1]
    return header


def write_safetensors(
    path: Path, tensors: Mapping[str, np.ndarray], header: Any = None, data: bytes | None = None
) -> Path:
    """A file; header and data can be others than those of the tensors."""
    stated = header_of(tensors) if header is None else header
    text = stated if isinstance(stated, bytes) else json.dumps(stated).encode()
    body = b"".join(array.tobytes() for array in tensors.values()) if data is None else data
    path.write_bytes(len(text).to_bytes(8, "little") + text + body)
    return path


def tiny_config(**changes: Any) -> dict[str, Any]:
    """A config.json as it was before transformers 5."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "max_position_embeddings": 256,
        "vocab_size": 300,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "tie_word_embeddings": True,
        "eos_token_id": 2,
        "torch_dtype": "float32",
        "use_cache": True,
    } | changes


def tiny_tensors(vocab_size: int = 300, seed: int = 0) -> dict[str, np.ndarray]:
    """Arrays by name, tied."""
    rng, dim = np.random.default_rng(seed), HIDDEN // HEADS

    def matrix(num_rows: int, row_len: int) -> np.ndarray:
        return rng.normal(0.0, 0.3, (num_rows, row_len)).astype(np.float32)

    tensors = {"model.embed_tokens.weight": matrix(vocab_size, HIDDEN)}
    for layer in range(LAYERS):
        parts = {
            "self_attn.q_proj": (HIDDEN, HIDDEN),
            "self_attn.k_proj": (KV_HEADS * dim, HIDDEN),
            "self_attn.v_proj": (KV_HEADS * dim, HIDDEN),
            "self_attn.o_proj": (HIDDEN, HIDDEN),
            "mlp.gate_proj": (INNER, HIDDEN),
            "mlp.up_proj": (INNER, HIDDEN),
            "mlp.down_proj": (HIDDEN, INNER),
        }
        tensors |= {f"model.layers.{layer}.{name}.weight": matrix(*shape) for name, shape in parts.items()}
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"model.layers.{layer}.{norm}.weight"] = rng.uniform(0.5, 1.5, HIDDEN).astype(np.float32)
    return tensors | {"model.norm.weight": np.ones(HIDDEN, np.float32)}


def tiny_tokenizer() -> Tokenizer:
    """Byte-level, trained on a sentence; its control tokens are `NAMES`, ids 0 to 3."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=290, special_tokens=NAMES, show_progress=False, initial_alphabet=alphabet)
    made.train_from_iterator(CORPUS, trainer)
    return made


def write_json(path: Path, data: Any) -> None:
    path.write_text(json.dumps(data), encoding="utf-8")


def write_tiny_folder(folder: Path, **config: Any) -> Path:
    """A whole folder; `config` replaces keys of config.json."""
    folder.mkdir(exist_ok=True)
    write_json(folder / "config.json", tiny_config(**config))
    write_safetensors(folder / "model.safetensors", tiny_tensors())
    (folder / "tokenizer.json").write_text(tiny_tokenizer().to_str(), encoding="utf-8")
    write_json(folder / "tokenizer_config.json", {"eos_token": "<|im_end|>", "chat_template": TEMPLATE})
    return folder
