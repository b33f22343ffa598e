"""The target drafts with some of its own layers, in its own cache: the tokens stay those of plain decoding.

The layers' own logits are compared with those of a file that holds these layers and no others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import forerun._native as _native
from forerun import LLM, RequestError, SamplingParams
from forerun.errors import EngineFault
from forerun.models.decoder import forward
from forerun.models.loader import LoadedModel
from forerun.ops import create_executor
from forerun.ops.base import Executor
from forerun.ops.native import _Packer
from forerun.types import StepRecord, VerifyRule
from tests.exactness.test_draft_model import PARAMS, PROMPT, params
from tests.exactness.test_native_architectures import FORMS, written
from tests.helpers.drafting import depths
from tests.helpers.gguf_files import tiny_llama_metadata, tiny_llama_tensors, write_gguf, write_tiny_llama
from tests.helpers.hf_quantised import write_quantised
from tests.helpers.native import assert_same_bits, executor_config, loaded, native, text_logits
from tests.helpers.packers import pack_gptq
from tests.helpers.scripted import answer, complete
from tests.helpers.toy_llama import pages_for
from tests.parity.test_architectures import NUM_TOKENS, TOLERANCE, tokens_of
from tests.parity.test_hf_quantised import ACT_ORDER, ACT_ORDER_HOW, MODELS

NUM_LAYERS = 4
ISAS = _native.available_isas()
SPECS = (
    "self", "self:layers=1,k=1,policy=fixed", "self:layers=2,k=7,policy=fixed", "self:layers=3,k=4",
    "self:layers=0-0.2-3,k=3,width=2,policy=fixed", "self:layers=1-1.3-3,k=4,sample=argmax,policy=fixed",
    "self:layers=3-3,k=2,width=4,sample=argmax,policy=fixed", "self:layers=2,policy=fixed+ngram:policy=fixed",
)  # fmt: skip
CHOSEN = ([0], [0, 1], [0, 1, 2], [0, 3], [1, 3], [2], [0, 1, 2, 3])
TEXT = [int(token) for token in np.random.default_rng(5).integers(3, 320, 41)]
TABLE = pages_for(64)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("self")


@pytest.fixture(scope="module")
def path(folder: Path) -> Path:
    return write_tiny_llama(folder / "target.gguf", num_layers=NUM_LAYERS)


@pytest.fixture(scope="module")
def llm(path: Path) -> LLM:
    return LLM(path, threads=1)


@pytest.mark.parametrize("name", PARAMS)
@pytest.mark.parametrize("spec", SPECS)
def test_answers_are_plain_decodings(llm: LLM, name: str, spec: str) -> None:
    assert answer(llm, PROMPT, params(name), spec) == answer(llm, PROMPT, params(name))


@pytest.mark.parametrize("name", ["greedy", "sampled", "penalties", "stop"])
def test_on_the_torch_backend_too(path: Path, name: str) -> None:
    llm = LLM(path, backend="torch", threads=1)
    expected = answer(llm, PROMPT, params(name)).token_ids
    for spec in SPECS:
        assert answer(llm, PROMPT, params(name), spec).token_ids == expected, spec
    assert_always_right(llm, name, f"self:layers={NUM_LAYERS},k=5,policy=fixed")


@pytest.mark.parametrize("name", [name for name in PARAMS if name not in ("min_tokens", "stop")])
@pytest.mark.parametrize("shape", ["k=5", "k=2,width=2"])
def test_f011_all_layers_are_always_right(llm: LLM, name: str, shape: str) -> None:
    assert_always_right(llm, name, f"self:layers={NUM_LAYERS},{shape},policy=fixed")


def assert_always_right(llm: LLM, name: str, spec: str) -> None:
    records: list[StepRecord] = []
    llm.generate(PROMPT, params(name), speculation=spec, on_step=records.append)
    drafted = [record for record in records if record.draft.num_nodes]
    assert len(drafted) >= (6 if name != "stop" else 1)
    for record in drafted:
        assert len(record.verdict.accepted) == max(depths(record.draft))


@pytest.mark.parametrize("rule", ["token", "block", "rrsw", "traversal"])
def test_ratio_rules_take_its_drafts(llm: LLM, rule: VerifyRule) -> None:
    wanted = SamplingParams(max_tokens=30, ignore_eos=True, temperature=0.9)
    records: list[StepRecord] = []
    spec = f"self:layers={NUM_LAYERS},k=4,policy=fixed"
    llm.generate(PROMPT, wanted, speculation=spec, verify=rule, on_step=records.append)
    drafted = [record for record in records if record.draft.num_nodes]
    # q is p, so every ratio is 1 and every node is kept.
    assert all(record.rule == rule and len(record.verdict.accepted) == record.draft.num_nodes for record in drafted)
    for spec in ("self:layers=2,k=3,policy=fixed", "self:layers=2"):
        (completion,) = llm.generate(PROMPT, params("greedy"), speculation=spec, verify=rule)
        assert completion.token_ids == answer(llm, PROMPT, params("greedy")).token_ids


@pytest.mark.parametrize("spec", ["self:layers=2,k=4,policy=fixed", "self:layers=0-0.2-3,k=4,policy=fixed"])
def test_every_draft_is_what_a_request_that_starts_there_drafts(llm: LLM, spec: str) -> None:
    """Guesses leave nothing behind: neither right ones, nor wrong ones, nor more of them than were verified."""
    prompt = llm.tokenizer.encode(PROMPT)
    records: list[StepRecord] = []
    (whole,) = llm.generate([prompt], params("greedy"), speculation=spec, on_step=records.append)
    text = [*prompt, *whole.token_ids]
    accepted = [len(record.verdict.accepted) for record in records[1:-2]]
    assert 0 in accepted
    assert max(accepted) > 0
    for record in records[1:-2]:
        fresh: list[StepRecord] = []
        start = text[: record.committed_len - 1]  # the next token comes with the prompt's pass
        llm.generate([start], params("greedy", max_tokens=10), speculation=spec, on_step=fresh.append)
        assert fresh[1].draft.token_ids[: record.draft.num_nodes] == record.draft.token_ids


def test_prompts_longer_than_a_pass_and_many_pages(path: Path) -> None:
    llm = LLM(path, threads=2, chunk=5)
    for spec in ("self:layers=2,k=9,policy=fixed", "self:layers=0-0.3-3,k=20,width=3,policy=fixed"):
        for prompt in (PROMPT, "of the", PROMPT + PROMPT):
            wanted = params("sampled", max_tokens=100)
            assert answer(llm, prompt, wanted, spec) == answer(llm, prompt, wanted)
        llm.engine.pages.check_integrity()
        assert llm.engine.pages.num_free == llm.engine.pages.num_pages
        assert llm.speculator(spec).memory_bytes == 0  # type: ignore[union-attr]


def test_the_context_limit_is_reached(llm: LLM) -> None:
    wanted = params("greedy", max_tokens=None)
    prompt = TEXT * 5
    expected = answer(llm, prompt, wanted)
    assert len(prompt) + len(expected.token_ids) == llm.limits.max_model_len
    assert answer(llm, prompt, wanted, f"self:layers={NUM_LAYERS},k=9,policy=fixed") == expected


def test_few_pages_end_the_drafting_and_not_the_request(llm: LLM) -> None:
    """What a draft would take must be there for the target's pass too, which needs one slot more."""
    pages = llm.engine.pages
    pages.open(-7)
    pages.extend(-7, (pages.num_pages - 3) * 16)
    try:
        ends = {}
        for spec in ("off", f"self:layers={NUM_LAYERS},k=9,policy=fixed", "self:layers=1,k=6,width=3,policy=fixed"):
            records: list[StepRecord] = []
            with pytest.raises(RequestError, match="49 tokens need 4 pages of the KV cache, but 0 of"):
                llm.generate([TEXT[:30]], params("greedy"), speculation=spec, on_step=records.append)
            ends[spec] = [token_id for record in records for token_id in record.emitted]
        assert len(ends["off"]) == 19
        assert all(token_ids == ends["off"] for token_ids in ends.values())
    finally:
        pages.free(-7)


