"""Vocabularies from tokenizer.json, as the `tokenizers` library reads them, for use behind `Tokenizer`.

The library turns the name of any added token in a text into that token, control tokens included. So those are taken
out of what it gets to see (F049). It also adds begin tokens by a template; that is left to `Tokenizer` (F048).
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import tokenizers

from forerun.errors import LoadError, one_line, shown
from forerun.models.sizes import MAX_VOCAB_SIZE
from forerun.models.tokenizer_codec import SPACE_MARK, Codec, alphabet_bytes, end_ids, piece_bytes
from forerun.models.tokenizer_components import check_components, steps_of
from forerun.models.tokenizer_library import library_encode, library_errors
from forerun.models.tokenizer_names import NameRule

_CONFIGURED = ("bos_token", "eos_token", "pad_token", "cls_token", "sep_token", "mask_token")
_MAX_IDS_PER_TOKEN, _FEW_IDS = 16, 1 << 16
_BYTE_LEVEL, _PIECES = {"ByteLevel"}, {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}


@dataclass(frozen=True, slots=True)
class _AddedToken:
    token_id: int
    name: str
    is_special: bool
    rule: NameRule


def json_codec(text: str, config: Mapping[str, Any], vocab_size: int) -> Codec:
    """The codec of a tokenizer.json file; arguments and errors as `Tokenizer.from_tokenizer_json`."""
    try:
        return _codec(_parse(text), config, vocab_size)
    except (AttributeError, IndexError, KeyError, RecursionError, TypeError, ValueError) as error:
        raise LoadError(f"tokenizer.json or its config is malformed: {one_line(repr(error))}") from error


def _codec(data: dict[str, Any], config: Mapping[str, Any], vocab_size: int) -> Codec:
    check_components(data)
    added = [_read_added(i, entry) for i, entry in enumerate(data.get("added_tokens") or [])]
    tokens = _token_list(data["model"], added, vocab_size)
    ids = {token: i for i, token in reversed(list(enumerate(tokens))) if token}
    bos_id, adds_bos = _begin(data.get("post_processor"), config, ids)
    own_ends = _own_ends(config, ids)
    roles = [i for i in (bos_id, *own_ends) if i is not None]
    for i in roles:
        if not 0 <= i < len(tokens):
            raise LoadError(f"a begin or end token is {shown(i)}, but must be an id between 0 and {len(tokens) - 1}")
    special = _special_names(added, config, ids) | {tokens[i]: i for i in roles}
    drops_space, ordinary_bytes = _byte_rule(data.get("decoder"))
    named = {token.token_id for token in added if not _is_spelled(data["model"], token)}.union(special.values())
    return Codec(
        tokens=tokens,
        special_ids=frozenset(special.values()),
        encode=_encode(_without_special(data, added, special)),
        token_bytes=lambda i: tokens[i].encode("utf-8", "replace") if i in named else ordinary_bytes(tokens[i]),
        drops_space=drops_space,
        name_rules={token.token_id: token.rule for token in added},
        bos_id=bos_id,
        adds_bos=adds_bos,
        eos_ids=end_ids(own_ends, special),
    )


def _parse(text: str) -> dict[str, Any]:
    try:
        data: dict[str, Any] = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise LoadError(f"tokenizer.json is not valid JSON: {one_line(error)}") from error
    model = data.get("model") if isinstance(data, dict) else None
    if not isinstance(model, dict) or not isinstance(model.get("vocab"), dict | list):
        raise LoadError("tokenizer.json has no model.vocab; it must be a file of the tokenizers library")
    return data


def _read_added(i: int, entry: Any) -> _AddedToken:
    try:
        rule = NameRule(bool(entry.get("lstrip")), bool(entry.get("rstrip")), bool(entry.get("single_word")))
        return _AddedToken(int(entry["id"]), str(entry["content"]), bool(entry["special"]), rule)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        found = one_line(repr(error))
        raise LoadError(
            f"added_tokens[{i}] of tokenizer.json must have an id, a content and a special flag: {found}"
        ) from error


def _token_list(model: Mapping[str, Any], added: list[_AddedToken], vocab_size: int) -> list[str]:
    """The entry of every id; empty for an id without a token."""
    vocab = model["vocab"]
    entries = {i: piece for i, (piece, _) in enumerate(vocab)} if isinstance(vocab, list) else {}
    if isinstance(vocab, dict):
        entries = {i: token for token, i in vocab.items()}
    for token in added:
        known = entries.setdefault(token.token_id, token.name)
        if known != token.name:  # text that spells the one would become the other
            names = f"{shown(known)} and {shown(token.name)}"
            raise LoadError(f"tokenizer.json gives the id {token.token_id} to two tokens, {names}")
    # Ids without a token cost memory, too, so there can't be many more of them than the model has rows for.
    limit = min(MAX_VOCAB_SIZE, max(vocab_size, _FEW_IDS, _MAX_IDS_PER_TOKEN * len(entries)))
    for i in entries:
        if not 0 <= i < limit:
            raise LoadError(f"tokenizer.json has the token id {shown(i)}, but ids must be between 0 and {limit - 1}")
    return [entries.get(i, "") for i in range(max(vocab_size, max(entries, default=-1) + 1))]


def _special_names(added: list[_AddedToken], config: Mapping[str, Any], ids: Mapping[str, int]) -> dict[str, int]:
    """Names and ids of the control tokens: those marked so, and those that the config gives a role."""
    names = [token.name for token in added if token.is_special]
    names += [_content(config.get(key)) for key in _CONFIGURED]
    names += [_content(entry) for entry in config.get("additional_special_tokens") or ()]
    return {name: ids[name] for name in names if name in ids}


def _content(entry: Any) -> str:
    """The text of a token in tokenizer_config.json, which has it plain or as `AddedToken`; empty for none."""
    content = entry.get("content") if isinstance(entry, Mapping) else entry
    return content if isinstance(content, str) else ""


def _without_special(data: dict[str, Any], added: list[_AddedToken], special: Mapping[str, int]) -> dict[str, Any]:
    """The file's content as the library shall see it: no control token, no template, no padding.

    Other added tokens get their place in the model's vocabulary, because the library counts ids anew for those that
    have none.
    """
    model = dict(data["model"])
    others = [token for token in added if token.name not in special]
    if isinstance(model["vocab"], list):
        model["vocab"] = _list_without_special(model["vocab"], others, special)
    else:
        unknown = model.get("unk_token")
        kept = {token: i for token, i in model["vocab"].items() if token not in special or token == unknown}
        model["vocab"] = kept | {token.name: token.token_id for token in others}
    if "merges" in model:
        model["merges"] = [merge for merge in model["merges"] if not _spells_any(merge, special)]
    entries = [entry for entry in data.get("added_tokens") or [] if entry["content"] not in special]
    nothing = dict.fromkeys(("post_processor", "truncation", "padding"))
    return {**data, **nothing, "model": model, "added_tokens": entries}


def _list_without_special(
    pieces: list[list[Any]], others: list[_AddedToken], special: Mapping[str, int]
) -> list[list[Any]]:
    """A scored vocabulary, whose ids are positions, so that what is taken out must leave an entry behind."""
    unguessable = secrets.token_hex(16)  # else a text that holds such an entry would become the control token
    kept = [[f"{unguessable}{i}" if piece in special else piece, score] for i, (piece, score) in enumerate(pieces)]
    for token in sorted(others, key=lambda token: token.token_id):
        kept += [[f"{unguessable}{i}", 0.0] for i in range(len(kept), token.token_id)]
        if token.token_id == len(kept):
            kept.append([token.name, 0.0])
    return kept


def _spells_any(merge: str | list[str], names: Mapping[str, int]) -> bool:
    left, right = merge.split(" ") if isinstance(merge, str) else merge
    return left in names or right in names or left + right in names


def _is_spelled(model: Mapping[str, Any], token: _AddedToken) -> bool:
    """An added token that the model has, too, is spelled like the model's other tokens; in WordPiece all are words."""
    return model.get("type") == "WordPiece" or (isinstance(model["vocab"], dict) and token.name in model["vocab"])


