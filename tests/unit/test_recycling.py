"""Token recycling against a slow tree search, what its table keeps and for whom (F017, F024)."""

from collections.abc import Callable, Sequence

import numpy as np
import pytest

from forerun.drafters.base import Budget, Proposal
from forerun.drafters.recycling import (
    MAX_TABLES,
    MAX_WIDTH,
    NUM_DEPTHS,
    PRIOR_RATES,
    RecyclingDrafter,
    RecyclingOptions,
    RecyclingSource,
)
from forerun.errors import ConfigError
from forerun.sampling.reference import ReferenceSampler
from forerun.types import Draft, Float32Array, ForwardOutput
from tests.helpers.drafting import context, depths, propose, target

V = 12
EOS = 0


def make_source(**options: object) -> RecyclingSource:
    return RecyclingSource(RecyclingOptions(**options), ReferenceSampler(V), V)  # type: ignore[arg-type]


def rows_of(*rankings: Sequence[int]) -> ForwardOutput:
    """Rows that rank the given ids first."""
    logits = np.zeros((len(rankings), V), np.float32)
    for row, ranking in enumerate(rankings):
        for place, token_id in enumerate(ranking):
            logits[row, token_id] = 100 - place
    return ForwardOutput(logits, logits.argmax(axis=1).astype(np.int32))


def paths_of(proposal: Proposal) -> list[tuple[int, ...]]:
    """Each node as the tokens from the root down to it."""
    paths: list[tuple[int, ...]] = []
    for token_id, parent in zip(proposal.draft.token_ids, proposal.draft.parents, strict=True):
        paths.append((*(paths[parent] if parent >= 0 else ()), token_id))
    return paths


class SlowTable:
    """What was seen after each id, and the tree as the best node that may come next, found by trying all."""

    def __init__(self, options: RecyclingOptions) -> None:
        self.options = options
        self.seen: dict[int, tuple[int, int, list[int]]] = {}

    def learn(self, before: int, token_id: int, request: int, logits_V: Float32Array) -> None:
        ranking = sorted(range(V), key=lambda i: (-logits_V[i], i))[: self.options.width]
        self.seen[token_id] = before, request, ranking

    def nodes(
        self, before: int, last: int, request: int, max_nodes: int, rate: Callable[[int], float]
    ) -> list[tuple[tuple[int, ...], int]]:
        """Path and cell of each node, in order; of equals that which could come first, a sibling before a child."""
        tree: dict[tuple[int, ...], tuple[float, int]] = {}
        age: dict[tuple[int, ...], int] = {}
        while len(tree) < min(self.options.k, max_nodes):
            found = []
            for path in [(), *tree]:
                text = (before, last, *path)
                if len(path) == self.options.depth or text[-1] not in self.seen or (path and path[-1] == EOS):
                    continue
                seen_before, seen_request, ranking = self.seen[text[-1]]
                rank = sum(other[:-1] == path for other in tree if other)
                if rank < len(ranking):
                    kind = 2 * (seen_request != request) + (seen_before != text[-2])
                    cell = (kind * NUM_DEPTHS + min(len(path), NUM_DEPTHS - 1)) * MAX_WIDTH + rank
                    survival = (tree[path][0] if path else 1.0) * rate(cell)
                    found.append((survival, (*path, ranking[rank]), cell))
            if not found:
                break
            for _, path, _ in sorted(found, key=lambda one: len(one[1])):
                age.setdefault(path, len(age))
            survival, path, cell = max(found, key=lambda one: (one[0], -age[one[1]]))
            tree[path] = survival, cell
        return [(path, cell) for path, (_, cell) in tree.items()]


