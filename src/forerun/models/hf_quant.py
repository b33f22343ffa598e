"""What `quantization_config` in a config.json says of the weights beside it.

GPTQ (Frantar et al. 2022, arXiv 2210.17323), AWQ (Lin et al. 2023, arXiv 2306.00978) and compressed-tensors all store
codes of a few bits with a scale and a zero point per group of inputs. What would change how they are read, and is not
read here, is refused by name; the many keys that only say how a model was quantised are left alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from forerun.errors import shown
from forerun.models.hf_json import JsonKeys

Method = Literal["gptq", "awq", "compressed-tensors"]

# Later names of the key first.
_CONFIG_KEYS = ("quantization_config", "compression_config")


@dataclass(frozen=True, slots=True)
class Packing:
    """How the quantised matrices of a folder are stored; `hf_packed` reads them.

    Attributes:
        method: what packed them.
        num_bits: of a code, 4 or 8.
        group_size: inputs that share a scale; None is all of a row.
        is_symmetric: every zero point is the middle code.
        is_less_one: zero points are stored less one, as GPTQ's first format has them.
    """

    method: Method
    num_bits: int
    group_size: int | None
    is_symmetric: bool
    is_less_one: bool = False

    def __str__(self) -> str:
        """In words.

        >>> str(Packing("awq", 4, 128, is_symmetric=False))
        'awq, 4 bits, groups of 128'
        """
        groups = "one group per row" if self.group_size is None else f"groups of {self.group_size}"
        return f"{self.method}, {self.num_bits} bits, {groups}"


def read_packing(keys: JsonKeys) -> Packing | None:
    """What a config.json says; None where its weights are plain.

    Raises:
        LoadError: the weights are quantised in a way that is not supported; names key and value.
    """
    for key in _CONFIG_KEYS:
        part = keys.part(key)
        if part is not None:
            method = part.text("quant_method")
            if method not in _READERS:
                raise part.fail("quant_method", f"is {shown(method)}, but must be one of {', '.join(_READERS)}")
            return _READERS[method](part)
    return None


def _gptq(keys: JsonKeys) -> Packing:
    layout = _layout(keys, ("checkpoint_format", "format"), ("gptq", "gptq_v2"))
    _require(keys, "is_marlin_format", (False,))
    _require(keys, "pack_dtype", ("int32",))
    for pattern in _object(keys, "dynamic"):
        if not pattern.startswith("-:"):  # those name what is not quantised, which shows in the tensors
            raise keys.fail("dynamic", f"has settings of its own for {shown(pattern)}, which is not supported")
    return Packing(
        method="gptq",
        num_bits=_bits(keys, "bits", (4, 8)),
        group_size=_group_size(keys, "group_size"),
        is_symmetric=keys.get("sym") is None or keys.flag("sym"),
        is_less_one=layout == "gptq",
    )


def _awq(keys: JsonKeys) -> Packing:
    _layout(keys, ("version", "format", "checkpoint_format"), ("gemm",))
    _require(keys, "zero_point", (True,))
    if keys.get("backend") == "llm-awq":  # the others are kernels for the layout that is stated
        raise keys.fail("backend", "is 'llm-awq', whose layout is not supported")
    bits, group_size = (old if keys.get(old) is not None else new for old, new in _AWQ_NAMES)
    return Packing("awq", _bits(keys, bits, (4,)), _group_size(keys, group_size), is_symmetric=False)


_AWQ_NAMES = (("w_bit", "bits"), ("q_group_size", "group_size"))


def _compressed(keys: JsonKeys) -> Packing:
    _require(keys, "format", ("pack-quantized",))
    _require(keys, "quantization_status", ("compressed",))
    for key in ("kv_cache_scheme", "transform_config"):
        _require(keys, key, ({},))
    sparsity = keys.part("sparsity_config")
    if sparsity is not None:
        _require(sparsity, "format", ("dense",))
    groups = _object(keys, "config_groups")
    if len(groups) != 1:
        raise keys.fail("config_groups", f"has {len(groups)} entries, but only one is supported")
    scheme = JsonKeys(f"{keys.where}: config_groups", groups, {}).part(next(iter(groups)))
    weights = None if scheme is None else scheme.part("weights")
    if scheme is None or weights is None:
        raise keys.fail("config_groups", "says nothing of weights")
    for key in ("input_activations", "output_activations"):
        _require(scheme, key, ())
    _require(scheme, "format", ("pack-quantized",))
    _require(weights, "type", ("int",))
    _require(weights, "strategy", ("group", "channel"))
    is_grouped = weights.get("strategy") == "group"
    return Packing(
        method="compressed-tensors",
        num_bits=_bits(weights, "num_bits", (4, 8)),
        group_size=_group_size(weights, "group_size") if is_grouped else None,
        is_symmetric=weights.get("symmetric") is None or weights.flag("symmetric"),
    )


_READERS = {"gptq": _gptq, "awq": _awq, "compressed-tensors": _compressed}


def _layout(keys: JsonKeys, names: Sequence[str], known: Sequence[str]) -> str:
    """The tensors' layout, in whatever case and by whichever names it is given; the first known one where by none."""
    stated = known[0]
    for name in names:
        value = keys.get(name)
        if value is not None:
            stated = value.lower() if isinstance(value, str) else value
            if stated not in known:
                raise keys.fail(name, f"is {shown(value)}, but must be {' or '.join(known)}")
    return stated


def _require(keys: JsonKeys, name: str, known: Sequence[Any]) -> None:
    """Refuses a value that is not one of these; an absent one, or null, is."""
    value = keys.get(name)
    if value is not None and value not in known:
        raise keys.fail(name, f"is {shown(value)}, which is not supported")


def _object(keys: JsonKeys, name: str) -> dict[str, Any]:
    part = keys.part(name)
    return {} if part is None else dict(part.data)


def _bits(keys: JsonKeys, name: str, known: Sequence[int]) -> int:
    bits = keys.size(name)
    if bits not in known:
        raise keys.fail(name, f"is {bits}, but must be {' or '.join(map(str, known))}")
    return bits


def _group_size(keys: JsonKeys, name: str) -> int | None:
    return None if keys.get(name) == -1 else keys.size(name)
