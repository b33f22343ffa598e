"""Measures what a target pass takes, and keeps the result on disk."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np

from forerun.batch import Batch
from forerun.control.cost import CostCurve
from forerun.errors import RequestError
from forerun.kv.pages import PageManager
from forerun.ops.base import Executor
from forerun.types import PAGE_TOKENS, Int32Array

SIZES = (1, 2, 3, 4, 5, 6, 8, 9, 12, 16, 17, 24, 32, 64)  # kernels take rows by eights and sixteens
# Large passes of a slow model would take longest and are never worth it.
SLOW_SIZES = (1, 2, 3, 4, 5, 6, 8, 9, 12, 16)
SLOW_PASS_S = 0.02
CHECKED_SIZES = (1, 8)
CONTEXT_LEN = 256
LONG_CONTEXT_LEN = 1024
MAX_LEN = LONG_CONTEXT_LEN + SIZES[-1]
MEASURE_S = 1.0  # about what measuring may take
MIN_ROUNDS, MAX_ROUNDS = 3, 7
MAX_CHANGE = 0.2  # a curve is measured again when its checked sizes have changed by factors that differ by more
_SEQUENCE_ID = -1  # no request has it


class PassTimer:
    """Times passes of a target over a sequence of its own, whose cache holds whatever it holds.

    Args:
        target: the bound model.
        pages: where the sequence's pages come from; `close` gives them back.
        max_len: tokens of a sequence at most.

    Raises:
        RequestError: too few pages are free.
    """

    def __init__(self, target: Executor, pages: PageManager, max_len: int) -> None:
        self._target = target
        self._pages = pages
        self.max_len = min(pages.num_free * PAGE_TOKENS, max_len, MAX_LEN)
        pages.open(_SEQUENCE_ID)
        try:
            self._page_table: Int32Array = np.array(list(pages.extend(_SEQUENCE_ID, self.max_len)), np.int32)
        except RequestError:
            self.close()
            raise

    def close(self) -> None:
        """Gives the pages back."""
        self._pages.free(_SEQUENCE_ID)

    def seconds(self, num_rows: int, context_len: int) -> float:
        """Time of one pass of num_rows rows, a chain after context_len tokens, all logits wanted."""
        rows = np.arange(num_rows, dtype=np.int32)
        token_ids = (rows * 7 + 11) % np.int32(self._target.vocab_size)
        batch = Batch.chain(token_ids, context_len, self._page_table, rows)
        began = time.perf_counter()
        self._target.forward(batch)
        return time.perf_counter() - began

    def fastest(self, sizes: Sequence[int], context_len: int, budget_s: float) -> list[float]:
        """Seconds of each size, the least of some rounds: whatever disturbs a pass makes it longer.

        Sizes take turns, so that a changing clock falls on all of them alike.
        """
        for size in sizes:
            self.seconds(size, context_len)
        times: list[list[float]] = [[] for _ in sizes]
        began = time.perf_counter()
        while len(times[0]) < MAX_ROUNDS:
            if len(times[0]) >= MIN_ROUNDS and time.perf_counter() - began > budget_s:
                break
            for size, seen in zip(sizes, times, strict=True):
                seen.append(self.seconds(size, context_len))
        return [min(seen) for seen in times]


def measure_curve(target: Executor, pages: PageManager, max_rows: int, max_len: int = MAX_LEN) -> CostCurve:
    """The cost curve of a target, measured now.

    Args:
        target: the bound model.
        pages: with as many free pages as there are; a shorter cache is measured at a shorter context.
        max_rows: the most rows of a step.
        max_len: tokens of a sequence at most.

    Raises:
        RequestError: hardly any page is free.
    """
    timer = PassTimer(target, pages, max_len)
    try:
        context_len = min(CONTEXT_LEN, timer.max_len - min(max_rows, SIZES[-1]))
        if context_len < 1:
            raise RequestError("the KV cache is too small to measure what a pass takes")
        is_slow = timer.fastest((1,), context_len, 0.0)[0] > SLOW_PASS_S
        sizes = tuple(size for size in (SLOW_SIZES if is_slow else SIZES) if size <= max_rows)
        seconds = _lower_envelope(timer.fastest(sizes, context_len, MEASURE_S))
        per_token_s, per_token_row_s = _context_slopes(timer, sizes, seconds, context_len)
    finally:
        timer.close()
    return CostCurve(sizes, tuple(seconds), context_len, per_token_s, per_token_row_s)


def _lower_envelope(seconds: Sequence[float]) -> list[float]:
    """No size takes longer than a larger one; where it seemed to, something else was running."""
    out = list(seconds)
    for i in range(len(out) - 2, -1, -1):
        out[i] = min(out[i], out[i + 1])
    return out


def _context_slopes(
    timer: PassTimer, sizes: Sequence[int], seconds: Sequence[float], context_len: int
) -> tuple[float, float]:
    """Seconds per token of context, and per token and row: from the checked sizes at a longer context."""
    far_len = timer.max_len - SIZES[-1]
    pair = [size for size in CHECKED_SIZES if size in sizes]
    if far_len < 2 * context_len or len(pair) < 2:
        return 0.0, 0.0
    far = timer.fastest(pair, far_len, 0.0)
    slopes = [(far[i] - seconds[sizes.index(size)]) / (far_len - context_len) for i, size in enumerate(pair)]
    per_row = max(0.0, (slopes[1] - slopes[0]) / (pair[1] - pair[0]))
    return max(0.0, slopes[0] - per_row * pair[0]), per_row


def load_curve(
    target: Executor,
    pages: PageManager,
    max_rows: int,
    folder: Path,
    key: Sequence[str],
    max_len: int = MAX_LEN,
) -> CostCurve:
    """The cost curve of a target: the stored one when a quick check agrees with it, else a new one, which is stored.

    What is compared is the curve's shape. A machine that is busier than it was, or less, makes all of it slower or
    faster, and so is the curve that is returned.

    Args:
        target, pages, max_rows, max_len: as for `measure_curve`.
        folder: where curves are stored; one that can't be written to costs a measurement each time and nothing else.
        key: all that costs depend on: model file, weights, cache type, threads, instruction set, processor, build.
    """
    path = folder / f"{hashlib.sha256(json.dumps(list(key)).encode()).hexdigest()[:32]}.json"
    stored = _read(path)
    if stored is not None and stored.num_rows[-1] <= max_rows:
        adapted = _adapted(target, pages, stored, max_len)
        if adapted is not None:
            return adapted
    curve = measure_curve(target, pages, max_rows, max_len)
    _write(path, curve)
    return curve


def _adapted(target: Executor, pages: PageManager, curve: CostCurve, max_len: int) -> CostCurve | None:
    """A stored curve at the machine's speed of now; None where its shape does not hold any more."""
    sizes = [size for size in CHECKED_SIZES if size in curve.num_rows]
    timer = PassTimer(target, pages, max_len)
    try:
        if timer.max_len < curve.context_len + sizes[-1]:
            return None
        found = timer.fastest(sizes, curve.context_len, 0.0)
    finally:
        timer.close()
    known = [curve.seconds[curve.num_rows.index(size)] for size in sizes]
    factors = [now / then for now, then in zip(found, known, strict=True)]
    if max(factors) > (1.0 + MAX_CHANGE) * min(factors):
        return None
    factor = sum(factors) / len(factors)
    return replace(
        curve,
        seconds=tuple(factor * seconds for seconds in curve.seconds),
        per_token_s=factor * curve.per_token_s,
        per_token_row_s=factor * curve.per_token_row_s,
    )


def _read(path: Path) -> CostCurve | None:
    """A stored curve, or None where there is none that makes sense."""
    try:
        fields = json.loads(path.read_text())
        curve = CostCurve(
            num_rows=tuple(int(rows) for rows in fields["num_rows"]),
            seconds=tuple(float(seconds) for seconds in fields["seconds"]),
            context_len=int(fields["context_len"]),
            per_token_s=float(fields["per_token_s"]),
            per_token_row_s=float(fields["per_token_row_s"]),
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None
    is_sound = (
        len(curve.num_rows) == len(curve.seconds) >= 2
        and curve.num_rows[0] == 1
        and list(curve.num_rows) == sorted(set(curve.num_rows))
        and min(curve.seconds) > 0.0
        and curve.context_len > 0
    )
    return curve if is_sound else None


def _write(path: Path, curve: CostCurve) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps(asdict(curve)))
        partial.replace(path)
    except OSError:
        return
