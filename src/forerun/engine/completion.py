"""What a request returns: plain data, whole or step by step."""

from __future__ import annotations

from dataclasses import dataclass

from forerun.types import FinishReason, StepRecord, TokenLogprob


@dataclass(frozen=True, slots=True)
class Stats:
    """Counts and times of one request.

    Attributes:
        prompt_tokens: tokens of the prompt.
        cached_tokens: those of them that an earlier text began with too, so that no pass had to compute them.
        completion_tokens: tokens emitted, the one that ended the output included.
        target_passes: passes of the target after those over the prompt. The prompt's last pass gives the first token,
            so (completion_tokens - 1) / target_passes is tau, the mean number of tokens per pass.
        drafted_tokens: nodes that were proposed and ran through the target.
        accepted_tokens: nodes that were accepted and emitted.
        prefill_s: seconds from when its turn came to the first token.
        decode_s: seconds of all steps after that.
        queue_s: seconds until it was its turn.
        num_preemptions: how often it had to wait again, since pages were short.
    """

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    target_passes: int
    drafted_tokens: int
    accepted_tokens: int
    prefill_s: float
    decode_s: float
    queue_s: float = 0.0
    num_preemptions: int = 0

    @property
    def decode_tok_per_s(self) -> float:
        """Tokens per second after the first one; 0 when there was none after it."""
        return (self.completion_tokens - 1) / self.decode_s if self.decode_s > 0 else 0.0


@dataclass(frozen=True, slots=True)
class Completion:
    """The whole result of one request.

    Attributes:
        prompt_token_ids: the prompt as the target read it.
        token_ids: every emitted token, `stats.completion_tokens` of them; an id that ended the output is the last one.
        text: their text, without an id or a stop string that ended it.
        finish_reason: `stop` after an end-of-text id, a stop id or a stop string, else `length`.
        seed: the seed that gives this output again; None under a rule that does not promise it.
        logprobs: one entry per token of token_ids; None unless asked for.
        stats: counts and times.
        prompt_logprobs: one entry per prompt token, None for the first; None unless asked for.
    """

    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason
    seed: int | None
    logprobs: tuple[TokenLogprob, ...] | None
    stats: Stats
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None


@dataclass(frozen=True, slots=True)
class EmittedToken:
    """One token on its way to the caller.

    Attributes:
        token_id: the token.
        text: what it added to the text. It may be empty: half a character, a possible stop string that is held back
            until more is known, or an id that ends the output. The last token brings what was held back before it.
        is_draft: it was a node that the target accepted.
        logprob: its log-probability; None unless asked for.
    """

    token_id: int
    text: str
    is_draft: bool
    logprob: TokenLogprob | None = None


@dataclass(frozen=True, slots=True)
class StreamEvent:
    """What one step emitted.

    Attributes:
        tokens: the emitted tokens, at least one.
        record: what the step did.
        completion: the whole result, with the last event only.
    """

    tokens: tuple[EmittedToken, ...]
    record: StepRecord
    completion: Completion | None = None

    @property
    def text(self) -> str:
        """What the step added to the text."""
        return "".join(token.text for token in self.tokens)

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The emitted ids."""
        return tuple(token.token_id for token in self.tokens)

    @property
    def is_draft(self) -> tuple[bool, ...]:
        """Per emitted id, whether it was an accepted draft token."""
        return tuple(token.is_draft for token in self.tokens)

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why the output ended; None before the last event."""
        return self.completion.finish_reason if self.completion else None
