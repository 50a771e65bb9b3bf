"""Fetches models from the Hugging Face Hub into uploads, which jobs and deployments then use like any upload.

Only public models are fetched, without a token: an operator's token would open gated models to every submitter.
"""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from share_compute.errors import (
    Busy,
    Conflict,
    FetchUnderWay,
    NotAuthorized,
    ShareComputeError,
    TooLarge,
    Unavailable,
    UserError,
    as_ours,
)
from share_compute.files.plain_yaml import read_json
from share_compute.quantities import bytes_text
from share_compute.specification.base import COMMIT
from share_compute.store import ApiKeyRecord
from share_compute_api.hub.problems import translated
from share_compute_api.schemas.bodies import UploadView
from share_compute_api.uploads.upload_store import UploadStore
from share_compute_api.workers.isolated.messages import ReadWeightIndex
from share_compute_api.workers.isolated.pool import IsolatedProcesses
from share_compute_api.workers.isolated.weight_index import INDEX

if TYPE_CHECKING:
    from huggingface_hub.hf_api import ModelInfo

_SINGLE = "model.safetensors"
_OTHERS = re.compile(r"^[^/]+\.(json|jinja|txt)$|^tokenizer\.model$|^README\.md$|^1_Pooling/config\.json$")
"""Files beside the weights: configurations, tokenizers, chat templates and the model card."""
_MOST_SMALL_BYTES = 64 << 20
"""Maximum size of a file beside the weights."""
_MOST_CONFIG_BYTES = 1 << 20
"""Maximum size of a config.json that the control plane parses. Parsed JSON can take 24 times the size of its text."""
_MOST_INDEX_BYTES = 16 << 20
"""Maximum size of an index, which an isolated process parses. The largest known models need 10 to 15 MiB."""
_PIECE_BYTES = 1 << 20
_READ_TIMEOUT_S = 60.0
"""Longest wait for the next bytes of a file, in seconds."""
_RETRY_AFTER_S = 3
_MOST_FETCHES = 4
_MOST_OF_ONE = 2
"""Maximum number of fetches at a time of one API key."""
_ERROR_KEPT_S = 60.0
"""Time after the end of a fetch in which a repeated request gets the error of this fetch, in seconds."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _File:
    path: str
    size_bytes: int
    sha256: str | None
    """Checksum; None for files that the Hub keeps in git."""


@dataclass(slots=True)
class _Fetch:
    """A model that is being fetched."""

    repository: str
    total_bytes: int
    arrived_bytes: int = 0
    done: threading.Event = field(default_factory=threading.Event)
    error: ShareComputeError | None = None


class HubModels:
    """Fetches models of the Hub. All methods are thread-safe.

    Args:
        uploads: the uploads that models are fetched into. They count towards the limits of uploads.
        processes: isolated processes, which read the indexes of models.
        endpoint: URL of the Hub; default: ``HF_ENDPOINT``, else https://huggingface.co.
        wait_s: longest time that a request waits for a model, in seconds.
        timeout_s: longest wait for an answer about a model, in seconds.
    """

    def __init__(
        self,
        uploads: UploadStore,
        processes: IsolatedProcesses,
        endpoint: str | None = None,
        *,
        wait_s: float = 3.0,
        timeout_s: float = 10.0,
    ) -> None:
        self._uploads = uploads
        self._processes = processes
        self.endpoint = endpoint
        self.wait_s = wait_s
        """Longest time that a request waits for a model, in seconds."""
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._fetches: dict[tuple[str, str], _Fetch] = {}
        """(API key id, name of the upload) -> fetch."""
        self._failed: dict[tuple[str, str], tuple[float, ShareComputeError]] = {}
        """Errors that no request has raised yet, with the time at which the fetch ended."""

    def find(
        self, repository: str, revision: str | None, caller: ApiKeyRecord, *, fetches: bool
    ) -> tuple[str, str | None]:
        """Return a model's commit, and the id of the caller's upload with its files.

        Args:
            repository: name of the model on the Hub.
            revision: branch, tag or commit; None for main.
            caller: key of the request, which owns the upload.
            fetches: whether to fetch the model if the caller has no such upload. If not, the id may be None.

        Raises:
            FetchUnderWay: the model is still being fetched; a repeated call joins the fetch.
            UserError: there is no such model, it is gated, has no safetensors, or is too large.
            Unavailable: the Hub does not answer, or too many models are being fetched.
        """
        if revision is not None and COMMIT.match(revision):
            made = self._upload(_name(repository, revision), caller)
            if made is not None and made.state == "complete":
                return revision, made.id
        info = self._info(repository, revision)
        commit = str(info.sha)
        if not COMMIT.match(commit):
            raise Unavailable(
                f"the Hub does not say which commit of {repository} this is", hint="try again later"
            )
        made = self._upload(_name(repository, commit), caller)
        if made is not None and made.state == "complete":
            return commit, made.id
        files = self._files(repository, info)
        if not fetches:
            return commit, None
        return commit, self._fetched(repository, commit, files, caller)

    def configuration(self, repository: str, commit: str) -> dict[str, Any]:
        """Return the content of a model's config.json.

        Raises:
            UserError: the file is not a JSON object with a ``model_type``, or has more than 1 MiB.
            Unavailable: the Hub does not answer.
        """
        content = read_json(self._read(repository, commit, "config.json", _MOST_CONFIG_BYTES), "config.json")
        if not isinstance(content, dict) or not isinstance(content.get("model_type"), str):
            raise UserError(
                f"config.json of {repository} has no model_type", hint="name a model of transformers"
            )
        return content

    def _upload(self, name: str, caller: ApiKeyRecord) -> UploadView | None:
        """Return the caller's own upload of this name, preferably a complete one."""
        found = [
            view
            for view in self._uploads.list(caller)
            if view.owner == caller.id and view.kind == "model" and view.name == name
        ]
        return min(found, key=lambda view: view.state != "complete", default=None)

    def _info(self, repository: str, revision: str | None) -> ModelInfo:
        from huggingface_hub import HfApi

        api = HfApi(self.endpoint, token=False, library_name="share-compute")
        with translated(repository, uses_token=False):
            info = api.model_info(repository, revision=revision, files_metadata=True, timeout=self._timeout_s)
        if info.gated:
            raise NotAuthorized(
                f"{repository} is gated: its owner grants access on request",
                hint="download it with your own account (hf download), and send it: share-compute upload FOLDER",
            )
        return info

    def _files(self, repository: str, info: ModelInfo) -> list[_File]:
        """Return the files of a model to fetch: the safetensors in its index, and the files beside them."""
        there = {
            one.rfilename: _File(one.rfilename, one.size or 0, None if one.lfs is None else one.lfs.sha256)
            for one in info.siblings or ()
        }
        if "config.json" not in there:
            raise UserError(f"{repository} has no config.json", hint="name a model of transformers")
        if INDEX in there:
            weights = self._indexed(repository, str(info.sha))
        elif _SINGLE in there:
            weights = {_SINGLE}
        else:
            raise UserError(
                f"{repository} has no weights in safetensors format; other formats could run code when they are read",
                hint="name a revision with model.safetensors, or convert the model and send it: share-compute upload",
            )
        missing = sorted(weights.difference(there))
        if missing:
            raise UserError(
                f"{repository} lacks {missing[0]}, which its index names", hint="name another revision"
            )
        files = [there[name] for name in sorted(there) if name in weights or _OTHERS.match(name)]
        self._check_sizes(repository, files, weights)
        return files

    def _indexed(self, repository: str, commit: str) -> set[str]:
        """Return the names of the files with weights in the index."""
        text = self._read(repository, commit, INDEX, _MOST_INDEX_BYTES)
        return set(self._processes.ask(ReadWeightIndex(text=text, repository=repository)).names)

    def _check_sizes(self, repository: str, files: list[_File], weights: set[str]) -> None:
        large = next(
            (one for one in files if one.path not in weights and one.size_bytes > _MOST_SMALL_BYTES), None
        )
        if large is not None:
            raise TooLarge(
                f"{large.path} of {repository} has {bytes_text(large.size_bytes)}; at most "
                f"{bytes_text(_MOST_SMALL_BYTES)} are fetched of a file without weights",
                hint="name another model",
            )
        total_bytes, most = sum(one.size_bytes for one in files), self._uploads.most_bytes_each
        if total_bytes > most:
            raise TooLarge(
                f"{repository} has {bytes_text(total_bytes)}; one upload may have {bytes_text(most)}",
                hint="name a smaller model, or let the operator raise SHARE_COMPUTE_UPLOAD_LIMIT_BYTES",
            )

    def _fetched(self, repository: str, commit: str, files: list[_File], caller: ApiKeyRecord) -> str:
        """Start or join the fetch of a model, and return the id of the upload when it is complete."""
        name = _name(repository, commit)
        key = (caller.id, name)
        with self._lock:
            fetch = self._fetches.get(key)
            if fetch is None:
                self._raise_error(key)
                self._require_capacity(caller)
                fetch = _Fetch(repository, sum(one.size_bytes for one in files))
                self._fetches[key] = fetch
                work = threading.Thread(
                    target=self._run, args=(fetch, key, commit, files, caller), name="hub-fetch", daemon=True
                )
                work.start()
        if not fetch.done.wait(self.wait_s):
            raise FetchUnderWay(
                f"{repository} is being fetched from the Hub: {bytes_text(fetch.arrived_bytes)} of "
                f"{bytes_text(fetch.total_bytes)}",
                hint=f"submit it again in {_RETRY_AFTER_S} s; the files that have arrived are kept",
                details={"retry_after_s": _RETRY_AFTER_S},
            )
        if fetch.error is not None:
            with self._lock:
                self._failed.pop(key, None)
            raise fetch.error
        made = self._upload(name, caller)
        if made is None or made.state != "complete":
            raise Conflict(f"the upload of {repository} was removed", hint="submit it again")
        return made.id

    def _raise_error(self, key: tuple[str, str]) -> None:
        """Raise the error of the last fetch, once, if it ended less than a minute ago. The caller holds the lock."""
        now = time.monotonic()
        self._failed = {one: last for one, last in self._failed.items() if now - last[0] < _ERROR_KEPT_S}
        _, error = self._failed.pop(key, (now, None))
        if error is not None:
            raise error

    def _require_capacity(self, caller: ApiKeyRecord) -> None:
        """Raise `Busy` if no further model can be fetched for the caller. The caller holds the lock."""
        mine, all_ = sum(owner == caller.id for owner, _ in self._fetches), len(self._fetches)
        if mine >= _MOST_OF_ONE or all_ >= _MOST_FETCHES:
            count, whose = (mine, " for this key") if mine >= _MOST_OF_ONE else (all_, "")
            raise Busy(
                f"{count} models are being fetched from the Hub{whose}",
                hint="try again when one has arrived",
                details={"retry_after_s": _RETRY_AFTER_S},
            )

    def _run(
        self, fetch: _Fetch, key: tuple[str, str], commit: str, files: list[_File], caller: ApiKeyRecord
    ) -> None:
        try:
            made = self._upload(key[1], caller) or self._uploads.create(key[1], "model", caller)
            arrived = {file.path for file in made.files}
            for file in files:
                if file.path in arrived:
                    fetch.arrived_bytes += file.size_bytes
                else:
                    self._receive(fetch, made.id, commit, file, caller)
            self._uploads.complete(made.id, caller)
        except Exception as failure:  # noqa: BLE001 - the waiting request raises it
            fetch.error = as_ours(failure)
            _log.warning("%s was not fetched: %s", fetch.repository, fetch.error.message)
        finally:
            with self._lock:
                del self._fetches[key]
                if fetch.error is not None:
                    self._failed[key] = time.monotonic(), fetch.error
            fetch.done.set()

    def _receive(self, fetch: _Fetch, upload_id: str, commit: str, file: _File, caller: ApiKeyRecord) -> None:
        arrival = self._uploads.receive(upload_id, file.path, caller, file.size_bytes)
        try:
            size_bytes = 0
            with self._stream(fetch.repository, commit, file.path) as pieces:
                for piece in pieces:
                    size_bytes += len(piece)
                    if size_bytes > file.size_bytes:
                        break
                    arrival.write(piece)
                    fetch.arrived_bytes += len(piece)
            if size_bytes != file.size_bytes:
                raise UserError(
                    f"{file.path} of {fetch.repository} has not the size that the Hub announced",
                    hint="try again",
                )
            arrival.finish(file.sha256)
        finally:
            arrival.close()

    def _read(self, repository: str, commit: str, path: str, most_bytes: int) -> str:
        """Return the text of a file that has at most ``most_bytes``."""
        content = bytearray()
        with self._stream(repository, commit, path) as pieces:
            for piece in pieces:
                content += piece
                if len(content) > most_bytes:
                    raise TooLarge(
                        f"{path} of {repository} has more than {bytes_text(most_bytes)}",
                        hint="name another model",
                    )
        return content.decode(errors="replace")

    @contextmanager
    def _stream(self, repository: str, commit: str, path: str) -> Iterator[Iterator[bytes]]:
        """Yield an iterator over the pieces of a file."""
        from huggingface_hub import hf_hub_url
        from huggingface_hub.utils._headers import build_hf_headers
        from huggingface_hub.utils._http import get_session, hf_raise_for_status

        url = hf_hub_url(repository, path, revision=commit, endpoint=self.endpoint)
        headers = build_hf_headers(token=False, library_name="share-compute")
        # otherwise a small compressed response could expand to a large one
        headers["Accept-Encoding"] = "identity"
        with (
            translated(repository, uses_token=False),
            get_session().stream(
                "GET", url, headers=headers, timeout=_READ_TIMEOUT_S, follow_redirects=True
            ) as response,
        ):
            if response.is_error:
                response.read()
            hf_raise_for_status(response)
            yield response.iter_bytes(_PIECE_BYTES)


def _name(repository: str, commit: str) -> str:
    return f"{repository}@{commit}"
