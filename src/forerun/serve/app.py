"""The routes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI, Request
from fastapi.middleware.cors import CORSMiddleware
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.responses import FileResponse, JSONResponse, PlainTextResponse, Response

from forerun import __version__
from forerun.errors import RequestError
from forerun.serve.answers import Answer, Identity
from forerun.serve.asks import Ask, encode_chat, make_jobs, problem_names, read_ask
from forerun.serve.bodies import ClientGone, SchemaT, parse, read_body
from forerun.serve.drafting import loaded_drafters
from forerun.serve.front import Front
from forerun.serve.hub import Hub
from forerun.serve.logs import log_refusal
from forerun.serve.meter import Meter
from forerun.serve.problems import Problem
from forerun.serve.respond import Answering, AnswerResponse
from forerun.serve.response_answers import ResponsesAnswer
from forerun.serve.responses import NAMES, ResponsesRequest, as_chat, response_param
from forerun.serve.schema import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from forerun.serve.settings import ServeSettings
from forerun.serve.structured import read_form

if TYPE_CHECKING:
    from forerun.engine.jobs import Job
    from forerun.engine.llm import LLM

PAGE = Path(__file__).parent / "page"
# Longer bodies are read and encoded beside the loop, so that nobody's tokens wait for them.
LONG_BODY_BYTES = 32 << 10


@dataclass(slots=True)
class Served:
    """What the routes work with. The model comes once it is loaded.

    Attributes:
        settings: how the server behaves.
        hub: the way to the engine.
        llm: the model; None while it is loading.
        identity: what answers say of the server.
        facts: what `/server_info` says besides.
        created: when the server was started, in seconds of the epoch.
        is_ready: loaded and warm.
    """

    settings: ServeSettings
    hub: Hub
    llm: LLM | None = None
    identity: Identity = field(default_factory=lambda: Identity("", ""))
    facts: dict[str, Any] = field(default_factory=dict)
    created: int = field(default_factory=lambda: int(time.time()))
    is_ready: bool = False

    def model(self) -> LLM:
        """The model, for work of its own.

        Raises:
            Problem: 503 while it is loading or when no new work is taken.
        """
        if self.llm is None or not self.is_ready:
            raise Problem(503, "the model is loading; try again in a moment", code="model_loading")
        if self.hub.is_draining:
            raise Problem(503, "the server is shutting down", code="shutting_down")
        return self.llm

    def check_name(self, name: str | None) -> str:
        """The name under which an answer goes out.

        Raises:
            Problem: 404 for a model that is not served.
        """
        names = self.settings.model_names
        if name is None:
            return names[0]
        if name not in names:
            message = f"the model {name!r:.200} does not exist here; served are: {', '.join(names)}"
            raise Problem(404, message, "model", "model_not_found")
        return name


def create_app(served: Served) -> Front:
    """The application, with everything around it."""
    app = FastAPI(title="forerun", version=__version__, docs_url=None, redoc_url=None)
    app.openapi = partial(_openapi, app)  # type: ignore[method-assign]
    app.add_exception_handler(HTTPException, _http_problem)
    app.add_exception_handler(Problem, _problem)
    app.add_exception_handler(ClientGone, _nobody)
    app.add_exception_handler(Exception, _fault)
    _add_generation(app, served)
    _add_tokens(app, served)
    _add_facts(app, served)
    settings = served.settings
    if settings.cors_origins:
        app.add_middleware(
            CORSMiddleware, allow_origins=list(settings.cors_origins), allow_methods=["*"], allow_headers=["*"]
        )
    if settings.has_page:
        _add_page(app)
    return Front(app, settings.api_keys)


def _add_generation(app: FastAPI, served: Served) -> None:
    @app.post("/v1/responses", openapi_extra=_body_of(ResponsesRequest))
    async def responses(request: Request) -> Response:
        """Answer a conversation, in the other form."""
        return await _run(request, served, lambda raw: _prepare_response(raw, request, served))

    @app.post("/v1/completions", openapi_extra=_body_of(CompletionRequest))
    async def completions(request: Request) -> Response:
        """Continue prompts."""
        return await _run(request, served, lambda raw: _prepare(raw, CompletionRequest, "cmpl-", request, served))

    @app.post("/v1/chat/completions", openapi_extra=_body_of(ChatRequest))
    async def chat_completions(request: Request) -> Response:
        """Answer a conversation."""
        return await _run(request, served, lambda raw: _prepare(raw, ChatRequest, "chatcmpl-", request, served))


@dataclass(frozen=True, slots=True)
class _Prepared:
    """A request that can be served.

    Attributes:
        ask: what it asks for.
        names: from `problem_names`.
        answer: makes the answer of the jobs and of what is measured per job.
    """

    ask: Ask
    names: dict[str, str]
    answer: Callable[[list[Job], list[Meter]], Answering]


async def _run(request: Request, served: Served, prepare: Callable[[bytes], _Prepared]) -> Response:
    """From a request's body to its answer."""
    llm = served.model()
    raw = await _body(request, served)
    is_long = len(raw) > LONG_BODY_BYTES
    prepared = await asyncio.to_thread(prepare, raw) if is_long else prepare(raw)
    ask, names, hub = prepared.ask, prepared.names, served.hub
    structured = ask.form.structured
    takes_time = is_long or (structured is not None and not llm.knows_grammar(structured))
    jobs = await asyncio.to_thread(make_jobs, ask, llm, names) if takes_time else make_jobs(ask, llm, names)
    inbox = hub.submit(jobs, is_stream=ask.is_stream, is_score=ask.is_score)
    hub.metrics.count_request(ask.num_choices, ask.params.max_tokens)
    return AnswerResponse(prepared.answer(jobs, inbox.meters), inbox, names)


