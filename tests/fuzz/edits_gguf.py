"""Edits of GGUF files that know the structure. Each changes an image in place and says what it did, or returns None."""

from __future__ import annotations

import struct
from collections.abc import Callable
from random import Random
from typing import Any

from tests.fuzz import values
from tests.fuzz.bases_gguf import entry
from tests.fuzz.image import ARRAY, BLOCKS, BOOL, SCALARS, STRING, Array, Image, Lie, Tensor
from tests.fuzz.templates import hostile_template

GgufEdit = Callable[[Image, Random], str | None]

# Keys that change what a model computes or how a file is cut, most of which are not supported.
_KEYS = [
    "{}.attention.key_length", "{}.attention.value_length", "{}.attention.sliding_window", "{}.expert_count",
    "{}.attention.sliding_window_pattern", "{}.rope.scaling.type", "{}.rope.scaling.factor", "{}.rope.freq_base",
    "{}.rope.scaling.yarn_beta_fast", "{}.rope.scaling.yarn_beta_slow", "{}.rope.scaling.yarn_ext_factor",
    "{}.rope.scaling.original_context_length", "{}.rope.scaling.attn_factor", "{}.rope.freq_base_swa", "{}.vocab_size",
    "{}.rope.scale_linear", "{}.rope.scaling.yarn_attn_factor", "{}.logit_scale", "{}.rope.dimension_count",
    "{}.attention.layer_norm_epsilon", "split.count", "split.no", "split.tensors.count", "general.alignment",
    "tokenizer.ggml.add_bos_token", "tokenizer.ggml.bos_token_id", "tokenizer.ggml.eot_token_id",
    "tokenizer.ggml.unknown_token_id", "tokenizer.ggml.add_space_prefix", "tokenizer.ggml.precompiled_charsmap",
    "tokenizer.ggml.remove_extra_whitespaces", "tokenizer.ggml.normalizer.lowercase", "tokenizer.ggml.pre",
    "tokenizer.ggml.scores", "tokenizer.ggml.merges", "tokenizer.ggml.model", "tokenizer.chat_template",
]  # fmt: skip
# Types whose blocks are alike in weights and bytes, so that only the meaning of the bytes changes.
_TWINS = [("f16", "bf16"), ("q4_0", "iq4_nl")]
_TYPE_NAMES = {name: kind for kind, (name, _, _) in BLOCKS.items()}


def set_scalar(image: Image, rng: Random) -> str | None:
    """A number of the metadata becomes another, of its own or another type."""
    entries = [item for item in image.entries if item.kind in SCALARS]
    if not entries:
        return None
    chosen = rng.choice(entries)
    if rng.random() < 0.3:
        chosen.kind = rng.choice(list(SCALARS))
    is_float = SCALARS[chosen.kind] in "fd"
    chosen.value = rng.choice(values.FLOATS) if is_float else values.number(rng, chosen.value)
    return f"{chosen.key!r:.60} = {chosen.value} as type {chosen.kind}"


def set_text(image: Image, rng: Random) -> str | None:
    """A text of the metadata becomes another."""
    chosen = rng.choice([item for item in image.entries if item.kind == STRING] or image.entries)
    chosen.kind, chosen.value = STRING, values.text(rng)
    return f"{chosen.key!r:.60} = {chosen.value!r:.40}"


def set_template(image: Image, rng: Random) -> str | None:
    source = hostile_template(rng)
    image.entries = [item for item in image.entries if item.key != b"tokenizer.chat_template"]
    image.entries.append(entry("tokenizer.chat_template", source))
    return f"chat_template = {source!r:.200}"


def lie_about_type(image: Image, rng: Random) -> str | None:
    chosen = rng.choice(image.entries)
    kind = rng.choice([*range(14), 99, 1 << 31, (1 << 32) - 1])
    if isinstance(chosen.value, Array) and rng.random() < 0.5:
        chosen.value.stated_kind = kind
    else:
        chosen.stated_kind = kind
    return f"type of {chosen.key!r:.60} said to be {kind}"


