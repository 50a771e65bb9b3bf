"""Job files as people write them: paths in them are relative to the file."""

from __future__ import annotations

from pathlib import Path

from share_compute.errors import UserError
from share_compute.specification import TrainJob, parse_job


def read_job_file(path: Path) -> TrainJob:
    """Read a YAML or JSON job file; relative paths in it become full ones, from the file's folder.

    Raises:
        UserError: the file cannot be read, or is not a job.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as failure:
        raise UserError(
            f"{path} cannot be read: {failure.strerror}", mend="check the file's name and its rights"
        ) from failure
    except UnicodeDecodeError as failure:
        raise UserError(f"{path} is not UTF-8 text", mend="save it as UTF-8") from failure
    return with_full_paths(parse_job(text), path.parent)


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
