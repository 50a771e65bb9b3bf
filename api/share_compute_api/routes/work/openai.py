"""The OpenAI API under ``/v1``: models, responses, chat completions, completions and embeddings."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Annotated, Any, NamedTuple, cast

from fastapi import APIRouter, Header, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import JSONResponse
from starlette.responses import Response

from share_compute.errors import NotFound, Unavailable, UserError
from share_compute.files.strict import nearest
from share_compute_api.connection import sse
from share_compute_api.connection.departures import while_wanted
from share_compute_api.openai.answer_stream import AnswerStream, answer_events
from share_compute_api.openai.answers import (
    ChatCompletion,
    EmbeddingList,
    Model,
    ModelList,
    Shape,
    TextCompletion,
    Usage,
    shape_of,
    vector,
)
from share_compute_api.openai.completion import Completion
from share_compute_api.openai.engine import RETRY_AFTER_S, ServingEngine, TextEngine, VectorEngine
from share_compute_api.openai.problems import PREFIX, documented
from share_compute_api.openai.requests import (
    ApiRequest,
    ChatRequest,
    CompletionRequest,
    EmbeddingRequest,
    TextRequest,
)
from share_compute_api.openai.responses.objects import ResponseObject
from share_compute_api.openai.responses.requests import ResponsesRequest
from share_compute_api.openai.responses.shape import ResponsesShape
from share_compute_api.openai.resumable.streams import ResumableStream
from share_compute_api.openai.tokenizer_client import TokenizerClient
from share_compute_api.openai.tool_use import ToolUse
from share_compute_api.server.auth import CHAT, Chatter
from share_compute_api.server.context import Context, InContext

router = APIRouter(prefix=PREFIX, tags=["openai"], responses=documented(400, 401, 403))
_ENGINE_ERRORS = documented(404, 413, 429, 500, 503)
_MOST_POSITION = 8192
"""Largest number of characters of the header Last-Event-ID."""
Resumes = Annotated[
    bool, Header(alias="X-Resumable", description="Whether the stream can be continued, see `resumeStream`.")
]
_STREAM: dict[str, Any] = {sse.MEDIA_TYPE: {"schema": {"type": "string"}}}


@router.get("/models", operation_id="listModels", dependencies=CHAT)
async def list_models(context: InContext) -> ModelList:
    """List the models that are served now."""
    return ModelList(data=[Model.of(facts) for facts in context.engines.models()])


@router.get("/models/{model}", operation_id="getModel", dependencies=CHAT, responses=documented(404, 503))
async def get_model(model: str, context: InContext) -> Model:
    """Return one model."""
    return Model.of((await _engine(context, model)).facts)


@router.post(
    "/chat/completions",
    operation_id="createChatCompletion",
    responses={**_ENGINE_ERRORS, 200: {"model": ChatCompletion, "content": _STREAM}},
)
async def create_chat_completion(
    wanted: ChatRequest, request: Request, context: InContext, caller: Chatter, resumable: Resumes = False
) -> Response:
    """Generate the next message of a conversation. Unsupported parameters that would change the answer are refused."""
    model = await _text_model(context, wanted.model)
    shape = shape_of(wanted, model.tokenizer.vocabulary)

    async def encode() -> list[tuple[int, ...]]:
        return [await model.tokenizer.chat(wanted, model.engine.facts.window_tokens)]

    return await _answer(wanted, request, context, model, shape, encode, caller.id, resumable)


@router.post(
    "/responses",
    operation_id="createResponse",
    responses={**_ENGINE_ERRORS, 200: {"model": ResponseObject, "content": _STREAM}},
)
async def create_response(
    wanted: ResponsesRequest, request: Request, context: InContext, caller: Chatter
) -> Response:
    """Generate the next output of a conversation: a message, and calls of functions. Nothing is stored."""
    model = await _text_model(context, wanted.model)
    shape = ResponsesShape(wanted, model.tokenizer.vocabulary)

    async def encode() -> list[tuple[int, ...]]:
        try:
            return [await model.tokenizer.chat(wanted.chat, model.engine.facts.window_tokens)]
        except UserError as failure:
            if failure.details.get("param") == "messages":
                failure.details = {**failure.details, "param": "input"}
            raise

    answer = await _answer(wanted.chat, request, context, model, shape, encode, caller.id)
    return _with_warning(answer, wanted)


@router.post(
    "/completions",
    operation_id="createCompletion",
    responses={**_ENGINE_ERRORS, 200: {"model": TextCompletion, "content": _STREAM}},
)
async def create_completion(
    wanted: CompletionRequest,
    request: Request,
    context: InContext,
    caller: Chatter,
    resumable: Resumes = False,
) -> Response:
    """Generate the continuation of each prompt."""
    model = await _text_model(context, wanted.model)
    shape = shape_of(wanted, model.tokenizer.vocabulary)
    encode = partial(model.tokenizer.encode, wanted.prompt, model.engine.facts.window_tokens)
    return await _answer(wanted, request, context, model, shape, encode, caller.id, resumable)


@router.post("/embeddings", operation_id="createEmbedding", responses=_ENGINE_ERRORS)
async def create_embedding(
    wanted: EmbeddingRequest, request: Request, context: InContext, caller: Chatter
) -> EmbeddingList:
    """Return the embedding vector of each text."""
    found = await _engine(context, wanted.model)
    if found.facts.kind != "embed":
        raise UserError(
            f"model {wanted.model} writes text; it gives no vectors",
            hint="use /v1/chat/completions or /v1/completions, or name an encoder",
            details={"param": "model"},
        )
    engine = cast("VectorEngine", found)
    tokenizer = await context.engines.tokenizer(engine)
    encoding = tokenizer.encode(wanted.input, engine.facts.window_tokens)
    prompts = await while_wanted(encoding, request.receive, context.notifier)
    work = engine.embed(caller.id, prompts)
    vectors = await while_wanted(work, request.receive, context.notifier)
    if wanted.dimensions not in (None, len(vectors[0])):
        raise UserError(
            f"dimensions: model {wanted.model} gives {len(vectors[0])}, not {wanted.dimensions}",
            hint="leave it out",
            details={"param": "dimensions"},
        )
    as_base64 = wanted.encoding_format == "base64"
    return EmbeddingList(
        data=[vector(index, numbers, as_base64=as_base64) for index, numbers in enumerate(vectors)],
        model=wanted.model,
        usage=Usage.of(sum(map(len, prompts))),
    )


@router.get(
    "/streams/{stream_id}",
    operation_id="resumeStream",
    response_class=Response,
    responses={**documented(404, 410, 429, 500, 503), 200: {"content": _STREAM}},
)
async def resume_stream(
    stream_id: str,
    request: Request,
    context: InContext,
    caller: Chatter,
    last_event_id: Annotated[
        str | None,
        Header(
            alias="Last-Event-ID", max_length=_MOST_POSITION, description="Id of the last event that arrived."
        ),
    ] = None,
) -> Response:
    """Continue a resumable stream after an event, or from its beginning. An earlier connection to it ends."""
    finding = context.streams.find(stream_id, caller)
    stream = await while_wanted(finding, request.receive, context.notifier)
    return stream.response(stream.position(last_event_id))


@router.delete(
    "/streams/{stream_id}",
    operation_id="cancelStream",
    status_code=204,
    responses=documented(404, 410),
)
async def cancel_stream(stream_id: str, context: InContext, caller: Chatter) -> None:
    """Cancel a resumable stream, and delete its text."""
    await context.streams.cancel(stream_id, caller)


async def _engine(context: Context, name: str) -> ServingEngine:
    engine = context.engines.find(name)
    if engine is not None:
        return engine
    deployment = await run_in_threadpool(context.store.deployments.by_name, name)
    details = {"param": "model", "code": "model_not_found"}
    if deployment is None:
        served = {model.name.lower(): model.name for model in context.engines.models()}
        near = nearest(name.lower(), [*served]) or (next(iter(served)) if len(served) == 1 else None)
        hint = "GET /v1/models lists what is served"
        if near is not None:
            hint = f"did you mean {served[near]!r}? GET /v1/models lists what is served"
        raise NotFound(f"there is no model {name}", hint=hint, details=details)
    raise Unavailable(
        f"model {name} does not answer yet: it is {deployment.state.value}, {deployment.reason}",
        hint=f"try again in {RETRY_AFTER_S} s",
        details={"param": "model", "code": "model_not_ready", "retry_after_s": RETRY_AFTER_S},
    )


class _TextModel(NamedTuple):
    """The engine and the tokenizer of a model that generates text."""

    engine: TextEngine
    tokenizer: TokenizerClient


async def _text_model(context: Context, name: str) -> _TextModel:
    engine = await _engine(context, name)
    if engine.facts.kind != "generate":
        raise UserError(
            f"model {name} turns text into vectors; it writes none",
            hint="use /v1/embeddings, or name a model that writes",
            details={"param": "model"},
        )
    return _TextModel(cast("TextEngine", engine), await context.engines.tokenizer(engine))


async def _answer(
    wanted: TextRequest,
    request: Request,
    context: Context,
    model: _TextModel,
    shape: Shape,
    encode: Callable[[], Awaitable[list[tuple[int, ...]]]],
    owner: str,
    is_resumable: bool = False,
) -> Response:
    """Generate the sequences; respond with a stream, or with one JSON body after all sequences have ended."""
    engine, tokenizer = model
    vocabulary = tokenizer.vocabulary

    async def begin() -> Completion | ResumableStream:
        tools = await ToolUse.prepare(wanted, engine.facts, tokenizer)
        prompts = await encode()
        grammar = None if wanted.response_format is None else wanted.response_format.grammar
        if grammar is not None:
            await tokenizer.check_schema(grammar)
        if is_resumable:
            stream = await context.streams.begin(wanted, prompts, engine, vocabulary, owner, tools)
            if stream is not None:
                return stream
        prepared = Completion(wanted, prompts, engine.facts, vocabulary, owner, tools)
        await prepared.begin(engine)
        return prepared

    if is_resumable and not wanted.stream:
        raise UserError(
            "X-Resumable is for streams", hint="set stream: true", details={"param": "X-Resumable"}
        )
    completion = await while_wanted(begin(), request.receive, context.notifier)
    if isinstance(completion, ResumableStream):
        return _with_warning(completion.response(completion.position(None)), wanted)
    if wanted.stream:
        events = answer_events(completion, shape)
        return _with_warning(AnswerStream(events, context.notifier, completion.close, shape), wanted)
    try:
        answers = await while_wanted(completion.collected(), request.receive, context.notifier)
    finally:
        completion.close()
    return _with_warning(
        JSONResponse(shape.whole(answers, completion.usage).model_dump(by_alias=True)), wanted
    )


def _with_warning(response: Response, wanted: ApiRequest) -> Response:
    """Add a header with the names of ignored request fields; front ends such as Open WebUI add such fields."""
    if wanted.ignored:
        response.headers["X-Ignored-Parameters"] = ", ".join(wanted.ignored)
    return response
