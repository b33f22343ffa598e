"""A loaded model and the settings that every request of a command shares."""

from __future__ import annotations

import time
from collections.abc import Generator
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING

from forerun.cli.display import TextPrinter, note
from forerun.cli.jsonlines import TraceFile
from forerun.cli.options import EngineOptions, SpeculationOptions
from forerun.cli.progress import ProgressBar
from forerun.types import SamplingParams, VerifyRule

if TYPE_CHECKING:
    from forerun.drafters.spec import Speculation
    from forerun.engine.completion import Completion, Stats, StreamEvent
    from forerun.engine.llm import LLM
    from forerun.models.structured import Structured

Messages = list[dict[str, str]]


@dataclass(frozen=True, slots=True)
class Session:
    """Answers requests one at a time.

    Attributes:
        llm: the loaded model.
        params: what every request asks for.
        speculation: who drafts.
        verify: how drafts are verified.
        prediction: what the answers are expected to look like.
        grammar: what the answers must look like.
    """

    llm: LLM
    params: SamplingParams
    speculation: Speculation
    verify: VerifyRule
    prediction: str | None = None
    grammar: Structured | None = None

    def stream(self, prompt: str | Messages, trace: TraceFile) -> Generator[StreamEvent]:
        """The answer step by step; a text is continued as it is, messages go through the chat template.

        Closing it ends the request, which a model must know before it takes the next one.
        """
        yield from self.llm.stream(
            prompt,
            self.params,
            speculation=self.speculation,
            verify=self.verify,
            prediction=self.prediction,
            grammar=self.grammar,
            on_step=trace.write,
        )

    def complete(self, prompt: str | Messages, trace: TraceFile) -> Completion:
        """The whole answer, with nothing shown."""
        with closing(self.stream(prompt, trace)) as events:
            *_, last = events
        assert last.completion is not None
        return last.completion

    def answer(self, prompt: str | Messages, printer: TextPrinter, trace: TraceFile, so_far: list[str]) -> None:
        """Streams the answer to the printer and a closing line to stderr.

        Args:
            prompt: a text to continue, or messages.
            printer: shows the text.
            trace: gets the step records.
            so_far: each piece is appended, so that the caller knows what was shown when the answer is cancelled.
        """
        completion = None
        try:
            with closing(self.stream(prompt, trace)) as events:
                for event in events:
                    for token in event.tokens:
                        so_far.append(token.text)
                        printer.write(token.text, token.is_draft)
                    completion = event.completion
        finally:
            printer.finish()
        assert completion is not None
        note(closing_line(completion.stats))


def open_session(
    model: str,
    engine: EngineOptions,
    speculation: SpeculationOptions,
    params: SamplingParams,
    prediction: str | None = None,
    grammar: Structured | None = None,
) -> Session:
    """Loads a model, after the cheap mistakes have been found, and says on stderr what is active.

    Raises:
        ConfigError: a setting can't be had.
        RequestError: a seed is given that the verification rule can't honour, or a prediction that nobody would use.
        LoadError: the model can't be read.
    """
    from forerun.drafters.spec import Speculation
    from forerun.engine.request import check_seed

    active = Speculation.parse(speculation.spec)
    active.check_rule(speculation.verify)
    check_seed(params, speculation.verify)
    if prediction is not None:
        active.check_prediction()
    start = time.perf_counter()
    with ProgressBar(f"fetching {model}", is_bytes=True) as bar:
        llm = engine.load(model, progress=bar.update)
    note(
        f"forerun: {model} on {engine.backend}, quant {engine.quant}, kv {engine.kv}; speculation {active}, "
        f"verify {speculation.verify}; loaded in {time.perf_counter() - start:.2f} s"
    )
    return Session(llm, params, active, speculation.verify, prediction, grammar)


def closing_line(stats: Stats) -> str:
    """What the answer took, in one line."""
    passes = stats.target_passes
    per_pass = f"{(stats.completion_tokens - 1) / passes:.2f}" if passes else "-"
    line = f"forerun: {stats.completion_tokens} tokens in {passes} target passes, {per_pass} per pass, "
    if stats.cached_tokens:
        line += f"{stats.cached_tokens} of {stats.prompt_tokens} prompt tokens were cached, "
    if stats.drafted_tokens:
        line += f"{stats.accepted_tokens} of {stats.drafted_tokens} draft tokens accepted, "
    return line + f"{stats.decode_tok_per_s:.1f} tokens/s"
