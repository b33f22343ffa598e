"""The native backend as a component: what it refuses and how, what it reports, what it chooses by itself."""

from __future__ import annotations

import gc
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import forerun._native as _native
from forerun.batch import Batch
from forerun.errors import ConfigError, EngineFault, LoadError
from forerun.ops import create_executor
from forerun.ops.base import AttentionSpec, KvType, Weight
from forerun.ops.native import (
    ISA_VARIABLE,
    MAX_THREADS,
    NativeExecutor,
    chosen_isa,
    default_num_threads,
    head_order,
    rows_of_heads,
)
from forerun.ops.recorder import OP_NAMES
from tests.helpers.gguf_files import tiny_llama_metadata, tiny_llama_tensors, write_gguf, write_tiny_llama
from tests.helpers.native import assert_same_bits, executor_config, loaded, native, text_logits
from tests.helpers.toy_llama import ToyLlama, chain_batch, f32_weight, merge_batches, pages_for

ISAS = _native.available_isas()
BEST = ISAS[-1]
VOCAB = 331
NUM_PAGES = 24


def int32(*values: int) -> np.ndarray:
    return np.asarray(values, dtype=np.int32)


def toy_executor(toy: ToyLlama, kv_type: KvType = "f32", **changes: Any) -> NativeExecutor:
    config = replace(toy.config(kv_type, NUM_PAGES), num_threads=1)
    target = create_executor("native", replace(config, **changes), toy.build)
    assert isinstance(target, NativeExecutor)
    return target


# ---- what it chooses -------------------------------------------------------------------------------------------------


def test_the_best_instruction_set_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ISAS[0] == "scalar"
    for value in (None, ""):
        monkeypatch.delenv(ISA_VARIABLE, raising=False)
        if value is not None:
            monkeypatch.setenv(ISA_VARIABLE, value)
        assert chosen_isa() == BEST
        assert toy_executor(ToyLlama()).program.isa == BEST


