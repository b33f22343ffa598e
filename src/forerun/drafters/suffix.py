"""Suffix decoding: proposes what followed the text's last tokens wherever they occurred before. Needs no model.

After Oliaro et al. 2024 (arXiv 2411.04975): the text of the request and the outputs of earlier ones are indexed with
exact counts, and a tree of likely continuations is grown from the contexts that match the text's end. Where the paper
drafts from one match length and takes the one that promises most, all lengths and all indexes speak here, the longest
first, by absolute discounting (csrc/suffix_draft.h); so a node's probability means the same wherever it comes from, and
the second guess is what a shorter context says. `LOG.md` compares both.

A third index is the model's datastore, texts that it wrote beforehand (drafters/datastore.py), as He et al. 2023 (REST,
arXiv 2311.08252) retrieve drafts from a collection.

Outputs are shared among requests of one salt, and only among them. A shared output shows in the speed of the requests
that repeat it, never in their text; `shared=off` leaves them out. They are kept up to `memory_mb` megabytes over all
salts, the oldest output leaves first, and an output that alone is larger is not kept.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from forerun._native import NgramTable, SuffixDrafts, SuffixIndex
from forerun.drafters.base import NOTHING, Budget, DraftContext, DraftTarget, Policy, Proposal, UnsampledOptions
from forerun.errors import ConfigError
from forerun.types import MAX_DRAFT_NODES, Draft, ForwardOutput, Int32Array

Switch = Literal["on", "off"]
NO_TEXTS: tuple[Int32Array, ...] = ()

MAX_K = MAX_DRAFT_NODES - 1  # a pass of 64 rows holds the last token too
MAX_DEPTH = 256  # no text needs more to be told from another, and a text of one token costs this much per token
MAX_MEMORY_MB = 65536
MIN_PROB = 0.001
_OWN = _STORED = ""  # the partition of a request's own text, and of the datastore
# Nodes are not even looked at where the counts give them less than this share of what would pay: counts may be wrong.
DISBELIEF = 0.5
_ORIGINS = ("suffix",) * MAX_K
_NO_ROWS = (None,) * MAX_K

# How far a context is distrusted, by the length of its match; see `_by_length`. Fitted, as the rates below, to answers
# of a model of 135M parameters: longer matches are better signs, and those in another text are worse ones.
OWN_DISCOUNTS = ((1, 0.70), (2, 0.45), (4, 0.37), (6, 0.30), (9, 0.25), (15, 0.20), (31, 0.10), (32, 0.02))
SHARED_DISCOUNTS = STORED_DISCOUNTS = (
    (1, 0.95),
    (2, 0.87),
    (4, 0.82),
    (6, 0.70),
    (9, 0.50),
    (15, 0.30),
    (31, 0.15),
    (32, 0.05),
)

# Nodes of a cell have probabilities, and contexts of a length, between two of these.
PROB_EDGES = (0.05, 0.10, 0.20, 0.35, 0.50, 0.65, 0.80, 0.90, 0.97)
MATCH_EDGES = (2, 4, 10)
# Starting acceptance by probability, until acceptance has been seen. Long matches are as good in another text.
GREEDY_RATES = (0.03, 0.07, 0.11, 0.24, 0.30, 0.51, 0.65, 0.76, 0.87, 0.98)
SAMPLED_RATES = (0.03, 0.06, 0.11, 0.20, 0.26, 0.41, 0.52, 0.70, 0.83, 0.96)
SHARED_RATES = (0.03, 0.08, 0.12, 0.16, 0.20, 0.34, 0.44, 0.48, 0.62, 0.85)

# Where a context was found, by number: the request's own text, outputs of earlier requests, the datastore.
OWN, SHARED, STORED = range(3)
NUM_SOURCES = 3


def _by_length(steps: Sequence[tuple[int, float]]) -> list[float]:
    """Discounts for 1, 2, ... tokens from (longest length, discount); the last serves all longer matches."""
    out: list[float] = []
    for length, discount in steps:
        out += [discount] * (length - len(out))
    return out


def cell_of(prob: float, match_len: int, source: int, is_sampled: bool) -> int:
    """The acceptance cell of a node; the native drafts compute the same.

    Args:
        prob: of the node given its parent, as the counts have it.
        match_len: of the longest context that spoke.
        source: where that was found.
        is_sampled: whether the request samples; sampled text repeats itself less.
    """
    place = bisect_right(PROB_EDGES, prob) * (len(MATCH_EDGES) + 1) + bisect_right(MATCH_EDGES, match_len)
    return first_cell(is_sampled) + place * NUM_SOURCES + source


def first_cell(is_sampled: bool) -> int:
    """Requests that sample have cells of their own, behind the others'."""
    return is_sampled * (len(PROB_EDGES) + 1) * (len(MATCH_EDGES) + 1) * NUM_SOURCES


def _priors() -> tuple[float, ...]:
    """Starting acceptance of each cell."""
    num_matches = len(MATCH_EDGES) + 1
    return tuple(
        (SHARED_RATES if source != OWN and match < num_matches - 1 else SAMPLED_RATES if is_sampled else GREEDY_RATES)[
            prob
        ]
        for is_sampled in (False, True)
        for prob in range(len(PROB_EDGES) + 1)
        for match in range(num_matches)
        for source in range(NUM_SOURCES)
    )


