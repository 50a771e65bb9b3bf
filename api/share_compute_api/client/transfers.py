"""Methods of both clients that send several requests, or send or receive files; each is described once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path

from share_compute.files.series import SeriesFormat
from share_compute.lifecycle.states import ContributorState
from share_compute.store.records import ContributorRecord
from share_compute_api.client import downloads, sending
from share_compute_api.client.calls import Calls, Describer, StreamedCall, path_part, request
from share_compute_api.client.requests import ApiRequests
from share_compute_api.schemas.bodies import UploadView
from share_compute_api.schemas.choices import UploadKind


class DescribedRequests(ApiRequests, Describer):
    """The calls of `ApiRequests`, which are not sent."""


_CALLS = DescribedRequests()


class ApiTransfers(ApiRequests):
    """Methods of a client that send several requests one after the other.

    Files are read and written, and callbacks called, in the thread that uses the client.
    """

    @request
    def contributors(self, *, state: Sequence[ContributorState] = ()) -> Calls[list[ContributorRecord]]:
        """Return the machines in these states, in order of joining; default: all but those gone for more than a day."""
        page = yield from _CALLS.contributors_page(state=state)
        found = list(page.contributors)
        while page.next_cursor is not None:
            page = yield from _CALLS.contributors_page(state=state, cursor=page.next_cursor)
            found += page.contributors
        return found

    @request
    def metrics_file(
        self, job_id: str, format_: SeriesFormat, take: Callable[[bytes], object]
    ) -> Calls[None]:
        """Pass the pieces of a file with a job's series to ``take`` as they arrive."""
        path = f"/jobs/{path_part(job_id)}/metrics/file?format={format_}"
        yield from StreamedCall(path, lambda _: nullcontext(take))

    @request
    def download(
        self,
        job_id: str,
        name: str,
        folder: Path,
        *,
        called: str | None = None,
        progress: Callable[[int], None] = lambda _: None,
    ) -> Calls[Path]:
        """Download an artifact to the folder ``folder/called``, which appears only when it is complete.

        An interrupted download continues where it stopped.

        Args:
            job_id: the job.
            name: name of the artifact.
            folder: folder to download into.
            called: name of the downloaded folder; default: ``name``.
            progress: called with the number of bytes that arrived since the last call.

        Raises:
            Conflict: the target exists.
        """
        result = yield from _CALLS.artifact(job_id, name)
        return (yield from downloads.download(result, folder, progress, called or name))

    @request
    def upload(
        self,
        path: Path,
        *,
        name: str | None = None,
        kind: UploadKind | None = None,
        progress: Callable[[int], None] = lambda _: None,
    ) -> Calls[UploadView]:
        """Upload a file or a folder, which jobs can then name as ``upload:ID``.

        Args:
            path: file or folder. Hidden files and folders in a folder are left out.
            name: name to display; default: the name of the path.
            kind: kind of the upload; default: guessed from the files.
            progress: called with the number of bytes that were sent since the last call.

        Raises:
            UserError: the path cannot be read, it has no files, or a file does not fit the kind.
            TooLarge: the server has too little space.
        """
        return (yield from sending.send(path, name, kind, progress))
