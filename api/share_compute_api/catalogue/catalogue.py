"""Lists the models that a key may serve, from uploads, results of jobs, data roots and the operator's file."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Final

from share_compute.errors import NotFound, ShareComputeError, UserError
from share_compute.files.field_errors import refused
from share_compute.files.folder_facts import FolderFacts
from share_compute.lifecycle.folders import job_folder
from share_compute.scopes import Scope
from share_compute.settings import Settings
from share_compute.specification import ServedModelSpec, TrainJob, upload_path
from share_compute.specification.base import COMMIT
from share_compute.specification.paths import UPLOAD
from share_compute.store import ApiKeyRecord, ArtifactRecord, JobRecord, Store
from share_compute_api.catalogue.facts import FactsReader, Found
from share_compute_api.catalogue.operator_file import CATALOGUE_FILE, OfferedModel, read_operator_file
from share_compute_api.schemas.bodies import UploadView
from share_compute_api.schemas.catalogue import CatalogueEntry, CatalogueView, ModelSource
from share_compute_api.submission.data_roots import DataRoots, require_no_links
from share_compute_api.uploads.upload_store import UploadStore
from share_compute_api.workers.isolated.remembered import Asks

_MOST_UPLOADS: Final = 500
_MOST_RESULTS: Final = 200
_MOST_SEARCHED: Final = 1000
"""Maximum number of results of jobs that are searched for models."""
_MOST_FOLDERS: Final = 200
_MOST_ENTRIES: Final = 20_000
"""Maximum number of entries of the data roots that a search for models reads."""
_WAIT_S: Final = 1.0
"""Maximum time that a request waits for the facts about new folders, in seconds."""
_SERVABLE: Final = ("language_model", "embedding")
"""Tasks of training jobs whose results can be served."""
_log = logging.getLogger(__name__)


def _accept() -> None:
    """Accept a folder without a check."""


@dataclass(frozen=True, slots=True)
class _Candidate:
    """A model that may be listed."""

    id: str
    name: str
    source: ModelSource
    model: ServedModelSpec
    folder: Path | None = None
    """Folder on the server; None for a model of the Hub that has not been fetched."""
    reference: str | None = None
    check: Callable[[], None] = _accept
    """Raises UserError if the folder must not be read."""
    description: str | None = None
    licence: str | None = None
    changed_at: datetime | None = None

    def entry(self, found: Found) -> CatalogueEntry:
        """Return the list entry of a model: facts about its folder, or the reason why they are missing."""
        facts = found if isinstance(found, FolderFacts) else None
        failure = found if isinstance(found, ShareComputeError) else None
        return CatalogueEntry(
            id=self.id,
            name=self.name,
            source=self.source,
            model=self.model,
            reference=self.reference,
            description=self.description,
            licence=self.licence or (facts and facts.licence),
            changed_at=self.changed_at,
            facts=facts,
            is_pending=self.folder is not None and found is None,
            problem=failure and failure.message,
            hint=failure and failure.hint,
        )


@dataclass(slots=True)
class Catalogue:
    """The models that can be served here; thread-safe. Call `close` at the end.

    Args:
        settings: the server's settings.
        store: the store of jobs.
        uploads: the uploads.
        data_roots: folders on the server whose models may be served.
        processes: isolated processes, which read the models' folders.
    """

    settings: Settings
    store: Store
    uploads: UploadStore
    data_roots: DataRoots
    processes: Asks
    _facts: FactsReader = field(init=False)
    _logged: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Create the reader of folders."""
        self._facts = FactsReader(self.processes)

    def close(self) -> None:
        """Stop reading folders."""
        self._facts.close()

    def view(self, caller: ApiKeyRecord) -> CatalogueView:
        """Return the models that a key may serve."""
        notes: list[str] = []
        found: dict[object, _Candidate] = {}
        # The first candidate of a folder counts: the operator's own entry replaces other entries of its folder or
        # upload.
        for one in self._candidates(caller, notes):
            first = found.setdefault(one.folder or one.id, one)
            if first is not one and one.source == "operator" and caller.may(Scope.admin):
                notes.append(
                    f"{CATALOGUE_FILE}: {one.name} is not listed: {first.name} has the same folder; remove one"
                )
        folders = {one.folder: one.check for one in found.values() if one.folder is not None}
        facts = self._facts.read(folders, _WAIT_S)
        entries = [one.entry(None if one.folder is None else facts[one.folder]) for one in found.values()]
        return CatalogueView(models=entries, notes=notes)

    def _candidates(self, caller: ApiKeyRecord, notes: list[str]) -> Iterator[_Candidate]:
        uploads = [
            one for one in self.uploads.list(caller) if one.kind == "model" and one.state == "complete"
        ]
        yield from self._offered(caller, uploads, notes)
        yield from self._results(caller, notes)
        for view in uploads[:_MOST_UPLOADS]:
            yield _of_upload(view, caller)
        if len(uploads) > _MOST_UPLOADS:
            notes.append(f"only the newest {_MOST_UPLOADS} uploads are listed")
        folders, is_cut = self.data_roots.model_folders(_MOST_FOLDERS, _MOST_ENTRIES)
        for folder in folders:
            yield self._of_folder(folder)
        if is_cut:
            notes.append(
                f"the search of the data roots stopped after {_MOST_FOLDERS} models or {_MOST_ENTRIES:,} files"
            )

    def _results(self, caller: ApiKeyRecord, notes: list[str]) -> Iterator[_Candidate]:
        owner = None if caller.may(Scope.admin) else caller.id
        listed = 0
        for skip in range(0, _MOST_SEARCHED, _MOST_RESULTS):
            results = self.store.progress.newest_artifacts("train", _MOST_RESULTS, owner, skip=skip)
            for job, artifact in results:
                if (one := self._of_result(job, artifact)) is not None:
                    if listed == _MOST_RESULTS:
                        notes.append(f"only the newest {_MOST_RESULTS} models of jobs are listed")
                        return
                    listed += 1
                    yield one
            if len(results) < _MOST_RESULTS:
                return
        notes.append(f"only the newest {_MOST_SEARCHED:,} results of jobs are searched")

    def _of_result(self, job: JobRecord, artifact: ArtifactRecord) -> _Candidate | None:
        """Return the candidate of a job's result; None if the result cannot be served."""
        spec, folder = job.spec, artifact.path
        is_model = isinstance(spec, TrainJob) and spec.model_task in _SERVABLE and spec.model.layers is None
        home = job_folder(self.settings.data_folder, job.kind, job.id)
        if not is_model or not _is_below(folder, home):
            return None
        # A folder without config.json is not a whole model, for example an unmerged LoRA adapter. `lexists` accepts a
        # link, so that `require_no_links` can refuse the link with a reason.
        if not os.path.lexists(folder / "config.json"):
            return None

        return _Candidate(
            id=f"job:{job.id}/{artifact.name}",
            name=job.name if artifact.name == "model" else f"{job.name}/{artifact.name}",
            source="job",
            model=ServedModelSpec(job=job.id, artifact=artifact.name),
            folder=folder,
            reference=str(folder),
            check=lambda: require_no_links(folder),
            changed_at=artifact.created_at,
        )

    def _of_folder(self, folder: Path) -> _Candidate:
        return _Candidate(
            id=f"folder:{folder}",
            name=_folder_name(folder),
            source="folder",
            model=ServedModelSpec(path=folder),
            folder=folder,
            reference=str(folder),
            check=lambda: self.data_roots.check_folder(folder, "model.path"),
        )

    def _offered(
        self, caller: ApiKeyRecord, uploads: list[UploadView], notes: list[str]
    ) -> Iterator[_Candidate]:
        """Yield the entries of the operator's file that the caller may serve; append its problems to admins' notes."""
        offered, problems = read_operator_file(self.settings.data_folder / CATALOGUE_FILE)
        if problems != self._logged:
            self._logged = problems
            for problem in problems:
                _log.warning("%s", problem)
        shown = list(problems)
        for one in offered:
            try:
                yield self._of_offer(one, caller, uploads)
            except (UserError, NotFound) as failure:
                shown.append(f"{CATALOGUE_FILE}: {one.name}: {failure.message}")
        if caller.may(Scope.admin):
            notes += shown

    def _of_offer(self, one: OfferedModel, caller: ApiKeyRecord, uploads: list[UploadView]) -> _Candidate:
        """Return the candidate of an operator's entry.

        Raises:
            UserError: the caller may not serve the model, or it does not exist.
        """
        found = self._named(one.model, caller, uploads)
        if found is None:
            found = _Candidate(id="", name="", source="operator", model=one.model)
        return replace(
            found,
            id=f"operator:{one.name}",
            name=one.name,
            source="operator",
            model=one.model,
            description=one.description,
            licence=one.licence,
        )

    def _named(
        self, model: ServedModelSpec, caller: ApiKeyRecord, uploads: list[UploadView]
    ) -> _Candidate | None:
        """Return the candidate of a model that an operator's entry names; None if the Hub must still be asked."""
        if model.hub is not None:
            # A branch or a tag may have moved since a commit was fetched.
            name = f"{model.hub}@{model.revision}" if COMMIT.match(model.revision or "") else None
            fetched = [view for view in uploads if view.owner == caller.id and view.name == name]
            return _of_upload(fetched[0], caller) if fetched else None
        if model.path is None:
            assert model.job is not None
            job = self.store.jobs.get(model.job)
            artifact = self.store.progress.artifact(model.job, model.artifact)
            found = self._of_result(job, artifact) if caller.owns(job.owner) else None
            if found is None:
                raise refused(
                    "model.job", f"{model.job} has no model that this key may serve", "name another"
                )
            return found
        if (named := upload_path(model.path)) is not None:
            view = next((view for view in uploads if view.id == named[0]), None)
            if view is None:
                raise refused("model.path", f"there is no complete upload {named[0]}", "name another upload")
            return _of_upload(view, caller)
        folder = self.data_roots.resolve(model.path, "model.path")
        if not folder.is_dir():
            raise refused("model.path", f"{folder} is no folder", "name the folder of a model")
        return self._of_folder(folder)


