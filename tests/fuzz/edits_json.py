"""Edits of JSON files, safetensors and templates that know the structure; see `edits_gguf`."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from random import Random
from typing import Any

from tests.fuzz import values
from tests.fuzz.parts import Json, Safetensors, Source
from tests.fuzz.templates import hostile_template

TreeEdit = Callable[[Any, Random], str | None]

_NORMALIZERS: list[Any] = [
    {"type": "Replace", "pattern": {"String": "a"}, "content": "b" * 1000},
    {"type": "Replace", "pattern": {"String": ""}, "content": "xyz"},
    {"type": "Replace", "pattern": {"Regex": "."}, "content": "\ud800"},
    {"type": "Prepend", "prepend": "▁" * 10_000},
    {"type": "Precompiled", "precompiled_charsmap": "AAAA"},
    {"type": "Precompiled", "precompiled_charsmap": "/////wAAAAAAAAAA"},
    {"type": "Precompiled", "precompiled_charsmap": "BAAAAAEAAAABAAAAYWFhAA=="},
    {"type": "Strip", "strip_left": True, "strip_right": True},
    {"type": "Nmt"}, {"type": "NFKD"}, {"type": "StripAccents"}, {"type": "Lowercase"}, {"type": "ByteLevel"},
    {"type": "BertNormalizer", "clean_text": True, "handle_chinese_chars": True, "strip_accents": None, "lowercase": 7},
    {"type": "Sequence", "normalizers": [{"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 30}] * 12},
]  # fmt: skip
_SPLITTERS: list[Any] = [
    {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
    {"type": "Metaspace", "replacement": "ab", "prepend_scheme": "always", "split": True},
    {"type": "Metaspace", "replacement": "", "prepend_scheme": "never", "split": False},
    {"type": "Metaspace", "replacement": "é", "prepend_scheme": "sometimes", "split": False},
    {"type": "Digits", "individual_digits": True}, {"type": "Whitespace"}, {"type": "WhitespaceSplit"},
    {"type": "Punctuation", "behavior": "Contiguous"}, {"type": "UnicodeScripts"}, {"type": "BertPreTokenizer"},
    {"type": "CharDelimiterSplit", "delimiter": ""}, {"type": "FixedLength", "length": 0},
    {"type": "FixedLength", "length": (1 << 64) - 1},
    {"type": "Split", "pattern": {"String": ""}, "behavior": "MergedWithNext", "invert": True},
]  # fmt: skip
_DECODERS: list[Any] = [
    {"type": "ByteLevel"}, {"type": "ByteFallback"}, {"type": "Fuse"}, {"type": "CTC", "pad_token": "a"},
    {"type": "WordPiece", "prefix": "", "cleanup": True}, {"type": "WordPiece", "prefix": 7, "cleanup": True},
    {"type": "Strip", "content": " ", "start": 1 << 40, "stop": -1}, {"type": "BPEDecoder", "suffix": ""},
    {"type": "Metaspace", "replacement": "", "add_prefix_space": True}, {"type": "Sequence", "decoders": []},
]  # fmt: skip
_MODELS: list[Any] = [
    {"type": "WordLevel", "vocab": {"a": 0, "<unk>": 1}, "unk_token": "<unk>"},
    {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "missing"},
    {"type": "WordPiece", "unk_token": "?", "continuing_subword_prefix": "", "max_input_chars_per_word": 0,
     "vocab": {}},
    {"type": "WordPiece", "unk_token": "a", "continuing_subword_prefix": "", "max_input_chars_per_word": 1 << 62,
     "vocab": {"": 0, "a": 1}},
    {"type": "Unigram", "unk_id": None, "vocab": [["", 0.0], ["a", -1.0]], "byte_fallback": True},
    {"type": "Unigram", "unk_id": 7, "vocab": [["a", 1e308], ["aa", -1e308], ["<0x41>", 0]], "byte_fallback": True},
    {"type": "Unigram", "unk_id": 0, "vocab": [], "byte_fallback": False},
    {"type": "BPE", "vocab": {"a": 0, "aa": 1, "aaa": 2}, "merges": [["a", "a"], ["aa", "a"]], "dropout": 0.5},
    {"type": "BPE", "vocab": {"a": 0, "aa": 0}, "merges": ["a a"], "unk_token": "a", "cache_capacity": 1 << 60},
    {"type": "BPE", "vocab": {}, "merges": [], "byte_fallback": True, "fuse_unk": True, "unk_token": "x"},
    {"type": "BPE", "vocab": {"a": 1 << 32, "b": -1}, "merges": []},
    {"vocab": {"a": 0}}, {"type": "Nothing", "vocab": {}}, {"type": "BPE", "vocab": [], "merges": None},
]  # fmt: skip
_PROCESSORS: list[Any] = [
    {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "nope"}}], "pair": [], "special_tokens": {}},
    {"type": "TemplateProcessing", "single": [7], "pair": None, "special_tokens": None},
    {"type": "BertProcessing", "sep": [], "cls": []}, {"type": "RobertaProcessing", "cls": ["<s>", 1 << 70]},
    {"type": "Sequence", "processors": [{"type": "Sequence", "processors": None}]},
]  # fmt: skip


def set_node(tree: Any, rng: Random) -> str | None:
    """Some value becomes another."""
    found = _some_node(tree, rng)
    if found is None:
        return None
    node, key = found
    old = node[key]
    if isinstance(old, int | float) and not isinstance(old, bool) and rng.random() < 0.7:
        node[key] = values.number(rng, old) if isinstance(old, int) else rng.choice(values.FLOATS)
    else:
        node[key] = rng.choice([values.json_scalar(rng), values.nested(rng), [old], {"a": old}, [old] * 50])
    return f"{key!r:.60} = {node[key]!r:.80}"


def move_node(tree: Any, rng: Random) -> str | None:
    """A value goes, changes its key, or takes the place of another."""
    found, other = _some_node(tree, rng), _some_node(tree, rng)
    if found is None or other is None:
        return None
    (node, key), (other_node, other_key) = found, other
    how = rng.choice(["drop", "copy", "swap", "rename"])
    if how == "drop":
        del node[key]
    elif how == "copy":
        node[key] = copy.deepcopy(other_node[other_key])
    elif how == "swap":
        ours, theirs = copy.deepcopy(node[key]), copy.deepcopy(other_node[other_key])
        node[key], other_node[other_key] = theirs, ours
    elif isinstance(node, dict):
        node[values.text(rng).decode("utf-8", "replace")] = node.pop(key)
    return f"{how} {key!r:.60} {other_key!r:.60}"


def nest_deeply(tree: Any, rng: Random) -> str | None:
    found = _some_node(tree, rng)
    if found is None:
        return None
    node, key = found
    depth = rng.choice([10, 100, 150, 400])
    value: Any = node[key]
    for _ in range(depth):
        value = rng.choice([[value], {"type": "Sequence", "normalizers": [value]}])
    node[key] = value
    return f"{key!r:.60} nested {depth} deep"


def _some_node(tree: Any, rng: Random) -> tuple[Any, Any] | None:
    """(container, key) of some value; every level is as likely as those below it."""
    if not isinstance(tree, dict | list) or not tree:
        return None
    node = tree
    while True:
        key = rng.choice(list(node)) if isinstance(node, dict) else rng.randrange(len(node))
        if not isinstance(node[key], dict | list) or not node[key] or rng.random() < 0.3:
            return node, key
        node = node[key]


def set_size(tree: Any, rng: Random) -> str | None:
    """One of the sizes in a config.json, consistent or not; or a key that is new there."""
    target = tree["text_config"] if isinstance(tree.get("text_config"), dict) else tree
    sizes = ["hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"]
    sizes += ["head_dim", "vocab_size", "max_position_embeddings", "sliding_window", "max_window_layers"]
    sizes += ["original_max_position_embeddings", "sliding_window_pattern", "query_pre_attn_scalar"]
    for key in rng.sample(sizes, rng.choice([1, 1, 2, 3])):
        old = target.get(key)
        factor = rng.choice([2, 4, 1 << 10, 1 << 20])
        target[key] = old * factor if isinstance(old, int) and rng.random() < 0.4 else values.number(rng, old)
    return "sizes " + ", ".join(f"{key} = {target.get(key)!r:.30}" for key in sizes if key in target)


def set_rope(tree: Any, rng: Random) -> str | None:
    target = tree["text_config"] if isinstance(tree.get("text_config"), dict) else tree
    key = rng.choice(["rope_scaling", "rope_parameters"])
    kind = rng.choice(["default", "linear", "llama3", "longrope", "yarn", "dynamic", "su", "", None, 7])
    names = ["factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings", "attention_factor"]
    names += ["beta_fast", "beta_slow", "mscale", "mscale_all_dim", "rope_theta", "partial_rotary_factor"]
    chosen = {name: rng.choice([*values.FLOATS, *values.NUMBERS]) for name in rng.sample(names, rng.randrange(6))}
    factors = [rng.choice(values.FLOATS) for _ in range(rng.choice([0, 4, 4, 100]))]
    target[key] = {"rope_type": kind, "short_factor": factors, "long_factor": [1.0] * 4} | chosen
    if kind != "longrope" and rng.random() < 0.9:
        del target[key]["short_factor"], target[key]["long_factor"]
    target["rope_theta"] = rng.choice([1e4, 1e4, *values.FLOATS])
    return f"{key} = {target[key]!r:.200}"


def set_component(tree: Any, rng: Random) -> str | None:
    """A part of a tokenizer.json becomes one of another kind, by itself or in a sequence."""
    name, choices, parts = rng.choice(
        [
            ("normalizer", _NORMALIZERS, "normalizers"),
            ("normalizer", _NORMALIZERS, "normalizers"),
            ("pre_tokenizer", _SPLITTERS, "pretokenizers"),
            ("decoder", _DECODERS, "decoders"),
            ("model", _MODELS, ""),
            ("post_processor", _PROCESSORS, "processors"),
        ]
    )
    made = copy.deepcopy(rng.choice(choices))
    if parts and rng.random() < 0.4:
        made = {"type": "Sequence", parts: [made, *([tree[name]] if isinstance(tree.get(name), dict) else [])]}
    tree[name] = made
    return f"{name} = {made!r:.150}"


def set_regex(tree: Any, rng: Random) -> str | None:
    pattern = rng.choice(values.REGEXES)
    behavior = rng.choice(["Isolated", "Removed", "MergedWithPrevious", "Contiguous"])
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": behavior, "invert": rng.random() < 0.2}
    old = tree.get("pre_tokenizer")
    if rng.random() < 0.3:
        tree["normalizer"] = {"type": "Replace", "pattern": {"Regex": pattern}, "content": rng.choice(["", "a", "ab"])}
    else:
        parts = [split, old] if isinstance(old, dict) and rng.random() < 0.7 else [split]
        tree["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": parts}
    return f"regex {pattern!r:.80}"


def set_added(tree: Any, rng: Random) -> str | None:
    """Added tokens with huge, negative, doubled or odd ids, names and flags."""
    added = tree.get("added_tokens")
    if not isinstance(added, list):
        return None
    made = {
        "id": values.number(rng, len(added)),
        "content": values.text(rng).decode("utf-8", "replace"),
        "special": rng.random() < 0.5,
        **{flag: rng.random() < 0.3 for flag in ("single_word", "lstrip", "rstrip", "normalized")},
    }
    if added and rng.random() < 0.5:
        at = rng.randrange(len(added))
        added[at] = (added[at] if isinstance(added[at], dict) else {}) | dict(rng.sample(list(made.items()), 2))
    else:
        added += [made | {"id": made["id"] + i} for i in range(rng.choice([1, 1, 50]))]
    return f"added token {made!r:.150}"


def set_merges(tree: Any, rng: Random) -> str | None:
    model = tree.get("model")
    if not isinstance(model, dict) or not isinstance(model.get("vocab"), dict) or not model["vocab"]:
        return None
    tokens, vocab = list(model["vocab"]), model["vocab"]
    how = rng.choice(["merge", "merge", "id", "unk", "score"])
    if how == "merge" and isinstance(model.get("merges"), list):
        left, right = rng.choice([*tokens, "no such", "", " "]), rng.choice([*tokens, "missing", ""])
        model["merges"].insert(0, rng.choice([[left, right], f"{left} {right}", left, [left], [left, right, left], 7]))
        if rng.random() < 0.5:
            vocab[left + right] = values.number(rng, 300)
    elif how == "unk":
        model["unk_token"] = rng.choice([*tokens, "missing", 7, ""])
    else:
        vocab[rng.choice(tokens)] = rng.choice([values.number(rng, 5), -1, 2.5, "1", None])
    return f"{how} in model"


def set_entry(header: dict[str, Any], rng: Random) -> str | None:
    """What a safetensors header says of a tensor: type, shape, place or name."""
    names = [name for name in header if name != "__metadata__"]
    if not names:
        return None
    name, other = rng.choice(names), rng.choice(names)
    fields, how = header[name], rng.choice(["dtype", "shape", "offsets", "offsets", "swap", "rename", "drop", "twin"])
    if how == "drop":
        del header[name]
    elif how == "rename":
        header[rng.choice([values.text(rng).decode("utf-8", "replace"), name + ".x", "lm_head.weight"])] = header.pop(
            name
        )
    elif how == "swap":
        header[name], header[other] = header[other], header[name]
    elif not isinstance(fields, dict):
        return None
    elif how == "dtype":
        fields["dtype"] = rng.choice(["F64", "F32", "F16", "BF16", "I8", "BOOL", "F8_E4M3", "", "f32", None])
    elif how == "twin":
        fields["dtype"] = {"F16": "BF16", "BF16": "F16"}.get(str(fields.get("dtype")), "I32")
    elif how == "shape":
        shape = fields.get("shape") or [1]
        fields["shape"] = rng.choice(
            [shape[::-1], [1, *shape], [values.number(rng) for _ in shape], [shape[0] * 2], []]
        )
    else:
        begin, end = (fields.get("data_offsets") or [0, 0])[:2]
        fields["data_offsets"] = rng.choice(
            [
                [begin + 4, end + 4],
                [begin, end - 4],
                [end, begin],
                [values.number(rng), values.number(rng)],
                [0, end - begin],
            ]
        )
    return f"{how} of {name!r:.60}: {header.get(name)!r:.80}"


TREE_EDITS: dict[str, list[TreeEdit]] = {
    "config.json": [set_size, set_size, set_rope, set_node, set_node, move_node, nest_deeply],
    "tokenizer.json": [
        set_component, set_component, set_regex, set_regex, set_added, set_added, set_merges, set_merges, set_node,
        set_node, set_node, move_node, nest_deeply,
    ],
    "": [set_node, set_node, set_node, move_node, nest_deeply],
}  # fmt: skip


def edit_json(name: str, part: Json, rng: Random) -> str | None:
    """Any edit that a file of this name has."""
    if name == "tokenizer_config.json" and rng.random() < 0.5:
        source = hostile_template(rng)
        named = [{"name": "default", "template": source}, {"name": "tool_use", "template": 7}]
        part.tree["chat_template"] = source if rng.random() < 0.8 else named
        return f"chat_template = {source!r:.200}"
    edit = rng.choice(TREE_EDITS.get(name, TREE_EDITS[""]))
    try:
        return edit(part.tree, rng)
    except (AttributeError, KeyError, TypeError, IndexError):
        return None  # an earlier edit has left nothing there that it could work on


def edit_safetensors(part: Safetensors, rng: Random) -> str | None:
    how = rng.randrange(10)
    if how == 0:
        part.stated_len = values.number(rng, 400)
        return f"header length said to be {part.stated_len}"
    if how == 1:
        change = rng.choice([-1, -4, -1000, -len(part.data), 1, 4, 4096])
        part.data = part.data[:change] if change < 0 else part.data + bytes(change)
        return f"data changed by {change} bytes"
    if how == 2:
        data = bytearray(part.data)
        for _ in range(rng.choice([1, 50])):
            at = rng.randrange(len(data) + 1) // 2 * 2
            data[at : at + 4] = rng.choice(
                [b"\x00\x00\x80\x7f", b"\x00\x00\xc0\x7f", b"\xff\x7f\xff\x7f", b"\x01\x00\x80\x00"]
            )
        part.data = bytes(data[: len(part.data)])
        return "odd numbers in the data"
    edit = rng.choice([set_entry, set_entry, set_entry, set_node, move_node, nest_deeply])
    return edit(part.header, rng)


def edit_source(part: Source, rng: Random) -> str | None:
    part.text = hostile_template(rng)
    return f"template = {part.text!r:.200}"


def json_parts(tree: Any) -> Iterator[Any]:
    """Every container of a tree."""
    if isinstance(tree, dict | list):
        yield tree
        for value in tree.values() if isinstance(tree, dict) else tree:
            yield from json_parts(value)
