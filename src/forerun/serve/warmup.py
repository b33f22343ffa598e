"""The first requests, made by the server itself, so that nobody else's is the slow one (F062)."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING

from forerun.errors import RequestError
from forerun.models.structured import Structured
from forerun.serve.app import Served
from forerun.types import SamplingParams

if TYPE_CHECKING:
    from forerun.engine.llm import LLM

# Repetition gives drafters something to propose, so that the passes over drafts are warm too.
_TEXT = "one two three four one two three four one two three four one two"
_NUM_TOKENS = 24


async def warm_up(served: Served, llm: LLM) -> None:
    """Compiles a grammar, which reads the vocabulary, and runs a greedy and a sampled request, as requests come in.

    Raises:
        ForerunError: the model can't run.
    """
    settings = served.settings
    with suppress(RequestError):  # a vocabulary without braces
        await asyncio.to_thread(llm.compile_grammar, Structured.json_object())
    token_ids = llm.encode(_TEXT)[: max(1, llm.limits.max_model_len // 2)]
    variants = (
        SamplingParams(max_tokens=_NUM_TOKENS, ignore_eos=True),
        SamplingParams(max_tokens=_NUM_TOKENS, ignore_eos=True, temperature=1.0, top_p=0.9, logprobs=1),
    )
    for params in variants:
        job = llm.job(token_ids, params, speculation=settings.spec, verify=settings.verify, salt="warm-up")
        await served.hub.run_quietly(job)
