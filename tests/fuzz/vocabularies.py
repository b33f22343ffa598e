"""Vocabularies for the models of the fuzz: metadata of GGUF files, and tokenizer.json files as trees."""

from __future__ import annotations

from typing import Any

from tests.helpers import toy_vocab
from tests.helpers.gguf_files import CHAT_TEMPLATE, vocabulary
from tests.helpers.toy_spm import BYTE_TOKENS, LETTERS, PIECES, spm_metadata, wordpiece_metadata

SPECIAL = ["<s>", "</s>", "<|im_start|>", "<|im_end|>"]
WORDS = ["the", "rain", "in", "sp", "##ain", "##s", "a", "b", "12", ",", ".", "!", "é"]


def gguf_vocabulary(kind: str) -> dict[str, Any]:
    """Keys and values of one family, the chat template among them."""
    template = {"tokenizer.chat_template": CHAT_TEMPLATE}
    if kind == "llama":
        return spm_metadata(extra=[("<|im_end|>", 3), ("<tool>", 4), ("zz", 5)], eos_token_id=2) | template
    if kind == "bert":
        return wordpiece_metadata() | template
    if kind == "gemma4":
        return toy_vocab.metadata(model="gemma4", pre=None) | template
    return toy_vocab.metadata(pre=kind) | template


def json_vocabulary(kind: str) -> dict[str, Any]:
    """A tokenizer.json; control tokens and one user-defined token come first."""
    build = {"byte-level": _byte_level, "llama": _llama, "metaspace": _metaspace, "wordpiece": _wordpiece}[kind]
    data = build()
    names = ["<unk>", *SPECIAL]
    added = [_added(i, name, is_special=True) for i, name in enumerate(names)]
    added.append(_added(len(names), "<tool>", is_special=False) | {"rstrip": True})
    return {"version": "1.0", "truncation": None, "padding": None, "added_tokens": added} | data


def _added(token_id: int, name: str, *, is_special: bool) -> dict[str, Any]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": token_id, "content": name, **flags, "special": is_special}


def _first() -> list[str]:
    return ["<unk>", *SPECIAL, "<tool>"]


def _template() -> dict[str, Any]:
    return {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}},
    }


def _bpe(tokens: list[str], merges: list[Any], **changes: Any) -> dict[str, Any]:
    options = {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
    }
    return options | changes | {"vocab": {token: i for i, token in enumerate(tokens)}, "merges": merges}


def _byte_level() -> dict[str, Any]:
    tokens, merges, _ = vocabulary(300)
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    words = r"'s|'t| ?\p{L}+| ?\p{N}{1,3}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
    split = {"type": "Split", "pattern": {"Regex": words}, "behavior": "Isolated", "invert": False}
    return {
        "normalizer": {"type": "NFC"},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, byte_level]},
        "post_processor": byte_level,
        "decoder": byte_level,
        "model": _bpe([*_first(), *tokens[3:]], merges),
    }


def _llama() -> dict[str, Any]:
    tokens = [*_first(), *BYTE_TOKENS, *LETTERS, "▁t", "he", "▁the", "in"]
    steps = [{"type": "Prepend", "prepend": "▁"}, {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}]
    decoders = [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
        {"type": "Strip", "content": " ", "start": 1, "stop": 0},
    ]
    merges = [["▁", "t"], ["h", "e"], ["▁t", "he"], ["i", "n"]]
    return {
        "normalizer": {"type": "Sequence", "normalizers": steps},
        "pre_tokenizer": None,
        "post_processor": _template(),
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": _bpe(tokens, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True),
    }


def _metaspace() -> dict[str, Any]:
    pieces = [*_first(), *PIECES, *LETTERS]
    metaspace = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": True}
    return {
        "normalizer": {"type": "Sequence", "normalizers": [{"type": "NFKC"}]},
        "pre_tokenizer": metaspace,
        "post_processor": _template(),
        "decoder": metaspace,
        "model": {
            "type": "Unigram",
            "unk_id": 0,
            "vocab": [[piece, -float(rank)] for rank, piece in enumerate(dict.fromkeys(pieces))],
            "byte_fallback": False,
        },
    }


def _wordpiece() -> dict[str, Any]:
    return {
        "normalizer": {
            "type": "BertNormalizer",
            "clean_text": True,
            "handle_chinese_chars": True,
            "strip_accents": None,
            "lowercase": True,
        },
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "post_processor": {"type": "BertProcessing", "sep": ["</s>", 2], "cls": ["<s>", 1]},
        "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": False},
        "model": {
            "type": "WordPiece",
            "unk_token": "<unk>",
            "continuing_subword_prefix": "##",
            "max_input_chars_per_word": 100,
            "vocab": {token: i for i, token in enumerate([*_first(), *WORDS])},
        },
    }
