"""One step: draft, run the target, verify, emit, commit, record, for all requests that run.

For each request it is the algorithm of Leviathan et al. 2023 (arXiv 2211.17192, Algorithm 1) with the drafter and the
verification rule left open. Plain decoding is a step with an empty draft, and so is the first token after the prompt:
there is no other path to a token, and therefore none on which a parameter could be forgotten.

What one request brings into a step touches no other: drafters, laws and verdicts are each request's own, and a row of
the pass depends on its own sequence alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from forerun.batch import Piece, StepBatch
from forerun.control.controller import Ask, Controller, StepLoad, StepTimes
from forerun.control.planner import NO_DRAFT, NO_PLAN, Plan
from forerun.engine.completion import EmittedToken
from forerun.engine.pieces import draft_piece, prompt_piece
from forerun.engine.run import Run
from forerun.engine.scheduler import Turn
from forerun.errors import EngineFault, ForerunError, as_fault
from forerun.ops.base import Executor
from forerun.sampling.distribution import NO_IDS, Law, RowSampler, count_allowed, is_allowed
from forerun.types import (
    Draft,
    ForwardOutput,
    Int32Array,
    StepRecord,
    StepTimings,
    TokenLogprob,
    UInt32Array,
    Verdict,
    VerifyRule,
)
from forerun.verify import ArgmaxLaws, verify


@dataclass(frozen=True, slots=True)
class Machine:
    """What a step runs on. Set by the engine.

    Attributes:
        target: computes the rows.
        sampler: makes their laws and draws from them.
        controller: chooses what is drafted.
    """

    target: Executor
    sampler: RowSampler
    controller: Controller


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """What a step gave a request: its record and what it emitted, at least one token."""

    record: StepRecord
    tokens: tuple[EmittedToken, ...]


Outcome = tuple[Run, StepOutcome | ForerunError]


def run_step(turns: Sequence[Turn], num_present: int, machine: Machine) -> list[Outcome]:
    """Runs one step of these requests, one turn each.

    Args:
        turns: who runs.
        num_present: requests in line, see `StepLoad`.
        machine: what it runs on.

    Returns:
        What came of each that got tokens or failed; a prompt that isn't done yet has nothing to say.
    """
    began = time.perf_counter()
    load = _load(turns, num_present)
    drafts, failed = _draft(turns, load, machine.controller)
    forward_began = time.perf_counter()
    results: list[_Result] = []
    forward_s = 0.0
    for draft, rows in _forward(drafts, machine.target):
        forward_s = forward_s or time.perf_counter() - forward_began
        try:
            if isinstance(rows, EngineFault):
                raise rows
            result = _finish(draft, rows, machine)
        except Exception as error:
            failed.append((draft.turn.run, as_fault(error, "a step failed")))
        else:
            if result is not None:
                results.append(result)
    times = StepTimes(forward_s, time.perf_counter() - began)
    _learn(results, load, times, machine.controller)
    num_pass_rows = sum([draft.piece.num_rows for draft in drafts])
    return [(result.draft.turn.run, _record(result, num_pass_rows, times)) for result in results] + failed


@dataclass(frozen=True, slots=True)
class _Drafted:
    """A request's rows of a step."""

    turn: Turn
    plan: Plan
    piece: Piece


@dataclass(frozen=True, slots=True)
class _Result:
    """What they came to."""

    draft: _Drafted
    committed_len: int  # before the step
    rule: VerifyRule
    verdict: Verdict
    tokens: tuple[EmittedToken, ...]
    verify_s: float


def _load(turns: Sequence[Turn], num_present: int) -> StepLoad:
    num_decoding = num_prompt_rows = context_len = 0
    for turn in turns:
        num_rows = turn.end - turn.run.sequence.cached_len
        context_len += num_rows * turn.end
        if turn.is_decoding:
            num_decoding += 1
        else:
            num_prompt_rows += num_rows
    mean_len = context_len / (num_decoding + num_prompt_rows)
    return StepLoad(num_decoding, num_prompt_rows, len(turns), mean_len, num_present)


