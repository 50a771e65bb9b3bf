"""Specification of a sweep: a search over fields of a training job, with a budget and early stopping."""

from __future__ import annotations

import json
import math
import re
from typing import Annotated, Any, Literal, Self, TypeAlias

from pydantic import Field, field_validator, model_validator

from share_compute.specification.base import Group, SpecModel, Tags, exactly_one, known_tag, plain_json
from share_compute.specification.job import TrainJob
from share_compute.specification.task import METRICS, RISING, Metric

MOST_TRIALS = 256
"""Maximum number of trials of a sweep."""
_LABELS = ("kind", "name", "tags", "group", "then")
"""Fields of a job that a sweep cannot change."""
_DATA_FILES = ("data.files", "data.validation_files", "data.test_files")
FILES = ("model.path", "model.hub", "model.revision", "tokenizer.path", *_DATA_FILES)
"""Fields that determine the files of a job. They are resolved and checked once, for the job of the sweep."""
_OF_A_TASK = re.compile(r"^tasks\.\w+\.")
_MOST_VALUE_BYTES = 4096
"""Maximum size of a value as JSON. Values are stored with each trial, and in events."""
Whole: TypeAlias = Annotated[int, Field(ge=-(2**63), le=2**63 - 1)]


class GridSearchSpec(SpecModel):
    """Search that tries all combinations of the values."""

    kind: Literal["grid"] = "grid"
    """Kind of the search."""


class RandomSearchSpec(SpecModel):
    """Search that draws the values of each trial at random."""

    kind: Literal["random"] = "random"
    """Kind of the search."""
    trials: int = Field(ge=1, le=MOST_TRIALS)
    """Number of trials."""
    seed: int = Field(default=0, ge=0, le=2**63 - 1, title="Seed of the search")
    """Seed of the search; the values of a trial depend on this seed and the trial's number only."""


SearchSpec: TypeAlias = Annotated[
    Annotated[GridSearchSpec | RandomSearchSpec, Field(discriminator="kind")],
    known_tag("kind", ("grid", "random"), "search"),
]


class DrawnFieldSpec(SpecModel):
    """Values of one field of the job; give exactly one of the four."""

    model_config = exactly_one("values", "uniform", "log_uniform", "integers")

    values: tuple[Any, ...] | None = Field(default=None, min_length=1, max_length=MOST_TRIALS, fail_fast=True)
    """List of values."""
    uniform: tuple[float, float] | None = None
    """Lowest and highest number, drawn uniformly."""
    log_uniform: tuple[float, float] | None = None
    """Lowest and highest number, whose logarithm is drawn uniformly."""
    integers: tuple[Whole, Whole] | None = None
    """Lowest and highest whole number, both included."""

    @field_validator("values")
    @classmethod
    def _values_are_plain(cls, value: tuple[Any, ...] | None) -> tuple[Any, ...] | None:
        for one in value or ():
            size = len(json.dumps(plain_json(one), ensure_ascii=False).encode())
            if size > _MOST_VALUE_BYTES:
                raise ValueError(
                    f"a value has {size:,} bytes as JSON, and at most {_MOST_VALUE_BYTES:,} are possible"
                )
        return value

    @model_validator(mode="after")
    def _one_range(self) -> Self:
        ranges = (self.uniform, self.log_uniform, self.integers)
        given = [one for one in (self.values, *ranges) if one is not None]
        if len(given) != 1:
            raise ValueError("give exactly one of values, uniform, log_uniform and integers")
        for low, high in (one for one in ranges if one is not None):
            if low >= high:
                raise ValueError(f"the lowest number {low:g} must be below the highest, {high:g}")
        if self.log_uniform is not None and self.log_uniform[0] <= 0:
            raise ValueError("log_uniform needs numbers above 0")
        return self

    @property
    def count(self) -> int | None:
        """Number of values; None for real numbers."""
        if self.integers is not None:
            return self.integers[1] - self.integers[0] + 1
        return None if self.values is None else len(self.values)


class SuccessiveHalvingSpec(SpecModel):
    """Early stopping of trials that are worse than others at the same step (ASHA)."""

    kind: Literal["successive_halving"] = "successive_halving"
    """Kind of the early stopping."""
    first: int = Field(ge=1, title="Steps to the first comparison")
    """Step of the first comparison; later ones are at ``factor`` times the step of the one before."""
    factor: int = Field(default=3, ge=2, le=100)
    """At each comparison, one trial in ``factor`` continues."""

    def rungs(self, steps: int) -> tuple[int, ...]:
        """Return, in ascending order, the steps at which jobs with this number of steps are compared."""
        found, step = [], self.first
        while step < steps:
            found.append(step)
            step *= self.factor
        return tuple(found)