def _encode(data: dict[str, Any]) -> Callable[[str, bool], list[int]]:
    whole = _library_tokenizer(data)
    splitters = list(steps_of(data.get("pre_tokenizer"), "pretokenizers"))
    if not any(step.get("prepend_scheme") == "first" for step in splitters):
        return library_encode(whole)
    # In this scheme only the beginning of a prompt gets a space in front.
    steps = [step | {"prepend_scheme": "never"} if "prepend_scheme" in step else step for step in splitters]
    continued = data | {"pre_tokenizer": {"type": "Sequence", "pretokenizers": steps}}
    return library_encode(whole, _library_tokenizer(continued))


def _library_tokenizer(data: dict[str, Any]) -> tokenizers.Tokenizer:
    with library_errors(lambda words: LoadError(f"tokenizer.json can't be read by the tokenizers library: {words}")):
        tokenizer = tokenizers.Tokenizer.from_str(json.dumps(data, ensure_ascii=False))
    for entry in data["added_tokens"]:
        found = tokenizer.token_to_id(entry["content"])
        if found != entry["id"]:
            stated = f"gives {shown(entry['content'])} the id {shown(entry['id'])}"
            raise LoadError(f"tokenizer.json {stated}, but it reads as {found}")
    return tokenizer


def _byte_rule(decoder: Any) -> tuple[bool, Callable[[str], bytes]]:
    """(one leading space of a text is not its own, the bytes of an ordinary token)."""
    steps = {str(step.get("type")): step for step in steps_of(decoder, "decoders")}
    kinds = steps.keys()
    if kinds == _BYTE_LEVEL:
        return False, alphabet_bytes
    if kinds == {"WordPiece"}:
        prefix = str(steps["WordPiece"].get("prefix", "##"))
        return True, lambda token: _word_piece_bytes(token, prefix)
    if kinds and kinds <= _PIECES:
        metaspace = steps.get("Metaspace", {})
        adds_space = metaspace.get("prepend_scheme", "always" if metaspace.get("add_prefix_space", True) else "never")
        drops_space = "Strip" in kinds or ("Metaspace" in kinds and adds_space != "never")
        mark = str(metaspace.get("replacement", SPACE_MARK))
        to_bytes = piece_bytes if "ByteFallback" in kinds else _text_piece_bytes
        return drops_space, lambda token: to_bytes(token, mark)
    raise LoadError(
        f"the decoder of tokenizer.json is {one_line(' + '.join(sorted(kinds)), 80) or 'missing'}, "
        "but must be ByteLevel, WordPiece, Metaspace or ByteFallback with its companions"
    )


