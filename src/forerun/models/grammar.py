"""Grammars over a model's tokens: which ids may follow, so that the output becomes what was asked for.

llguidance follows the bytes of the output through a grammar and says of every token whether its bytes may come next.
Here it gets the model's vocabulary, is kept within bounds, and is made to answer for any node of a draft tree: the
answer is a function of the grammar and of the output up to that node, whatever was asked before.

Where only one text can follow, only its usual tokens are allowed, not every way to cut it into tokens. So what a
grammar forces is known tokens ahead, and a model writes it as it was trained to. (A vocabulary that lacks bytes may
have no tokens for a text; where a grammar may ask for such a text, every way is allowed.)

The end-of-text ids of the model are allowed exactly where the output could end, and where nothing else can follow
they are all that is allowed. Other stop ids are ordinary tokens to a grammar.
"""

from __future__ import annotations

import re
import string
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import numpy as np

from forerun.errors import EngineFault, RequestError, one_line
from forerun.models.structured import Structured
from forerun.models.tokenizer import Tokenizer
from forerun.models.tokenizer_library import library_errors
from forerun.sampling.distribution import num_mask_words
from forerun.types import UInt32Array

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

MAX_COMPILED = 32  # grammars that a model keeps; the one that was used longest ago goes first
MAX_COMPILE_S = 5.0
_MARK = "\x02"  # joins no text to one token
_PRINTABLE = string.printable.encode()
_ESCAPE = re.compile(r"\\[xuU]")  # may stand for any byte


class Grammar:
    """A compiled grammar. Immutable; safe to share between threads and requests. Made by `GrammarCompiler`.

    Attributes:
        wanted: what it was made of.
    """

    def __init__(self, wanted: Structured, matcher: LLMatcher, vocab_size: int, eos_ids: Sequence[int]) -> None:
        self.wanted = wanted
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._eos_ids = tuple(eos_ids)
        self._lock = threading.Lock()

    def open(self) -> GrammarState:
        """A state at the beginning of an output, for one request."""
        return GrammarState(self, self._vocab_size, self._eos_ids)

    def start(self) -> LLMatcher:
        """A matcher at the beginning, the caller's own."""
        with self._lock:
            return self._matcher.deep_copy()


