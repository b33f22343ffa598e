"""The sizes and constants of a model, read from GGUF metadata and checked before anything is built from them.

What this version does not compute is refused by name: a model that runs with a setting ignored gives fluent nonsense.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from forerun.errors import LoadError
from forerun.models.gguf import GgufFile, MetadataValue

MAX_POSITION = 2**31 - 1  # positions travel as int32

_EMBEDDING = "token_embd.weight"
_HEAD = "output.weight"

# Settings that would change the computation, and the values under which they don't. Absent is always fine.
_ONLY_NEUTRAL: Mapping[str, tuple[MetadataValue, ...]] = {
    "rope.scaling.type": ("none",),
    "rope.scaling.factor": (1.0,),
    "rope.scale_linear": (1.0,),
    "expert_count": (0,),
    "attention.causal": (True,),
    "attention.scale": (),
    "attention.clamp_kqv": (0.0,),
    "attn_logit_softcapping": (0.0,),
    "final_logit_softcapping": (0.0,),
    "logit_scale": (1.0,),
    "embedding_scale": (1.0,),
    "residual_scale": (1.0,),
}


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Sizes and constants of a decoder. Set by `read_config`, which vouches for them.

    Attributes:
        architecture: the registry's name for the forward pass.
        num_layers: transformer layers.
        hidden_size: width of the residual stream.
        intermediate_size: width of the gated feed-forward part.
        num_heads: query heads, a multiple of num_kv_heads.
        num_kv_heads: key and value heads.
        head_dim: size of a head, even.
        vocab_size: rows of the embedding; at least the tokens of the vocabulary.
        context_length: positions the model was trained for.
        rms_eps: added to the mean square in RMSNorm.
        rope_theta: base of the RoPE frequencies.
        is_tied: the embedding is the LM head too.
    """

    architecture: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    context_length: int
    rms_eps: float
    rope_theta: float
    is_tied: bool


def read_config(file: GgufFile) -> ModelConfig:
    """The config of a GGUF file, whose `general.architecture` names the prefix of its keys.

    Raises:
        LoadError: a key is missing, has the wrong type or an impossible value, or asks for something not supported.
    """
    keys = _Keys(file)
    keys.require_neutral()
    num_heads = keys.size("attention.head_count")
    hidden_size = keys.size("embedding_length")
    head_dim = _head_dim(keys, hidden_size, num_heads)
    config = ModelConfig(
        architecture=keys.architecture,
        num_layers=keys.size("block_count", limit=len(file.tensors)),
        hidden_size=hidden_size,
        intermediate_size=keys.size("feed_forward_length"),
        num_heads=num_heads,
        num_kv_heads=keys.size("attention.head_count_kv", default=num_heads),
        head_dim=head_dim,
        vocab_size=_vocab_size(file, keys),
        context_length=keys.size("context_length", limit=MAX_POSITION),
        rms_eps=keys.number("attention.layer_norm_rms_epsilon"),
        rope_theta=keys.number("rope.freq_base", default=10000.0),
        is_tied=_HEAD not in file.tensors,
    )
    if num_heads % config.num_kv_heads:
        raise LoadError(f"{file.path}: {num_heads} heads can't share {config.num_kv_heads} key and value heads evenly")
    window = keys.size("attention.sliding_window", default=config.context_length)
    if window < config.context_length:
        raise LoadError(f"{file.path}: a sliding window of {window} tokens is not supported")
    return config


def read_architecture(file: GgufFile) -> str:
    """The value of `general.architecture`; a LoadError where it is missing or no name."""
    name = file.metadata.get("general.architecture")
    if not isinstance(name, str) or not name.isprintable() or not 0 < len(name) <= 64:
        raise LoadError(f"{file.path}: key general.architecture is missing or is not a name")
    return name


class _Keys:
    """Typed access to the keys of one architecture."""

    def __init__(self, file: GgufFile) -> None:
        self.file = file
        self.architecture = read_architecture(file)

    def get(self, suffix: str) -> MetadataValue | None:
        return self.file.metadata.get(f"{self.architecture}.{suffix}")

    def fail(self, suffix: str, problem: str) -> LoadError:
        return LoadError(f"{self.file.path}: key {self.architecture}.{suffix} {problem}")

    def size(self, suffix: str, *, default: int | None = None, limit: int = MAX_POSITION) -> int:
        """A whole number from 1 to limit."""
        value = self.get(suffix)
        if value is None:
            value = default
        if value is None:
            raise self.fail(suffix, "is missing")
        if type(value) is not int:
            raise self.fail(suffix, f"is {_shown(value)}, but must be one whole number")
        if not 1 <= value <= limit:
            raise self.fail(suffix, f"is {value}, but must be between 1 and {limit}")
        return value

    def number(self, suffix: str, *, default: float | None = None) -> float:
        """A finite number above 0."""
        value = self.get(suffix)
        if value is None:
            value = default
        if value is None:
            raise self.fail(suffix, "is missing")
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
            raise self.fail(suffix, f"is {_shown(value)}, but must be a finite number above 0")
        return float(value)

    def require_neutral(self) -> None:
        for suffix, neutral in _ONLY_NEUTRAL.items():
            value = self.get(suffix)
            if value is not None and not (isinstance(value, str | int | float) and value in neutral):
                raise self.fail(suffix, f"is {_shown(value)}, which is not supported")


def _shown(value: MetadataValue) -> str:
    """A value as a message shows it: arrays and long strings in short."""
    if isinstance(value, str | int | float):
        return repr(value)[:80]
    return f"a list of {len(value)}"


def _head_dim(keys: _Keys, hidden_size: int, num_heads: int) -> int:
    if keys.get("attention.key_length") is None and hidden_size % num_heads:
        raise LoadError(f"{keys.file.path}: a hidden size of {hidden_size} does not divide into {num_heads} heads")
    head_dim = keys.size("attention.key_length", default=hidden_size // num_heads)
    for suffix in ("attention.value_length", "rope.dimension_count"):
        other = keys.size(suffix, default=head_dim)
        if other != head_dim:
            raise keys.fail(suffix, f"is {other}, but only the head size {head_dim} is supported")
    if head_dim % 2:
        raise LoadError(f"{keys.file.path}: a head size of {head_dim} is odd, but RoPE turns pairs")
    return head_dim


def _vocab_size(file: GgufFile, keys: _Keys) -> int:
    """Rows of the embedding, which the vocabulary may fall short of but not exceed."""
    embedding = file.tensors.get(_EMBEDDING)
    if embedding is None:
        raise LoadError(f"{file.path}: tensor {_EMBEDDING} is missing")
    vocab_size = embedding.shape[0]
    stated = keys.size("vocab_size", default=vocab_size)
    if stated != vocab_size:
        raise keys.fail("vocab_size", f"is {stated}, but tensor {_EMBEDDING} has {vocab_size} rows")
    tokens = file.metadata.get("tokenizer.ggml.tokens")
    if isinstance(tokens, list) and len(tokens) > vocab_size:
        raise LoadError(f"{file.path}: {len(tokens)} tokens, but tensor {_EMBEDDING} has only {vocab_size} rows")
    return vocab_size