def _text_piece_bytes(token: str, space_mark: str) -> bytes:
    return token.replace(space_mark, " ").encode("utf-8", "replace")


def _word_piece_bytes(token: str, prefix: str) -> bytes:
    return (token.removeprefix(prefix) if token.startswith(prefix) else f" {token}").encode("utf-8", "replace")


def _begin(processor: Any, config: Mapping[str, Any], ids: Mapping[str, int]) -> tuple[int | None, bool]:
    """(the begin token, whether every prompt gets it).

    The template in the file says what comes before a text. `add_bos_token` overrules it, as in the tokenizer classes
    that have this option. A template that puts several tokens there is no begin token.
    """
    template = _template_start(processor)
    template_id = ids.get(template[0]) if len(template) == 1 else None
    configured = ids.get(_content(config.get("bos_token")), config.get("bos_token_id"))
    bos_id = configured if isinstance(configured, int) else template_id
    adds_bos = config.get("add_bos_token")
    return bos_id, bool(adds_bos) if adds_bos is not None else bos_id is not None and bos_id == template_id


def _template_start(processor: Any) -> list[str]:
    """The tokens that the file's template puts before a text."""
    for step in steps_of(processor, "processors"):
        if step.get("type") == "TemplateProcessing":
            names = []
            for part in step.get("single") or ():
                if "SpecialToken" not in part:
                    break
                names.append(str(part["SpecialToken"]["id"]))
            return names
        if step.get("type") in ("BertProcessing", "RobertaProcessing"):
            return [str(step["cls"][0])]
    return []


def _own_ends(config: Mapping[str, Any], ids: Mapping[str, int]) -> list[int | None]:
    named = config.get("eos_token_id")
    return [ids.get(_content(config.get("eos_token"))), *([named] if isinstance(named, int) else named or ())]
