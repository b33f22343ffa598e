"""Lookahead: the window against its definition by generation and position, the pool, and the ends of both."""

import random
from collections.abc import Callable, Sequence

import numpy as np
import pytest

import forerun.drafters.lookahead as lookahead
from forerun.drafters.base import Proposal
from forerun.drafters.lookahead import (
    BRANCH_CELL,
    MAX_TABLE_DEPTH,
    LookaheadDrafter,
    LookaheadOptions,
    LookaheadSource,
)
from forerun.errors import ConfigError
from forerun.types import Draft, ForwardOutput
from tests.helpers.drafting import context, propose, target

Path = tuple[int, ...]
V = 50
EOS = 0
PROMPT = [7, 8, 9, 10, 11]


def make(prompt: Sequence[int] = PROMPT, end_ids: Sequence[int] = (EOS,), **options: int) -> LookaheadDrafter:
    return LookaheadSource(LookaheadOptions(**options)).open(context(prompt, end_ids))


def argmax_after(token_ids: Sequence[int]) -> int:
    """What the target chooses: a function of everything before."""
    return 1 + random.Random(str(tuple(token_ids))).randrange(V - 1)


def paths_of(draft: Draft) -> list[Path]:
    """Each node as the tokens from the root down to it."""
    paths: list[Path] = []
    for token_id, parent in zip(draft.token_ids, draft.parents, strict=True):
        paths.append((*(paths[parent] if parent >= 0 else ()), token_id))
    return paths


def run_pass(
    drafter: LookaheadDrafter, text: list[int], draft: Draft, choose: Callable[[Sequence[int]], int] = argmax_after
) -> None:
    """What the target answers to a draft."""
    argmax = [choose([*text, *path]) for path in [(), *paths_of(draft)]]
    drafter.observe(draft, ForwardOutput(np.empty((0, 0), np.float32), np.array(argmax, np.int32)))


@pytest.mark.parametrize(("w", "n", "g"), [(5, 3, 3), (7, 5, 7), (1, 4, 2), (4, 2, 1), (1, 2, 1), (2, 7, 3)])
def test_window_and_pool_are_what_generations_and_positions_say(w: int, n: int, g: int) -> None:
    """Column i's token l at step t was made at step t - (n - 1) + l, for place i + l after the root."""
    text = list(PROMPT)
    drafter = make(w=w, n=n, g=g)
    # made[step, position]; the first guesses are as if made before the first step.
    made = {
        (level - n + 1, len(text) - 1 + column + level): token_id
        for column, one in enumerate(drafter._columns)
        for level, token_id in enumerate(one.token_ids)
    }
    pool: dict[int, list[Path]] = {}
    num_found = 0
    for step in range(4 * n + 6):
        root = len(text) - 1
        proposal = propose(drafter, 63)
        trunks = [tuple(made[step - n + 1, root + i] for i in range(1, column + 1)) for column in range(w)]
        tails = [tuple(made[step - n + 1 + k, root + column + k] for k in range(1, n - 1)) for column in range(w)]
        branches = pool.get(text[-1], [])[::-1]
        num_found += len(branches)
        wanted = {
            path[:end] for path in [*branches, *map(tuple.__add__, trunks, tails)] for end in range(1, len(path) + 1)
        }
        assert set(paths_of(proposal.draft)) == wanted
        assert proposal.draft.num_nodes == len(wanted)
        for column in range(w):
            made[step, root + column + n - 1] = argmax_after([*text, *trunks[column], *tails[column]])
            if step >= n - 2:  # until then an n-gram holds a first guess
                ngrams = pool.setdefault((text[-1], *trunks[column])[-1], [])
                ngram = (*tails[column], made[step, root + column + n - 1])
                if ngram in ngrams:
                    ngrams.remove(ngram)
                ngrams.append(ngram)
                del ngrams[:-g]
        run_pass(drafter, text, proposal.draft)
        # The text goes on where the pool knows a way, now and then, by one token a step.
        known = [key for key in pool if pool[key]]
        token_id = known[step % len(known)] if known and step % 2 else argmax_after(text)
        text.append(token_id)
        drafter.advance([token_id])
    assert num_found > 2


