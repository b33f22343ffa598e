"""The index of suffix decoding against a scan of its texts: counts, removal, memory, and the trees that come of it."""

from __future__ import annotations

import gc
import random
from bisect import bisect_right

import numpy as np
import pytest

from forerun._native import NgramTable, SuffixDrafts, SuffixIndex
from forerun.types import Int32Array
from tests.helpers.suffix_reference import SlowDrafts, SlowIndex, SlowTable

PARTITIONS = ("", "a", "b\0c")
OWN_DISCOUNTS = [0.75, 0.5, 0.3, 0.1]
SHARED_DISCOUNTS = [1.0, 0.8, 0.6]
STORED_DISCOUNTS = [0.9, 0.7]
PROB_EDGES = [0.1, 0.5, 0.9]
MATCH_EDGES = [3]


def array(ids: list[int]) -> Int32Array:
    return np.array(ids, np.int32)


def built(texts: list[tuple[str, list[int]]], max_depth: int) -> tuple[SuffixIndex, SlowIndex]:
    fast, slow = SuffixIndex(max_depth, 0), SlowIndex(max_depth)
    for partition, ids in texts:
        for index in (fast, slow):
            index.begin(partition)
        fast.append(array(ids))
        slow.append(ids)
    return fast, slow


def assert_same(fast: SuffixIndex, slow: SlowIndex, partition: str, ids: list[int]) -> None:
    expected = [(c.length, c.counts.total(), len(c.counts), c.ranked) for c in slow.matches(partition, ids)]
    assert fast.matches(partition, array(ids)) == expected


def random_text(rng: random.Random, vocab_size: int, texts: list[list[int]]) -> list[int]:
    """Random ids, or a stretch of an earlier text with an error in it."""
    if rng.random() < 0.5 or not any(texts):
        return [rng.randrange(vocab_size) for _ in range(rng.randrange(40))]
    text = rng.choice(texts)
    start = rng.randrange(len(text) + 1)
    copied = text[start : start + rng.randrange(40)]
    if copied:
        copied[rng.randrange(len(copied))] = rng.randrange(vocab_size)
    return copied


@pytest.mark.parametrize("vocab_size", [1, 2, 3, 12, 300])
@pytest.mark.parametrize("max_depth", [1, 2, 5, 64])
def test_equals_a_scan_under_random_operations(vocab_size: int, max_depth: int) -> None:
    rng = random.Random(vocab_size * 1000 + max_depth)
    for _ in range(3):
        fast, slow = SuffixIndex(max_depth, 0), SlowIndex(max_depth)
        for _ in range(30):
            operation = rng.random()
            if not slow.texts or operation < 0.3:
                partition = rng.choice(PARTITIONS)
                fast.begin(partition)
                slow.begin(partition)
            elif operation < 0.8:
                ids = random_text(rng, vocab_size, [text for _, text in slow.texts])
                fast.append(array(ids))
                slow.append(ids)
            else:
                fast.remove_oldest()
                slow.remove_oldest()
            fast.check_integrity()
            assert fast.num_sequences == len(slow.texts)
            assert fast.num_partitions == len({partition for partition, _ in slow.texts})
            asked = rng.choice(slow.texts)[1][-9:] if slow.texts and rng.random() < 0.7 else []
            asked = [*asked, *(rng.randrange(vocab_size) for _ in range(rng.randrange(3)))]
            assert_same(fast, slow, rng.choice(PARTITIONS), asked)
        while slow.texts:
            fast.remove_oldest()
            slow.remove_oldest()
            fast.check_integrity()
        assert fast.num_nodes == fast.num_partitions == fast.bytes == 0


def test_counts_of_a_context_with_many_continuations_survive_removal() -> None:
    # Beyond some number of continuations a table knows them; every id follows token 7 a different number of times.
    rng = random.Random(5)
    texts = [("", [x for t in rng.sample(range(100, 400), 120) for x in (7, t)]) for _ in range(6)]
    fast, slow = built(texts, 3)
    while slow.texts:
        fast.check_integrity()
        assert_same(fast, slow, "", [7])
        fast.remove_oldest()
        slow.remove_oldest()
    assert fast.bytes == 0


