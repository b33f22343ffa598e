"""`LLM`: a model file, ready to answer. Puts loader, tokenizer, backend, sampler and engine together, no more."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from contextlib import closing
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, get_args

from forerun.control.cost import StepCosts
from forerun.control.measure import load_curve
from forerun.control.speculator import Speculator
from forerun.drafters.base import DraftTarget
from forerun.drafters.datastore import datastore_name, find_datastore, read_datastore
from forerun.drafters.spec import Speculation
from forerun.engine.completion import Completion, StreamEvent
from forerun.engine.engine import DEFAULT_MAX_RUNNING, Engine
from forerun.engine.jobs import Job
from forerun.engine.request import Limits, Request, prepare
from forerun.engine.run import MAX_STEP_NODES
from forerun.errors import ConfigError, RequestError
from forerun.kv.pages import PageManager
from forerun.machine import memory_bytes
from forerun.models.bound import BindSettings, bind_model, open_model
from forerun.models.chat_template import encode_chat
from forerun.models.config import ModelConfig
from forerun.models.grammar import Grammar, GrammarCompiler
from forerun.models.store import cache_dir
from forerun.models.structured import Structured
from forerun.models.tokenizer import check_text
from forerun.models.tools import ToolFormat, tool_format
from forerun.ops.base import Executor, KvType
from forerun.sampling.distribution import RowSampler
from forerun.types import Int32Array, SamplingParams, StepRecord, VerifyRule

Messages = Sequence[Mapping[str, Any]]
TokenIds = Sequence[int]
OnStep = Callable[[StepRecord], None]

DEFAULT_CHUNK = 256
MAX_CHUNK = 4096
# Room for several requests, since they run together.
KV_CONTEXTS = 4
MAX_KV_SHARE = 0.25
# Longer contexts are had by asking for them: KV storage for all of it is reserved when the model is loaded.
DEFAULT_MAX_MODEL_LEN = 8192


class LLM:
    """A model on a backend. Requests run together, whoever starts them.

    The emitted token ids are a function of prompt, parameters and seed on the native backend: speculation, other
    requests, chunk and threads change the speed alone.

    Args:
        model: a GGUF file, a Hugging Face folder, or a name that `forerun pull` knows; `demo` is fetched on first use.
        backend: `native` or `torch`.
        device: `cpu`, or for the torch backend `cuda` or `cuda:N`.
        quant: `auto` keeps the file's weights, `f32` expands them, `bf16`, `q8` or `q4` converts floats, and what is
            quantised where that makes it smaller.
        kv: how keys and values are stored, `f16` or `f32`.
        threads: threads to compute with; None leaves it to the backend.
        chunk: prompt tokens per target pass at most; None is DEFAULT_CHUNK.
        max_model_len: tokens of prompt and output at most; None is the model's context length, at most
            DEFAULT_MAX_MODEL_LEN.
        kv_tokens: tokens that the KV cache holds, of all requests together; None is max_model_len on the torch backend,
            and on the native one, where memory is taken as it is used, up to KV_CONTEXTS times as many, within
            MAX_KV_SHARE of the machine's memory.
        max_running: requests that run at the same time at most; further ones wait.
        prefix_cache: keep what the KV cache holds of earlier texts as long as there is room, so that a text that
            begins like one of them, such as the next turn of a conversation, is computed from where they part.
        progress: called with (bytes done, bytes in all) during a download.

    Attributes:
        model: the loaded file and its config.
        tokenizer: text to ids and back.
        limits: vocabulary, context limit and end-of-text ids.
        target: the bound model.
        engine: runs requests.

    Raises:
        ConfigError: an option is out of range, or the backend is not available.
        LoadError: a file can't be read.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        backend: str = "native",
        device: str = "cpu",
        quant: str = "auto",
        kv: KvType = "f16",
        threads: int | None = None,
        chunk: int | None = None,
        max_model_len: int | None = None,
        kv_tokens: int | None = None,
        max_running: int | None = None,
        prefix_cache: bool = True,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        chunk = _in_range("chunk", chunk, DEFAULT_CHUNK, 1, MAX_CHUNK)
        if threads is not None:
            _in_range("threads", threads, threads, 1, None)
        if kv not in get_args(KvType):
            raise ConfigError(f"kv is {kv!r}, but must be one of: {', '.join(get_args(KvType))}")
        max_rows = max(chunk, MAX_STEP_NODES + 1)
        max_running = _in_range("max_running", max_running, DEFAULT_MAX_RUNNING, 1, max_rows)
        settings = BindSettings(backend, device, quant, kv, threads, max_rows)
        # Local on purpose: once the backend has packed the weights, the mapped file and what was converted may go.
        loaded = open_model(model, settings, max_model_len or DEFAULT_MAX_MODEL_LEN, progress)
        self.config = config = loaded.config
        default_len = min(config.context_length, DEFAULT_MAX_MODEL_LEN)
        max_len = _in_range("max_model_len", max_model_len, default_len, 2, config.context_length)
        kv_tokens = _in_range("kv_tokens", kv_tokens, _default_kv_tokens(config, settings, max_len), max_len, None)
        settings = replace(settings, kv_tokens=kv_tokens)
        bound = bind_model(loaded, settings, max_len)
        self.tokenizer, self._chat_template = bound.tokenizer, bound.chat_template
        self.limits = Limits(config.vocab_size, max_len, frozenset(self.tokenizer.eos_ids))
        self._compiler = GrammarCompiler(self.tokenizer, config.vocab_size)
        self.target: Executor = bound.executor
        pages = PageManager(bound.num_pages, keeps_prefixes=prefix_cache)
        sampler = _create_sampler(config.vocab_size)
        self.engine = Engine(self.target, sampler, self.tokenizer, pages, self._step_costs, chunk, max_running)
        self._draft_target = DraftTarget(
            self.target, sampler, self.tokenizer, config.vocab_size, max_len, settings, bound, self._read_datastore
        )
        self._speculators: dict[Speculation, Speculator] = {}
        self._costs: StepCosts | None = None
        self._cost_key = _cost_key(loaded.path, quant, kv, self.target)

    def generate(
        self,
        prompts: str | TokenIds | Sequence[str | TokenIds],
        params: SamplingParams | None = None,
        *,
        speculation: str | Speculation = "off",
        verify: VerifyRule = "coupled",
        prediction: str | None = None,
        grammar: Structured | Grammar | None = None,
        on_step: OnStep | None = None,
    ) -> list[Completion]:
        """Continues one or several prompts, all together.

        Args:
            prompts: a text, the ids of a text, or a sequence of these. A text gets a begin token where the model wants
                one; ids are taken as they are.
            params: the parameters of every prompt; greedy when None.
            speculation: a spec such as `ngram:k=8`; see `drafters.spec`.
            verify: the verification rule, of `verify.RULES`. `coupled` gives the tokens of plain decoding. The others
                keep their law only, so they take no seed and report none.
            prediction: what the output is expected to look like, at least in part; it is tried, and changes nothing but
                speed. Takes a speculation that uses it, `prediction` or `auto`.
            grammar: what every output must look like, such as `Structured.json_schema({...})`. Until it is complete the
                output ends at max_tokens alone, or at a stop string or id that it allows; where it is complete and
                nothing may follow, it ends also before min_tokens.
            on_step: called with the record of every step of every request.

        Returns:
            One completion per prompt, in order, also for a single one.

        Raises:
            RequestError: a prompt or a setting can't be served; nothing has been generated then.
        """
        expected = self._encode_prediction(prediction, speculation)
        form = self._grammar(grammar)
        requests = [self._prepare(self.encode(prompt), params, verify, expected, form) for prompt in _as_list(prompts)]
        speculator = self.speculator(speculation, verify)
        return self._complete([Job(request, speculator) for request in requests], on_step)

    def chat(
        self,
        messages: Messages,
        params: SamplingParams | None = None,
        *,
        speculation: str | Speculation = "off",
        verify: VerifyRule = "coupled",
        prediction: str | None = None,
        grammar: Structured | Grammar | None = None,
        on_step: OnStep | None = None,
    ) -> Completion:
        """Answers a conversation, written as the model's chat template has it; arguments as for `generate`.

        Args:
            messages: mappings with `role` and `content`.

        Raises:
            RequestError: the model has no chat template, the template refuses the messages, or as for `generate`.
        """
        expected = self._encode_prediction(prediction, speculation)
        request = self._prepare(self.encode_messages(messages), params, verify, expected, self._grammar(grammar))
        [completion] = self._complete([Job(request, self.speculator(speculation, verify))], on_step)
        return completion

    def stream(
        self,
        prompt: str | TokenIds | Messages,
        params: SamplingParams | None = None,
        *,
        speculation: str | Speculation = "off",
        verify: VerifyRule = "coupled",
        prediction: str | None = None,
        grammar: Structured | Grammar | None = None,
        on_step: OnStep | None = None,
    ) -> Iterator[StreamEvent]:
        """The same for one prompt or one conversation, an event per step; the last one holds the completion.

        A bad request is refused by this call itself, not by the first event. Closing the iterator ends the request.
        """
        ids = self.encode_messages(prompt) if _is_messages(prompt) else self.encode(prompt)  # type: ignore[arg-type]
        expected = self._encode_prediction(prediction, speculation)
        request = self._prepare(ids, params, verify, expected, self._grammar(grammar))
        return self._events(Job(request, self.speculator(speculation, verify)), on_step)

    def job(
        self,
        prompt_token_ids: TokenIds,
        params: SamplingParams | None = None,
        *,
        speculation: str | Speculation = "off",
        verify: VerifyRule = "coupled",
        prediction: str | None = None,
        method: str | None = None,
        k: int | None = None,
        priority: int = 0,
        salt: str = "",
        grammar: Structured | Grammar | None = None,
        shown_ids: frozenset[int] = frozenset(),
    ) -> Job:
        """A request for `engine`, for those who drive it themselves; arguments as for `generate`.

        Args:
            method: the only drafter to ask of those that `speculation` names; None asks all.
            k: nodes per step at most, 0 for none; None leaves it to the controller.
            priority: lower ones run first, and of equal ones those that came first.
            salt: requests share what the cache and the drafters hold with those of the same salt only.
            shown_ids: control tokens whose names are part of the text, such as `tool_format.shown_ids`.

        Raises:
            RequestError: something can't be served.
        """
        expected, form = self._encode_prediction(prediction, speculation), self._grammar(grammar)
        request = self._prepare(prompt_token_ids, params, verify, expected, form, salt, shown_ids)
        speculator = self.speculator(speculation, verify)
        names = [source.name for source in speculator.sources] if speculator is not None else []
        if method is not None and method not in names:
            raise RequestError(f"method is {method!r}, but must be one of: {', '.join(names) or 'off'}", "method")
        if k is not None and not 0 <= k <= MAX_STEP_NODES:
            raise RequestError(f"k is {k}, but must be between 0 and {MAX_STEP_NODES}", "k")
        return Job(request, speculator, method, k, priority)

    def encode(self, prompt: str | TokenIds) -> TokenIds:
        """The ids of a prompt: a text's, with a begin token where the model wants one, or the given ones.

        Raises:
            RequestError: the text is no valid Unicode.
        """
        if not isinstance(prompt, str):
            return prompt
        check_text(prompt, "prompt")
        return self.tokenizer.encode(prompt)

    def encode_messages(
        self,
        messages: Messages,
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        add_generation_prompt: bool = True,
        extra: Mapping[str, Any] | None = None,
        continue_final_message: bool = False,
    ) -> list[int]:
        """The ids of a conversation, up to where the answer begins; arguments as for `encode_chat`.

        Args:
            messages: mappings with `role` and `content`.
            tools: functions that the model may call, as OpenAI's API has them.

        Raises:
            RequestError: the model has no chat template, or the template refuses the messages.
        """
        if self._chat_template is None:
            raise RequestError("this model has no chat template; give it a plain prompt instead", "messages")
        return encode_chat(
            self.tokenizer,
            self._chat_template,
            messages,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            extra=extra,
            continue_final_message=continue_final_message,
        )

    def speculator(self, speculation: str | Speculation, verify: VerifyRule = "coupled") -> Speculator | None:
        """Who drafts under a spec, None for nobody; made on first use and kept, with what requests share.

        Raises:
            RequestError: the spec is wrong, its drafters don't fit this model, or the verification rule isn't exact for
                what they propose.
            LoadError: a file that a drafter needs can't be read.
        """
        speculation = _parse(speculation)
        if speculation.is_off:
            return None
        try:
            speculation.check_rule(verify)
            known = self._speculators.get(speculation)
            if known is None:
                sources = [options.bind(self._draft_target) for options in speculation.drafters]
                known = self._speculators[speculation] = Speculator(sources)
            return known
        except ConfigError as error:
            raise RequestError(str(error), "speculation") from error

    def compile_grammar(self, wanted: Structured) -> Grammar:
        """The grammar of an output, made on first use and kept; what the methods above do with a `Structured`.

        The first one of a model takes longer, since it reads the vocabulary. Any thread may call this.

        Raises:
            RequestError: it is malformed, asks for something unsupported, or takes more work than is allowed.
        """
        return self._compiler.compile(wanted)

    def knows_grammar(self, wanted: Structured) -> bool:
        """Whether `compile_grammar` would have it at once, since it was used lately."""
        return self._compiler.knows(wanted)

    @property
    def has_chat_template(self) -> bool:
        """Whether conversations can be answered."""
        return self._chat_template is not None

    @cached_property
    def tool_format(self) -> ToolFormat | None:
        """How the model writes calls of tools; None where it knows none."""
        return None if self._chat_template is None else tool_format(self._chat_template.source, self.tokenizer)

    @property
    def datastore_name(self) -> str:
        """What the model's datastore is called, whether there is one or not."""
        return datastore_name(self.config, self.tokenizer, is_chat=self.has_chat_template)

    def _read_datastore(self) -> Sequence[Int32Array]:
        path = find_datastore(self.datastore_name)
        return () if path is None else read_datastore(path, self.config.vocab_size).texts

    def _step_costs(self) -> StepCosts:
        """What steps take on this machine; measured when first asked for."""
        if self._costs is None:
            folder = cache_dir() / "costs"
            max_rows, max_len = MAX_STEP_NODES + 1, self.limits.max_model_len
            curve = load_curve(self.target, self.engine.pages, max_rows, folder, self._cost_key, max_len)
            self._costs = StepCosts(curve)
        return self._costs

    def _encode_prediction(self, prediction: str | None, speculation: str | Speculation) -> TokenIds:
        """The ids of an expected text, as the output would have them."""
        if prediction is None:
            return ()
        if not isinstance(prediction, str):
            raise RequestError(f"prediction is {prediction!r:.50}, but must be a text", "prediction")
        check_text(prediction, "prediction")
        _parse(speculation).check_prediction()
        return self.tokenizer.encode(prediction, add_bos=False, continues=True)

    def _prepare(
        self,
        prompt_token_ids: TokenIds,
        params: SamplingParams | None,
        rule: VerifyRule,
        prediction: TokenIds,
        grammar: Grammar | None,
        salt: str = "",
        shown_ids: frozenset[int] = frozenset(),
    ) -> Request:
        return prepare(
            prompt_token_ids,
            params or SamplingParams(),
            rule,
            self.limits,
            prediction=prediction,
            salt=salt,
            grammar=grammar,
            shown_ids=shown_ids,
        )

    def _grammar(self, wanted: Structured | Grammar | None) -> Grammar | None:
        return self.compile_grammar(wanted) if isinstance(wanted, Structured) else wanted

    def _events(self, job: Job, on_step: OnStep | None) -> Iterator[StreamEvent]:
        with closing(self.engine.run(job)) as events:
            for _, event in events:
                if on_step is not None:
                    on_step(event.record)
                yield event

    def _complete(self, jobs: Sequence[Job], on_step: OnStep | None) -> list[Completion]:
        completions: dict[int, Completion] = {}
        with closing(self.engine.run(*jobs)) as events:
            for place, event in events:
                if on_step is not None:
                    on_step(event.record)
                if event.completion is not None:
                    completions[place] = event.completion
        return [completions[place] for place in range(len(jobs))]


