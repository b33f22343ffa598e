"""Tools: what callers may send (F043), which way a model writes calls, and grammars whose every output is a call."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from forerun.errors import RequestError
from forerun.models.chat_template import ChatTemplate, encode_chat
from forerun.models.grammar import GrammarCompiler, _Vocabulary
from forerun.models.structured import Structured
from forerun.models.tokenizer import Tokenizer
from forerun.models.tool_calls import ToolSyntax, read_tool_calls
from forerun.models.tools import ToolChoice, ToolFormat, call_grammar, read_tool_choice, read_tools, tool_format
from forerun.sampling.distribution import is_allowed
from tests.helpers.conformance import conformance_file
from tests.helpers.conversations import TOOLS, assistant, call, tool, user
from tests.helpers.gguf_files import vocabulary
from tests.helpers.toy_vocab import CONTROL, TOY, metadata

TREE = {
    "type": "function",
    "function": {
        "name": "grow",
        "parameters": {
            "type": "object",
            "properties": {"tree": {"$ref": "#/$defs/tree"}},
            "required": ["tree"],
            "additionalProperties": False,
            "$defs": {
                "tree": {
                    "type": "object",
                    "properties": {"size": {"enum": [1, 2]}, "child": {"$ref": "#/$defs/tree"}},
                    "required": ["size"],
                    "additionalProperties": False,
                }
            },
        },
    },
}
NOTHING = {"type": "function", "function": {"name": "now"}}
ALL = read_tools([TREE, NOTHING])


def marked_vocabulary(*marks: str, kind: int = CONTROL) -> Tokenizer:
    tokens, merges, types = vocabulary(330)
    return Tokenizer.from_gguf(
        metadata(tokens=[*tokens, *marks], token_type=[*types, *[kind] * len(marks)], merges=merges)
    )


MISTRAL = marked_vocabulary("[TOOL_CALLS]", "[ARGS]")
LLAMA = marked_vocabulary("<|python_tag|>")
FORMATS: dict[str, tuple[Tokenizer, ToolFormat]] = {
    "hermes": (TOY, ToolFormat("hermes", False, ())),
    "hermes, control": (
        marked_vocabulary("<tool_call>", "</tool_call>"),
        ToolFormat("hermes", False, (("<tool_call>", 330), ("</tool_call>", 331))),
    ),
    "mistral": (MISTRAL, ToolFormat("mistral", False, (("[TOOL_CALLS]", 330), ("[ARGS]", 331)))),
    "mistral, names first": (MISTRAL, ToolFormat("mistral", True, (("[TOOL_CALLS]", 330), ("[ARGS]", 331)))),
    "llama": (LLAMA, ToolFormat("llama", False, (("<|python_tag|>", 330),))),
}


def written(tokenizer: Tokenizer, form: ToolFormat, wanted: Structured, seed: int) -> str:
    """The text of a random output of a grammar, with the marks that are control tokens, and white space disliked."""
    state = GrammarCompiler(tokenizer, tokenizer.vocab_size).compile(wanted).open()
    rng = random.Random(seed)
    ids: list[int] = []
    while len(ids) < 400:
        mask_V = state.mask_after()
        allowed = [i for i in range(tokenizer.vocab_size) if is_allowed(mask_V, i)]
        ends = [i for i in allowed if i in tokenizer.eos_ids]
        if ends and (len(ends) == len(allowed) or rng.random() < 0.5):
            return tokenizer.decode(ids, skip_special=False, continues=True)
        allowed = [i for i in allowed if i not in ends]
        dense = [i for i in allowed if tokenizer.token_bytes(i).strip()]
        closing = [i for i in dense if tokenizer.token_bytes(i)[:1] in (b"}", b"]")]
        ids.append(rng.choice(closing or dense or allowed))
        state.advance(ids[-1:])
    raise AssertionError(f"no end of {tokenizer.decode(ids, skip_special=False)!r}")


@pytest.mark.parametrize("name", FORMATS)
def test_a_required_call_is_a_call_of_one_of_the_tools(name: str) -> None:
    tokenizer, form = FORMATS[name]
    seen = set()
    for seed in range(12):
        for choice, parallel in (
            (ToolChoice("required"), False),
            (ToolChoice("required"), True),
            (ToolChoice("named", "grow"), True),
        ):
            wanted = call_grammar(form, ALL, choice, parallel=parallel)
            assert wanted is not None
            text = written(tokenizer, form, wanted, seed)
            answer = read_tool_calls(form.syntax, ["grow", "now"], text, "stop")
            assert answer.content is None
            assert answer.finish_reason == "tool_calls"
            assert len(answer.calls) == 1 or (parallel and choice.mode == "required" and form.syntax != "llama")
            for made in answer.calls:
                schema = next(entry.parameters for entry in ALL if entry.name == made.name)
                Draft202012Validator(schema).validate(json.loads(made.arguments))
                seen.add(made.name)
                assert choice.mode != "named" or made.name == "grow"
    assert seen == {"grow", "now"}


def test_the_usual_spelling_of_a_call_is_allowed() -> None:
    """As templates show calls to the model: what it was trained to write must not be forbidden."""
    texts = {
        "hermes": '<tool_call>\n{"name": "grow", "arguments": {"tree": {"size": 1}}}\n</tool_call>',
        "llama": '{"name": "grow", "parameters": {"tree": {"size": 1}}}',
        "mistral": '[TOOL_CALLS][{"name": "grow", "arguments": {"tree": {"size": 1}}}]',
        "mistral, names first": '[TOOL_CALLS]grow[ARGS]{"tree": {"size": 1}}',
    }
    for name, text in texts.items():
        tokenizer, form = FORMATS[name]
        wanted = call_grammar(form, ALL, ToolChoice("required"))
        assert wanted is not None
        state = GrammarCompiler(tokenizer, tokenizer.vocab_size).compile(wanted).open()
        spell = _Vocabulary(tokenizer)
        for token_id, piece in tokenizer.split_special(text):
            for one in [token_id] if token_id is not None else spell(piece):
                assert is_allowed(state.mask_after(), one), (name, piece)
                state.advance([one])
        assert state.is_finished, name


def test_choices_that_promise_nothing_have_no_grammar() -> None:
    for form in (form for _, form in FORMATS.values()):
        assert call_grammar(form, ALL, ToolChoice("auto"), parallel=True) is None
        assert call_grammar(form, ALL, ToolChoice("none"), strict=("grow",)) is None


def allows(tokenizer: Tokenizer, wanted: Structured, text: str) -> bool:
    """Whether a text, in its usual tokens, is a whole answer."""
    state = GrammarCompiler(tokenizer, tokenizer.vocab_size).compile(wanted).open()
    spell = _Vocabulary(tokenizer)
    pieces = tokenizer.split_special(text)
    for one in [one for token_id, piece in pieces for one in ([token_id] if token_id is not None else spell(piece))]:
        if not is_allowed(state.mask_after(), one):
            return False
        state.advance([one])
    return is_allowed(state.mask_after(), tokenizer.eos_ids[0])


# A call by the family's notation, of a name and the JSON text of its arguments.
WRITTEN = {
    "hermes": '<tool_call>\n{{"name": "{}", "arguments": {}}}\n</tool_call>',
    "hermes, control": '<tool_call>\n{{"name": "{}", "arguments": {}}}\n</tool_call>',
    "mistral": '[TOOL_CALLS][{{"name": "{}", "arguments": {}}}]',
    "mistral, names first": "[TOOL_CALLS]{}[ARGS]{}",
    "llama": '{{"name": "{}", "parameters": {}}}',
}
GROWN, WRONG = '{"tree": {"size": 1}}', '{"tree": {"size": 3}}'


@pytest.mark.parametrize("parallel", [False, True])
@pytest.mark.parametrize("name", FORMATS)
def test_strict_arguments_keep_to_their_schema_where_text_is_free(name: str, parallel: bool) -> None:
    tokenizer, form = FORMATS[name]
    wanted = call_grammar(form, ALL, ToolChoice("auto"), parallel=parallel, strict=("grow",))
    assert wanted is not None

    def is_answer(text: str) -> bool:
        return allows(tokenizer, wanted, text)

    write = WRITTEN[name].format
    has_text_before = form.syntax != "llama"
    for text in ("", "Hello.", "a < b {c} [d]\n\n</x>", "\n é"):
        assert is_answer(text)
    for text in ("", "Let me see: {[<\n") if has_text_before else ("",):
        assert is_answer(text + write("grow", GROWN))
        assert not is_answer(text + write("grow", WRONG))
        assert is_answer(text + write("now", '{"anything": [1]}'))  # nobody promised its schema
        assert not is_answer(text + write("never", "{}"))
        assert not is_answer(text + write("grow", GROWN)[:-1])
    both = write("grow", GROWN) + "\n" + write("now", "{}")
    assert is_answer(both) == (parallel and form.has_blocks)
    assert is_answer(both + " Done.") == (parallel and form.has_blocks)
    assert is_answer(write("grow", GROWN) + write("now", "{}")) == (parallel and form.has_blocks)
    assert not is_answer(write("now", "{}") + write("grow", WRONG))


def test_one_call_at_most_without_any_promise() -> None:
    tokenizer, form = FORMATS["hermes"]
    wanted = call_grammar(form, ALL, ToolChoice("auto"), parallel=False)
    assert wanted is not None
    write = WRITTEN["hermes"].format
    assert allows(tokenizer, wanted, "So: " + write("grow", WRONG))
    assert not allows(tokenizer, wanted, "So: " + write("grow", WRONG) + "\n" + write("grow", GROWN))


def function(name: Any = "f", **changes: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **changes}}


@pytest.mark.parametrize(
    ("tools", "message"),
    [
        ("f", "must be a list of functions"),
        (["f"], r"tools\[0\] is no object"),
        ([{"type": "retrieval"}], r"tools\[0\].type is 'retrieval', but must be 'function'"),
        ([function(), {"type": "function"}], r"tools\[1\].function is missing"),
        ([function("a b")], "must be 1 to 64 letters"),
        ([function("x" * 65)], "must be 1 to 64 letters"),
        ([function(None)], "must be 1 to 64 letters"),
        ([function(description=3)], "description must be a text"),
        ([function(parameters=[])], "parameters is no object"),
        ([function(parameters={"type": "string"})], "parameters.type is 'string', but must be 'object'"),
        ([function(), function()], "two functions named 'f'"),
        ([function(f"f{i}") for i in range(129)], "at most 128"),
    ],
)
def test_tools_that_are_none_are_refused_f043(tools: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message) as error:
        read_tools(tools)
    assert error.value.param == "tools"


def test_tool_choices() -> None:
    assert read_tool_choice(None, ALL) == read_tool_choice("auto", ALL) == ToolChoice("auto")
    assert read_tool_choice(None, ()) == read_tool_choice("auto", ()) == ToolChoice("none")
    assert read_tool_choice("none", ALL) == ToolChoice("none")
    assert read_tool_choice("required", ALL) == ToolChoice("required")
    named = {"type": "function", "function": {"name": "now"}}
    assert read_tool_choice(named, ALL) == ToolChoice("named", "now")
    for choice, tools, message in (
        ("required", (), "there are no tools"),
        ("sometimes", ALL, "must be none, auto, required or"),
        (3, ALL, "must be none, auto, required or"),
        ({"type": "function"}, ALL, "must be none, auto, required or"),
        ({"type": "function", "function": {"name": "later"}}, ALL, "names 'later', but no tool has that name"),
    ):
        with pytest.raises(RequestError, match=message) as error:
            read_tool_choice(choice, tools)
        assert error.value.param == "tool_choice"


@pytest.mark.parametrize(
    ("file", "tokenizer", "syntax"),
    [
        ("Qwen-Qwen3-0.6B.jinja", TOY, "hermes"),
        ("Qwen-Qwen2.5-7B-Instruct.jinja", TOY, "hermes"),
        ("NousResearch-Hermes-3-Llama-3.1-8B-tool_use.jinja", TOY, "hermes"),
        ("meta-llama-Llama-3.1-8B-Instruct.jinja", LLAMA, "llama"),
        ("meta-llama-Llama-3.2-3B-Instruct.jinja", LLAMA, "llama"),
        ("mistralai-Mistral-Nemo-Instruct-2407.jinja", MISTRAL, "mistral"),
    ],
)
def test_the_way_is_chosen_by_template_and_vocabulary(file: str, tokenizer: Tokenizer, syntax: ToolSyntax) -> None:
    form = tool_format(conformance_file(f"templates/{file}").read_text("utf-8"), tokenizer)
    assert form is not None
    assert form.syntax == syntax
    assert form.shown_ids == {token_id for _, token_id in form.mark_ids} <= tokenizer.special_ids


def test_a_model_without_tools_has_no_way() -> None:
    assert tool_format("{{ messages[0].content }}", TOY) is None


# ---- conversations with calls ----

PRINTS = ChatTemplate(
    "{% for m in messages %}{% for c in m.tool_calls %}{{ c.function.arguments | tojson }}{% endfor %}{% endfor %}"
)


def test_arguments_may_be_texts_or_objects() -> None:
    for arguments in ({"city": "Zürich"}, '{"city": "Zürich"}', ' {"city":"Zürich"}\n'):
        messages = [user("a"), assistant("", tool_calls=[call(arguments)]), tool("1")]
        assert PRINTS.render(messages) == '{"city": "Zürich"}'
    assert PRINTS.render([user("a"), assistant("", tool_calls=[call("")])]) == "{}"


@pytest.mark.parametrize(
    ("calls", "message"),
    [
        (
            [call("{")],
            r"messages\[1\].tool_calls\[0\].function.arguments is '{', but must be the JSON text of an object",
        ),
        ([call({}), call("[1]")], r"tool_calls\[1\].function.arguments is '\[1\]'"),
        ([call("[" * 100_000)], "must be the JSON text of an object"),
        (["f"], r"tool_calls\[0\] is of type str"),
        ({"name": "f"}, r"tool_calls is of type dict, but must be a list of calls"),
        ([{"function": "f"}], r"tool_calls\[0\].function is of type str"),
    ],
)
def test_broken_calls_in_a_history_are_refused_f043(calls: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message) as error:
        PRINTS.render([user("a"), assistant("", tool_calls=calls)])
    assert error.value.param == "messages"


def test_tools_of_a_conversation_reach_the_ids() -> None:
    template = ChatTemplate("{{ tools | tojson }}")
    ids = encode_chat(TOY, template, [user("a")], tools=TOOLS)
    assert json.loads(TOY.decode(ids)) == TOOLS