def test_a_tree_is_as_small_as_its_texts_however_it_came_about() -> None:
    rng = random.Random(1)
    early = [("", [rng.randrange(4) for _ in range(60)]) for _ in range(5)]
    late = [("", [rng.randrange(4) for _ in range(60)]) for _ in range(3)]
    fast, _ = built(early + late, 16)
    for _ in early:
        fast.remove_oldest()
    assert fast.num_nodes == built(late, 16)[0].num_nodes


@pytest.mark.parametrize("token_id", [0, 65_535, 65_536, 2**31 - 1])
def test_any_id_counts(token_id: int) -> None:
    other = 2**31 - 2
    fast, slow = built([("", [token_id, other, token_id, token_id, other, other])], 8)
    fast.check_integrity()
    for ids in ([token_id], [other], [token_id, other], [other, token_id]):
        assert_same(fast, slow, "", ids)


def test_ids_below_zero_are_refused_and_leave_no_trace() -> None:
    fast, _ = built([("", [1, 2, 1])], 8)
    with pytest.raises(ValueError, match="below 0"):
        fast.append(array([1, -1]))
    fast.check_integrity()
    assert fast.matches("", array([1])) == [(1, 1, 1, [(2, 1)])]


def test_nothing_to_append_to_or_to_remove_is_refused() -> None:
    fast = SuffixIndex(8, 0)
    with pytest.raises(ValueError, match="no sequence to append to"):
        fast.append(array([1]))
    with pytest.raises(ValueError, match="no sequence to remove"):
        fast.remove_oldest()
    with pytest.raises(ValueError, match="max_depth is 0"):
        SuffixIndex(0, 0)


def test_f026_memory_stays_within_its_bound_and_the_newest_texts_stay() -> None:
    rng = random.Random(3)
    bound = 200_000
    fast, slow = SuffixIndex(64, bound), SlowIndex(64)
    most = 0
    for number in range(300):
        # Every partition is new: a salt that is gone leaves nothing behind.
        partition = f"salt {number // 3}"
        ids = [rng.randrange(50) for _ in range(rng.randrange(200))]
        for index in (fast, slow):
            index.begin(partition)
        fast.append(array(ids))
        slow.append(ids)
        assert fast.bytes <= bound
        most = max(most, fast.bytes)
        while len(slow.texts) > fast.num_sequences:
            slow.remove_oldest()
        assert_same(fast, slow, partition, ids[-5:])
        if number % 20 == 0:
            fast.check_integrity()
            assert fast.num_partitions == len({name for name, _ in slow.texts})
    assert most > 0.9 * bound
    assert 5 < fast.num_sequences < 50


def test_f026_a_text_that_alone_is_too_large_is_not_kept() -> None:
    fast = SuffixIndex(64, 20_000)
    fast.begin("")
    fast.append(array(list(range(1000))))
    assert fast.num_sequences == fast.bytes == 0
    fast.begin("")
    fast.append(array([1, 2, 1]))
    fast.check_integrity()
    assert fast.matches("", array([1])) == [(1, 1, 1, [(2, 1)])]


def test_clear_forgets_everything() -> None:
    fast, _ = built([("", [1, 2, 1]), ("a", [3, 3])], 8)
    fast.clear()
    fast.check_integrity()
    assert fast.num_sequences == fast.num_nodes == fast.bytes == 0
    assert fast.matches("", array([1])) == []


def table(texts: list[list[int]]) -> tuple[NgramTable, SlowTable]:
    slow = SlowTable(4)
    for text in texts:
        slow.begin("")
        slow.append(text)
    ids = array([token_id for text in texts for token_id in text])
    return NgramTable(ids, [len(text) for text in texts]), slow


@pytest.mark.parametrize("vocab_size", [1, 2, 3, 12, 300])
def test_a_table_equals_a_scan(vocab_size: int) -> None:
    rng = random.Random(vocab_size)
    num_matches = num_left_out = 0
    for _ in range(60):
        texts: list[list[int]] = []
        for _ in range(rng.randrange(8)):
            texts.append(random_text(rng, vocab_size, texts))
        fast, slow = table(texts)
        assert fast.num_contexts == len(
            {tuple(text[i - n : i]) for text in texts for n in range(1, 5) for i in range(n, len(text))}
        )
        for _ in range(20):
            ids = random_text(rng, vocab_size, texts)
            expected = [(c.length, c.counts.total(), len(c.counts), c.ranked) for c in slow.matches("", ids)]
            assert fast.matches(array(ids)) == expected
            num_matches += len(expected)
            num_left_out += sum(num_different > len(ranked) for _, _, num_different, ranked in expected)
    assert num_matches > 150
    assert num_left_out > 50 or vocab_size != 12


