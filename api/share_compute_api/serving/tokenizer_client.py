"""A served model's tokenizer as the control plane uses it: asked of isolated processes, its vocabulary at hand."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from pathlib import Path
from typing import Self

from share_compute_api.isolated.messages import Chat, CheckSchema, Describe, Encode
from share_compute_api.isolated.pool import IsolatedProcesses
from share_compute_api.serving.inputs import Prompt
from share_compute_api.serving.vocabulary import Vocabulary

_versions = count()


class TokenizerClient:
    """Turns texts and chats into tokens.

    Args:
        folder: a Hugging Face folder.
        version: tells this use of the folder from earlier ones, when it may have held something else.
        processes: work on its files.
        vocabulary: its own.
    """

    def __init__(
        self, folder: Path, version: int, processes: IsolatedProcesses, vocabulary: Vocabulary
    ) -> None:
        self._folder = folder
        self._version = version
        self._processes = processes
        self.vocabulary = vocabulary
        """Writes tokens as text."""

    @classmethod
    async def load(cls, folder: Path, processes: IsolatedProcesses) -> Self:
        """Load the tokenizer of a folder.

        Raises:
            UserError: it cannot be loaded, or takes too much time or memory.
            Unavailable: no process can be started.
        """
        version = next(_versions)
        vocabulary = await processes.answer(Describe(folder=folder, version=version))
        return cls(folder, version, processes, vocabulary)

    async def encode(self, prompts: Sequence[Prompt], window_tokens: int) -> list[tuple[int, ...]]:
        """Return the token ids of each prompt.

        Raises:
            TooLong: one has more tokens than the window.
            UserError: one has no tokens, or ids that the vocabulary does not have, or the work reached a limit.
            Busy: too many wait.
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

    async def chat(self, messages: Sequence[dict[str, str]], window_tokens: int) -> tuple[int, ...]:
        """Return the token ids of a conversation, up to where its answer begins.

        Raises:
            TooLong: it has more tokens than the window.
            UserError: the tokenizer has no chat template, it refuses these messages, or the work reached a limit.
            Busy: too many wait.
        """
        question = Chat(
            folder=self._folder,
            version=self._version,
            messages=tuple(messages),
            window_tokens=window_tokens,
        )
        (ids,) = (await self._processes.answer(question)).texts
        return self.vocabulary.check(ids, window_tokens)

    async def check_schema(self, schema: str) -> None:
        """Make sure that text can be made to follow a JSON schema.

        Args:
            schema: as JSON; "" is any object.

        Raises:
            UserError: it cannot, or the work reached a limit.
            Busy: too many wait.
        """
        await self._processes.answer(CheckSchema(text=schema, owner=str(self._folder)))
