"""Writes tiny random llama GGUF files with a working byte-level BPE vocabulary, for tests without a download.

The reference `gguf` package writes them, so a test that reads them also tests our reader against it.
"""

from __future__ import annotations

import itertools
import random
import string
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")  # ids 0, 1, 2, as in SmolLM2
BOS_ID, EOS_ID, UNKNOWN_ID = 1, 2, 0

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

_TYPES = {
    "f32": gguf.GGMLQuantizationType.F32,
    "f16": gguf.GGMLQuantizationType.F16,
    "bf16": gguf.GGMLQuantizationType.BF16,
    "q4_0": gguf.GGMLQuantizationType.Q4_0,
    "q4_1": gguf.GGMLQuantizationType.Q4_1,
    "q8_0": gguf.GGMLQuantizationType.Q8_0,
}
# Ġ stands for the space byte. Each part is a byte or an earlier merge.
_WORD_MERGES = (
    "Ġ t|h e|i n|Ġ a|r e|o n|Ġt he|e r|Ġ s|a t|e n|Ġ w|i s|o r|i t|Ġ c|o u|Ġ o|Ġ f|n d|"
    "Ġ b|in g|e s|Ġ m|Ġ p|Ġa nd|a n|a l|Ġo f|Ġ in|Ġt o|a r|l l|Ġ h|Ġ d|Ġ l|Ġ is|i c|o m|v e"
)


