"""The native CPU backend: a model is recorded once as a program, which C++ replays at each step.

Knows no architecture. What the kernels compute, and in which order, is written in ARCHITECTURE.md, "Numerics".
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np

import forerun._native as _native
from forerun.errors import ConfigError, EngineFault, LoadError
from forerun.ops.base import ExecutorConfig, Ops, Weight
from forerun.ops.recorder import OP_NAMES, Instr, Recorder, Value, assign_buffers
from forerun.types import Batch, ForwardOutput, Int32Array

ISA_VARIABLE = "FORERUN_ISA"
MAX_THREADS = 256


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
        ConfigError: `FORERUN_ISA` names an instruction set this machine lacks, or there are too many threads.
        LoadError: a weight has a format or a shape that can't be packed.
    """

    def __init__(self, config: ExecutorConfig, build: Callable[[Ops[Value]], Value]) -> None:
        num_threads = default_num_threads() if config.num_threads is None else config.num_threads
        if not 1 <= num_threads <= MAX_THREADS:
            raise ConfigError(f"threads is {num_threads}, but must be between 1 and {MAX_THREADS}")
        spec = config.attention
        self.vocab_size = config.vocab_size
        try:
            self.program = _native.Program(
                isa=chosen_isa(),
                num_threads=num_threads,
                vocab_size=config.vocab_size,
                num_layers=config.num_layers,
                num_heads=spec.num_heads,
                num_kv_heads=spec.num_kv_heads,
                head_dim=spec.head_dim,
                num_pages=config.num_pages,
                max_rows=config.max_rows,
                is_kv_f32=config.kv_type == "f32",
                attention_scale=spec.scale,
                inv_freq=list(spec.inv_freq),
            )
        except ValueError as error:
            raise LoadError(f"the native backend can't run this architecture: {error}") from error
        recorder = Recorder()
        build(recorder)
        _emit(self.program, recorder.instrs)

    def forward(self, batch: Batch) -> ForwardOutput:
        """See `Executor.forward`. The logits are a view that the next pass overwrites.

        Raises:
            EngineFault: the batch points outside the cache or the vocabulary, or activations are not finite.
        """
        try:
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
            )
        except (ValueError, RuntimeError) as error:
            raise EngineFault(f"a target pass failed: {error}") from error
        except TypeError as error:
            raise EngineFault("a target pass failed: an array of the batch has another type or rank") from error
        num_logits = batch.logit_rows.size
        return ForwardOutput(self.program.logits(num_logits, self.vocab_size), self.program.argmax(num_logits))

    def move_slots(self, page_table: Int32Array, src: Int32Array, dst: Int32Array) -> None:
        """See `Executor.move_slots`."""
        try:
            self.program.move_slots(page_table, src, dst)
        except ValueError as error:
            raise EngineFault(f"slots can't be moved: {error}") from error

    @property
    def weight_bytes(self) -> int:
        """See `Executor.weight_bytes`."""
        return int(self.program.weight_bytes)

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


def _emit(program: _native.Program, instrs: list[Instr]) -> None:
    """Packs the weights and appends the instructions."""
    packer = _Packer(program)
    widths, buffer_of = assign_buffers(instrs)
    for width in widths:
        program.add_buffer(width)

    def buffer(value: Value | None) -> int:
        return -1 if value is None else buffer_of[value.index]

    for instr in instrs:
        program.add(
            op=OP_NAMES.index(instr.op),
            in_=buffer(instr.x),
            residual=buffer(instr.residual),
            out=buffer(instr.out),
            weights=packer.pack(instr),
            norm=-1 if instr.norm is None else program.add_vector(instr.norm),
            eps=instr.eps,
            layer=instr.layer,
        )


class _Packer:
    """Packs each matrix once, whoever reads it."""

    def __init__(self, program: _native.Program) -> None:
        self._program = program
        self._packed: dict[tuple[int, bool], int] = {}

    def pack(self, instr: Instr) -> list[int]:
        """Matrix numbers of an instruction's weights."""
        out = []
        for i, weight in enumerate(instr.weights):
            spec = instr.spec
            head_dim = 0
            if spec is not None and spec.rope_style == "interleaved" and i < 2:  # q and k, not v
                head_dim = spec.head_dim
            key = (id(weight), head_dim > 0)
            if key not in self._packed:
                self._packed[key] = self._add(weight, head_dim)
            out.append(self._packed[key])
        return out

    def _add(self, weight: Weight, head_dim: int) -> int:
        rows = half_split_rows(weight.shape[0], head_dim) if head_dim else None
        data = np.ascontiguousarray(weight.data).view(np.uint8).reshape(-1)
        try:
            return int(self._program.add_matrix(weight.format, *weight.shape, data, rows))
        except ValueError as error:
            raise LoadError(f"tensor {weight.name} can't be packed: {error}") from error


def half_split_rows(num_rows: int, head_dim: int) -> Int32Array:
    """Source row of each output row that turns interleaved RoPE pairs (2i, 2i + 1) into (i, i + D/2) within each head.

    q and k are reordered alike, so every q . k is over the same products. The kernels know one style only.

    >>> half_split_rows(8, 4).tolist()
    [0, 2, 1, 3, 4, 6, 5, 7]
    """
    order = np.concatenate([np.arange(0, head_dim, 2), np.arange(1, head_dim, 2)])
    heads = np.arange(0, num_rows, head_dim)
    rows: Int32Array = (heads[:, None] + order).reshape(-1).astype(np.int32)
    return rows
