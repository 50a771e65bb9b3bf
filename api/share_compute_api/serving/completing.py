"""The sequences of one request, which begin, are read and are given up together."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Sequence
from typing import Self

from share_compute.errors import ShareComputeError, Unavailable
from share_compute.serving.events import Finished
from share_compute.serving.options import Generation
from share_compute_api.serving.engine import Stream, TextEngine
from share_compute_api.serving.writing import Piece, Told, Writer

_Heard = tuple[int, Piece] | ShareComputeError
_NOTHING = Piece()
_log = logging.getLogger(__name__)


class Completing:
    """Sequences that are being generated; call `close` in any case.

    Args:
        streams: the stream of each sequence.
        writers: the writer of each sequence.
    """

    def __init__(self, streams: Sequence[Stream], writers: Sequence[Writer]) -> None:
        self._heard: asyncio.Queue[_Heard] = asyncio.Queue()
        self._streams = streams
        self._writers = writers
        self._open = len(streams)
        self._tasks = [
            asyncio.create_task(self._listen(index, stream)) for index, stream in enumerate(streams)
        ]

    @classmethod
    async def begin(
        cls, engine: TextEngine, generations: Sequence[Generation], writers: Sequence[Writer]
    ) -> Self:
        """Hand all sequences to the engine, which accepts all of them or none.

        Raises:
            ShareComputeError: any error of the engine.
        """
        return cls(await engine.generate(generations), writers)

    async def pieces(self, quiet_s: float | None = None) -> AsyncGenerator[list[tuple[int, Piece]], None]:
        """Yield new pieces as soon as they are there, as (sequence, piece); end with the last sequence.

        Args:
            quiet_s: seconds without a piece after which an empty list is yielded; None yields none.

        Raises:
            ShareComputeError: a sequence cannot continue; earlier pieces of all sequences were yielded before.
        """
        while self._open:
            try:
                async with asyncio.timeout(quiet_s):
                    heard = await self._heard.get()
            except TimeoutError:
                yield []
                continue
            batch: list[tuple[int, Piece]] = []
            failure = self._take(heard, batch)
            while failure is None and not self._heard.empty():
                failure = self._take(self._heard.get_nowait(), batch)
            if batch:
                yield batch
            if failure is not None:
                raise failure

    async def collected(self) -> list[Told]:
        """Return the whole answer of each sequence, once all have ended.

        Raises:
            ShareComputeError: a sequence cannot continue; ``details`` has the text written before (``partial``).
        """
        answers = [Told() for _ in self._writers]
        try:
            async for batch in self.pieces():
                for index, piece in batch:
                    answers[index].add(piece)
        except ShareComputeError as failure:
            if any(told.text for told in answers):
                failure.details = {**failure.details, "partial": [told.text for told in answers]}
            raise
        return answers

    def _take(self, heard: _Heard, batch: list[tuple[int, Piece]]) -> ShareComputeError | None:
        """Append a piece to the batch unless it is empty; return the failure if one was heard."""
        if isinstance(heard, ShareComputeError):
            return heard
        _, piece = heard
        self._open -= piece.finish is not None
        if piece != _NOTHING:
            batch.append(heard)
        return None

    async def _listen(self, index: int, stream: Stream) -> None:
        writer = self._writers[index]
        is_complete = False
        try:
            async for event in stream:
                if isinstance(event, Finished) and event.reason == "cancelled":
                    # The client did not cancel the sequence, so it gets an error.
                    raise Unavailable("the request was given up", hint="ask again")  # noqa: TRY301
                piece = writer.read(event)
                self._heard.put_nowait((index, piece))
                if piece.finish is not None:
                    is_complete = True
                    return
            raise RuntimeError("the engine ended a sequence without a word")  # noqa: TRY301 - reported like all others
        except ShareComputeError as failure:
            self._heard.put_nowait(failure)
        except Exception:  # noqa: BLE001 - it is logged, and the reader gets an error
            _log.exception("an engine failed")
            mistake = "the server made a mistake"
            self._heard.put_nowait(ShareComputeError(mistake, hint="look into its log, and report it"))
        finally:
            await stream.aclose(is_complete=is_complete)

    async def close(self) -> None:
        """Cancel the sequences that are still being generated."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for stream in self._streams:  # a task that had not begun has closed nothing
            await stream.aclose()
