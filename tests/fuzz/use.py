"""Opens a mutant as a user would, and says how it ended.

A mutant either works (it loads, encodes and decodes texts, renders conversations, runs passes) or ends in an error that
forerun raises on purpose, with a message that can be shown. Whatever else happens is a `Fault`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

import forerun._native as _native
import forerun.models.bound as bound
import forerun.models.template_sandbox as template_sandbox
from forerun.engine.llm import LLM
from forerun.errors import ConfigError, EngineFault, ForerunError, LoadError, RequestError
from forerun.models.tokenizer import Tokenizer
from forerun.ops.base import Weight
from forerun.ops.native import ISA_VARIABLE
from forerun.types import SamplingParams

MAX_MESSAGE_CHARS = 800
# Runs of letters, spaces and lines are what a regular expression can get lost in.
TEXTS = [
    "",
    "The rain in Spain: 12,345.6 times! é e\u0301 日本 👍🏽",
    "a" * 60,
    "x" * 40 + " " * 60 + "\n\n\t" + "1" * 40,
    "<|im_end|>\n<s> </s><|im_start|>system\n<tool> <0x41> <unk>▁▁",
]
STRANGE = "\U0010fffd \u0378 \U0001f9ff x"  # characters that no small vocabulary has
CONVERSATIONS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "Hello <|im_end|>"}],
    [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "a" * 200},
        {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": {"x": [1]}}}]},
        {"role": "user", "content": "And 日本?"},
    ],
]

_QUANTS = ["auto"] * 7 + ["f32", "bf16", "q8", "q4"]

How = Literal["works", "refused"]


class Fault(Exception):
    """A mutant ended in a way that nothing may end in."""


@dataclass(frozen=True)
class Verdict:
    """How a mutant ended; `errors` are the refusals on the way, of which a model that works may have some, too."""

    how: How
    errors: tuple[str, ...] = ()


def use_model(folder: Path, entry: str, number: int = 0) -> Verdict:
    """Loads a model and does a little of everything with it.

    Args:
        folder: where its files lie.
        entry: the file to open, "" for the folder.
        number: of the mutant, which chooses instruction set, threads and how weights and cache are kept.
    Raises:
        Fault: an error that nobody raised on purpose, or a message that can't be shown.
    """
    errors: list[str] = []
    with _settings(number):
        llm = _attempt(errors, folder, lambda: _open(folder / entry, number))
        if llm is None:
            return Verdict("refused", tuple(errors))
        prompt = [llm.config.vocab_size - 1, 0]
        for text in TEXTS:
            ids = _attempt(errors, folder, lambda text=text: _encoded(llm, text))
            prompt = ids or prompt
        for messages in CONVERSATIONS:
            _attempt(errors, folder, lambda messages=messages: llm.encode_messages(messages))
        _attempt(errors, folder, lambda: _generate(llm, prompt[:12]))
    return Verdict("works", tuple(errors))


def _open(path: Path, number: int) -> LLM:
    """In various ways, most often as the file has it."""
    quant = _QUANTS[number // 3 % len(_QUANTS)]
    return LLM(path, quant=quant, kv="f32" if number % 5 == 0 else "f16", threads=2 if number % 8 == 0 else 1)


def _attempt(errors: list[str], folder: Path, action: Callable[[], Any]) -> Any:
    """The result of an action; None, and its message among the errors, where it is refused."""
    try:
        return action()
    except ForerunError as error:
        _check_message(error, folder)
        errors.append(f"{type(error).__name__}: {error}")
        return None
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # the tokenizers library panics with one that is no Exception
        raise Fault(f"{type(error).__name__}: {error}"[:2000]) from error


def _check_message(error: ForerunError, folder: Path) -> None:
    text = str(error)
    if not isinstance(error, LoadError | ConfigError | RequestError | EngineFault):
        raise Fault(f"an error of type {type(error).__name__}: {text}") from error
    if isinstance(error, EngineFault) and "non-finite" not in text and "not finite" not in text:
        raise Fault(f"a fault of the engine: {text}") from error
    if isinstance(error, LoadError) and str(folder) not in text:
        raise Fault(f"a message that does not name the file: {text}") from error
    short = text.replace(str(folder), "")
    if not short.isprintable() or not 10 < len(short) <= MAX_MESSAGE_CHARS:
        raise Fault(f"a message that can't be shown, of {len(short)} characters: {text[:1000]!r}") from error


def _encoded(llm: LLM, text: str) -> list[int]:
    tokenizer = llm.tokenizer
    ids = list(llm.encode(text))
    if not all(type(i) is int and 0 <= i < tokenizer.vocab_size for i in ids):
        raise Fault(f"ids outside the vocabulary: {ids[:20]}")
    # What is unknown is a control token that any text can become.
    forged = _control_ids(tokenizer, text) - _control_ids(tokenizer, STRANGE)
    if forged:
        raise Fault(f"the text {text!r} became the control tokens {sorted(forged)[:9]} (F049)")
    tokenizer.encode(text, allow_special=True)
    for skip_special in (True, False):
        tokenizer.decode(ids, skip_special).encode()
    return ids


def _control_ids(tokenizer: Tokenizer, text: str) -> frozenset[int]:
    return tokenizer.special_ids.intersection(tokenizer.encode(text, add_bos=False))


def _generate(llm: LLM, prompt: list[int]) -> None:
    completion = llm.generate([prompt], SamplingParams(max_tokens=3, temperature=0.7, seed=1, ignore_eos=True))[0]
    if not all(0 <= i < llm.config.vocab_size for i in completion.token_ids):
        raise Fault(f"generated ids outside the vocabulary: {completion.token_ids}")


@contextmanager
def _settings(number: int) -> Iterator[None]:
    """Instruction set by number; weights in memory of their own; templates that may run for a short time only."""
    isas = _native.available_isas()
    create_executor, max_render_s = bound.create_executor, template_sandbox.MAX_RENDER_S
    before = os.environ.get(ISA_VARIABLE)
    os.environ[ISA_VARIABLE] = isas[number % len(isas)]
    bound.create_executor = lambda backend, config, build: create_executor(  # type: ignore[assignment]
        backend, config, lambda ops: build(_OwnMemory(ops, number))
    )
    template_sandbox.MAX_RENDER_S = 0.5
    try:
        yield
    finally:
        bound.create_executor, template_sandbox.MAX_RENDER_S = create_executor, max_render_s
        if before is None:
            del os.environ[ISA_VARIABLE]
        else:
            os.environ[ISA_VARIABLE] = before


class _OwnMemory:
    """Hands an `Ops` every weight in an allocation of exactly its size.

    In a mapped file the bytes around a tensor can be read, too. Here a sanitizer sees whoever reads past its end. Each
    lies at any address, as in a file.
    """

    def __init__(self, ops: Any, address: int) -> None:
        self._ops = ops
        self._address = address % 8
        self._copies: dict[int, tuple[Weight, Weight]] = {}

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = getattr(self._ops, name)
        return lambda *args: method(*map(self._own, args))

    def _own(self, value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(map(self._own, value))
        if not isinstance(value, Weight):
            return value
        if id(value) not in self._copies:
            data = np.empty(self._address + value.data.size, np.uint8)[self._address :]
            data[:] = value.data
            self._copies[id(value)] = (value, replace(value, data=data))
        return self._copies[id(value)][1]
