"""The Python client of the control plane; the command line uses it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import httpx
from httpx_sse import connect_sse

from share_compute.store.records import EventRecord, JobRecord
from share_compute_api.client import chatting
from share_compute_api.client.calls import ApiCall, Sender, StreamedCall
from share_compute_api.client.following import FollowedEvents, is_last, may_be_last
from share_compute_api.client.progress import JobProgress
from share_compute_api.client.transfers import ApiTransfers
from share_compute_api.connection.discovery import find_target
from share_compute_api.connection.transport import Transport, raise_for_problem


class Client(ApiTransfers, Sender, chatting.ModelUser[Iterator[str]]):
    """Client of a control plane. Its requests return results, and its streams are iterators.

    The methods raise the `ShareComputeError` that the server sent, or `Unavailable` if the server does not answer.

    Args:
        url: URL of the server; default: the one in the settings, else that of this machine's server.
        api_key: API key; default: the one in the settings or, for this machine's server, in its data folder.
        fingerprint: fingerprint of the server's key; default: as for ``api_key``. Without a fingerprint, the
            certificate is verified against public certificate authorities.
        data_folder: data folder of this machine's server, if it is not the default one.
        timeout_s: longest wait for a connection or for the next bytes of a response, in seconds.
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
        self._transport = Transport(target, timeout_s=timeout_s)
        self.url = self._transport.target.url

    def close(self) -> None:
        """Close all connections."""
        self._transport.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _exchange(self, sent: ApiCall[Any] | StreamedCall) -> Any:
        """Send one call, and return its result."""
        if isinstance(sent, ApiCall):
            return sent.read(self._transport.request(sent.method, sent.path, **sent.options).content)
        http = self._transport.http
        with self._transport.translated(), http.stream("GET", sent.path, headers=sent.headers) as answer:
            raise_for_problem(answer)
            with sent.begin(answer.status_code) as take:
                for piece in answer.iter_bytes():
                    take(piece)
        return None

    def follow(self, job_id: str, *, after: int = 0, patience_s: float = 300.0) -> Iterator[EventRecord]:
        """Yield a job's events, past events first, until the job is finished.

        If the stream breaks, the client reopens it after the last event that it received.

        Args:
            job_id: the job.
            after: number of the last event that the caller already has.
            patience_s: time without an answer after which the client stops reopening the stream, in seconds.

        Raises:
            Unavailable: the server does not answer.
        """
        state = FollowedEvents(job_id, after, patience_s)
        while self.job(job_id).state.is_final:
            # The stream of a finished job does not end, so the remaining events are read page by page.
            page = self.events(job_id, after=state.seen)
            if not page.events:
                return
            yield from page.events
            state.seen = page.next_after
        while True:
            failure = None
            try:
                with connect_sse(self._transport.http, "GET", state.path, **state.options()) as source:
                    raise_for_problem(source.response)
                    for item in source.iter_sse():
                        if (event := state.read(item)) is None:
                            continue
                        yield event
                        if may_be_last(event) and is_last(event, self.job(job_id)):
                            return
            except httpx.TransportError as broken:
                failure = broken
            with self._transport.translated():
                pause_s = state.pause_s(failure)
            time.sleep(pause_s)

    def wait(self, job_id: str, *, progress: bool = False) -> JobRecord:
        """Wait until a job is finished, and return it, whatever its state.

        Args:
            job_id: the job.
            progress: whether to show a bar with the steps, the loss and the time left, in a terminal or a notebook.
        """
        job = self.job(job_id)
        with JobProgress(job, is_shown=progress) as shown:
            for event in self.follow(job_id):
                shown.take(event)
        return self.job(job_id)

    def require_model(self, name: str) -> dict[str, Any]:
        """Return a model's entry in ``/v1/models``; raise the server's error if the model is not available."""
        with self._transport.translated():
            answer = self._transport.http.get(chatting.model_url(self.url, name))
        return chatting.model_facts(answer)

    def _stream(self, answer: chatting.StreamedAnswer) -> Iterator[str]:
        return chatting.stream(self._transport, answer)