def test_overtaken_columns_go_to_the_end() -> None:
    drafter = make(w=4, n=3)
    before = [list(column.token_ids) for column in drafter._columns]
    drafter.advance([1, 2, 3])  # two more than a column moves on by itself
    assert [column.token_ids for column in drafter._columns] == [before[2], before[3], before[0], before[1]]
    drafter.advance([1] * 6)  # more than there are columns
    assert [column.token_ids for column in drafter._columns] == [before[3], before[0], before[1], before[2]]


def test_what_is_expected_of_overtaken_columns_stands_where_it_was_expected() -> None:
    """A column's guess of a position is looked for at this position, also when several tokens came at once."""
    drafter = make(w=6, n=4)
    text = list(PROMPT)
    for _ in range(6):
        run_pass(drafter, text, propose(drafter, 63).draft)
        text.append(argmax_after(text))
        drafter.advance(text[-1:])
    proposal = propose(drafter, 63)
    third = list(drafter._columns[2].token_ids)
    run_pass(drafter, text, proposal.draft)
    drafter.advance([1, 2])
    # Column 2 guessed the places from 2 on; the root has moved by 2, so it guesses from 1 on, its first token gone.
    assert drafter._columns[1].token_ids[:-1] == third[1:]


def test_rows_are_found_in_a_draft_that_others_have_a_part_in() -> None:
    """Nodes of others come first, so every node has another index."""
    alone, merged = make(w=4, n=3), make(w=4, n=3)
    text = list(PROMPT)
    for step in range(8):
        draft = propose(alone, 63).draft
        assert draft == propose(merged, 63).draft
        run_pass(alone, text, draft)
        others = (41, 42)
        mixed = Draft(
            (*others, *draft.token_ids),
            (-1, 0, *(parent + 2 if parent >= 0 else -1 for parent in draft.parents)),
            ("x",) * (draft.num_nodes + 2),
            (None,) * (draft.num_nodes + 2),
        )
        run_pass(merged, text, mixed)
        text.append(PROMPT[step % 5])
        alone.advance(text[-1:])
        merged.advance(text[-1:])
    assert alone._pool._ngrams == merged._pool._ngrams != {}


def test_columns_that_were_left_out_stay_as_they_are() -> None:
    drafter = make(w=3, n=3)
    before = [list(column.token_ids) for column in drafter._columns]
    run_pass(drafter, PROMPT, Draft())
    assert [column.token_ids for column in drafter._columns] == before
    # Column 0 hangs below the root: one node of it is all it needs.
    run_pass(drafter, PROMPT, Draft.chain((before[0][1],), "x"))
    assert [column.token_ids for column in drafter._columns[1:]] == before[1:]
    assert drafter._columns[0].token_ids == [before[0][1], argmax_after([*PROMPT, before[0][1]])]


def test_the_window_is_all_or_nothing_and_branches_are_cut() -> None:
    drafter = make(w=4, n=4, g=2)
    drafter._pool.add(PROMPT[-1], (20, 21, 22))
    drafter._pool.add(PROMPT[-1], (20, 31, 32))
    assert paths_of(propose(drafter, 4).draft) == [(20,), (20, 31), (20, 31, 32), (20, 21)]
    assert paths_of(propose(drafter, 5).draft)[4:] == [(20, 21, 22)]
    assert propose(drafter, 5 + 10).draft.num_nodes == 5
    assert propose(drafter, 5 + 11).draft.num_nodes > 5
    assert paths_of(propose(drafter, 1).draft) == [(20,)]


def test_pool_has_the_latest_of_each_first_token() -> None:
    pool = lookahead._Pool(2)
    for ngram in ((1,), (2,), (1,), (3,)):
        pool.add(9, ngram)
    assert list(pool.find(9)) == [(3,), (1,)]
    assert list(pool.find(8)) == []


def test_f026_pool_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookahead, "MAX_POOL_KEYS", 3)
    pool = lookahead._Pool(2)
    for key in (1, 2, 3, 1, 4, 5):
        pool.add(key, (key,))
    assert sorted(key for key in range(9) if list(pool.find(key))) == [1, 4, 5]


