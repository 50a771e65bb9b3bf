"""The asynchronous Python client of the control plane."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Self

import httpx
from httpx_sse import aconnect_sse

from share_compute.store.records import EventRecord, JobRecord
from share_compute_api.client import chatting
from share_compute_api.client.calls import ApiCall, AsyncSender, StreamedCall
from share_compute_api.client.following import FollowedEvents, is_last, may_be_last
from share_compute_api.client.progress import JobProgress
from share_compute_api.client.transfers import ApiTransfers
from share_compute_api.connection.discovery import find_target
from share_compute_api.connection.transport import AsyncTransport, raise_for_problem


class AsyncClient(ApiTransfers, AsyncSender, chatting.ModelUser[AsyncIterator[str]]):
    """Asynchronous client of a control plane: ``await client.job(job_id)``, ``async for event in client.follow(...)``.

    Its arguments, methods and errors are those of `Client`. One client may send several requests at once.
    """

    def __init__(
        self,
        url: str | None = None,
        api_key: str | None = None,
        *,
        fingerprint: str | None = None,
        data_folder: Path | None = None,
        timeout_s: float = 30.0,
    ) -> None:
        target = find_target(url, api_key, data_folder, fingerprint)
        self._transport = AsyncTransport(target, timeout_s=timeout_s)
        self.url = self._transport.target.url

    async def close(self) -> None:
        """Close all connections."""
        await self._transport.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _exchange(self, sent: ApiCall[Any] | StreamedCall) -> Any:
        """Send one call, and return its result."""
        if isinstance(sent, ApiCall):
            answer = await self._transport.request(sent.method, sent.path, **sent.options)
            return sent.read(answer.content)
        http = self._transport.http
        with self._transport.translated():
            async with http.stream("GET", sent.path, headers=sent.headers) as answer:
                if not answer.is_success:
                    await answer.aread()
                raise_for_problem(answer)
                with sent.begin(answer.status_code) as take:
                    async for piece in answer.aiter_bytes():
                        take(piece)
        return None

    async def follow(
        self, job_id: str, *, after: int = 0, patience_s: float = 300.0
    ) -> AsyncIterator[EventRecord]:
        """Yield a job's events, past events first, until the job is finished; see `Client.follow`."""
        state = FollowedEvents(job_id, after, patience_s)
        while (await self.job(job_id)).state.is_final:
            page = await self.events(job_id, after=state.seen)
            if not page.events:
                return
            for event in page.events:
                yield event
            state.seen = page.next_after
        while True:
            failure = None
            try:
                async with aconnect_sse(self._transport.http, "GET", state.path, **state.options()) as source:
                    if not source.response.is_success:
                        await source.response.aread()
                    raise_for_problem(source.response)
                    async for item in source.aiter_sse():
                        if (found := state.read(item)) is None:
                            continue
                        yield found
                        if may_be_last(found) and is_last(found, await self.job(job_id)):
                            return
            except httpx.TransportError as broken:
                failure = broken
            with self._transport.translated():
                pause_s = state.pause_s(failure)
            await asyncio.sleep(pause_s)

    async def wait(self, job_id: str, *, progress: bool = False) -> JobRecord:
        """Wait until a job is finished, and return it, whatever its state; see `Client.wait`."""
        with JobProgress(await self.job(job_id), is_shown=progress) as shown:
            async for event in self.follow(job_id):
                shown.take(event)
        return await self.job(job_id)

    async def require_model(self, name: str) -> dict[str, Any]:
        """Return a model's entry in ``/v1/models``; raise the server's error if the model is not available."""
        with self._transport.translated():
            answer = await self._transport.http.get(chatting.model_url(self.url, name))
        return chatting.model_facts(answer)

    def _stream(self, answer: chatting.StreamedAnswer) -> AsyncIterator[str]:
        return chatting.stream_async(self._transport, answer)
