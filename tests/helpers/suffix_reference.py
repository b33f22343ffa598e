"""Suffix decoding by scanning: the same counts and the same trees as csrc/suffix*.cpp, slowly and obviously."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

MIN_SHARE = 1 / 64


@dataclass(frozen=True)
class Context:
    """A context that occurred: its length and, for each token that followed, how often and where last."""

    length: int
    counts: Counter[int]
    last: dict[int, tuple[int, int]]

    @property
    def ranked(self) -> list[tuple[int, int]]:
        """(token id, count), most frequent first, of equals the newest first."""
        places = {t: (-count, tuple(-x for x in self.last[t])) for t, count in self.counts.items()}
        return [(t, self.counts[t]) for t in sorted(places, key=places.__getitem__)]


@dataclass
class SlowIndex:
    """Texts by partition, in the order in which they came."""

    max_depth: int
    texts: list[tuple[str, list[int]]] = field(default_factory=list)

    def begin(self, partition: str) -> None:
        self.texts.append((partition, []))

    def append(self, token_ids: Sequence[int]) -> None:
        self.texts[-1][1].extend(token_ids)

    def remove_oldest(self) -> None:
        self.texts.pop(0)

    def contexts(self, partition: str, ids: Sequence[int]) -> list[Context]:
        """Every end of `ids` that occurred before a token, shortest first."""
        found = []
        for length in range(1, min(self.max_depth, len(ids)) + 1):
            wanted = list(ids[len(ids) - length :])
            counts: Counter[int] = Counter()
            last = {}
            for number, (name, text) in enumerate(self.texts):
                for i in range(length, len(text)):
                    if name == partition and text[i - length : i] == wanted:
                        counts[text[i]] += 1
                        last[text[i]] = (number, i)
            if not counts:
                break
            found.append(Context(length, counts, last))
        return found

    def matches(self, partition: str, ids: Sequence[int]) -> list[Context]:
        """The same without those that a longer one has all occurrences of."""
        all_of_them = self.contexts(partition, ids)
        totals = [context.counts.total() for context in all_of_them]
        return [c for i, c in enumerate(all_of_them) if i + 1 == len(totals) or totals[i + 1] < totals[i]]


@dataclass(frozen=True)
class TableContext(Context):
    """A context as a table has it: only the most frequent three tokens, of equals the lowest ids."""

    @property
    def ranked(self) -> list[tuple[int, int]]:
        return sorted(self.counts.items(), key=lambda item: (-item[1], item[0]))[:3]


class SlowTable(SlowIndex):
    """Texts that don't change, looked at like csrc/ngram_table.cpp."""

    def matches(self, partition: str, ids: Sequence[int]) -> list[Context]:
        return [TableContext(c.length, c.counts, c.last) for c in super().matches(partition, ids)]


@dataclass
class SlowNode:
    """A node of a draft, with the path of tokens that leads to it."""

    token_id: int
    parent: int
    prob: float
    match_len: int
    source: int
    path: list[int]
    path_prob: float


@dataclass
class SlowDrafts:
    """Draft trees from several indexes, of which the first holds the text; discounts are by match length from 1."""

    sources: Sequence[tuple[SlowIndex, str, Sequence[float]]]
    end_ids: Sequence[int]

    def propose(self, max_nodes: int, min_prob: float, is_chain: bool) -> list[SlowNode]:
        """The likeliest node that has its parent, again and again."""
        text = self.sources[0][0].texts[-1][1]
        nodes: list[SlowNode] = []
        waiting: list[SlowNode] = []
        newest: SlowNode | None = None
        while len(nodes) < max_nodes:
            if newest is None or newest.token_id not in self.end_ids:
                path, above = ([], 1.0) if newest is None else (newest.path, newest.path_prob)
                match_len, source, probs = self.predict([*text, *path])
                if is_chain and probs:
                    best = max(probs, key=lambda t: probs[t])
                    probs = {best: probs[best]}
                for token_id, prob in probs.items():
                    if above * prob >= min_prob:
                        path_ids = [*path, token_id]
                        waiting.append(
                            SlowNode(token_id, len(nodes) - 1, prob, match_len, source, path_ids, above * prob)
                        )
            if not waiting:
                break
            newest = max(waiting, key=lambda node: node.path_prob)
            waiting.remove(newest)
            nodes.append(newest)
        return nodes

    def predict(self, ids: Sequence[int]) -> tuple[int, int, dict[int, float]]:
        """Length and source of the longest match, and the probability of each token that may follow."""
        levels = [
            (context.length, source, context)
            for source, (index, partition, _) in enumerate(self.sources)
            for context in index.matches(partition, ids)
        ]
        probs: dict[int, float] = {}
        rest, first = 1.0, None
        for length, source, context in sorted(levels, key=lambda level: (-level[0], level[1])):
            discounts = self.sources[source][2]
            discount = discounts[min(length, len(discounts)) - 1]
            if discount == 1.0:
                continue
            first = first or (length, source)
            total = float(context.counts.total())
            for token_id, count in context.ranked:
                if count >= math.ceil(MIN_SHARE * total / rest):
                    probs[token_id] = probs.get(token_id, 0.0) + rest * (count - discount) / total
            rest *= discount * len(context.counts) / total
            if rest < MIN_SHARE:
                break
        return (*(first or (0, 0)), probs)
