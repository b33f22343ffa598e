"""The server over the demo model, through OpenAI's own client."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from forerun.models.store import known_model, path_of
from forerun.serve.drafting import loaded_drafters
from tests.helpers.served import ServedProcess

openai = pytest.importorskip("openai")

DEMO = path_of(known_model("demo"))
pytestmark = [
    pytest.mark.real_model,
    pytest.mark.skipif(not DEMO.exists(), reason="the demo model is not in the cache; `forerun pull demo` fetches it"),
]

MESSAGES: Any = [{"role": "user", "content": "Count from one to ten in words, then do it again."}]
PROMPT = "one two three four one two three four one two"
OFF = {"speculative": {"enabled": False}}


@pytest.fixture(scope="module")
def server() -> Iterator[ServedProcess]:
    with ServedProcess("demo", "--served-model-name", "first", "--served-model-name", "second") as process:
        yield process.until_ready()


@pytest.fixture(scope="module")
def client(server: ServedProcess) -> Any:
    with openai.OpenAI(base_url=server.url + "/v1", api_key="unused", max_retries=0) as client:
        yield client


def test_models(client: Any) -> None:
    assert [model.id for model in client.models.list().data] == ["first", "second"]
    assert client.models.retrieve("second").id == "second"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("third")


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_chat_whole_and_streamed(client: Any, temperature: float) -> None:
    fields: dict[str, Any] = {"model": "first", "messages": MESSAGES, "max_tokens": 40, "seed": 3}
    fields |= {"temperature": temperature, "logprobs": True, "top_logprobs": 3}
    whole = client.chat.completions.create(**fields)
    (choice,) = whole.choices
    chunks = list(client.chat.completions.create(**fields, stream=True, stream_options={"include_usage": True}))
    deltas = [chunk.choices[0] for chunk in chunks if chunk.choices]
    assert "".join(one.delta.content or "" for one in deltas) == choice.message.content
    assert [entry for one in deltas if one.logprobs for entry in one.logprobs.content] == choice.logprobs.content
    assert deltas[-1].finish_reason == choice.finish_reason
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens == len(choice.logprobs.content)
    assert whole.model == "first"
    assert whole.seed == 3


@pytest.mark.parametrize("fields", [{"temperature": 0}, {"seed": 5, "min_p": 0.1, "repetition_penalty": 1.1}])
def test_speculation_changes_no_token(server: ServedProcess, fields: dict[str, Any]) -> None:
    body = {"prompt": [PROMPT, "The sky is"], "max_tokens": 32, "return_token_ids": True, "logprobs": 2, "n": 2}
    body |= fields
    with_drafts = server.post("/v1/completions", body)
    without = server.post("/v1/completions", body | OFF)
    narrow = server.post("/v1/completions", body | {"speculative": {"method": "suffix", "k": 2}})
    for other in (without, narrow):
        for one, two in zip(with_drafts["choices"], other["choices"], strict=True):
            for name in ("text", "token_ids", "logprobs", "finish_reason"):
                assert one[name] == two[name]
    drafted = [choice["timings"]["draft_n"] for choice in with_drafts["choices"]]
    assert sum(drafted) > 0
    assert all(choice["timings"]["draft_n"] == 0 for choice in without["choices"])


def test_F036_echo_gives_the_scores_of_a_plain_pass(server: ServedProcess) -> None:
    """What the model thinks of a text is the same whether it wrote the text or reads it."""
    body = {"prompt": PROMPT, "max_tokens": 8, "logprobs": 3, "temperature": 0, "return_token_ids": True} | OFF
    written = server.post("/v1/completions", body)["choices"][0]
    token_ids = [*written["prompt_token_ids"], *written["token_ids"]]
    read = server.post("/v1/completions", {"prompt": token_ids, "echo": True, "logprobs": 3, "max_tokens": 0})
    scores, num = read["choices"][0]["logprobs"], len(written["token_ids"])
    assert scores["token_logprobs"][0] is None
    assert scores["token_logprobs"][-num:] == written["logprobs"]["token_logprobs"]
    assert scores["top_logprobs"][-num:] == written["logprobs"]["top_logprobs"]
    assert read["usage"]["completion_tokens"] == 0


def test_a_prediction_is_accepted_and_counted(client: Any) -> None:
    fields: dict[str, Any] = {"model": "first", "messages": MESSAGES, "max_tokens": 48, "temperature": 0}
    plain = client.chat.completions.create(**fields)
    text = plain.choices[0].message.content
    again = client.chat.completions.create(**fields, prediction={"type": "content", "content": text})
    assert again.choices[0].message.content == text
    details = again.usage.completion_tokens_details
    assert 0 < details.accepted_prediction_tokens <= again.usage.completion_tokens
    assert details.rejected_prediction_tokens < again.usage.completion_tokens


def test_errors_reach_the_client_as_its_own(client: Any) -> None:
    with pytest.raises(openai.BadRequestError) as failure:
        client.chat.completions.create(model="first", messages=MESSAGES, logit_bias={"999999": 1})
    assert failure.value.param == "logit_bias"
    with pytest.raises(openai.NotFoundError) as unknown:
        client.chat.completions.create(model="unknown", messages=MESSAGES)
    assert unknown.value.code == "model_not_found"


def test_many_at_once_get_the_answers_they_get_alone(server: ServedProcess) -> None:
    bodies = [{"prompt": f"{i} plus {i} is", "max_tokens": 16, "seed": i, "return_token_ids": True} for i in range(4)]
    alone = [server.post("/v1/completions", body)["choices"][0] for body in bodies]
    together: dict[int, Any] = {}

    def ask(index: int) -> None:
        together[index] = server.post("/v1/completions", bodies[index])["choices"][0]

    threads = [threading.Thread(target=ask, args=(index,)) for index in range(len(bodies))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [together[i]["token_ids"] for i in range(len(bodies))] == [one["token_ids"] for one in alone]


def test_F031_F072_a_closed_stream_frees_everything(server: ServedProcess, client: Any) -> None:
    stream = client.completions.create(
        model="first", prompt=PROMPT, max_tokens=4000, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    assert server.get("/server_info")["load"]["num_running"] == 1
    stream.close()
    until = time.monotonic() + 2.0
    while (load := server.get("/server_info")["load"])["num_running"] and time.monotonic() < until:
        time.sleep(0.02)
    assert (load["num_running"], load["num_waiting"], load["num_used_pages"]) == (0, 0, 0)


def test_health_answers_during_a_long_prompt(server: ServedProcess) -> None:
    thread = threading.Thread(
        target=server.post, args=("/v1/completions", {"prompt": list(range(1000, 2200)), "max_tokens": 1})
    )
    thread.start()
    assert server.status("/health") == 200
    assert thread.is_alive()
    thread.join()


def test_F063_drafting_shows(server: ServedProcess) -> None:
    info = server.get("/server_info")
    assert info["speculation"]["drafters"] == list(loaded_drafters("auto"))
    assert info["backend"]["name"] == "native"
    text = server.get("/metrics")
    drafted = [line for line in text.splitlines() if "spec_decode_num_draft_tokens_total{" in line]
    assert any(float(line.split()[-1]) > 0 for line in drafted)


def test_responses_whole_and_streamed(client: Any) -> None:
    fields: dict[str, Any] = {"model": "first", "input": "Name a colour.", "max_output_tokens": 12, "temperature": 0}
    whole = client.responses.create(**fields)
    events = list(client.responses.create(**fields, stream=True))
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == whole.output_text
    assert events[-1].response.output_text == whole.output_text
    assert events[-1].response.usage.output_tokens == whole.usage.output_tokens == 12
