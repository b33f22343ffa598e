"""Whether two models mean the same by their token ids."""

from __future__ import annotations

from forerun.errors import ConfigError
from forerun.models.tokenizer import Tokenizer


def check_same_vocabulary(target: Tokenizer, draft: Tokenizer, draft_name: str) -> None:
    """Compares every id that both have; one vocabulary may have more, padding or tokens of its own (F056).

    Raises:
        ConfigError: an id means something else, or is a control token in one model only; names the first and how many.
    """
    shared = min(target.vocab_size, draft.vocab_size)
    different = [
        token_id
        for token_id in range(shared)
        if target.token_bytes(token_id) != draft.token_bytes(token_id)
        or (token_id in target.special_ids) != (token_id in draft.special_ids)
    ]
    if different:
        first = different[0]
        raise ConfigError(
            f"draft model {draft_name} has another vocabulary: {len(different)} of {shared} ids differ, first {first}, "
            f"{target.token_text(first)!r} in the target and {draft.token_text(first)!r} in the draft model; name a "
            "draft model of the same vocabulary, or use drafter foreign"
        )
