"""Recording a forward pass, and giving its values buffers: nothing alive is ever overwritten."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.errors import LoadError
from forerun.ops.base import AttentionSpec, Weight
from forerun.ops.recorder import OP_NAMES, HeadNorms, Instr, Recorder, Value, assign_buffers
from tests.helpers.toy_llama import ToyLlama, f32_weight

WIDTHS = (32, 64, 96)
NORM = np.ones(96, np.float32)
EPS = 1e-5


def weight(outputs: int, inputs: int) -> Weight:
    return f32_weight("w", np.zeros((outputs, inputs)))


@st.composite
def programs(draw: st.DrawFn) -> list[Instr]:
    """Any forward pass that can be written in the operations, also ones that no model would write."""
    recorder = Recorder()
    values = [recorder.embed(weight(5, draw(st.sampled_from(WIDTHS))))]
    for _ in range(draw(st.integers(0, 25))):
        x, width = draw(st.sampled_from(values)), draw(st.sampled_from(WIDTHS))
        kind = draw(st.sampled_from(["embed", "linear", "linear_add", "gated", "attention"]))
        if kind == "embed":
            values.append(recorder.embed(weight(5, width)))
        elif kind == "linear":
            values.append(recorder.norm_linear(x, NORM, EPS, (weight(width, x.width),)))
        elif kind == "gated":
            gate = weight(width, x.width)
            values.append(recorder.norm_gated(x, NORM, EPS, gate, gate, "silu"))
        elif kind == "attention":
            third = weight(width // 2, x.width)
            qkv = recorder.norm_linear(x, NORM, EPS, (third, third, third))
            values.append(recorder.attention(qkv, 0, AttentionSpec(1, 1, width // 2, 1.0, "neox", ())))
        else:
            residual = draw(st.sampled_from(values))
            values.append(recorder.linear_add(x, weight(residual.width, x.width), residual))
    recorder.logits(draw(st.sampled_from(values)), NORM, EPS, weight(7, 32))
    return recorder.instrs


def run_in_buffers(instrs: list[Instr]) -> tuple[list[int], dict[int, int]]:
    """Replays a program on buffers that know which value they hold; every read must find its value."""
    widths, buffer_of = assign_buffers(instrs)
    held: list[int | None] = [None] * len(widths)
    for instr in instrs:
        for value in (instr.x, instr.residual):
            if value is not None:
                assert held[buffer_of[value.index]] == value.index, f"{instr.op} reads a value that was overwritten"
        if instr.out is None:
            continue
        out = buffer_of[instr.out.index]
        assert widths[out] == instr.out.width
        # Rows of x are read again while outputs are written; the residual is read once, element by element.
        assert instr.x is None or out != buffer_of[instr.x.index], f"{instr.op} writes over its input"
        if instr.residual is not None and out == buffer_of[instr.residual.index]:
            assert instr.op == "linear_add"
            assert instr.residual is not instr.x
        held[out] = instr.out.index
    return widths, buffer_of


@settings(max_examples=80, deadline=None)
@given(programs())
def test_no_value_is_overwritten_while_it_is_needed(instrs: list[Instr]) -> None:
    widths, buffer_of = run_in_buffers(instrs)
    made = [instr.out.index for instr in instrs if instr.out is not None]
    assert sorted(buffer_of) == made
    assert set(buffer_of.values()) == set(range(len(widths)))


@settings(max_examples=50, deadline=None)
@given(programs())
def test_buffers_are_used_again(instrs: list[Instr]) -> None:
    """No more buffers of a width than values of it are alive at once, counting what an instruction reads and writes."""
    widths, _ = assign_buffers(instrs)
    last_use: dict[int, int] = {}
    first: dict[int, int] = {}
    value_of: dict[int, Value] = {}
    for i, instr in enumerate(instrs):
        for value in (instr.x, instr.residual, instr.out):
            if value is not None:
                last_use[value.index] = i
                first.setdefault(value.index, i)
                value_of[value.index] = value
    # A value that nothing reads keeps its buffer, which costs memory and is no fault; models have none.
    read = {v.index for instr in instrs for v in (instr.x, instr.residual) if v is not None}
    for width in set(widths):
        alive = [
            sum(value_of[v].width == width and first[v] <= i and (last_use[v] >= i or v not in read) for v in first)
            for i in range(len(instrs))
        ]
        assert widths.count(width) <= max(alive)


def test_a_llama_needs_four_buffers_whatever_its_depth() -> None:
    for num_layers in (1, 2, 9):
        toy, recorder = ToyLlama(num_layers=num_layers), Recorder()
        toy.build(recorder)
        widths, _ = run_in_buffers(recorder.instrs)
        assert sorted(widths) == sorted([toy.hidden_size, 8 * toy.head_dim, 4 * toy.head_dim, toy.ffn_size])


def test_the_residual_is_added_in_place_only_when_it_dies() -> None:
    recorder = Recorder()
    x = recorder.embed(weight(5, 32))
    inner = recorder.norm_linear(x, NORM, EPS, (weight(32, 32),))
    added = recorder.linear_add(inner, weight(32, 32), x)
    _, buffer_of = assign_buffers(recorder.instrs)
    assert buffer_of[added.index] == buffer_of[x.index]
    recorder.logits(x, NORM, EPS, weight(7, 32))  # x lives on
    _, buffer_of = assign_buffers(recorder.instrs)
    assert buffer_of[added.index] not in (buffer_of[x.index], buffer_of[inner.index])


def test_a_map_that_adds_its_own_input_writes_elsewhere() -> None:
    recorder = Recorder()
    x = recorder.embed(weight(5, 32))
    added = recorder.linear_add(x, weight(32, 32), x)
    recorder.logits(added, NORM, EPS, weight(7, 32))
    _, buffer_of = assign_buffers(recorder.instrs)
    assert buffer_of[added.index] != buffer_of[x.index]


def record_toy() -> tuple[ToyLlama, list[Instr]]:
    toy, recorder = ToyLlama(num_layers=2), Recorder()
    toy.build(recorder)
    return toy, recorder.instrs


def test_instructions_say_what_the_model_said() -> None:
    toy, instrs = record_toy()
    layer = ["linear", "attention", "linear_add", "gated", "linear_add"]
    assert [instr.op for instr in instrs] == ["embed", *layer, *layer, "logits"]
    assert {instr.op for instr in instrs} == set(OP_NAMES) - {"norm_add"}
    first, last = instrs[1], instrs[-1]
    assert first.weights == tuple(toy.weights[f"0.{part}"] for part in "qkv")
    assert first.norm is toy.norms["0.attn"]
    assert last.weights == (toy.weights["head"],)
    assert (last.out, last.eps) == (None, 1e-5)
    # The map that feeds attention knows the layer and its heads, as attention does; the others do not.
    assert [instr.layer for instr in instrs] == [-1, 0, 0, -1, -1, -1, 1, 1, -1, -1, -1, -1]
    assert [instr.spec == toy.attention for instr in instrs] == [instr.layer >= 0 for instr in instrs]


@pytest.mark.parametrize("num_weights", [1, 2])
def test_attention_over_anything_but_q_k_and_v_is_refused(num_weights: int) -> None:
    recorder = Recorder()
    x = recorder.embed(weight(5, 32))
    qkv = recorder.norm_linear(x, NORM, EPS, (weight(48, 32),) * num_weights)
    with pytest.raises(LoadError, match="attention must read one linear map of q, k and v"):
        recorder.attention(qkv, 0, ToyLlama().attention)


def test_a_map_serves_one_attention() -> None:
    recorder = Recorder()
    x = recorder.embed(weight(5, 32))
    qkv = recorder.norm_linear(x, NORM, EPS, (weight(16, 32),) * 3)
    recorder.attention(qkv, 0, ToyLlama().attention)
    with pytest.raises(LoadError, match="attention must read one linear map"):
        recorder.attention(qkv, 1, ToyLlama().attention)


def test_what_an_architecture_adds_is_in_its_instructions() -> None:
    recorder, bias = Recorder(), np.ones(96, np.float32)
    spec = AttentionSpec(2, 2, 16, 0.5, "neox", (1.0,) * 8, window=3)
    x = recorder.embed(weight(5, 32), 2.0)
    qkv = recorder.norm_linear(x, None, EPS, (weight(32, 32), weight(32, 32), weight(32, 32)), bias)
    attended = recorder.attention(qkv, 0, spec, NORM, None, 1e-6)
    added = recorder.norm_add(attended, NORM, EPS, x)
    recorder.norm_gated(added, None, EPS, weight(64, 32), weight(64, 32), "gelu_tanh")
    embed, linear, attention, norm_add, gated = recorder.instrs
    assert (embed.scale, linear.norm, linear.spec, attention.spec) == (2.0, None, spec, spec)
    assert linear.bias is bias
    assert linear.head_norms == HeadNorms(NORM, None, 1e-6)
    assert (norm_add.op, norm_add.residual, norm_add.norm is NORM) == ("norm_add", x, True)
    assert (gated.act, gated.norm) == ("gelu_tanh", None)