def _parse(speculation: str | Speculation) -> Speculation:
    try:
        if isinstance(speculation, str):
            speculation = Speculation.parse(speculation)
        if not isinstance(speculation, Speculation):
            raise ConfigError(f"speculation is {speculation!r}, but must be a spec such as 'ngram:k=8', or 'off'")
        return speculation
    except ConfigError as error:
        # The same mistake, made by the caller of one request.
        raise RequestError(str(error), "speculation") from error


def _default_kv_tokens(config: ModelConfig, settings: BindSettings, max_len: int) -> int:
    if settings.backend != "native":
        return max_len
    token_bytes = 2 * config.num_layers * config.num_kv_heads * config.head_dim * (4 if settings.kv == "f32" else 2)
    most = int(MAX_KV_SHARE * memory_bytes()) // token_bytes
    return max(max_len, min(KV_CONTEXTS * max_len, most))


def _create_sampler(vocab_size: int) -> RowSampler:
    from forerun.sampling.native import NativeSampler

    return NativeSampler(vocab_size)


def _cost_key(path: Path, quant: str, kv: str, target: Executor) -> tuple[str, ...]:
    """All that the time of a pass depends on."""
    stat = path.stat()
    return (str(path.resolve()), str(stat.st_size), str(stat.st_mtime_ns), quant, kv, target.fingerprint)


