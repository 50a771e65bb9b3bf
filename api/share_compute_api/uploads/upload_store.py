"""Stores the uploads of a server. Each upload is a folder in the data folder, with a record of the upload."""

from __future__ import annotations

import json
import logging
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path

from pydantic import ValidationError

from share_compute.errors import Conflict, NotFound, TooLarge, UserError
from share_compute.files.durable import write_private
from share_compute.quantities import bytes_text, listed
from share_compute.store.records import ApiKeyRecord
from share_compute.store.secret import new_id
from share_compute.store.suggestions import suggested_id
from share_compute_api.schemas.bodies import UploadFile, UploadView
from share_compute_api.schemas.choices import UploadKind
from share_compute_api.uploads.arrival import Arrival
from share_compute_api.uploads.examination import examine
from share_compute_api.uploads.names import check_suffix, checked_path

MOST_FILES = 2000
_RECORD = "upload.json"
_ARRIVED = "arrived.jsonl"
_FILES = "files"
_PARTIAL = "partial"
_GONE = ".gone-"
_KEPT_FREE_BYTES = 256 << 20
"""Free disk space, in bytes, that uploads must leave for the server's records of the jobs' progress."""
_SPACE_HINT = "remove uploads that nobody needs (share-compute uploads list)"
_LEFT_AFTER = timedelta(days=1)
_LIST = "share-compute uploads list shows what there is"
_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Entry:
    """An upload, with the number of files being received and the number of requests that read the upload."""

    view: UploadView
    files: dict[str, UploadFile]
    touched_at: datetime
    files_bytes: int = field(init=False)
    """Total size of the files that have arrived, in bytes."""
    arriving: int = 0
    """Number of files that are being received."""
    arriving_bytes: int = 0
    is_closing: bool = False
    """Whether the upload is being completed or removed; meanwhile the upload accepts no files."""
    readers: int = 0
    """Number of requests that are reading the upload."""

    def __post_init__(self) -> None:
        self.files_bytes = sum(file.size_bytes for file in self.files.values())

    @property
    def size_bytes(self) -> int:
        return self.files_bytes + self.arriving_bytes

    def is_abandoned(self, now: datetime) -> bool:
        """Whether the upload is open, receives no file, and has received none for a day."""
        is_idle = not (self.arriving or self.is_closing)
        return self.view.state == "open" and is_idle and now - self.touched_at > _LEFT_AFTER

    def keep(self, file: UploadFile) -> None:
        """Add a file that has arrived; replace an earlier file with the same path."""
        before = self.files.get(file.path)
        self.files_bytes += file.size_bytes - (0 if before is None else before.size_bytes)
        self.files[file.path] = file

    def shown(self) -> UploadView:
        files = sorted(self.files.values(), key=lambda file: file.path)
        return self.view.model_copy(update={"files": files, "size_bytes": self.files_bytes})


