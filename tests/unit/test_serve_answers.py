"""Answers, whole and streamed: their shapes, and that both say the same."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from forerun.engine.jobs import Job
from forerun.errors import EngineFault, ForerunError, RequestError
from forerun.serve.drafting import loaded_drafters
from tests.helpers.asgi import Reply, call
from tests.helpers.asynchronous import asynchronous
from tests.helpers.fake_worker import EOS, FakeServer, say, say_forever
from tests.helpers.toy_vocab import TOY

CHAT_PATH, TEXT_PATH = "/v1/chat/completions", "/v1/completions"
CHAT = {"messages": [{"role": "user", "content": "hi"}], "seed": 7}
TEXT = {"prompt": "hi", "seed": 7}


async def ask(server: FakeServer, path: str, body: dict[str, Any]) -> Reply:
    reply = await call(server.app, path, body)
    assert reply.status == 200, reply.body
    return reply


def joined(events: list[dict[str, Any]], index: int = 0) -> dict[str, Any]:
    """A choice of a stream, put together as clients do it."""
    whole: dict[str, Any] = {"text": "", "logprobs": None, "finish_reason": None, "token_ids": []}
    for event in events:
        for choice in event["choices"]:
            if choice["index"] != index:
                continue
            assert whole["finish_reason"] is None, "nothing follows the finish reason"
            whole["text"] += choice["text"] if "text" in choice else choice["delta"].get("content", "")
            whole["token_ids"] += choice.get("token_ids", [])
            whole["finish_reason"] = choice["finish_reason"]
            if choice["logprobs"] is not None:
                lists = whole["logprobs"] = whole["logprobs"] or {}
                for name, value in choice["logprobs"].items():
                    lists[name] = None if value is None else [*(lists.get(name) or []), *value]
    return whole


def whole(reply: Reply, index: int = 0) -> dict[str, Any]:
    choice = reply.json()["choices"][index]
    text = choice["text"] if "text" in choice else choice["message"]["content"]
    return {name: choice[name] for name in ("logprobs", "finish_reason", "token_ids")} | {"text": text}


TEXTS = ["hello world", " two  spaces", "\n tab\t", "grüße, 你好 😀!", "", "<|im_end|>"]


@pytest.mark.parametrize("path", [CHAT_PATH, TEXT_PATH])
@pytest.mark.parametrize(("text", "group"), [*itertools.product(TEXTS, (1, 3)), ("hello world again", 20)])
@pytest.mark.parametrize("is_paced", [True, False])
@asynchronous
async def test_F027_F028_a_stream_is_the_whole_answer(path: str, text: str, group: int, is_paced: bool) -> None:
    logprobs = {"logprobs": True, "top_logprobs": 2} if path == CHAT_PATH else {"logprobs": 2, "echo": True}
    body = (CHAT if path == CHAT_PATH else TEXT) | logprobs | {"return_token_ids": True}
    async with FakeServer(say(text, group), is_paced=is_paced) as server:
        one = await ask(server, path, body)
        stream = await ask(server, path, body | {"stream": True})
        assert joined(stream.events()) == whole(one)
        assert whole(one)["text"] == ("" if path == CHAT_PATH else "hi") + text
        assert len(whole(one)["token_ids"]) == one.json()["usage"]["completion_tokens"]


@asynchronous
async def test_the_form_of_a_chat_stream() -> None:
    async with FakeServer(say("hello world", 2)) as server:
        reply = await ask(server, CHAT_PATH, CHAT | {"stream": True})
    assert reply.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert reply.headers["cache-control"] == "no-cache"
    assert reply.headers["x-accel-buffering"] == "no"
    first, *rest, last = reply.events()
    assert first["choices"] == [
        {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
    ]
    assert all(set(event["choices"][0]["delta"]) == {"content"} for event in rest)
    assert last["choices"][0]["delta"] == {}
    assert last["choices"][0]["finish_reason"] == "stop"
    assert last["seed"] == 7
    assert {event["id"] for event in reply.events()} == {first["id"]}
    assert {event["object"] for event in reply.events()} == {"chat.completion.chunk"}


@pytest.mark.parametrize("path", [CHAT_PATH, TEXT_PATH])
@pytest.mark.parametrize("options", [None, {}, {"include_usage": False}, {"include_usage": True}])
@pytest.mark.parametrize("n", [1, 2])
@asynchronous
async def test_F030_usage_chunk_only_when_asked(path: str, options: dict[str, bool] | None, n: int) -> None:
    body = (CHAT if path == CHAT_PATH else TEXT) | {"n": n}
    async with FakeServer() as server:
        usage = (await ask(server, path, body)).json()["usage"]
        extra = {} if options is None else {"stream_options": options}
        events = (await ask(server, path, body | {"stream": True} | extra)).events()
    if options and options["include_usage"]:
        *others, last = events
        assert last["choices"] == []
        assert last["usage"] == usage
        assert all(event["usage"] is None for event in others)
    else:
        others = events
        assert not any("usage" in event for event in events)
    assert all(len(event["choices"]) == 1 for event in others)


@pytest.mark.parametrize(
    ("text", "stop", "right"),
    [
        ("abcdefghijklmnopqrst", "mnopq", "abcdefghijkl"),
        ("abcdefghijklmnopqrst", "mnopz", "abcdefghijklmnopqrst"),
        ("abcdefghij", "e", "abcd"),
        ("abcdefghijklmn", ["xyz", "klm", "hij", "ijk"], "abcdefg"),
        ("one end two end", " end", "one"),
        ("ends with the begin of sto", "stop", "ends with the begin of sto"),
    ],
)
@pytest.mark.parametrize("group", [1, 2, 7])
@asynchronous
async def test_F029_no_part_of_a_stop_string_is_sent(text: str, stop: Any, right: str, group: int) -> None:
    async with FakeServer(say(text, group)) as server:
        one = await ask(server, CHAT_PATH, CHAT | {"stop": stop})
        stream = await ask(server, CHAT_PATH, CHAT | {"stop": stop, "stream": True})
    assert one.json()["choices"][0]["message"]["content"] == right
    events = stream.events()
    assert joined(events)["text"] == right
    assert joined(events)["finish_reason"] == "stop"
    contents = [event["choices"][0]["delta"].get("content") for event in events]
    assert contents[0] == ""
    assert contents[-1] is None
    assert all(contents[1:-1]), "nothing without content besides the first and the last"


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 5, 6, 7, 8, 19])
@pytest.mark.parametrize("is_stream", [False, True])
@asynchronous
async def test_F013_max_tokens_is_delivered_and_counted(max_tokens: int, is_stream: bool) -> None:
    body = CHAT | {"max_tokens": max_tokens, "logprobs": True, "return_token_ids": True}
    async with FakeServer(say_forever()) as server:
        reply = await ask(server, CHAT_PATH, body | ({"stream": True} if is_stream else {}))
        counted = server.hub.metrics.totals["generation_tokens"]
    choice = joined(reply.events()) if is_stream else whole(reply)
    assert choice["finish_reason"] == "length"
    assert len(choice["token_ids"]) == len(choice["logprobs"]["content"]) == max_tokens == counted
    if not is_stream:
        assert reply.json()["usage"]["completion_tokens"] == max_tokens


@pytest.mark.parametrize("num_prompt", [254, 255, 256, 257])
@pytest.mark.parametrize("max_tokens", [None, 1, 2, 256])
@asynchronous
async def test_F016_lengths_at_the_limit(num_prompt: int, max_tokens: int | None) -> None:
    async with FakeServer(say_forever()) as server:
        reply = await call(server.app, TEXT_PATH, {"prompt": [5] * num_prompt, "max_tokens": max_tokens})
    room = 256 - num_prompt
    if room <= 0:
        assert reply.status == 400
        assert f"{num_prompt} tokens" in reply.error["message"]
        assert "256 tokens" in reply.error["message"]
    else:
        assert reply.json()["usage"]["completion_tokens"] == min(room, max_tokens or room)
        assert reply.json()["choices"][0]["finish_reason"] == "length"


@asynchronous
async def test_F045_the_shape_of_chat_logprobs() -> None:
    async with FakeServer(say("é", 1)) as server:
        reply = await ask(server, CHAT_PATH, CHAT | {"logprobs": True, "top_logprobs": 2})
        bare = await ask(server, CHAT_PATH, CHAT | {"logprobs": True})
    logprobs = reply.json()["choices"][0]["logprobs"]
    assert set(logprobs) == {"content", "refusal"}
    assert len(logprobs["content"]) == len(TOY.encode("é")) + 1
    for entry in logprobs["content"]:
        assert set(entry) == {"token", "logprob", "bytes", "top_logprobs"}
        assert [set(top) for top in entry["top_logprobs"]] == [{"token", "logprob", "bytes"}] * 2
    data = b"".join(bytes(entry["bytes"]) for entry in logprobs["content"][:-1])
    assert data.decode() == "é"
    assert all(entry["top_logprobs"] == [] for entry in bare.json()["choices"][0]["logprobs"]["content"])


@pytest.mark.parametrize("num_top", [0, 1, 5, 20])
@asynchronous
async def test_F045_the_shape_of_completion_logprobs(num_top: int) -> None:
    async with FakeServer(say("one two", 2)) as server:
        choice = (await ask(server, TEXT_PATH, TEXT | {"logprobs": num_top})).json()["choices"][0]
    logprobs = choice["logprobs"]
    assert set(logprobs) == {"tokens", "token_logprobs", "top_logprobs", "text_offset"}
    assert "".join(logprobs["tokens"][:-1]) == choice["text"] == "one two"
    assert all(len(top) == num_top for top in logprobs["top_logprobs"])
    pieces = itertools.pairwise(logprobs["text_offset"])
    assert [choice["text"][a:b] for a, b in pieces] == logprobs["tokens"][:-1]


@pytest.mark.parametrize("max_tokens", [0, 1])
@pytest.mark.parametrize("is_stream", [False, True])
@asynchronous
async def test_F036_echo_scores_the_prompt(max_tokens: int, is_stream: bool) -> None:
    texts = ["one two", "three"]
    body = {"prompt": texts, "echo": True, "logprobs": 1, "max_tokens": max_tokens, "temperature": 0}
    async with FakeServer(say_forever("x")) as server:
        reply = await ask(server, TEXT_PATH, body | ({"stream": True} if is_stream else {}))
        ids = await ask(server, TEXT_PATH, body | {"prompt": [TOY.encode(text) for text in texts]})
    for index, text in enumerate(texts):
        choice = joined(reply.events(), index) if is_stream else reply.json()["choices"][index]
        token_ids = TOY.encode(text)
        logprobs = choice["logprobs"]
        assert choice["text"] == text + "x" * max_tokens
        assert choice["finish_reason"] == "length"
        assert "".join(logprobs["tokens"]) == choice["text"]
        assert logprobs["token_logprobs"][: len(token_ids)] == [None, *(-i / 64 for i in token_ids[1:])]
        assert logprobs["top_logprobs"][0] is None
        ends = [*logprobs["text_offset"][1:], len(choice["text"])]
        pieces = zip(logprobs["text_offset"], ends, strict=True)
        assert [choice["text"][start:end] for start, end in pieces] == logprobs["tokens"]
        assert len(logprobs["text_offset"]) == len(logprobs["tokens"]) == len(token_ids) + max_tokens
        assert ids.json()["choices"][index]["logprobs"] == {name: logprobs[name] for name in logprobs}
    if not is_stream:
        assert reply.json()["usage"]["completion_tokens"] == 2 * max_tokens


@asynchronous
async def test_prompt_logprobs_of_a_chat() -> None:
    async with FakeServer() as server:
        reply = (await ask(server, CHAT_PATH, CHAT | {"prompt_logprobs": 2, "return_token_ids": True})).json()
    first, *rest = reply["prompt_logprobs"]
    assert first is None
    for token_id, entry in zip(reply["prompt_token_ids"][1:], rest, strict=True):
        assert entry[str(token_id)]["logprob"] == (-token_id / 64 if token_id > 1 else -1.0 - token_id)
        assert {"0", "1", str(token_id)} == set(entry)


@asynchronous
async def test_F038_every_number_is_finite(monkeypatch: pytest.MonkeyPatch) -> None:
    from forerun.types import TokenLogprob
    from tests.helpers import fake_worker

    least = float("-inf")
    monkeypatch.setattr(fake_worker, "_logprob", lambda request, i: TokenLogprob(i, least, ((i, least), (5, least))))
    async with FakeServer() as server:
        chat = await ask(server, CHAT_PATH, CHAT | {"logprobs": True, "top_logprobs": 2})
        text = await ask(server, TEXT_PATH, TEXT | {"logprobs": 2})
    assert chat.json()["choices"][0]["logprobs"]["content"][0]["logprob"] == -9999.0
    logprobs = text.json()["choices"][0]["logprobs"]
    assert logprobs["token_logprobs"][0] == -9999.0
    assert set(logprobs["top_logprobs"][0].values()) == {-9999.0}


def by_seed(job: Job) -> Iterator[Sequence[int]]:
    """Says its own seed, in as many steps as it has digits."""
    for digit in str(job.request.seed):
        yield TOY.encode(digit)
    yield [EOS]


@pytest.mark.parametrize("path", [CHAT_PATH, TEXT_PATH])
@pytest.mark.parametrize("is_stream", [False, True])
@asynchronous
async def test_F046_choices_have_seeds_and_indices_of_their_own(path: str, is_stream: bool) -> None:
    body = (CHAT if path == CHAT_PATH else TEXT | {"prompt": ["a", "b"]}) | {"n": 3, "seed": 9, "logprobs": None}
    num_prompts = 1 if path == CHAT_PATH else 2
    async with FakeServer(by_seed) as server:
        reply = await ask(server, path, body | {"return_token_ids": True, "stream": is_stream})
        usage = (await ask(server, path, body)).json()["usage"]
    for index in range(3 * num_prompts):
        choice = joined(reply.events(), index) if is_stream else whole(reply, index)
        assert choice["text"] == str(9 + index % 3)
        assert choice["finish_reason"] == "stop"
    assert usage["completion_tokens"] == num_prompts * (2 + 3 + 3)
    assert usage["prompt_tokens"] == (len(TOY.encode("user: hi\nassistant:")) if path == CHAT_PATH else 2)


@asynchronous
async def test_seeds_wrap_and_drawn_ones_are_reported() -> None:
    async with FakeServer(by_seed) as server:
        last = await ask(server, TEXT_PATH, TEXT | {"n": 2, "seed": 2**64 - 1})
        assert [choice["text"] for choice in last.json()["choices"]] == [str(2**64 - 1), "0"]
        drawn = (await ask(server, TEXT_PATH, {"prompt": "hi", "n": 2})).json()
        assert [choice["text"] for choice in drawn["choices"]] == [str(drawn["seed"]), str(drawn["seed"] + 1)]
        alone = (await ask(server, TEXT_PATH, {"prompt": "hi"})).json()
        assert alone["choices"][0]["text"] == str(alone["seed"])


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("max_tokens", [100, 6])  # which cuts an accepted run
@asynchronous
async def test_reports_of_speculation(is_stream: bool, max_tokens: int) -> None:
    body = TEXT | {"speculative": {"metrics": "steps"}, "stream": is_stream, "max_tokens": max_tokens}
    async with FakeServer(say("abcdefghijklmnop", 4)) as server:
        reply = await ask(server, TEXT_PATH, body)
    last = reply.events()[-1] if is_stream else reply.json()
    timings, spec = last["timings"], last["metrics"]["speculative_decoding"]
    assert spec["num_accepted_draft_tokens"] == sum(spec["per_step_accepted"]) == timings["draft_n_accepted"]
    assert spec["num_draft_tokens"] == sum(spec["per_step_drafted"]) == timings["draft_n"]
    assert spec["num_accepted_draft_tokens"] <= spec["num_draft_tokens"]
    assert sum(spec["acceptance_histogram"]) == spec["num_spec_steps"] == len(spec["per_step_accepted"])
    assert sum(i * n for i, n in enumerate(spec["acceptance_histogram"])) == spec["num_accepted_draft_tokens"]
    assert spec["mean_acceptance_length"] == 1 + spec["num_accepted_draft_tokens"] / spec["num_spec_steps"]


@asynchronous
async def test_reports_are_as_long_as_asked_for() -> None:
    async with FakeServer() as server:
        assert "metrics" not in (await ask(server, TEXT_PATH, TEXT)).json()
        summary = (await ask(server, TEXT_PATH, TEXT | {"speculative": {"metrics": "summary"}})).json()
        assert "per_step_accepted" not in summary["metrics"]["speculative_decoding"]
        several = (await ask(server, TEXT_PATH, TEXT | {"n": 2, "speculative": {"metrics": "summary"}})).json()
        assert all("metrics" in choice and "timings" in choice for choice in several["choices"])
        assert "timings" not in several


@asynchronous
async def test_predictions_are_counted() -> None:
    prediction = {"type": "content", "content": [{"type": "text", "text": "hello "}, {"type": "text", "text": "you"}]}
    async with FakeServer() as server:
        usage = (await ask(server, TEXT_PATH, TEXT | {"prediction": prediction})).json()["usage"]
        assert server.worker.jobs[0].request.prediction == tuple(TOY.encode("hello you"))
    details = usage["completion_tokens_details"]
    emitted = {*TOY.encode("hello world"), EOS}
    assert details["rejected_prediction_tokens"] == sum(i not in emitted for i in TOY.encode("hello you"))
    assert details["accepted_prediction_tokens"] == 0


def fails_after(num_steps: int, error: ForerunError) -> Any:
    def script(job: Job) -> Iterator[Sequence[int] | ForerunError]:
        for _ in range(num_steps):
            yield TOY.encode("abc")
            time.sleep(0.02)  # so that it is sent
        yield error

    return script


@pytest.mark.parametrize(
    ("error", "status"), [(EngineFault("broken"), 500), (RequestError("too few pages", "prompt"), 400)]
)
@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("path", [CHAT_PATH, TEXT_PATH])
@asynchronous
async def test_F032_an_error_before_the_first_token_is_a_response(
    error: ForerunError, status: int, is_stream: bool, path: str
) -> None:
    async with FakeServer(fails_after(0, error)) as server:
        reply = await call(server.app, path, (CHAT if path == CHAT_PATH else TEXT) | {"stream": is_stream})
    assert reply.status == status
    assert str(error) in reply.error["message"]


@asynchronous
async def test_F032_an_error_in_a_stream_is_its_last_event() -> None:
    async with FakeServer(fails_after(2, EngineFault("broken"))) as server:
        reply = await call(server.app, CHAT_PATH, CHAT | {"stream": True})
        assert reply.is_complete
        server.worker.script = say("hello world")
        assert (await ask(server, CHAT_PATH, CHAT)).json()["choices"][0]["message"]["content"] == "hello world"
    assert reply.status == 200
    *_, last, nothing = reply.body.decode().split("\n\n")
    assert nothing == ""
    assert last.startswith('data: {"error":{')
    assert reply.body.count(b'"content":"abc"') == 2
    assert "[DONE]" not in reply.body.decode()
    assert '"finish_reason":"' not in reply.body.decode()


@asynchronous
async def test_tokens_and_back() -> None:
    async with FakeServer() as server:
        reply = (await ask(server, "/tokenize", {"prompt": "hello", "return_token_strs": True})).json()
        assert reply["tokens"] == TOY.encode("hello")
        assert (reply["count"], len(reply["token_strs"])) == (len(reply["tokens"]),) * 2
        assert (await ask(server, "/detokenize", {"tokens": reply["tokens"]})).json() == {"prompt": "hello"}
        chat = (await ask(server, "/tokenize", {"messages": CHAT["messages"]})).json()
        assert chat["tokens"] == TOY.encode("user: hi\nassistant:")
        for path, body in (
            ("/tokenize", {}),
            ("/tokenize", {"prompt": "a", "messages": []}),
            ("/detokenize", {"tokens": [10**6]}),
            ("/detokenize", {"tokens": [-1]}),
        ):
            assert (await call(server.app, path, body)).error


@asynchronous
async def test_F063_what_is_active_can_be_asked() -> None:
    async with FakeServer() as server:
        info = (await call(server.app, "/server_info")).json()
        await ask(server, TEXT_PATH, TEXT)
        metrics = (await call(server.app, "/metrics")).body.decode()
    assert info["speculation"]["drafters"] == list(loaded_drafters("auto"))
    assert info["speculation"]["is_active"] is True
    assert (info["speculation"]["rule"], info["speculation"]["exactness"]) == ("coupled", "tokens")
    assert 'forerun:spec_decode_num_drafts_total{drafter="suffix",model_name="toy"} 2.0' in metrics


@asynchronous
async def test_a_last_message_is_continued() -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "so far "}]
    body = {"messages": messages, "return_token_ids": True}
    async with FakeServer() as server:
        reply = (await ask(server, CHAT_PATH, body | {"continue_final_message": True})).json()
        assert reply["prompt_token_ids"] == TOY.encode("user: hi\nassistant: so far ")
        bare = (await ask(server, CHAT_PATH, body | {"add_generation_prompt": False})).json()
        assert bare["prompt_token_ids"] == TOY.encode("user: hi\nassistant: so far \n")
        both = await call(server.app, CHAT_PATH, body | {"continue_final_message": True, "add_generation_prompt": True})
        assert both.error["param"] == "continue_final_message"


@asynchronous
async def test_a_template_has_variables_of_its_own() -> None:
    async with FakeServer() as server:
        reply = (
            await ask(server, CHAT_PATH, CHAT | {"chat_template_kwargs": {"note": "n"}, "return_token_ids": True})
        ).json()
        assert reply["prompt_token_ids"] == TOY.encode("n user: hi\nassistant:")
        own = await call(server.app, CHAT_PATH, CHAT | {"chat_template_kwargs": {"messages": []}})
        assert own.error["param"] == "chat_template_kwargs"
