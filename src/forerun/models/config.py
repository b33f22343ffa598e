"""The sizes and constants of a model, read from GGUF metadata and checked before anything is built from them.

What this version does not compute is refused by name: a model that runs with a setting ignored gives fluent nonsense.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from forerun.errors import LoadError, shown
from forerun.models.gguf import GgufFile, MetadataValue
from forerun.models.sizes import (
    LARGEST,
    MAX_HEAD_DIM,
    MAX_HEADS,
    MAX_POSITION,
    MAX_VOCAB_SIZE,
    SMALLEST,
)
from forerun.ops.base import Activation, AttentionSpec

EMBEDDING = "token_embd.weight"
HEAD = "output.weight"

# Settings that would change the computation, and the values under which they don't. Absent is always fine. A family
# that computes one of them says so in `Family.own_keys`.
_ONLY_NEUTRAL: Mapping[str, tuple[MetadataValue, ...]] = {
    "activation_sparsity_scale": (),
    "altup.num_inputs": (),
    "attention.causal": (True,),
    "attention.clamp_kqv": (0.0,),
    "attention.indexer.head_count": (0,),
    "attention.key_length_mla": (0,),
    "attention.key_length_swa": (),
    "attention.kv_lora_rank": (0,),
    "attention.layer_norm_epsilon": (),
    "attention.max_alibi_bias": (0.0,),
    "attention.output_scale": (1.0,),
    "attention.q_lora_rank": (0,),
    "attention.scale": (),
    "attention.shared_kv_layers": (0,),
    "attention.sliding_window_pattern": (),
    "attention.temperature_length": (0,),
    "attention.temperature_scale": (0.0,),
    "attention.value_length_swa": (),
    "attn_logit_softcapping": (0.0,),
    "embedding_length_out": (),
    "embedding_length_per_layer_input": (0,),
    "embedding_scale": (1.0,),
    "expert_count": (0,),
    "final_logit_softcapping": (0.0,),
    "full_attention_interval": (0, 1),
    "logit_scale": (1.0,),
    "nextn_predict_layers": (0,),
    "n_deepstack_layers": (0,),
    "rescale_every_n_layers": (0,),
    "residual_scale": (1.0,),
    "rope.dimension_count_swa": (),
    "rope.dimension_sections": (),
    "rope.freq_base_swa": (),
    "rope.scaling.alpha": (0.0, 1.0),
    "rope.scaling.yarn_log_multiplier": (0.0,),
    "swin_norm": (False,),
    "use_parallel_residual": (False,),
}


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Sizes and constants of a decoder. Set by `family.read_config` and `hf_config.read_hf_config`; they vouch for it.

    Attributes:
        architecture: the registry's name for the model's family.
        num_layers: transformer layers.
        hidden_size: width of the residual stream.
        intermediate_size: width of the gated feed-forward part.
        num_heads: query heads, a multiple of num_kv_heads.
        num_kv_heads: key and value heads.
        head_dim: size of a head, even.
        vocab_size: rows of the embedding; at least the tokens of the vocabulary.
        context_length: positions the model was trained for.
        rms_eps: added to the mean square in RMSNorm.
        is_tied: the embedding is the LM head too.
        attentions: heads, RoPE and window of each layer.
        activation: of the gated feed-forward part.
        embedding_scale: multiplies rows of the embedding where they enter the model.
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
    is_tied: bool
    attentions: tuple[AttentionSpec, ...]
    activation: Activation = "silu"
    embedding_scale: float = 1.0


@dataclass(frozen=True, slots=True)
class Heads:
    """Sizes of attention.

    Attributes:
        num_heads, num_kv_heads, head_dim: as in `ModelConfig`.
        rotary_dim: how many numbers of a head RoPE turns; even, at most head_dim.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rotary_dim: int


def read_architecture(file: GgufFile) -> str:
    """The value of `general.architecture`; a LoadError where it is missing or no name."""
    name = file.metadata.get("general.architecture")
    if not isinstance(name, str) or not name.isprintable() or not 0 < len(name) <= 64:
        raise LoadError(f"{file.path}: key general.architecture is missing or is not a name")
    return name


