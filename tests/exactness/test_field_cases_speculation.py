"""Field cases of speculation with second models that draft, which other tests of these cases leave out.

The target is small and random, so a draft model of other weights is nearly always wrong and the target itself always
right. Cases that hold for any drafter alike are tried here with every kind there is.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from forerun import LLM, EngineFault, SamplingParams
from forerun.types import StepRecord
from tests.helpers.gguf_files import EOS_ID, write_tiny_llama
from tests.helpers.hf_folders import tiny_tensors, write_safetensors, write_tiny_folder
from tests.helpers.scripted import answer, complete, noise, scripted

VOCAB_SIZE = 320
CONTEXT = 128
PROMPT = "the cat and the dog and the cat and the"
SEED = 7
LAWS: dict[str, dict[str, Any]] = {"greedy": {}, "sampled": {"temperature": 0.9, "seed": SEED}}
# {target}, {other} and {shuffled} are files: the target's own, other weights, and another vocabulary.
SPECS = (
    "draft:model={target},k=5,policy=fixed",
    "draft:model={target},k=3,width=2,policy=fixed",
    "draft:model={other},k=5,policy=fixed",
    "draft:model={other},k=4",
    "foreign:model={shuffled},k=5,method=tokens,policy=fixed",
    "foreign:model={shuffled},k=5,method=text,policy=fixed",
    "ngram:policy=fixed+draft:model={other},k=4,policy=fixed",
    "auto",
)
KINDS = ("draft", "draft wide", "draft wrong", "draft adaptive", "foreign tokens", "foreign text", "both", "auto")
every_spec = pytest.mark.parametrize("form", SPECS, ids=KINDS)
with_model = pytest.mark.parametrize("form", SPECS[:-1], ids=KINDS[:-1])


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {
        "target": write_tiny_llama(folder / "target.gguf", context_length=CONTEXT),
        "other": write_tiny_llama(folder / "other.gguf", context_length=CONTEXT, num_layers=1, seed=5),
        "shuffled": write_tiny_llama(
            folder / "shuffled.gguf", context_length=CONTEXT, num_layers=1, vocab_size=300, order_seed=4
        ),
    }


@pytest.fixture(scope="module")
def llm(files: dict[str, Path]) -> LLM:
    return LLM(files["target"], threads=1)


def drafts(llm: LLM, prompt: str | Sequence[int], params: SamplingParams, spec: str) -> list[tuple[int, ...]]:
    """The ids that each step proposed."""
    records: list[StepRecord] = []
    llm.generate([prompt], params, speculation=spec, on_step=records.append)
    return [record.draft.token_ids for record in records]


def free_pages(llm: LLM, spec: str) -> list[tuple[int, int]]:
    """Free pages and all pages, of the target's cache and of each draft model's."""
    speculator = llm.speculator(spec)
    assert speculator is not None
    managers = [llm.engine.pages, *(source.pages for source in speculator.sources if hasattr(source, "pages"))]
    for pages in managers:
        pages.check_integrity()
    return [(pages.num_free, pages.num_pages) for pages in managers]


@every_spec
@pytest.mark.parametrize("law", LAWS)
def test_f001_f002_f018_any_text_gives_plain_decodings_tokens(
    llm: LLM, files: dict[str, Path], form: str, law: str
) -> None:
    """One token, one word and two words again and again, a text to repeat, text around the size of a page."""
    spec = form.format(**files)
    prompts: list[str | list[int]] = [[5], [40] * 50, [40, 41] * 25, f"{PROMPT}\nrepeat: {PROMPT}", [EOS_ID, 40]]
    prompts += [[3 + i % 50 for i in range(n)] for n in (15, 16, 17)]
    params = SamplingParams(max_tokens=24, ignore_eos=True, logprobs=1, **LAWS[law])
    for prompt in prompts:
        assert answer(llm, prompt, params, spec) == answer(llm, prompt, params)


@with_model
def test_f004_penalties_count_no_rejected_draft(llm: LLM, files: dict[str, Path], form: str) -> None:
    settings: list[dict[str, Any]] = [
        {}, {"frequency_penalty": -2.0}, {"frequency_penalty": 2.0}, {"presence_penalty": -2.0},
        {"presence_penalty": 2.0}, {"repetition_penalty": 1.3},
    ]  # fmt: skip
    outputs = []
    for penalties in settings:
        params = SamplingParams(max_tokens=40, ignore_eos=True, **penalties)
        plain = answer(llm, PROMPT, params)
        outputs.append(plain.token_ids)
        wrong = scripted(plain.token_ids, noise(5, VOCAB_SIZE), VOCAB_SIZE)
        for way in (form.format(**files), wrong):
            assert answer(llm, PROMPT, params, way) == plain
    assert len(set(outputs)) >= len(outputs) - 1  # on a text that repeats nothing, two may agree


@with_model
def test_f013_f014_f017_an_end_of_text_ends_draft_and_output(llm: LLM, files: dict[str, Path], form: str) -> None:
    """At every offset of a run: the draft model, like the target, wants end-of-text from there on for ever."""
    spec = form.format(**files)
    for offset in range(7):
        params = SamplingParams(max_tokens=30, logit_bias={EOS_ID: 100.0}, min_tokens=1 + offset, logprobs=0)
        plain = answer(llm, PROMPT, params)
        assert (plain.token_ids[-1], len(plain.token_ids)) == (EOS_ID, 2 + offset)
        assert answer(llm, PROMPT, params, spec) == plain
    free = SamplingParams(max_tokens=40, logit_bias={EOS_ID: 3.0}, temperature=1.5, seed=SEED, ignore_eos=False)
    assert answer(llm, PROMPT, free, spec) == answer(llm, PROMPT, free)
    for max_tokens in (1, 2, 3, 5, 6, 7):
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        completion = complete(llm, PROMPT, params, spec)
        assert len(completion.token_ids) == completion.stats.completion_tokens == max_tokens
        assert completion.stats.accepted_tokens < max_tokens


@every_spec
def test_f015_f016_the_context_limit_ends_cleanly(llm: LLM, files: dict[str, Path], form: str) -> None:
    """The draft model's own context is as long as the target's, so that it is at its end too."""
    spec = form.format(**files)
    for num_prompt in (100, 120, 125, 126, 127):
        prompt = [7 + i % 5 for i in range(num_prompt)]
        params = SamplingParams(ignore_eos=True)
        plain = answer(llm, prompt, params)
        assert (num_prompt + len(plain.token_ids), plain.finish_reason) == (CONTEXT, "length")
        assert answer(llm, prompt, params, spec) == plain
    assert all(free == total for free, total in free_pages(llm, spec))


@every_spec
def test_f022_cancelled_requests_give_back_all_pages(llm: LLM, files: dict[str, Path], form: str) -> None:
    """Cancelled before the first step, at random steps, and at the end; then one that needs the whole cache."""
    spec = form.format(**files)
    rng = random.Random(1)
    params = SamplingParams(max_tokens=60, ignore_eos=True, temperature=1.0, seed=SEED)
    for num_events in [0, 1, *(rng.randrange(60) for _ in range(8)), 10**6]:
        stream = llm.stream(PROMPT, params, speculation=spec)
        for _, _event in zip(range(num_events), stream, strict=False):
            pass
        stream.close()  # type: ignore[attr-defined]
        assert all(free == total for free, total in free_pages(llm, spec))
    whole = [9] * (CONTEXT - 1)
    assert len(complete(llm, whole, SamplingParams(ignore_eos=True), spec).token_ids) == 1
    assert answer(llm, PROMPT, params, spec) == answer(llm, PROMPT, params)


@pytest.mark.parametrize("form", [form for form in SPECS if form.endswith("policy=fixed") and "+" not in form])
def test_f024_a_request_after_others_drafts_as_on_a_fresh_start(files: dict[str, Path], form: str) -> None:
    """How long drafts are, and whose nodes are taken, is learned on purpose; what one drafter proposes is not."""
    spec = form.format(**files)
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    long, short = [3 + i % 90 for i in range(90)], [40, 41, 42, 40, 41]
    fresh = drafts(LLM(files["target"], threads=1), short, params, spec)
    assert sum(map(len, fresh)) > 10
    llm = LLM(files["target"], threads=1)
    for _ in range(2):
        drafts(llm, long, params, spec)
        abandoned = llm.stream(long, params, speculation=spec)
        next(abandoned)
        abandoned.close()  # type: ignore[attr-defined]
        assert drafts(llm, short, params, spec) == fresh


@pytest.fixture(scope="module")
def windowed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose layers see the last 7 tokens; positions further back matter only through them."""
    folder = tmp_path_factory.mktemp("windowed") / "model"
    config = {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": 7}
    return write_tiny_folder(folder, **config)


@pytest.mark.parametrize("law", LAWS)
def test_f025_windows_of_target_and_draft_model_are_rewound(windowed: Path, law: str) -> None:
    """Texts many windows long; drafts longer than a window, right, wrong and in trees."""
    llm = LLM(windowed, threads=1)
    params = SamplingParams(max_tokens=100, ignore_eos=True, logprobs=0, **LAWS[law])
    plain = answer(llm, PROMPT, params)
    unlimited = LLM(write_tiny_folder(windowed.with_name("full")), threads=1)
    assert plain.token_ids != answer(unlimited, PROMPT, params).token_ids
    for spec in (
        f"draft:model={windowed},k=12,policy=fixed",
        f"draft:model={windowed},k=6,width=2,policy=fixed",
        f"foreign:model={windowed},k=9,policy=fixed",
        "ngram:k=16,min=1,policy=fixed",
    ):
        assert answer(llm, PROMPT, params, spec) == plain
    for k in (4, 12):
        assert answer(llm, PROMPT, params, scripted(plain.token_ids, noise(k, 300), 300)) == plain


def test_f025_a_draft_model_with_a_window_is_rewound(windowed: Path) -> None:
    """Most guesses are rejected, and each next one is what the model would write if it had never made them."""
    llm = LLM(windowed, threads=1)
    params = SamplingParams(max_tokens=100, ignore_eos=True, temperature=1.5, seed=SEED)
    spec = f"draft:model={windowed},k=9,sample=argmax,policy=fixed"
    steps = [(event.record, event.token_ids) for event in llm.stream(PROMPT, params, speculation=spec)]
    text = list(llm.encode(PROMPT))
    num_rejected = 0
    for record, token_ids in steps:
        greedy = SamplingParams(max_tokens=max(record.draft.num_nodes, 1), ignore_eos=True)
        assert complete(llm, text, greedy).token_ids[: record.draft.num_nodes] == record.draft.token_ids
        num_rejected += record.draft.num_nodes - len(record.verdict.accepted)
        text += token_ids
    assert num_rejected > 100


def test_f069_a_draft_model_of_nan_is_a_fault_that_harms_nothing_later(windowed: Path) -> None:
    broken = write_tiny_folder(windowed.with_name("broken"))
    tensors = tiny_tensors()
    tensors["model.layers.1.mlp.down_proj.weight"][3, 5] = float("nan")
    write_safetensors(broken / "model.safetensors", tensors)
    llm = LLM(write_tiny_folder(windowed.with_name("sound")), threads=1)
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    plain = answer(llm, PROMPT, params)
    for spec in (f"draft:model={broken},policy=fixed", f"foreign:model={broken},policy=fixed"):
        with pytest.raises(EngineFault, match=r"layer|row"):
            llm.generate(PROMPT, params, speculation=spec)
        assert all(free == total for free, total in free_pages(llm, spec))
        assert answer(llm, PROMPT, params) == plain