def test_cancelled_requests_leave_nothing(llm: LLM) -> None:
    stream = llm.stream(PROMPT, params("greedy"), speculation="self:policy=fixed")
    next(stream)
    next(stream)
    stream.close()  # type: ignore[attr-defined]
    assert llm.engine.pages.num_free == llm.engine.pages.num_pages


# ---- the layers by themselves -----------------------------------------------------------------------------------


def write_layers(path: Path, chosen: Sequence[int], **sizes: Any) -> Path:
    """A file of the target's with the chosen layers and no others."""
    tensors = tiny_llama_tensors(num_layers=NUM_LAYERS, **sizes)
    kept = {name: values for name, values in tensors.items() if not name.startswith("blk.")}
    for place, layer in enumerate(chosen):
        prefix = f"blk.{layer}."
        kept |= {
            f"blk.{place}.{name.removeprefix(prefix)}": values
            for name, values in tensors.items()
            if name.startswith(prefix)
        }
    metadata = tiny_llama_metadata(num_layers=len(chosen))
    return write_gguf(path, metadata, kept, vocab_size=320)


def variant(target: Executor, model: LoadedModel, chosen: Sequence[int]) -> Executor:
    weights = model.weights.without_data()
    return target.variant(lambda ops: forward(ops, weights, model.config, chosen))


