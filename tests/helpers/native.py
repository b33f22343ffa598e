"""Small models on the native backend: one call per executor, per text and per comparison of bits."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import cycle
from pathlib import Path

import numpy as np
import pytest

from forerun.models.loader import LoadedModel, load_model
from forerun.ops import ExecutorConfig, create_executor
from forerun.ops.base import Executor, KvType
from forerun.ops.native import ISA_VARIABLE, NativeExecutor
from tests.helpers.toy_llama import chain_batch

NUM_PAGES = 48
MAX_ROWS = 64


@cache
def loaded(path: Path, quant: str = "auto") -> LoadedModel:
    return load_model(path, quant)


def executor_config(
    model: LoadedModel,
    kv_type: KvType = "f16",
    threads: int = 1,
    num_pages: int = NUM_PAGES,
    max_rows: int = MAX_ROWS,
) -> ExecutorConfig:
    sizes = model.config
    return ExecutorConfig(
        vocab_size=sizes.vocab_size,
        hidden_size=sizes.hidden_size,
        num_layers=sizes.num_layers,
        attentions=model.attentions,
        max_rows=max_rows,
        num_pages=num_pages,
        kv_type=kv_type,
        num_threads=threads,
    )


def native(
    path: Path,
    isa: str,
    threads: int = 1,
    kv_type: KvType = "f16",
    quant: str = "auto",
    max_rows: int = MAX_ROWS,
) -> NativeExecutor:
    model = loaded(path, quant)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(ISA_VARIABLE, isa)
        target = create_executor("native", executor_config(model, kv_type, threads, max_rows=max_rows), model.forward)
    assert isinstance(target, NativeExecutor)
    assert target.program.isa == isa
    assert target.program.num_threads == threads
    return target


def text_logits(
    target: Executor, token_ids: Sequence[int], table: np.ndarray, sizes: Sequence[int], start: int = 0
) -> np.ndarray:
    """Logits [M, V] of every position, in passes of the given sizes over and over."""
    out = []
    done = 0
    for size in cycle(sizes):
        if done == len(token_ids):
            return np.concatenate(out)
        piece = token_ids[done : done + size]
        out.append(target.forward(chain_batch(piece, table, start + done)).logits.copy())
        done += len(piece)
    raise AssertionError("no sizes")


def assert_same_bits(got: np.ndarray, expected: np.ndarray, what: object = "") -> None:
    """Equal in every bit, zero signs and all."""
    assert got.shape == expected.shape, what
    if got.tobytes() != expected.tobytes():
        rows = np.flatnonzero((got.view(np.uint32) != expected.view(np.uint32)).any(axis=-1))
        largest = np.abs(got - expected).max()
        raise AssertionError(f"rows {rows[:10].tolist()} of {len(got)} differ, by {largest:.1e} at most: {what}")
