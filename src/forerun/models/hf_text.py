"""Tokenizer and chat template of a Hugging Face folder."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from forerun.errors import LoadError, one_line, shown
from forerun.models.chat_template import ChatTemplate
from forerun.models.hf_json import parse_object, read_object, read_text
from forerun.models.tokenizer import Tokenizer

TOKENIZER_FILE = "tokenizer.json"
_TOKENIZER_CONFIG = "tokenizer_config.json"
_SPECIAL_TOKENS = "special_tokens_map.json"
_GENERATION_CONFIG = "generation_config.json"
_TEMPLATE_FILE = "chat_template.jinja"


def read_tokenizer(folder: Path, config: Mapping[str, Any], vocab_size: int) -> Tokenizer:
    """The tokenizer of a folder.

    Args:
        folder: with tokenizer.json; read are also tokenizer_config.json, special_tokens_map.json and
            generation_config.json where they are there. All ids that generation_config.json names as ends end output.
        config: content of config.json, which names the ends where generation_config.json doesn't.
        vocab_size: rows of the embedding.
    Raises:
        LoadError: a file is missing or malformed, or there are more tokens than rows.
    """
    if not (folder / TOKENIZER_FILE).exists():
        raise LoadError(f"{folder} has no {TOKENIZER_FILE}, the only kind of tokenizer that is read from a folder")
    text = read_text(folder / TOKENIZER_FILE)
    roles = _roles(folder, config)
    tokenizer = Tokenizer.from_tokenizer_json(text, roles, vocab_size=vocab_size)
    if tokenizer.vocab_size > vocab_size:
        # Some models of a series share a file that holds control tokens for the larger ones.
        tokenizer = Tokenizer.from_tokenizer_json(_without_rowless(text, vocab_size), roles, vocab_size=vocab_size)
    if tokenizer.vocab_size > vocab_size:
        raise LoadError(f"{TOKENIZER_FILE} has {tokenizer.vocab_size} tokens, but the embedding only {vocab_size} rows")
    return tokenizer


def read_chat_template(folder: Path, tokenizer: Tokenizer) -> ChatTemplate | None:
    """The template in chat_template.jinja, else in tokenizer_config.json; None where there is none.

    Raises:
        LoadError: it is no template, or there are several and none is named `default`.
    """
    if (folder / _TEMPLATE_FILE).exists():
        return ChatTemplate.for_tokenizer(read_text(folder / _TEMPLATE_FILE), tokenizer)
    stated = _optional(folder, _TOKENIZER_CONFIG).get("chat_template")
    if stated is None:
        return None
    source = stated
    if isinstance(stated, list):
        entries = [
            entry for entry in reversed(stated) if isinstance(entry, dict) and isinstance(entry.get("name"), str)
        ]
        named = {entry["name"]: entry.get("template") for entry in entries}
        source = named.get("default")
        if source is None:
            found = one_line(", ".join(sorted(named)), 80) or "nothing"
            raise LoadError(f"chat_template in {_TOKENIZER_CONFIG} has {found}, but no default")
    if not isinstance(source, str):
        raise LoadError(f"chat_template in {_TOKENIZER_CONFIG} is {shown(source)}, but must be a string")
    return ChatTemplate.for_tokenizer(source, tokenizer)


def _optional(folder: Path, name: str) -> dict[str, Any]:
    return read_object(folder / name) if (folder / name).exists() else {}


def _roles(folder: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """What the tokenizer must know besides its file: tokens with a role, and the ids that begin and end a text."""
    stated = _optional(folder, _TOKENIZER_CONFIG)
    roles = _optional(folder, _SPECIAL_TOKENS) | {key: value for key, value in stated.items() if value is not None}
    generation = _optional(folder, _GENERATION_CONFIG)
    ends = generation.get("eos_token_id")
    where = _GENERATION_CONFIG
    if ends is None:
        ends, where = config.get("eos_token_id"), "config.json"
    ends = [] if ends is None else ends if isinstance(ends, list) else [ends]
    if not all(type(token_id) is int for token_id in ends):
        raise LoadError(f"eos_token_id in {where} is {shown(ends)}, but must be a token id or a list of them")
    return roles | {"eos_token_id": ends, "bos_token_id": generation.get("bos_token_id")}


def _without_rowless(text: str, vocab_size: int) -> str:
    """The file without control tokens for which the embedding has no row."""
    data = parse_object(text, TOKENIZER_FILE)
    added = data.get("added_tokens") or []
    data["added_tokens"] = [entry for entry in added if not entry["special"] or int(entry["id"]) < vocab_size]
    return json.dumps(data, ensure_ascii=False)
