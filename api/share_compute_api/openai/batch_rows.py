"""Sends one row of a batch as a request, and turns the answer into output columns."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

from pydantic import ValidationError

from share_compute.errors import UserError
from share_compute.files.field_errors import invalid
from share_compute.specification import BatchJob, BatchSamplingSpec, GenerateJob
from share_compute_api.openai.completion import Completion
from share_compute_api.openai.engine import ServingEngine, TextEngine, VectorEngine
from share_compute_api.openai.requests import ChatRequest, CompletionRequest, TextRequest

if TYPE_CHECKING:
    from share_compute.batches.inputs import InputRow
    from share_compute_api.openai.tokenizer_client import TokenizerClient


@dataclass(frozen=True, slots=True)
class RowAnswer:
    """The answer to one row."""

    columns: dict[str, Any]
    """Columns of the output: the row's answer, or an ``error``."""
    tokens: int = field(default=0, compare=False)
    """Number of generated tokens; for embeddings, the number of input tokens."""


async def ask(
    spec: BatchJob, row: InputRow, engine: ServingEngine, tokenizer: TokenizerClient, owner: str
) -> RowAnswer:
    """Send one row as a request, and return the answer.

    Args:
        spec: the batch.
        row: a row that was parsed without errors.
        engine: the model's engine; a `TextEngine` for a `GenerateJob`, else a `VectorEngine`.
        tokenizer: the model's tokenizer.
        owner: id of the batch, to which the engine attributes the request.

    Raises:
        Busy: too many requests are queued.
        UserError: the row's request cannot be fulfilled.
        ShareComputeError: another failure, for example `Unavailable` if no replica answers.
    """
    if isinstance(spec, GenerateJob):
        return await _generated(spec, row, cast("TextEngine", engine), tokenizer, owner)
    text = _text(row.value)
    (prompt,) = await tokenizer.encode([text], engine.facts.window_tokens)
    (vector,) = await cast("VectorEngine", engine).embed(owner, [prompt])
    return RowAnswer({"embedding": vector, "usage": _usage(len(prompt))}, len(prompt))


async def _generated(
    spec: GenerateJob, row: InputRow, engine: TextEngine, tokenizer: TokenizerClient, owner: str
) -> RowAnswer:
    completion = await _completion(spec, row, engine, tokenizer, owner)
    await completion.begin(engine)
    try:
        (answer,) = await completion.collected()
    finally:
        completion.close()
    new_tokens = completion.completion_tokens
    usage = _usage(completion.prompt_tokens, new_tokens) | {"completion_tokens": new_tokens}
    return RowAnswer({"output": answer.text, "finish_reason": answer.finish, "usage": usage}, new_tokens)


async def _completion(
    spec: GenerateJob, row: InputRow, engine: TextEngine, tokenizer: TokenizerClient, owner: str
) -> Completion:
    facts = engine.facts
    request = text_request(spec, row.value, seed=row_seed(spec.sampling.seed, row.number))
    if isinstance(request, ChatRequest):
        prompt = await tokenizer.chat(request, facts.window_tokens)
    else:
        (prompt,) = await tokenizer.encode([_text(row.value)], facts.window_tokens)
    grammar = None if request.response_format is None else request.response_format.grammar
    if grammar is not None:
        await tokenizer.check_schema(grammar)
    return Completion(request, [prompt], facts, tokenizer.vocabulary, owner)


def text_request(spec: GenerateJob, value: Any, *, seed: int) -> TextRequest:
    """Return the OpenAI API request for one row.

    Raises:
        UserError: the row is not a valid request.
    """
    name = spec.deployment or "model"
    options = {**sampling_options(spec.sampling), "seed": seed}
    try:
        if spec.data.messages is None:
            return CompletionRequest.model_validate({"model": name, "prompt": _text(value), **options})
        return ChatRequest.model_validate({"model": name, "messages": value, **options})
    except ValidationError as failure:
        raise invalid(failure, "fix the row") from failure


def sampling_options(sampling: BatchSamplingSpec) -> dict[str, Any]:
    """Return the sampling options that all rows share, in the form of request fields."""
    return sampling.model_dump(mode="json", exclude_none=True)


def row_seed(seed: int, number: int) -> int:
    """Return a row's seed, derived from the batch's seed and the row's number, so that a retry uses the same seed."""
    return int.from_bytes(hashlib.sha256(f"{seed} row {number}".encode()).digest()[:8], "little") >> 1


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise UserError(f"the row holds {type(value).__name__}, not text", hint="write it as text")
    return value


def _usage(prompt_tokens: int, completion_tokens: int = 0) -> dict[str, int]:
    return {"prompt_tokens": prompt_tokens, "total_tokens": prompt_tokens + completion_tokens}
