import random
from dataclasses import replace

import numpy as np
import pytest

from forerun.batch import Batch, DraftPiece, PromptPiece, StepBatch
from forerun.engine.pieces import draft_piece, prompt_piece
from forerun.engine.sequence import Sequence
from forerun.errors import EngineFault
from forerun.kv.pages import PageManager
from forerun.ops import create_executor
from forerun.ops.native import NativeExecutor
from forerun.types import Draft
from tests.helpers.toy_llama import ToyLlama


def toy_executor(toy: ToyLlama) -> NativeExecutor:
    target = create_executor("native", replace(toy.config("f32", 16), num_threads=1), toy.build)
    assert isinstance(target, NativeExecutor)
    return target


def make(num_prompt: int, max_len: int = 64) -> Sequence:
    sequence = Sequence(1, range(100, 100 + num_prompt), max_len, PageManager(8))
    sequence.open()
    return sequence


def prompt_batch(sequence: Sequence, end: int) -> StepBatch:
    return StepBatch(prompt_piece(sequence, end, int(end == sequence.committed_len)))


def decode_batch(sequence: Sequence, draft: Draft) -> StepBatch:
    return StepBatch(draft_piece(sequence, draft))


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
    sequence.open()
    sequence.reserve(16)
    assert sequence.page_table.tolist() == [0]
    sequence.reserve(33)
    assert sequence.page_table.tolist() == [0, 1, 2]
    sequence.mark_cached(5)
    sequence.close()
    assert pages.num_free == 8
    assert (sequence.cached_len, sequence.page_table.size, sequence.is_open) == (0, 0, False)


@pytest.mark.parametrize("seed", range(20))
def test_the_native_backend_fills_in_the_rows_that_the_batch_spells_out(seed: int) -> None:
    rng = random.Random(seed)
    toy = ToyLlama()
    compact, spelled_out = toy_executor(toy), toy_executor(toy)
    sequence = Sequence(1, [rng.randrange(toy.vocab_size) for _ in range(rng.randrange(1, 40))], 200, PageManager(16))
    sequence.open()
    num_nodes, is_chain = rng.choice((0, 1, 5, 20)), rng.random() < 0.4
    parents = tuple(node - 1 if is_chain else rng.randrange(-1, node) for node in range(num_nodes))
    token_ids = tuple(rng.randrange(toy.vocab_size) for _ in parents)
    draft = Draft(token_ids, parents, ("test",) * num_nodes, (None,) * num_nodes)
    sequence.reserve(sequence.committed_len + num_nodes)
    for target in (compact, spelled_out):
        target.forward(prompt_batch(sequence, sequence.committed_len))
    batch = decode_batch(sequence, draft)
    got = compact.forward(batch)
    full = Batch(**{name: getattr(batch, name) for name in Batch.__slots__})
    expected = spelled_out.forward(full)
    assert (got.logits == expected.logits).all()
    assert got.logits.shape == (1 + num_nodes, toy.vocab_size)
    assert got.argmax.tolist() == got.argmax_ids == expected.argmax_ids


def test_rows_that_make_no_sense_are_a_fault() -> None:
    target = toy_executor(ToyLlama())
    sequence = make(5)
    sequence.reserve(16)
    table = sequence.page_table
    for node_ids, parents, root, message in (
        ((1, 2), (-1,), 4, "differ in length"),
        ((1, 2), (-1, 1), 4, "precedes its parent"),
        ((1, 2), (-1, -2), 4, "precedes its parent"),
        ((1,) * 65, tuple(range(-1, 64)), 4, "more than 64 nodes"),
        ((1,), (-1,), -1, "outside the cache"),
        ((1,), (-1,), 15, "outside the page table"),
        ((10**6,), (-1,), 4, "outside the vocabulary"),
    ):
        with pytest.raises(EngineFault, match=message):
            target.forward(StepBatch(DraftPiece(1, node_ids, parents, root, table)))


@pytest.mark.parametrize("seed", range(20))
def test_pieces_of_several_sequences_are_one_batch(seed: int) -> None:
    """What the backend fills in, what the batch spells out and what each piece gives alone are the same bits."""
    rng = random.Random(seed)
    toy = ToyLlama()
    together, spelled_out, alone = (toy_executor(toy) for _ in range(3))
    pages = PageManager(16)
    sequences = []
    for number in range(rng.randrange(2, 5)):
        text = [rng.randrange(toy.vocab_size) for _ in range(rng.randrange(1, 40))]
        sequence = Sequence(number, text, 60, pages)
        sequence.open()
        sequence.reserve(min(sequence.committed_len + 12, 60))
        sequences.append(sequence)
    pieces: list[DraftPiece | PromptPiece] = []
    for sequence in sequences:
        if rng.random() < 0.5:
            end = rng.randrange(1, sequence.committed_len + 1)
            pieces.append(prompt_piece(sequence, end, rng.choice((0, 1, end))))
            continue
        for target in (together, spelled_out, alone):
            target.forward(prompt_batch(sequence, sequence.committed_len))
        parents = tuple(rng.randrange(-1, node) for node in range(rng.randrange(9)))
        ids = tuple(rng.randrange(toy.vocab_size) for _ in parents)
        pieces.append(draft_piece(sequence, Draft(ids, parents, ("test",) * len(ids), (None,) * len(ids))))
    batch = StepBatch(*pieces)
    full = Batch(**{name: getattr(batch, name) for name in Batch.__slots__})
    expected = spelled_out.forward(full)
    got = together.forward(batch)
    assert (got.logits == expected.logits).all()
    begin = 0
    for piece in pieces:
        own = alone.forward(StepBatch(piece))
        part = got.part(begin, begin + piece.num_logits)
        assert len(own.logits) == piece.num_logits
        assert part.argmax_ids == own.argmax_ids == part.argmax.tolist()
        assert (part.logits == own.logits).all()
        begin += piece.num_logits
    assert begin == len(got.argmax_ids)
