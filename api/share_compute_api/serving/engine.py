"""What answers requests: an engine for each model that is served, and where to find it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

from share_compute.serving.events import Emitted, Finished
from share_compute.serving.options import Generation

if TYPE_CHECKING:
    from share_compute_api.isolated.pool import IsolatedProcesses
    from share_compute_api.serving.tokenizer_client import TokenizerClient

RETRY_AFTER_S = 10
"""When clients are told to ask again for what is not to be had now."""


class Stream(AsyncIterable[Emitted | Finished], Protocol):
    """Tokens of one sequence in order, then how it ended, which is the last thing it gives."""

    async def aclose(self, *, is_complete: bool = False) -> None:
        """Cancel the sequence, if it has not ended; may be called twice, and without having read anything.

        Args:
            is_complete: whether its reader has all that it wants, as at a stop string.
        """


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What is known of a served model without asking its machines."""

    name: str
    """What clients send as ``model``."""
    kind: Literal["generate", "embed"]
    """Whether it writes text, or turns text into vectors."""
    created: int
    """When it was deployed, in seconds since 1970."""
    window_tokens: int
    """Most tokens of a prompt and its answer together."""
    folder: Path
    """Holds the tokenizer, and what the model's configuration says of its ends of text."""
    has_chat_template: bool = True
    """Whether its tokenizer can write conversations."""


class Engine(Protocol):
    """Answers for one model."""

    @property
    def facts(self) -> ModelFacts:
        """What model it is."""


class TextEngine(Engine, Protocol):
    """Answers for a model that writes text."""

    async def generate(self, generations: Sequence[Generation]) -> Sequence[Stream]:
        """Take the sequences of one request in, all or none; they may wait for their turn.

        Cancelled while it is awaited, it leaves none of them behind.

        Returns:
            What comes of each. A stream raises `ShareComputeError` when nobody can go on with its sequence.

        Raises:
            TooLong: a prompt leaves no room in the model's window.
            Busy: too many wait already.
            UserError: what was asked for cannot be done.
            Unavailable: nobody answers.
        """


class VectorEngine(Engine, Protocol):
    """Answers for a model that turns text into vectors."""

    async def embed(self, owner: str, prompts: Sequence[tuple[int, ...]]) -> list[list[float]]:
        """Return one vector for each prompt.

        Args:
            owner: whose they are: id of the API key.
            prompts: token ids, at least one each.

        Raises:
            Busy: too many wait already.
            Unavailable: nobody answers.
        """


class Engines:
    """The engines of all models that are served, by name.

    Args:
        processes: work on tokenizers.
    """

    def __init__(self, processes: IsolatedProcesses) -> None:
        self._processes = processes
        self._engines: dict[str, Engine] = {}
        self._tokenizers: dict[str, asyncio.Future[TokenizerClient]] = {}

    def add(self, engine: Engine) -> None:
        """Serve a model; in place of another one of its name, if there is one."""
        self.remove(engine.facts.name)
        self._engines[engine.facts.name] = engine

    def remove(self, name: str) -> None:
        """Serve a model no more; what is under way goes on."""
        self._engines.pop(name, None)
        self._tokenizers.pop(name, None)

    def models(self) -> list[ModelFacts]:
        """Return what is served, in the order it came."""
        return [engine.facts for engine in self._engines.values()]

    def find(self, name: str) -> Engine | None:
        """Return the engine of a model, if it is served."""
        return self._engines.get(name)

    async def tokenizer(self, engine: Engine) -> TokenizerClient:
        """Return the tokenizer of a model; it is described once, by the process that loads it.

        Raises:
            UserError: it cannot be loaded.
            Unavailable: no process can load it now.
        """
        from share_compute_api.serving.tokenizer_client import TokenizerClient

        name = engine.facts.name
        loading = self._tokenizers.get(name)
        if loading is None:
            load = TokenizerClient.load(engine.facts.folder, self._processes)
            loading = self._tokenizers[name] = asyncio.ensure_future(load)
            loading.add_done_callback(lambda done: self._forget(name, done))
        return await asyncio.shield(loading)

    def _forget(self, name: str, loading: asyncio.Future[TokenizerClient]) -> None:
        failed = loading.cancelled() or loading.exception() is not None
        if failed and self._tokenizers.get(name) is loading:
            del self._tokenizers[name]  # the next request tries again
