"""Reads and writes job files.

Relative paths are resolved against the file's folder or, for standard input, the working folder. ``parallelism.plan``
names a plan file; its content replaces the name, so that the server need not read the file.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeAlias

from share_compute.errors import UserError
from share_compute.files.plain_yaml import MOST_BYTES, line_of, read_yaml, write_yaml
from share_compute.files.strict import suggestion
from share_compute.quantities import bytes_text
from share_compute.specification import (
    AnyJob,
    Named,
    TrainJob,
    parse_any_job,
    parse_job,
    parse_submission,
    upload_path,
    with_paths,
)
from share_compute.specification.paths import UPLOAD, AnyNamed
from share_compute.specification.placement.pinned_plan import read_plan
from share_compute.topology import Topology
from share_compute_api.schemas.bodies import UploadView

Submission: TypeAlias = AnyJob | dict[str, Any] | str
"""A job of any kind: its specification, a mapping, or YAML text."""


def job_body(job: Submission) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the arguments for the body of a request that submits a job, and its headers."""
    if isinstance(job, str):
        return {"content": job.encode()}, {"Content-Type": "application/yaml"}
    return {"json": job if isinstance(job, dict) else job.model_dump(mode="json")}, {}


def job_text(spec: TrainJob, uploads: Sequence[UploadView] = ()) -> str:
    """Return a job file in YAML, without fields that have their defaults.

    Args:
        spec: the job.
        uploads: uploads whose names replace paths inside them.
    """

    def named(path: Path, field: str) -> Path:
        del field
        for upload in uploads:
            if path.is_relative_to(upload.folder):
                inside = path.relative_to(upload.folder).as_posix()
                return Path(f"{UPLOAD}{upload.id}" + ("" if inside == "." else f"/{inside}"))
        return path

    named_spec = with_paths(spec, named)
    short = {"kind": "train", **named_spec.model_dump(mode="json", exclude_defaults=True)}
    try:
        is_whole = parse_job(short) == named_spec
    except UserError:
        is_whole = False  # the tag of an alternative is a default, too
    return write_yaml(short if is_whole else named_spec.model_dump(mode="json"))


def read_job(path: Path) -> TrainJob:
    """Read a training job from a file, or from standard input if the path is ``-``.

    Raises:
        UserError: the input cannot be read, or is not a training job.
    """
    text, base = _text_of(path)
    with in_file(path, text):
        return with_full_paths(parse_job(with_plan(text, base)), base)


def read_any_job(path: Path) -> AnyJob:
    """Read a job of any kind from a file, or from standard input if the path is ``-``.

    Raises:
        UserError: the input cannot be read, or is not a job.
    """
    text, base = _text_of(path)
    with in_file(path, text):
        return with_full_paths(parse_any_job(with_plan(text, base)), base)


def read_submission(path: Path) -> Named:
    """Read a job or deployment, as its ``kind`` says, from a file or, if the path is ``-``, from standard input.

    Raises:
        UserError: the input cannot be read, or is neither a job nor a deployment.
    """
    text, base = _text_of(path)
    with in_file(path, text):
        return with_full_paths(parse_submission(with_plan(text, base)), base)


def read_topology_file(path: Path) -> Topology:
    """Read a topology file, YAML or JSON.

    Raises:
        UserError: the file cannot be read, or is not a topology file.
    """
    from share_compute.files.topology_file import read_topology

    text = read_text(path)
    with in_file(path, text):
        return read_topology(text)


@contextmanager
def in_file(path: Path, text: str | None = None, *, only_fields: bool = False) -> Iterator[None]:
    """Add a file's name, and the lines of invalid fields, to errors about its content.

    Args:
        path: the file; errors about standard input (``-``) stay as they are.
        text: its content; None to read an ordinary file again, and to name no lines of a pipe.
        only_fields: whether errors that name no fields stay as they are, too, because they are not about the content.
    """
    try:
        yield
    except UserError as failure:
        fields = failure.details.get("fields")
        if str(path) == "-" or "file" in failure.details or (only_fields and not fields):
            raise
        details = {**failure.details, "file": str(path)}
        if text is None:
            text = read_text(path) if path.is_file() else ""
        # JSON need not be YAML: it may be indented with tabs.
        if fields and text and not text.lstrip().startswith("{"):
            details["fields"] = [{**each, "line": line_of(text, each["field"])} for each in fields]
        raise type(failure)(f"{path}: {failure.message}", hint=failure.hint, details=details) from failure