@pytest.mark.parametrize("name", ISAS)
def test_the_variable_forces_an_instruction_set(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(ISA_VARIABLE, name)
    assert toy_executor(ToyLlama()).program.isa == name


@pytest.mark.parametrize("name", ["neon", "AVX2", "avx2 ", "amx,avx2"])
def test_an_instruction_set_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(ISA_VARIABLE, name)
    with pytest.raises(ConfigError, match=rf"{ISA_VARIABLE} is '{name}', but this machine has scalar"):
        toy_executor(ToyLlama())
    with pytest.raises(ValueError, match="is not available here; available: scalar"):
        _native.exp_f32(name, np.zeros(1, np.float32), np.zeros(1, np.float32))


@pytest.mark.parametrize("threads", [-1, 0, MAX_THREADS + 1, 1000])
def test_numbers_of_threads_out_of_range_are_refused(threads: int) -> None:
    with pytest.raises(ConfigError, match=rf"threads is {threads}, but must be between 1 and {MAX_THREADS}"):
        toy_executor(ToyLlama(), num_threads=threads)


QUOTAS = {
    "no quota": ("max 100000\n", 4),
    "three cores": ("300000 100000\n", 3),
    "more than there is": ("1600000 100000\n", 4),
    "two and a half": ("250000 100000\n", 2),
    "less than one": ("50000 100000\n", 1),
    "no control groups": (None, 4),
    "something else": ("what\n", 4),
}


@pytest.mark.parametrize("case", QUOTAS)
def test_threads_follow_the_cores_and_the_quota(monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    """Eight CPUs are allowed, two to a core."""
    quota, expected = QUOTAS[case]

    def read_text(path: Path) -> str:
        if path.name == "cpu.max" and quota is not None:
            return quota
        if path.name == "thread_siblings_list":
            cpu = int(path.parent.parent.name.removeprefix("cpu"))
            return f"{cpu // 2 * 2}-{cpu // 2 * 2 + 1}\n"
        raise FileNotFoundError(path)

    monkeypatch.setattr(Path, "read_text", read_text)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    assert default_num_threads() == expected


def test_threads_without_a_topology_are_the_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    def read_text(path: Path) -> str:
        raise PermissionError(path)

    monkeypatch.setattr(Path, "read_text", read_text)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {1, 5, 6})
    assert default_num_threads() == min(3, os.cpu_count() or 1)


def test_the_default_is_used_when_nothing_is_said() -> None:
    assert toy_executor(ToyLlama(), num_threads=None).program.num_threads == default_num_threads()


# ---- what it packs ---------------------------------------------------------------------------------------------------


def bind_head(head: Weight) -> NativeExecutor:
    toy = ToyLlama(num_layers=0, vocab_size=head.shape[0], hidden_size=head.shape[1])
    toy.weights["head"] = head
    return toy_executor(toy, num_layers=1)


def test_weights_that_cannot_be_packed_name_the_tensor() -> None:
    data = np.zeros(64 * 64, np.uint8)
    with pytest.raises(LoadError, match="tensor y can't be packed: a matrix of 4352 bytes has 4096"):
        bind_head(Weight("y", "q8_0", (64, 64), data))
    with pytest.raises(LoadError, match="tensor z can't be packed: a row of q8_0 needs a multiple of 32 inputs"):
        bind_head(Weight("z", "q8_0", (64, 48), np.zeros(64 * 51, np.uint8)))


def test_a_q4_0_scale_without_a_lossless_minimum_is_refused() -> None:
    for scale, is_fine in ((8188.0, True), (-8188.0, True), (8196.0, False), (-8196.0, False)):
        block = np.concatenate([np.array([scale], np.float16).view(np.uint8), np.full(16, 0x88, np.uint8)])
        head = Weight("huge", "q4_0", (64, 32), np.tile(block, 64))
        if is_fine:
            bind_head(head)
        else:
            with pytest.raises(LoadError, match="tensor huge can't be packed: a Q4_0 scale is above 8188"):
                bind_head(head)


def test_interleaved_pairs_become_halves() -> None:
    spec = AttentionSpec(3, 1, 24, 1.0, "interleaved", (1.0,) * 12)
    order = head_order(spec)
    assert order is not None
    assert head_order(replace(spec, rope_style="neox")) is None
    rows = rows_of_heads(3 * 24, order)
    assert sorted(rows.tolist()) == list(range(72))
    for head in range(3):
        mine = rows[24 * head : 24 * head + 24]
        assert mine[:12].tolist() == [24 * head + 2 * i for i in range(12)]
        assert (mine[12:] == mine[:12] + 1).all()


def test_what_is_not_rotated_stays_in_place() -> None:
    order = head_order(AttentionSpec(1, 1, 8, 1.0, "interleaved", (1.0, 1.0)))
    assert order is not None
    assert order.tolist() == [0, 2, 1, 3, 4, 5, 6, 7]


def test_read_only_weights_of_a_mapped_file_are_taken() -> None:
    toy, text = ToyLlama(), [1, 2, 3]
    expected = toy_executor(toy).forward(chain_batch(text, pages_for(3))).logits.copy()
    for norm in toy.norms.values():
        norm.flags.writeable = False
    for weight in toy.weights.values():
        weight.data.flags.writeable = False
    assert_same_bits(toy_executor(toy).forward(chain_batch(text, pages_for(3))).logits, expected)


def test_a_pack_is_a_copy() -> None:
    """The file's mapping may go once a model is bound."""
    toy, text = ToyLlama(), [1, 2, 3]
    target = toy_executor(toy)
    expected = target.forward(chain_batch(text, pages_for(3))).logits.copy()
    for weight in toy.weights.values():
        weight.data[:] = 0
    assert_same_bits(target.forward(chain_batch(text, pages_for(3))).logits, expected)


def test_a_neox_model_computes_as_its_interleaved_twin() -> None:
    """Rows of q and k in the other order, RoPE in the other style: the same model."""
    interleaved = ToyLlama(rope_style="interleaved")
    neox = ToyLlama(rope_style="neox")
    for layer in range(2):
        for part, heads in (("q", 4), ("k", 2)):
            name = f"{layer}.{part}"
            order = head_order(interleaved.attention)
            assert order is not None
            rows = rows_of_heads(heads * neox.head_dim, order)
            neox.weights[name] = f32_weight(name, interleaved.matrix(name)[rows])
    batch = chain_batch([5, 9, 2, 8], pages_for(4))
    assert_same_bits(toy_executor(neox).forward(batch).logits, toy_executor(interleaved).forward(batch).logits)


def test_shapes_without_a_kernel_are_refused_by_name() -> None:
    with pytest.raises((LoadError, ConfigError), match="heads must be a multiple of KV heads"):
        toy_executor(ToyLlama(num_heads=74, num_kv_heads=2, head_dim=2))
    with pytest.raises((LoadError, ConfigError), match="head size even"):
        toy_executor(ToyLlama(head_dim=7, rope_style="neox"))


SIZES: dict[str, Any] = {
    "isa": "scalar",
    "num_threads": 1,
    "vocab_size": 61,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 12,
    "num_pages": NUM_PAGES,
    "max_rows": 8,
    "is_kv_f32": True,
    "max_positions": 16,
}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        (name, value)
        for name in SIZES
        if name not in ("isa", "num_threads", "is_kv_f32")
        for value in (0, -1, -(2**31), 2**31 - 1)
        if (name, value) != ("max_positions", 2**31 - 1)  # which says that the cache alone is the limit
    ],
)
def test_sizes_that_arithmetic_can_not_hold_are_refused(name: str, value: int) -> None:
    with pytest.raises(ValueError, match=f"is {value}, but must be from 1 to"):
        _native.Program(**SIZES | {name: value})


