"""A byte-level tokenizer without a file: every text has ids, and three of them are control tokens."""

from __future__ import annotations

from typing import Any

from forerun.models.tokenizer import Tokenizer
from tests.helpers.gguf_files import vocabulary

CONTROL, USER_DEFINED = 3, 4


def metadata(**changes: Any) -> dict[str, Any]:
    """A byte vocabulary with three control tokens (0 to 2), some merges and one user-defined token, the last."""
    tokens, merges, types = vocabulary(330)
    keys = {
        "model": "gpt2",
        "pre": "smollm",
        "tokens": [*tokens, "<tool_call>"],
        "token_type": [*types, USER_DEFINED],
        "merges": merges,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "add_bos_token": False,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in (keys | changes).items() if value is not None}


def tokenizer(**changes: Any) -> Tokenizer:
    return Tokenizer.from_gguf(metadata(**changes))


TOY = tokenizer()
