"""A model and an engine's worker that say what a script says, for tests of the server."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from forerun.drafters.spec import Speculation
from forerun.engine.completion import Completion, Stats, StreamEvent
from forerun.engine.jobs import EngineLoad, Job
from forerun.engine.output import Output
from forerun.engine.request import Limits, Request, prepare
from forerun.errors import EngineFault, ForerunError
from forerun.models.chat_template import ChatTemplate, encode_chat
from forerun.models.detokenizer import TextStream
from forerun.models.grammar import Grammar, GrammarCompiler
from forerun.models.structured import Structured
from forerun.models.tools import tool_format
from forerun.serve.answers import Identity
from forerun.serve.app import Served, create_app
from forerun.serve.drafting import loaded_drafters
from forerun.serve.front import Front
from forerun.serve.hub import Hub
from forerun.serve.metrics import Metrics
from forerun.serve.settings import ServeSettings
from forerun.types import Draft, SamplingParams, StepRecord, StepTimings, TokenLogprob, Verdict
from tests.helpers.toy_vocab import TOY

EOS = 2
_PLAIN_TEMPLATE = (
    "{% if note %}{{ note }} {% endif %}{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
# The same where there are no tools.
_TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}, called as <tool_call> {% endif %}"
    "{% if note %}{{ note }} {% endif %}{% for m in messages %}{{ m.role }}: {{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}{% endfor %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)

# What a job's steps emit: groups of ids, or an error that ends it.
Script = Callable[[Job], Iterator[Sequence[int] | ForerunError]]


def say(text: str, group: int = 3) -> Script:
    """Says a text in steps of some tokens, then ends."""
    ids = [*TOY.encode(text), EOS]

    def script(job: Job) -> Iterator[Sequence[int] | ForerunError]:
        for start in range(0, len(ids), group):
            yield ids[start : start + group]

    return script


def say_forever(text: str = "again and ") -> Script:
    ids = TOY.encode(text)

    def script(job: Job) -> Iterator[Sequence[int] | ForerunError]:
        while True:
            yield ids

    return script


class FakeLLM:
    """As much of a model as the server needs."""

    def __init__(self, max_model_len: int = 256, has_tools: bool = True) -> None:
        self.tokenizer = TOY
        self.limits = Limits(TOY.vocab_size, max_model_len, frozenset({EOS}))
        self.has_chat_template = True
        self._template = ChatTemplate(_TEMPLATE if has_tools else _PLAIN_TEMPLATE)
        self.tool_format = tool_format(self._template.source, TOY)
        self._compiler = GrammarCompiler(TOY, TOY.vocab_size)
        self.compiling_threads: list[threading.Thread] = []

    def encode(self, prompt: str | Sequence[int]) -> Sequence[int]:
        return TOY.encode(prompt) if isinstance(prompt, str) else prompt

    def encode_messages(self, messages: Any, tools: Any = None, **options: Any) -> list[int]:
        return encode_chat(TOY, self._template, messages, tools=tools, **options)

    def knows_grammar(self, wanted: Structured) -> bool:
        return self._compiler.knows(wanted)

    def compile_grammar(self, wanted: Structured) -> Grammar:
        if not self.knows_grammar(wanted):
            self.compiling_threads.append(threading.current_thread())
        return self._compiler.compile(wanted)

    def job(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams | None = None,
        *,
        speculation: str = "off",
        verify: Any = "coupled",
        prediction: str | None = None,
        method: str | None = None,
        k: int | None = None,
        priority: int = 0,
        salt: str = "",
        grammar: Grammar | None = None,
        shown_ids: frozenset[int] = frozenset(),
    ) -> Job:
        parsed = Speculation.parse(speculation)
        if prediction is not None:
            parsed.check_prediction()
        expected = () if prediction is None else TOY.encode(prediction)
        request = prepare(
            prompt_token_ids,
            params or SamplingParams(),
            verify,
            self.limits,
            prediction=expected,
            grammar=grammar,
            shown_ids=shown_ids,
        )
        return Job(request, None, method, k, priority)


@dataclass
class _Running:
    request: Request
    steps: Iterator[Sequence[int] | ForerunError]
    output: Output
    ids: list[int] = field(default_factory=list)
    num_steps: int = 0
    num_drafted: int = 0
    num_accepted: int = 0


class FakeWorker:
    """Runs scripts in a thread of its own: one group of every job per step.

    Args:
        deliver: called once per step.
        script: what each job says.
        settle: waits until what was delivered has been dealt with; given what says that the worker is stopping.
    """

    def __init__(
        self, deliver: Callable[[Any], None], script: Script, settle: Callable[[Callable[[], bool]], None]
    ) -> None:
        self._settle = settle
        self.script = script
        self.gate = threading.Event()  # closed: no steps are made
        self.gate.set()
        self.jobs: list[Job] = []
        self.cancelled: list[int] = []
        self._deliver = deliver
        self._running: dict[int, _Running] = {}
        self._lock = threading.Condition()
        self._is_stopping = False
        self._thread = threading.Thread(target=self._run, daemon=True)

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    @property
    def load(self) -> EngineLoad:
        num_running = len(self._running)
        return EngineLoad(num_running, 0, 16, num_running, 0, 0)

    def start(self) -> None:
        self._thread.start()

    def submit(self, job: Job) -> int:
        with self._lock:
            job_id = len(self.jobs)
            self.jobs.append(job)
            stream = TextStream(TOY, job.request.params.stop, shown_ids=job.request.shown_ids)
            output = Output(job.request, stream, TOY.vocab_size)
            self._running[job_id] = _Running(job.request, self.script(job), output)
            self._lock.notify()
        return job_id

    def cancel(self, job_id: int) -> None:
        with self._lock:
            self.cancelled.append(job_id)
            self._running.pop(job_id, None)

    def stop(self) -> None:
        with self._lock:
            self._is_stopping = True
            self._lock.notify()
        self.gate.set()
        self._thread.join()

    def _run(self) -> None:
        while True:
            with self._lock:
                while not self._running and not self._is_stopping:
                    self._lock.wait()
            self.gate.wait()
            with self._lock:
                if self._is_stopping:
                    return
                delivery = [(job_id, _step(run)) for job_id, run in self._running.items()]
                for job_id, event in delivery:
                    if isinstance(event, ForerunError) or event.completion is not None:
                        del self._running[job_id]
            self._deliver(delivery)
            self._settle(lambda: self._is_stopping)


def _step(run: _Running) -> StreamEvent | ForerunError:
    group = next(run.steps, EngineFault("the script has ended"))
    if isinstance(group, ForerunError):
        return group
    request = run.request
    room = request.max_len - len(request.prompt_token_ids) - len(run.ids)
    num_draft = len(group) - 1 if run.num_steps else 0
    tokens = run.output.emit(group, num_draft, room, lambda index, token_id: _logprob(request, token_id))
    emitted = tuple(token.token_id for token in tokens)
    run.ids += emitted
    draft = Draft.chain(tuple(group[:num_draft]), "suffix")
    run.num_drafted += num_draft
    run.num_accepted += sum(token.is_draft for token in tokens)
    kind = "decode" if run.num_steps else "prefill"
    verdict = Verdict(tuple(range(num_draft)), group[-1], "plain", 1.0)
    timings = StepTimings(0.0, 0.001, 0.0, 0.001)
    record = StepRecord(run.num_steps, kind, 0, len(group), len(group), draft, "coupled", verdict, emitted, timings)
    run.num_steps += 1
    reason = run.output.finish_reason
    if reason is None:
        return StreamEvent(tokens, record)
    completion = Completion(
        prompt_token_ids=request.prompt_token_ids,
        token_ids=tuple(run.ids),
        text=run.output.text,
        finish_reason=reason,
        seed=request.seed,
        logprobs=run.output.logprobs,
        stats=Stats(
            prompt_tokens=len(request.prompt_token_ids),
            cached_tokens=0,
            completion_tokens=len(run.ids),
            target_passes=run.num_steps - 1,
            drafted_tokens=run.num_drafted,
            accepted_tokens=run.num_accepted,
            prefill_s=0.001,
            decode_s=0.001 * run.num_steps,
        ),
        prompt_logprobs=_prompt_logprobs(request),
    )
    return StreamEvent(tokens, record, completion)


def _logprob(request: Request, token_id: int) -> TokenLogprob:
    top = tuple((i, -1.0 - i) for i in range(request.params.logprobs or 0))
    return TokenLogprob(token_id, -token_id / 64, top)


def _prompt_logprobs(request: Request) -> tuple[TokenLogprob | None, ...] | None:
    num_top = request.params.prompt_logprobs
    if num_top is None:
        return None
    top = tuple((i, -1.0 - i) for i in range(num_top))
    return (None, *(TokenLogprob(token_id, -token_id / 64, top) for token_id in request.prompt_token_ids[1:]))


@dataclass
class FakeServer:
    """The application over a fake worker; use it as a context inside of an event loop."""

    script: Script = field(default_factory=lambda: say("hello world"))
    settings: ServeSettings = field(default_factory=lambda: ServeSettings(("toy",)))
    max_model_len: int = 256
    has_tools: bool = True  # the template knows them
    is_paced: bool = True  # every step reaches its request on its own; else as many at a time as come

    async def __aenter__(self) -> FakeServer:
        settings = self.settings
        metrics = Metrics("toy", loaded_drafters(settings.spec), settings.metrics_alias)
        max_jobs = settings.max_running + settings.max_queue
        self.hub = Hub(metrics, max_jobs, settings.send_timeout_s, settings.keepalive_s)
        self.llm: Any = FakeLLM(self.max_model_len, self.has_tools)
        self.served = Served(settings, self.hub, self.llm, Identity("toy", "fp"), is_ready=True)
        self.app: Front = create_app(self.served)
        self.worker: FakeWorker

        def make(deliver: Callable[[Any], None]) -> Any:
            self.worker = FakeWorker(deliver, self.script, self._settle)
            return self.worker

        self.hub.start(make)
        return self

    def _settle(self, is_stopping: Callable[[], bool]) -> None:
        """Lets the loop deliver, wake the request and run it."""
        done, loop = threading.Event(), self.hub.loop
        if not self.is_paced or is_stopping():
            return
        rounds = iter(range(4))

        def turn() -> None:
            if next(rounds, None) is None:
                done.set()
            else:
                loop.call_soon(turn)

        loop.call_soon_threadsafe(turn)
        while not done.wait(0.02) and not is_stopping():
            pass

    async def __aexit__(self, *details: object) -> None:
        self.worker.gate.set()
        self.hub.stop()


def with_settings(**changes: Any) -> ServeSettings:
    return replace(ServeSettings(("toy",)), **changes)
