"""RoPE frequencies from GGUF metadata: plain ones, and the ways in which a context was stretched after training.

Every variant comes down to one frequency per pair and one factor on cos and sin, all in float64. Which variant a file
means follows llama.cpp: `rope.scaling.type`, or tensors of frequency factors. What contradicts itself is refused.

Shape legend: P pairs of a head that turn.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from forerun.errors import LoadError, shown
from forerun.models.config import Keys
from forerun.models.sizes import LARGEST, SMALLEST
from forerun.ops.formats import dequantize

FREQ_FACTORS = "rope_freqs.weight"
LONG_FACTORS, SHORT_FACTORS = "rope_factors_long.weight", "rope_factors_short.weight"

_YARN_KEYS = ("yarn_ext_factor", "yarn_attn_factor", "yarn_beta_fast", "yarn_beta_slow")
DEFAULT_BASE = 10000.0  # Su et al. 2021, section 3.2.2
BETA_FAST, BETA_SLOW = 32.0, 1.0  # Peng et al. 2023, arXiv 2309.00071, section 3.2, for Llama


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotation of a layer.

    Attributes:
        inv_freq: [P] float64, frequencies.
        magnitude: multiplies cos and sin.
    """

    inv_freq: tuple[float, ...]
    magnitude: float = 1.0