def _as_list(prompts: str | TokenIds | Sequence[str | TokenIds]) -> list[str | TokenIds]:
    """A single prompt as a list of one. Nothing at all is an empty prompt, which is refused as one."""
    if not isinstance(prompts, Sized) or isinstance(prompts, bytes | Mapping):
        raise RequestError(
            f"prompts is {prompts!r}, but must be a text, a list of token ids or a list of these", "prompt"
        )
    if isinstance(prompts, str) or not len(prompts) or not isinstance(prompts[0], Sized):
        return [prompts]  # type: ignore[list-item]
    for index, prompt in enumerate(prompts):
        if not isinstance(prompt, Sized):
            raise RequestError(f"prompts[{index}] is {prompt!r}, but must be a text or a list of token ids", "prompt")
    return list(prompts)  # type: ignore[arg-type]


def _is_messages(prompt: str | TokenIds | Messages) -> bool:
    return not isinstance(prompt, str) and len(prompt) > 0 and isinstance(prompt[0], Mapping)


def _in_range(name: str, value: int | None, default: int, low: int, high: int | None) -> int:
    if value is None:
        return default
    if value < low or (high is not None and value > high):
        allowed = f"at least {low}" if high is None else f"between {low} and {high}"
        raise ConfigError(f"{name} is {value}, but must be {allowed}")
    return value