def by_themselves(model: LoadedModel, chosen: Sequence[int]) -> LoadedModel:
    """A model of the chosen layers alone."""
    attentions = tuple(model.config.attentions[layer] for layer in chosen)
    return replace(
        model,
        config=replace(model.config, num_layers=len(chosen), attentions=attentions),
        weights=replace(model.weights, layers=tuple(model.weights.layers[layer] for layer in chosen)),
    )


@pytest.mark.parametrize("chosen", CHOSEN, ids=str)
def test_chosen_layers_have_the_bits_of_a_file_with_no_others(path: Path, tmp_path: Path, chosen: list[int]) -> None:
    small = write_layers(tmp_path / "layers.gguf", chosen)
    for isa in ISAS:
        want = text_logits(native(small, isa), TEXT, TABLE, [7])
        target = native(path, isa, threads=2)
        whole = text_logits(target, TEXT, TABLE, [11])
        layers = variant(target, loaded(path), chosen)
        assert_same_bits(text_logits(layers, TEXT, TABLE, [5, 1, 20]), want, isa)
        assert_same_bits(text_logits(target, TEXT, TABLE, [11]), whole, "the whole model, after it")


@pytest.mark.parametrize("chosen", [[0], [0, 1], [0, 1, 2]], ids=str)
def test_the_first_layers_go_on_from_what_the_whole_model_left(path: Path, tmp_path: Path, chosen: list[int]) -> None:
    want = text_logits(native(write_layers(tmp_path / "layers.gguf", chosen), ISAS[-1]), TEXT, TABLE, [41])
    target = native(path, ISAS[-1])
    layers = variant(target, loaded(path), chosen)
    text_logits(target, TEXT[:30], TABLE, [30])
    assert_same_bits(text_logits(layers, TEXT[30:], TABLE, [1], start=30), want[30:])


@pytest.mark.parametrize("name", FORMS)
def test_every_architecture_can_run_some_of_its_layers(name: str, tmp_path: Path) -> None:
    check_layers(written(FORMS[name], tmp_path / "model.gguf", "q8_0"))


def test_weights_that_read_their_inputs_in_an_order_too(tmp_path: Path) -> None:
    check_layers(write_quantised(MODELS["qwen2"](), tmp_path, ACT_ORDER, pack_gptq, **ACT_ORDER_HOW))


def check_layers(path: Path) -> None:
    """Some layers of a model as a variant have the bits of a model that has no others."""
    model, tokens, table = loaded(path), tokens_of(), pages_for(2 * NUM_TOKENS)
    for chosen in ([0], list(range(0, model.config.num_layers, 2)), list(range(1, model.config.num_layers))):
        alone = by_themselves(model, chosen)
        config = replace(executor_config(alone, "f32", max_rows=NUM_TOKENS), num_threads=2)
        want = text_logits(create_executor("native", config, alone.forward), tokens, table, [NUM_TOKENS])
        target = native(path, ISAS[-1], 2, "f32", max_rows=NUM_TOKENS)
        whole = text_logits(target, tokens, table, [NUM_TOKENS])
        layers = variant(target, model, chosen)
        assert_same_bits(text_logits(layers, tokens, table, [33, 1, 16]), want, chosen)
        assert_same_bits(text_logits(target, tokens, table, [40]), whole)


def test_the_torch_backend_computes_the_same_layers(path: Path) -> None:
    model = loaded(path)
    reference = create_executor("torch", executor_config(model, "f32"), model.forward)
    target = native(path, ISAS[-1], kv_type="f32")
    whole = text_logits(reference, TEXT, TABLE, [41])
    for chosen in CHOSEN:
        want = text_logits(variant(reference, model, chosen), TEXT, TABLE, [41])
        got = text_logits(variant(target, model, chosen), TEXT, TABLE, [41])
        np.testing.assert_allclose(got, want, rtol=0, atol=TOLERANCE)
    np.testing.assert_array_equal(text_logits(reference, TEXT, TABLE, [41]), whole)


