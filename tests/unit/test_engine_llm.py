"""The `LLM` class on a tiny random model file: what it accepts, refuses and returns."""

import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import forerun
from forerun import LLM, ConfigError, RequestError, SamplingParams
from forerun.drafters.spec import Speculation
from forerun.types import StepRecord
from tests.helpers.engines import tree
from tests.helpers.gguf_files import write_tiny_llama
from tests.helpers.model_drafter import SharedTreeOptions
from tests.helpers.scripted import scripted

PROMPT = "the cat and the dog and the cat and the"
PARAMS = SamplingParams(max_tokens=24, ignore_eos=True, logprobs=2)
SHARED_TREES = Speculation((SharedTreeOptions(),))
MESSAGES = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("llm") / "tiny.gguf")


@pytest.fixture(scope="module")
def llm(path: Path) -> LLM:
    return LLM(path, threads=1)


def test_one_prompt_gives_a_list_of_one(llm: LLM) -> None:
    ids = llm.tokenizer.encode(PROMPT)
    for prompt in (PROMPT, ids):
        (completion,) = llm.generate(prompt, PARAMS)
        assert completion.prompt_token_ids == tuple(ids)
        assert len(completion.token_ids) == completion.stats.completion_tokens == 24
        assert completion.logprobs is not None
        assert [entry.token_id for entry in completion.logprobs] == list(completion.token_ids)
        assert completion.text == llm.tokenizer.decode(completion.token_ids)
        assert completion.finish_reason == "length"
        assert completion.seed is not None


def test_several_prompts_keep_their_order_and_answers(llm: LLM) -> None:
    prompts = [PROMPT, [5, 6, 7], "something else"]
    together = llm.generate(prompts, PARAMS)
    assert [c.token_ids for c in together] == [llm.generate(p, PARAMS)[0].token_ids for p in prompts]
    assert llm.generate([[5, 6, 7]], PARAMS)[0].token_ids == together[1].token_ids


@pytest.mark.parametrize("extra", [{}, {"temperature": 1.0, "seed": 3}, {"temperature": 1.0, "seed": 3, "top_k": 20}])
def test_f001_f005_speculation_and_chunks_change_nothing(path: Path, llm: LLM, extra: dict[str, Any]) -> None:
    params = SamplingParams(max_tokens=40, ignore_eos=True, logprobs=2, **extra)
    (plain,) = llm.generate(PROMPT, params)
    for other in (llm, LLM(path, threads=2, chunk=3)):
        for spec in ("ngram:k=8,policy=fixed", "ngram:k=2", "off"):
            (completion,) = other.generate(PROMPT, params, speculation=spec)
            assert completion.token_ids == plain.token_ids
            assert completion.logprobs == plain.logprobs
            assert completion.text == plain.text


@pytest.mark.parametrize("backend", ["native", "torch"])
def test_trees_move_what_was_accepted(path: Path, backend: str) -> None:
    model = LLM(path, backend=backend, kv="f32", threads=1)
    params = SamplingParams(max_tokens=24, ignore_eos=True, logprobs=2)
    prompt = model.tokenizer.encode(PROMPT)
    (plain,) = model.generate(prompt, params)
    speculation = scripted(plain.token_ids, tree(12, 4), model.limits.vocab_size)
    (drafted,) = model.generate(prompt, params, speculation=speculation)
    assert drafted.token_ids == plain.token_ids
    assert drafted.stats.accepted_tokens > 5
    if backend == "native":
        assert drafted.logprobs == plain.logprobs


