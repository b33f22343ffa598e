"""From a checked body to the engine's jobs: one per prompt and choice."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from forerun.errors import RequestError
from forerun.serve.drafting import Drafting, drafting_of
from forerun.serve.problems import Problem
from forerun.serve.schema import ChatRequest, CompletionRequest, GenerationFields, Message
from forerun.serve.settings import ServeSettings
from forerun.serve.structured import Form, Offer, check_calls, read_form
from forerun.types import MAX_GENERATED_SEED, MAX_SEED, SamplingParams
from forerun.verify import RULES

if TYPE_CHECKING:
    from forerun.engine.jobs import Job
    from forerun.engine.llm import LLM

# What the engine calls a field, and what the request does.
_CHAT_NAMES = {"prompt": "messages", "logprobs": "top_logprobs"}
_NAMES = {"verify": "speculative.rule", "speculation": "speculative.rule"}


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt.

    Attributes:
        token_ids: as the model reads it.
        text: as `echo` returns it; None for a chat's.
        num_truncated: tokens that were cut from its front, because the request allows it.
    """

    token_ids: Sequence[int]
    text: str | None = None
    num_truncated: int = 0


@dataclass(frozen=True, slots=True)
class Ask:
    """What a request asks for.

    Attributes:
        prompts: one or several.
        num_choices: per prompt; choice i of prompt p has index p * num_choices + i.
        params: of every choice, with the seed of the first.
        drafting: who drafts.
        form: what every choice must look like.
        is_chat: a conversation.
        is_stream: the answer is streamed.
        has_usage: a stream's last chunk holds the totals.
        has_token_ids: ids are reported.
        has_echo: the text begins with the prompt.
        is_score: nothing is generated: the one token that the engine makes is dropped.
        reports_prompt: the log-probabilities of the prompt are reported beside the text.
        priority: lower runs first.
        salt: prefixes are shared within it.
    """

    prompts: tuple[Prompt, ...]
    num_choices: int
    params: SamplingParams
    drafting: Drafting
    form: Form
    is_chat: bool
    is_stream: bool
    has_usage: bool
    has_token_ids: bool
    has_echo: bool = False
    is_score: bool = False
    reports_prompt: bool = False
    priority: int = 0
    salt: str = ""

    @property
    def num_jobs(self) -> int:
        """Choices in all."""
        return len(self.prompts) * self.num_choices

    def prompt_of(self, index: int) -> Prompt:
        """The prompt of a choice."""
        return self.prompts[index // self.num_choices]


def read_ask(request: CompletionRequest | ChatRequest, llm: LLM, settings: ServeSettings) -> Ask:
    """Settles what a request asks for.

    Raises:
        Problem: it can't be served as asked; names the field.
    """
    form = read_form(request, llm)
    is_stream = bool(request.stream)
    if request.stream_options is not None and not is_stream:
        raise Problem(400, "stream_options is given without stream; send both or neither", "stream_options")
    if request.prompt_logprobs is not None and is_stream:
        raise Problem(400, "prompt_logprobs comes with the whole answer; leave out stream", "prompt_logprobs")
    chat = request if isinstance(request, ChatRequest) else None
    try:
        drafting = drafting_of(request, settings)
        if chat is not None:
            prompts: tuple[Prompt, ...] = (Prompt(encode_chat(chat, llm, form.offer)),)
            num_top = _chat_logprobs(chat)
        else:
            assert isinstance(request, CompletionRequest)
            _check_best_of(request)
            prompts = _read_prompts(request.prompt, llm)
            num_top = request.logprobs
        prompts = tuple(_truncated(prompt, request, llm) for prompt in prompts)
        has_echo = isinstance(request, CompletionRequest) and bool(request.echo)
        params = _params(request, llm, num_top, has_echo)
    except RequestError as error:
        raise Problem.of(error, problem_names(request)) from error
    num_choices = request.n or 1
    if len(prompts) * num_choices > 1 and params.seed is None and RULES[drafting.rule].is_path_exact:
        # Drawn here, so that one number gives all the choices again.
        params = replace(params, seed=secrets.randbelow(MAX_GENERATED_SEED + 1))
    return Ask(
        prompts=prompts,
        num_choices=num_choices,
        params=params,
        drafting=drafting,
        form=form,
        is_chat=chat is not None,
        is_stream=is_stream,
        has_usage=request.stream_options is not None and request.stream_options.include_usage,
        has_token_ids=bool(request.return_token_ids),
        has_echo=has_echo,
        is_score=request.max_tokens == 0,
        reports_prompt=request.prompt_logprobs is not None,
        priority=request.priority or 0,
        salt=request.cache_salt or "",
    )


def make_jobs(ask: Ask, llm: LLM, names: Mapping[str, str]) -> list[Job]:
    """The engine's jobs, in the order of their indices. A grammar that isn't known yet takes up to seconds.

    Args:
        ask: from `read_ask`.
        llm: makes them.
        names: from `problem_names`.

    Raises:
        Problem: the engine can't serve one.
    """
    drafting, params, form = ask.drafting, ask.params, ask.form
    jobs = []
    try:
        # Once, so that no choice finds it forgotten.
        grammar = None if form.structured is None else llm.compile_grammar(form.structured)
        for index in range(ask.num_jobs):
            if params.seed is not None and ask.num_jobs > 1:
                choice = index % ask.num_choices
                params = replace(params, seed=((ask.params.seed or 0) + choice) & MAX_SEED)
            jobs.append(
                llm.job(
                    ask.prompt_of(index).token_ids,
                    params,
                    speculation=drafting.spec,
                    verify=drafting.rule,
                    prediction=drafting.prediction,
                    method=drafting.method,
                    k=drafting.k,
                    priority=ask.priority,
                    salt=ask.salt,
                    grammar=grammar,
                    shown_ids=frozenset() if form.offer is None else form.offer.form.shown_ids,
                )
            )
    except RequestError as error:
        raise Problem.of(error, dict(names)) from error
    return jobs


def problem_names(request: GenerationFields, form: Form | None = None) -> dict[str, str]:
    """The request's names of fields that the engine calls otherwise; the form is known once it is read."""
    names = dict(_NAMES) if form is None else _NAMES | {"grammar": form.param}
    if isinstance(request, ChatRequest):
        names |= _CHAT_NAMES
        if request.max_completion_tokens is not None:
            names["max_tokens"] = "max_completion_tokens"
    if request.repeat_penalty is not None:
        names["repetition_penalty"] = "repeat_penalty"
    return names


def _params(request: GenerationFields, llm: LLM, num_top: int | None, has_echo: bool) -> SamplingParams:
    max_tokens = _max_tokens(request, has_echo)
    top_k = request.top_k
    prompt_top = num_top if has_echo and request.prompt_logprobs is None else request.prompt_logprobs
    given: dict[str, Any] = {
        "max_tokens": max_tokens,
        "temperature": 1.0 if request.temperature is None else request.temperature,
        "top_p": request.top_p,
        "top_k": 0 if top_k == -1 else top_k,
        "min_p": request.min_p,
        "repetition_penalty": _one_of(request, "repetition_penalty", "repeat_penalty"),
        "presence_penalty": request.presence_penalty,
        "frequency_penalty": request.frequency_penalty,
        "logit_bias": None if request.logit_bias is None else _logit_bias(request.logit_bias, llm),
        "min_tokens": request.min_tokens,
        "ignore_eos": request.ignore_eos,
        "stop": (request.stop,) if isinstance(request.stop, str) else tuple(request.stop or ()),
        "stop_token_ids": tuple(request.stop_token_ids or ()),
        "seed": request.seed,
        "logprobs": num_top,
        "prompt_logprobs": prompt_top,
    }
    return SamplingParams(**{name: value for name, value in given.items() if value is not None})


def _max_tokens(request: GenerationFields, has_echo: bool) -> int | None:
    if isinstance(request, ChatRequest):
        value: int | None = _one_of(request, "max_tokens", "max_completion_tokens")
        if value == 0:
            raise Problem(400, "max_tokens is 0, but must be at least 1", "max_tokens")
        return value
    if request.max_tokens == 0:
        if not has_echo and request.prompt_logprobs is None:
            raise Problem(400, "max_tokens is 0, which takes echo or prompt_logprobs; else at least 1", "max_tokens")
        if request.min_tokens:
            raise Problem(400, f"min_tokens is {request.min_tokens}, more than max_tokens 0", "min_tokens")
        return 1
    return request.max_tokens


def _one_of(request: GenerationFields, name: str, alias: str) -> Any:
    """The value of a field with two names.

    Raises:
        Problem: both are given and disagree.
    """
    value, other = getattr(request, name), getattr(request, alias)
    if value is not None and other is not None and value != other:
        raise Problem(400, f"{name} and {alias} contradict each other; send one of them", alias)
    return other if value is None else value


def _logit_bias(biases: Mapping[str, float], llm: LLM) -> dict[int, float]:
    checked: dict[int, float] = {}
    for key, bias in biases.items():
        # int() takes more than digits, such as blanks and underscores.
        token_id = int(key) if key.isascii() and key.isdigit() and len(key) <= 10 else -1
        if not 0 <= token_id < llm.limits.vocab_size:
            message = f"{key!r:.40} is not a token id from 0 to {llm.limits.vocab_size - 1}"
            raise Problem(400, f"logit_bias: {message}", "logit_bias")
        if token_id in checked:
            raise Problem(400, f"logit_bias names token {token_id} twice", "logit_bias")
        checked[token_id] = bias
    return checked


def _chat_logprobs(request: ChatRequest) -> int | None:
    if request.logprobs:
        return request.top_logprobs or 0
    if request.top_logprobs is not None:
        raise Problem(400, "top_logprobs is given, but logprobs is not true; send both or neither", "top_logprobs")
    return None


def _check_best_of(request: CompletionRequest) -> None:
    num_choices = request.n or 1
    if request.best_of is not None and request.best_of != num_choices:
        message = (
            f"best_of is {request.best_of}, but must be n, {num_choices}, or be left out: all choices are returned"
        )
        raise Problem(400, message, "best_of")


def _read_prompts(prompt: str | list[str] | list[int] | list[list[int]], llm: LLM) -> tuple[Prompt, ...]:
    if isinstance(prompt, str):
        return (_text_prompt(prompt, llm, "prompt"),)
    if not prompt:
        raise Problem(400, "prompt is empty, but must have at least one token", "prompt")
    if isinstance(prompt[0], int):
        return (_ids_prompt(prompt, llm, "prompt"),)
    return tuple(
        _text_prompt(one, llm, f"prompt[{i}]") if isinstance(one, str) else _ids_prompt(one, llm, f"prompt[{i}]")
        for i, one in enumerate(prompt)
    )


def _text_prompt(text: str, llm: LLM, name: str) -> Prompt:
    token_ids = llm.encode(text)
    if not token_ids:
        raise Problem(400, f"{name} has no tokens, but must have at least one", name)
    return Prompt(token_ids, text)


def _ids_prompt(token_ids: Any, llm: LLM, name: str) -> Prompt:
    if not token_ids:
        raise Problem(400, f"{name} has no tokens, but must have at least one", name)
    vocab_size = llm.limits.vocab_size
    if min(token_ids) < 0 or max(token_ids) >= vocab_size:
        index, token_id = next((i, t) for i, t in enumerate(token_ids) if not 0 <= t < vocab_size)
        message = f"{name}[{index}] is {token_id}, but must be a token id from 0 to {vocab_size - 1}"
        raise Problem(400, message, f"{name}[{index}]")
    return Prompt(token_ids)


def _plain_messages(messages: Sequence[Message], llm: LLM) -> list[dict[str, Any]]:
    """Messages as the chat template reads them. What is called developer is the system.

    Raises:
        Problem: one holds calls, and the template knows none.
    """
    check_calls(messages, llm)
    return [
        {name: value for name, value in _message_fields(message).items() if value is not None} for message in messages
    ]


def _message_fields(message: Message) -> dict[str, Any]:
    content = message.content
    return {
        "role": "system" if message.role == "developer" else message.role,
        "content": "".join(part.text for part in content) if isinstance(content, list) else content,
        "name": message.name,
        "reasoning_content": message.reasoning_content or message.reasoning or message.thinking,
        "tool_calls": [call.model_dump() for call in message.tool_calls] if message.tool_calls else None,
        "tool_call_id": message.tool_call_id,
    }


def encode_chat(request: ChatRequest, llm: LLM, offer: Offer | None) -> Sequence[int]:
    """The prompt of a conversation, with the tools that it offers.

    Raises:
        RequestError: the model has no chat template, or it refuses the messages.
    """
    begins_turn = request.add_generation_prompt
    return llm.encode_messages(
        _plain_messages(request.messages, llm),
        None if offer is None else offer.tools,
        add_generation_prompt=not request.continue_final_message if begins_turn is None else begins_turn,
        extra=request.chat_template_kwargs,
        continue_final_message=bool(request.continue_final_message),
    )


def _truncated(prompt: Prompt, request: GenerationFields, llm: LLM) -> Prompt:
    """The prompt's last tokens, as many as the request allows."""
    limit = request.truncate_prompt_tokens
    if limit is None:
        return prompt
    if limit == 0:
        raise Problem(400, "truncate_prompt_tokens is 0, but must be at least 1, or -1", "truncate_prompt_tokens")
    keep = llm.limits.max_model_len - 1 if limit == -1 else limit
    num_cut = len(prompt.token_ids) - keep
    if num_cut <= 0:
        return prompt
    return Prompt(prompt.token_ids[num_cut:], None, num_cut)
