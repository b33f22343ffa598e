"""Whole greedy answers of forerun and OpenVINO GenAI to the same prompts, plainly and with drafts, in one run.

Every arm gets the same token ids, the same threads and the same end-of-text ids. Arms take turns prompt by prompt, and
who goes first changes. A rate is decode tokens over decode seconds; the prompt's time and its first token are apart.
OpenVINO runs with its defaults, except that its plain arm takes the attention that is faster for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.arms import Crew, load_llama_cpp
from benchmarks.command import interleave_shown
from benchmarks.measure import Turn
from benchmarks.peers_spec_report import AUTO, LLAMA_CPP, OPENVINO, OPENVINO_LOOKUP, PLAIN, Answer, SpecResult
from benchmarks.wire import Worker, WorkerError
from forerun.bench.prompts import Prompt

ATTENTIONS = ("PA", "SDPA")
# As the library's own example of prompt lookup has them (samples/python/text_generation/prompt_lookup_decoding_lm.py).
NUM_ASSISTANT_TOKENS, MAX_NGRAM_SIZE = 5, 3
_WARM_UP_TOKENS = 64


@dataclass(frozen=True, slots=True)
class Settings:
    """What is compared.

    Attributes:
        num_threads: of every arm.
        max_tokens: per answer.
        lookup: OpenVINO's settings of prompt lookup.
    """

    num_threads: int
    max_tokens: int
    lookup: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Arm:
    """Who answers: a worker, and what its `answer` takes besides the prompt."""

    worker: Worker
    options: Mapping[str, Any]

    def answer(self, token_ids: Sequence[int]) -> Answer:
        """One answer."""
        return Answer.of(self.worker.ask("answer", token_ids=token_ids, **self.options))


def compare(
    crew: Crew,
    model_path: Path,
    exported: Path,
    prompts: Sequence[Prompt],
    settings: Settings,
    console: Console,
) -> SpecResult:
    """Starts every arm and measures.

    Args:
        crew: starts the workers. Where it has llama.cpp, that answers too, plainly.
        model_path: the GGUF file.
        exported: the folder with the same model for OpenVINO.
        prompts: in the order in which they are answered.
        settings: of all arms.
        console: says what happens.

    Raises:
        WorkerError: an arm failed, or forerun and OpenVINO don't hold the same model.
    """
    console.print("Loading forerun and OpenVINO, and trying OpenVINO's settings")
    own = crew.forerun(PLAIN)
    own.ask("start_engine", file=str(model_path), num_threads=settings.num_threads, max_model_len=None)
    asked = own.ask("prompt_token_ids", texts=[prompt.text for prompt in prompts])
    prompt_ids = asked["token_ids"]
    common = {"max_tokens": settings.max_tokens, "eos_ids": asked["eos_ids"]}
    load = {"folder": str(exported), "num_threads": settings.num_threads}
    plain, attention, info = _load_openvino(crew, load, common, prompt_ids[0])
    lookup = crew.openvino(OPENVINO_LOOKUP)
    lookup.ask("load", **load, attention="PA", lookup=dict(settings.lookup))
    arms = {
        PLAIN: Arm(own, {**common, "spec": "off"}),
        AUTO: Arm(own, {**common, "spec": "auto"}),
        OPENVINO: plain,
        OPENVINO_LOOKUP: Arm(lookup, common),
    }
    llama_cpp_info = None
    if crew.has_llama_cpp:
        llama_cpp = load_llama_cpp(crew, LLAMA_CPP, model_path, settings.num_threads)
        arms[LLAMA_CPP], llama_cpp_info = Arm(llama_cpp.steps, common), llama_cpp.info
    # The last question is of another kind, so that passes of many rows are met before they count.
    for arm, token_ids in product(arms.values(), (prompt_ids[0], prompt_ids[-1])):
        Arm(arm.worker, {**arm.options, "max_tokens": _WARM_UP_TOKENS}).answer(token_ids)
    own.ask("forget", spec="auto")

    answers: dict[str, list[Answer]] = {name: [] for name in arms}
    measured = interleave_shown(_turns(arms, prompt_ids, answers), console)
    result = SpecResult(
        categories=tuple(prompt.category for prompt in prompts),
        names=tuple(prompt.name for prompt in prompts),
        answers={name: tuple(rows) for name, rows in answers.items()},
        measured=measured,
        max_tokens=settings.max_tokens,
        num_threads=settings.num_threads,
        openvino_info={**info, "attention": attention, "lookup": dict(settings.lookup)},
        llama_cpp_info=llama_cpp_info,
    )
    _check_same_model(result)
    return result


def _load_openvino(
    crew: Crew, load: dict[str, Any], common: dict[str, Any], prompt: Sequence[int]
) -> tuple[Arm, str, dict[str, Any]]:
    """The plain arm with the faster attention, which one that is, and what the library says about itself."""
    arms = {name: Arm(crew.openvino(f"{OPENVINO}, attention {name}"), common) for name in ATTENTIONS}
    seconds = {}
    for name, arm in arms.items():
        info = arm.worker.ask("load", **load, attention=name, lookup=None)
        trial = Arm(arm.worker, {**common, "max_tokens": _WARM_UP_TOKENS})
        trial.answer(prompt)
        answer = trial.answer(prompt)
        seconds[name] = answer.decode_s / max(answer.num_decoded, 1)
    best = min(seconds, key=seconds.__getitem__)
    for name in arms.keys() - {best}:
        crew.dismiss(arms[name].worker)
    return arms[best], best, info


def _turns(
    arms: Mapping[str, Arm], prompt_ids: Sequence[Sequence[int]], answers: dict[str, list[Answer]]
) -> list[Turn]:
    """A turn for each answer, which it puts at the end of its arm's list; who goes first changes by prompt."""
    turns = []
    names = list(arms)
    for number, token_ids in enumerate(prompt_ids):
        start = number % len(names)
        for name in names[start:] + names[:start]:

            def run(name: str = name, token_ids: Sequence[int] = token_ids) -> list[float]:
                answers[name].append(arms[name].answer(token_ids))
                return [answers[name][-1].decode_s]

            turns.append(Turn((name, number), arms[name].worker, run, num_rounds=1, has_warm_up=False))
    return turns


def _check_same_model(result: SpecResult) -> None:
    """First tokens are often near ties, where quantisations differ; another model, or other tokens, differ in most."""
    num_same = sum(num_shared > 0 for num_shared in result.shared_tokens(PLAIN, OPENVINO))
    if 4 * num_same < len(result.names):
        raise WorkerError(
            f"OpenVINO's answers begin as forerun's do on {num_same} of {len(result.names)} prompts only; the exported "
            "model is another one"
        )