def _of_upload(view: UploadView, caller: ApiKeyRecord) -> _Candidate:
    """Return the candidate of an upload. A fetched model of the caller is named by its name on the Hub."""
    reference = f"{UPLOAD}{view.id}"
    hub, _, commit = view.name.rpartition("@")
    is_fetched = bool(COMMIT.match(commit)) and hub.count("/") <= 1 and hub != "" and view.owner == caller.id
    return _Candidate(
        id=reference,
        name=hub if is_fetched else view.name,
        source="hub" if is_fetched else "upload",
        model=ServedModelSpec(path=Path(reference)),
        folder=Path(view.folder),
        reference=reference,
        changed_at=view.created_at,
    )


def _is_below(folder: Path, home: Path) -> bool:
    """Return whether a folder is below another one, after links are resolved.

    The check is needed because untrusted code on the Ray head reports the paths of results. It reads nothing in the
    folder.
    """
    try:
        return Path(os.path.realpath(folder)).is_relative_to(os.path.realpath(home))
    except ValueError:  # the path contains a NUL byte
        return False


def _folder_name(folder: Path) -> str:
    """Return the name of a folder or, in a cache of the Hugging Face Hub, the name of the model on the Hub."""
    cache = folder.parents[1].name if len(folder.parents) > 1 else ""
    if folder.parent.name == "snapshots" and cache.startswith("models--"):
        return cache.removeprefix("models--").replace("--", "/")
    return folder.name