@dataclass(slots=True)
class UploadStore:
    """The uploads of one server. All methods are thread-safe; no other process may use the folder.

    Args:
        folder: parent folder of the uploads; created with the first upload.
        most_bytes: maximum size of all uploads together.
        most_bytes_each: maximum size of one upload.
        clock: returns the time, in UTC.
    """

    folder: Path
    most_bytes: int
    most_bytes_each: int
    clock: Callable[[], datetime] = lambda: datetime.now(UTC)
    _entries: dict[str, _Entry] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _partials: int = 0

    def __post_init__(self) -> None:
        """Load the uploads of earlier runs of the server; delete partial files and removed uploads."""
        self.folder = self.folder.resolve()
        for folder in sorted(self.folder.glob(f"{_GONE}*")):
            shutil.rmtree(folder, ignore_errors=True)
        for folder in sorted(self.folder.glob("up-*")):
            shutil.rmtree(folder / _PARTIAL, ignore_errors=True)
            entry = _read(folder)
            if entry is None:
                _log.warning("%s has no valid upload record; the folder is ignored", folder)
            else:
                self._entries[folder.name] = entry

    @property
    def used_bytes(self) -> int:
        """Size of all uploads in bytes, including the files that are being received."""
        with self._lock:
            return self._used_bytes()

    def list(self, caller: ApiKeyRecord) -> list[UploadView]:
        """Return the caller's uploads, newest first; for an admin, all uploads."""
        with self._lock:
            found = [entry.shown() for entry in self._entries.values() if caller.owns(entry.view.owner)]
        return sorted(found, key=lambda view: (view.created_at, view.id), reverse=True)

    def get(self, upload_id: str, caller: ApiKeyRecord) -> UploadView:
        """Return one upload.

        Raises:
            NotFound: there is no such upload, or it belongs to another key.
        """
        with self._lock:
            return self._entry(upload_id, caller).shown()

    def create(self, name: str, kind: UploadKind, caller: ApiKeyRecord) -> UploadView:
        """Create an upload for the caller; also remove open uploads that have received no file for a day."""
        now = self.clock()
        with self._lock:
            entries = list(self._entries.values())
        for entry in entries:
            with self._lock:
                is_abandoned = entry.is_abandoned(now)
                entry.is_closing = entry.is_closing or is_abandoned
            if is_abandoned:
                self._discard(entry, lambda _: [])
        upload_id = new_id("up")
        folder = self.folder / upload_id
        (folder / _FILES).mkdir(parents=True, mode=0o700)
        view = UploadView(
            id=upload_id,
            owner=caller.id,
            name=name,
            kind=kind,
            state="open",
            created_at=now,
            folder=str(folder / _FILES),
        )
        write_private(folder / _RECORD, view.model_dump_json())
        with self._lock:
            self._entries[upload_id] = _Entry(view, {}, now)
        return view

    def receive(self, upload_id: str, path: str, caller: ApiKeyRecord, announced_bytes: int = 0) -> Arrival:
        """Begin to receive a file; return its `Arrival`, which the caller must close.

        When the file is complete, it replaces an earlier file with the same path.

        Args:
            upload_id: id of the upload.
            path: path of the file in the upload, with forward slashes.
            caller: API key of the sender.
            announced_bytes: size of the file, if known; else 0.

        Raises:
            NotFound: there is no such upload, or it belongs to another key.
            Conflict: the upload is complete, or is being completed or removed.
            TooLarge: there is not enough space for the file, or the upload has `MOST_FILES` files.
            UserError: the path is not allowed, or its suffix does not fit the kind of the upload.
        """
        checked_path(path)
        with self._lock:
            self._entry(upload_id, caller)
            entry = self._open_entry(upload_id)
            check_suffix(path, entry.view.kind)
            self._require_space(entry, announced_bytes)
            if path not in entry.files and len(entry.files) >= MOST_FILES:
                raise TooLarge(
                    f"an upload has at most {MOST_FILES} files",
                    hint="join small files, or make several uploads",
                )
            self._partials += 1
            entry.arriving += 1
            place = self.folder / upload_id / _PARTIAL / str(self._partials)
        try:
            place.parent.mkdir(exist_ok=True)
            return Arrival(
                place,
                path,
                partial(self._reserve, entry),
                partial(self._settle, upload_id, entry),
                partial(self._release, entry),
            )
        except BaseException:
            self._release(entry, 0)
            raise

    def complete(self, upload_id: str, caller: ApiKeyRecord) -> UploadView:
        """Check an upload, and let jobs use it; a second call changes nothing.

        Raises:
            NotFound: there is no such upload, or it belongs to another key.
            Conflict: files of the upload are being received, or another request completes or removes it.
            UserError: the upload has no file, or its content is not valid (see `examine`).
        """
        with self._lock:
            entry = self._entry(upload_id, caller)
            if entry.view.state == "complete":
                return entry.shown()
            self._require_complete(entry)
            entry.is_closing = True
            shown = entry.shown()
        try:
            if not shown.files:
                raise UserError("the upload has no file yet", hint="send its files, then complete it")
            examine(shown)
            view = shown.model_copy(update={"state": "complete", "completed_at": self.clock()})
            # After this write the upload stays complete, even if the server is killed.
            write_private(self.folder / upload_id / _RECORD, view.model_dump_json())
            with self._lock:
                entry.view = view
        finally:
            with self._lock:
                entry.is_closing = False
        return view

    def remove(
        self, upload_id: str, users: Callable[[Path], Sequence[str]], caller: ApiKeyRecord
    ) -> UploadView:
        """Remove an upload, and discard files that are being received.

        Args:
            upload_id: id of the upload.
            users: returns the ids of the jobs and deployments that currently use a folder.
            caller: API key of the request.

        Raises:
            NotFound: there is no such upload, or it belongs to another key.
            Conflict: a job, a deployment or another request uses the upload.
        """
        with self._lock:
            entry = self._entry(upload_id, caller)
            is_busy = bool(entry.readers) or entry.is_closing
            entry.is_closing = entry.is_closing or not is_busy
        if is_busy:
            # The error names jobs and deployments first, since they use the upload for longer than requests do.
            _require_unused(upload_id, users(self.folder / upload_id))
            raise Conflict(
                f"upload {upload_id} is being read to check a job or to plan it",
                hint="try again in a few seconds",
            )
        return self._discard(entry, users)

    def _discard(self, entry: _Entry, users: Callable[[Path], Sequence[str]]) -> UploadView:
        """Delete an upload for which the caller has set `_Entry.is_closing`; reset it if the upload stays."""
        upload_id = entry.view.id
        gone = self.folder / f"{_GONE}{upload_id}"
        try:
            _require_unused(upload_id, users(self.folder / upload_id))
            (self.folder / upload_id).rename(gone)
        except BaseException:
            with self._lock:
                entry.is_closing = False
            raise
        with self._lock:
            del self._entries[upload_id]
        shutil.rmtree(gone, ignore_errors=True)
        return entry.shown()

    @contextmanager
    def reading(self, upload_id: str, caller: ApiKeyRecord) -> Iterator[UploadView]:
        """Yield an upload, and prevent its removal until the block ends.

        Raises:
            NotFound: there is no such upload, it is being removed, or it belongs to another key.
            Conflict: the upload is not complete.
        """
        with self._lock:
            entry = self._entry(upload_id, caller)
            if entry.view.state == "open":
                raise Conflict(
                    f"upload {upload_id} is not complete yet", hint="wait until all of it has arrived"
                )
            if entry.is_closing:
                raise NotFound(f"upload {upload_id} is being removed", hint=_LIST)
            entry.readers += 1
            shown = entry.shown()
        try:
            yield shown
        finally:
            with self._lock:
                entry.readers -= 1

    def _entry(self, upload_id: str, caller: ApiKeyRecord) -> _Entry:
        entry = self._entries.get(upload_id)
        if entry is None or not caller.owns(entry.view.owner):
            own = (one.view for one in reversed(self._entries.values()) if caller.owns(one.view.owner))
            suggested = suggested_id(upload_id, ((view.id, view.name) for view in own))
            raise NotFound(f"there is no upload {upload_id}{suggested}", hint=_LIST)
        return entry

    def _open_entry(self, upload_id: str) -> _Entry:
        entry = self._entries.get(upload_id)
        if entry is None:
            raise NotFound(f"there is no upload {upload_id}", hint=_LIST)
        if entry.view.state == "complete" or entry.is_closing:
            raise Conflict(f"upload {upload_id} takes no more files", hint="begin another upload")
        return entry

    def _require_complete(self, entry: _Entry) -> None:
        if entry.arriving:
            what = "1 file of it is" if entry.arriving == 1 else f"{entry.arriving} files of it are"
            raise Conflict(
                f"upload {entry.view.id} cannot be completed: {what} on the way",
                hint="wait until they arrived",
            )
        if entry.is_closing:
            raise Conflict(f"upload {entry.view.id} is just being completed", hint="try again")

    def _used_bytes(self) -> int:
        return sum(entry.size_bytes for entry in self._entries.values())

    def _require_space(self, entry: _Entry, more_bytes: int) -> None:
        for used, most, what in (
            (entry.size_bytes, self.most_bytes_each, "one upload"),
            (self._used_bytes(), self.most_bytes, "all uploads together"),
        ):
            if used + more_bytes > most:
                raise TooLarge(
                    f"{what} may have {bytes_text(most)}: {bytes_text(used)} are used, "
                    f"and {bytes_text(more_bytes)} more were sent",
                    hint=f"{_SPACE_HINT}, or let the operator raise "
                    "SHARE_COMPUTE_UPLOAD_LIMIT_BYTES and SHARE_COMPUTE_UPLOADS_LIMIT_BYTES",
                    details={"limit_bytes": most, "used_bytes": used},
                )

        free_bytes = shutil.disk_usage(self.folder).free
        if free_bytes - more_bytes < _KEPT_FREE_BYTES:
            raise TooLarge(
                f"the server's disk has {bytes_text(free_bytes)} free, and uploads must leave "
                f"{bytes_text(_KEPT_FREE_BYTES)}; {bytes_text(more_bytes)} more were sent",
                hint=_SPACE_HINT,
                details={"free_bytes": free_bytes},
            )

    def _reserve(self, entry: _Entry, more_bytes: int) -> None:
        with self._lock:
            self._open_entry(entry.view.id)
            self._require_space(entry, more_bytes)
            entry.arriving_bytes += more_bytes

    def _release(self, entry: _Entry, size_bytes: int) -> None:
        with self._lock:
            entry.arriving -= 1
            entry.arriving_bytes -= size_bytes

    def _settle(self, upload_id: str, entry: _Entry, partial: Path, file: UploadFile) -> None:
        folder = self.folder / upload_id
        with self._lock:
            self._open_entry(upload_id)
            target = folder / _FILES / file.path
            target.parent.mkdir(parents=True, exist_ok=True)
            partial.replace(target)
            with (folder / _ARRIVED).open("a", encoding="utf-8") as arrived:
                arrived.write(file.model_dump_json() + "\n")
            entry.keep(file)
            entry.arriving -= 1
            entry.arriving_bytes -= file.size_bytes
            entry.touched_at = self.clock()


def _require_unused(upload_id: str, users: Sequence[str]) -> None:
    if users:
        raise Conflict(
            f"upload {upload_id} is used by {listed(users)}", hint="wait for its end, or end it first"
        )


def _read(folder: Path) -> _Entry | None:
    """Return the upload that is stored in a folder; None if the folder has no valid record."""
    try:
        view = UploadView.model_validate_json((folder / _RECORD).read_text(encoding="utf-8"))
        # The data folder may have been moved since the record was written.
        view = view.model_copy(update={"folder": str(folder / _FILES)})
        touched_at = datetime.fromtimestamp(folder.stat().st_mtime, UTC)
    except (OSError, ValidationError):
        return None
    files = view.files if view.state == "complete" else _arrived(folder)
    return _Entry(view, {file.path: file for file in files}, touched_at)


def _arrived(folder: Path) -> Iterator[UploadFile]:
    try:
        lines = (folder / _ARRIVED).read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    for line in lines:
        try:
            file = UploadFile.model_validate(json.loads(line))
        except ValueError:  # an incomplete line, because the server was killed while writing it
            continue
        if (folder / _FILES / file.path).is_file():
            yield file
