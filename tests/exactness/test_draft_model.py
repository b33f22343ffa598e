"""A second model drafts: the tokens stay the target's own, and a model that is the target is always right (F011)."""

import random
from pathlib import Path
from typing import Any

import pytest

from forerun import LLM, RequestError, SamplingParams
from forerun.types import StepRecord
from tests.helpers.drafting import context, depths, propose
from tests.helpers.gguf_files import write_tiny_llama
from tests.helpers.scripted import answer, complete

PROMPT = "the cat and the dog and the cat and the"
SEED = 7
PARAMS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"temperature": 0.9, "seed": SEED},
    "top_k": {"temperature": 1.2, "top_k": 5, "seed": SEED},
    "top_p": {"temperature": 1.0, "top_p": 0.8, "seed": SEED},
    "min_p": {"temperature": 1.0, "min_p": 0.2, "seed": SEED},
    "penalties": {"temperature": 0.8, "repetition_penalty": 1.3, "frequency_penalty": 0.4, "seed": SEED},
    "greedy penalties": {"presence_penalty": 0.7, "repetition_penalty": 1.2},
    "bias": {"logit_bias": {40: 3.0, 50: -100.0}, "temperature": 0.7, "seed": SEED},
    "min_tokens": {"min_tokens": 20, "ignore_eos": False, "temperature": 1.0, "seed": SEED},
    "stop": {"stop": ("a", "t"), "temperature": 1.0, "seed": SEED},
}
SHAPES = ("k=4", "k=1", "k=7,policy=fixed", "k=3,width=2,policy=fixed", "k=3,sample=argmax,policy=fixed",
          "k=2,width=3,sample=argmax,policy=fixed")  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("draft")


@pytest.fixture(scope="module")
def path(folder: Path) -> Path:
    return write_tiny_llama(folder / "target.gguf")


@pytest.fixture(scope="module")
def other(folder: Path) -> Path:
    """Another model of the same vocabulary: smaller, and with other weights."""
    return write_tiny_llama(folder / "small.gguf", num_layers=1, seed=5)


@pytest.fixture(scope="module")
def llm(path: Path) -> LLM:
    return LLM(path, threads=1)


def params(name: str, **fields: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 40, "ignore_eos": True, "logprobs": 2, **PARAMS[name], **fields})


@pytest.mark.parametrize("name", PARAMS)
@pytest.mark.parametrize("shape", SHAPES)
def test_answers_are_plain_decodings(llm: LLM, path: Path, other: Path, name: str, shape: str) -> None:
    expected = answer(llm, PROMPT, params(name))
    for model in (path, other):
        assert answer(llm, PROMPT, params(name), f"draft:model={model},{shape}") == expected


@pytest.mark.parametrize("name", [name for name in PARAMS if name not in ("min_tokens", "stop")])
@pytest.mark.parametrize("shape", ["k=5,policy=fixed", "k=2,width=2,policy=fixed"])
def test_the_target_drafting_for_itself_is_always_right(llm: LLM, path: Path, name: str, shape: str) -> None:
    records: list[StepRecord] = []
    llm.generate(PROMPT, params(name), speculation=f"draft:model={path},{shape}", on_step=records.append)
    drafted = [record for record in records if record.draft.num_nodes]
    assert len(drafted) >= 6
    for record in drafted:
        assert len(record.verdict.accepted) == max(depths(record.draft))


def test_a_prompt_longer_than_a_pass_and_answers_one_after_the_other(path: Path, other: Path) -> None:
    llm = LLM(path, threads=2, chunk=5)
    spec = f"draft:model={other},k=3,policy=fixed"
    for prompt in (PROMPT, "of the", PROMPT + PROMPT):
        assert answer(llm, prompt, params("sampled"), spec) == answer(llm, prompt, params("sampled"))
    (source,) = llm.speculator(spec).sources  # type: ignore[union-attr]
    source.pages.check_integrity()  # type: ignore[attr-defined]
    assert source.pages.num_free == source.pages.num_pages  # type: ignore[attr-defined]
    assert source.memory_bytes > 0


def test_a_cancelled_request_gives_the_draft_models_pages_back(llm: LLM, other: Path) -> None:
    spec = f"draft:model={other},k=3,policy=fixed"
    stream = llm.stream(PROMPT, params("greedy"), speculation=spec)
    next(stream)
    next(stream)
    stream.close()  # type: ignore[attr-defined]
    (source,) = llm.speculator(spec).sources  # type: ignore[union-attr]
    assert source.pages.num_free == source.pages.num_pages  # type: ignore[attr-defined]