def _prepare(
    raw: bytes,
    schema: type[CompletionRequest] | type[ChatRequest],
    prefix: str,
    request: Request,
    served: Served,
) -> _Prepared:
    llm, body = served.model(), parse(raw, schema)
    identity = Identity(served.check_name(body.model), served.identity.fingerprint)
    ask = read_ask(body, llm, served.settings)
    name = body.request_id or prefix + request.scope["request_id"]

    def answer(jobs: list[Job], meters: list[Meter]) -> Answer:
        return Answer(ask, name, identity, llm.tokenizer, meters, jobs[0].request.prediction)

    return _Prepared(ask, problem_names(body, ask.form), answer)


def _prepare_response(raw: bytes, request: Request, served: Served) -> _Prepared:
    llm, body = served.model(), parse(raw, ResponsesRequest)
    identity = Identity(served.check_name(body.model), served.identity.fingerprint)
    chat = as_chat(body)
    try:
        ask = read_ask(chat, llm, served.settings)
    except Problem as problem:
        param = problem.param and response_param(problem.param)
        raise Problem(problem.status, problem.message, param, problem.code) from None
    names = {name: response_param(theirs) for name, theirs in (NAMES | problem_names(chat, ask.form)).items()}
    name = request.scope["request_id"]

    def answer(jobs: list[Job], meters: list[Meter]) -> ResponsesAnswer:
        return ResponsesAnswer(body, ask, name, identity, llm.tokenizer, meters[0])

    return _Prepared(ask, names, answer)


def _add_tokens(app: FastAPI, served: Served) -> None:
    @app.post("/tokenize", openapi_extra=_body_of(TokenizeRequest))
    async def tokenize(request: Request) -> Response:
        """The token ids of a text or a conversation."""
        body, llm = await _read(request, TokenizeRequest, served)
        try:
            token_ids = _encode(body, llm)
        except RequestError as error:
            raise Problem.of(error) from error
        reply: dict[str, Any] = {
            "count": len(token_ids),
            "max_model_len": llm.limits.max_model_len,
            "tokens": list(token_ids),
        }
        if body.return_token_strs:
            reply["token_strs"] = [llm.tokenizer.token_text(token_id) for token_id in token_ids]
        return JSONResponse(reply)

    @app.post("/detokenize", openapi_extra=_body_of(DetokenizeRequest))
    async def detokenize(request: Request) -> Response:
        """The text of token ids."""
        body, llm = await _read(request, DetokenizeRequest, served)
        try:
            return JSONResponse({"prompt": llm.tokenizer.decode(body.tokens, skip_special=False)})
        except RequestError as error:
            raise Problem(400, str(error), "tokens") from error


def _encode(body: TokenizeRequest, llm: LLM) -> Sequence[int]:
    if (body.prompt is None) == (body.messages is None):
        raise Problem(400, "give either prompt or messages", "prompt")
    if body.messages is not None:
        shared = {name: getattr(body, name) for name in TokenizeRequest.model_fields.keys() & ChatRequest.model_fields}
        chat = ChatRequest(**shared)
        return encode_chat(chat, llm, read_form(chat, llm).offer)
    assert body.prompt is not None
    adds_bos = llm.tokenizer.adds_bos and body.add_special_tokens is not False
    return llm.tokenizer.encode(body.prompt, add_bos=adds_bos)


