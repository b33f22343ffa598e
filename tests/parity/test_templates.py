"""Seventy chat templates and those of the known models against transformers, which they were written for (F044, F051).

Three things are forerun's own and hold for every template, so transformers gets them done: text parts are joined, since
half of the templates know only strings, an assistant without content has an empty one, and arguments of calls that
come as JSON texts are objects, since half of the templates would write such a text as a JSON string.
"""

from __future__ import annotations

import json
import re
import warnings
from functools import cache
from typing import Any

import pytest

from forerun.errors import RequestError
from forerun.models.chat_template import ChatTemplate, encode_chat
from forerun.models.gguf import read_gguf
from forerun.models.store import KNOWN_MODELS, path_of
from forerun.models.tokenizer import Tokenizer
from tests.helpers.conformance import conformance_dir, conformance_file
from tests.helpers.conversations import CONVERSATIONS, TOOLS, Message, assistant, call, system, tool, user
from tests.helpers.toy_vocab import CONTROL, metadata

NUM_FILES = 70
BOS, EOS = "<s>", "</s>"
FILES = sorted(path.name for path in (conformance_dir() / "templates").glob("*.jinja")) or ["any"]
VOCABULARIES = ("command-r", "gemma-4", "phi-3", "qwen2")
SOURCES = (
    *(f"templates/{name}" for name in FILES),
    *(f"ggml-vocab-{name}.gguf" for name in VOCABULARIES),
    *KNOWN_MODELS,
)


@cache
def source_of(name: str) -> str:
    if name.endswith(".jinja"):
        return conformance_file(name).read_text("utf-8")
    path = conformance_file(name) if name.endswith(".gguf") else path_of(KNOWN_MODELS[name])
    if not path.is_file():
        pytest.skip(f"{name} is not in the cache; fetch it with: forerun pull {name}")
    source = read_gguf(path).metadata.get("tokenizer.chat_template")
    if source is None:
        pytest.skip(f"{name} has no chat template")
    return str(source)


@cache
def reference() -> Any:
    """A tokenizer of transformers that renders any template."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        transformers = pytest.importorskip("transformers")
        from tokenizers import Tokenizer, models

        empty = Tokenizer(models.BPE())
        return transformers.PreTrainedTokenizerFast(tokenizer_object=empty, bos_token=BOS, eos_token=EOS)


def with_strings(message: Message) -> Message:
    content = message.get("content")
    if isinstance(content, list):
        content = "".join(part["text"] for part in content)
    plain = {**message, "content": "" if content is None else content}
    if message.get("tool_calls"):
        plain["tool_calls"] = [with_objects(call) for call in message["tool_calls"]]
    return plain


def with_objects(call: dict[str, Any]) -> dict[str, Any]:
    function = call["function"]
    arguments = function["arguments"]
    if isinstance(arguments, str):
        function = {**function, "arguments": json.loads(arguments)}
    return {**call, "function": function}


def expected(source: str, messages: list[Message], **options: Any) -> str | Exception:
    try:
        plain = list(map(with_strings, messages))
        text: str = reference().apply_chat_template(plain, chat_template=source, tokenize=False, **options)
    except Exception as error:  # a template may raise anything
        return error
    return text


def test_all_files_are_there() -> None:
    conformance_file("templates/Qwen-Qwen3-0.6B.jinja")
    assert len(FILES) == NUM_FILES


@pytest.mark.parametrize("name", SOURCES)
def test_text_equals_transformers_f044_f051(name: str) -> None:
    source = source_of(name)
    template = ChatTemplate(source, BOS, EOS)
    for title, messages in CONVERSATIONS.items():
        for tools in (None, TOOLS):
            for add_generation_prompt in (True, False):
                options = {"tools": tools, "add_generation_prompt": add_generation_prompt}
                theirs = expected(source, messages, **options)
                if isinstance(theirs, Exception):
                    with pytest.raises(RequestError, match=re.escape(str(theirs))):
                        template.render(messages, **options)
                else:
                    assert template.render(messages, **options) == theirs, (title, options)


# What templates write as control tokens, by look.
_NAME = re.compile(r"<[|｜][^<>|｜\s'\"]{1,40}[|｜]?>|</?[a-z]+_[a-z_]+>|</?think>|<[a-z_]+\|>|\[/?[A-Z_]{3,}\]")


def conversation(text: str) -> list[Message]:
    return [
        system(f"s{text}"),
        user(f"u{text}"),
        assistant(f"a{text}", tool_calls=[call({"city": f"c{text}"})]),
        tool(f"t{text}"),
        assistant(f"b{text}"),
        user(f"v{text}"),
    ]


def function(text: str) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {"city": {"type": "string", "description": f"p{text}"}}}
    return {
        "type": "function",
        "function": {"name": "get_weather", "description": f"d{text}", "parameters": parameters},
    }


@pytest.mark.parametrize("name", SOURCES)
def test_control_names_in_messages_stay_text_f049(name: str) -> None:
    source = source_of(name)
    names = sorted({BOS, EOS, *_NAME.findall(source)})
    data = metadata()
    data["tokenizer.ggml.tokens"] = [*data["tokenizer.ggml.tokens"], *names]
    data["tokenizer.ggml.token_type"] = [*data["tokenizer.ggml.token_type"], *[CONTROL] * len(names)]
    toy = Tokenizer.from_gguf(data)
    template = ChatTemplate(source, BOS, EOS)
    forged = "".join(names)
    for length in (6, 1):
        messages, harmless = conversation(forged)[-length:], conversation("x")[-length:]
        tools, harmless_tools = [function(forged)], [function("x")]
        try:
            template.render(harmless, tools=harmless_tools)
        except RequestError:
            continue  # no tools for this template, or no system role
        ids = encode_chat(toy, template, messages, tools=tools)
        wanted = encode_chat(toy, template, harmless, tools=harmless_tools)
        assert [i for i in ids if i in toy.special_ids] == [i for i in wanted if i in toy.special_ids]
