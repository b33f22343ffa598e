"""The native CPU backend: a model is recorded once as a program, which C++ replays at each step.

Knows no architecture. What the kernels compute, and in which order, is written in ARCHITECTURE.md, "Numerics".
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

import forerun._native as _native
from forerun.batch import Batch, DraftPiece, StepBatch
from forerun.errors import ConfigError, EngineFault, LoadError
from forerun.machine import cpu_model
from forerun.ops.base import AttentionSpec, ExecutorConfig, Ops, Weight
from forerun.ops.formats import dequantize, in_one_order
from forerun.ops.recorder import OP_NAMES, Instr, Recorder, Value, assign_buffers
from forerun.types import PAGE_TOKENS, Float32Array, ForwardOutput, Int32Array

ISA_VARIABLE = "FORERUN_ISA"
MAX_THREADS = 256
MAX_WINDOW = 2**31 - 1
ACTIVATIONS = ("silu", "gelu_tanh")
# What the kernels read as it is; anything else is expanded to float32.
PACKED_FORMATS = frozenset(_native.packed_formats())


def chosen_isa() -> str:
    """The instruction set to compute with: `FORERUN_ISA`, else the best this machine has.

    Raises:
        ConfigError: the variable names one that is unknown or not available here.
    """
    available: list[str] = _native.available_isas()
    wanted = os.environ.get(ISA_VARIABLE, "")
    if not wanted:
        return available[-1]
    if wanted not in available:
        raise ConfigError(f"{ISA_VARIABLE} is {wanted!r}, but this machine has {', '.join(available)}")
    return wanted


def default_num_threads() -> int:
    """Physical cores this process may use, bounded by the control group's CPU quota."""
    cores = {_core_of(cpu) for cpu in os.sched_getaffinity(0)}
    return max(1, min(len(cores), _quota_cpus()))


def _core_of(cpu: int) -> str:
    try:
        return Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").read_text().strip()
    except OSError:
        return str(cpu)


