"""A request that is known to be servable: everything the caller can get wrong is refused here, before any work."""

from __future__ import annotations

import operator
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

from forerun.errors import RequestError
from forerun.models.grammar import Grammar
from forerun.models.tokenizer import check_text
from forerun.sampling.distribution import argmax_suffices
from forerun.types import MAX_GENERATED_SEED, SamplingParams, VerifyRule
from forerun.verify import RULES


@dataclass(frozen=True, slots=True)
class Limits:
    """What the model and the engine allow. Set when the model is loaded.

    Attributes:
        vocab_size: ids are below this.
        max_model_len: tokens of prompt and output at most.
        eos_ids: the model's own ids that end an output.
    """

    vocab_size: int
    max_model_len: int
    eos_ids: frozenset[int]


@dataclass(frozen=True, slots=True)
class Request:
    """One request, checked. Set by `prepare`.

    Attributes:
        prompt_token_ids: the prompt, not empty.
        params: what was asked for.
        rule: the verification rule.
        noise_key: key of all the request's noise, 64 bits.
        seed: what the result reports; None where the seed would not give the output again.
        max_len: tokens of prompt and output at most: the context limit, or less by max_tokens.
        end_ids: ids that end the output.
        is_argmax: whether every token is the argmax of its raw row, as long as no id is banned.
        prediction: ids of the text that the caller expects, empty without one.
        salt: it shares what the cache and the drafters hold with requests of the same salt only.
        grammar: what the output must look like; None leaves it free.
        shown_ids: control tokens whose names are part of the text, such as those that mark tool calls.
    """

    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    rule: VerifyRule
    noise_key: int
    seed: int | None
    max_len: int
    end_ids: frozenset[int]
    is_argmax: bool
    prediction: tuple[int, ...] = ()
    salt: str = ""
    grammar: Grammar | None = None
    shown_ids: frozenset[int] = frozenset()


def prepare(
    prompt_token_ids: Sequence[int],
    params: SamplingParams,
    rule: VerifyRule,
    limits: Limits,
    noise_key: int | None = None,
    prediction: Sequence[int] = (),
    salt: str = "",
    grammar: Grammar | None = None,
    shown_ids: frozenset[int] = frozenset(),
) -> Request:
    """Checks a request and settles what it leaves open.

    Args:
        prompt_token_ids: the prompt.
        params: what is asked for.
        rule: the verification rule.
        limits: what the model allows.
        noise_key: the noise key instead of a drawn one; how a rule that refuses seeds is made repeatable.
        prediction: ids of the text that the caller expects.
        salt: requests of one salt may learn from each other; others must not.
        grammar: what the output must look like.
        shown_ids: control tokens whose names are part of the text.

    Raises:
        RequestError: the prompt is empty, has an id outside the vocabulary or leaves no room for a token, the
            prediction has such an id or is longer than the context limit, a parameter names an id outside the
            vocabulary, a stop string is no valid Unicode, the rule is unknown or can't honour the seed, or a grammar
            meets ignore_eos.
    """
    prompt = _checked_prompt(prompt_token_ids, limits)
    expected = _checked_prediction(prediction, limits)
    for text in params.stop:
        check_text(text, "stop")
    for token_id in params.logit_bias:
        _check_id(token_id, limits.vocab_size, "logit_bias", "logit_bias")
    for index, token_id in enumerate(params.stop_token_ids):
        _check_id(token_id, limits.vocab_size, f"stop_token_ids[{index}]", "stop_token_ids")
    if rule not in RULES:
        raise RequestError(f"verify is {rule!r}, but must be one of: {', '.join(RULES)}", "verify")
    if grammar is not None and params.ignore_eos:
        raise RequestError(
            f"ignore_eos is set, but the output ends where its {grammar.wanted.title} does; leave out one of them",
            "ignore_eos",
        )
    key, seed = _key_and_seed(params, rule, noise_key)
    room = limits.max_model_len - len(prompt)
    return Request(
        prompt_token_ids=prompt,
        params=params,
        rule=rule,
        noise_key=key,
        seed=seed,
        max_len=len(prompt) + (room if params.max_tokens is None else min(room, params.max_tokens)),
        end_ids=frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else limits.eos_ids),
        is_argmax=argmax_suffices(params),
        prediction=expected,
        salt=salt,
        grammar=grammar,
        shown_ids=shown_ids,
    )


def _checked_prompt(token_ids: Sequence[int], limits: Limits) -> tuple[int, ...]:
    if not len(token_ids):
        raise RequestError("the prompt has no tokens, but must have at least one", "prompt")
    if len(token_ids) >= limits.max_model_len:
        raise RequestError(
            f"the prompt has {len(token_ids)} tokens, but must have fewer than the context limit of "
            f"{limits.max_model_len} tokens, so that at least one can follow",
            "prompt",
        )
    return tuple(
        _check_id(token_id, limits.vocab_size, f"prompt token {index}", "prompt")
        for index, token_id in enumerate(token_ids)
    )


def _checked_prediction(token_ids: Sequence[int], limits: Limits) -> tuple[int, ...]:
    if len(token_ids) > limits.max_model_len:
        raise RequestError(
            f"the prediction has {len(token_ids)} tokens, but must have at most the context limit of "
            f"{limits.max_model_len} tokens",
            "prediction",
        )
    return tuple(
        _check_id(token_id, limits.vocab_size, f"prediction token {index}", "prediction")
        for index, token_id in enumerate(token_ids)
    )


def _check_id(token_id: int, vocab_size: int, name: str, param: str) -> int:
    try:
        # True is an int to Python, but nobody's token.
        index = -1 if isinstance(token_id, bool) else operator.index(token_id)
    except TypeError:
        index = -1
    if not 0 <= index < vocab_size:
        raise RequestError(f"{name} is {token_id!r}, but must be a token id from 0 to {vocab_size - 1}", param)
    return index


def check_seed(params: SamplingParams, rule: VerifyRule) -> None:
    """Raises RequestError for a seed that the rule can't honour."""
    if params.seed is not None and not RULES[rule].is_path_exact:
        raise RequestError(
            f"seed is {params.seed}, but verify rule {rule!r} keeps the law of the tokens and not their stream; a seed "
            "goes only with rule 'coupled', so choose that or leave the seed out",
            "seed",
        )


def _key_and_seed(params: SamplingParams, rule: VerifyRule, noise_key: int | None) -> tuple[int, int | None]:
    """The noise key, and the seed to report."""
    check_seed(params, rule)
    key = params.seed if params.seed is not None else noise_key
    if key is None:
        key = secrets.randbelow(MAX_GENERATED_SEED + 1)
    return key, key if RULES[rule].is_path_exact else None