def lie_about_length(image: Image, rng: Random) -> str | None:
    """A string or an array states another length than it has."""
    chosen = rng.choice(image.entries)
    length = values.number(rng, len(chosen.value.items) if isinstance(chosen.value, Array) else len(chosen.key))
    if isinstance(chosen.value, Array) and rng.random() < 0.8:
        items = chosen.value.items
        if items and isinstance(items[0], bytes) and rng.random() < 0.5:
            at = rng.randrange(len(items))
            items[at] = Lie(_bytes(items[at]), length)
        else:
            chosen.value.stated_len = length
    elif chosen.kind == STRING and rng.random() < 0.6:
        chosen.value = Lie(_bytes(chosen.value), length)
    else:
        chosen.key = Lie(_bytes(chosen.key), length)
    return f"a length in {chosen.key!r:.60} said to be {length}"


def edit_array(image: Image, rng: Random) -> str | None:
    """Entries of an array are replaced, doubled, dropped, added or shuffled; half of the time consistently."""
    arrays = [item for item in image.entries if isinstance(item.value, Array) and item.value.items]
    if not arrays:
        return None
    chosen = rng.choice(arrays)
    array: Array = chosen.value
    how = rng.choice(["replace", "replace", "replace", "copy", "drop", "add", "shuffle", "empty", "cut"])
    at = rng.randrange(len(array.items))
    if how == "replace":
        for _ in range(rng.choice([1, 1, 3, 20])):
            array.items[rng.randrange(len(array.items))] = _item(array.kind, rng)
    elif how == "copy":
        array.items[at] = array.items[rng.randrange(len(array.items))]
    elif how == "drop":
        del array.items[at]
    elif how == "add":
        array.items[at:at] = [_item(array.kind, rng) for _ in range(rng.choice([1, 7, 1000]))]
    elif how == "shuffle":
        rng.shuffle(array.items)
    else:
        del array.items[0 if how == "empty" else at :]
    return f"{how} in {chosen.key!r:.60}"


def edit_tokens(image: Image, rng: Random) -> str | None:
    """Tokens, types, scores and merges that are well-formed and odd."""
    arrays = {item.key: item.value for item in image.entries if isinstance(item.value, Array) and item.value.items}
    key = rng.choice([b"tokens", b"tokens", b"token_type", b"scores", b"merges", b"merges"])
    array = arrays.get(b"tokenizer.ggml." + key)
    tokens = arrays.get(b"tokenizer.ggml.tokens")
    if array is None or tokens is None:
        return None
    for _ in range(rng.choice([1, 5, 50])):
        at = rng.randrange(len(array.items))
        if key == b"tokens":
            new: Any = rng.choice(
                [rng.choice(tokens.items), values.text(rng), b"<|x|>", b"a" * rng.randrange(40), b"\xe6\x97"]
            )
        elif key == b"merges":
            left, right = _bytes(rng.choice(tokens.items)), _bytes(rng.choice(tokens.items))
            new = rng.choice([left + b" " + right, left + right, b" " + left, left + b" ", rng.choice(array.items)])
        else:
            new = rng.choice([0, 1, 2, 3, 4, 5, 6, 7]) if key == b"token_type" else rng.choice(values.FLOATS)
        array.items[at] = new
    return f"{key!r} of the vocabulary"


def _item(kind: int, rng: Random) -> Any:
    if kind == ARRAY:
        return Array(4, [values.number(rng)])
    if kind == STRING:
        return values.text(rng)
    if kind == BOOL:
        return rng.choice([0, 1, 1, 2, 255])
    return rng.choice(values.FLOATS) if SCALARS.get(kind, "Q") in "fd" else values.number(rng, 300)


def change_kind(image: Image, rng: Random) -> str | None:
    """A value becomes one of another kind altogether."""
    chosen = rng.choice(image.entries)
    value = rng.choice(
        [True, 7, 1.5, "text", ["a", "b"], [1, 2, 3], [1.5], [True], [values.number(rng) % (1 << 32)] * 300]
    )
    made = entry("x", value)
    chosen.kind, chosen.value = made.kind, made.value
    if rng.random() < 0.1:
        chosen.kind, chosen.value = ARRAY, Array(ARRAY, [Array(4, [1, 2])] * 3)
    return f"{chosen.key!r:.60} = {value!r:.40}"


