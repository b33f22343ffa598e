"""Drafters for the exact enumeration: they draw with the oracle's ideal noise, through the product's own helpers."""

from __future__ import annotations

import random
from collections.abc import Callable
from fractions import Fraction

from forerun.sampling.drafting import draft_from_own, draft_from_shared
from forerun.types import Draft, NoiseStream
from tests.exactness.rational import Drafter, Model, Oracle, Row, Tokens, as_array, exact_law, random_model

# (prefix, depth) -> children of the node that the prefix ends in; the root has depth 0.
Branching = Callable[[Tokens, int], int]


def branching(*counts: int) -> Branching:
    """As many children per node as the node's depth says, none below the last."""
    return lambda prefix, depth: counts[depth] if depth < len(counts) else 0


def random_branching(seed: int, max_depth: int = 2, max_children: int = 2) -> Branching:
    """A number of children that depends on everything the node's own prefix says."""

    def count(prefix: Tokens, depth: int) -> int:
        return random.Random(f"{seed} shape {prefix}").randint(0, max_children) if depth < max_depth else 0

    return count


def confident(model: Model) -> Callable[[Tokens, int], int]:
    """One child where the model is sure enough: a length that depends on rows, none of them a drawn node's own."""
    return lambda prefix, depth: int(depth < 3 and max(model(prefix)) > Fraction(1, 3))


def sampled_tree(model: Model, children_of: Branching, *, with_replacement: bool = False) -> Drafter:
    """Children drawn from the model's law of their parent, breadth first."""

    def propose(oracle: Oracle, prefix: Tokens) -> Draft:
        nodes: list[tuple[int, int, object]] = []
        queue = [(-1, prefix)]
        while queue:
            parent, path = queue.pop(0)
            count = children_of(path, len(path) - len(prefix))
            if count == 0:
                continue
            row = as_array(model(path))
            drawn = draft_from_own(
                oracle, exact_law(model(path)), 0, len(prefix), len(nodes), count, with_replacement=with_replacement
            )
            for token_id in drawn:
                queue.append((len(nodes), (*path, token_id)))
                nodes.append((parent, token_id, row))
        return tree_of(nodes, with_replacement=with_replacement)

    return propose


def tree_of(nodes: list[tuple[int, int, object]], *, with_replacement: bool = False) -> Draft:
    """A draft of (parent, token, row) with the noise and the pruning that ratio rules want."""
    draft = Draft(
        token_ids=tuple(token_id for _, token_id, _ in nodes),
        parents=tuple(parent for parent, _, _ in nodes),
        origins=("model",) * len(nodes),
        q_rows=tuple(row for _, _, row in nodes),  # type: ignore[misc]
        stream="draft",
        pruning="prefix_only",
        with_replacement=with_replacement,
    )
    draft.check_integrity()
    return draft


def sampled_chain(model: Model, k: int, stream: NoiseStream = "draft", declared: NoiseStream | None = None) -> Drafter:
    """k tokens drawn from a drafter's law, with the noise of `stream`."""

    def propose(oracle: Oracle, prefix: Tokens) -> Draft:
        tokens: Tokens = ()
        rows = []
        for depth in range(k):
            q = model((*prefix, *tokens))
            if stream == "draft":
                drawn = draft_from_own(oracle, exact_law(q), 0, len(prefix), depth)
            else:
                drawn = draft_from_shared(oracle, exact_law(q), 0, len(prefix) + depth)
            tokens += drawn
            rows.append(as_array(q))
        parents = tuple(range(-1, k - 1))
        return Draft(tokens, parents, ("model",) * k, tuple(rows), declared or stream, "prefix_only")

    return propose


def argmax_chain(model: Model, k: int, with_rows: bool = False) -> Drafter:
    """k most likely tokens; with_rows wrongly declares them as sampled."""

    def propose(_: Oracle, prefix: Tokens) -> Draft:
        tokens: Tokens = ()
        rows = []
        for _depth in range(k):
            q = model((*prefix, *tokens))
            tokens = (*tokens, q.index(max(q)))
            rows.append(as_array(q) if with_rows else None)
        return Draft(tokens, tuple(range(-1, k - 1)), ("model",) * k, tuple(rows), "draft", "prefix_only")

    return propose


def lookup_chain(k: int, vocab_size: int) -> Drafter:
    """A continuation that depends on the prefix alone and ignores every probability, of a length that varies."""

    def propose(_: Oracle, prefix: Tokens) -> Draft:
        rng = random.Random(f"lookup {prefix}")
        tokens = tuple(rng.randrange(vocab_size) for _ in range(rng.randint(0, k)))
        return Draft.chain(tokens, "ngram")

    return propose


def lookup_then_sampled(model: Model, k: int, vocab_size: int) -> Drafter:
    """A chain whose nodes are fixed or sampled as their own prefix says, and end where it says."""

    def propose(oracle: Oracle, prefix: Tokens) -> Draft:
        nodes: list[tuple[int, int, object]] = []
        path = prefix
        while len(nodes) < k:
            rng = random.Random(f"mixed {path}")
            turn = rng.randrange(5)
            if turn == 0 and nodes:
                break
            q = model(path)
            if turn <= 2:
                nodes.append((len(nodes) - 1, rng.randrange(vocab_size), None))
            else:
                drawn = draft_from_own(oracle, exact_law(q), 0, len(prefix), len(nodes))
                nodes.append((len(nodes) - 1, drawn[0], as_array(q)))
            path = (*path, nodes[-1][1])
        return tree_of(nodes)

    return propose


def fixed_tree(vocab_size: int, num_nodes: int) -> Drafter:
    """A random tree of distinct siblings that depends on the prefix alone."""

    def propose(_: Oracle, prefix: Tokens) -> Draft:
        rng = random.Random(f"tree {prefix}")
        nodes: list[tuple[int, int]] = []
        for _node in range(num_nodes):
            node = (rng.randrange(-1, len(nodes)), rng.randrange(vocab_size))
            if node not in nodes:
                nodes.append(node)
        n = len(nodes)
        parents, tokens = tuple(parent for parent, _ in nodes), tuple(token for _, token in nodes)
        return Draft(tokens, parents, ("tree",) * n, (None,) * n)

    return propose


# ---- models -------------------------------------------------------------------------------------------------------


def drafter_model(seed: int, vocab_size: int) -> Model:
    return random_model(seed + 1000, vocab_size)


def only_zeros(target: Model, vocab_size: int) -> Model:
    """Proposes what the target never emits, as far as there is such a token."""

    def row(prefix: Tokens) -> Row:
        zeros = [token_id for token_id, p in enumerate(target(prefix)) if p == 0] or list(range(vocab_size))
        return tuple(Fraction(int(token_id in zeros), len(zeros)) for token_id in range(vocab_size))

    return row


def greedy(model: Model) -> Model:
    """All mass on the likeliest token."""

    def row(prefix: Tokens) -> Row:
        p = model(prefix)
        return tuple(Fraction(int(token_id == p.index(max(p)))) for token_id in range(len(p)))

    return row


def tree_model(seed: int) -> Model:
    """A drafter over three ids that can draw all of them at the root, and mostly fewer below it."""
    root, below = random_model(seed + 1000, 3, zeros=0), random_model(seed + 1000, 3, zeros=0.55)
    return lambda prefix: below(prefix) if prefix else root(prefix)
