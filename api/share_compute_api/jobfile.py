"""Job files as people write them: paths in them are relative to the file."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from share_compute.errors import UserError
from share_compute.specification import BatchJob, ServeJob, TrainJob, parse_job, parse_submission


def read_job(path: Path) -> TrainJob:
    """Read a job from a file, or from standard input when the path is ``-``.

    Raises:
        UserError: it cannot be read, or is not a job.
    """
    return (
        with_full_paths(parse_job(sys.stdin.read()), Path.cwd()) if str(path) == "-" else read_job_file(path)
    )


def read_job_file(path: Path) -> TrainJob:
    """Read a YAML or JSON job file; relative paths in it become full ones, from the file's folder.

    Raises:
        UserError: the file cannot be read, or is not a job.
    """
    return with_full_paths(parse_job(read_text(path)), path.parent)


def read_submission(path: Path) -> TrainJob | BatchJob | ServeJob:
    """Read a job or a deployment, by its kind, from a file, or from standard input when the path is ``-``.

    Raises:
        UserError: it cannot be read, or is neither.
    """
    is_piped = str(path) == "-"
    spec = parse_submission(sys.stdin.read() if is_piped else read_text(path))
    base = Path.cwd() if is_piped else path.parent
    if isinstance(spec, TrainJob):
        return with_full_paths(spec, base)
    full: dict[str, Any] = {}
    if spec.model is not None:
        folder = spec.model.path and (base / spec.model.path.expanduser()).resolve()
        full["model"] = spec.model.model_copy(update={"path": folder})
    if not isinstance(spec, ServeJob):
        files = tuple((base / file.expanduser()).resolve() for file in spec.data.files)
        full["data"] = spec.data.model_copy(update={"files": files})
    return spec.model_copy(update=full)


def read_text(path: Path) -> str:
    """Return the text of a file.

    Raises:
        UserError: it cannot be read.
    """
    try:
        return path.read_text(encoding="utf-8")
    except OSError as failure:
        raise UserError(
            f"{path} cannot be read: {failure.strerror}", mend="check the file's name and its rights"
        ) from failure
    except UnicodeDecodeError as failure:
        raise UserError(f"{path} is not UTF-8 text", mend="save it as UTF-8") from failure


def with_full_paths(spec: TrainJob, base: Path) -> TrainJob:
    """Return the job with relative paths and ``~`` resolved from ``base``."""

    def full(path: Path | None) -> Path | None:
        return None if path is None else (base / path.expanduser()).resolve()

    files = spec.data.files and tuple((base / file.expanduser()).resolve() for file in spec.data.files)
    return spec.model_copy(
        update={
            "model": spec.model.model_copy(update={"path": full(spec.model.path)}),
            "tokenizer": spec.tokenizer.model_copy(update={"path": full(spec.tokenizer.path)}),
            "data": spec.data.model_copy(update={"files": files}),
        }
    )
