"""Client for a served model's tokenizer: isolated processes encode text, and this process decodes tokens."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from pathlib import Path
from typing import Self

from share_compute_api.openai.inputs import Prompt
from share_compute_api.openai.requests import ChatRequest
from share_compute_api.workers.isolated.messages import Chat, CheckSchema, Describe, Encode
from share_compute_api.workers.isolated.pool import IsolatedProcesses
from share_compute_api.workers.isolated.vocabulary import Vocabulary

_versions = count()


class TokenizerClient:
    """Turns texts and conversations into token ids.

    Args:
        folder: a Hugging Face folder.
        version: number that is different for each load of a folder, so that isolated processes read the folder again.
        processes: isolated processes that read the folder's files.
        vocabulary: the tokenizer's vocabulary.
    """

    def __init__(
        self, folder: Path, version: int, processes: IsolatedProcesses, vocabulary: Vocabulary
    ) -> None:
        self._folder = folder
        self._version = version
        self._processes = processes
        self.vocabulary = vocabulary
        """The tokenizer's vocabulary, which decodes tokens to text."""

    @classmethod
    async def load(cls, folder: Path, processes: IsolatedProcesses) -> Self:
        """Load the tokenizer of a folder.

        Raises:
            UserError: the tokenizer cannot be loaded, or takes too much time or memory.
            Unavailable: no process can load it now.
        """
        question = _describe(folder)
        vocabulary = await processes.answer(question)
        return cls(folder, question.version, processes, vocabulary)

    async def encode(self, prompts: Sequence[Prompt], window_tokens: int) -> list[tuple[int, ...]]:
        """Return the token ids of each prompt.

        Raises:
            TooLong: a prompt has more tokens than the model's context window.
            UserError: a prompt is empty or has ids outside the vocabulary, or a limit of time or memory was reached.
            Unavailable: no process can answer; `Busy` if too many requests are queued.
        """
        texts = [prompt for prompt in prompts if isinstance(prompt, str)]
        found: list[tuple[int, ...]] = []
        if texts:
            question = Encode(
                folder=self._folder, version=self._version, texts=tuple(texts), window_tokens=window_tokens
            )
            found = list((await self._processes.answer(question)).texts)
        encoded = iter(found)
        return [
            self.vocabulary.check(next(encoded) if isinstance(prompt, str) else prompt, window_tokens)
            for prompt in prompts
        ]

    async def chat(self, request: ChatRequest, window_tokens: int) -> tuple[int, ...]:
        """Return the token ids of a request's conversation, formatted by the chat template with the request's options.

        Raises:
            TooLong: the conversation has more tokens than the model's context window.
            UserError: there is no chat template, the template rejects the messages, or a limit of time or memory was
                reached.
            Unavailable: no process can answer; `Busy` if too many requests are queued.
        """
        question = Chat(
            folder=self._folder,
            version=self._version,
            messages=request.template_messages,
            options=request.template_options,
            window_tokens=window_tokens,
        )
        (ids,) = (await self._processes.answer(question)).texts
        return self.vocabulary.check(ids, window_tokens)

    async def check_schema(self, schema: str) -> None:
        """Check that generation can be constrained to a JSON schema.

        Args:
            schema: the schema as JSON; "" is any object.

        Raises:
            UserError: the schema is not supported, or a limit of time or memory was reached.
            Unavailable: no process can answer; `Busy` if too many requests are queued.
        """
        await self._processes.answer(CheckSchema(text=schema, owner=str(self._folder)))


def vocabulary_of(folder: Path, processes: IsolatedProcesses) -> Vocabulary:
    """Return the vocabulary of a folder's tokenizer; wait for it without an event loop.

    Raises:
        UserError: the tokenizer cannot be loaded, or takes too much time or memory.
        Unavailable: no process can load it now.
    """
    return processes.ask(_describe(folder))


def _describe(folder: Path) -> Describe:
    return Describe(folder=folder, version=next(_versions))
