"""Interfaces of engines, and a registry of engines. An engine answers the requests to one served model."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol, Self, TypeAlias

from share_compute.inference.scheduler.events import Embedded, Emitted, Finished
from share_compute.inference.scheduler.options import Generation
from share_compute.specification.serve import ToolFormat

if TYPE_CHECKING:
    from share_compute_api.openai.tokenizer_client import TokenizerClient
    from share_compute_api.workers.isolated.pool import IsolatedProcesses

RETRY_AFTER_S = 10
"""Seconds after which clients should retry when a model is not available."""


StreamEvent: TypeAlias = Emitted | Embedded | Finished
"""An event that a stream yields. A stream raises the error of a `Failed` event instead of yielding the event."""


class Stream(Protocol):
    """Async iterator over the events of one request's sequences; each item is a list of the events since the last item.

    The events of one sequence are its tokens in order, then its end. The iteration ends with the last sequence. It
    raises `ShareComputeError` when a sequence cannot continue.
    """

    def __aiter__(self) -> Self:
        """Return the stream itself."""

    async def __anext__(self) -> Sequence[StreamEvent]:
        """Wait for the next events and return them; if the wait is cancelled, no event is lost."""

    def complete(self, sequence: int) -> None:
        """Stop a sequence whose text is complete, for example at a stop string; do nothing if it has ended."""

    def close(self) -> None:
        """Cancel all sequences that have not ended; may be called twice, and before any event was read."""


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Facts about a served model that are known without asking the machines that serve it."""

    name: str
    """Name that clients send as ``model``."""
    kind: Literal["generate", "embed"]
    """Whether the model generates text or turns text into vectors."""
    created: int
    """Time of the deployment's creation, in seconds since 1970."""
    window_tokens: int
    """Maximum number of tokens of a prompt and its answer together."""
    folder: Path
    """Folder with the tokenizer and the model's configuration."""
    has_chat_template: bool = True
    """Whether the model's tokenizer has a chat template."""
    tool_format: Literal["auto", ToolFormat] = "auto"
    """Format in which the model writes tool calls; auto finds it from the chat template."""
    deployment_id: str = ""
    """Id of the deployment; a later deployment with the same name may serve another model."""


class ServingEngine(Protocol):
    """Answers requests to one model."""

    @property
    def facts(self) -> ModelFacts:
        """Facts about the model."""


class TextEngine(ServingEngine, Protocol):
    """Answers requests to a model that generates text."""

    async def generate(self, generations: Sequence[Generation]) -> Stream:
        """Accept all sequences of one request or none; return the iterator over their events.

        The sequences may be queued before they run. If the call is cancelled, all of them are cancelled.

        Raises:
            TooLong: a prompt leaves no space in the model's context window.
            Busy: too many sequences are queued.
            UserError: the request cannot be fulfilled.
            Unavailable: no replica answers.
        """


class VectorEngine(ServingEngine, Protocol):
    """Answers requests to a model that turns text into vectors."""

    async def embed(self, owner: str, prompts: Sequence[tuple[int, ...]]) -> list[list[float]]:
        """Return one vector for each prompt.

        Args:
            owner: id of the API key or of the batch that the prompts belong to.
            prompts: token ids, at least one each.

        Raises:
            TooLong: a prompt is too long for the model.
            Busy: too many prompts are queued.
            Unavailable: no replica answers.
        """


class Engines:
    """Registry of the engines of served models and of their tokenizers, by model name.

    Args:
        processes: isolated processes that run tokenizers.
    """

    def __init__(self, processes: IsolatedProcesses) -> None:
        self._processes = processes
        self._engines: dict[str, ServingEngine] = {}
        self._tokenizers: dict[str, asyncio.Future[TokenizerClient]] = {}
        self._added = asyncio.Event()
        """Event that is set, and replaced, when an engine is added."""

    def add(self, engine: ServingEngine) -> None:
        """Register an engine under its model's name; replace an earlier engine with that name."""
        self.remove(engine.facts.name)
        self._engines[engine.facts.name] = engine
        self._added.set()
        self._added = asyncio.Event()

    def remove(self, name: str) -> None:
        """Remove a model's engine and tokenizer, if they exist; requests in progress continue to use them."""
        self._engines.pop(name, None)
        self._tokenizers.pop(name, None)

    def models(self) -> list[ModelFacts]:
        """Return the served models, in the order in which they were added."""
        return [engine.facts for engine in self._engines.values()]

    def find(self, name: str) -> ServingEngine | None:
        """Return the engine of a model; None if the model is not served."""
        return self._engines.get(name)

    async def wait_for(self, name: str, deployment_id: str, timeout_s: float) -> ServingEngine | None:
        """Return the engine of a deployment; wait for it up to ``timeout_s`` seconds, then return None."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while True:
                    engine, added = self.find(name), self._added
                    if engine is not None and engine.facts.deployment_id == deployment_id:
                        return engine
                    await added.wait()
        return None

    async def tokenizer(self, engine: ServingEngine) -> TokenizerClient:
        """Return the tokenizer of a model; load it on the first call.

        Raises:
            UserError: the tokenizer cannot be loaded.
            Unavailable: no process can load it now.
        """
        return await asyncio.shield(self.load_tokenizer(engine))

    def load_tokenizer(self, engine: ServingEngine) -> asyncio.Future[TokenizerClient]:
        """Return the future of a model's tokenizer; begin to load the tokenizer on the first call."""
        from share_compute_api.openai.tokenizer_client import TokenizerClient

        name = engine.facts.name
        loading = self._tokenizers.get(name)
        if loading is None:
            load = TokenizerClient.load(engine.facts.folder, self._processes)
            loading = self._tokenizers[name] = asyncio.ensure_future(load)
            loading.add_done_callback(lambda done: self._forget(name, done))
        return loading

    def _forget(self, name: str, loading: asyncio.Future[TokenizerClient]) -> None:
        failed = loading.cancelled() or loading.exception() is not None
        if failed and self._tokenizers.get(name) is loading:
            del self._tokenizers[name]  # the next request tries to load it again