def test_heads_that_are_too_wide_together_are_refused() -> None:
    with pytest.raises(ValueError, match="the heads together are wider than"):
        _native.Program(**SIZES | {"num_heads": 1 << 16, "num_kv_heads": 1 << 16, "head_dim": 1 << 16})


@pytest.mark.parametrize(
    ("outputs", "inputs"), [(0, 32), (-1, 32), (-(2**31), 32), (32, 0), (32, -32), (32, 2**31 - 32)]
)
def test_matrices_without_a_shape_are_refused(outputs: int, inputs: int) -> None:
    with pytest.raises(ValueError, match=r"puts of a matrix is .*, but must be from 1 to"):
        _native.Program(**SIZES).add_matrix("q8_0", outputs, inputs, np.zeros(0, np.uint8), None)


@pytest.mark.parametrize("width", [0, -1, 2**31 - 1])
def test_buffers_without_a_width_are_refused(width: int) -> None:
    with pytest.raises(ValueError, match="a buffer has no width, or an absurd one"):
        _native.Program(**SIZES).add_buffer(width)


@pytest.mark.parametrize("frequency", [-1.0, 1e9, 1e300, float("inf"), float("nan")])
def test_rope_frequencies_whose_turns_can_not_be_counted_are_refused(frequency: float) -> None:
    with pytest.raises(ValueError, match="a RoPE frequency is not from 0 to 1e8"):
        _native.Program(**SIZES).add_rope([1.0, frequency], 1.0)