def test_f056_vocabularies_that_differ_by_padding_work(llm: LLM, folder: Path) -> None:
    larger = write_tiny_llama(folder / "larger.gguf", vocab_size=328, num_layers=1)
    spec = f"draft:model={larger},k=3,policy=fixed"
    for name in ("greedy", "sampled", "penalties"):
        assert answer(llm, PROMPT, params(name), spec) == answer(llm, PROMPT, params(name))
    small = write_tiny_llama(folder / "fewer.gguf", vocab_size=300, num_layers=1)
    wide = LLM(write_tiny_llama(folder / "wide.gguf", vocab_size=320), threads=1)
    spec = f"draft:model={small},k=3,policy=fixed"
    for name in ("greedy", "sampled", "bias"):
        # Tokens the draft model lacks end its work, not the request.
        wanted = params(name, logit_bias={310: 6.0})
        assert answer(wide, PROMPT, wanted, spec) == answer(wide, PROMPT, wanted)


def test_contexts_shorter_than_the_targets_end_the_drafting(llm: LLM, folder: Path) -> None:
    short = write_tiny_llama(folder / "short.gguf", context_length=24, num_layers=1)
    completion = complete(llm, PROMPT, params("greedy"), f"draft:model={short},k=3,policy=fixed")
    assert len(completion.token_ids) == 40
    assert answer(llm, PROMPT, params("greedy")).token_ids == completion.token_ids


@pytest.mark.parametrize("rule", ["token", "block", "rrsw", "traversal"])
@pytest.mark.parametrize("shape", ["k=4,policy=fixed", "k=4", "k=2,width=2,policy=fixed"])
def test_ratio_rules_take_its_drafts_where_they_are_exact(llm: LLM, path: Path, rule: Any, shape: str) -> None:
    spec = f"draft:model={path},{shape}"
    wanted = SamplingParams(max_tokens=30, ignore_eos=True, temperature=0.9)
    if "width" in shape and rule in ("token", "block"):
        with pytest.raises(RequestError, match="tree"):
            llm.generate(PROMPT, wanted, speculation=spec, verify=rule)
        return
    (completion,) = llm.generate(PROMPT, wanted, speculation=spec, verify=rule)
    # q is p, so every ratio is 1 and every node is kept.
    assert completion.seed is None
    assert completion.stats.target_passes < 29
    records: list[StepRecord] = []
    llm.generate(PROMPT, wanted, speculation=spec, verify=rule, on_step=records.append)
    for record in records:
        if record.draft.num_nodes:
            assert record.rule == rule
            assert len(record.verdict.accepted) == max(depths(record.draft))


def test_greedy_under_every_rule_is_greedy(llm: LLM, other: Path) -> None:
    expected = answer(llm, PROMPT, params("greedy")).token_ids
    for rule in ("token", "block", "rrsw", "traversal"):
        spec = f"draft:model={other},k=3,policy=fixed"
        (completion,) = llm.generate(PROMPT, params("greedy"), speculation=spec, verify=rule)  # type: ignore[arg-type]
        assert completion.token_ids == expected


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("draft", "draft: setting model is missing"),
        ("draft:model=x,k=64", "k is 64, but must be between 0"),
        ("draft:model=x,k=20,width=4", r"k \* width is 80"),
        ("draft:model=x,width=5", "width is 5, but must be between 1 and 4"),
        ("draft:model=x,sample=best", "must be law or argmax"),
        ("draft:model=x,policy=best", "must be adaptive or fixed"),
        ("draft:model=no/such/file.gguf", "no/such/file.gguf"),
    ],
)
def test_f019_bad_settings_are_refused(llm: LLM, spec: str, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        llm.generate(PROMPT, PARAMS_GREEDY, speculation=spec)


PARAMS_GREEDY = SamplingParams(max_tokens=2)


@pytest.mark.parametrize("shape", ["k=4", "k=3,width=2", "k=3,sample=argmax"])
@pytest.mark.parametrize("name", ["greedy", "sampled", "penalties"])
def test_after_any_history_it_proposes_what_a_fresh_one_would(llm: LLM, other: Path, name: str, shape: str) -> None:
    """Rewinding leaves nothing behind: right, wrong and half-right guesses, steps without one, several at once."""
    (source,) = llm.speculator(f"draft:model={other},{shape},policy=fixed").sources  # type: ignore[union-attr]
    rng = random.Random(3)
    prompt = llm.tokenizer.encode(PROMPT)
    ids = list(prompt)
    drafter = source.open(context(ids, params=params(name), noise_key=SEED, max_len=256))
    for step in range(25):
        proposal = propose(drafter, 12) if step % 4 else None
        # The same tokens as output: penalties count a prompt's otherwise.
        fresh = source.open(context(prompt, params=params(name), noise_key=SEED, max_len=256))
        if len(ids) > len(prompt):
            fresh.advance(ids[len(prompt) :])
        if proposal is not None:
            assert propose(fresh, 12).draft == proposal.draft
        fresh.close()
        chain = list(range(proposal.draft.num_nodes)) if proposal and "width" not in shape else []
        num_right = rng.randrange(len(chain) + 1)
        new = [proposal.draft.token_ids[node] for node in chain[:num_right]] if proposal else []  # type: ignore[union-attr]
        new += [rng.randrange(3, 320) for _ in range(rng.randrange(1, 3))]
        drafter.advance(new)
        ids += new
    drafter.close()