def move_entries(image: Image, rng: Random) -> str | None:
    """An entry goes, comes twice, is renamed or comes anew."""
    chosen = rng.choice(image.entries)
    how = rng.choice(["drop", "double", "rename", "add", "add", "swap"])
    if how == "drop":
        image.entries.remove(chosen)
    elif how == "double":
        image.entries.insert(rng.randrange(len(image.entries)), chosen)
    elif how == "rename":
        chosen.key = values.text(rng)
    elif how == "swap":
        other = rng.choice(image.entries)
        chosen.kind, chosen.value, other.kind, other.value = other.kind, other.value, chosen.kind, chosen.value
    else:
        return _add_key(image, rng)
    return f"{how} {chosen.key!r:.60}"


def _add_key(image: Image, rng: Random) -> str:
    architecture = next((_bytes(item.value) for item in image.entries if item.key == b"general.architecture"), b"x")
    key = rng.choice(_KEYS).format(architecture[:60].decode("utf-8", "replace"))
    value = rng.choice(
        [
            values.number(rng) % (1 << 32),
            values.number(rng) % 512,
            rng.choice(values.FLOATS),
            True,
            "yarn",
            "linear",
            "longrope",
            [True, False],
            [0.0] * 300,
        ]
    )
    image.entries = [item for item in image.entries if item.key != key.encode()]
    image.entries.append(entry(key, value))
    return f"{key} = {value!r:.40}"


def set_counts(image: Image, rng: Random) -> str | None:
    which = rng.choice(["version", "num_entries", "num_tensors", "alignment", "magic"])
    if which == "magic":
        image.magic = rng.choice([b"GGUF", b"FUGG", b"GGML", b"\x80\x02", b"PK\x03\x04", b"\0\0\0\0"])
    elif which == "alignment":
        image.alignment = rng.choice([1, 2, 3, 8, 64, 4096])
    else:
        setattr(image, which, values.number(rng, len(image.tensors)))
    return f"{which} = {getattr(image, which)}"


def set_dims(image: Image, rng: Random) -> str | None:
    tensor = _any_tensor(image, rng)
    if tensor is None:
        return None
    if rng.random() < 0.2:
        tensor.stated_rank = values.number(rng, 2)
    elif rng.random() < 0.2:
        tensor.dims.reverse()
    elif rng.random() < 0.2:
        tensor.dims = [values.number(rng, 32) for _ in range(rng.randrange(5))]
    else:
        at = rng.randrange(len(tensor.dims)) if tensor.dims else 0
        tensor.dims[at : at + 1] = [values.number(rng, tensor.dims[at] if tensor.dims else 1)]
    return f"dims of {tensor.name!r:.60} = {tensor.dims}, rank {tensor.stated_rank}"


