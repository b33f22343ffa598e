"""The shapes of answers, OpenAI's with a few fields of our own. Written by msgspec, which takes microseconds.

A field that is UNSET is left out; one that is None is written as null, where clients expect it to be there.
"""

from __future__ import annotations

from typing import Any

from msgspec import UNSET, Struct, UnsetType


class PromptDetails(Struct):
    """`usage.prompt_tokens_details`."""

    cached_tokens: int = 0
    truncated_tokens: int | UnsetType = UNSET


class CompletionDetails(Struct):
    """`usage.completion_tokens_details`."""

    accepted_prediction_tokens: int = 0
    rejected_prediction_tokens: int = 0


class Usage(Struct):
    """`usage`: delivered tokens, over all choices."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: CompletionDetails


class Timings(Struct):
    """`timings`, as llama.cpp's server has them."""

    cache_n: int
    prompt_n: int
    prompt_ms: float
    prompt_per_token_ms: float
    prompt_per_second: float
    predicted_n: int
    predicted_ms: float
    predicted_per_token_ms: float
    predicted_per_second: float
    draft_n: int
    draft_n_accepted: int


class SpecMetrics(Struct):
    """`metrics.speculative_decoding`; counts are over the steps after the prompt's."""

    mean_acceptance_length: float | None
    draft_acceptance_rate: float | None
    acceptance_histogram: list[int]
    num_spec_steps: int
    num_accepted_draft_tokens: int
    num_draft_tokens: int
    num_spec_tokens: int
    per_step_accepted: list[int] | UnsetType = UNSET
    per_step_drafted: list[int] | UnsetType = UNSET


class RequestMetrics(Struct):
    """`metrics`, as vLLM has them."""

    time_to_first_token_ms: float
    generation_time_ms: float
    queue_time_ms: float
    mean_itl_ms: float | None
    tokens_per_second: float | None
    speculative_decoding: SpecMetrics


class TopLogprob(Struct):
    """One alternative of a chat's token."""

    token: str
    logprob: float
    bytes: list[int]


class ChatLogprob(Struct):
    """One token of a chat."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Struct):
    """`logprobs` of a chat's choice."""

    content: list[ChatLogprob]
    refusal: None = None


class TextLogprobs(Struct):
    """`logprobs` of a completion's choice; the lists have one entry per token."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


Logprobs = ChatLogprobs | TextLogprobs
Drafts = list[tuple[str, bool]]  # what each token of a chunk adds to its text, and whether the token was a draft
PromptLogprobs = list[dict[str, dict[str, Any]] | None]


class Function(Struct):
    """What is called, or what a chunk adds to it."""

    arguments: str
    name: str | UnsetType = UNSET


class CallDelta(Struct):
    """What a chunk adds to a call; all but the arguments come with its first."""

    index: int
    function: Function
    id: str | UnsetType = UNSET
    type: str | UnsetType = UNSET


class Call(Struct):
    """A whole call."""

    id: str
    function: Function
    type: str = "function"


class Delta(Struct):
    """What a chunk adds to a message."""

    role: str | UnsetType = UNSET
    content: str | UnsetType | None = UNSET
    tool_calls: list[CallDelta] | UnsetType = UNSET


class ChatMessage(Struct):
    """The answer; a null content is that of calls alone."""

    content: str | None
    role: str = "assistant"
    refusal: None = None
    tool_calls: list[Call] | UnsetType = UNSET


class ChatChunkChoice(Struct):
    """A choice's share of a chunk."""

    index: int
    delta: Delta
    logprobs: Logprobs | None = None
    finish_reason: str | None = None
    token_ids: list[int] | UnsetType = UNSET
    draft: Drafts | UnsetType = UNSET
    timings: Timings | UnsetType = UNSET
    metrics: RequestMetrics | UnsetType = UNSET


class ChatChoice(Struct):
    """A whole choice of a chat."""

    index: int
    message: ChatMessage
    logprobs: Logprobs | None = None
    finish_reason: str | None = None
    token_ids: list[int] | UnsetType = UNSET
    timings: Timings | UnsetType = UNSET
    metrics: RequestMetrics | UnsetType = UNSET


class TextChoice(Struct):
    """A choice of a completion, whole or a chunk's share."""

    index: int
    text: str
    logprobs: Logprobs | None = None
    finish_reason: str | None = None
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    draft: Drafts | UnsetType = UNSET
    timings: Timings | UnsetType = UNSET
    metrics: RequestMetrics | UnsetType = UNSET


Choice = ChatChunkChoice | ChatChoice | TextChoice


class Reply(Struct):
    """A whole answer, or a chunk of a streamed one."""

    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str
    choices: list[Any]
    usage: Usage | UnsetType | None = UNSET
    seed: int | UnsetType | None = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    timings: Timings | UnsetType = UNSET
    metrics: RequestMetrics | UnsetType = UNSET