def byte_tokens() -> list[str]:
    """The printable stand-in of each byte 0 to 255 (GPT-2's table): itself, or one of U+0100 onward."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    spare = itertools.count(256)
    return [chr(byte) if byte in printable else chr(next(spare)) for byte in range(256)]


def _merges() -> Iterator[str]:
    """Distinct merges, best first: some English ones, then all pairs of lower-case letters."""
    seen = set()
    pairs = (f"{a} {b}" for a, b in itertools.product(string.ascii_lowercase, repeat=2))
    for merge in itertools.chain(_WORD_MERGES.split("|"), pairs):
        if (result := merge.replace(" ", "")) not in seen:
            seen.add(result)
            yield merge


def vocabulary(vocab_size: int) -> tuple[list[str], list[str], list[int]]:
    """(tokens, merges, token types): specials, bytes, merges; what is left over is unused padding."""
    num_merges = vocab_size - len(SPECIAL_TOKENS) - 256
    if num_merges < 1:
        raise ValueError(f"vocab_size is {vocab_size}, but must be at least {len(SPECIAL_TOKENS) + 257}")
    merges = list(itertools.islice(_merges(), num_merges))
    padding = [f"<|unused_{i}|>" for i in range(num_merges - len(merges))]
    normal = byte_tokens() + [merge.replace(" ", "") for merge in merges]
    types = [gguf.TokenType.CONTROL] * len(SPECIAL_TOKENS)
    types += [gguf.TokenType.NORMAL] * len(normal) + [gguf.TokenType.UNUSED] * len(padding)
    return [*SPECIAL_TOKENS, *normal, *padding], merges, [int(kind) for kind in types]


def tiny_llama_tensors(
    *,
    num_layers: int = 2,
    hidden_size: int = 64,
    intermediate_size: int = 128,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    vocab_size: int = 320,
    tied: bool = True,
    seed: int = 0,
) -> dict[str, np.ndarray]:
    """Random float32 weights by GGUF name, scaled so that logits have a standard deviation of about 2.5."""
    rng = np.random.default_rng(seed)
    kv_size = hidden_size // num_heads * num_kv_heads

    def matrix(rows: int, cols: int, gain: float) -> np.ndarray:
        return (rng.standard_normal((rows, cols)) * gain / np.sqrt(cols)).astype(np.float32)

    def norm() -> np.ndarray:
        return rng.uniform(0.8, 1.2, hidden_size).astype(np.float32)

    tensors = {"token_embd.weight": matrix(vocab_size, hidden_size, 2.5)}
    for layer in range(num_layers):
        parts = {
            "attn_norm": norm(),
            "attn_q": matrix(hidden_size, hidden_size, 1.5),
            "attn_k": matrix(kv_size, hidden_size, 1.5),
            "attn_v": matrix(kv_size, hidden_size, 1.0),
            "attn_output": matrix(hidden_size, hidden_size, 2.0),
            "ffn_norm": norm(),
            "ffn_gate": matrix(intermediate_size, hidden_size, 1.0),
            "ffn_up": matrix(intermediate_size, hidden_size, 1.0),
            "ffn_down": matrix(hidden_size, intermediate_size, 2.0),
        }
        tensors |= {f"blk.{layer}.{part}.weight": values for part, values in parts.items()}
    tensors["output_norm.weight"] = norm()
    if not tied:
        tensors["output.weight"] = matrix(vocab_size, hidden_size, 2.5)
    return tensors


def tiny_llama_metadata(
    *,
    num_layers: int = 2,
    hidden_size: int = 64,
    intermediate_size: int = 128,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    vocab_size: int = 320,
    context_length: int = 256,
) -> dict[str, Any]:
    """The sizes of such a model as a file states them; for files whose tensors a test has changed."""
    return {
        "llama.block_count": num_layers,
        "llama.context_length": context_length,
        "llama.embedding_length": hidden_size,
        "llama.feed_forward_length": intermediate_size,
        "llama.attention.head_count": num_heads,
        "llama.attention.head_count_kv": num_kv_heads,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.rope.freq_base": 10000.0,
        "llama.rope.dimension_count": hidden_size // num_heads,
        "llama.vocab_size": vocab_size,
    }


def write_tiny_llama(
    path: str | Path,
    *,
    fmt: str = "f32",
    num_layers: int = 2,
    hidden_size: int = 64,
    intermediate_size: int = 128,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    vocab_size: int = 320,
    context_length: int = 256,
    tied: bool = True,
    seed: int = 0,
    head_fmt: str | None = None,
    order_seed: int | None = None,
) -> Path:
    """Writes one random llama model with a tokenizer and a ChatML template.

    Args:
        path: the file to write.
        fmt: `f32`, `f16`, `q4_0`, `q4_1` or `q8_0`, the format of every matrix; norms are always f32.
        num_layers: transformer layers; this and the other sizes go into the file as they are.
        hidden_size: a multiple of num_heads, and of 32 for the quantised formats.
        intermediate_size: a multiple of 32 for the quantised formats.
        num_heads: query heads, a multiple of num_kv_heads.
        num_kv_heads: key and value heads.
        vocab_size: at least 260; sizes past the merges known here are filled with unused tokens.
        context_length: the limit the file states.
        tied: leaves `output.weight` out, so the embedding is the LM head too.
        seed: of the weights.
        head_fmt: format of the embedding and of `output.weight`; None is `fmt`.
        order_seed: gives the ordinary tokens other ids.
    Returns:
        The path.
    """
    tensors = tiny_llama_tensors(
        num_layers=num_layers,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        vocab_size=vocab_size,
        tied=tied,
        seed=seed,
    )
    metadata = tiny_llama_metadata(
        num_layers=num_layers,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        vocab_size=vocab_size,
        context_length=context_length,
    )
    formats = dict.fromkeys(("token_embd.weight", "output.weight"), head_fmt or fmt)
    return write_gguf(path, metadata, tensors, fmt=fmt, formats=formats, vocab_size=vocab_size, order_seed=order_seed)


def write_gguf(
    path: str | Path,
    metadata: Mapping[str, Any],
    tensors: Mapping[str, np.ndarray],
    *,
    fmt: str = "f32",
    formats: Mapping[str, str] | None = None,
    vocab_size: int | None = None,
    architecture: str = "llama",
    order_seed: int | None = None,
) -> Path:
    """Writes the given float32 tensors, matrices in `fmt` (or `formats[name]`), and a vocabulary if a size is given."""
    path = Path(path)
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_name("tiny random llama")
    for key, value in metadata.items():
        _add_value(writer, key, value)
    if vocab_size is not None:
        _add_vocabulary(writer, vocab_size, order_seed)
    for name, values in tensors.items():
        kind = _TYPES[(formats or {}).get(name, fmt) if values.ndim > 1 else "f32"]
        writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_value(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def _add_vocabulary(writer: gguf.GGUFWriter, vocab_size: int, order_seed: int | None) -> None:
    tokens, merges, types = vocabulary(vocab_size)
    if order_seed is not None:
        normal = tokens[len(SPECIAL_TOKENS) :]
        random.Random(order_seed).shuffle(normal)
        tokens = [*SPECIAL_TOKENS, *normal]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges(merges)
    writer.add_bos_token_id(BOS_ID)
    writer.add_eos_token_id(EOS_ID)
    writer.add_unk_token_id(UNKNOWN_ID)
    writer.add_pad_token_id(EOS_ID)
    writer.add_add_bos_token(False)
    writer.add_add_space_prefix(False)
    writer.add_chat_template(CHAT_TEMPLATE)
