"""What a drafter costs on a model: time of a proposal and of hearing a token, and memory."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from statistics import median

from forerun.batch import StepBatch
from forerun.bench.fidelity import packaged_text
from forerun.drafters.base import Budget, DraftContext, Drafter, DrafterOptions
from forerun.drafters.grammar import GrammarOptions
from forerun.drafters.spec import Speculation
from forerun.engine.llm import LLM
from forerun.engine.pieces import draft_piece, prompt_piece
from forerun.engine.run import MAX_STEP_NODES
from forerun.engine.sequence import Sequence
from forerun.errors import ConfigError
from forerun.models.grammar import GrammarState
from forerun.models.structured import Structured
from forerun.types import Draft, SamplingParams

PROMPT_LEN = 2048
NUM_STEPS = 64
MAX_NODES = 8
ANY_TEXT = Structured.regex("(?s:.)*")
_SEQUENCE_ID = -1  # no request has it


@dataclass(frozen=True, slots=True)
class DrafterCost:
    """Medians over the steps of one request.

    Attributes:
        open_s: seconds to take in the prompt.
        propose_s: of a proposal of at most MAX_NODES nodes.
        advance_s: of taking in a token.
        num_steps: draft passes in a proposal; 0 for drafters without a model.
        memory_bytes: held for all requests together, after the request.
        prompt_len: tokens of the prompt.
    """

    open_s: float
    propose_s: float
    advance_s: float
    num_steps: int
    memory_bytes: int
    prompt_len: int


def measure_drafter(llm: LLM, options: DrafterOptions) -> DrafterCost:
    """Lets a drafter follow a text as if a target emitted it, one token a step.

    Raises:
        RequestError: the drafter doesn't fit the model.
    """
    speculator = llm.speculator(Speculation((options,)))
    if speculator is None:
        raise ConfigError(f"drafter {options.name} is switched off by its settings, so it has no cost")
    (source,) = speculator.sources
    token_ids = _text_ids(llm)
    prompt, rest = token_ids[:-NUM_STEPS], token_ids[-NUM_STEPS:]
    max_len = len(token_ids) + MAX_NODES + 1
    grammar = llm.compile_grammar(ANY_TEXT).open() if isinstance(options, GrammarOptions) else None
    with closing(Sequence(_SEQUENCE_ID, prompt, max_len, llm.engine.pages)) as sequence:
        context = DraftContext(
            prompt_token_ids=prompt,
            end_ids=frozenset(),
            params=SamplingParams(),
            noise_key=0,
            stream="shared",
            max_len=max_len,
            prediction=token_ids,
            slots=sequence,
            grammar=grammar,
        )
        sequence.open()
        began = time.perf_counter()
        drafter = source.open(context)
        open_s = time.perf_counter() - began
        if drafter is None:
            raise ConfigError(f"drafter {options.name} would propose nothing for the text it is measured with")
        with closing(drafter):
            steps = list(_follow(llm, sequence, drafter, grammar, rest))
    return DrafterCost(
        open_s=open_s,
        propose_s=median(step[0] for step in steps),
        advance_s=median(step[1] for step in steps),
        num_steps=max(step[2] for step in steps),
        memory_bytes=source.memory_bytes,
        prompt_len=len(prompt),
    )


def _follow(
    llm: LLM, sequence: Sequence, drafter: Drafter, grammar: GrammarState | None, token_ids: tuple[int, ...]
) -> Iterator[tuple[float, float, int]]:
    """Seconds to propose, seconds to advance and draft passes, step by step, with the target's passes between them."""
    while sequence.cached_len < sequence.committed_len - 1:
        end = min(sequence.cached_len + MAX_STEP_NODES + 1, sequence.committed_len - 1)
        sequence.reserve(end)
        llm.target.forward(StepBatch(prompt_piece(sequence, end, 0)))
        sequence.mark_cached(end)
    for token_id in token_ids:
        began = time.perf_counter()
        proposal = drafter.propose(Budget(MAX_NODES, (0.0,) * MAX_NODES, lambda cell: 0.5))
        proposed = time.perf_counter()
        sequence.reserve(sequence.committed_len)
        llm.target.forward(StepBatch(draft_piece(sequence, Draft())))
        sequence.mark_cached(sequence.committed_len)
        sequence.commit((token_id,), num_cached=0)
        if grammar is not None:
            grammar.advance((token_id,))
        verified = time.perf_counter()
        drafter.advance((token_id,))
        yield proposed - began, time.perf_counter() - verified, proposal.num_steps


def _text_ids(llm: LLM) -> tuple[int, ...]:
    """The packaged text, again and again, as long as the prompt and the steps need or the model allows."""
    ids = llm.tokenizer.encode(packaged_text())
    length = min(PROMPT_LEN + NUM_STEPS, llm.limits.max_model_len - MAX_NODES - 1)
    return tuple((ids * (length // len(ids) + 1))[:length])