def test_f017_end_ids_end_an_ngram_and_never_enter_the_window() -> None:
    drafter = make(prompt=[EOS, 7, EOS, 8], w=4, n=3)
    text = [EOS, 7, EOS, 8]
    seen = False
    for step in range(12):
        proposal = propose(drafter, 63)
        paths = paths_of(proposal.draft)
        assert not any(EOS in path[:-1] for path in paths)
        seen |= any(path[-1] == EOS for path in paths)
        assert all(EOS not in column.token_ids for column in drafter._columns)
        run_pass(drafter, text, proposal.draft, lambda ids: EOS if len(ids) % 3 else 7 + sum(ids) % 2)
        text.append(7 + step % 2)
        drafter.advance(text[-1:])
    assert seen


def test_the_pool_holds_nothing_that_was_guessed_at_random() -> None:
    """Also after an end id, whose place in the window is taken by a guess."""
    drafter = make(w=5, n=4)
    text = list(PROMPT)
    for step in range(20):
        run_pass(drafter, text, propose(drafter, 63).draft, lambda ids: EOS if len(ids) % 5 == 0 else 30 + len(ids) % 7)
        text.append(30 + step % 7)
        drafter.advance(text[-1:])
    found = [ngram for ngrams in drafter._pool._ngrams.values() for ngram in ngrams]
    assert any(EOS in ngram for ngram in found)
    assert not {token_id for ngram in found for token_id in ngram} & set(PROMPT)


def test_f017_f018_a_prompt_of_end_ids_alone_proposes_nothing() -> None:
    drafter = make(prompt=[EOS, EOS])
    assert propose(drafter, 63).draft.num_nodes == 0
    run_pass(drafter, [EOS, EOS], Draft())
    drafter.advance([5, 6])
    assert propose(drafter, 63).draft.num_nodes == 0


def test_f024_two_requests_share_nothing_and_guess_the_same() -> None:
    source = LookaheadSource(LookaheadOptions())
    first = source.open(context(PROMPT))
    fresh = propose(first, 63)
    first._pool.add(PROMPT[-1], (3, 4))
    first.advance([5, 11])
    assert propose(source.open(context(PROMPT)), 63) == fresh


def test_cells_tell_window_from_branches_and_the_depth() -> None:
    drafter = make(w=6, n=4, g=2)
    drafter._pool.add(PROMPT[-1], (20, 21, 22))
    proposal: Proposal = propose(drafter, 63)
    branch = set(paths_of(Draft.chain((20, 21, 22), "x")))
    for path, cell in zip(paths_of(proposal.draft), proposal.cells, strict=True):
        assert cell == (BRANCH_CELL if path in branch else 0) + min(len(path), MAX_TABLE_DEPTH) - 1
    assert len(LookaheadSource.priors) == BRANCH_CELL + MAX_TABLE_DEPTH
    assert set(proposal.draft.origins) == {"lookahead"}


def test_binds_to_any_target_and_is_fixed_unless_told_otherwise() -> None:
    source = LookaheadOptions().bind(target(V))
    assert (source.name, source.policy, source.reads_rows, source.is_free) == ("lookahead", "fixed", True, True)
    assert LookaheadOptions(policy="adaptive").bind(target(V)).policy == "adaptive"
    assert source.memory_bytes == 0
    assert LookaheadOptions(w=0).is_off
    assert not LookaheadOptions().is_off


@pytest.mark.parametrize(("w", "n", "g"), [(7, 5, 7), (9, 5, 7), (63, 2, 1), (1, 33, 1)])
def test_never_more_nodes_than_a_draft_may_have(w: int, n: int, g: int) -> None:
    drafter = make(w=w, n=n, g=g)
    for index in range(g):
        drafter._pool.add(PROMPT[-1], tuple(20 + index for _ in range(n - 1)))
    assert propose(drafter, 63).draft.num_nodes <= LookaheadOptions(w=w, n=n, g=g).num_nodes <= 63


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"w": -1}, "w is -1, but must be at least 0"),
        ({"n": 1}, "n is 1, but must be at least 2"),
        ({"g": 0}, "g is 0, but must be at least 1"),
        ({"w": 10, "n": 5, "g": 7}, "make .* = 67 nodes, but must make at most 63"),
        ({"w": 64, "n": 2, "g": 1}, "= 64 nodes"),
        ({"policy": "clever"}, "adaptive or fixed"),
    ],
)
def test_f019_settings_out_of_range_are_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LookaheadOptions(**settings)  # type: ignore[arg-type]