def test_a_tables_counts_end_where_they_are_as_good_as_any() -> None:
    fast, _ = table([])
    assert (fast.num_contexts, fast.bytes, fast.matches(array([1]))) == (0, 0, [])
    fast = NgramTable(np.zeros(70_001, np.int32), [70_001])
    assert fast.matches(array([0, 0, 0, 0, 0])) == [
        (1, 70_000, 1, [(0, 65_535)]), (2, 69_999, 1, [(0, 65_535)]), (3, 69_998, 1, [(0, 65_535)]),
        (4, 69_997, 1, [(0, 65_535)]),
    ]  # fmt: skip


@pytest.mark.parametrize(("ids", "lengths"), [([1, 2], [3]), ([1, 2], [1]), ([1, -2], [2])])
def test_a_table_refuses_texts_that_are_none(ids: list[int], lengths: list[int]) -> None:
    with pytest.raises(ValueError, match=r"lengths of the texts|below 0"):
        NgramTable(array(ids), lengths)


@pytest.mark.parametrize("vocab_size", [1, 2, 4, 30])
def test_trees_equal_slow_ones(vocab_size: int) -> None:
    rng = random.Random(vocab_size)
    end_ids = [0] if vocab_size > 2 else []
    num_by_source = [0] * 3
    num_deep = 0
    for _ in range(900):
        texts: list[list[int]] = [[]]
        for _ in range(rng.randrange(5)):
            texts.append(random_text(rng, vocab_size, texts))
        depth = rng.choice([2, 6, 64])
        own, slow_own = built([("", rng.choice(texts)[:12])], depth)
        shared, slow_shared = built([(rng.choice(PARTITIONS), text) for text in texts[:3]], depth)
        stored, slow_stored = table(texts[1:])
        partition = rng.choice(PARTITIONS)
        limits = (rng.choice([0, 1, 5, 30]), rng.choice([0.001, 0.05, 0.3, 1.0]), rng.random() < 0.3)
        num_sources = rng.choice([1, 2, 3, 3, 3])
        fast_sources = [(own, "", OWN_DISCOUNTS), (shared, partition, SHARED_DISCOUNTS), (stored, "", STORED_DISCOUNTS)]
        slow_sources = [
            (slow_own, "", OWN_DISCOUNTS), (slow_shared, partition, SHARED_DISCOUNTS),
            (slow_stored, "", STORED_DISCOUNTS),
        ]  # fmt: skip
        fast = SuffixDrafts(own, fast_sources[:num_sources], end_ids, PROB_EDGES, MATCH_EDGES, 7)
        nodes = SlowDrafts(slow_sources[:num_sources], end_ids).propose(*limits)
        token_ids, parents, probs, match_lens, sources = fast.explain(*limits)
        assert token_ids == tuple(node.token_id for node in nodes)
        assert parents == tuple(node.parent for node in nodes)
        assert probs == tuple(node.prob for node in nodes)
        assert match_lens == tuple(node.match_len for node in nodes)
        assert sources == tuple(node.source for node in nodes)
        cells = tuple(
            7 + (bisect_right(PROB_EDGES, node.prob) * 2 + bisect_right(MATCH_EDGES, node.match_len)) * num_sources
            + node.source
            for node in nodes
        )  # fmt: skip
        assert fast.propose(*limits) == (token_ids, parents, cells)
        for source in sources:
            num_by_source[source] += 1
        num_deep += sum(len(node.path) > 2 for node in nodes)
    assert num_deep > 100
    assert min(num_by_source) > 40 or vocab_size == 1


@pytest.mark.parametrize("discounts", [[], [0.0], [1.1], [float("nan")]])
def test_discounts_out_of_range_are_refused(discounts: list[float]) -> None:
    index = SuffixIndex(4, 0)
    for pair in ((discounts, [0.5]), ([0.5], discounts)):
        with pytest.raises(ValueError, match="discount"):
            SuffixDrafts(index, [(index, "", own) for own in pair], [], [], [], 0)


def test_drafts_keep_their_indexes() -> None:
    index, _ = built([("", [1, 2, 1])], 4)
    drafts = SuffixDrafts(index, [(index, "", [0.5])], [], [], [], 0)
    del index
    gc.collect()
    assert drafts.propose(1, 0.01, True)[0] == (2,)
