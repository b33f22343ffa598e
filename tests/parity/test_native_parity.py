"""The native backend against the torch backend on the same file: the same model, up to rounding.

Float weights differ by the order of sums alone. Quantised weights are the same numbers on both sides, but the native
backend also quantises activations to 8 bits per group of 32 (A8), which torch does not; the tests bound that noise and
hold it against what a wrong scale, a swapped row or a missing minimum would do.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import pytest

import forerun._native as _native
from forerun.ops import create_executor
from forerun.ops.base import KvType
from forerun.ops.torch import TorchExecutor
from tests.helpers.gguf_files import write_tiny_llama
from tests.helpers.native import executor_config, loaded, native, text_logits
from tests.helpers.toy_llama import chain_batch, pages_for, tree_batch

ISAS = _native.available_isas()
BEST = ISAS[-1]
VOCAB = 331
TEXT = np.random.default_rng(17).integers(0, VOCAB, 300).tolist()
TABLE = pages_for(400)
DEMO = Path.home() / ".cache" / "forerun" / "models" / "smollm2-135m-instruct-q4_1.gguf"
DEMO_TEXT = (
    "The harbour office opens at seven, but the boats have usually left by then. Marta unlocks the door, sets the "
    "kettle on the small stove and reads the notes that the night watch has left on the desk. A ferry was late because "
    "of fog. Two crates of oranges were put ashore by mistake and must go back with the noon boat. She writes the time "
    "into the big book, first in pencil, then in ink, and looks out at the water while the kettle begins to sing."
)
SHAPES = {"head size 16": (64, 4, 2), "head size 24": (96, 4, 2), "three heads": (96, 3, 1)}


@cache
def torch_logits(path: Path, kv_type: KvType = "f32", quant: str = "auto", num: int = 300) -> np.ndarray:
    model = loaded(path, quant)
    config = executor_config(model, kv_type, max_rows=num)
    target = create_executor("torch", config, model.forward)
    assert isinstance(target, TorchExecutor)
    return target.forward(chain_batch(text_of(path)[:num], TABLE)).logits.copy()


@cache
def text_of(path: Path) -> list[int]:
    if path != DEMO:
        return TEXT
    return [int(token) for token in loaded(path).read_tokenizer().encode(DEMO_TEXT)]


def tiny(tmp_path: Path, fmt: str, shape: str = "head size 16", tied: bool = True) -> Path:
    hidden, heads, kv_heads = SHAPES[shape]
    return write_tiny_llama(
        tmp_path / "model.gguf",
        fmt=fmt,
        hidden_size=hidden,
        intermediate_size=160,
        num_heads=heads,
        num_kv_heads=kv_heads,
        vocab_size=VOCAB,
        tied=tied,
    )


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("fmt", ["f32", "f16"])
def test_float_weights_differ_by_the_order_of_sums(tmp_path: Path, fmt: str, shape: str, tied: bool) -> None:
    path = tiny(tmp_path, fmt, shape, tied)
    expected = torch_logits(path)
    assert expected.std() > 1
    for isa in ISAS:
        got = text_logits(native(path, isa, 2, kv_type="f32"), TEXT, TABLE, [64, 1])
        # float32 sums of about a hundred terms over two layers: 1e-5 on logits of order ten.
        np.testing.assert_allclose(got, expected, rtol=0, atol=1e-4)
        assert (got.argmax(axis=1) == expected.argmax(axis=1)).all()


@pytest.mark.parametrize("fmt", ["q4_0", "q4_1", "q8_0"])
def test_converted_to_floats_a_quantised_file_is_the_same_model(tmp_path: Path, fmt: str) -> None:
    path = tiny(tmp_path, fmt, "head size 24")
    expected = torch_logits(path)
    got = text_logits(native(path, BEST, kv_type="f32", quant="f32"), TEXT, TABLE, [64])
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("fmt", ["q4_0", "q4_1", "q8_0"])
def test_quantised_weights_differ_by_the_noise_of_8_bit_activations(tmp_path: Path, fmt: str) -> None:
    """Rounding to a step of amax / 127 has a standard deviation of 0.29 steps; the amax of 32 normal inputs is about
    2.1 of their own, so each product is off by about 0.005 of its spread. Eight products lie on the way to a logit and
    add up to 0.015; softmax over scores of spread two and the product of gate and up double that. Measured: 0.03."""
    path = tiny(tmp_path, fmt, "head size 24")
    expected = torch_logits(path)
    got = text_logits(native(path, BEST, kv_type="f32"), TEXT, TABLE, [64])
    noise, spread = got - expected, expected.std()
    agrees = got.argmax(axis=1) == expected.argmax(axis=1)
    margins = np.diff(np.sort(expected, axis=1)[:, -2:], axis=1)[:, 0]
    print(f"{fmt}: noise {noise.std() / spread:.4f} of the logits' spread, at most {np.abs(noise).max() / spread:.3f}")
    assert 0.01 * spread < noise.std() < 0.05 * spread
    assert np.abs(noise).max() < 0.5 * spread
    assert np.abs(noise.mean(axis=0)).max() < 0.03 * spread, "noise has no direction"
    assert agrees.mean() > 0.9
    assert margins[~agrees].max(initial=0) < 0.25 * spread


@pytest.mark.parametrize("kv_type", ["f16", "f32"])
def test_both_backends_store_keys_and_values_alike(tmp_path: Path, kv_type: KvType) -> None:
    """A key within rounding of the middle of two halves may round the other way: one such step is 2^-11 of it."""
    path = tiny(tmp_path, "f32")
    got = text_logits(native(path, BEST, kv_type=kv_type), TEXT, TABLE, [64])
    difference = np.abs(got - torch_logits(path, kv_type))
    assert difference.max() < (2e-3 if kv_type == "f16" else 1e-4)
    assert np.median(difference) < 1e-4


def test_trees_and_moves_agree(tmp_path: Path) -> None:
    path = tiny(tmp_path, "f32", "three heads")
    model = loaded(path)
    targets = [native(path, BEST, 2, "f32"), create_executor("torch", executor_config(model, "f32"), model.forward)]
    tree = tree_batch([5, 6, 7, 8, 9], [-1, 0, 0, 2, 3], TABLE, 50)
    logits = []
    for target in targets:
        text_logits(target, TEXT[:50], TABLE, [50])
        parts = [target.forward(tree).logits.copy()]
        target.move_slots(TABLE, np.array([50, 52, 53, 54], np.int32), np.array([50, 51, 52, 53], np.int32))
        parts.append(text_logits(target, TEXT[60:70], TABLE, [4], 54))
        logits.append(np.concatenate(parts))
    np.testing.assert_allclose(logits[0], logits[1], rtol=0, atol=1e-4)


def needs_demo() -> None:
    if not DEMO.exists():
        pytest.skip(f"the demo model is not in the cache ({DEMO}); `forerun pull demo` fetches it")


@pytest.mark.real_model
def test_the_demo_model_in_floats() -> None:
    needs_demo()
    num = 72
    expected = torch_logits(DEMO, num=num)
    got = text_logits(native(DEMO, BEST, 2, "f32", "f32"), text_of(DEMO)[:num], TABLE, [64])
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-3)
    np.testing.assert_array_equal(got.argmax(axis=1), expected.argmax(axis=1))
    print(f"largest logit difference: {np.abs(got - expected).max():.1e}")


@pytest.mark.real_model
def test_the_demo_model_with_its_own_weights() -> None:
    """A8 noise through 30 layers: the law keeps its shape, and ids change only where two were close."""
    needs_demo()
    text = text_of(DEMO)
    num = len(text)
    assert num >= 96
    expected = torch_logits(DEMO, num=num).astype(np.float64)
    got = text_logits(native(DEMO, BEST, 2, "f32"), text, TABLE, [64]).astype(np.float64)
    log_p, log_q = (x - np.logaddexp.reduce(x, axis=1, keepdims=True) for x in (expected, got))
    divergence = (np.exp(log_p) * (log_p - log_q)).sum(axis=1)
    agrees = got.argmax(axis=1) == expected.argmax(axis=1)
    margins = np.sort(expected, axis=1)[:, -1] - np.sort(expected, axis=1)[:, -2]
    print(
        f"KL {divergence.mean():.1e} on average, {divergence.max():.1e} at most; the best id agrees in "
        f"{agrees.mean():.1%} of {num} rows, elsewhere by a margin of {margins[~agrees].max(initial=0):.2f} at most"
    )
    assert divergence.mean() < 0.01
    assert divergence.max() < 0.1
    assert agrees.mean() > 0.9
    assert margins[~agrees].max(initial=0) < 0.5
