"""Opens the files of results and checkpoints, and finds where their weights are."""

from __future__ import annotations

from collections.abc import Iterator
from io import BufferedReader
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, Field, StringConstraints

from share_compute.errors import NotFound, UserError
from share_compute.files.plain_files import open_unlinked
from share_compute.lifecycle.folders import BATCHES, REPORTS, TRAINING
from share_compute.planning.plan import Plan, StagePlan
from share_compute.settings import Settings
from share_compute.store import JobRecord
from share_compute_api.schemas.layout import MOST_LISTED, StageEntry, WeightLayout
from share_compute_api.server.context import Context
from share_compute_api.workers.isolated.messages import ReadLayout
from share_compute_api.workers.isolated.weight_index import MOST_WEIGHT_FILES, WeightHeaders


class LayoutQuery(BaseModel):
    """Choice of the weights that an answer lists."""

    pattern: Annotated[str, StringConstraints(max_length=200)] | None = Field(
        None,
        description="Glob of names, for example `*.q_proj.weight`; without it, only layers are returned.",
    )
    limit: int = Field(1000, ge=1, le=MOST_LISTED, description="Maximum number of weights to list.")


def weight_layout(context: Context, job: JobRecord, folder: Path, wanted: LayoutQuery) -> WeightLayout:
    """Return where each weight in the folder of a job's result or checkpoint is.

    Raises:
        NotFound: the folder has no weights.
        UserError: a file is damaged, or there are too many weights.
    """
    headers = dict(_headers(context.settings, job.id, folder))
    if not headers:
        raise NotFound(
            f"{folder.name} of job {job.id} has no weights",
            hint="name the result with the model, as share-compute artifacts list shows it",
            job=job.id,
        )
    plan = job.plan
    found = context.isolated.ask(
        ReadLayout(
            headers=headers,
            places=None if plan is None else plan.places,
            pattern=wanted.pattern,
            most=wanted.limit,
            job=job.id,
        )
    )
    return WeightLayout(
        layers=found.layers,
        weights=found.weights,
        matched=found.matched,
        num_layers=None if plan is None else plan.num_layers,
        stages=() if plan is None else tuple(_stages(plan)),
    )


def _stages(plan: Plan) -> Iterator[StageEntry]:
    """Yield the stages of a plan, or those of all its branches."""
    if not plan.branches:
        yield from _entries(plan.stages, None)
    for branch in plan.branches:
        yield from _entries(branch.stages, branch.number)


def _entries(stages: tuple[StagePlan, ...], branch: int | None) -> Iterator[StageEntry]:
    for number, stage in enumerate(stages):
        machines = {member.contributor_id: member.name for member in stage.members}
        yield StageEntry(stage=number, branch=branch, start=stage.start, stop=stage.stop, machines=machines)


def _headers(settings: Settings, job_id: str, folder: Path) -> Iterator[tuple[str, str]]:
    """Yield (name, header) of each file of weights in a folder."""
    names = sorted(
        file.name
        for file in (folder.iterdir() if folder.is_dir() else ())
        if file.name.startswith(("model", "adapter_model")) and file.suffix == ".safetensors"
    )
    if len(names) > MOST_WEIGHT_FILES:
        raise UserError(
            f"there are {len(names)} files of weights", hint="download the result, and read it there"
        )
    headers = WeightHeaders("download the result, and read it there")
    for name in names:
        opened = open_result(settings, job_id, folder, name)
        if opened is None:
            continue
        with opened:
            yield name, headers.read(opened).decode(errors="replace")


def root_of(artifact: Path) -> Path:
    """Return the folder of an artifact's files: the artifact, or the folder of an artifact that is one file."""
    return artifact if artifact.is_dir() else artifact.parent


def open_result(settings: Settings, job_id: str, artifact: Path, path: str) -> BufferedReader | None:
    """Open an artifact's file; return None if it is missing, is outside the job's folder, or has a link in its path.

    Untrusted code on the Ray head can write the files and report the artifact's path.
    """
    if "\0" in path or ".." in Path(path).parts or Path(path).is_absolute():
        return None
    file = root_of(artifact) / path
    if not artifact.is_dir() and file != artifact:
        return None
    try:
        inside = file.relative_to(settings.data_folder)
        kind, owner, *_ = inside.parts
        if kind not in (TRAINING, BATCHES, REPORTS) or owner != job_id:
            return None
        return open_unlinked(settings.data_folder.resolve() / inside)
    except (ValueError, OSError):
        return None
