"""Has a model write texts of its own choosing, for its datastore.

A chat model is given a conversation up to where the user would speak, makes up what the user says, and answers that (Xu
et al. 2024, Magpie, arXiv 2406.08464). A model without a chat template writes on from nothing. Every text is a function
of the model, the seed and its number, so a datastore can be checked by writing a part of it again.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from forerun.engine.llm import LLM
from forerun.types import SamplingParams

MAX_QUESTION_TOKENS = 128
MIN_QUESTION_TOKENS = 4
MAX_TEXT_TOKENS = 256
QUESTION_TEMPERATURE, QUESTION_TOP_P = 1.0, 0.95
# Sampled texts serve greedy requests as well as greedy ones do, and others better: they repeat each other less.
TEXT_TEMPERATURE = 0.8
SPECULATION = "suffix:datastore=off"  # what was written before speeds up what comes next


def write_texts(llm: LLM, seed: int, questions: Sequence[str] = ()) -> Iterator[tuple[int, ...]]:
    """Token ids of one text after another, without end.

    Args:
        llm: the model.
        seed: texts of another seed are others.
        questions: what to answer, in turn and again; empty lets the model make them up.

    Raises:
        RequestError: a question is too long, or the model has a chat template that takes none.
    """
    for number in itertools.count():
        prompt = _prompt(llm, seed + 2 * number, questions[number % len(questions)] if questions else None)
        if prompt is None:
            continue
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
    num_before = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))
    return one[:num_before], one[num_before + 1]
