"""One step: draft, run the target, verify, emit, commit, record.

It is the algorithm of Leviathan et al. 2023 (arXiv 2211.17192, Algorithm 1) with the drafter and the verification rule
left open. Plain decoding is a step with an empty draft, and so is the first token after the prompt: there is no other
path to a token, and therefore none on which a parameter could be forgotten.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np

from forerun.control.planner import Plan, Planner
from forerun.engine.batches import decode_batch, prompt_batch
from forerun.engine.completion import EmittedToken
from forerun.engine.output import Output
from forerun.engine.request import Request
from forerun.engine.sequence import Sequence
from forerun.ops.base import Executor
from forerun.sampling.distribution import NO_IDS, Law, RowSampler
from forerun.sampling.history import History
from forerun.types import (
    MAX_DRAFT_NODES,
    Draft,
    ForwardOutput,
    Int32Array,
    StepRecord,
    StepTimings,
    TokenLogprob,
    Verdict,
)
from forerun.verify import ArgmaxLaws, verify

MAX_STEP_NODES = MAX_DRAFT_NODES - 1  # with the last token's, 64 rows
NO_PLAN = Plan(Draft(), None, (), 0)


@dataclass(frozen=True, slots=True)
class Run:
    """A request while it runs. Set by the engine.

    Attributes:
        request: what was asked for.
        target: computes the rows.
        sampler: makes their laws and draws from them.
        sequence: tokens and KV slots.
        history: the committed tokens as penalties count them.
        output: stop handling and text.
        planner: chooses what to draft; None for plain decoding.
    """

    request: Request
    target: Executor
    sampler: RowSampler
    sequence: Sequence
    history: History
    output: Output
    planner: Planner | None


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """What a step returns: its record and what it emitted, at least one token."""

    record: StepRecord
    tokens: tuple[EmittedToken, ...]


def prefill_step(run: Run, chunk: int) -> StepOutcome:
    """Runs the prompt through the target, at most `chunk` rows a pass, and emits the first token.

    The record is that of the last pass, the one that gives the token.
    """
    sequence = run.sequence
    while sequence.cached_len < sequence.committed_len:
        clock = [time.perf_counter()] * 2
        end = min(sequence.cached_len + chunk, sequence.committed_len)
        num_rows = end - sequence.cached_len
        sequence.reserve(end)
        rows = run.target.forward(prompt_batch(sequence, end))
        sequence.mark_cached(end)
    return _finish_step(run, 0, "prefill", num_rows, NO_PLAN, rows, clock)


def decode_step(run: Run, step: int) -> StepOutcome:
    """Emits at least one token: the accepted path of a draft, and the token that follows it."""
    sequence = run.sequence
    clock = [time.perf_counter()]
    plan = propose(run)
    clock.append(time.perf_counter())
    sequence.reserve(sequence.committed_len + plan.draft.num_nodes)
    rows = run.target.forward(decode_batch(sequence, plan.draft))
    sequence.mark_cached(sequence.committed_len)
    return _finish_step(run, step, "decode", 1 + plan.draft.num_nodes, plan, rows, clock)


def _finish_step(
    run: Run,
    step: int,
    kind: Literal["prefill", "decode"],
    num_rows: int,
    plan: Plan,
    rows: ForwardOutput,
    clock: list[float],
) -> StepOutcome:
    """From logits to committed tokens. `clock` holds when the step began and when its forward pass began."""
    began, forward_began = clock
    verify_began = time.perf_counter()
    request, draft, committed_len = run.request, plan.draft, run.sequence.committed_len
    laws = law_at(run, draft, rows)
    rule, verdict = verify(request.rule, draft, laws, run.sampler, request.noise_key, committed_len)
    verify_ended = time.perf_counter()
    tokens = _emit(run, draft, verdict, rows)
    emitted = tuple([token.token_id for token in tokens])
    _commit(run, verdict, emitted)
    if run.planner is not None:
        run.planner.observe(draft, rows)
        run.planner.advance(plan, emitted)
    timings = StepTimings(
        draft_s=forward_began - began,
        forward_s=verify_began - forward_began,
        verify_s=verify_ended - verify_began,
        total_s=time.perf_counter() - began,
    )
    if run.planner is not None and kind == "decode":
        run.planner.learn(plan, len(emitted), timings)
    record = StepRecord(step, kind, committed_len, num_rows, draft, rule, verdict, emitted, timings, plan.decision)
    return StepOutcome(record, tokens)


def propose(run: Run) -> Plan:
    """The draft, never longer than what may still be emitted before the token that follows it.

    Raises:
        EngineFault: a drafter broke its promises.
    """
    if run.planner is None:
        return NO_PLAN
    max_nodes = min(run.sequence.remaining_len - 1, MAX_STEP_NODES)
    return run.planner.plan(max_nodes, run.sequence.committed_len)


def law_at(run: Run, draft: Draft, rows: ForwardOutput) -> Callable[[int], Law]:
    """The law of the token after a node, -1 being the root; computed when the rule asks for it.

    Penalties and bans follow the node's own path, as if its tokens had been emitted.
    """
    request = run.request
    is_free_to_end = not request.end_ids or run.sequence.num_output_tokens >= request.params.min_tokens
    if request.is_argmax and is_free_to_end:
        return ArgmaxLaws(rows.argmax_ids)

    def law(node: int) -> Law:
        path_ids = _path_ids(draft, node)
        banned_ids = _banned_ids(run, len(path_ids))
        return run.sampler.law(rows.logits[node + 1], request.params, run.history.along(path_ids), banned_ids)

    return law


def _path_ids(draft: Draft, node: int) -> tuple[int, ...]:
    """Tokens from the root's child down to the node."""
    path = []
    while node >= 0:
        path.append(draft.token_ids[node])
        node = draft.parents[node]
    return tuple(reversed(path))


def _banned_ids(run: Run, path_len: int) -> Int32Array:
    """Ids that must not follow a path: those that end the output, until min_tokens are out."""
    if run.sequence.num_output_tokens + path_len >= run.request.params.min_tokens:
        return NO_IDS
    return np.array(sorted(run.request.end_ids), np.int32)


def _emit(run: Run, draft: Draft, verdict: Verdict, rows: ForwardOutput) -> tuple[EmittedToken, ...]:
    """The accepted path and the next token, up to the one that ends the output."""
    num_top = run.request.params.logprobs or 0
    token_ids = (*[draft.token_ids[node] for node in verdict.accepted], verdict.next_token_id)
    nodes_before = (-1, *verdict.accepted)

    def logprob_of(index: int, token_id: int) -> TokenLogprob:
        return run.sampler.logprobs(rows.logits[nodes_before[index] + 1], token_id, num_top)

    return run.output.emit(token_ids, len(verdict.accepted), run.sequence.remaining_len, logprob_of)


def _commit(run: Run, verdict: Verdict, emitted: tuple[int, ...]) -> None:
    """Appends the emitted tokens and moves accepted nodes' keys and values into place; a chain moves nothing."""
    sequence = run.sequence
    kept = verdict.accepted[: len(emitted)]
    # A node's place is never after its slot, so copying in path order overwrites nothing that is still to be copied.
    moves = [(node, place) for place, node in enumerate(kept) if node != place]
    if moves:
        slots = np.array(moves, np.int32) + np.int32(sequence.committed_len)
        src, dst = np.ascontiguousarray(slots.T)
        run.target.move_slots(sequence.page_table, src, dst)
    sequence.commit(emitted, num_cached=len(kept))
    for token_id in emitted:
        run.history.append(token_id)
