"""Bodies of the routes that label and compare jobs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, TypeAlias, cast

from pydantic import AfterValidator, Field

from share_compute.files.plain_text import plain
from share_compute.files.strict import StrictModel
from share_compute.lifecycle.states import JobState
from share_compute.specification.base import MOST_TAGS, Group, Tag, Tags
from share_compute_api.schemas.bodies import ResponseBody, example
from share_compute_api.schemas.frames import flat, frame_of

if TYPE_CHECKING:
    from share_compute.store.jobs import JobLabels  # SQLAlchemy is slow to import, and clients do not need it

MOST_COMPARED = 20
"""Maximum number of jobs in one comparison."""


def _checked(text: str) -> str:
    if plain(text, but="\n") != text:
        raise ValueError("must have no control characters except line breaks")
    return text


Note: TypeAlias = Annotated[str, Field(max_length=2000), AfterValidator(_checked)]


class JobQuery(StrictModel):
    """Parameters of a list of jobs."""

    state: list[JobState] | None = Field(default=None, description="May be given several times.")
    kind: str | None = Field(default=None, max_length=40)
    name: str | None = Field(default=None, max_length=80, description="Part of the name; case is ignored.")
    tag: list[Tag] = Field(default=[], max_length=MOST_TAGS, description="Jobs that have all of these tags.")
    group: Group | None = Field(default=None, description="Jobs of this group.")
    trials: bool = Field(
        default=False, description="Trials of sweeps, too; with a group they are always listed."
    )
    limit: int = Field(default=50, ge=1, le=500)
    cursor: str | None = Field(default=None, max_length=200)


class LabelsRequest(StrictModel):
    """New labels of a job. Fields that are left out keep their values."""

    model_config = example(tags=["baseline", "lr:0.01"], group="learning rates", note="no warm-up")

    tags: Tags | None = None
    """All tags of the job from now on; null keeps them."""
    group: Group | None = None
    """Group of the job from now on; null takes the job out of its group."""
    note: Note | None = None
    """Text about the job from now on, of at most 2000 characters; null keeps it, an empty text removes it."""

    def changes(self) -> JobLabels:
        """Return the labels that are to be changed."""
        given = self.model_dump(exclude_unset=True)
        return cast(
            "JobLabels",
            {name: value for name, value in given.items() if name == "group" or value is not None},
        )


class ComparedJob(ResponseBody):
    """A job in a comparison, with its results."""

    id: str
    name: str
    state: JobState
    tags: tuple[str, ...]
    group: str | None
    step: int
    total_steps: int
    seconds: float | None
    """Time from the first start to the end, in seconds; null unless the job is over."""
    tokens_per_s: float | None
    """Mean speed over the last steps; over all steps, once an attempt ended the job."""
    results: dict[str, float]
    """Last metrics by name: ``loss`` of training, and those of the splits with the prefix ``validation_`` or ``test_``.
    """


class FieldDifference(ResponseBody):
    """A field that is not the same in all compared job files."""

    field: str
    """Name of the field, with dots."""
    values: list[Any]
    """Value in each job, in the order of the jobs; null also if the job has no such field."""


class JobComparison(ResponseBody):
    """Results of several jobs, and the differences of their job files."""

    jobs: list[ComparedJob]
    """The jobs, in the requested order."""
    differences: list[FieldDifference]
    """Fields that differ, in the order of the job file; names and labels are left out."""

    def to_pandas(self) -> Any:
        """Return a pandas table with a row for each job: its results, and the fields that differ.

        Raises:
            UserError: pandas is not installed.
        """
        return frame_of(
            {
                **flat(job),
                **job.results,
                **{difference.field: difference.values[place] for difference in self.differences},
            }
            for place, job in enumerate(self.jobs)
        )