@pytest.mark.parametrize(("k", "width", "depth"), [(8, 8, 4), (1, 1, 1), (63, 3, 8), (20, 5, 2)])
def test_equals_a_slow_search(k: int, width: int, depth: int) -> None:
    options = RecyclingOptions(k=k, width=width, depth=depth)
    rng = np.random.default_rng(k)
    source, slow = make_source(k=k, width=width, depth=depth), SlowTable(options)
    rates = rng.uniform(0.05, 0.9, len(source.priors))
    for request in range(1, 4):
        prompt = rng.integers(0, V, int(rng.integers(1, 4))).tolist()
        drafter = source.open(context(prompt, (EOS,)))
        text = [-1, *prompt]
        for _ in range(12):
            max_nodes = int(rng.integers(1, 64))
            proposal = drafter.propose(Budget(max_nodes, (), lambda cell: rates.item(cell)))
            proposal.draft.check_integrity()
            expected = slow.nodes(text[-2], text[-1], request, max_nodes, lambda cell: rates.item(cell))
            assert list(zip(paths_of(proposal), proposal.cells, strict=True)) == expected
            # What is verified is a tree that others have a part in; of two rows with one token the later one counts.
            ids = rng.integers(0, V, int(rng.integers(0, 6))).tolist()
            parents = tuple(int(rng.integers(-1, node)) if node else -1 for node in range(len(ids)))
            draft = Draft(tuple(ids), parents, ("x",) * len(ids), (None,) * len(ids))
            logits = rng.standard_normal((1 + draft.num_nodes, V)).astype(np.float32)
            row_ids = [text[-1], *draft.token_ids]
            slow.learn(text[-2], text[-1], request, logits[0])
            for node, parent in enumerate(draft.parents):
                slow.learn(row_ids[parent + 1], draft.token_ids[node], request, logits[node + 1])
            drafter.observe(draft, ForwardOutput(logits, logits.argmax(axis=1).astype(np.int32)))
            emitted = rng.integers(0, V, int(rng.integers(1, 4))).tolist()
            drafter.advance(emitted)
            text += emitted


def taught(source: RecyclingSource, **fields: object) -> RecyclingDrafter:
    """A request whose last token, 5, may be followed by 6, 7 or EOS, and 6 by 8."""
    drafter = source.open(context([4, 5], (EOS,), **fields))
    drafter.observe(Draft.chain((6, 0), "x"), rows_of([6, 7, EOS], [8], [9]))
    return drafter


def test_rejected_nodes_teach_too() -> None:
    drafter = taught(make_source(width=1))
    assert paths_of(propose(drafter, 8)) == [(6,), (6, 8)]
    drafter.advance([2])  # so 6 was rejected
    assert propose(drafter, 8).draft.num_nodes == 0
    drafter.advance([6])
    assert paths_of(propose(drafter, 8)) == [(8,)]


def test_draft_is_a_tree_of_fixed_proposals_best_first() -> None:
    rates = {0: 0.6, 1: 0.3, 2: 0.05, MAX_WIDTH: 0.4}  # ranks 0 to 2 below the root, rank 0 below a node
    drafter = taught(make_source(width=3))
    proposal = drafter.propose(Budget(4, (), lambda cell: rates.get(cell, 0.01)))
    assert paths_of(proposal) == [(6,), (7,), (6, 8), (EOS,)]
    assert proposal.draft.parents == (-1, -1, 0, -1)
    assert proposal.cells == (0, 1, MAX_WIDTH, 2)
    assert set(proposal.draft.origins) == {"recycling"}
    assert set(proposal.draft.q_rows) == {None}


def test_f017_nothing_follows_an_end_id() -> None:
    source = make_source(width=3)
    drafter = taught(source)
    drafter.observe(Draft.chain((EOS,), "x"), rows_of([EOS, 6, 7], [9, 8, 7]))
    paths = paths_of(propose(drafter, 20))
    assert (EOS,) in paths
    assert not any(EOS in path[:-1] for path in paths)


def test_f018_ids_without_a_ranking_propose_nothing() -> None:
    source = make_source()
    assert propose(source.open(context([5])), 8).draft.num_nodes == 0
    taught(source)
    assert propose(source.open(context([11])), 8).draft.num_nodes == 0


def test_f024_requests_of_one_salt_share_and_of_others_do_not() -> None:
    source = make_source(width=1)
    taught(source, salt="a")
    assert paths_of(propose(source.open(context([5], salt="a")), 8)) == [(6,), (6, 8)]
    assert propose(source.open(context([5], salt="b")), 8).draft.num_nodes == 0
    assert propose(source.open(context([5])), 8).draft.num_nodes == 0
    assert propose(source.open(context([5], salt="\ud800")), 8).draft.num_nodes == 0  # no text that could be written
    assert "a" not in source._tables
    source.clear()
    assert propose(source.open(context([5], salt="a")), 8).draft.num_nodes == 0