@dataclass(frozen=True, slots=True)
class SuffixOptions(UnsampledOptions):
    """Settings of suffix decoding, `suffix:k=8,tree=on,shared=on,...` in a speculation spec.

    Attributes:
        k: nodes per step at most, 0 to 63; 0 is off.
        min_prob: what is less likely to be emitted is not proposed, 0.001 to 1.
        tree: `on` proposes several continuations where the text may go on in different ways, `off` the likeliest.
        depth: tokens of context at most, 1 to 256.
        shared: `on` also looks at what earlier requests of the same salt have put out.
        datastore: `on` also looks at the model's datastore, where it has one.
        memory_mb: megabytes of earlier outputs at most, 1 to 65536; about 8000 tokens fit into one.
        policy: `adaptive` verifies the nodes that pay; `fixed` always those proposed.

    Raises:
        ConfigError: a value is out of range; the message names the range.
    """

    name: ClassVar[str] = "suffix"
    summary: ClassVar[str] = "what followed the longest matches in this text and in earlier outputs"
    needs: ClassVar[str] = "nothing"

    k: int = 8
    min_prob: float = 0.1
    tree: Switch = "on"
    depth: int = 64
    shared: Switch = "on"
    datastore: Switch = "on"
    memory_mb: int = 16
    policy: Policy = "adaptive"

    def __post_init__(self) -> None:
        if not 0 <= self.k <= MAX_K:
            raise ConfigError(f"suffix: k is {self.k}, but must be between 0 (off) and {MAX_K}")
        if not MIN_PROB <= self.min_prob <= 1.0:
            raise ConfigError(f"suffix: min_prob is {self.min_prob}, but must be between {MIN_PROB} and 1")
        for name, value in (("tree", self.tree), ("shared", self.shared), ("datastore", self.datastore)):
            if value not in ("on", "off"):
                raise ConfigError(f"suffix: {name} is {value!r}, but must be on or off")
        if not 1 <= self.depth <= MAX_DEPTH:
            raise ConfigError(f"suffix: depth is {self.depth}, but must be between 1 and {MAX_DEPTH}")
        if not 1 <= self.memory_mb <= MAX_MEMORY_MB:
            raise ConfigError(f"suffix: memory_mb is {self.memory_mb}, but must be between 1 and {MAX_MEMORY_MB}")
        if self.policy not in ("adaptive", "fixed"):
            raise ConfigError(f"suffix: policy is {self.policy!r}, but must be adaptive or fixed")

    def bind(self, target: DraftTarget) -> SuffixSource:
        """The drafter for any target.

        Raises:
            LoadError: the model's datastore is damaged.
        """
        return SuffixSource(self, target.datastore() if self.datastore == "on" else NO_TEXTS)


class SuffixSource:
    """Suffix decoding; requests of one salt share their outputs. See `cell_of` for the cells."""

    name = "suffix"
    reads_rows = False
    is_free = True

    def __init__(self, options: SuffixOptions, stored_texts: Sequence[Int32Array] = NO_TEXTS) -> None:
        self._options = options
        self.policy = options.policy
        self.priors = _priors()
        self._outputs = SuffixIndex(options.depth, options.memory_mb << 20)
        ids = np.concatenate(stored_texts) if stored_texts else np.empty(0, np.int32)
        self._store = NgramTable(ids, [text.size for text in stored_texts])

    def open(self, context: DraftContext) -> SuffixDrafter:
        """See `DrafterSource.open`."""
        return SuffixDrafter(self._options, self._outputs, self._store, context)

    def clear(self) -> None:
        """See `DrafterSource.clear`."""
        self._outputs.clear()

    @property
    def memory_bytes(self) -> int:
        """Bytes of earlier outputs, of the datastore and their indexes; no running request's own text is among them."""
        return self._outputs.bytes + self._store.bytes


class SuffixDrafter:
    """Suffix decoding for one request.

    A proposal costs some ten microseconds, whatever the text's length; a token one look-up for each context that tells
    it from the text before.

    Args:
        options: the settings.
        outputs: the index of earlier outputs, to which the request's own is added when it closes if they are shared.
        store: the contexts of the datastore.
        context: the request.
    """

    def __init__(self, options: SuffixOptions, outputs: SuffixIndex, store: NgramTable, context: DraftContext) -> None:
        self._k = options.k
        self._min_prob = options.min_prob
        self._is_chain = options.tree == "off"
        self._shares = options.shared == "on"
        self._outputs = outputs
        self._partition = context.partition
        self._text = SuffixIndex(options.depth, 0)
        self._text.begin(_OWN)
        self._text.append(np.array(context.prompt_token_ids, np.int32))
        self._output: list[int] = []
        shared, stored = _by_length(SHARED_DISCOUNTS), _by_length(STORED_DISCOUNTS)
        self._drafts = SuffixDrafts(
            self._text,
            [
                (self._text, _OWN, _by_length(OWN_DISCOUNTS)),
                (self._outputs, self._partition, shared),
                (store, _STORED, stored),
            ],
            sorted(context.end_ids),
            list(PROB_EDGES),
            list(MATCH_EDGES),
            first_cell(not context.params.is_greedy),
        )

    def propose(self, budget: Budget) -> Proposal:
        """Proposes what followed the matching contexts, the likeliest first; nothing where none matches."""
        min_prob = max(self._min_prob, DISBELIEF * budget.min_survivals[0])
        token_ids, parents, cells = self._drafts.propose(min(self._k, budget.max_nodes), min_prob, self._is_chain)
        if not token_ids:
            return NOTHING
        num_nodes = len(token_ids)
        return Proposal(Draft(token_ids, parents, _ORIGINS[:num_nodes], _NO_ROWS[:num_nodes]), cells)

    def advance(self, token_ids: Sequence[int]) -> None:
        """Indexes the new tokens."""
        self._text.append(token_ids)
        self._output.extend(token_ids)

    def observe(self, draft: Draft, rows: ForwardOutput) -> None:
        """Not asked for."""

    def close(self) -> None:
        """Leaves the output to later requests of the same salt, however the request ended."""
        if self._shares and self._output:
            self._outputs.begin(self._partition)
            self._outputs.append(np.array(self._output, np.int32))
            self._output = []