class SweepJob(SpecModel):
    """Search for the best values of some fields of a training job, by running the job with different values."""

    kind: Literal["sweep"] = "sweep"
    """Kind of the job."""
    name: str = Field(default="sweep", min_length=1, max_length=70, pattern=r"^[\w][\w .-]*$")
    """Display name of the sweep; trials have it with their number."""
    tags: Tags = ()
    """Tags by which the job is found."""
    group: Group | None = None
    """Group of jobs that belong together."""
    job: TrainJob
    """Training job that the trials run."""
    fields: dict[str, DrawnFieldSpec] = Field(min_length=1, max_length=20, title="Searched fields")
    """Fields of the job that differ between trials, by their names with dots, with their values."""
    search: SearchSpec = GridSearchSpec()
    """Choice of the trials: all combinations, or random ones."""
    metric: Metric = "validation_loss"
    """Metric by which trials are compared."""
    goal: Literal["min", "max"] | None = None
    """Whether lower or higher values are better; default: it follows from the metric."""
    early_stopping: SuccessiveHalvingSpec | None = Field(default=None, title="Stop bad trials early")
    """End trials that are worse than others at the same step; null runs all to their end."""
    jobs_at_once: int = Field(default=1, ge=1, le=64)
    """Most trials that run or wait for machines at one time."""
    time_limit_s: float | None = Field(default=None, gt=0)
    """Longest time of the sweep, in seconds; then running trials are stopped, and no more start."""

    @property
    def is_rising(self) -> bool:
        """Whether higher values of the metric are better."""
        return self.metric in RISING if self.goal is None else self.goal == "max"

    @property
    def trials(self) -> int:
        """Number of trials."""
        if isinstance(self.search, RandomSearchSpec):
            return self.search.trials
        return math.prod(field.count or 1 for field in self.fields.values())

    @field_validator("fields")
    @classmethod
    def _fields_are_apart(cls, fields: dict[str, DrawnFieldSpec]) -> dict[str, DrawnFieldSpec]:
        for field, drawn in fields.items():
            parts = field.split(".")
            if not all(parts):
                raise ValueError(f"{field!r} is no name of a field; write training.steps, for example")
            if parts[0] in _LABELS:
                raise ValueError(
                    f"{field} cannot be searched: {', '.join(_LABELS)} are the same in all trials"
                )
            for one in drawn.values or (None,):
                _require_same_files(field, one)
            for length in range(1, len(parts)):
                outer = ".".join(parts[:length])
                if outer in fields:
                    raise ValueError(f"{field} is a part of {outer}; give one of them")
        return fields

    @model_validator(mode="after")
    def _trials_can_be_listed(self) -> Self:
        if isinstance(self.search, RandomSearchSpec):
            return self
        for name, field in self.fields.items():
            if field.count is None:
                raise ValueError(
                    f"search.kind grid needs lists: fields.{name} is a range of real numbers; give values, or "
                    "search {kind: random, trials: 8}"
                )
        if self.trials > MOST_TRIALS:
            counts = " x ".join(str(field.count) for field in self.fields.values())
            raise ValueError(
                f"the grid has {self.trials:,} points ({counts}), and a sweep has at most {MOST_TRIALS} trials; give "
                "fewer values, or search {kind: random, trials: 32}"
            )
        return self

    @model_validator(mode="after")
    def _job_fits(self) -> Self:
        self.require_comparable(self.job)
        if self.job.then.links:
            raise ValueError(
                "job.then starts from one result, and a sweep has several; serve the best one afterwards"
            )
        halving, steps = self.early_stopping, self.job.training.steps
        if halving is not None and not halving.rungs(steps):
            raise ValueError(
                f"early_stopping.first {halving.first} must be below the {steps} steps of the job"
            )
        return self

    def require_comparable(self, job: TrainJob) -> None:
        """Raise ValueError unless the validations of a job give the metric by which trials are compared."""
        task = job.resolved_task
        if job.tasks and self.metric != "validation_loss":
            raise ValueError(
                f"metric {self.metric} is a metric of one task of job.tasks: use validation_loss"
            )
        if self.metric not in METRICS[task]:
            raise ValueError(f"metric {self.metric} is no metric of {task}: {', '.join(METRICS[task])}")
        if not job.data.validates:
            raise ValueError("metric needs samples to validate on: raise job.data.validation_fraction")
        if self.early_stopping is None:
            return
        first, every = self.early_stopping.first, job.training.validate_every
        if every is None:
            raise ValueError(
                "early_stopping needs job.training.validate_every, the steps between validations"
            )
        if first % every:
            raise ValueError(
                f"early_stopping.first {first} is not a multiple of job.training.validate_every {every}: trials are "
                "compared after a validation"
            )


def _require_same_files(field: str, value: Any) -> None:
    """Raise ValueError if a value of a searched field would change the files of the job, at any depth."""
    named = [(field, value)]
    while named:
        name, inner = named.pop()
        plain = _OF_A_TASK.sub("", name, count=1)
        if any(plain == one or plain.startswith(f"{one}.") for one in (*FILES, "parallelism.plan")):
            raise ValueError(
                f"{name} cannot be searched: all trials have the same files; submit a sweep for each model or set of "
                "files, with one group"
            )
        if isinstance(inner, dict):
            named += [(f"{name}.{key}", part) for key, part in inner.items()]
        elif isinstance(inner, list | tuple):
            named += [(f"{name}.{place}", part) for place, part in enumerate(inner)]
