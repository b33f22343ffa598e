"""The torch backend over many passes: trees, chunks, pages, slot moves, several sequences, and what it refuses."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from forerun.batch import Batch
from forerun.errors import ConfigError, EngineFault
from forerun.ops import create_executor, torch_storage
from forerun.ops import torch as torch_backend
from forerun.ops.base import KvType
from forerun.ops.torch import TorchExecutor
from tests.helpers.toy_llama import ToyLlama, chain_batch, f32_weight, merge_batches, pages_for, tree_batch

# With float32 storage only the order of sums differs. With float16 a key or value that lies within such a difference of
# the middle of two float16 numbers may round to the other one, a step of 2^-11.
TOLERANCES: dict[KvType, float] = {"f32": 1e-5, "f16": 5e-4}
NUM_PAGES = 24


def random_tokens(count: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, ToyLlama().vocab_size, count).tolist()


def executor(toy: ToyLlama, kv_type: KvType = "f32") -> TorchExecutor:
    return TorchExecutor(toy.config(kv_type, NUM_PAGES), toy.build)


def direct(toy: ToyLlama, tokens: list[int], kv_type: KvType = "f32") -> np.ndarray:
    """Logits of every position from one pass over one sequence."""
    return executor(toy, kv_type).forward(chain_batch(tokens, pages_for(len(tokens)))).logits


def assert_close(got: np.ndarray, expected: np.ndarray, kv_type: KvType = "f32") -> None:
    np.testing.assert_allclose(got, expected, rtol=TOLERANCES[kv_type], atol=TOLERANCES[kv_type])


def random_tree(rng: np.random.Generator, nodes: int) -> list[int]:
    """Parents of nodes 1 to n - 1 under node 0, which stands for the last committed token."""
    return [-1, *(int(rng.integers(0, node)) for node in range(1, nodes))]


def path_to(parents: list[int], node: int) -> list[int]:
    path = [node]
    while parents[path[-1]] >= 0:
        path.append(parents[path[-1]])
    return path[::-1]


@pytest.mark.parametrize("kv_type", ["f32", "f16"])
@pytest.mark.parametrize("seed", range(3))
def test_f011_a_tree_row_gives_the_logits_of_its_chain(seed: int, kv_type: KvType) -> None:
    rng = np.random.default_rng(seed)
    toy = ToyLlama(seed=seed)
    prompt, nodes = random_tokens(int(rng.integers(1, 40)), seed), int(rng.integers(2, 65))
    node_tokens, parents = random_tokens(nodes, seed + 100), random_tree(rng, nodes)
    table = pages_for(len(prompt) + nodes)
    target, chain_target = executor(toy, kv_type), executor(toy, kv_type)
    target.forward(chain_batch(prompt, table))
    got = target.forward(tree_batch(node_tokens, parents, table, len(prompt))).logits
    worst = 0.0
    for node in range(nodes):
        text = prompt + [node_tokens[i] for i in path_to(parents, node)]
        expected = chain_target.forward(chain_batch(text, table)).logits[-1]
        assert_close(got[node], expected, kv_type)
        worst = max(worst, float(np.abs(got[node] - expected).max()))
    print(f"largest logit difference between tree and chain, {kv_type}: {worst:.1e}")


@pytest.mark.parametrize("seed", range(4))
def test_moving_an_accepted_path_continues_as_if_it_had_been_the_text(seed: int) -> None:
    rng = np.random.default_rng(seed)
    toy, prompt, nodes = ToyLlama(seed=seed), random_tokens(13, seed), 24
    node_tokens, parents = random_tokens(nodes, seed + 100), random_tree(rng, nodes)
    accepted = max((path_to(parents, node) for node in range(nodes)), key=len)
    assert accepted != list(range(len(accepted))), "the test must move something"
    table = pages_for(64)
    target = executor(toy)
    target.forward(chain_batch(prompt, table))
    target.forward(tree_batch(node_tokens, parents, table, len(prompt)))
    src = len(prompt) + np.asarray(accepted, dtype=np.int32)
    dst = len(prompt) + np.arange(len(accepted), dtype=np.int32)
    target.move_slots(table, src, dst)
    text = prompt + [node_tokens[i] for i in accepted]
    more = random_tokens(5, seed + 200)
    got = target.forward(chain_batch(more, table, start=len(text))).logits
    assert_close(got, direct(toy, text + more)[len(text) :])


def test_moves_are_made_in_order() -> None:
    toy, tokens = ToyLlama(), random_tokens(40)
    table = pages_for(48)
    one_call, one_by_one = executor(toy), executor(toy)
    src, dst = np.array([17, 5, 6, 30, 7, 17]), np.array([5, 6, 7, 17, 31, 17])
    for target in (one_call, one_by_one):
        target.forward(chain_batch(tokens, table))
    one_call.move_slots(table, src, dst)
    for a, b in zip(src, dst, strict=True):
        one_by_one.move_slots(table, np.array([a]), np.array([b]))
    probe = chain_batch(random_tokens(1, 9), table, start=40)
    moved = one_call.forward(probe).logits
    np.testing.assert_array_equal(moved, one_by_one.forward(probe).logits)
    assert not np.allclose(moved, direct(toy, tokens + random_tokens(1, 9))[-1:], atol=1e-3)


@pytest.mark.parametrize("chunks", [[1] * 50, [7, 9, 1, 33], [16, 16, 18], [49, 1]])
def test_f011_chunks_and_single_rows_give_the_logits_of_one_piece(chunks: list[int]) -> None:
    toy, tokens = ToyLlama(), random_tokens(50)
    table, target = pages_for(50), executor(toy)
    got, start = [], 0
    for size in chunks:
        got.append(target.forward(chain_batch(tokens[start : start + size], table, start)).logits)
        start += size
    assert_close(np.concatenate(got), direct(toy, tokens))


def recording(shapes: list[tuple[int, ...]]) -> Callable[..., torch.Tensor]:
    """`_attend`, noting the (rows, slots) of each call."""
    attend = torch_backend._attend

    def recorded(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, visible: torch.Tensor) -> torch.Tensor:
        shapes.append((query.shape[0], keys.shape[1]))
        return attend(query, keys, values, visible)

    return recorded


def test_long_prompts_attend_in_blocks_of_query_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    toy, tokens = ToyLlama(), random_tokens(200)
    monkeypatch.setattr(torch_backend, "QUERY_ROWS", 256)
    in_one = direct(toy, tokens)
    for block in (128, 7):
        shapes: list[tuple[int, ...]] = []
        monkeypatch.setattr(torch_backend, "QUERY_ROWS", block)
        monkeypatch.setattr(torch_backend, "_attend", recording(shapes))
        assert_close(direct(toy, tokens), in_one)
        assert max(rows for rows, _ in shapes) == block
        assert [end for _, end in shapes[: -(-200 // block)]] == [
            min(end, 200) for end in range(block, 200 + block, block)
        ]


def test_where_the_pages_lie_changes_nothing() -> None:
    toy, tokens = ToyLlama(), random_tokens(60)
    scattered = np.array([19, 2, 23, 7], dtype=np.int32)
    target = executor(toy)
    first = target.forward(chain_batch(tokens[:45], scattered)).logits
    rest = target.forward(chain_batch(tokens[45:], scattered, 45)).logits
    assert_close(np.concatenate([first, rest]), direct(toy, tokens))


def test_sequences_of_one_pass_do_not_see_each_other() -> None:
    toy = ToyLlama()
    texts = [random_tokens(35, 1), random_tokens(1, 2), random_tokens(20, 3)]
    tables = [pages_for(51, 0), pages_for(16, 5), pages_for(40, 8)]
    target = executor(toy)
    got = target.forward(merge_batches(*(chain_batch(*pair) for pair in zip(texts, tables, strict=True))))
    assert_close(got.logits, np.concatenate([direct(toy, text) for text in texts]))
    # A second pass: a tree for one, a prompt chunk for another, one row for the third.
    chunk, row = chain_batch([8] * 6, tables[1], 1), chain_batch([3], tables[2], 20)
    tree = tree_batch([4, 9, 2], [-1, 0, 0], tables[0], 35)
    got = target.forward(merge_batches(chunk, tree, row))
    expected = [
        direct(toy, texts[1] + [8] * 6)[1:],
        direct(toy, [*texts[0], 4])[-1:],
        direct(toy, [*texts[0], 4, 9])[-1:],
        direct(toy, [*texts[0], 4, 2])[-1:],
        direct(toy, [*texts[2], 3])[-1:],
    ]
    assert_close(got.logits, np.concatenate(expected))


def test_what_lies_in_unseen_slots_is_never_read() -> None:
    toy, prompt = ToyLlama(), random_tokens(20)
    clean, stale = executor(toy), executor(toy)
    for storage in (*stale._kv.keys, *stale._kv.values):
        storage.fill_(torch.nan)
    table = pages_for(64)
    for target in (clean, stale):
        target.forward(chain_batch(prompt, table, wanted=[]))
    # Rows that leave a hole in the tail: slots 20 and 22 hold what was there before.
    nodes = tree_batch([1, 2, 3, 4], [-1, 0, 0, 1], table, 20)
    words = np.array([0b10, 0b1010, 0b10010, 0b101010], dtype=np.uint64)
    holes = replace(nodes, slots=np.array([21, 23, 24, 25], dtype=np.int32), tail_mask=words)
    np.testing.assert_array_equal(stale.forward(holes).logits, clean.forward(holes).logits)


def test_a_tail_may_start_anywhere_and_ends_after_its_64_slots() -> None:
    toy, prompt, table = ToyLlama(), random_tokens(20), pages_for(112)
    target = executor(toy)
    target.forward(chain_batch(prompt, table))
    for storage in (*target._kv.keys, *target._kv.values):
        storage[2:] = 3.0  # slots from 32 on hold something that would show
    apart = replace(
        tree_batch([5, 9], [-1, -1], table, 20),
        slots=int32(32 + 63, 97),
        tail_base=int32(32, 97),
        tail_mask=np.array([1 << 63, 1], dtype=np.uint64),
    )
    expected = [direct(toy, [*prompt, token])[-1] for token in (5, 9)]
    assert_close(target.forward(apart).logits, np.stack(expected))


def test_no_wanted_rows_give_empty_logits() -> None:
    toy = ToyLlama()
    out = executor(toy).forward(chain_batch(random_tokens(5), pages_for(5), wanted=[]))
    assert out.logits.shape == (0, toy.vocab_size)
    assert out.argmax.shape == (0,)


def test_argmax_ties_go_to_the_lowest_id() -> None:
    toy = ToyLlama(num_layers=0)
    head = toy.matrix("head")
    toy.weights["head"] = f32_weight("head", np.tile(head[:2], (31, 1))[: toy.vocab_size])
    out = executor(toy).forward(chain_batch(random_tokens(20), pages_for(20)))
    assert set(out.argmax.tolist()) == {0, 1}
    np.testing.assert_array_equal(out.argmax, [row.tolist().index(row.max()) for row in out.logits])


def test_logits_that_are_not_finite_are_a_fault_that_names_the_row() -> None:
    toy = ToyLlama(num_layers=0)
    table = toy.matrix("embed")
    table[5, 3] = np.inf
    toy.weights["embed"] = f32_weight("embed", table)
    target = executor(toy)
    target.forward(chain_batch([1, 2, 5, 3], pages_for(4), wanted=[0, 1, 3]))
    with pytest.raises(EngineFault, match=r"logits of row 2 \(sequence 0, position 2\) are not finite"):
        target.forward(chain_batch([1, 2, 5, 3], pages_for(4)))


def test_f055_a_tied_matrix_is_dequantised_once(monkeypatch: pytest.MonkeyPatch) -> None:
    names: list[str] = []
    original = torch_storage.dequantize
    monkeypatch.setattr(torch_storage, "dequantize", lambda weight: names.append(weight.name) or original(weight))
    toy = ToyLlama(is_tied=True)
    target = executor(toy)
    target.forward(chain_batch([1], pages_for(1)))
    target.forward(chain_batch([2], pages_for(2), 1))
    assert len(names) == len(set(names)) == len(set(toy.weights) - {"head"})


@pytest.mark.parametrize("is_tied", [False, True])
def test_sizes_in_bytes(is_tied: bool) -> None:
    toy = ToyLlama(is_tied=is_tied)
    matrices = sum(w.data.nbytes for name, w in toy.weights.items() if name != "embed")
    norms = sum(norm.nbytes for norm in toy.norms.values())
    assert executor(toy).weight_bytes == matrices + norms
    slots = NUM_PAGES * 16 * toy.num_layers
    assert executor(toy, "f16").kv_bytes == 2 * slots * toy.num_kv_heads * toy.head_dim * 2
    assert executor(toy, "f32").kv_bytes == 2 * slots * toy.num_kv_heads * toy.head_dim * 4


def test_two_weights_of_one_name_are_a_fault() -> None:
    toy = ToyLlama()
    toy.weights["0.k"] = replace(toy.weights["0.k"], name="0.v")
    with pytest.raises(EngineFault, match=r"two different weights are named 0\.v"):
        executor(toy)


def test_a_weight_that_was_not_bound_is_a_fault() -> None:
    toy = ToyLlama()
    target = executor(toy)
    toy.weights["0.k"] = f32_weight("new", toy.matrix("0.k"))
    with pytest.raises(EngineFault, match="weight new was not there"):
        target.forward(chain_batch([1], pages_for(1)))
    toy = ToyLlama()
    target = executor(toy)
    toy.norms["final"] = toy.norms["final"].copy()
    with pytest.raises(EngineFault, match="norm or bias array was not there"):
        target.forward(chain_batch([1], pages_for(1)))


def test_logits_of_another_size_are_a_fault() -> None:
    toy = ToyLlama()
    target = TorchExecutor(replace(toy.config(), vocab_size=toy.vocab_size + 1), toy.build)
    with pytest.raises(EngineFault, match=r"logits of shape \(1, 61\), but must return \(1, 62\)"):
        target.forward(chain_batch([1], pages_for(1)))


def test_read_only_arrays_of_a_mapped_file_are_taken() -> None:
    toy, tokens = ToyLlama(), random_tokens(5)
    expected = direct(toy, tokens)
    for norm in toy.norms.values():
        norm.flags.writeable = False
    for weight in toy.weights.values():
        weight.data.flags.writeable = False
    np.testing.assert_array_equal(direct(toy, tokens), expected)


def int32(*values: int) -> np.ndarray:
    return np.asarray(values, dtype=np.int32)


GOOD = chain_batch([1, 2, 3], pages_for(3))
BROKEN: dict[str, tuple[Batch, str]] = {
    "no rows": (chain_batch([], pages_for(3)), "0 rows, but must have 1 to 256"),
    "too many rows": (chain_batch([1] * 257, pages_for(257)), "257 rows, but must have 1 to 256"),
    "lengths": (replace(GOOD, positions=int32(0, 1)), r"batch\.positions has shape \(2,\), but must have \(3,\)"),
    "page table": (replace(GOOD, page_tables=int32(0)), r"batch\.page_tables has 1 dimensions"),
    "token id": (replace(GOOD, token_ids=int32(1, 61, 3)), "token id 61 is outside 0 to 60"),
    "negative id": (replace(GOOD, token_ids=int32(1, -1, 3)), "token id -1 is outside 0 to 60"),
    "sequence": (replace(GOOD, seq_ids=int32(0, 0, 1)), "sequence 1 is outside 0 to 0"),
    "order": (
        replace(GOOD, seq_ids=int32(0, 1, 0), page_tables=np.array([[0], [1]], dtype=np.int32)),
        "rows of one sequence are not contiguous",
    ),
    "slot": (replace(GOOD, slots=int32(0, 1, 16)), "slot 16 is outside 0 to 15"),
    "sees too much": (replace(GOOD, visible_len=int32(1, 2, 17)), "last visible slot 16 is outside 0 to 15"),
    "sees nothing": (replace(GOOD, visible_len=int32(0, 2, 3)), "last visible slot -1 is outside"),
    "tail end": (
        replace(GOOD, tail_base=int32(1, 2, 3), tail_mask=np.array([1, 1, 1 << 63], dtype=np.uint64)),
        "last visible slot 66 is outside",
    ),
    "tail overlap": (
        replace(GOOD, tail_base=int32(1, 2, 2), tail_mask=np.array([1, 1, 1], dtype=np.uint64)),
        "tail starts before the end",
    ),
    "page": (replace(GOOD, page_tables=int32(24)[None]), "page of sequence 0 24 is outside 0 to 23"),
    "written page": (
        replace(GOOD, slots=int32(0, 1, 20), page_tables=int32(0, 99)[None]),
        "page of sequence 0 99 is outside 0 to 23",
    ),
    "double write": (replace(GOOD, slots=int32(0, 1, 1)), "two rows of a pass write the same slot"),
    "shared write": (
        merge_batches(chain_batch([1], int32(3)), chain_batch([1], int32(3))),
        "two rows of a pass write the same slot",
    ),
    "logit row": (replace(GOOD, logit_rows=int32(3)), "logit row 3 is outside 0 to 2"),
    "logit order": (replace(GOOD, logit_rows=int32(1, 1)), "logit rows are not ascending"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_batch_is_a_fault(name: str) -> None:
    batch, message = BROKEN[name]
    toy = ToyLlama()
    with pytest.raises(EngineFault, match=message):
        executor(toy).forward(batch)


def test_moves_outside_the_pages_are_a_fault() -> None:
    target = executor(ToyLlama())
    with pytest.raises(EngineFault, match="slot 16 is outside 0 to 15"):
        target.move_slots(pages_for(16), int32(16), int32(0))
    with pytest.raises(EngineFault, match="slot -1 is outside 0 to 15"):
        target.move_slots(pages_for(16), int32(0), int32(-1))
    with pytest.raises(EngineFault, match="page -1 is outside 0 to 23"):
        target.move_slots(int32(0, -1), int32(0), int32(20))
    with pytest.raises(EngineFault, match="2 slots can't be moved to 1 slots"):
        target.move_slots(pages_for(16), int32(0, 1), int32(0))


def test_threads_are_set() -> None:
    before = torch.get_num_threads()
    try:
        toy = ToyLlama()
        create_executor("torch", replace(toy.config(), num_threads=1), toy.build)
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)


def create(backend: str, device: str = "cpu") -> Any:
    toy = ToyLlama()
    return create_executor(backend, replace(toy.config(), device=device), toy.build)


def test_the_factory_binds_a_model() -> None:
    toy, tokens = ToyLlama(), random_tokens(5)
    target = create_executor("torch", toy.config("f32"), toy.build)
    assert target.vocab_size == toy.vocab_size
    np.testing.assert_array_equal(target.forward(chain_batch(tokens, pages_for(5))).logits, direct(toy, tokens))


@pytest.mark.parametrize(
    ("backend", "device", "message"),
    [
        ("jax", "cpu", "backend 'jax' is unknown; the backends are native, torch"),
        ("native", "cuda", "the native backend runs on cpu, not on cuda"),
        ("torch", "gpu", "device 'gpu' is unknown; the torch backend runs on cpu, cuda or cuda:N"),
        ("torch", "meta", "device 'meta' is not supported"),
        ("torch", "cuda:99", "device 'cuda:99' is not there: PyTorch finds"),
    ],
)
def test_f019_backends_and_devices_that_are_not_there_are_refused(backend: str, device: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        create(backend, device)


def test_a_missing_torch_is_refused_with_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "forerun.ops.torch")
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(ConfigError, match=r"pip install 'forerun\[torch\]'"):
        create("torch")
