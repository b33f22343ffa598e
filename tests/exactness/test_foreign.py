"""A model of another vocabulary drafts: the tokens stay the target's own, and its text is followed without drift."""

import random
from pathlib import Path
from typing import Any

import pytest

from forerun import LLM, RequestError, SamplingParams
from forerun.drafters.vocabulary import SharedTokens
from forerun.models.bound import BindSettings, bind_model, open_model
from forerun.types import StepRecord
from tests.exactness.test_draft_model import PARAMS, PROMPT, SEED, params
from tests.helpers.drafting import context, propose
from tests.helpers.gguf_files import write_tiny_llama
from tests.helpers.scripted import answer

METHODS = ("tokens", "text")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("foreign")


@pytest.fixture(scope="module")
def llm(folder: Path) -> LLM:
    return LLM(write_tiny_llama(folder / "target.gguf"), threads=1)


@pytest.fixture(scope="module")
def shuffled(folder: Path) -> Path:
    """Other ids, and twenty tokens fewer."""
    return write_tiny_llama(folder / "shuffled.gguf", vocab_size=300, num_layers=1, order_seed=4)


@pytest.mark.parametrize("name", PARAMS)
@pytest.mark.parametrize("method", METHODS)
def test_answers_are_plain_decodings(llm: LLM, shuffled: Path, name: str, method: str) -> None:
    expected = answer(llm, PROMPT, params(name))
    for policy in ("fixed", "adaptive"):
        spec = f"foreign:model={shuffled},k=4,method={method},policy={policy}"
        assert answer(llm, PROMPT, params(name), spec) == expected


@pytest.mark.parametrize("method", METHODS)
def test_chats_with_control_tokens_and_odd_characters(llm: LLM, shuffled: Path, method: str) -> None:
    messages = [{"role": "user", "content": "na\u00efve \U0001f600 caf\u00e9"}]
    spec = f"foreign:model={shuffled},k=5,method={method},policy=fixed"
    for seed in range(4):
        wanted = SamplingParams(max_tokens=40, ignore_eos=True, temperature=1.5, seed=seed)
        assert llm.chat(messages, wanted, speculation=spec).token_ids == llm.chat(messages, wanted).token_ids


def test_shared_tokens_are_those_of_equal_bytes(llm: LLM, shuffled: Path) -> None:
    settings = BindSettings("native", "cpu", "auto", "f16", 1, 64)
    draft = bind_model(open_model(shuffled, settings, None), settings, 64).tokenizer
    shared = SharedTokens(llm.tokenizer, draft, "shuffled", 320)
    assert len(shared.draft_id_of) == 300
    for target_id, draft_id in shared.draft_id_of.items():
        assert llm.tokenizer.token_bytes(target_id) == draft.token_bytes(draft_id)
        assert shared.token(target_id) == (draft_id,)
    missing = next(i for i in range(320) if i not in shared.draft_id_of)
    spelled = b"".join(draft.token_bytes(i) for i in shared.token(missing))
    assert spelled == llm.tokenizer.token_bytes(missing)


def test_the_same_model_under_other_ids_is_nearly_always_right(llm: LLM, folder: Path) -> None:
    """With its rows in the order of its ids the shuffled model computes what the target does."""
    same = write_permuted(folder / "same.gguf")
    records: list[StepRecord] = []
    for name in ("greedy", "sampled", "penalties"):
        llm.generate(PROMPT, params(name), speculation=f"foreign:model={same},k=4,policy=fixed", on_step=records.append)
    drafted = [record for record in records if record.draft.num_nodes]
    assert sum(len(record.verdict.accepted) for record in drafted) > 0.95 * sum(r.draft.num_nodes for r in drafted)


def write_permuted(path: Path) -> Path:
    """The target with its ids permuted as `order_seed=4` permutes them: embedding rows move with their tokens."""
    from tests.helpers.gguf_files import (
        SPECIAL_TOKENS,
        tiny_llama_metadata,
        tiny_llama_tensors,
        vocabulary,
        write_gguf,
    )

    tensors = tiny_llama_tensors()
    normal = vocabulary(320)[0][len(SPECIAL_TOKENS) :]
    order = list(range(len(normal)))
    random.Random(4).shuffle(order)
    rows = [*range(len(SPECIAL_TOKENS)), *(len(SPECIAL_TOKENS) + i for i in order)]
    tensors["token_embd.weight"] = tensors["token_embd.weight"][rows]
    return write_gguf(path, tiny_llama_metadata(), tensors, vocab_size=320, order_seed=4)


@pytest.mark.parametrize("method", METHODS)
def test_after_any_history_it_proposes_what_a_fresh_one_would(llm: LLM, shuffled: Path, method: str) -> None:
    # Two sources, because the cache of one has room for one request.
    source, other = (
        llm.speculator(f"foreign:model={shuffled},k=4,method={method},policy={policy}").sources[0]  # type: ignore[union-attr]
        for policy in ("fixed", "adaptive")
    )
    rng = random.Random(5)
    prompt = llm.tokenizer.encode(PROMPT)
    output: list[int] = []
    wanted: dict[str, Any] = {"params": params("sampled"), "noise_key": SEED, "max_len": 256}
    drafter = source.open(context(prompt, **wanted))
    num_equal = num_steps = 0
    while len(output) < 120:
        if rng.random() < 0.8:
            proposal = propose(drafter, 12).draft
            fresh = other.open(context(prompt, **wanted))
            for token_id in output:
                fresh.advance([token_id])
            num_equal += propose(fresh, 12).draft == proposal
            num_steps += 1
            fresh.close()
            right = proposal.token_ids[: rng.randrange(len(proposal.token_ids) + 1)]
        else:
            right = ()
        new = [*right, rng.randrange(3, 320)]
        drafter.advance(new)
        output += new
    drafter.close()
    # Spelling may be settled at other places, which changes how the text is cut; mostly it is the same.
    assert num_equal == num_steps if method == "tokens" else num_equal > 0.8 * num_steps
    assert source.pages.num_free == source.pages.num_pages  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("foreign", "foreign: setting model is missing"),
        ("foreign:model=x,k=64", "k is 64"),
        ("foreign:model=x,method=best", "must be tokens or text"),
        ("foreign:model=x,policy=best", "must be adaptive or fixed"),
    ],
)
def test_f019_bad_settings_are_refused(llm: LLM, spec: str, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        llm.generate(PROMPT, SamplingParams(max_tokens=2), speculation=spec)


def test_a_draft_model_of_another_vocabulary_names_what_differs(llm: LLM, shuffled: Path) -> None:
    with pytest.raises(
        RequestError, match=r"\d+ of 300 ids differ, first 3, '.*' in the target and .* or use drafter foreign"
    ):
        llm.generate(PROMPT, SamplingParams(max_tokens=2), speculation=f"draft:model={shuffled}")
