"""RoPE frequencies from metadata, against figures worked out by hand, and what is refused by name (F058)."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from forerun.engine.llm import LLM
from forerun.errors import LoadError
from forerun.models.config import Keys
from forerun.models.gguf import read_gguf
from forerun.models.loader import LoadedModel
from forerun.models.rope import Rope, plain_rope, read_rope
from tests.helpers.gguf_files import write_gguf

DIM, CONTEXT = 8, 512
ONES = np.ones(DIM // 2, np.float32)


def rope_of(
    tmp_path: Path, tensors: dict[str, np.ndarray] | None = None, max_len: int = CONTEXT, **settings: Any
) -> Rope:
    metadata = {f"llama.rope.{key}": value for key, value in settings.items()}
    path = write_gguf(tmp_path / "model.gguf", metadata, tensors or {"any": ONES})
    return read_rope(Keys(read_gguf(path)), DIM, CONTEXT, max_len)


def test_plain_frequencies(tmp_path: Path) -> None:
    assert plain_rope(10000.0, 8).inv_freq == pytest.approx((1, 0.1, 0.01, 0.001), rel=1e-15)
    assert rope_of(tmp_path) == plain_rope(10000.0, 8)
    assert rope_of(tmp_path, **{"freq_base": 16.0}).inv_freq == (1, 0.5, 0.25, 0.125)
    neutral = {"scaling.type": "none", "scaling.factor": 1.0, "scaling.attn_factor": 1.0, "scale_linear": 1.0}
    assert rope_of(tmp_path, **neutral) == plain_rope(10000.0, 8)


@pytest.mark.parametrize(
    "settings",
    [
        {"scaling.type": "linear", "scaling.factor": 4.0},
        {"scaling.factor": 4.0},  # a file without a type means linear
        {"scale_linear": 4.0},  # the key's older name
        {"scaling.factor": 4.0, "scale_linear": 2.0},
    ],
)
def test_linear(tmp_path: Path, settings: dict[str, Any]) -> None:
    assert rope_of(tmp_path, **{"freq_base": 16.0} | settings) == Rope((1 / 4, 0.5 / 4, 0.25 / 4, 0.125 / 4))


def test_frequency_factors(tmp_path: Path) -> None:
    factors = {"rope_freqs.weight": np.array([1, 1, 2, 8], np.float32)}
    assert rope_of(tmp_path, factors, **{"freq_base": 16.0}).inv_freq == (1, 0.5, 0.125, 0.125 / 8)


def test_a_factor_on_cos_and_sin(tmp_path: Path) -> None:
    assert rope_of(tmp_path, **{"scaling.attn_factor": 1.5}).magnitude == 1.5


# The pair that turns beta times within L positions is 8 ln(L / 2 pi beta) / 2 ln 16: within 202 positions 2.007 for 8
# turns and 6.008 for a half. The ramp lies between pairs 2 and 7.
YARN = {
    "freq_base": 16.0,
    "scaling.type": "yarn",
    "scaling.factor": 4.0,
    "scaling.original_context_length": 202,
    "scaling.yarn_beta_fast": 8.0,
    "scaling.yarn_beta_slow": 0.5,
}


def test_yarn(tmp_path: Path) -> None:
    rope = rope_of(tmp_path, **YARN)
    assert rope.inv_freq[:3] == (1, 0.5, 0.25)
    assert rope.inv_freq[3] == pytest.approx(0.125 * (0.8 + 0.2 / 4))
    assert rope.magnitude == pytest.approx(0.1 * math.log(4) + 1)


def test_yarn_settings(tmp_path: Path) -> None:
    assert rope_of(tmp_path, **YARN | {"scaling.yarn_attn_factor": 0.75}).magnitude == 0.75
    assert rope_of(tmp_path, **YARN | {"scaling.yarn_attn_factor": 0.75, "scaling.attn_factor": 2.0}).magnitude == 1.5
    assert rope_of(tmp_path, **YARN | {"scaling.factor": 0.5}).magnitude == 1.0
    half = rope_of(tmp_path, **YARN | {"scaling.yarn_ext_factor": 0.5})
    assert half.inv_freq[:2] == (0.5 + 0.5 / 4, 0.5 * (0.5 + 0.5 / 4))
    assert rope_of(tmp_path, **YARN | {"scaling.yarn_log_multiplier": 0.0}) == rope_of(tmp_path, **YARN)


LONGROPE = {"freq_base": 16.0, "scaling.attn_factor": 1.25, "scaling.original_context_length": 128}
BOTH = {"rope_factors_long.weight": 4 * ONES, "rope_factors_short.weight": 2 * ONES}


@pytest.mark.parametrize(("max_len", "factor"), [(1, 2), (128, 2), (129, 4), (512, 4)])
@pytest.mark.parametrize("stated", [{}, {"scaling.type": "longrope"}])
def test_longrope_goes_by_the_length_limit(tmp_path: Path, max_len: int, factor: float, stated: dict[str, Any]) -> None:
    rope = rope_of(tmp_path, BOTH, max_len, **LONGROPE | stated)
    assert rope == Rope((1 / factor, 0.5 / factor, 0.25 / factor, 0.125 / factor), 1.25)


@pytest.mark.parametrize(("limit", "expected"), [(100, 100), (None, 8192)])
def test_the_engine_tells_its_length_limit(
    tmp_path: Path, limit: int | None, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = []

    def load(path: Path, quant: str, max_len: int, must_apply: bool) -> LoadedModel:
        limits.append(max_len)
        raise LoadError("seen enough")

    monkeypatch.setattr("forerun.models.bound.load_model", load)
    path = write_gguf(tmp_path / "model.gguf", {}, {"any": ONES})
    with pytest.raises(LoadError, match="seen enough"):
        LLM(path, max_model_len=limit)
    assert limits == [expected]


@pytest.mark.parametrize(
    ("settings", "tensors", "message"),
    [
        ({"scaling.type": "dynamic"}, {}, "llama.rope.scaling.type is 'dynamic', which is not supported"),
        ({"scaling.type": ["none"]}, {}, "llama.rope.scaling.type is a list of 1, which is not supported"),
        ({"scaling.type": "none", "scaling.factor": 4.0}, {}, "factor is 4.0, but RoPE scaling of type none has none"),
        ({"scaling.factor": 0.0}, {}, "scaling.factor is 0.0, but must be a number from 1e-13 to"),
        ({"scaling.type": "yarn"}, {}, "scaling.factor is missing"),
        ({"scaling.type": "yarn", "scaling.factor": 4.0}, {}, "original_context_length is missing"),
        (YARN | {"freq_base": 1.0}, {}, "rope.freq_base is 1.0, but YaRN needs more than 1"),
        (YARN | {"scaling.yarn_ext_factor": 0.0}, {}, "yarn_ext_factor is 0.0, but must be a number from 1e-13 to"),
        ({"scaling.yarn_beta_fast": 32.0}, {}, "yarn_beta_fast is given, but only RoPE scaling of type yarn has it"),
        ({"scaling.type": "longrope", "scaling.attn_factor": 1.0}, {}, "tensor rope_factors_short.weight is missing"),
        ({}, BOTH, "scaling.attn_factor is missing"),
        (LONGROPE, {"rope_factors_short.weight": ONES}, "tensor rope_factors_long.weight is missing"),
        (LONGROPE | {"scaling.type": "yarn"}, BOTH, "type is 'yarn', but the file holds RoPE factors"),
        (LONGROPE | {"scaling.factor": 4.0}, BOTH, "factor is 4.0, but RoPE scaling of type longrope has none"),
        ({"scaling.type": "linear"}, {"rope_freqs.weight": ONES}, "type is 'linear', but the file holds RoPE factors"),
        ({"scaling.factor": 2.0}, {"rope_freqs.weight": ONES}, "factor is 2.0, but RoPE scaling of type factors has"),
        ({}, {"rope_freqs.weight": ONES[:3]}, r"rope_freqs.weight has shape \(1, 3\), but must have \(1, 4\)"),
        ({}, {"rope_freqs.weight": 0 * ONES}, "rope_freqs.weight holds a factor that is not from 1e-13 to"),
        ({}, {"rope_freqs.weight": np.nan * ONES}, "holds a factor that is not from 1e-13 to"),
    ],
)
def test_f058_what_is_not_understood_is_refused(
    tmp_path: Path, settings: dict[str, Any], tensors: dict[str, np.ndarray], message: str
) -> None:
    with pytest.raises(LoadError, match=message) as caught:
        rope_of(tmp_path, tensors, **settings)
    assert "model.gguf" in str(caught.value)
