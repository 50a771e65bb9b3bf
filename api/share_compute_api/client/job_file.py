"""Reads job files. Relative paths are resolved against the file's folder or, for standard input, the working folder."""

from __future__ import annotations

import sys
from pathlib import Path

from share_compute.errors import UserError
from share_compute.specification import Named, TrainJob, parse_job, parse_submission, upload_path, with_paths
from share_compute.specification.paths import AnyNamed


def read_job(path: Path) -> TrainJob:
    """Read a training job from a file, or from standard input if the path is ``-``.

    Raises:
        UserError: the input cannot be read, or is not a training job.
    """
    return (
        with_full_paths(parse_job(sys.stdin.read()), Path.cwd()) if str(path) == "-" else read_job_file(path)
    )


def read_job_file(path: Path) -> TrainJob:
    """Read a training job from a YAML or JSON file, and resolve its relative paths against the file's folder.

    Raises:
        UserError: the file cannot be read, or is not a training job.
    """
    return with_full_paths(parse_job(read_text(path)), path.parent)


def read_submission(path: Path) -> Named:
    """Read a job or deployment, as its ``kind`` says, from a file or, if the path is ``-``, from standard input.

    Raises:
        UserError: the input cannot be read, or is neither a job nor a deployment.
    """
    is_piped = str(path) == "-"
    spec = parse_submission(sys.stdin.read() if is_piped else read_text(path))
    return with_full_paths(spec, Path.cwd() if is_piped else path.parent)


def read_text(path: Path) -> str:
    """Return the text of a file.

    Raises:
        UserError: the file cannot be read, or is not UTF-8.
    """
    try:
        return path.read_text(encoding="utf-8")
    except OSError as failure:
        raise UserError(
            f"{path} cannot be read: {failure.strerror}", hint="check the file's name and its rights"
        ) from failure
    except UnicodeDecodeError as failure:
        raise UserError(f"{path} is not UTF-8 text", hint="save it as UTF-8") from failure


def with_full_paths(spec: AnyNamed, base: Path) -> AnyNamed:
    """Return a job or deployment whose paths are absolute, resolved against ``base``; keep ``upload:`` paths."""

    def full(path: Path, field: str) -> Path:
        del field
        return path if upload_path(path) is not None else (base / path.expanduser()).resolve()

    return with_paths(spec, full)