def test_a_cache_that_no_memory_holds_is_a_config_error() -> None:
    toy = ToyLlama(num_heads=64, num_kv_heads=64, head_dim=1024)
    config = replace(toy.config("f32", (2**31 - 1) // 16), num_threads=1)
    layers = replace(config, num_layers=64, attentions=(toy.attention,) * 64)  # 10^17 bytes
    with pytest.raises(ConfigError, match="a cache of 2147483632 tokens don't fit into memory; ask for a shorter"):
        create_executor("native", layers, toy.build)


# ---- one pass --------------------------------------------------------------------------------------------------------

GOOD = chain_batch([1, 2, 3], pages_for(3))
TOO_LARGE = int(np.iinfo(np.int32).max)


def masks(*values: int) -> np.ndarray:
    return np.asarray(values, dtype=np.uint64)


BROKEN: dict[str, tuple[Batch, str]] = {
    "no rows": (chain_batch([], pages_for(3)), "a step needs between 1 and max_rows rows"),
    "too many rows": (chain_batch([1] * 257, pages_for(257)), "a step needs between 1 and max_rows rows"),
    "lengths": (replace(GOOD, positions=int32(0, 1)), "the arrays of a step differ in length"),
    "mask length": (replace(GOOD, tail_mask=masks(0)), "the arrays of a step differ in length"),
    "token id": (replace(GOOD, token_ids=int32(1, 61, 3)), "a token id is outside the vocabulary"),
    "negative id": (replace(GOOD, token_ids=int32(1, -1, 3)), "a token id is outside the vocabulary"),
    "position": (replace(GOOD, positions=int32(0, 1, NUM_PAGES * 16)), "a position is outside the cache"),
    "negative position": (replace(GOOD, positions=int32(0, -1, 2)), "a position is outside the cache"),
    "sequence": (replace(GOOD, seq_ids=int32(0, 0, 1)), "a row names no sequence"),
    "slot": (replace(GOOD, slots=int32(0, 1, 16)), "a slot is outside the page table"),
    "largest slot": (replace(GOOD, slots=int32(0, 1, TOO_LARGE)), "a slot is outside the page table"),
    "sees too much": (replace(GOOD, visible_len=int32(1, 2, 17)), "a visible length is outside the page table"),
    "sees less than nothing": (replace(GOOD, visible_len=int32(1, 2, -1)), "a visible length is outside"),
    "sees nothing": (replace(GOOD, visible_len=int32(0, 2, 3)), "a row sees nothing"),
    "tail end": (
        replace(GOOD, tail_base=int32(1, 2, 3), tail_mask=masks(1, 1, 1 << 63)),
        "an ancestor's slot is outside",
    ),
    "negative tail": (
        replace(GOOD, tail_base=int32(1, 2, -1), tail_mask=masks(1, 1, 2)),
        "an ancestor's slot is outside",
    ),
    "largest tail": (
        replace(GOOD, tail_base=int32(1, 2, TOO_LARGE), tail_mask=masks(1, 1, 1)),
        "an ancestor's slot is outside",
    ),
    "page": (replace(GOOD, page_tables=int32(NUM_PAGES)[None]), "a page id is outside the pool"),
    "negative page": (replace(GOOD, page_tables=int32(-1)[None]), "a page id is outside the pool"),
    "no pages": (replace(GOOD, page_tables=np.zeros((1, 0), np.int32)), "a slot is outside the page table"),
    "logit row": (replace(GOOD, logit_rows=int32(3)), "a logit row is outside the step"),
    "logit order": (replace(GOOD, logit_rows=int32(1, 1)), "logit rows are not ascending"),
    "negative logit row": (replace(GOOD, logit_rows=int32(-1)), "a logit row is outside the step"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_batch_is_a_fault_and_the_next_pass_is_fine(name: str) -> None:
    batch, message = BROKEN[name]
    target = toy_executor(ToyLlama())
    expected = target.forward(GOOD).logits.copy()
    with pytest.raises(EngineFault, match=f"a target pass failed: {message}"):
        target.forward(batch)
    assert_same_bits(target.forward(GOOD).logits, expected)


ODD_ARRAYS: dict[str, dict[str, Any]] = {
    "floats": {"token_ids": np.array([1.0, 2.0, 3.7])},
    "beyond int32": {"token_ids": np.array([1, 2, 2**32 + 3])},
    "a list": {"token_ids": [1, 2, 3]},
    "a page table of one dimension": {"page_tables": int32(0)},
}


@pytest.mark.parametrize("name", ODD_ARRAYS)
def test_arrays_of_another_type_or_rank_are_a_fault(name: str) -> None:
    """Not rounded, cut or guessed."""
    with pytest.raises(EngineFault):
        toy_executor(ToyLlama()).forward(replace(GOOD, **ODD_ARRAYS[name]))


def test_moves_outside_the_pages_are_a_fault() -> None:
    target = toy_executor(ToyLlama())
    for src, dst in ((int32(16), int32(0)), (int32(0), int32(16)), (int32(-1), int32(0)), (int32(0), int32(-1))):
        with pytest.raises(EngineFault, match="slots can't be moved: a slot to move lies outside the page table"):
            target.move_slots(pages_for(16), src, dst)
    for table in (int32(0, -1), int32(0, NUM_PAGES)):
        with pytest.raises(EngineFault, match="slots can't be moved: a page of a slot to move does not exist"):
            target.move_slots(table, int32(0), int32(20))
    with pytest.raises(EngineFault, match="slots can't be moved: src and dst differ in length"):
        target.move_slots(pages_for(16), int32(0, 1), int32(0))


def test_moves_are_made_in_order() -> None:
    toy = ToyLlama()
    text, table = np.random.default_rng(0).integers(0, toy.vocab_size, 40).tolist(), pages_for(48)
    src, dst = int32(17, 5, 6, 30, 7, 17), int32(5, 6, 7, 17, 31, 17)
    one_call, one_by_one = toy_executor(toy), toy_executor(toy)
    for target in (one_call, one_by_one):
        target.forward(chain_batch(text, table))
    one_call.move_slots(table, src, dst)
    for a, b in zip(src, dst, strict=True):
        one_by_one.move_slots(table, int32(a), int32(b))
    probe = chain_batch([3], table, start=40)
    moved = one_call.forward(probe).logits.copy()
    assert_same_bits(one_by_one.forward(probe).logits, moved)
    untouched = toy_executor(toy)
    untouched.forward(chain_batch(text, table))
    assert not np.allclose(untouched.forward(probe).logits, moved, atol=1e-3)


def test_no_wanted_rows_give_empty_logits() -> None:
    toy = ToyLlama()
    out = toy_executor(toy).forward(chain_batch([1, 2, 3], pages_for(3), wanted=[]))
    assert out.logits.shape == (0, toy.vocab_size)
    assert out.argmax.shape == (0,)
    assert (out.logits.dtype, out.argmax.dtype) == (np.float32, np.int32)


def test_wanted_rows_are_the_rows_of_all() -> None:
    toy = ToyLlama()
    target = toy_executor(toy)
    every = target.forward(chain_batch(range(30), pages_for(30))).logits.copy()
    for wanted in ([29], [0], [0, 3, 28], [1, 2], list(range(1, 30))):
        out = target.forward(chain_batch(range(30), pages_for(30), wanted=wanted))
        assert_same_bits(out.logits.copy(), every[wanted])
        assert out.argmax.tolist() == every[wanted].argmax(axis=1).tolist()


def test_logits_outlive_the_executor() -> None:
    target = toy_executor(ToyLlama())
    out = target.forward(GOOD)
    kept = out.logits.copy()
    del target
    gc.collect()
    assert_same_bits(out.logits.copy(), kept)


def poisoned(folder: Path, fmt: str, tensor: str) -> Path:
    """A model with one NaN: in row 9 of a matrix, which for the embedding is token 9 alone, or in a norm."""
    tensors = tiny_llama_tensors(vocab_size=VOCAB, tied=False)
    tensors[tensor][(9, 3) if tensors[tensor].ndim > 1 else 3] = np.nan
    metadata = tiny_llama_metadata(vocab_size=VOCAB, context_length=512)
    with np.errstate(invalid="ignore"):  # the quantiser turns a NaN into some code, and its scale into NaN
        return write_gguf(folder / "model.gguf", metadata, tensors, fmt=fmt, vocab_size=VOCAB)


POISON = {
    "token_embd.weight": "non-finite activations in layer 0, row 2",
    "blk.0.attn_v.weight": "non-finite activations in layer 0, row 0",
    "blk.1.attn_norm.weight": "non-finite activations in layer 1, row 0",
    "blk.1.ffn_gate.weight": "non-finite activations in layer 1, row 0",
    "blk.1.ffn_down.weight": "non-finite activations in layer 1, row 0, at the LM head",
    "output_norm.weight": "non-finite activations in layer 1, row 0, at the LM head",
}


@pytest.mark.parametrize("tensor", POISON)
@pytest.mark.parametrize("fmt", ["q4_1", "q8_0"])
def test_f069_a_nan_in_the_weights_names_layer_and_row(tmp_path: Path, fmt: str, tensor: str) -> None:
    path = poisoned(tmp_path, fmt, tensor)
    for isa, threads in ((ISAS[0], 1), (BEST, 2)):
        with pytest.raises(EngineFault, match=f"a target pass failed: {POISON[tensor]}$"):
            native(path, isa, threads).forward(chain_batch([1, 2, 9, 3], pages_for(4)))


@pytest.mark.parametrize("tensor", ["token_embd.weight", "blk.1.ffn_down.weight", "output_norm.weight"])
@pytest.mark.parametrize("fmt", ["f32", "f16", "bf16"])
def test_f069_a_nan_in_float_weights_is_a_fault(tmp_path: Path, fmt: str, tensor: str) -> None:
    target = native(poisoned(tmp_path, fmt, tensor), BEST, 2)
    with pytest.raises(EngineFault, match="finite"):
        target.forward(chain_batch([1, 2, 9, 3], pages_for(4)))


@pytest.mark.parametrize("fmt", ["f32", "q8_0"])
def test_f069_a_nan_in_the_head_is_a_fault(tmp_path: Path, fmt: str) -> None:
    target = native(poisoned(tmp_path, fmt, "output.weight"), BEST, 2)
    with pytest.raises(EngineFault, match="finite"):
        target.forward(chain_batch([1, 2, 9, 3], pages_for(4)))


@pytest.mark.parametrize("fmt", ["q4_1", "q8_0"])
def test_f069_the_request_after_a_fault_is_answered_as_ever(tmp_path: Path, fmt: str) -> None:
    """In the slots that now hold NaN."""
    path = poisoned(tmp_path, fmt, "token_embd.weight")
    target, fresh = native(path, BEST, 2), native(path, BEST, 1)
    text = [1, 2, 3, 4, 5, 6, 7, 8] * 5
    for rows in (1, 8, 40):
        with pytest.raises(EngineFault, match="non-finite activations in layer 0, row"):
            target.forward(chain_batch([9] * rows, pages_for(40)))
        got, want = (text_logits(t, text, pages_for(40), [9, 31]) for t in (target, fresh))
        assert_same_bits(got, want)


def test_f069_a_row_that_nobody_sees_stops_the_pass_too(tmp_path: Path) -> None:
    """Of two sequences of a pass one is broken: the pass names its row, and the other goes on alone."""
    path = poisoned(tmp_path, "q8_0", "token_embd.weight")
    target = native(path, BEST, 2)
    sound, broken = chain_batch([1, 2, 3], pages_for(16)), chain_batch([4, 9], pages_for(16, 1))
    with pytest.raises(EngineFault, match="non-finite activations in layer 0, row 4"):
        target.forward(merge_batches(sound, broken))
    assert np.isfinite(target.forward(sound).logits).all()


# ---- what it reports -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(
    ("fmt", "bytes_per_32"), [("f32", 128), ("f16", 64), ("bf16", 64), ("q4_0", 20), ("q4_1", 20), ("q8_0", 34)]
)
def test_f055_weight_bytes_are_what_a_pass_reads(tmp_path: Path, fmt: str, bytes_per_32: int, tied: bool) -> None:
    """Each matrix once, a tied head too; of the embedding a pass reads a row."""
    path = write_tiny_llama(tmp_path / "model.gguf", fmt=fmt, vocab_size=320, tied=tied)
    weights = loaded(path).weights
    layers = [weight.shape for weight in weights.matrices()][1:]
    shapes = layers if not tied else [*layers, (320, 64)]
    values = sum(outputs * inputs for outputs, inputs in shapes)
    assert native(path, BEST).weight_bytes == values // 32 * bytes_per_32


@pytest.mark.parametrize("head_dim", [12, 16])
def test_kv_bytes(head_dim: int) -> None:
    """Values are padded to whole vectors of 16; keys need no padding."""
    toy = ToyLlama(head_dim=head_dim)
    values = NUM_PAGES * 16 * toy.num_layers * toy.num_kv_heads * (head_dim + 16)
    assert toy_executor(toy, "f16").kv_bytes == 2 * values
    assert toy_executor(toy, "f32").kv_bytes == 4 * values


def scratch_after(path: Path, num_positions: int, num_pages: int, threads: int = 2) -> int:
    model = loaded(path)
    config = executor_config(model, threads=threads, num_pages=num_pages)
    target = create_executor("native", config, model.forward)
    assert isinstance(target, NativeExecutor)
    text_logits(target, [1] * num_positions, pages_for(num_pages * 16), [40, 1, 8])
    return target.scratch_bytes


def test_scratch_does_not_grow_with_the_context(tmp_path: Path) -> None:
    path = write_tiny_llama(tmp_path / "model.gguf", fmt="q4_1", vocab_size=VOCAB, context_length=2000)
    short = scratch_after(path, 49, 4)
    assert scratch_after(path, 49, 100) == short, "nor with the pages"
    assert scratch_after(path, 240, 100) == short
    # Past 256 positions there are partial sums: per split and for fewer than 4 pieces of work a thread, at most 36 of
    # 16 values, a maximum and a sum.
    assert scratch_after(path, 1500, 100) - short <= 4 * 2 * (1500 // 256 + 1) * 36 * (16 + 2) * 4


def test_scratch_grows_with_the_rows(tmp_path: Path) -> None:
    model = loaded(write_tiny_llama(tmp_path / "model.gguf", fmt="q4_1", vocab_size=VOCAB))
    sizes = []
    for max_rows in (16, 64, 256):
        target = create_executor("native", executor_config(model, max_rows=max_rows), model.forward)
        assert isinstance(target, NativeExecutor)
        before = target.scratch_bytes
        target.forward(chain_batch([1] * 16, pages_for(16)))
        assert target.scratch_bytes >= before + 16 * VOCAB * 4, "the logits count"
        sizes.append(target.scratch_bytes)
    assert sizes == sorted(set(sizes))
    assert sizes[2] < 16 * sizes[0]


def test_profiling_tells_where_a_pass_spends_its_time() -> None:
    target = toy_executor(ToyLlama())
    target.forward(GOOD)
    assert target.program.profile_s == [0.0] * len(OP_NAMES)
    target.program.set_profiling(True)
    target.forward(GOOD)
    spent = dict(zip(OP_NAMES, target.program.profile_s, strict=True))
    assert spent.pop("norm_add") == 0  # a toy has none
    assert all(0 < seconds < 1 for seconds in spent.values())
    target.program.set_profiling(False)
    assert target.program.profile_s == [0.0] * len(OP_NAMES)