def test_f024_a_request_that_runs_while_all_is_forgotten_teaches_nobody() -> None:
    source = make_source(width=1)
    drafter = source.open(context([4, 5]))
    source.clear()
    drafter.observe(Draft(), rows_of([6]))
    assert propose(source.open(context([5])), 8).draft.num_nodes == 0
    assert paths_of(propose(drafter, 8)) == [(6,)]


def test_f026_memory_is_bounded_and_the_latest_salts_stay() -> None:
    source = make_source(width=2)
    assert source.memory_bytes == 0
    table_bytes = V * (2 + 2) * 4
    for index in range(MAX_TABLES + 3):
        taught(source, salt=str(index))
        taught(source, salt="0")
    assert source.memory_bytes == MAX_TABLES * table_bytes
    kept = [i for i in range(MAX_TABLES + 3) if context([1], salt=str(i)).partition in source._tables]
    assert kept == [0, *range(4, MAX_TABLES + 3)]


def test_a_vocabulary_smaller_than_the_width() -> None:
    source = RecyclingSource(RecyclingOptions(), ReferenceSampler(3), 3)
    drafter = source.open(context([1]))
    logits = np.array([[0.0, 2.0, 1.0]], np.float32)
    drafter.observe(Draft(), ForwardOutput(logits, np.array([1], np.int32)))
    assert [path for path in paths_of(propose(drafter, 20)) if len(path) == 1] == [(1,), (2,), (0,)]


def test_cells_tell_where_a_ranking_comes_from() -> None:
    source = make_source(width=2)
    first = taught(source)  # 5 after 4, 6 after 5, in request 1

    def first_cell(drafter: RecyclingDrafter) -> int:
        cell = propose(drafter, 1).cells[0]
        assert cell % (NUM_DEPTHS * MAX_WIDTH) == 0
        return cell // (NUM_DEPTHS * MAX_WIDTH)

    assert first_cell(first) == 0
    first.advance([5])  # now 5 after 5
    assert first_cell(first) == 1
    assert first_cell(source.open(context([4, 5]))) == 2
    assert first_cell(source.open(context([5, 5]))) == 3
    assert first_cell(source.open(context([5]))) == 3
    first.observe(Draft(), rows_of([6, 7]))
    assert first_cell(source.open(context([5, 5]))) == 2
    assert first_cell(source.open(context([5]))) == 3  # nothing stands before it
    deep = propose(source.open(context([5, 5])), 63, rate=0.9)
    below = [cell for cell, depth in zip(deep.cells, depths(deep.draft), strict=True) if depth == 2]
    assert {(cell // MAX_WIDTH) % NUM_DEPTHS for cell in below} == {1}
    assert len(source.priors) == 4 * NUM_DEPTHS * MAX_WIDTH
    assert [source.priors[kind * NUM_DEPTHS * MAX_WIDTH] for kind in range(4)] == [rates[0] for rates in PRIOR_RATES]
    assert all(len(rates) == MAX_WIDTH and list(rates) == sorted(rates, reverse=True) for rates in PRIOR_RATES)


def test_binds_to_any_target() -> None:
    source = RecyclingOptions(policy="fixed").bind(target(V))
    assert (source.name, source.policy, source.reads_rows, source.is_free) == ("recycling", "fixed", True, True)
    assert paths_of(propose(taught(source), 1)) == [(6,)]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"k": -1}, "k is -1, but must be between 0"),
        ({"k": 64}, "k is 64"),
        ({"width": 0}, "width is 0, but must be between 1 and 8"),
        ({"width": 9}, "width is 9"),
        ({"depth": 0}, "depth is 0, but must be between 1 and 8"),
        ({"depth": 9}, "depth is 9"),
        ({"policy": "clever"}, "adaptive or fixed"),
    ],
)
def test_f019_settings_out_of_range_are_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        RecyclingOptions(**settings)  # type: ignore[arg-type]