class GrammarState:
    """How far one output is in its grammar, and what may follow at any node of a draft.

    It holds the tokens that are committed; drafted ones are tried and taken back. One thread at a time.

    Args:
        grammar: of the request.
        vocab_size: V, the rows of the model's output.
        eos_ids: the model's end-of-text ids.
    """

    def __init__(self, grammar: Grammar, vocab_size: int, eos_ids: Sequence[int]) -> None:
        self._grammar = grammar
        self._eos_ids = frozenset(eos_ids)
        self._eos_mask_V = _mask_of(eos_ids, vocab_size)
        self._all_V: UInt32Array = np.full(num_mask_words(vocab_size), 0xFFFFFFFF, np.uint32)
        self._matcher = grammar.start()
        self._committed: list[int] = []
        self._has_ended = False  # an end-of-text id is committed
        self._path: list[int] = []  # drafted tokens that the matcher has taken beyond the committed ones

    @property
    def is_finished(self) -> bool:
        """Whether the output is complete, so that only an end-of-text id may follow."""
        self._go_to(())
        return self._has_ended or bool(self._matcher.is_stopped())

    def mask_after(self, path_ids: Sequence[int] = ()) -> UInt32Array:
        """The ids that may follow the committed tokens and the tokens of a draft's path.

        After an end-of-text id, and after a path that the grammar forbids, nothing is ever emitted: there everything is
        allowed, so that rules that look at every node find a law.

        Args:
            path_ids: tokens from the root's child down to the node; empty at the root.

        Returns:
            [ceil(V / 32)] uint32, a bit per id as `RowSampler.law` takes them; at least one is set. It may be shared
            and must not be written.

        Raises:
            RequestError: the grammar takes more work than is allowed, or the vocabulary has no token for what must
                follow.
        """
        if self._has_ended or not self._go_to(path_ids):
            return self._all_V
        matcher = self._matcher
        if matcher.is_stopped():
            return self._at_end()
        words = np.frombuffer(matcher.compute_bitmask(), np.uint32)
        if matcher.is_error():
            raise self._failure()
        if matcher.is_stopped():  # which may be found out only now
            return self._at_end()
        mask_V = self._eos_mask_V.copy() if matcher.is_accepting() else np.zeros_like(self._eos_mask_V)
        words = words[: len(mask_V)]  # there may be one more than the vocabulary takes
        mask_V[: len(words)] |= words
        return mask_V

    def forced_ids(self) -> tuple[int, ...]:
        """The tokens that must follow the committed ones, as far as there is no choice; empty where there is one."""
        if self._has_ended or not self._go_to(()) or self._matcher.is_stopped():
            return ()
        ids = self._matcher.compute_ff_tokens()
        if self._matcher.is_error():
            raise self._failure()
        return tuple(ids)

    def advance(self, token_ids: Sequence[int]) -> None:
        """Takes in tokens that are committed now.

        Raises:
            EngineFault: the grammar does not allow them.
        """
        for token_id in token_ids:
            if self._has_ended:
                return
            if token_id in self._eos_ids:
                self._has_ended = True
                return
            if self._path[:1] == [token_id]:
                del self._path[0]
            elif not self._go_to(()) or not self._take(token_id):
                raise EngineFault(f"token id {token_id} was emitted against the grammar")
            self._committed.append(token_id)

    def _go_to(self, path_ids: Sequence[int]) -> bool:
        """Brings the matcher to the end of a path below the committed tokens; False where it can't go there."""
        num_shared = 0
        for taken, wanted in zip(self._path, path_ids, strict=False):
            if taken != wanted:
                break
            num_shared += 1
        if num_shared < len(self._path):
            if not self._matcher.rollback(len(self._path) - num_shared):
                raise self._failure()
            del self._path[num_shared:]
        for token_id in path_ids[num_shared:]:
            if token_id in self._eos_ids or not self._take(token_id):
                return False
            self._path.append(token_id)
        return True

    def _take(self, token_id: int) -> bool:
        """Whether the grammar allows the token, which the matcher then has behind it."""
        matcher = self._matcher
        if matcher.is_stopped():
            return False
        is_taken = matcher.try_consume_tokens([token_id]) == 1
        if matcher.is_error():
            raise self._failure()
        return is_taken

    def _at_end(self) -> UInt32Array:
        if self._matcher.is_error() or not self._matcher.is_accepting():
            raise self._failure()
        return self._eos_mask_V

    def _failure(self) -> RequestError:
        title = self._grammar.wanted.title
        if "NoExtension" in self._matcher.get_error():
            return RequestError(
                f"the {title} describes no text that could come next, or none that this model's vocabulary can write",
                "grammar",
            )
        words = one_line(self._matcher.get_error().replace("<non-verbose/>", ""))
        return RequestError(f"the {title} takes more work than is allowed: {words}", "grammar")


