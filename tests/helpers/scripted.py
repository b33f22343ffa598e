"""Drafters that do as they are told, given to `LLM` like any other, and what two runs of one request must share.

A scripted drafter knows what plain decoding emits: with the whole of it, it is the target drafting for itself.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest

from forerun import LLM, Completion, SamplingParams
from forerun.drafters.base import DraftTarget
from forerun.drafters.spec import Speculation
from forerun.types import Draft, DraftTraits, NoiseStream
from tests.helpers.engines import Answer, Plan, Scripted, ScriptedSource

TAIL = 80  # drafted tokens beyond the end of an output, which must never come out


def open_llm(path: str | Path, isa: str, **options: Any) -> LLM:
    """A model on the native backend with an instruction set of the test's choice."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FORERUN_ISA", isa)
        return LLM(path, **options)


@dataclass(frozen=True)
class Script:
    """The settings of a scripted drafter, as `Speculation` holds them."""

    name: ClassVar[str] = "scripted"
    summary: ClassVar[str] = "what the test says"
    needs: ClassVar[str] = "nothing"

    truth: tuple[int, ...]
    plan: Plan

    @property
    def is_off(self) -> bool:
        return False

    def traits(self, stream: NoiseStream) -> DraftTraits:
        return DraftTraits()

    def bind(self, target: DraftTarget) -> ScriptedSource:
        return ScriptedSource(lambda context: Scripted(self.truth, self.plan))


def scripted(token_ids: Sequence[int], plan: Plan, vocab_size: int) -> Speculation:
    """Speculation by a drafter that knows the output, and goes on with random ids where it ends."""
    rng = random.Random(len(token_ids))
    return Speculation((Script((*token_ids, *(rng.randrange(vocab_size) for _ in range(TAIL))), plan),))


def noise(k: int, vocab_size: int, seed: int = 0) -> Plan:
    """A chain of k random ids, nearly all of which are rejected."""
    rng = random.Random(seed)
    return lambda future, max_nodes: Draft.chain(
        tuple(rng.randrange(vocab_size) for _ in range(min(k, max_nodes))), "noise"
    )


def hole(k: int, at: int, token_id: int) -> Plan:
    """A right chain but for one node: what follows it is right, was computed after a wrong token, and must not stay."""

    def plan(future: list[int], max_nodes: int) -> Draft:
        ids = future[: min(k, max_nodes)]
        if at < len(ids):
            ids[at] = token_id if ids[at] != token_id else token_id + 1
        return Draft.chain(tuple(ids), "hole")

    return plan


def shifted(k: int, by: int) -> Plan:
    """A chain of the right tokens, each `by` places too early."""
    return lambda future, max_nodes: Draft.chain(tuple(future[by : by + min(k, max_nodes)]), "shifted")


def stuttering(k: int) -> Plan:
    """The next token, again and again."""
    return lambda future, max_nodes: Draft.chain((future[0],) * min(k, max_nodes), "stuttering")


def alternating(*plans: Plan) -> Plan:
    """Another plan in every step, and no draft at all after the last one."""
    turn = 0

    def plan(future: list[int], max_nodes: int) -> Draft:
        nonlocal turn
        turn = (turn + 1) % (len(plans) + 1)
        return plans[turn - 1](future, max_nodes) if turn else Draft()

    return plan


def fork(k: int, vocab_size: int, seed: int = 0) -> Plan:
    """Two branches of k nodes whose nodes take turns: a right one and, wherever it leads, a random one.

    Every accepted node but the first lies out of place, and the branch that was refused lies between.
    """
    rng = random.Random(seed)

    def plan(future: list[int], max_nodes: int) -> Draft:
        depth = min(k, max_nodes // 2)
        ids: list[int] = []
        parents: list[int] = []
        for level in range(depth):
            wrong = rng.randrange(vocab_size)
            if level == 0 and wrong == future[0]:
                wrong = (wrong + 1) % vocab_size
            ids += [wrong, future[level]]
            parents += [2 * level - 2, 2 * level - 1] if level else [-1, -1]
        return Draft(tuple(ids), tuple(parents), ("fork",) * len(ids), (None,) * len(ids))

    return plan


def complete(
    llm: LLM, prompt: str | Sequence[int], params: SamplingParams, speculation: str | Speculation = "off"
) -> Completion:
    """What one request gives, once it is known to count what it did."""
    (completion,) = llm.generate([prompt], params, speculation=speculation)
    stats = completion.stats
    assert completion.prompt_token_ids == tuple(llm.encode(prompt))
    assert params.seed is None or completion.seed == params.seed
    assert stats.prompt_tokens == len(completion.prompt_token_ids)
    assert stats.accepted_tokens <= stats.drafted_tokens
    # Every pass emits what it accepted and one token more, but for a last one that ended inside its draft.
    unused = 1 + stats.target_passes + stats.accepted_tokens - stats.completion_tokens
    assert unused == 0 or (unused == 1 and completion.finish_reason == "stop")
    return completion


def answer(
    llm: LLM, prompt: str | Sequence[int], params: SamplingParams, speculation: str | Speculation = "off"
) -> Answer:
    """All of it that speculation, chunks, threads and instruction sets must not change."""
    return Answer.of(complete(llm, prompt, params, speculation))