class Keys:
    """Typed access to the keys of one architecture."""

    def __init__(self, file: GgufFile) -> None:
        self.file = file
        self.architecture = read_architecture(file)

    def get(self, suffix: str) -> MetadataValue | None:
        """A value as the file has it; None where it is absent."""
        return self.file.metadata.get(f"{self.architecture}.{suffix}")

    def fail(self, suffix: str, problem: str) -> LoadError:
        """An error about a key, to raise."""
        return LoadError(f"{self.file.path}: key {self.architecture}.{suffix} {problem}")

    def size(self, suffix: str, *, default: int | None = None, at_least: int = 1, limit: int = MAX_POSITION) -> int:
        """A whole number from at_least to limit."""
        value = self.get(suffix)
        if value is None:
            value = default
        if value is None:
            raise self.fail(suffix, "is missing")
        if type(value) is not int:
            raise self.fail(suffix, f"is {shown(value)}, but must be one whole number")
        if not at_least <= value <= limit:
            raise self.fail(suffix, f"is {value}, but must be between {at_least} and {limit}")
        return value

    def dimension(self, suffix: str, limit: int, *, default: int | None = None) -> int:
        """A size that rows or columns of some tensor have, so that it can't be above all of theirs."""
        value = self.size(suffix, default=default, limit=limit)
        largest = max((max(weight.shape) for weight in self.file.tensors.values()), default=0)
        if value > largest:
            raise self.fail(suffix, f"is {value}, but no tensor of the file has more than {largest} rows or columns")
        return value

    def number(self, suffix: str, *, default: float | None = None) -> float:
        """A number above 0, within reason."""
        value = self.get(suffix)
        if value is None:
            value = default
        if value is None:
            raise self.fail(suffix, "is missing")
        if not isinstance(value, int | float) or isinstance(value, bool) or not SMALLEST <= value <= LARGEST:
            raise self.fail(suffix, f"is {shown(value)}, but must be a number from {SMALLEST} to {LARGEST}")
        return float(value)

    def window(self, context_length: int) -> int | None:
        """The sliding window; None where there is none, which 0 stands for too, or where it holds every position."""
        window = self.size("attention.sliding_window", default=0, at_least=0)
        return window if 0 < window < context_length else None

    def require_neutral(self, own_keys: Collection[str]) -> None:
        """Refuses settings that would change the computation and are not among the family's own."""
        for suffix, neutral in _ONLY_NEUTRAL.items():
            value = self.get(suffix)
            if suffix in own_keys or value is None:
                continue
            if not (isinstance(value, str | int | float) and value in neutral):
                raise self.fail(suffix, f"is {shown(value)}, which is not supported")


def read_heads(keys: Keys, hidden_size: int, rotates_partly: bool) -> Heads:
    """The sizes of attention.

    Args:
        keys: of the file.
        hidden_size: of the residual stream, which the heads share where no head size is given.
        rotates_partly: whether RoPE may turn less than a whole head.
    Raises:
        LoadError: a size is missing, impossible or not supported.
    """
    num_heads = keys.dimension("attention.head_count", MAX_HEADS)
    num_kv_heads = keys.dimension("attention.head_count_kv", MAX_HEADS, default=num_heads)
    if num_heads % num_kv_heads:
        raise LoadError(f"{keys.file.path}: {num_heads} heads can't share {num_kv_heads} key and value heads evenly")
    if keys.get("attention.key_length") is None and hidden_size % num_heads:
        raise LoadError(f"{keys.file.path}: a hidden size of {hidden_size} does not divide into {num_heads} heads")
    head_dim = keys.dimension("attention.key_length", MAX_HEAD_DIM, default=max(hidden_size // num_heads, 1))
    value_dim = keys.size("attention.value_length", default=head_dim)
    rotary_dim = keys.size("rope.dimension_count", default=head_dim)
    if value_dim != head_dim:
        raise keys.fail("attention.value_length", f"is {value_dim}, but only the head size {head_dim} is supported")
    if rotary_dim > head_dim or (rotary_dim < head_dim and not rotates_partly):
        raise keys.fail("rope.dimension_count", f"is {rotary_dim}, but only the head size {head_dim} is supported")
    for what, size in (("a head size", head_dim), ("a rotated part of a head", rotary_dim)):
        if size % 2:
            raise LoadError(f"{keys.file.path}: {what} of {size} is odd, but RoPE turns pairs")
    return Heads(num_heads, num_kv_heads, head_dim, rotary_dim)


def read_vocab_size(keys: Keys) -> int:
    """Rows of the embedding, which the vocabulary may fall short of but not exceed.

    Raises:
        LoadError: the embedding is missing, or the file contradicts itself.
    """
    file = keys.file
    embedding = file.tensors.get(EMBEDDING)
    if embedding is None:
        raise LoadError(f"{file.path}: tensor {EMBEDDING} is missing")
    vocab_size = embedding.shape[0]
    if vocab_size > MAX_VOCAB_SIZE:
        raise LoadError(f"{file.path}: tensor {EMBEDDING} has {vocab_size} rows, more than {MAX_VOCAB_SIZE}")
    stated = keys.size("vocab_size", default=vocab_size)
    if stated != vocab_size:
        raise keys.fail("vocab_size", f"is {stated}, but tensor {EMBEDDING} has {vocab_size} rows")
    tokens = file.metadata.get("tokenizer.ggml.tokens")
    if isinstance(tokens, list) and len(tokens) > vocab_size:
        raise LoadError(f"{file.path}: {len(tokens)} tokens, but tensor {EMBEDDING} has only {vocab_size} rows")
    return vocab_size
