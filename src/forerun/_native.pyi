"""Types of the extension module; csrc/bindings.cpp and csrc/bindings_sampling.cpp are its source."""

import numpy as np
import numpy.typing as npt

from forerun.types import Float32Array, Float64Array, Int32Array, UInt64Array

def available_isas() -> list[str]: ...
def num_available_cpus() -> int: ...
def packed_formats() -> list[str]: ...
def stream_read_gb_per_s(num_threads: int, num_bytes: int) -> float: ...
def exp_f32(isa: str, x: Float32Array, out: Float32Array) -> None: ...

class Program:
    def __init__(
        self,
        isa: str,
        num_threads: int,
        vocab_size: int,
        num_layers: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        num_pages: int,
        max_rows: int,
        is_kv_f32: bool,
    ) -> None: ...
    def add_matrix(
        self, format: str, outputs: int, inputs: int, data: npt.NDArray[np.uint8], rows: Int32Array | None
    ) -> int: ...
    def add_vector(self, data: Float32Array) -> int: ...
    def add_order(self, columns: Int32Array) -> int: ...
    def add_buffer(self, width: int) -> int: ...
    def add_rope(self, inv_freq: list[float], magnitude: float) -> int: ...
    def add(
        self,
        op: int,
        in_: int,
        residual: int,
        out: int,
        weights: list[int],
        norm: int,
        eps: float,
        bias: int,
        activation: int,
        layer: int,
        scale: float,
        order: int,
        rope: int,
        q_norm: int,
        k_norm: int,
        qk_eps: float,
        window: int,
    ) -> None: ...
    def forward(
        self,
        token_ids: Int32Array,
        positions: Int32Array,
        slots: Int32Array,
        visible_len: Int32Array,
        tail_base: Int32Array,
        tail_mask: UInt64Array,
        seq_ids: Int32Array,
        page_tables: Int32Array,
        logit_rows: Int32Array,
    ) -> None: ...
    def logits(self, num_rows: int, vocab_size: int) -> Float32Array: ...
    def argmax(self, num_rows: int) -> Int32Array: ...
    def move_slots(self, page_table: Int32Array, src: Int32Array, dst: Int32Array) -> None: ...
    @property
    def weight_bytes(self) -> int: ...
    @property
    def kv_bytes(self) -> int: ...
    @property
    def scratch_bytes(self) -> int: ...
    @property
    def isa(self) -> str: ...
    @property
    def num_threads(self) -> int: ...
    def set_profiling(self, is_on: bool) -> None: ...
    @property
    def profile_s(self) -> list[float]: ...

def sampling_set_isa_level(level: int) -> None: ...
def sampling_isa_level() -> int: ...
def sampling_max_isa_level() -> int: ...
def sampling_exp(x: float) -> float: ...
def sampling_log(x: float) -> float: ...
def sampling_philox(c0: int, c1: int, c2: int, c3: int, key: int) -> tuple[int, int, int, int]: ...
def sampling_uniform(seed: int, index: int, position: int, committed_len: int, stream: int) -> float: ...
def sampling_race(
    weights: Float64Array, seed: int, position: int, committed_len: int, stream: int
) -> tuple[int, float]: ...
def sampling_race_of(
    ids: Int32Array, weights: Float64Array, seed: int, position: int, committed_len: int, stream: int
) -> tuple[int, float]: ...
def sampling_draw(
    weights: Float64Array, seed: int, position: int, committed_len: int, stream: int, count: int
) -> list[int]: ...
def sampling_draw_of(
    ids: Int32Array, weights: Float64Array, seed: int, position: int, committed_len: int, stream: int, count: int
) -> list[int]: ...

class LawParams:
    def __init__(
        self,
        temperature: float,
        is_greedy: bool,
        top_k: int,
        top_p: float,
        min_p: float,
        repetition_penalty: float,
        presence_penalty: float,
        frequency_penalty: float,
        bias_ids: list[int],
        biases: list[float],
    ) -> None: ...

class Sampler:
    def __init__(self, vocab_size: int) -> None: ...
    @property
    def vocab_size(self) -> int: ...
    def law(
        self,
        logits: Float32Array,
        params: LawParams,
        history_ids: Int32Array,
        output_counts: Int32Array,
        path_ids: Int32Array,
        banned_ids: Int32Array,
        out_ids: Int32Array,
        out_weights: Float64Array,
    ) -> tuple[int, bool, float]: ...
    def logprobs(
        self, logits: Float32Array, token_id: int, out_ids: Int32Array, out_logprobs: Float64Array
    ) -> float: ...
    def top_ids(self, logits: Float32Array, out_ids: Int32Array) -> None: ...
