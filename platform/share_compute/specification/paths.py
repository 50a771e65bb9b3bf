"""Paths in jobs and deployments: paths on a disk, and paths inside uploads to the server."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias, TypeVar, cast

from share_compute.specification.batch import EmbedJob, GenerateJob
from share_compute.specification.job import TrainJob
from share_compute.specification.serve import ServeJob

UPLOAD = "upload:"
DATA_FIELDS = ("data.files", "data.validation_files", "data.test_files")
"""Fields with paths of files; the other fields with paths name folders."""
Named: TypeAlias = TrainJob | GenerateJob | EmbedJob | ServeJob
"""A specification of a job or a deployment."""
AnyNamed = TypeVar("AnyNamed", bound=Named)


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
        change: function from the old path and the name of its field to the new path.
    """
    full: dict[str, Any] = {}
    if spec.model is not None and spec.model.path is not None:
        full["model"] = spec.model.model_copy(update={"path": change(spec.model.path, "model.path")})
    if isinstance(spec, TrainJob) and spec.tokenizer.path is not None:
        path = change(spec.tokenizer.path, "tokenizer.path")
        full["tokenizer"] = spec.tokenizer.model_copy(update={"path": path})
    if not isinstance(spec, ServeJob) and spec.data.files is not None:
        files: dict[str, Any] = {}
        for field in DATA_FIELDS:
            name = field.removeprefix("data.")
            named = getattr(spec.data, name, None)
            if named is not None:
                files[name] = tuple(change(file, field) for file in named)
        full["data"] = spec.data.model_copy(update=files)
    return cast("AnyNamed", spec.model_copy(update=full))


def named_paths(spec: Named) -> list[Path]:
    """Return all paths in a job or a deployment."""
    found: list[Path] = []

    def note(path: Path, field: str) -> Path:
        del field
        found.append(path)
        return path

    with_paths(spec, note)
    return found