def _text_of(path: Path) -> tuple[str, Path]:
    """Return the text of a file, or of standard input if the path is ``-``, and the folder of its relative paths."""
    return (sys.stdin.read(), Path.cwd()) if str(path) == "-" else (read_text(path), path.parent)


def with_plan(text: str, base: Path) -> str | dict[str, Any]:
    """Return a job file's data with the content of its plan file; the unchanged text if the job names no plan file.

    Args:
        text: a job file, YAML or JSON. The job of a sweep may name a plan file, too.
        base: folder of relative paths.

    Raises:
        UserError: the plan file cannot be read, is too long, or is not a valid plan file.
    """
    data = read_yaml(text, "job file")
    keys = ("job", "parallelism") if isinstance(data, dict) and "job" in data else ("parallelism",)
    part = data
    for key in keys:
        part = part.get(key) if isinstance(part, dict) else None
    if not isinstance(part, dict) or not isinstance(part.get("plan"), str):
        return text
    file = base / os.path.expanduser(part["plan"])  # noqa: PTH111 - Path.expanduser fails for unknown users
    try:
        plan_text = read_text(file, MOST_BYTES)
        with in_file(file, plan_text):
            part["plan"] = read_plan(plan_text)
    except ValueError as failure:  # a null character in the name
        raise UserError(f"parallelism.plan: {failure}", hint="name the plan file") from failure
    except UserError as failure:
        raise UserError(
            f"parallelism.plan: {failure.message}", hint=failure.hint, details=failure.details
        ) from failure
    assert isinstance(data, dict)
    return data


def read_text(path: Path, most_bytes: int | None = None) -> str:
    """Return the text of a file.

    Args:
        path: the file.
        most_bytes: maximum length in bytes; None for no limit. The function reads no more than that.

    Raises:
        UserError: the file cannot be read, is longer, or is not UTF-8.
    """
    try:
        if most_bytes is None:
            return path.read_text(encoding="utf-8")
        with path.open("rb") as opened:
            content = opened.read(most_bytes + 1)
        if len(content) > most_bytes:
            raise UserError(
                f"{path} is longer than {bytes_text(most_bytes)}, and such a file is not read",
                hint="name the right file",
            )
        return content.decode("utf-8")
    except FileNotFoundError as failure:
        names: list[str] = []
        with suppress(OSError):
            # Suffixes would make all job files similar.
            names = [one.name for one in path.parent.iterdir() if suggestion(path.stem, [one.stem])]
        raise UserError(
            f"{path} does not exist{suggestion(path.name, names)}", hint="check the name of the file"
        ) from failure
    except IsADirectoryError as failure:
        raise UserError(f"{path} is a folder, not a file", hint="name a file in it") from failure
    except OSError as failure:
        raise UserError(
            f"{path} cannot be read: {failure.strerror}", hint="check the file's name and its rights"
        ) from failure
    except UnicodeDecodeError as failure:
        raise UserError(
            f"{path} is not UTF-8 text", hint="name a text file, and save it as UTF-8"
        ) from failure


def write_text(path: Path, text: str) -> None:
    """Write the text of a file.

    Raises:
        UserError: the file cannot be written.
    """
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as failure:
        raise UserError(
            f"{path} cannot be written: {failure.strerror}",
            hint="name a file in a folder that you may write to",
        ) from failure


def with_full_paths(spec: AnyNamed, base: Path) -> AnyNamed:
    """Return a job or deployment whose paths are absolute, resolved against ``base``; keep ``upload:`` paths."""

    def full(path: Path, field: str) -> Path:
        del field
        return path if upload_path(path) is not None else (base / path.expanduser()).resolve()

    return with_paths(spec, full)
