"""Has a model write texts of its own choosing, for its datastore.

A chat model is given a conversation up to where the user would speak, makes up what the user says, and answers that (Xu
et al. 2024, Magpie, arXiv 2406.08464). A model without a chat template writes on from nothing. Every text is a function
of the model, the seed and its number, so a datastore can be checked by writing a part of it again.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from forerun.engine.llm import LLM
from forerun.errors import RequestError
from forerun.types import SamplingParams

MAX_QUESTION_TOKENS = 128
MIN_QUESTION_TOKENS = 4
MAX_TEXT_TOKENS = 256
QUESTION_TEMPERATURE, QUESTION_TOP_P = 1.0, 0.95
# Sampled texts serve greedy requests as well as greedy ones do, and others better: they repeat each other less.
TEXT_TEMPERATURE = 0.8
MAX_FAILURES = 64  # questions in a row that can't be answered
SPECULATION = "suffix:datastore=off"  # what was written before speeds up what comes next


def write_texts(llm: LLM, seed: int, questions: Sequence[str] = ()) -> Iterator[tuple[int, ...]]:
    """Token ids of one text after another, as long as texts are asked for.

    Args:
        llm: the model.
        seed: texts of another seed are others.
        questions: what to answer, in turn and again; empty lets the model make them up.

    Raises:
        RequestError: a question is too long, the chat template refuses it, or the model can't think of one.
    """
    num_failures = 0
    for number in itertools.count():
        prompt = _prompt(llm, seed + 2 * number, questions[number % len(questions)] if questions else None)
        if prompt is None:
            num_failures += 1
            if num_failures == MAX_FAILURES:
                raise RequestError(f"the model made up no question in {MAX_FAILURES} tries; give it some to answer")
            continue
        num_failures = 0
        params = SamplingParams(max_tokens=MAX_TEXT_TOKENS, temperature=TEXT_TEMPERATURE, seed=seed + 2 * number + 1)
        (completion,) = llm.generate([prompt], params, speculation=SPECULATION)
        yield completion.token_ids


def _prompt(llm: LLM, seed: int, question: str | None) -> Sequence[int] | None:
    """What to continue; None where the model made up nothing that could be answered."""
    if not llm.has_chat_template:
        return llm.encode("\n" if question is None else question)
    question = _make_up(llm, seed) if question is None else question
    return None if question is None else llm.encode_messages([{"role": "user", "content": question}])


def _make_up(llm: LLM, seed: int) -> str | None:
    """What a user may say; None where the model finds no end, or nothing to say."""
    before, after = _around_user(llm)
    params = SamplingParams(
        max_tokens=MAX_QUESTION_TOKENS,
        temperature=QUESTION_TEMPERATURE,
        top_p=QUESTION_TOP_P,
        seed=seed,
        stop_token_ids=(after,),
    )
    (completion,) = llm.generate([before], params, speculation=SPECULATION)
    is_short = len(completion.token_ids) <= MIN_QUESTION_TOKENS
    return None if completion.finish_reason != "stop" or is_short else completion.text.strip() or None


def _around_user(llm: LLM) -> tuple[list[int], int]:
    """The ids before what a user says, and the first one after it: what two conversations have in common."""
    one, other = (llm.encode_messages([{"role": "user", "content": content}]) for content in ("A", "7"))
    num_before, num_after = _num_equal(one, other), _num_equal(one[::-1], other[::-1])
    if not num_before or not num_after:
        raise RequestError("the chat template leaves a user no room to speak; give the model questions to answer")
    return one[:num_before], one[-num_after]


def _num_equal(left: Sequence[int], right: Sequence[int]) -> int:
    """How many ids both begin with."""
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(left, right, strict=False)))