def _draft(turns: Sequence[Turn], load: StepLoad, controller: Controller) -> tuple[list[_Drafted], list[Outcome]]:
    """What each request brings into the pass, and those whose drafters broke their promises."""
    asked = [turn.run for turn in turns if turn.is_decoding and turn.run.planner is not None]
    asks = [Ask(run.planner, run.max_nodes) for run in asked if run.planner is not None]
    plans = {run.run_id: plan for run, plan in zip(asked, controller.plan(load, asks), strict=True)} if asks else {}
    drafts: list[_Drafted] = []
    failed: list[Outcome] = []
    for turn in turns:
        plan = plans.get(turn.run.run_id, NO_PLAN)
        if isinstance(plan, ForerunError):
            failed.append((turn.run, plan))
            continue
        sequence = turn.run.sequence
        if not sequence.try_reserve(turn.end + plan.draft.num_nodes):
            plan = replace(plan, draft=NO_DRAFT)  # pages are short, and a draft is nobody's due
        drafts.append(_Drafted(turn, plan, _piece(turn, plan.draft)))
    return drafts, failed


def _piece(turn: Turn, draft: Draft) -> Piece:
    sequence = turn.run.sequence
    if turn.is_decoding:
        return draft_piece(sequence, draft)
    wants_all = turn.run.wants_prompt_logprobs
    num_logits = turn.end - sequence.cached_len if wants_all else int(turn.gives_tokens)
    return prompt_piece(sequence, turn.end, num_logits)


def _forward(drafts: Sequence[_Drafted], target: Executor) -> Iterator[tuple[_Drafted, ForwardOutput | EngineFault]]:
    """The rows of each request, to be used up before the next is asked for; a pass for all of them, if it works."""
    if not drafts:
        return
    try:
        rows = target.forward(StepBatch(*[draft.piece for draft in drafts]))
    except EngineFault as fault:
        if len(drafts) == 1:
            yield drafts[0], fault
            return
        # Whoever broke it must not break the others: each runs alone, and writes the same slots anew.
        for draft in drafts:
            yield from _forward([draft], target)
        return
    begin = 0
    for draft in drafts:
        end = begin + draft.piece.num_logits
        yield draft, rows.part(begin, end)
        begin = end


def _finish(draft: _Drafted, rows: ForwardOutput, machine: Machine) -> _Result | None:
    """From logits to committed tokens; None for a prompt that goes on."""
    run, plan = draft.turn.run, draft.plan
    sequence = run.sequence
    if not draft.turn.is_decoding:
        rows = _read_prompt(draft, rows, machine.sampler)
    sequence.mark_cached(draft.turn.end)
    if not draft.turn.is_decoding:
        sequence.publish()
    if not draft.turn.gives_tokens:
        return None
    began = time.perf_counter()
    request, committed_len = run.request, sequence.committed_len
    laws = law_at(run, plan.draft, rows, machine.sampler)
    rule, verdict = verify(request.rule, plan.draft, laws, machine.sampler, request.noise_key, committed_len)
    verify_s = time.perf_counter() - began
    tokens = _emit(run, plan.draft, verdict, rows, machine.sampler)
    emitted = tuple([token.token_id for token in tokens])
    _commit(run, verdict, emitted, machine.target)
    if run.planner is not None:
        run.planner.observe(plan.draft, rows)
        run.planner.advance(plan, emitted)
    return _Result(draft, committed_len, rule, verdict, tokens, verify_s)


def _read_prompt(draft: _Drafted, rows: ForwardOutput, sampler: RowSampler) -> ForwardOutput:
    """Reads the log-probabilities of a prompt's tokens, where they are wanted; returns the row after its last one."""
    run = draft.turn.run
    if run.wants_prompt_logprobs:
        assert run.prompt_logprobs is not None
        num_top = run.request.params.prompt_logprobs or 0
        # A request that gave its pages back computes again what was read before.
        first = len(run.prompt_logprobs)
        for token in range(first + 1, min(draft.turn.end + 1, run.sequence.num_prompt_tokens)):
            logits_V = rows.logits[token - 1 - run.sequence.cached_len]
            run.prompt_logprobs.append(sampler.logprobs(logits_V, run.sequence.token_ids[token], num_top))
    num_logits = draft.piece.num_logits
    return rows.part(num_logits - 1, num_logits) if draft.turn.gives_tokens else rows


def _learn(results: Sequence[_Result], load: StepLoad, times: StepTimes, controller: Controller) -> None:
    planned = [result for result in results if result.draft.turn.is_decoding and result.draft.turn.run.planner]
    controller.learn(
        load,
        [result.draft.turn.run.planner for result in planned],  # type: ignore[misc]
        [result.draft.plan for result in planned],
        [len(result.tokens) for result in planned],
        times,
    )