def _add_facts(app: FastAPI, served: Served) -> None:
    names = served.settings.model_names

    def card(name: str) -> dict[str, Any]:
        card: dict[str, Any] = {"id": name, "object": "model", "created": served.created, "owned_by": "forerun"}
        if served.llm is not None:
            card["max_model_len"] = served.llm.limits.max_model_len
        return card

    @app.get("/v1/models")
    async def models() -> Response:
        """The served names."""
        return JSONResponse({"object": "list", "data": [card(name) for name in names]})

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        """One served name."""
        return JSONResponse(card(served.check_name(name)))

    @app.get("/health")
    async def health() -> Response:
        """200 once requests are answered at full speed; 503 while loading, draining or after a fault."""
        if served.hub.is_draining:
            raise Problem(503, "the server is shutting down", code="shutting_down")
        if not served.is_ready:
            raise Problem(503, "the model is loading", code="model_loading")
        if not served.hub.is_alive:
            raise Problem(503, "the engine has stopped after a fault", code="engine_stopped")
        return JSONResponse({"status": "ok"})

    @app.get("/metrics")
    async def metrics() -> Response:
        """Prometheus' text format."""
        return PlainTextResponse(served.hub.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.get("/version")
    async def version() -> Response:
        """The build."""
        return JSONResponse({"version": __version__, "system_fingerprint": served.identity.fingerprint or None})

    @app.get("/server_info")
    async def server_info() -> Response:
        """What is active."""
        return JSONResponse(_info(served))


def _info(served: Served) -> dict[str, Any]:
    from forerun.engine.run import MAX_STEP_NODES

    settings, llm = served.settings, served.llm
    drafters = loaded_drafters(settings.spec)
    load = served.hub.metrics.read_load() if served.hub.metrics.read_load else None
    return {
        "version": __version__,
        "status": "draining" if served.hub.is_draining else "ready" if served.is_ready else "loading",
        "model_names": list(settings.model_names),
        "max_model_len": llm.limits.max_model_len if llm else None,
        "speculation": {
            "spec": settings.spec,
            "is_active": bool(drafters),
            "drafters": list(drafters),
            "rule": settings.verify,
            "max_k": MAX_STEP_NODES if drafters else 0,
            "exactness": "tokens" if settings.verify == "coupled" else "law",
        },
        "sampling_defaults": {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0},
        "limits": {
            "max_running": settings.max_running,
            "max_queue": settings.max_queue,
            "max_connections": settings.max_connections,
            "max_body_bytes": settings.max_body_bytes,
            "send_timeout_s": settings.send_timeout_s,
        },
        "load": asdict(load) if load is not None else None,
        **served.facts,
    }


def _add_page(app: FastAPI) -> None:
    """A route per file. A folder at / would take every path for one of its own, and no method would be wrong."""

    def route(path: str, file: Path) -> None:
        async def send(request: Request) -> Response:
            return FileResponse(file)

        app.add_route(path, send, methods=["GET"])

    for file in sorted(file for file in PAGE.rglob("*") if file.is_file()):
        name = file.relative_to(PAGE).as_posix()
        route("/" if name == "index.html" else f"/{name}", file)


async def _body(request: Request, served: Served) -> bytes:
    settings = served.settings
    return await read_body(request.scope, request.receive, settings.max_body_bytes, settings.receive_timeout_s)


async def _read(request: Request, schema: type[SchemaT], served: Served) -> tuple[SchemaT, LLM]:
    llm = served.model()
    body = parse(await _body(request, served), schema)
    served.check_name(getattr(body, "model", None))
    return body, llm


async def _http_problem(request: Request, error: Exception) -> Response:
    """What the router refuses: an unknown path or another method."""
    assert isinstance(error, HTTPException)
    method, path = request.method, request.url.path
    if error.status_code == 405:
        message = f"{path} does not take {method}"
    else:
        message = f"there is nothing at {method} {path[:200]}" if error.status_code == 404 else str(error.detail)
    problem = Problem(error.status_code, message)
    return Response(problem.encoded(), problem.status, dict(error.headers or {}), "application/json")


async def _problem(request: Request, error: Exception) -> Response:
    assert isinstance(error, Problem)
    if request.url.path != "/health":  # asked every second while a model loads
        log_refusal(request.scope, error)
    headers = {name.decode(): value.decode() for name, value in error.headers}
    return Response(error.encoded(), error.status, headers, "application/json")


async def _nobody(request: Request, error: Exception) -> Response:
    """A response that nobody will read."""
    return Response(status_code=499)


async def _fault(request: Request, error: Exception) -> Response:
    """Our own mistake; the outermost layer logs it."""
    name = request.scope["request_id"]
    problem = Problem(500, f"this server failed on the request; its log has the details under {name}")
    return Response(problem.encoded(), 500, None, "application/json")


def _body_of(schema: type[BaseModel]) -> dict[str, Any]:
    """A route's body, for the schema of the API."""
    content = {"application/json": {"schema": {"$ref": f"#/components/schemas/{schema.__name__}"}}}
    return {"requestBody": {"required": True, "content": content}}


def _openapi(app: FastAPI) -> dict[str, Any]:
    """The schema of the API. Handlers read bodies themselves, so what bodies are is added here."""
    if app.openapi_schema is None:
        schema = get_openapi(title=app.title, version=app.version, routes=app.routes)
        bodies = schema.setdefault("components", {}).setdefault("schemas", {})
        for model in (CompletionRequest, ChatRequest, ResponsesRequest, TokenizeRequest, DetokenizeRequest):
            described = model.model_json_schema(ref_template="#/components/schemas/{model}")
            bodies.update(described.pop("$defs", {}))
            bodies[model.__name__] = described
        app.openapi_schema = schema
    return app.openapi_schema