def plain_rope(base: float, dim: int) -> Rope:
    """Frequencies base ** (-2 i / dim) (Su et al. 2021, arXiv 2104.09864, section 3.2.2).

    >>> plain_rope(100.0, 4).inv_freq
    (1.0, 0.1)
    """
    return Rope(tuple(base ** (-2 * i / dim) for i in range(dim // 2)))


def read_rope(keys: Keys, dim: int, context_length: int, max_len: int) -> Rope:
    """The rotation a file asks for.

    Args:
        keys: of the file, whose tensors are looked at too.
        dim: how many numbers of a head turn.
        context_length: positions the model was trained for.
        max_len: the longest text the model will run on. LongRoPE has other frequencies for texts longer than the
            original context. Changing them within a text would make the keys already cached wrong, so the limit
            decides once, as the context size does in llama.cpp.

    Raises:
        LoadError: a type is unknown, or a setting is missing, impossible or contradicts another.
    """
    plain = plain_rope(keys.number("rope.freq_base", default=DEFAULT_BASE), dim)
    kind = _scaling_type(keys)
    if kind != "yarn":
        for name in _YARN_KEYS:
            if keys.get(f"rope.scaling.{name}") is not None:
                raise keys.fail(f"rope.scaling.{name}", "is given, but only RoPE scaling of type yarn has it")
    attn_factor = keys.number("rope.scaling.attn_factor", default=None if kind == "longrope" else 1.0)
    if kind == "linear":
        rope = Rope(tuple(freq / _factor(keys) for freq in plain.inv_freq))
    elif kind == "yarn":
        rope = _yarn(keys, plain)
    elif kind == "factors":
        rope = _divided(keys, plain, FREQ_FACTORS)
    elif kind == "longrope":
        original = keys.size("rope.scaling.original_context_length", default=context_length)
        short, long = _divided(keys, plain, SHORT_FACTORS), _divided(keys, plain, LONG_FACTORS)
        rope = long if max_len > original else short
    else:
        rope = plain
    return Rope(rope.inv_freq, rope.magnitude * attn_factor)


def _scaling_type(keys: Keys) -> str:
    """`none`, `linear`, `yarn`, `longrope`, or `factors`, which the type of no file says."""
    stated, tensors = keys.get("rope.scaling.type"), keys.file.tensors
    if stated is not None and stated not in ("none", "linear", "yarn", "longrope"):
        raise keys.fail("rope.scaling.type", f"is {shown(stated)}, which is not supported")
    if stated == "longrope" or LONG_FACTORS in tensors or SHORT_FACTORS in tensors:
        kind, fits = "longrope", stated in (None, "longrope")
    elif FREQ_FACTORS in tensors:
        kind, fits = "factors", stated in (None, "none")
    else:
        # A file without a type means linear scaling, by 1 unless it says more.
        kind, fits = str(stated or "linear"), True
    if not fits:
        raise keys.fail(
            "rope.scaling.type", f"is {shown(stated)}, but the file holds RoPE factors, which are another type"
        )
    if kind not in ("linear", "yarn") and _factor(keys) != 1.0:
        raise keys.fail("rope.scaling.factor", f"is {_factor(keys)}, but RoPE scaling of type {kind} has none")
    return kind


def _factor(keys: Keys) -> float:
    """How many times longer the context became; files from before the key had this name use the second one."""
    return keys.number("rope.scaling.factor", default=keys.number("rope.scale_linear", default=1.0))


def _divided(keys: Keys, plain: Rope, name: str) -> Rope:
    """Each frequency divided by its own factor: Llama 3.1, whose converter has worked them out, and LongRoPE."""
    weight, pairs = keys.file.tensors.get(name), len(plain.inv_freq)
    if weight is None:
        raise LoadError(f"{keys.file.path}: tensor {name} is missing")
    if weight.shape != (1, pairs):
        raise LoadError(f"{keys.file.path}: tensor {name} has shape {weight.shape}, but must have (1, {pairs})")
    factors = dequantize(weight).reshape(-1)
    if not ((factors >= SMALLEST) & (factors <= LARGEST)).all():
        raise LoadError(f"{keys.file.path}: tensor {name} holds a factor that is not from {SMALLEST} to {LARGEST}")
    return Rope(tuple(freq / factor for freq, factor in zip(plain.inv_freq, factors.tolist(), strict=True)))


def _yarn(keys: Keys, plain: Rope) -> Rope:
    """YaRN; see `yarn_frequencies`.

    cos and sin grow by 0.1 ln(factor) + 1, or by `yarn_attn_factor` where a file has it: converters copy transformers'
    `attention_factor`, which replaces that term.
    """
    factor = keys.number("rope.scaling.factor")
    original = keys.size("rope.scaling.original_context_length")
    base = keys.number("rope.freq_base", default=DEFAULT_BASE)
    if base <= 1:
        raise keys.fail("rope.freq_base", f"is {base}, but YaRN needs more than 1")
    # Only a value above 0 means the same everywhere: at 0 llama.cpp also leaves out the growth of cos and sin.
    extrapolation = keys.number("rope.scaling.yarn_ext_factor", default=1.0)
    beta_fast = keys.number("rope.scaling.yarn_beta_fast", default=BETA_FAST)
    beta_slow = keys.number("rope.scaling.yarn_beta_slow", default=BETA_SLOW)
    inv_freq = yarn_frequencies(plain, base, original, factor, (beta_fast, beta_slow), extrapolation)
    growth = 0.1 * math.log(factor) + 1 if factor > 1 else 1.0
    return Rope(inv_freq, keys.number("rope.scaling.yarn_attn_factor", default=growth))


def yarn_frequencies(
    plain: Rope, base: float, original: int, factor: float, betas: tuple[float, float], extrapolation: float = 1.0
) -> tuple[float, ...]:
    """Frequencies of YaRN (Peng et al. 2023, arXiv 2309.00071, section 3.4).

    Pairs that turn more than beta_fast times within the original context keep their frequency, those that turn less
    than beta_slow times are slowed by the factor, a ramp lies between.

    Args:
        plain: what is stretched.
        base: of its frequencies, above 1.
        original: positions before the stretching.
        factor: how many times longer the context became.
        betas: (beta_fast, beta_slow).
        extrapolation: how much of the fast pairs' frequency is kept.
    Returns:
        [P] float64.
    """
    dim = 2 * len(plain.inv_freq)

    def pair_turning(beta: float) -> float:
        """The pair, as a fraction, that turns beta times within the original context."""
        return dim * math.log(original / (beta * 2 * math.pi)) / (2 * math.log(base))

    low = max(math.floor(pair_turning(betas[0])), 0)
    high = min(math.ceil(pair_turning(betas[1])), dim - 1)
    inv_freq = []
    for pair, freq in enumerate(plain.inv_freq):
        ramp = min(max((pair - low) / max(high - low, 0.001), 0.0), 1.0)
        kept = (1 - ramp) * extrapolation
        inv_freq.append(freq / factor * (1 - kept) + freq * kept)
    return tuple(inv_freq)
