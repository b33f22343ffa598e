"""RoPE frequencies from `rope_parameters` or `rope_scaling` of a config.json.

Keys, defaults and formulas are those of transformers (`modeling_rope_utils.py`); in float64. The result is the same
`Rope` that a GGUF file gives. What is not understood is refused, because it would change every position.

Shape legend: P pairs of a head that turn.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from forerun.errors import shown
from forerun.models.hf_json import JsonKeys
from forerun.models.rope import BETA_FAST, BETA_SLOW, Rope, plain_rope, yarn_frequencies

FULL, SLIDING = "full_attention", "sliding_attention"

_COMMON = frozenset({"rope_type", "type", "rope_theta", "partial_rotary_factor"})
_ORIGINAL = "original_max_position_embeddings"
_OWN_KEYS: Mapping[str, frozenset[str]] = {
    "default": frozenset(),
    "linear": frozenset({"factor"}),
    "llama3": frozenset({"factor", "low_freq_factor", "high_freq_factor", _ORIGINAL}),
    "longrope": frozenset({"factor", "short_factor", "long_factor", "attention_factor", _ORIGINAL}),
    "yarn": frozenset(
        {"factor", "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate", _ORIGINAL}
    ),
}
# What Phi-3's first releases called LongRoPE.
_OLD_LONGROPE = ("su", "yarn")


def rope_settings(config: JsonKeys, layer_type: str | None) -> JsonKeys:
    """The settings for one kind of layer.

    Args:
        config: of the model. Its `rope_parameters` hold the settings, under the names of the kinds or for all layers.
        layer_type: `FULL` or `SLIDING` where these kinds have a RoPE each, None where all layers have one.
    Returns:
        What config says. Settings that are not told apart are those of layers that see everything; layers with a
        window have a plain RoPE then. Base and rotated part may also stand beside the settings.
    """
    key = "rope_parameters" if config.get("rope_scaling") is None else "rope_scaling"
    stated = config.part(key)
    data = dict(stated.data) if stated else {}
    base = config.get("rope_theta")
    if layer_type == SLIDING and config.get("rope_local_base_freq") is not None:
        base = config.get("rope_local_base_freq")
    elif layer_type == SLIDING:
        base = data.get("rope_theta", base)
    if layer_type and stated and data and all(isinstance(entry, dict) for entry in data.values()):
        if unknown := sorted(data.keys() - {FULL, SLIDING}):
            raise config.fail(key, f"has settings for {shown(unknown[0])}, which is not supported")
        part = stated.part(layer_type)
        data = dict(part.data) if part else {}
    elif layer_type == SLIDING:
        data = {}
    beside = {"rope_theta": base, "partial_rotary_factor": config.get("partial_rotary_factor")}
    return JsonKeys(f"{config.where}: {key}", data, beside)


def hf_rope(
    config: JsonKeys, settings: JsonKeys, head_dim: int, context_length: int, max_len: int, *, is_phi3: bool
) -> Rope:
    """The rotation that settings ask for.

    Args:
        config: of the model; `original_max_position_embeddings` may be there.
        settings: from `rope_settings`.
        head_dim: size of a head.
        context_length: positions the model was trained for.
        max_len: the longest text the model will run on, which decides between the frequencies of LongRoPE once and
            for all (see `rope.read_rope`).
        is_phi3: RoPE may turn a part of a head only, and LongRoPE has other names as well.
    Raises:
        LoadError: a kind or a key is unknown, or a setting is missing or impossible.
    """
    kind = _kind(settings, is_phi3)
    base = settings.number("rope_theta")
    if base <= 1:
        raise settings.fail("rope_theta", f"is {base}, but must be above 1")
    plain = plain_rope(base, _rotary_dim(settings, head_dim, is_phi3))
    if kind == "default":
        return plain
    if kind == "linear":
        factor = settings.number("factor")
        return Rope(tuple(freq / factor for freq in plain.inv_freq))
    original = _original(config, settings, context_length)
    if kind == "llama3":
        return _llama3(settings, plain, original)
    if kind == "longrope":
        return _longrope(settings, plain, original, context_length, max_len)
    return _yarn(settings, plain, base, original, context_length)


def _kind(settings: JsonKeys, is_phi3: bool) -> str:
    stated = settings.get("rope_type")
    kind = settings.get("type") if stated is None else stated
    kind = "default" if kind is None else kind
    if is_phi3 and kind in _OLD_LONGROPE:
        kind = "longrope"
    if not isinstance(kind, str) or kind not in _OWN_KEYS:
        raise settings.fail("rope_type", f"is {shown(kind)}, but must be one of {', '.join(_OWN_KEYS)}")
    for key, value in settings.data.items():
        if value is not None and key not in _COMMON | _OWN_KEYS[kind]:
            raise settings.fail(key, f"is not supported for rope_type {kind}")
    return kind


def _rotary_dim(settings: JsonKeys, head_dim: int, is_phi3: bool) -> int:
    part = settings.number("partial_rotary_factor", default=1.0)
    if part != 1.0 and (part > 1.0 or not is_phi3):
        raise settings.fail("partial_rotary_factor", f"is {part}, which is not supported for this model_type")
    rotary_dim = int(head_dim * part)
    if rotary_dim < 2 or rotary_dim % 2:
        raise settings.fail("partial_rotary_factor", f"makes RoPE turn {rotary_dim} numbers, but it turns pairs")
    return rotary_dim


def _original(config: JsonKeys, settings: JsonKeys, context_length: int) -> int:
    """Positions before the context was stretched; beside the settings the number counts more than in them."""
    keys = settings if config.get(_ORIGINAL) is None else config
    original = keys.size(_ORIGINAL, default=context_length)
    if original < 2:
        raise keys.fail(_ORIGINAL, f"is {original}, but must be at least 2")
    return original


def _llama3(settings: JsonKeys, plain: Rope, original: int) -> Rope:
    """Pairs of long waves are slowed by the factor, those of short ones kept, between them it goes smoothly."""
    factor, low, high = (settings.number(key) for key in ("factor", "low_freq_factor", "high_freq_factor"))
    if high <= low:
        raise settings.fail("high_freq_factor", f"is {high}, but must be above low_freq_factor, {low}")
    inv_freq = []
    for freq in plain.inv_freq:
        turns = original * freq / (2 * math.pi)  # within the original context
        kept = min(max((turns - low) / (high - low), 0.0), 1.0)
        inv_freq.append((1 - kept) * freq / factor + kept * freq)
    return Rope(tuple(inv_freq))


def _longrope(settings: JsonKeys, plain: Rope, original: int, context_length: int, max_len: int) -> Rope:
    """Each frequency divided by its own factor (Ding et al. 2024, arXiv 2402.13753)."""
    short, long = (_factors(settings, key, len(plain.inv_freq)) for key in ("short_factor", "long_factor"))
    factor = settings.number("factor", default=context_length / original)
    growth = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    factors = long if max_len > original else short
    inv_freq = tuple(freq / divisor for freq, divisor in zip(plain.inv_freq, factors, strict=True))
    return Rope(inv_freq, settings.number("attention_factor", default=growth))


def _factors(settings: JsonKeys, key: str, num_pairs: int) -> list[float]:
    values: Any = settings.get(key)
    if not isinstance(values, list) or len(values) != num_pairs:
        raise settings.fail(key, f"is {shown(values)}, but must be a list of {num_pairs} numbers")
    return [settings.checked(key, value) for value in values]


def _yarn(settings: JsonKeys, plain: Rope, base: float, original: int, context_length: int) -> Rope:
    """YaRN; see `rope.yarn_frequencies`. cos and sin grow with the factor unless the settings say by how much."""
    if settings.get("truncate") not in (None, True):
        raise settings.fail("truncate", f"is {shown(settings.get('truncate'))}, but only true is supported")
    factor = settings.number("factor", default=context_length / original)
    betas = settings.number("beta_fast", default=BETA_FAST), settings.number("beta_slow", default=BETA_SLOW)
    growth = _growth(factor, 1.0)
    if settings.get("mscale") is not None and settings.get("mscale_all_dim") is not None:
        growth = _growth(factor, settings.number("mscale")) / _growth(factor, settings.number("mscale_all_dim"))
    inv_freq = yarn_frequencies(plain, base, original, factor, betas)
    return Rope(inv_freq, settings.number("attention_factor", default=growth))


def _growth(factor: float, scale: float) -> float:
    return 0.1 * scale * math.log(factor) + 1 if factor > 1 else 1.0