def resize(image: Image, rng: Random) -> str | None:
    """Other dimensions, with data to match: a whole file of the wrong shape."""
    tensor = _any_tensor(image, rng)
    if tensor is None or tensor.kind not in BLOCKS or not tensor.dims:
        return None
    at = rng.randrange(len(tensor.dims))
    tensor.dims[at] = max(1, rng.choice([tensor.dims[at] * 2, tensor.dims[at] // 2, tensor.dims[at] + 32, 32, 256, 1]))
    _refill(tensor)
    return f"{tensor.name!r:.60} resized to {tensor.dims}"


def _refill(tensor: Tensor) -> None:
    """As many bytes as the type and the dimensions ask for, as far as they are whole blocks."""
    _, block_len, block_bytes = BLOCKS[tensor.kind]
    count = 1
    for dim in tensor.dims:
        count *= dim
    num_bytes = min(count // block_len * block_bytes, 1 << 20)
    tensor.data = (tensor.data * (num_bytes // max(len(tensor.data), 1) + 1))[:num_bytes]


def set_type(image: Image, rng: Random) -> str | None:
    """Another type, sometimes with data to match."""
    tensor = _any_tensor(image, rng)
    if tensor is None:
        return None
    name = BLOCKS[tensor.kind][0] if tensor.kind in BLOCKS else ""
    twins = [b if a == name else a for a, b in _TWINS if name in (a, b)]
    if twins and rng.random() < 0.5:
        tensor.kind = _TYPE_NAMES[twins[0]]
        return f"{tensor.name!r:.60} is {twins[0]}"
    tensor.kind = rng.choice([*BLOCKS, *range(42), 99, (1 << 32) - 1])
    if tensor.kind in BLOCKS and rng.random() < 0.7:
        _refill(tensor)
    return f"{tensor.name!r:.60} is of type {tensor.kind}"


def set_offset(image: Image, rng: Random) -> str | None:
    tensor = _any_tensor(image, rng)
    if tensor is None:
        return None
    total = sum(len(other.data) for other in image.tensors)
    tensor.offset = rng.choice(
        [values.number(rng), rng.randrange(total + 1), rng.randrange(total + 1) // 32 * 32, total, -32, total + 4096]
    )
    return f"offset of {tensor.name!r:.60} = {tensor.offset}"


def move_tensors(image: Image, rng: Random) -> str | None:
    tensor = _any_tensor(image, rng)
    if tensor is None:
        return None
    how, other = (
        rng.choice(["drop", "double", "rename", "swap names", "swap data", "swap kinds"]),
        rng.choice(image.tensors),
    )
    if how == "drop":
        image.tensors.remove(tensor)
    elif how == "double":
        image.tensors.append(tensor)
    elif how == "rename":
        tensor.name = rng.choice([values.text(rng), b"blk.9.attn_q.weight", b"output.weight", b"rope_freqs.weight"])
    elif how == "swap names":
        tensor.name, other.name = other.name, tensor.name
    elif how == "swap data":
        tensor.data, other.data = other.data, tensor.data
    else:
        tensor.kind, other.kind = other.kind, tensor.kind
    return f"{how} {tensor.name!r:.60}"


def poison_data(image: Image, rng: Random) -> str | None:
    """Scales and weights that are no numbers, infinite, huge or tiny."""
    tensor = _any_tensor(image, rng)
    if tensor is None or len(tensor.data) < 4:
        return None
    data = bytearray(tensor.data)
    pattern = rng.choice(
        [
            struct.pack("<f", rng.choice(values.FLOATS[:18] + values.FLOATS[20:])),
            b"\x00\x7c",
            b"\xff\x7b",
            b"\xff" * 4,
            b"\0" * 8,
        ]
    )
    for _ in range(rng.choice([1, 10, 200])):
        at = rng.randrange(len(data) // 4) * 4
        data[at : at + len(pattern)] = pattern[: len(data) - at]
    if rng.random() < 0.1:
        data = bytearray(pattern * (len(data) // len(pattern) + 1))[: len(data)]
    tensor.data = bytes(data)
    return f"{pattern.hex()} in {tensor.name!r:.60}"


def scale_sizes(image: Image, rng: Random) -> str | None:
    """Sizes of the model that fit together in other ways than its tensors."""
    suffixes = [
        b".head_count",
        b".head_count_kv",
        b".key_length",
        b".value_length",
        b".embedding_length",
        b".block_count",
    ]
    suffixes += [b".dimension_count", b".feed_forward_length"]
    chosen = [item for item in image.entries if isinstance(item.key, bytes) and item.key.endswith(tuple(suffixes))]
    if not chosen:
        return None
    factor = rng.choice([2, 4, 16, 1 << 10, 1 << 20, 1 << 26])
    done = rng.sample(chosen, min(len(chosen), rng.choice([1, 2, 3, 8])))
    for item in done:
        if type(item.value) is int:
            item.value = min(max(item.value * factor if rng.random() < 0.7 else item.value // 2, 1), 2**31 - 1)
    return "sizes " + ", ".join(f"{item.key!r:.40} = {item.value!r:.20}" for item in done)


def _any_tensor(image: Image, rng: Random) -> Tensor | None:
    return rng.choice(image.tensors) if image.tensors else None


def _bytes(text: Any) -> bytes:
    return text if isinstance(text, bytes) else text.data if isinstance(text, Lie) else b"x"


GGUF_EDITS: list[GgufEdit] = [
    set_scalar, set_scalar, set_scalar, set_text, set_template, set_template, lie_about_type, lie_about_length,
    edit_array, edit_array, edit_tokens, edit_tokens, edit_tokens, change_kind, move_entries, move_entries, set_counts,
    set_dims, set_dims, resize, set_type, set_type, set_type, set_offset, move_tensors, poison_data, poison_data,
    poison_data, scale_sizes, scale_sizes,
]  # fmt: skip