def test_nothing_is_held_twice(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any) -> int:
        raise AssertionError("a matrix is packed again")

    model = loaded(path)
    targets: list[Executor] = [
        native(path, ISAS[-1]),
        create_executor("torch", executor_config(model), model.forward),
    ]
    alone = by_themselves(model, [1])
    small = {
        type(target): create_executor(backend, executor_config(alone), alone.forward)
        for target, backend in zip(targets, ("native", "torch"), strict=True)
    }
    monkeypatch.setattr(_Packer, "_add", refuse)
    for target in targets:
        whole = variant(target, model, range(NUM_LAYERS))
        half, quarter = variant(target, model, [0, 3]), variant(target, model, [1])
        assert whole.weight_bytes == target.weight_bytes
        assert whole.weight_bytes - half.weight_bytes == 2 * (half.weight_bytes - quarter.weight_bytes) > 0
        assert quarter.weight_bytes == small[type(target)].weight_bytes
        assert half.kv_bytes == target.kv_bytes
        assert half.fingerprint == target.fingerprint
    outline = model.weights.without_data()
    assert all(weight.data.nbytes == 0 for weight in outline.matrices())
    assert outline.head is outline.embedding


def test_a_variant_reads_bound_weights_only(path: Path) -> None:
    model = loaded(path)
    stranger = replace(model.weights.layers[0], attn_q=replace(model.weights.layers[0].attn_q, name="stranger"))
    other = replace(model.weights, layers=(stranger, *model.weights.layers[1:]))
    targets: list[Executor] = [
        native(path, ISAS[-1]),
        create_executor("torch", executor_config(model), model.forward),
    ]
    for target in targets:
        with pytest.raises(EngineFault, match="stranger"):
            target.variant(lambda ops: forward(ops, other, model.config))
        assert target.forward is not None
        text_logits(target, TEXT, TABLE, [41])  # and goes on


def test_a_faulty_layer_is_named_in_any_variant(tmp_path: Path) -> None:
    tensors = tiny_llama_tensors(num_layers=NUM_LAYERS)
    tensors["blk.2.attn_q.weight"][:] = 3e38
    path = write_gguf(tmp_path / "broken.gguf", tiny_llama_metadata(num_layers=NUM_LAYERS), tensors, vocab_size=320)
    target = native(path, ISAS[-1])
    with pytest.raises(EngineFault, match="layer 2"):
        text_logits(target, TEXT, TABLE, [41])
    with pytest.raises(EngineFault, match="layer 2"):
        text_logits(variant(target, loaded(path), [2]), TEXT, TABLE, [41])
    text_logits(variant(target, loaded(path), [0, 1, 3]), TEXT, TABLE, [41])


def test_time_is_counted_in_every_variant(path: Path) -> None:
    target = native(path, ISAS[-1])
    layers = variant(target, loaded(path), [0])
    target.program.set_profiling(True)
    text_logits(layers, TEXT, TABLE, [41])
    assert sum(target.program.profile_s) > 0.0


# ---- settings ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("self:layers=0", "layers is 0, but must be between 1 and 4"),
        ("self:layers=5", "layers is 5, but must be between 1 and 4"),
        ("self:layers=0-4", "layers of this target are 0 to 3"),
        ("self:layers=9-9", "layers of this target are 0 to 3"),
        ("self:layers=2-1", "each layer once and in ascending order"),
        ("self:layers=0-1.1-2", "each layer once and in ascending order"),
        ("self:layers=2-3.0-1", "each layer once and in ascending order"),
        ("self:layers=all", "ranges of layers such as"),
        ("self:layers=0-1.3", "ranges of layers such as"),
        ("self:layers=-1", "ranges of layers such as"),
        ("self:layers=²", "ranges of layers such as"),
        ("self:k=64", "self: k is 64, but must be between 0"),
        ("self:k=20,width=4", r"self: k \* width is 80"),
        ("self:width=5", "self: width is 5, but must be between 1 and 4"),
        ("self:sample=best", "self: sample is 'best', but must be law or argmax"),
        ("self:policy=best", "self: policy is 'best', but must be adaptive or fixed"),
    ],
)
def test_f019_bad_settings_are_refused(llm: LLM, spec: str, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        llm.generate(PROMPT, SamplingParams(max_tokens=2), speculation=spec)


def test_a_fixed_length_is_kept_whatever_is_accepted(llm: LLM) -> None:
    records: list[StepRecord] = []
    llm.generate(PROMPT, params("greedy"), speculation="self:layers=1,k=3,width=2,policy=fixed", on_step=records.append)
    drafts = [record.draft for record in records[1:] if record.committed_len < 40]
    assert len(drafts) > 10
    assert {draft.num_nodes for draft in drafts} == {6}
    assert {draft.origins for draft in drafts} == {("self",) * 6}


def test_counted_passes_are_the_drafted_nodes(llm: LLM) -> None:
    stats = complete(llm, PROMPT, params("greedy"), f"self:layers={NUM_LAYERS},k=3,policy=fixed").stats
    assert stats.accepted_tokens == stats.drafted_tokens == 39 - stats.target_passes
