"""How drafters draw: whose noise it is, in which order, and what it is independent of."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from forerun.errors import EngineFault
from forerun.sampling import make_sampler
from forerun.sampling.distribution import Law, RowSampler
from forerun.sampling.drafting import draft_from_own, draft_from_shared
from forerun.sampling.noise import Stream

P = np.array((0.5, 0.25, 0.2, 0.05, 0.0))
NUM_DRAWS = 20_000


@pytest.fixture(params=["native", "numpy"])
def sampler(request: pytest.FixtureRequest) -> RowSampler:
    return make_sampler(64, request.param)


FLAT = Law(None, np.full(64, 0.5), 32.0)


def test_children_for_coupled_are_what_the_target_prefers(sampler: RowSampler) -> None:
    for key in range(50):
        children = draft_from_shared(sampler, FLAT, key, 9, 4)
        scores = [sampler.score(FLAT, key, 9, token_id) for token_id in children]
        assert children[0] == sampler.sample(FLAT, key, 9).token_id
        assert scores == sorted(scores)
        others = set(range(64)) - set(children)
        assert max(scores) < min(sampler.score(FLAT, key, 9, token_id) for token_id in others)


def test_children_for_other_rules_have_noise_of_their_own_node_and_step(sampler: RowSampler) -> None:
    draws = {
        draft_from_own(sampler, FLAT, key, committed_len, node, 8)
        for key, committed_len, node in itertools.product((1, 2), (3, 4), (0, 1, 2))
    }
    shared = {draft_from_shared(sampler, FLAT, key, pos, 8) for key in (1, 2) for pos in range(8)}
    assert len(draws) == 12
    assert not draws & shared
    first = draft_from_own(sampler, FLAT, 5, 3, 9)
    assert first == (sampler.sample(FLAT, 5, 9, Stream.DRAFT, 3).token_id,)
    assert draft_from_own(sampler, FLAT, 5, 3, 9, 3)[:1] == first


def test_drawing_with_replacement_gives_each_child_the_noise_of_its_node(sampler: RowSampler) -> None:
    law = Law(None, P, 1.0)
    children = draft_from_own(sampler, law, 5, 3, 7, 6, with_replacement=True)
    assert children == tuple(draft_from_own(sampler, law, 5, 3, 7 + i)[0] for i in range(6))
    assert len(set(children)) < 6


def test_ids_without_a_chance_are_never_drawn(sampler: RowSampler) -> None:
    cut = Law(np.array((3, 20, 41), np.int32), np.array((0.5, 0.0, 0.25)), 0.75)
    assert set(draft_from_shared(sampler, cut, 1, 2, 5)) == {3, 41}
    assert draft_from_shared(sampler, Law.point(7), 1, 2, 5) == (7,)
    assert draft_from_own(sampler, Law.point(7), 1, 2, 5, 3, with_replacement=True) == (7, 7, 7)
    with pytest.raises(EngineFault, match="no positive weight"):
        draft_from_shared(sampler, Law(None, np.zeros(4), 0.0), 1, 2, 2)


def test_numbers_of_children_that_no_draft_holds_are_refused(sampler: RowSampler) -> None:
    for count in (0, -1, 65):
        with pytest.raises(EngineFault, match="can't be drawn at once, only 1 to 64"):
            draft_from_shared(sampler, FLAT, 1, 2, count)
    with pytest.raises(EngineFault, match="does not fit"):
        draft_from_shared(sampler, FLAT, 1, 2**32, 2)


@pytest.mark.parametrize("with_replacement", [False, True])
def test_pairs_of_children_follow_their_law(with_replacement: bool) -> None:
    """A smoke check with fixed seeds; the upper 1e-4 point of chi-square with 15 and with 11 degrees."""
    sampler, law = make_sampler(5), Law(None, P * 3, 3.0)
    expected = np.outer(P, P) if with_replacement else np.outer(P, P) / (1 - P)[:, None] * (1 - np.eye(5))
    counts = np.zeros((5, 5))
    for key in range(NUM_DRAWS):
        counts[draft_from_own(sampler, law, key, 3, 1, 2, with_replacement=with_replacement)] += 1
    possible = expected > 0
    assert counts[~possible].sum() == 0
    chi_square = ((counts - NUM_DRAWS * expected)[possible] ** 2 / (NUM_DRAWS * expected)[possible]).sum()
    assert chi_square < (44.26 if with_replacement else 37.37)


@pytest.mark.parametrize("sign", [-1, 1])
def test_a_first_child_is_accepted_as_the_match_formula_says(sign: int) -> None:
    """sum_i 1 / sum_j max(p_j / p_i, q_j / q_i) (Daliri et al.), to five standard errors; not with the roles of noise
    and position mixed up."""
    sampler, p, q = make_sampler(4), P[:4], np.array((0.2, 0.2, 0.3, 0.3))
    formula = sum(1 / np.maximum(p / p[i], q / q[i]).sum() for i in range(4))
    laws = Law(None, p, 1.0), Law(None, q, 1.0)
    draft_pos = 7 if sign > 0 else 8
    matches = sum(
        sampler.sample(laws[0], key, 7).token_id == draft_from_shared(sampler, laws[1], key, draft_pos)[0]
        for key in range(NUM_DRAWS)
    )
    error = abs(matches / NUM_DRAWS - formula) / np.sqrt(formula * (1 - formula) / NUM_DRAWS)
    assert error < 5 if sign > 0 else error > 20
