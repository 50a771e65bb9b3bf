"""Paths in jobs and deployments: paths on a disk, and paths inside uploads to the server."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias, TypeVar, cast

from share_compute.specification.batch import EmbedDataSpec, EmbedJob, GenerateDataSpec, GenerateJob
from share_compute.specification.data import DataSpec
from share_compute.specification.job import TrainJob
from share_compute.specification.kinds.sweep import SweepJob
from share_compute.specification.serve import ServeJob
from share_compute.specification.sparse.job import SparseDataSpec, SparseJob

UPLOAD = "upload:"
DATA_FIELDS = ("data.files", "data.validation_files", "data.test_files")
"""Fields with paths of the job's own files."""
_LINKED_FILES = "then.generate.data.files"
_FILE_FIELDS = (*DATA_FIELDS, _LINKED_FILES)
_OF_A_TASK = re.compile(r"tasks\.\d+\.")
Named: TypeAlias = TrainJob | GenerateJob | EmbedJob | SweepJob | SparseJob | ServeJob
"""A specification of a job or a deployment."""
_Plain: TypeAlias = TrainJob | GenerateJob | EmbedJob | SparseJob | ServeJob
AnyData = TypeVar("AnyData", bound=DataSpec | GenerateDataSpec | EmbedDataSpec | SparseDataSpec)
AnyNamed = TypeVar("AnyNamed", bound=Named)


def names_file(field: str) -> bool:
    """Return whether a field has paths of files; the other fields with paths name folders."""
    return _OF_A_TASK.sub("", field, count=1) in _FILE_FIELDS


def upload_path(path: Path) -> tuple[str, str] | None:
    """Return the upload id and the path inside the upload; None if the path is not in an upload.

    ``upload:up-k3v7q2ma/corpus.txt`` gives ``("up-k3v7q2ma", "corpus.txt")``.
    """
    text = path.as_posix()
    if not text.startswith(UPLOAD):
        return None
    upload, _, inside = text.removeprefix(UPLOAD).partition("/")
    return upload, inside


def with_paths(spec: AnyNamed, change: Callable[[Path, str], Path]) -> AnyNamed:
    """Return a copy of a job or a deployment, with each path replaced by ``change``.

    Args:
        spec: the job or the deployment.
        change: function from the old path and the name of its field to the new path. Fields of a sweep's job have the
            names that they have in the job itself.
    """
    if isinstance(spec, SweepJob):
        return cast("AnyNamed", spec.model_copy(update={"job": with_paths(spec.job, change)}))
    return cast("AnyNamed", _with_own_paths(cast("_Plain", spec), change))


def _with_own_paths(spec: _Plain, change: Callable[[Path, str], Path]) -> _Plain:
    full: dict[str, Any] = {}
    if not isinstance(spec, SparseJob) and spec.model is not None and spec.model.path is not None:
        full["model"] = spec.model.model_copy(update={"path": change(spec.model.path, "model.path")})
    if isinstance(spec, TrainJob) and spec.tokenizer.path is not None:
        path = change(spec.tokenizer.path, "tokenizer.path")
        full["tokenizer"] = spec.tokenizer.model_copy(update={"path": path})
    if not isinstance(spec, ServeJob):
        full["data"] = _with_files(spec.data, change, "")
    if isinstance(spec, TrainJob) and spec.tasks:
        full["tasks"] = tuple(
            task
            if task.data is None
            else task.model_copy(update={"data": _with_files(task.data, change, f"tasks.{place}.")})
            for place, task in enumerate(spec.tasks)
        )
    if isinstance(spec, TrainJob) and (linked := spec.then.generate) is not None:
        rows = tuple(change(file, _LINKED_FILES) for file in linked.data.files)
        data = linked.data.model_copy(update={"files": rows})
        full["then"] = spec.then.model_copy(update={"generate": linked.model_copy(update={"data": data})})
    return spec.model_copy(update=full)


def with_file_names(spec: AnyNamed) -> AnyNamed:
    """Return a copy of a job or a deployment in which names of files and folders replace their paths."""
    return with_paths(spec, lambda path, _: Path(path.name))


def _with_files(data: AnyData, change: Callable[[Path, str], Path], prefix: str) -> AnyData:
    files: dict[str, Any] = {}
    for field in DATA_FIELDS:
        name = field.removeprefix("data.")
        named = getattr(data, name, None)
        if named is not None:
            files[name] = tuple(change(file, prefix + field) for file in named)
    return cast("AnyData", data.model_copy(update=files))


def named_paths(spec: Named) -> list[Path]:
    """Return all paths in a job or a deployment."""
    found: list[Path] = []

    def note(path: Path, field: str) -> Path:
        del field
        found.append(path)
        return path

    with_paths(spec, note)
    return found