def test_chat_uses_the_template(llm: LLM) -> None:
    completion = llm.chat(MESSAGES, PARAMS)
    assert llm.tokenizer.decode(completion.prompt_token_ids, skip_special=False) == (
        "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    )
    assert completion.token_ids == llm.generate(llm.encode_messages(MESSAGES), PARAMS)[0].token_ids


@pytest.mark.parametrize("prompt", [PROMPT, [5, 6, 7], MESSAGES])
def test_stream_gives_what_generate_gives(llm: LLM, prompt: Any) -> None:
    records: list[StepRecord] = []
    events = list(llm.stream(prompt, PARAMS, speculation="ngram", on_step=records.append))
    completion = events[-1].completion
    assert completion is not None
    assert [event.record for event in events] == records
    assert tuple(t for event in events for t in event.token_ids) == completion.token_ids
    assert "".join(event.text for event in events) == completion.text
    assert tuple(token.logprob for event in events for token in event.tokens) == completion.logprobs
    expected = llm.chat(prompt, PARAMS) if prompt is MESSAGES else llm.generate(prompt, PARAMS)[0]
    assert completion.token_ids == expected.token_ids


@pytest.mark.parametrize("spec", ["prediction", "prediction:policy=fixed", "auto", "ngram+prediction"])
def test_a_prediction_changes_the_speed_alone(llm: LLM, spec: str) -> None:
    (plain,) = llm.generate(PROMPT, PARAMS)
    for prediction in (plain.text, "something else", ""):
        options: dict[str, Any] = {"speculation": spec, "prediction": prediction}
        (completion,) = llm.generate(PROMPT, PARAMS, **options)
        *_, last = llm.stream(PROMPT, PARAMS, **options)
        assert last.completion is not None
        assert completion.token_ids == last.completion.token_ids == plain.token_ids
        assert completion.logprobs == last.completion.logprobs == plain.logprobs
        chat = llm.chat(MESSAGES, PARAMS, **options)
        assert chat.token_ids == llm.chat(MESSAGES, PARAMS).token_ids


def test_a_prediction_is_read_once_and_as_the_output_has_it(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a begin token, without a space that the text doesn't have, and as the first draft of every prompt."""
    read: list[Any] = []
    encode = llm.tokenizer.encode
    monkeypatch.setattr(llm.tokenizer, "encode", lambda text, **how: read.append((text, how)) or encode(text, **how))
    text = "the cat and the dog"
    ids = encode(text, add_bos=False, continues=True)
    params = SamplingParams(max_tokens=8, logit_bias={ids[0]: 100.0})  # so that the output begins with the text
    records: list[StepRecord] = []
    prompts = [[5, 6], [7, 8]]
    llm.generate(prompts, params, speculation="prediction:policy=fixed", prediction=text, on_step=records.append)
    assert read == [(text, {"add_bos": False, "continues": True})]
    assert [record.draft.token_ids for record in records if record.step == 1] == [tuple(ids[1:7])] * 2


@pytest.mark.parametrize(
    ("prediction", "spec", "message"),
    [
        ("text", "off", "a prediction is given, but speculation off has no drafter that uses it"),
        ("text", "ngram", "speculation ngram:k=8.* has no drafter that uses it; choose prediction or auto"),
        ("text", "prediction:k=0", "speculation off has no drafter"),
        (5, "prediction", "prediction is 5, but must be a text"),
        ([1, 2], "auto", r"prediction is \[1, 2\], but must be a text"),
        ("half \ud800", "auto", "prediction holds a lone surrogate"),
        ("dog " * 2000, "auto", "the prediction has .* tokens, but must have at most the context limit of 256"),
    ],
)
def test_predictions_that_cannot_be_used_are_refused(llm: LLM, prediction: Any, spec: str, message: str) -> None:
    for ask in (llm.generate, llm.stream):
        with pytest.raises(RequestError, match=message) as error:
            ask(PROMPT, PARAMS, speculation=spec, prediction=prediction)
        assert error.value.param == "prediction"
    with pytest.raises(RequestError, match=message):
        llm.chat(MESSAGES, PARAMS, speculation=spec, prediction=prediction)


def test_a_closed_stream_gives_its_pages_back_and_disturbs_nobody(llm: LLM) -> None:
    (alone,) = llm.generate(PROMPT, PARAMS)
    stream = llm.stream(PROMPT, replace(PARAMS, max_tokens=None, ignore_eos=True))
    next(stream)
    (beside,) = llm.generate(PROMPT, PARAMS)
    assert llm.engine.load.num_running == 1  # for it was asked along with the other
    stream.close()  # type: ignore[attr-defined]
    assert not llm.engine.has_work
    assert llm.engine.pages.num_free == llm.engine.pages.num_pages
    assert beside.token_ids == alone.token_ids


def test_threads_may_share_a_model(llm: LLM) -> None:
    expected = llm.generate([[1, 2], [3, 4, 5], [6]], PARAMS)
    with ThreadPoolExecutor(3) as pool:
        got = list(pool.map(lambda prompt: llm.generate([prompt], PARAMS)[0], [[1, 2], [3, 4, 5], [6]]))
    assert [one.token_ids for one in got] == [one.token_ids for one in expected]


@pytest.mark.parametrize(
    ("prompt", "keywords", "message"),
    [
        ([], {}, "no tokens"),
        ("", {}, "no tokens"),
        ([PROMPT, []], {}, "no tokens"),
        ([320], {}, "must be a token id from 0 to 319"),
        ([[1, 2], [320]], {}, "must be a token id from 0 to 319"),
        ([-1], {}, "must be a token id"),
        ([[1], 5], {}, r"prompts\[1\] is 5, but must be a text or a list of token ids"),
        ([1] * 256, {}, "has 256 tokens.*limit of 256"),
        (PROMPT, {"speculation": "eagle"}, "known are: off, auto, ngram"),
        (PROMPT, {"speculation": "ngram:k=1000"}, "k is 1000"),
        (PROMPT, {"speculation": None}, "speculation is None, but must be a spec such as 'ngram:k=8', or 'off'"),
        (PROMPT, {"speculation": 8}, "speculation is 8, but must be a spec"),
        (PROMPT, {"verify": "typical"}, "must be one of: coupled, token, block, rrsw, traversal"),
        (PROMPT, {"verify": "typical", "speculation": "ngram"}, "must be one of: coupled, token, block"),
        (PROMPT, {"verify": "block", "speculation": SHARED_TREES}, "rule block verifies chains, not trees"),
        (PROMPT, {"verify": "rrsw", "speculation": SHARED_TREES}, "rule rrsw is exact for nodes sampled from draft"),
        (PROMPT, {"params": SamplingParams(temperature=1.0, seed=1), "verify": "token"}, "seed is 1"),
        (PROMPT, {"params": SamplingParams(seed=1), "verify": "traversal"}, "seed goes only with rule 'coupled'"),
        (PROMPT, {"params": SamplingParams(logit_bias={320: 1.0})}, "logit_bias is 320"),
    ],
)
def test_bad_requests_are_refused_and_harm_nothing(
    llm: LLM, prompt: Any, keywords: dict[str, Any], message: str
) -> None:
    records: list[StepRecord] = []
    with pytest.raises(RequestError, match=message):
        llm.generate(prompt, **keywords, on_step=records.append)
    assert not records
    if not (prompt and isinstance(prompt[0], list | str) and not isinstance(prompt, str)):
        with pytest.raises(RequestError, match=message):
            llm.stream(prompt, **keywords)  # at once, not at the first event
    assert len(llm.generate(PROMPT, PARAMS)) == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"backend": "tpu"}, "backend 'tpu' is unknown"),
        ({"device": "cuda"}, "native backend runs on cpu"),
        ({"quant": "q3"}, "quant is 'q3'"),
        ({"kv": "q8"}, "kv is 'q8', but must be one of: f16, f32"),
        ({"threads": 0}, "threads is 0"),
        ({"chunk": 0}, "chunk is 0, but must be between 1 and 4096"),
        ({"max_model_len": 1}, "max_model_len is 1, but must be between 2 and 256"),
        ({"max_model_len": 257}, "max_model_len is 257, but must be between 2 and 256"),
    ],
)
def test_bad_options_are_refused(path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LLM(path, **options)


def test_max_model_len_limits(path: Path) -> None:
    small = LLM(path, threads=1, max_model_len=32)
    (completion,) = small.generate([5] * 30, SamplingParams(ignore_eos=True), speculation="ngram:policy=fixed")
    assert len(completion.token_ids) == 2
    with pytest.raises(RequestError, match="limit of 32"):
        small.generate([5] * 32)


def test_everything_named_is_exported() -> None:
    for name in forerun.__all__:
        assert getattr(forerun, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        forerun.nothing  # type: ignore[attr-defined]  # noqa: B018


def test_importing_the_package_is_cheap() -> None:
    import subprocess

    code = "import sys, forerun; print({'torch', 'tokenizers', 'jinja2', 'forerun.engine'} & set(sys.modules))"
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert output.strip() == "set()"