class GrammarCompiler:
    """Makes grammars for one model, and keeps those that were used last. Safe to share between threads.

    Args:
        tokenizer: the model's vocabulary.
        vocab_size: V, the rows of the model's output, at least the tokenizer's.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._known: OrderedDict[Structured, Grammar] = OrderedDict()
        self._lock = threading.Lock()
        self._vocabulary: _ReadVocabulary | None = None

    def compile(self, wanted: Structured) -> Grammar:
        """The grammar of an output; made on first use.

        Raises:
            RequestError: it is malformed, asks for something unsupported, describes no text, or takes more work than is
                allowed.
        """
        with self._lock:
            if self._vocabulary is None:
                self._vocabulary = _read_vocabulary(self._tokenizer)
            vocabulary, known = self._vocabulary, self._known.get(wanted)
            if known is not None:
                self._known.move_to_end(wanted)
                return known
        grammar = _in_time(wanted, lambda: self._compile(wanted, vocabulary))
        with self._lock:
            self._known[wanted] = grammar
            if len(self._known) > MAX_COMPILED:
                self._known.popitem(last=False)
        return grammar

    def knows(self, wanted: Structured) -> bool:
        """Whether `compile` has the grammar already."""
        with self._lock:
            return wanted in self._known

    def _compile(self, wanted: Structured, vocabulary: _ReadVocabulary) -> Grammar:
        from llguidance import LLMatcher

        def refused(words: str) -> RequestError:
            return RequestError(f"the {wanted.title} can't be used: {words}", "grammar")

        with library_errors(refused):
            text = wanted.to_llguidance(forces=vocabulary.ours.spells(wanted))
            matcher = LLMatcher(vocabulary.native, text, log_level=0, limits=_limits())
            if matcher.is_error():
                raise refused(one_line(matcher.get_error()))
            grammar = Grammar(wanted, matcher, self._vocab_size, self._tokenizer.eos_ids)
            grammar.open().mask_after()  # what allows nothing at all is found out here
        return grammar


def _limits() -> LLParserLimits:
    """Work and memory of one grammar. What exceeds them is refused, at once or in the step that needs it."""
    from llguidance import LLParserLimits

    return LLParserLimits(
        max_items_in_row=2000,
        initial_lexer_fuel=400_000,
        step_lexer_fuel=200_000,
        step_max_items=50_000,
        max_lexer_states=50_000,  # about 2 kB each
        max_grammar_size=200_000,
        verbose_errors=False,  # messages without the schema in them
    )


def _in_time(wanted: Structured, compile_it: Callable[[], Grammar]) -> Grammar:
    """What it returns, unless that takes too long; then it is left alone, since nothing can stop it."""
    outcome: list[Grammar | BaseException] = []

    def run() -> None:
        try:
            outcome.append(compile_it())
        except BaseException as error:
            outcome.append(error)

    thread = threading.Thread(target=run, name="forerun-grammar", daemon=True)
    thread.start()
    thread.join(MAX_COMPILE_S)
    if not outcome:
        raise RequestError(
            f"the {wanted.title} takes more work than is allowed: more than {MAX_COMPILE_S:g} s", "grammar"
        )
    result = outcome[0]
    if isinstance(result, BaseException):
        raise result
    return result


class _Vocabulary:
    """A tokenizer as llguidance asks for it."""

    is_tokenizer_wrapper = True

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.eos_token_id = tokenizer.eos_ids[0]
        self.bos_token_id = tokenizer.bos_id
        self.tokens = [tokenizer.token_bytes(token_id) for token_id in range(tokenizer.vocab_size)]
        self.special_token_ids = sorted(tokenizer.special_ids | set(tokenizer.eos_ids))
        special_ids = set(self.special_token_ids)
        ordinary = ((token, i) for i, token in enumerate(self.tokens) if i not in special_ids)
        self._byte_ids = {token[0]: token_id for token, token_id in ordinary if len(token) == 1}
        self._mark_ids = self._encode(_MARK)

    def __call__(self, text: str) -> list[int]:
        """The usual tokens of a text that continues another one; joined they are the text."""
        ids = self._encode(text)
        if self._is_text(ids, text):
            return ids
        # Some vocabularies put a space in front of whatever they are given.
        ids = self._encode(_MARK + text)
        if ids[: len(self._mark_ids)] == self._mark_ids and self._is_text(ids[len(self._mark_ids) :], text):
            return ids[len(self._mark_ids) :]
        return [self._byte_ids[byte] for byte in text.encode()]

    def spells(self, wanted: Structured) -> bool:
        """Whether there are tokens for every byte of the texts that a grammar may force."""
        if len(self._byte_ids) == 256:
            return True
        return not _ESCAPE.search(wanted.source) and self._byte_ids.keys() >= {*_PRINTABLE, *wanted.source.encode()}

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_bos=False, continues=True)

    def _is_text(self, token_ids: Sequence[int], text: str) -> bool:
        return b"".join(self.tokens[token_id] for token_id in token_ids) == text.encode()


@dataclass(frozen=True, slots=True)
class _ReadVocabulary:
    """What grammars are compiled for."""

    native: LLTokenizer
    ours: _Vocabulary


def _read_vocabulary(tokenizer: Tokenizer) -> _ReadVocabulary:
    from llguidance import LLTokenizer

    if not tokenizer.eos_ids:
        raise RequestError(
            "this model has no end-of-text token, so an output can't end where its grammar does", "grammar"
        )
    ours = _Vocabulary(tokenizer)
    native = LLTokenizer(cast("TokenizerWrapper", ours))  # by its attributes; theirs adds a mark of its own
    return _ReadVocabulary(native, ours)


def _mask_of(token_ids: Sequence[int], vocab_size: int) -> UInt32Array:
    mask_V: UInt32Array = np.zeros(num_mask_words(vocab_size), np.uint32)
    for token_id in token_ids:
        mask_V[token_id // 32] |= np.uint32(1 << token_id % 32)
    return mask_V