def _quota_cpus() -> int:
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return max(1, int(quota) // int(period))
    except (OSError, ValueError):  # no control groups, or "max"
        return os.cpu_count() or 1


class NativeExecutor:
    """A model bound to the native backend; see `ops.base.Executor`.

    Args:
        config: sizes, KV storage and threads.
        build: writes the forward pass in `Ops` calls; run once.

    Raises:
        ConfigError: `FORERUN_ISA` names an instruction set this machine lacks, there are too many threads, or memory
            is too small.
        LoadError: a weight has a format or a shape that can't be packed.
    """

    def __init__(self, config: ExecutorConfig, build: Callable[[Ops[Value]], Value]) -> None:
        num_threads = default_num_threads() if config.num_threads is None else config.num_threads
        if not 1 <= num_threads <= MAX_THREADS:
            raise ConfigError(f"threads is {num_threads}, but must be between 1 and {MAX_THREADS}")
        spec = config.attentions[0]
        self.vocab_size = config.vocab_size
        self._variant = 0
        isa = chosen_isa()
        build_stat = Path(_native.__file__).stat()
        build_id = f"{build_stat.st_size}-{build_stat.st_mtime_ns}"
        self.fingerprint = f"native {build_id}, {cpu_model()}, {isa}, {num_threads} threads"
        try:
            self.program = _native.Program(
                isa=isa,
                num_threads=num_threads,
                vocab_size=config.vocab_size,
                num_layers=config.num_layers,
                num_heads=spec.num_heads,
                num_kv_heads=spec.num_kv_heads,
                head_dim=spec.head_dim,
                num_pages=config.num_pages,
                max_rows=config.max_rows,
                is_kv_f32=config.kv_type == "f32",
                max_positions=config.max_len or config.num_pages * PAGE_TOKENS,
            )
            recorder = Recorder()
            build(recorder)
            self._packer = _Packer(self.program)
            _emit(self.program, self._packer, recorder.instrs)
            self._packer.seal()
            # Views that are kept: making one takes longer than all else that is done around a pass.
            self._logits, self._argmax = self.program.logits(), self.program.argmax()
            self._rows = _native.StepRows()
        except ValueError as error:
            raise LoadError(f"the native backend can't run this architecture: {error}") from error
        except MemoryError as error:
            num_tokens = config.num_pages * PAGE_TOKENS
            raise ConfigError(
                f"weights and a cache of {num_tokens} tokens don't fit into memory; ask for a shorter context"
            ) from error

    def forward(self, batch: Batch) -> ForwardOutput:
        """See `Executor.forward`. The logits are a view that the next pass overwrites.

        Raises:
            EngineFault: the batch points outside the cache or the vocabulary, or activations are not finite.
        """
        try:
            if isinstance(batch, StepBatch):
                argmax_ids = self.program.forward_rows(self._fill_rows(batch), self._variant)
                return _PassOutput(self, argmax_ids, 0)
            self.program.forward(
                batch.token_ids,
                batch.positions,
                batch.slots,
                batch.visible_len,
                batch.tail_base,
                batch.tail_mask,
                batch.seq_ids,
                batch.page_tables,
                batch.logit_rows,
                self._variant,
            )
        except (ValueError, RuntimeError) as error:
            raise EngineFault(f"a target pass failed: {error}") from error
        except TypeError as error:
            raise EngineFault("a target pass failed: an array of the batch has another type or rank") from error
        return self.outputs(0, batch.logit_rows.size)

    def outputs(self, begin: int, end: int) -> ForwardOutput:
        """Rows of the last pass, of those whose logits were wanted."""
        if self.program.logits_capacity != len(self._logits):
            self._logits = self.program.logits()
        return ForwardOutput(self._logits[begin:end], self._argmax[begin:end])

    def _fill_rows(self, batch: StepBatch) -> _native.StepRows:
        rows = self._rows
        rows.clear()
        for piece in batch.pieces:
            if isinstance(piece, DraftPiece):
                rows.add_draft(*piece)
            else:
                rows.add_prompt(*piece)
        return rows

    def variant(self, build: Callable[[Ops[Any]], Any]) -> NativeExecutor:
        """See `Executor.variant`. It is a list of instructions more of the same program."""
        recorder = Recorder()
        build(recorder)
        other = copy.copy(self)
        other._variant = self.program.add_variant()
        try:
            _emit(self.program, self._packer, recorder.instrs, other._variant)
        except ValueError as error:
            raise EngineFault(f"a variant of this model can't be run: {error}") from error
        return other

    def move_slots(self, page_table: Int32Array, src: Int32Array, dst: Int32Array) -> None:
        """See `Executor.move_slots`."""
        try:
            self.program.move_slots(page_table, src, dst)
        except ValueError as error:
            raise EngineFault(f"slots can't be moved: {error}") from error

    @property
    def weight_bytes(self) -> int:
        """See `Executor.weight_bytes`."""
        return int(self.program.weight_bytes(self._variant))

    @property
    def kv_bytes(self) -> int:
        """See `Executor.kv_bytes`."""
        return int(self.program.kv_bytes)

    @property
    def scratch_bytes(self) -> int:
        """Bytes of activations and logits; grows with `max_rows` and the logit rows asked for.

        Past 256 positions a step of few rows keeps a partial softmax per split: about 1 % of the cache it reads.
        """
        return int(self.program.scratch_bytes)


class _PassOutput(ForwardOutput):
    """Rows of a pass, with arrays for those alone who ask for them, for the reason of `StepBatch`."""

    __slots__ = ("_argmax_ids", "_begin", "_executor")
    _argmax_ids: list[int]
    _begin: int
    _executor: NativeExecutor

    def __init__(self, executor: NativeExecutor, argmax_ids: list[int], begin: int) -> None:
        object.__setattr__(self, "_executor", executor)
        object.__setattr__(self, "_argmax_ids", argmax_ids)
        object.__setattr__(self, "_begin", begin)

    @property
    def argmax_ids(self) -> list[int]:
        return self._argmax_ids

    def part(self, begin: int, end: int) -> ForwardOutput:
        return _PassOutput(self._executor, self._argmax_ids[begin:end], self._begin + begin)

    def __getattr__(self, name: str) -> Any:
        # Only for what isn't set: the first array that anybody asks for.
        if name not in ForwardOutput.__slots__:
            raise AttributeError(f"the output of a pass has no {name}")
        rows = self._executor.outputs(self._begin, self._begin + len(self._argmax_ids))
        object.__setattr__(self, "logits", rows.logits)
        object.__setattr__(self, "argmax", rows.argmax)
        return getattr(rows, name)


def _emit(program: _native.Program, packer: _Packer, instrs: list[Instr], variant: int = 0) -> None:
    """Packs the weights that are not there yet and appends the instructions."""
    widths, buffer_of = assign_buffers(instrs)
    numbers = packer.buffers(widths)

    def buffer(value: Value | None) -> int:
        return -1 if value is None else numbers[buffer_of[value.index]]

    for instr in instrs:
        spec, norms = instr.spec, instr.head_norms
        is_qkv = norms is not None and spec is not None
        program.add(
            op=OP_NAMES.index(instr.op),
            in_=buffer(instr.x),
            residual=buffer(instr.residual),
            out=buffer(instr.out),
            weights=packer.matrices(instr),
            norm=packer.vector(instr.norm),
            eps=instr.eps,
            bias=packer.bias(instr),
            activation=ACTIVATIONS.index(instr.act),
            layer=instr.layer,
            scale=spec.scale if is_qkv and spec is not None else instr.scale,
            order=packer.order(instr),
            rope=packer.rope(spec) if is_qkv and spec is not None else -1,
            q_norm=-1 if norms is None else packer.head_norm(norms.q, spec),
            k_norm=-1 if norms is None else packer.head_norm(norms.k, spec),
            qk_eps=0.0 if norms is None else norms.eps,
            window=0 if spec is None or spec.window is None else min(spec.window, MAX_WINDOW),
            variant=variant,
        )


class _Packer:
    """Gives a program its weights, each matrix, vector and RoPE table once, whoever reads it.

    The kernels know one RoPE style only, `neox`. Where a model has the other, the rows of q and k, their biases and
    norms are reordered alike, so every q . k is over the same products.
    """

    def __init__(self, program: _native.Program) -> None:
        self._program = program
        self._buffer_widths: list[int] = []
        self._packed: dict[tuple[int, int], tuple[Weight, int]] = {}  # by identity while the model is bound
        self._sealed: dict[tuple[str, int], list[int]] | None = None  # by name afterwards, when the data may go
        # The array is kept beside its number: its id names it only while it lives.
        self._vectors: dict[tuple[int, int], tuple[Float32Array, int]] = {}
        self._ropes: dict[tuple[tuple[float, ...], float], int] = {}
        self._orders: dict[bytes, int] = {}

    def seal(self) -> None:
        """Lets the data of the matrices go. From now on they are known by their names, and none is packed any more."""
        self._sealed = {}
        for (_, order_size), (weight, number) in self._packed.items():
            self._sealed.setdefault((weight.name, order_size), []).append(number)
        self._packed = {}

    def buffers(self, widths: Sequence[int]) -> list[int]:
        """Buffers of these widths, all different; what is there already is used, in its order."""
        numbers: list[int] = []
        for width in widths:
            own = [i for i, known in enumerate(self._buffer_widths) if known == width and i not in numbers]
            if not own:
                own = [int(self._program.add_buffer(width))]
                self._buffer_widths.append(width)
            numbers.append(own[0])
        return numbers

    def matrices(self, instr: Instr) -> list[int]:
        """Matrix numbers of an instruction's weights."""
        out = []
        for i, weight in enumerate(instr.weights):
            order = head_order(instr.spec) if instr.head_norms is not None and i < 2 else None  # q and k, not v
            out.append(self._matrix(weight, order))
        return out

    def _matrix(self, weight: Weight, order: Int32Array | None) -> int:
        order_size = 0 if order is None else order.size
        if self._sealed is not None:
            numbers = self._sealed.get((weight.name, order_size), [])
            if len(numbers) != 1:
                what = "two weights have" if numbers else "no weight has"
                raise EngineFault(f"{what} the name {weight.name} among those that were bound like this")
            return numbers[0]
        key = (id(weight), order_size)
        if key not in self._packed:
            self._packed[key] = (weight, self._add(weight, order))
        return self._packed[key][1]

    def order(self, instr: Instr) -> int:
        """The number of the order in which an instruction's weights read their inputs; -1 is the plain one."""
        if not in_one_order(instr.weights):
            raise EngineFault(f"{instr.weights[0].name} and what lies beside it can't read one input in several orders")
        columns = instr.weights[0].columns if instr.weights else None
        if columns is None:
            return -1
        key = columns.tobytes()
        if key not in self._orders:
            self._orders[key] = self._program.add_order(np.ascontiguousarray(columns))
        return self._orders[key]

    def vector(self, vector: Float32Array | None) -> int:
        """The number of a vector; -1 is none."""
        return -1 if vector is None else self._vector(vector, 0, None)

    def _vector(self, vector: Float32Array, order_size: int, rows: Int32Array | None) -> int:
        key = (id(vector), order_size)
        if key not in self._vectors:
            ordered = vector if rows is None else vector[rows]
            self._vectors[key] = (vector, int(self._program.add_vector(np.ascontiguousarray(ordered))))
        return self._vectors[key][1]

    def bias(self, instr: Instr) -> int:
        """That of an instruction's bias."""
        order = head_order(instr.spec) if instr.head_norms is not None else None
        if instr.bias is None or order is None:
            return self.vector(instr.bias)
        num_qk = instr.weights[0].shape[0] + instr.weights[1].shape[0]
        rows = np.concatenate([rows_of_heads(num_qk, order), np.arange(num_qk, instr.bias.size, dtype=np.int32)])
        return self._vector(instr.bias, order.size, rows)

    def head_norm(self, norm: Float32Array | None, spec: AttentionSpec | None) -> int:
        """That of a norm of q or k."""
        order = head_order(spec)
        if norm is None or order is None:
            return self.vector(norm)
        return self._vector(norm, order.size, rows_of_heads(norm.size, order))

    def rope(self, spec: AttentionSpec) -> int:
        """The number of a RoPE table; -1 where nothing rotates."""
        key = (spec.inv_freq, spec.rope_magnitude)
        if not spec.inv_freq:
            return -1
        if key not in self._ropes:
            self._ropes[key] = self._program.add_rope(list(spec.inv_freq), spec.rope_magnitude)
        return self._ropes[key]

    def _add(self, weight: Weight, order: Int32Array | None) -> int:
        rows = None if order is None else rows_of_heads(weight.shape[0], order)
        data = np.ascontiguousarray(weight.data).view(np.uint8).reshape(-1)
        fmt = weight.format
        if fmt not in PACKED_FORMATS:  # rare ones: exact, at the size of floats
            fmt, data = "f32", dequantize(replace(weight, columns=None)).reshape(-1).view(np.uint8)
        try:
            return int(self._program.add_matrix(fmt, *weight.shape, data, rows))
        except ValueError as error:
            raise LoadError(f"tensor {weight.name} can't be packed: {error}") from error


def head_order(spec: AttentionSpec | None) -> Int32Array | None:
    """Source of each number of a head that turns interleaved RoPE pairs (2i, 2i + 1) into (i, i + R/2); None: as it is.

    What is not rotated stays where it is.
    """
    if spec is None or spec.rope_style != "interleaved":
        return None
    rotated = 2 * len(spec.inv_freq)
    pairs = (np.arange(0, rotated, 2), np.arange(1, rotated, 2))
    return np.concatenate([*pairs, np.arange(rotated, spec.head_dim)]).astype(np.int32)


def rows_of_heads(num_rows: int, order: Int32Array) -> Int32Array:
    """The order of a head applied to all heads.

    >>> rows_of_heads(8, np.array([0, 2, 1, 3], np.int32)).tolist()
    [0, 2, 1, 3, 4, 6, 5, 7]
    """
    heads = np.arange(0, num_rows, order.size, dtype=np.int32)
    rows: Int32Array = (heads[:, None] + order).reshape(-1)
    return rows