def _record(result: _Result, num_pass_rows: int, times: StepTimes) -> StepOutcome:
    plan, run = result.draft.plan, result.draft.turn.run
    record = StepRecord(
        step=run.num_steps,
        kind="decode" if run.num_steps else "prefill",
        committed_len=result.committed_len,
        num_rows=result.draft.piece.num_rows,
        num_pass_rows=num_pass_rows,
        draft=plan.draft,
        rule=result.rule,
        verdict=result.verdict,
        emitted=tuple([token.token_id for token in result.tokens]),
        timings=StepTimings(plan.draft_s, times.forward_s, result.verify_s, times.total_s),
        decision=plan.decision,
    )
    return StepOutcome(record, result.tokens)


def law_at(run: Run, draft: Draft, rows: ForwardOutput, sampler: RowSampler) -> Callable[[int], Law]:
    """The law of the token after a node, -1 being the root; computed when the rule asks for it.

    Penalties, bans and grammar follow the node's own path, as if its tokens had been emitted.
    """
    request, grammar = run.request, run.grammar
    is_free_to_end = not request.end_ids or run.sequence.num_output_tokens >= request.params.min_tokens
    if request.is_argmax and is_free_to_end and grammar is None:
        return ArgmaxLaws(rows.argmax_ids)

    def law(node: int) -> Law:
        path_ids = _path_ids(draft, node)
        allowed = None if grammar is None else grammar.mask_after(path_ids)
        banned_ids = _banned_ids(run, len(path_ids), allowed)
        if allowed is not None and request.is_argmax and not len(banned_ids):
            # The largest logit of all is the largest of those that are allowed, where it is one of them.
            argmax_id = rows.argmax_ids[node + 1]
            if is_allowed(allowed, argmax_id):
                return Law.point(argmax_id)
        return sampler.law(rows.logits[node + 1], request.params, run.history.along(path_ids), banned_ids, allowed)

    return law


def _path_ids(draft: Draft, node: int) -> tuple[int, ...]:
    """Tokens from the root's child down to the node."""
    path = []
    while node >= 0:
        path.append(draft.token_ids[node])
        node = draft.parents[node]
    return tuple(reversed(path))


def _banned_ids(run: Run, path_len: int, allowed: UInt32Array | None) -> Int32Array:
    """Ids that must not follow a path: those that end the output, until min_tokens are out.

    Where a grammar allows nothing else, they may follow all the same: it goes before min_tokens.
    """
    if run.sequence.num_output_tokens + path_len >= run.request.params.min_tokens:
        return NO_IDS
    end_ids = run.request.end_ids
    if allowed is not None and count_allowed(allowed) == sum(is_allowed(allowed, end_id) for end_id in end_ids):
        return NO_IDS
    return np.array(sorted(end_ids), np.int32)


def _emit(
    run: Run, draft: Draft, verdict: Verdict, rows: ForwardOutput, sampler: RowSampler
) -> tuple[EmittedToken, ...]:
    """The accepted path and the next token, up to the one that ends the output."""
    num_top = run.request.params.logprobs or 0
    token_ids = (*[draft.token_ids[node] for node in verdict.accepted], verdict.next_token_id)
    nodes_before = (-1, *verdict.accepted)

    def logprob_of(index: int, token_id: int) -> TokenLogprob:
        return sampler.logprobs(rows.logits[nodes_before[index] + 1], token_id, num_top)

    return run.output.emit(token_ids, len(verdict.accepted), run.sequence.remaining_len, logprob_of)


def _commit(run: Run, verdict: Verdict, emitted: tuple[int, ...], target: Executor) -> None:
    """Appends the emitted tokens and moves accepted nodes' keys and values into place; a chain moves nothing."""
    sequence = run.sequence
    kept = verdict.accepted[: len(emitted)]
    # A node's place is never after its slot, so copying in path order overwrites nothing that is still to be copied.
    moves = [(node, place) for place, node in enumerate(kept) if node != place]
    if moves:
        slots = np.array(moves, np.int32) + np.int32(sequence.committed_len)
        src, dst = np.ascontiguousarray(slots.T)
        target.move_slots(sequence.page_table, src, dst)
    sequence.commit(emitted, num_cached=len(kept))
    if run.grammar is not None:
        run.grammar.advance(emitted)
    for token_id in emitted:
        run.history.append(token_id)
