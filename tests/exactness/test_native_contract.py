"""The native backend's numerics contract, one named test per line, compared bit by bit.

A row's values depend on that row's own inputs only, by one sequence of roundings: not on the number of rows of a pass,
the chunk, the tile, the thread, the instruction set, the page or the slot. The reference is the scalar table on one
thread, one row per pass; the sums themselves are spelled out in numpy (`written_*`).

What is not here: laws and sampling (test_sampling_native.py), whole answers (test_matrix_*.py), and each kernel alone
(csrc/tests).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

import forerun._native as _native
from forerun.batch import Batch
from forerun.errors import EngineFault
from forerun.ops import ExecutorConfig
from forerun.ops.base import AttentionSpec, KvType, Weight
from forerun.ops.formats import dequantize
from forerun.ops.native import ISA_VARIABLE, NativeExecutor
from tests.helpers.gguf_files import tiny_llama_metadata, tiny_llama_tensors, write_gguf, write_tiny_llama
from tests.helpers.native import MAX_ROWS, NUM_PAGES, assert_same_bits, native, text_logits
from tests.helpers.toy_llama import chain_batch, f32_weight, merge_batches, pages_for, tree_batch

ISAS = _native.available_isas()
BEST = ISAS[-1]
QUANTISED = ("q4_0", "q4_1", "q8_0")
FORMATS = ("f32", "f16", "bf16", *QUANTISED)
VOCAB = 331  # no multiple of a tile
KV_TYPES: tuple[KvType, ...] = ("f16", "f32")
EPS = 1e-5


@dataclass(frozen=True)
class Shape:
    hidden: int
    heads: int
    kv_heads: int


SHAPES = {
    "head size 16": Shape(64, 4, 2),
    "head size 24": Shape(96, 4, 2),
    "three heads, one KV head": Shape(96, 3, 1),
}


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Path]:
    """The file of a format and a shape; written when it is first asked for."""
    folder = tmp_path_factory.mktemp("models")

    @cache
    def path(fmt: str, shape: str = "head size 16") -> Path:
        sizes = SHAPES[shape]
        return write_tiny_llama(
            folder / f"{fmt}-{shape}.gguf".replace(" ", "-"),
            fmt=fmt,
            hidden_size=sizes.hidden,
            intermediate_size=160,  # five groups, ten tiles
            num_heads=sizes.heads,
            num_kv_heads=sizes.kv_heads,
            vocab_size=VOCAB,
            context_length=NUM_PAGES * 16,
        )

    return path


Paths = Callable[..., Path]
TABLE = np.arange(NUM_PAGES, dtype=np.int32)
TEXT = np.random.default_rng(3).integers(0, VOCAB, NUM_PAGES * 16).tolist()
LONG = 600  # three splits of attention


@pytest.fixture(scope="module")
def reference(paths: Paths) -> Callable[..., np.ndarray]:
    """Logits of the first positions of TEXT, one row per pass, scalar, one thread."""
    kept: dict[Any, np.ndarray] = {}

    def logits(fmt: str, shape: str = "head size 16", count: int = 40, kv_type: KvType = "f16") -> np.ndarray:
        key = fmt, shape, kv_type
        if key not in kept or len(kept[key]) < count:
            target = native(paths(fmt, shape), "scalar", kv_type=kv_type)
            kept[key] = text_logits(target, TEXT[:count], TABLE, [1])
        return kept[key][:count]

    return logits


Reference = Callable[..., np.ndarray]


# ---- the sums, written out -------------------------------------------------------------------------------------------


def fma(a: Any, b: Any, c: Any) -> np.ndarray:
    """a b + c with one rounding: the product of two float32 is exact in float64. (The sum then rounds twice, which
    differs from once for about one in 2^29 random inputs; the inputs here are fixed.)"""
    return (np.asarray(a, np.float64) * np.asarray(b, np.float64) + np.asarray(c, np.float64)).astype(np.float32)


def written_rms_norm(x: np.ndarray, norm: np.ndarray, eps: float = EPS) -> np.ndarray:
    """Sixteen lanes by index, then halves onto halves."""
    width = x.shape[1]
    padded = np.pad(x, ((0, 0), (0, -width % 16)))
    lanes = np.zeros((len(x), 16), np.float32)
    for i in range(0, padded.shape[1], 16):
        lanes = fma(padded[:, i : i + 16], padded[:, i : i + 16], lanes)
    while lanes.shape[1] > 1:
        half = lanes.shape[1] // 2
        lanes = lanes[:, :half] + lanes[:, half:]
    inv = np.float32(1) / np.sqrt(lanes / np.float32(width) + np.float32(eps))
    return (x * inv) * norm


def written_codes(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """int8 codes [M, groups, 32] and float32 scales [M, groups]."""
    groups = x.reshape(len(x), -1, 32)
    amax = np.abs(groups).max(axis=2)
    amax[amax <= np.float32(1e-30)] = 0  # a group that small is zero
    inv = np.float32(127) / np.where(amax > 0, amax, np.float32(np.inf))
    return np.rint(groups * inv[..., None]).astype(np.int64), amax / np.float32(127)


def written_product(x: np.ndarray, weight: Weight, order: slice = slice(None)) -> np.ndarray:
    """x W^T as the contract adds it up; `order` goes over the groups, or over k where weights are floats."""
    if weight.format in ("f32", "f16", "bf16"):
        matrix = dequantize(weight)
        out = np.zeros((len(x), len(matrix)), np.float32)
        for k in range(x.shape[1])[order]:
            out = fma(x[:, k : k + 1], matrix[:, k], out)
        return out
    codes, scales = written_codes(x)
    w_codes, w_scale, w_min = file_groups(weight)
    out = np.zeros((len(x), weight.shape[0]), np.float32)
    for g in range(codes.shape[1])[order]:
        sums = scales[:, g] * codes[:, g].sum(axis=1).astype(np.float32)
        dots = codes[:, g] @ w_codes[:, g].T
        if weight.format != "q8_0":
            out = fma(w_min[:, g], sums[:, None], out)
        out = fma(dots.astype(np.float32), w_scale[:, g] * scales[:, g : g + 1], out)
    return out


def file_groups(weight: Weight) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(codes [N, groups, 32], scale, minimum) of a quantised matrix; Q4_0's w = d (q - 8) has the minimum -8 d."""
    blocks = weight.data.reshape(weight.shape[0], weight.shape[1] // 32, -1)
    halves = blocks[..., :4].copy().view(np.float16).astype(np.float32)
    scale = halves[..., 0]
    if weight.format == "q8_0":
        return blocks[..., 2:].view(np.int8).astype(np.int64), scale, np.zeros_like(scale)
    nibbles = blocks[..., 4 if weight.format == "q4_1" else 2 :]
    codes = np.concatenate([nibbles & 15, nibbles >> 4], axis=2).astype(np.int64)
    return codes, scale, halves[..., 1] if weight.format == "q4_1" else np.float32(-8) * scale


def written_exp(x: np.ndarray) -> np.ndarray:
    """exp of values of at most 88; exactly 0 below -87: x = n ln 2 + r, a polynomial in r, times 2^n."""
    clamped = np.maximum(x, np.float32(-87.5))
    n = np.rint(clamped * np.float32(1.44269504088896341))
    r = fma(n, np.float32(-0.693359375), clamped)
    r = fma(n, np.float32(2.12194440e-4), r)
    p = np.full_like(r, 1.9875691500e-4)
    for factor in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
        p = fma(p, r, np.float32(factor))
    y = fma(p, r * r, r) + np.float32(1)
    return np.where(x < np.float32(-87), np.float32(0), np.ldexp(y, n.astype(np.int32)))


def written_rope(x: np.ndarray, inv_freq: Sequence[float]) -> np.ndarray:
    """Rows [M, D] at positions 0 to M - 1; pairs are (i, i + D/2)."""
    half = x.shape[1] // 2
    angles = np.arange(len(x))[:, None] * np.asarray(inv_freq)
    cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    first, second = x[:, :half], x[:, half:]
    return np.concatenate([fma(first, cos, -(second * sin)), fma(second, cos, first * sin)], axis=1)


def written_attention(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    """Causal attention of one head, rows [M, D]: splits of 256 positions, folded in order."""
    scores = np.zeros((len(q), len(q)), np.float32)
    for i in range(q.shape[1]):
        scores = fma(q[:, i : i + 1], k[:, i], scores)
    sees = np.tri(len(q), dtype=bool)
    run_max = run_sum = run_acc = np.zeros((0, 1), np.float32)
    for begin in range(0, len(q), 256):
        part = np.where(sees, scores, -np.inf)[begin:, begin : begin + 256]  # earlier rows have nothing in this split
        top = part.max(axis=1, keepdims=True)
        weights = written_exp(part - top)
        lanes = np.zeros((len(part), 16), np.float32)
        for i in range(0, part.shape[1], 16):
            lane = weights[:, i : i + 16]
            lanes[:, : lane.shape[1]] += lane
        while lanes.shape[1] > 1:
            lanes = lanes[:, : lanes.shape[1] // 2] + lanes[:, lanes.shape[1] // 2 :]
        acc = np.zeros((len(part), v.shape[1]), np.float32)
        for i in range(part.shape[1]):
            acc = np.where(sees[begin:, begin + i, None], fma(weights[:, i : i + 1], v[begin + i], acc), acc)
        if begin == 0:
            run_max, run_sum, run_acc = top, lanes, acc
            continue
        old = run_max[begin:]
        new = np.maximum(old, top)
        a, b = written_exp(old - new), written_exp(top - new)
        run_sum[begin:] = fma(run_sum[begin:], a, lanes * b)
        run_acc[begin:] = fma(run_acc[begin:], a, acc * b)
        run_max[begin:] = new
    return run_acc / run_sum


def quantised(matrix: np.ndarray, fmt: str) -> Weight:
    kind = gguf.GGMLQuantizationType[fmt.upper()]
    raw = gguf.quants.quantize(matrix.astype(np.float32), kind).view(np.uint8)
    return Weight(fmt, fmt, (matrix.shape[0], matrix.shape[1]), raw.reshape(-1))


def compute(x: np.ndarray, norm: np.ndarray, head: Weight, inner: Weight | None = None, threads: int = 1) -> np.ndarray:
    """norm and head of the rows of x, after x + x inner^T if there is an inner matrix."""

    def build(ops: Any) -> Any:
        h = ops.embed(f32_weight("x", np.resize(x, (head.shape[0], x.shape[1]))))
        if inner is not None:
            h = ops.linear_add(h, inner, h)
        return ops.logits(h, norm, EPS, head)

    spec = AttentionSpec(1, 1, 16, 0.25, "neox", (1.0,) * 8)
    # Token ids are rows of x, of which there are at most as many as the head has.
    config = ExecutorConfig(head.shape[0], x.shape[1], 1, (spec,), len(x), 8, "f16", threads)
    return NativeExecutor(config, build).forward(chain_batch(range(len(x)), pages_for(len(x)))).logits.copy()


def wild_rows(rng: np.random.Generator, rows: int, width: int) -> np.ndarray:
    """Inputs over many orders of magnitude, so that each rounding's place shows."""
    return (rng.standard_normal((rows, width)) * 10.0 ** rng.uniform(-2, 2, (rows, width))).astype(np.float32)


@pytest.fixture(params=ISAS)
def isa(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setenv(ISA_VARIABLE, request.param)
    return request.param  # type: ignore[no-any-return]


# ---- line by line ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [5, 20])
@pytest.mark.parametrize("fmt", ["q4_1", "q8_0"])
def test_line_01_group_dots_are_exact_at_the_ends_of_their_range(isa: str, fmt: str, rows: int) -> None:
    """Codes -127 and 127 times the lowest and the highest weight code over 1536 inputs."""
    inputs = 1536
    signs = np.where(np.arange(rows)[:, None] % 3 == 0, 1.0, np.where(np.arange(inputs) % 2, -1.0, 1.0))
    x = (signs * np.where(np.arange(rows)[:, None] % 2, 1, -1)).astype(np.float32)
    data = bytearray()
    low, high = (0x00, 0xFF) if fmt == "q4_1" else (0x80, 0x7F)
    for n in range(32):
        for g in range(inputs // 32):
            data += np.array([1, -2] if fmt == "q4_1" else [1], np.float16).tobytes()
            data += bytes([(low, high, low if g % 2 else high)[n % 3]]) * (16 if fmt == "q4_1" else 32)
    head = Weight("head", fmt, (32, inputs), np.frombuffer(bytes(data), np.uint8))
    norm = np.ones(inputs, np.float32)
    got = compute(x, norm, head)
    assert_same_bits(got, written_product(written_rms_norm(x, norm), head) + np.float32(0))
    exact = written_rms_norm(x, norm).astype(np.float64) @ dequantize(head).astype(np.float64).T
    np.testing.assert_allclose(got, exact, rtol=1e-5, atol=1e-3 * np.abs(exact).max())


@pytest.mark.parametrize("fmt", QUANTISED)
@pytest.mark.parametrize("rows", [1, 7, 40])
def test_line_02_groups_are_added_in_ascending_order(isa: str, fmt: str, rows: int) -> None:
    rng = np.random.default_rng(rows)
    x, norm = wild_rows(rng, rows, 37 * 32), rng.uniform(0.5, 1.5, 37 * 32).astype(np.float32)
    head = quantised(rng.standard_normal((83, 37 * 32)), fmt)
    normed = written_rms_norm(x, norm)
    got = compute(x, norm, head)
    assert_same_bits(got, written_product(normed, head))
    assert (got != written_product(normed, head, slice(None, None, -1))).any(), "the inputs must tell orders apart"


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("rows", [1, 8, 40])
@pytest.mark.parametrize("fmt", ["f32", "f16", "bf16"])
def test_line_03_float_products_are_one_chain_over_k(isa: str, fmt: str, rows: int, threads: int) -> None:
    rng = np.random.default_rng(rows)
    x, norm = wild_rows(rng, rows, 203), rng.uniform(0.5, 1.5, 203).astype(np.float32)
    head = quantised(rng.standard_normal((83, 203)), fmt)
    got = compute(x, norm, head, threads=threads)
    assert_same_bits(got, written_product(written_rms_norm(x, norm), head))


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("name", ISAS)
def test_line_04_every_number_of_rows_computes_alike(paths: Paths, reference: Reference, name: str, fmt: str) -> None:
    """1 to 40 rows in one pass against one at a time: decoding, verification and prefill are the same arithmetic."""
    want, target = reference(fmt), native(paths(fmt), name)
    for rows in range(1, 41):
        assert_same_bits(target.forward(chain_batch(TEXT[:rows], TABLE)).logits, want[:rows], rows)


@pytest.mark.parametrize("shape", list(SHAPES)[1:])
@pytest.mark.parametrize("fmt", ["f16", "q4_0", "q8_0"])
def test_line_04_every_shape_computes_alike(paths: Paths, reference: Reference, fmt: str, shape: str) -> None:
    want = reference(fmt, shape)
    for name in ISAS:
        target = native(paths(fmt, shape), name, threads=2)
        for rows in (1, 2, 3, 5, 8, 9, 16, 17, 24, 33, 40):
            assert_same_bits(target.forward(chain_batch(TEXT[:rows], TABLE)).logits, want[:rows], (name, rows))


@pytest.mark.parametrize("fmt", QUANTISED)
@pytest.mark.parametrize("name", ISAS)
def test_line_05_a_row_is_quantised_by_itself(paths: Paths, name: str, fmt: str) -> None:
    """Rows of other sequences in the same pass, wherever they stand, leave a row as it is."""
    target, alone = native(paths(fmt), name, threads=2), native(paths(fmt), name)
    tables = [TABLE[:4], TABLE[4:8], TABLE[8:12]]
    texts = [TEXT[:11], TEXT[50:51], TEXT[100:117]]
    want = [alone.forward(chain_batch(text, tables[0])).logits.copy() for text in texts]
    for order in ([0, 1, 2], [2, 0, 1], [1, 2, 0]):
        batch = merge_batches(*(chain_batch(texts[i], tables[i]) for i in order))
        assert_same_bits(target.forward(batch).logits, np.concatenate([want[i] for i in order]), order)
    # And with no logits of the neighbours asked for.
    batch = merge_batches(*(chain_batch(texts[i], tables[i], wanted=None if i == 1 else []) for i in range(3)))
    assert_same_bits(target.forward(batch).logits, want[1])


@pytest.mark.parametrize("rows", [6, 20])
def test_line_05_codes_are_x_times_127_over_amax_rounded_half_to_even(isa: str, rows: int) -> None:
    """Inputs as near to the middle of two codes as floats come, where x / (amax / 127) would round otherwise."""
    rng = np.random.default_rng(rows)
    steps = rng.uniform(1, 3, (rows, 3, 1)).astype(np.float32) / np.float32(127)
    steps[0] = 1  # exact ties
    x = (rng.integers(-127, 127, (rows, 3, 32)) + np.float32(0.5)).astype(np.float32) * steps
    x[:, :, 5] = 127 * steps[:, :, 0]
    x[1, 1] = 0
    x[2, 1] = 1e-31
    x = x.reshape(rows, 96)
    codes, scales = written_codes(x)
    assert (codes.reshape(rows, 96) != np.rint(x / np.repeat(scales, 32, axis=1).clip(1e-30))).any()
    inner, head = quantised(rng.standard_normal((96, 96)) / 10, "q8_0"), f32_weight("head", np.eye(97, 96))
    norm = np.ones(96, np.float32)
    want = written_product(written_rms_norm(x + written_product(x, inner), norm), head)
    assert_same_bits(compute(x, norm, head, inner), want)


@pytest.mark.parametrize("width", [16, 40, 203, 576])
def test_line_06_the_norm_has_sixteen_lanes_and_one_tree(isa: str, width: int) -> None:
    rng = np.random.default_rng(width)
    x, norm = wild_rows(rng, 9, width), rng.uniform(0.5, 1.5, width).astype(np.float32)
    head = f32_weight("head", np.eye(max(width, 9), width))  # the normed row itself comes out
    got = compute(x, norm, head)
    assert_same_bits(got[:, :width], written_rms_norm(x, norm))


@pytest.mark.parametrize("kv_type", KV_TYPES)
def test_line_07_attention_is_the_written_sum(isa: str, kv_type: KvType) -> None:
    """RoPE, scores, softmax per split of 256 positions, values in ascending position, splits folded in order."""
    rows, heads, dim = 530, 2, 24
    spec = AttentionSpec(heads, 1, dim, 0.3, "neox", tuple(100.0 ** (-2 * i / dim) for i in range(dim // 2)))
    x = np.random.default_rng(6).standard_normal((rows, 4 * dim)).astype(np.float32) * np.float32(2)
    ones = np.ones(4 * dim, np.float32)
    eye = np.eye(4 * dim)
    parts = tuple(f32_weight(name, eye[cut]) for name, cut in zip("qkv", np.split(range(96), [48, 72]), strict=True))

    def build(ops: Any) -> Any:
        qkv = ops.norm_linear(ops.embed(f32_weight("x", x)), ones, EPS, parts)  # the normed rows themselves
        return ops.logits(ops.attention(qkv, 0, spec), ones[: 2 * dim], EPS, f32_weight("o", np.eye(rows, 2 * dim)))

    target = NativeExecutor(ExecutorConfig(rows, 4 * dim, 1, (spec,), 64, 40, kv_type, 2), build)
    got = text_logits(target, range(rows), np.arange(40, dtype=np.int32), [64, 1, 33])[:, : 2 * dim]
    normed = written_rms_norm(x, ones)
    q, k, v = normed[:, :48], written_rope(normed[:, 48:72], spec.inv_freq), normed[:, 72:]
    if kv_type == "f16":
        k, v = (part.astype(np.float16).astype(np.float32) for part in (k, v))
    attended = [
        written_attention(written_rope(q[:, h * dim : (h + 1) * dim], spec.inv_freq) * np.float32(0.3), k, v)
        for h in range(heads)
    ]
    assert_same_bits(got, written_rms_norm(np.concatenate(attended, axis=1), ones[: 2 * dim]))


@pytest.mark.parametrize("name", ISAS)
@pytest.mark.parametrize("kv_type", KV_TYPES)
def test_line_07_softmax_sums_by_logical_position(
    paths: Paths, reference: Reference, name: str, kv_type: KvType
) -> None:
    """Every length modulo the lanes, the page and the split, from a pass that starts anywhere."""
    want = reference("q8_0", "head size 24", LONG, kv_type)
    target = native(paths("q8_0", "head size 24"), name, kv_type=kv_type)
    got = text_logits(target, TEXT[:LONG], TABLE, [31, 1, 64, 33, 7])
    assert_same_bits(got, want)


def test_line_08_exp_is_ours_and_the_same_everywhere() -> None:
    x = np.concatenate(
        [np.linspace(-90, 89, 50_001), np.linspace(-1, 1, 10_001), [0.0, -0.0, -87.0, -87.00001, 88.0, -np.inf, np.inf]]
    ).astype(np.float32)
    values = []
    for name in ISAS:
        out = np.full_like(x, np.nan)
        _native.exp_f32(name, x, out)
        values.append(out)
        assert_same_bits(out, values[0], name)
    capped = np.minimum(x, np.float32(88))
    assert_same_bits(values[0], written_exp(capped))
    exact = np.exp(capped.astype(np.float64))
    exact[x < -87] = 0
    # Two units in the last place; weights that small add nothing to a softmax, so they are exactly 0.
    assert (np.abs(values[0] - exact) <= exact * 2.0**-22).all()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("fmt", FORMATS)
def test_line_09_instruction_sets_give_the_same_bits(paths: Paths, reference: Reference, fmt: str, shape: str) -> None:
    """FMA only where it is written, in code that six sets of compiler flags have made."""
    want = reference(fmt, shape)
    for name in ISAS:
        assert_same_bits(text_logits(native(paths(fmt, shape), name), TEXT[:40], TABLE, [40]), want, name)


def test_line_10_the_callers_float_mode_comes_back(paths: Paths) -> None:
    smallest = np.float32(1e-45)
    assert smallest != 0
    target = native(paths("q4_1"), BEST, threads=2)
    target.forward(chain_batch(TEXT[:20], TABLE))
    denormal = np.full(4, 1e-40, np.float32)
    assert (denormal * np.float32(0.5) > 0).all(), "denormals are flushed in the caller's thread"
    assert np.float32(1e-38) * np.float32(0.01) > 0
    bad = replace(chain_batch([1], TABLE), token_ids=np.array([VOCAB], np.int32))
    with pytest.raises(EngineFault):
        target.forward(bad)
    assert (denormal * np.float32(0.5) > 0).all()


def test_line_10_denormals_are_flushed_on_every_thread(isa: str) -> None:
    """A product below the normal range is 0, whichever thread has the row and whatever computes it."""
    x = np.full((8, 32), 1e-20, np.float32)
    head = f32_weight("head", np.full((96, 32), 1e-22))
    norm = np.full(32, 1e-3, np.float32)
    got = compute(x, norm, head, threads=3)  # normed: 1e-20 / sqrt(eps) * 1e-3; each product: below 1e-40
    assert (got == 0).all()


@pytest.mark.parametrize("threads", [1, 2, 3, 4])
@pytest.mark.parametrize("fmt", ["f16", "q4_1"])
def test_line_11_threads_change_nothing(paths: Paths, reference: Reference, fmt: str, threads: int) -> None:
    """Long enough that attention is cut into splits for the threads: more than 256 and more than 512 positions."""
    for shape in SHAPES:
        want = reference(fmt, shape, 60)
        for sizes in ([1], [60], [3, 17]):
            target = native(paths(fmt, shape), BEST, threads)
            assert_same_bits(text_logits(target, TEXT[:60], TABLE, sizes), want, (shape, sizes))
    want = reference(fmt, "three heads, one KV head", LONG)
    target = native(paths(fmt, "three heads, one KV head"), BEST, threads)
    text_logits(target, TEXT[:240], TABLE, [64])
    for start, stop, sizes in ((240, 300, [1, 2, 8]), (300, 500, [64]), (500, 560, [5]), (560, LONG, [40])):
        got = text_logits(target, TEXT[start:stop], TABLE, sizes, start)
        assert_same_bits(got, want[start:stop], (threads, start))


@pytest.mark.parametrize("name", ISAS)
def test_line_11_pages_change_nothing(paths: Paths, reference: Reference, name: str) -> None:
    want = reference("q4_1", "head size 24", 300)
    for seed, threads in ((1, 1), (2, 3)):
        table = np.random.default_rng(seed).permutation(NUM_PAGES).astype(np.int32)
        target = native(paths("q4_1", "head size 24"), name, threads)
        assert_same_bits(text_logits(target, TEXT[:300], table, [61]), want)


@pytest.mark.parametrize("kv_type", KV_TYPES)
@pytest.mark.parametrize("fmt", ["f32", "q8_0"])
def test_line_12_keys_and_values_are_read_back_after_rounding(
    paths: Paths, reference: Reference, fmt: str, kv_type: KvType
) -> None:
    """A prefix from earlier passes and the same prefix in the pass itself."""
    want = reference(fmt, count=64, kv_type=kv_type)
    for name in ISAS:
        target = native(paths(fmt), name, kv_type=kv_type)
        together = target.forward(chain_batch(TEXT[:64], TABLE)).logits
        assert_same_bits(together, want, name)
        for cut in (1, 15, 16, 40, 63):
            assert_same_bits(text_logits(target, TEXT[:64], TABLE, [cut, 64 - cut]), want, (name, cut))


def test_line_12_the_storage_type_is_part_of_the_model(reference: Reference) -> None:
    """If nothing rounded, the tests above would say nothing."""
    f16, f32 = (reference("f32", count=64, kv_type=kv_type) for kv_type in KV_TYPES)
    assert (f16[0] != f32[0]).any()  # a row also reads its own value rounded
    assert (f16[1:] != f32[1:]).any(axis=1).all()


def test_line_12_halves_are_the_ieee_ones(isa: str) -> None:
    """Values that are subnormal halves, ties and too large come back as numpy rounds them."""
    values = np.float32([6e-8, 2.9e-8, 3e-8, 6.1e-5, 1 + 2.0**-11, 1 + 3 * 2.0**-11, 65504, -65519, 1e-9, -5e-5])
    spec = AttentionSpec(1, 1, 16, 1.0, "neox", (1.0,) * 8)
    qkv = np.zeros((10, 48), np.float32)
    qkv[:, 32:] = values[:, None]  # the value of head 0; one row sees itself alone

    def build(ops: Any) -> Any:
        x = ops.embed(f32_weight("x", np.resize(qkv, (16, 48))))
        eye = [f32_weight(part, np.eye(48)[i * 16 : (i + 1) * 16] * 1.0) for i, part in enumerate("qkv")]
        scaled = ops.norm_linear(x, np.ones(48, np.float32), EPS, tuple(eye))
        return ops.logits(ops.attention(scaled, 0, spec), np.ones(16, np.float32), 1e-20, f32_weight("o", np.eye(16)))

    config = ExecutorConfig(16, 48, 1, (spec,), 10, 10, "f16", 1)
    tables = np.arange(10, dtype=np.int32)[:, None]
    rows = [chain_batch([i], table) for i, table in enumerate(tables)]
    got = NativeExecutor(config, build).forward(merge_batches(*rows)).logits
    normed = written_rms_norm(qkv, np.ones(48, np.float32))[:, 32:]
    stored = normed.astype(np.float16).astype(np.float32)
    assert_same_bits(got, written_rms_norm(stored, np.ones(16, np.float32), 1e-20))


TREE_PARENTS = [-1, 0, 0, 1, 1, 3, 2, 5, 7, 8, 9, 10, 4, 12, 13, 11, 15, 16, 17, 18, 19]


def path_to(parents: Sequence[int], node: int) -> list[int]:
    path = [node]
    while parents[path[-1]] >= 0:
        path.append(parents[path[-1]])
    return path[::-1]


def check_tree(path: Path, name: str, threads: int, committed: int, parents: Sequence[int], kv_type: KvType) -> None:
    """Every node's logits are those of the chain through its ancestors."""
    node_tokens = [(7 * node + 5) % VOCAB for node in range(len(parents))]
    target, chain = (native(path, name, count, kv_type) for count in (threads, 1))
    text_logits(target, TEXT[:committed], TABLE, [64])
    text_logits(chain, TEXT[:committed], TABLE, [64])
    got = target.forward(tree_batch(node_tokens, parents, TABLE, committed)).logits
    for node in range(len(parents)):
        tokens = [node_tokens[i] for i in path_to(parents, node)]
        want = text_logits(chain, tokens, TABLE, [64], committed)[-1:]
        assert_same_bits(got[node : node + 1], want, (name, committed, node))


@pytest.mark.parametrize("committed", [1, 5, 15, 30, 250, 255, 256, 505])
def test_line_13_a_tree_row_has_the_bits_of_its_chain(paths: Paths, committed: int) -> None:
    """Over the borders of a page (16) and of a split (256), for every instruction set."""
    for i, name in enumerate(ISAS):
        kv_type = KV_TYPES[i % 2]
        check_tree(paths("q4_1", "head size 24"), name, 1 + i % 3, committed, TREE_PARENTS, kv_type)


@pytest.mark.parametrize("fmt", FORMATS)
def test_line_13_random_trees_of_up_to_64_nodes(paths: Paths, fmt: str) -> None:
    rng = np.random.default_rng(5)
    for nodes, committed in ((2, 1), (17, 40), (64, 236)):
        parents = [-1, *(int(rng.integers(-1, node)) for node in range(1, nodes))]
        check_tree(paths(fmt), BEST, 2, committed, parents, "f16")


@pytest.mark.parametrize("fmt", QUANTISED)
def test_line_14_the_update_is_added_to_the_residual(isa: str, fmt: str) -> None:
    """x + (x W^T), each output one rounding; then the norm and the head over the sum."""
    rng = np.random.default_rng(8)
    x, norm = wild_rows(rng, 20, 96), rng.uniform(0.5, 1.5, 96).astype(np.float32)
    inner, head = quantised(rng.standard_normal((96, 96)), fmt), quantised(rng.standard_normal((40, 96)), fmt)
    total = x + written_product(x, inner)
    got = compute(x, norm, head, inner)
    assert_same_bits(got, written_product(written_rms_norm(total, norm), head))


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_line_17_argmax_ties_go_to_the_lowest_id(isa: str, threads: int) -> None:
    """The same row of the head again and again, across tiles and threads."""
    rng = np.random.default_rng(2)
    x = wild_rows(rng, 9, 64)
    rows = rng.standard_normal((3, 64))
    head = f32_weight("head", np.tile(rows, (61, 1)))

    def build(ops: Any) -> Any:
        return ops.logits(ops.embed(f32_weight("x", np.resize(x, (183, 64)))), np.ones(64, np.float32), EPS, head)

    spec = AttentionSpec(1, 1, 16, 0.25, "neox", (1.0,) * 8)
    target = NativeExecutor(ExecutorConfig(183, 64, 1, (spec,), 9, 8, "f16", threads), build)
    out = target.forward(chain_batch(range(9), TABLE[:1]))
    assert out.argmax.tolist() == [int(np.argmax(row)) for row in out.logits]
    assert set(out.argmax.tolist()) <= {0, 1, 2}


@pytest.mark.parametrize("chunk", [1, 7, 64])
@pytest.mark.parametrize("fmt", FORMATS)
def test_line_18_chunked_prefill_is_unchunked(paths: Paths, reference: Reference, fmt: str, chunk: int) -> None:
    want = reference(fmt, count=140)
    for i, name in enumerate(ISAS):
        got = text_logits(native(paths(fmt), name, 1 + (i + chunk) % 4), TEXT[:140], TABLE, [chunk])
        assert_same_bits(got, want, name)


def test_line_18_recomputing_a_prefix_rewrites_the_same_bits(paths: Paths, reference: Reference) -> None:
    """A sequence that was dropped and comes back, on other pages and in other chunks."""
    want = reference("q4_0", count=100)
    target = native(paths("q4_0"), BEST, threads=2)
    text_logits(target, TEXT[:50], TABLE[:7], [50])
    text_logits(target, TEXT[200:260], TABLE[:7], [9])  # another one takes the pages
    text_logits(target, TEXT[:50], TABLE[20:27], [11])
    assert_same_bits(text_logits(target, TEXT[50:100], TABLE[20:27], [13], 50), want[50:100])


@pytest.fixture(scope="module")
def poison(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A float32 model in which token 9's embedding is NaN and token 8's is too large for float16 keys and values."""
    tensors = tiny_llama_tensors(vocab_size=VOCAB, tied=False)
    tensors["token_embd.weight"][9] = np.nan
    for layer in range(2):
        values = tensors[f"blk.{layer}.attn_v.weight"]
        values[:, :] = np.where(np.arange(64) == 63, 1e6, values)  # what token 8 alone has
    tensors["token_embd.weight"][:, 63] = 0
    tensors["token_embd.weight"][8, 63] = 1
    for name in list(tensors):
        if name.endswith(("attn_output.weight", "ffn_down.weight")):
            tensors[name][63] = 0  # the layers leave the last channel alone
    metadata = tiny_llama_metadata(vocab_size=VOCAB, context_length=512)
    return write_gguf(tmp_path_factory.mktemp("poison") / "model.gguf", metadata, tensors, vocab_size=VOCAB)


def pass_without_a_look(target: NativeExecutor, batch: Batch) -> None:
    """Leaves its keys and values; that its activations are not finite may be a fault."""
    with suppress(EngineFault):
        target.forward(replace(batch, logit_rows=np.zeros(0, np.int32)))


@pytest.mark.parametrize("kv_type", KV_TYPES)
@pytest.mark.parametrize("name", ISAS)
def test_line_19_what_an_earlier_request_left_is_never_read(poison: Path, name: str, kv_type: KvType) -> None:
    """NaN and infinity in every slot and in every activation, then a text, a tree with holes, and a late split."""
    clean, stale = (native(poison, name, threads, kv_type) for threads in (1, 2))
    for start in range(0, 400, 40):
        pass_without_a_look(stale, chain_batch([9] * 20 + [8] * 20, TABLE, start))
    text = [token if token not in (8, 9) else 10 for token in TEXT[:270]]
    for sizes in ([33], [1, 5]):
        got, want = (text_logits(target, text[:50], TABLE, sizes) for target in (stale, clean))
        assert np.isfinite(want).all()
        assert_same_bits(got, want)
    nodes = tree_batch([1, 2, 3, 4], [-1, 0, 0, 1], TABLE, 50)
    holes = replace(
        nodes,
        slots=np.array([51, 53, 54, 55], np.int32),
        tail_mask=np.array([0b10, 0b1010, 0b10010, 0b101010], np.uint64),
    )
    assert_same_bits(stale.forward(holes).logits.copy(), clean.forward(holes).logits)
    got, want = (text_logits(target, text[50:], TABLE, [64], 50) for target in (stale, clean))
    assert_same_bits(got, want)


@pytest.mark.parametrize("kv_type", KV_TYPES)
@pytest.mark.parametrize("committed", [3, 14, 250])
def test_line_20_moved_slots_go_on_as_if_written_there(paths: Paths, committed: int, kv_type: KvType) -> None:
    node_tokens = [(7 * node + 5) % VOCAB for node in range(len(TREE_PARENTS))]
    accepted = path_to(TREE_PARENTS, len(TREE_PARENTS) - 1)
    more = TEXT[300:320]
    for i, name in enumerate(ISAS):
        table = np.random.default_rng(i).permutation(NUM_PAGES).astype(np.int32)
        target, direct = (native(paths("q8_0", "head size 24"), name, threads, kv_type) for threads in (2, 1))
        text_logits(target, TEXT[:committed], table, [64])
        target.forward(tree_batch(node_tokens, TREE_PARENTS, table, committed))
        src = committed + np.asarray(accepted, np.int32)
        dst = committed + np.arange(len(accepted), dtype=np.int32)
        target.move_slots(table, src.astype(np.int32), dst.astype(np.int32))
        text = TEXT[:committed] + [node_tokens[node] for node in accepted] + more
        want = text_logits(direct, text, TABLE, [64])[-len(more) :]
        assert_same_bits(text_logits(target, more, table, [3], len(text) - len(more)), want, name)


def test_line_21_the_size_of_the_executor_changes_nothing(paths: Paths, reference: Reference) -> None:
    """Buffers, tiles at once and the threads' shares follow max_rows and the threads; no value does."""
    want = reference("q4_1", "three heads, one KV head")
    for max_rows, threads in ((40, 5), (MAX_ROWS, 7), (512, 2)):
        target = native(paths("q4_1", "three heads, one KV head"), BEST, threads, max_rows=max_rows)
        assert_same_bits(target.forward(chain_batch(TEXT[:40], TABLE)).logits, want, max_rows)


def test_f009_a_request_among_others_answers_as_alone(paths: Paths) -> None:
    """Three sequences step by step in shared passes: a prompt, a decoding one and a tree, on pages in no order."""
    target, alone = native(paths("q4_0"), BEST, threads=2), native(paths("q4_0"), BEST)
    pages = np.random.default_rng(4).permutation(NUM_PAGES).astype(np.int32).reshape(3, -1)
    text_logits(target, TEXT[:30], pages[0], [30])
    text_logits(target, TEXT[100:121], pages[1], [21])
    tree = tree_batch([1, 2, 3], [-1, 0, 0], pages[0], 30)
    row, prompt = chain_batch([TEXT[121]], pages[1], 21), chain_batch(TEXT[40:60], pages[2])
    got = target.forward(merge_batches(prompt, row, tree)).logits
    want = [text_logits(alone, TEXT[40:60], TABLE, [20]), text_logits(alone, TEXT[100:122], TABLE, [22])[-1:]]
    want += [text_logits(alone, TEXT[:30] + path, TABLE, [32])[-1:] for path in ([1], [1, 2], [1, 3])]
    assert_same_bits(got, np.concatenate(want))
