import numpy as np
import pytest

from forerun.engine.batches import decode_batch, prompt_batch
from forerun.engine.sequence import Sequence
from forerun.kv.pages import PageManager
from forerun.types import Batch, Draft


def make(num_prompt: int, max_len: int = 64) -> Sequence:
    return Sequence(1, range(100, 100 + num_prompt), max_len, PageManager(8))


def as_lists(batch: Batch) -> dict[str, list[int]]:
    names = ("token_ids", "positions", "slots", "visible_len", "tail_base", "tail_mask", "seq_ids", "logit_rows")
    return {name: getattr(batch, name).tolist() for name in names}


def test_prompt_pieces() -> None:
    sequence = make(5)
    first = prompt_batch(sequence, 3)
    assert first.token_ids.tolist() == [100, 101, 102]
    assert first.positions.tolist() == first.slots.tolist() == [0, 1, 2]
    assert first.visible_len.tolist() == [1, 2, 3]
    assert first.logit_rows.tolist() == []
    sequence.mark_cached(3)
    last = prompt_batch(sequence, 5)
    assert last.token_ids.tolist() == [103, 104]
    assert last.positions.tolist() == [3, 4]
    assert last.logit_rows.tolist() == [1]


def test_chain() -> None:
    batch = decode_batch(make(5), Draft.chain((7, 8), "test"))
    assert as_lists(batch) == {
        "token_ids": [104, 7, 8],
        "positions": [4, 5, 6],
        "slots": [4, 5, 6],
        "visible_len": [5, 6, 7],
        "tail_base": [5, 6, 7],
        "tail_mask": [0, 0, 0],
        "seq_ids": [0, 0, 0],
        "logit_rows": [0, 1, 2],
    }


def test_tree() -> None:
    #  root 104 -> 7 -> 8      nodes 0, 2
    #           -> 9 -> 8, 7   nodes 1, 3, 4
    draft = Draft((7, 9, 8, 8, 7), (-1, -1, 0, 1, 1), ("test",) * 5, (None,) * 5)
    batch = decode_batch(make(5), draft)
    assert as_lists(batch) == {
        "token_ids": [104, 7, 9, 8, 8, 7],
        "positions": [4, 5, 5, 6, 6, 6],
        "slots": [4, 5, 6, 7, 8, 9],
        "visible_len": [5] * 6,
        "tail_base": [5] * 6,
        "tail_mask": [0, 0b1, 0b10, 0b101, 0b1010, 0b10010],
        "seq_ids": [0] * 6,
        "logit_rows": [0, 1, 2, 3, 4, 5],
    }


def test_arrays_have_the_types_of_the_contract() -> None:
    for batch in (
        prompt_batch(make(5), 3),
        prompt_batch(make(5), 5),
        decode_batch(make(5), Draft()),
        decode_batch(make(5), Draft.chain((1, 2), "test")),
        decode_batch(make(5), Draft((1, 2), (-1, -1), ("test",) * 2, (None,) * 2)),
    ):
        for name in Batch.__slots__:
            array = getattr(batch, name)
            assert array.dtype == (np.uint64 if name == "tail_mask" else np.int32)
            assert array.flags.c_contiguous


def test_lengths_keep_their_order() -> None:
    sequence = make(5, max_len=8)
    sequence.mark_cached(5)
    sequence.commit((1, 2), num_cached=1)
    assert (sequence.cached_len, sequence.committed_len, sequence.remaining_len) == (6, 7, 1)
    assert sequence.num_output_tokens == 2
    with pytest.raises(AssertionError):
        sequence.commit((3,), num_cached=0)  # the last token has not been through a pass
    sequence.mark_cached(7)
    with pytest.raises(AssertionError):
        sequence.commit((3, 4), num_cached=1)  # past max_len
    with pytest.raises(AssertionError):
        sequence.mark_cached(8)
    with pytest.raises(AssertionError):
        sequence.reserve(9)


def test_pages_come_as_slots_are_reserved() -> None:
    pages = PageManager(8)
    sequence = Sequence(1, [1] * 5, 64, pages)
    sequence.reserve(16)
    assert sequence.page_table.tolist() == [0]
    sequence.reserve(33)
    assert sequence.page_table.tolist() == [0, 1, 2]
    sequence.close()
    assert pages.num_free == 8
