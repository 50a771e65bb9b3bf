"""Specification of jobs that train a sparse model: one row of weights for each feature, user, item or word."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self, TypeAlias

from pydantic import Field, field_validator, model_validator

from share_compute.specification.base import Group, SpecModel, Tags, TextPath
from share_compute.specification.placement.selection import SelectionSpec
from share_compute.specification.sparse.models import (
    SPARSE_METRICS,
    LdaSpec,
    MatrixFactorizationSpec,
    RidgeSpec,
    SparseModelSpec,
    SparseTargetSpec,
    SvmSpec,
)

Format: TypeAlias = Literal["libsvm", "ratings", "bags"]
Files: TypeAlias = Annotated[tuple[TextPath, ...], Field(fail_fast=True)]
SPARSE_SUFFIXES = (".libsvm", ".svm", ".svmlight")
"""Suffixes of files that only sparse models read. Bags of words are .txt, and ratings are tables."""
_RATING_SUFFIXES = (".csv", ".parquet")
_MOST_WORKERS = 1024
_MOST_SERVERS = 256


class SparseDataSpec(SpecModel):
    """Files with rows that have few entries."""

    format: Format = "libsvm"
    """Format of the files: libsvm, ratings (tables, .csv or .parquet), or bags (bags of words as at UCI)."""
    files: Files = Field(min_length=1)
    """Files on the server, or of an upload, with the rows to train on."""
    validation_files: Files = Field(default=(), title="Validation files")
    """Files of the same format, on which the model is measured after each pass."""
    columns: tuple[str, str, str] = Field(default=("user", "item", "rating"), title="Columns of ratings")
    """Columns of user, item and rating, for the format ratings."""

    @model_validator(mode="after")
    def _ratings_are_tables(self) -> Self:
        if self.format != "ratings":
            if "columns" in self.model_fields_set and self.columns != ("user", "item", "rating"):
                raise ValueError("columns are for the format ratings only: leave them out")
            return self
        if len(set(self.columns)) < len(self.columns):
            raise ValueError("columns names one column twice: give those of user, item and rating")
        for file in (*self.files, *self.validation_files):
            if file.suffix not in _RATING_SUFFIXES:
                raise ValueError(f"cannot read ratings of {file.name}; known: {', '.join(_RATING_SUFFIXES)}")
        return self


class SparseTrainingSpec(SpecModel):
    """Passes over the data, and how workers and servers share the work."""

    passes: int = Field(default=1, ge=1, le=10_000)
    """Passes over the data; for ridge and svm, rounds of CoCoA."""
    batch_size: int = Field(default=1024, ge=1, le=2**24)
    """Rows in one minibatch of one worker."""
    learning_rate: float = Field(default=0.1, gt=0, le=100)
    """Learning rate of FTRL-Proximal and AdaGrad; other models have none."""
    workers: int = Field(default=2, ge=1, le=_MOST_WORKERS)
    """Parts of the data that are worked on at the same time. It is independent of the number of machines."""
    servers: int = Field(default=1, ge=1, le=_MOST_SERVERS)
    """Ranges of weights. Each is held by one machine, with a backup on another one."""
    staleness: Annotated[int, Field(ge=0, le=2**31 - 1)] | Literal["unbounded"] = 0
    """Minibatches that a worker may be ahead of the slowest one; 0 is synchronous, unbounded is asynchronous."""
    threshold: float = Field(default=0.0, ge=0, le=1e30)
    """Send a row's changes later if they are below this multiple of the message's root mean square; 0 sends all."""
    values: Literal["float32", "int8"] = Field(default="float32", title="Type of sent values")
    """Type of the values in messages; with int8, what is rounded away is added to the next change."""
    hogwild_threads: int | None = Field(default=None, ge=1, le=256, title="Hogwild threads")
    """Train on one machine with this many threads that share all rows without locks; null: with servers."""
    target: SparseTargetSpec | None = Field(default=None, title="Goal")
    """End the job as soon as a validation reaches this value of a metric."""
    reproducible: bool = False
    """Refuse options with which a repeated run would have other bits."""
    seed: int = Field(default=0, ge=0, le=2**63 - 1)
    """Seed of the first weights and of the order of rows."""

    @field_validator("staleness", mode="before")
    @classmethod
    def _staleness_is_known(cls, value: Any) -> Any:
        is_count = isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**31
        if value != "unbounded" and not is_count:
            raise ValueError("give a whole number from 0, or unbounded")
        return value

    @model_validator(mode="after")
    def _hogwild_has_no_servers(self) -> Self:
        if self.hogwild_threads is None:
            return self
        for name in ("workers", "servers", "staleness", "threshold", "values"):
            if getattr(self, name) != type(self).model_fields[name].default:
                raise ValueError(
                    f"hogwild_threads trains on one machine without servers: leave out {name}, or hogwild_threads"
                )
        return self

    @model_validator(mode="after")
    def _bits_are_kept(self) -> Self:
        if not self.reproducible:
            return self
        if self.hogwild_threads is not None:
            raise ValueError(
                "reproducible cannot be promised with hogwild_threads: threads overwrite each other at any moment"
            )
        if self.staleness != 0:
            raise ValueError(
                f"reproducible cannot be promised with staleness {self.staleness}: "
                "the order of updates depends on the speed of machines; give staleness 0"
            )
        return self

    @model_validator(mode="after")
    def _nothing_is_held_back(self) -> Self:
        if self.reproducible:
            for name in ("threshold", "values"):
                if getattr(self, name) != type(self).model_fields[name].default:
                    raise ValueError(
                        f"reproducible cannot be promised with {name} {getattr(self, name)}: "
                        f"a checkpoint lacks what workers hold back; leave out {name}"
                    )
        return self

    @property
    def bound(self) -> int | None:
        """Minibatches that a worker may be ahead of the slowest one; None for no bound."""
        return None if self.staleness == "unbounded" else self.staleness


class SparseJob(SpecModel):
    """Train a sparse model, with workers that hold rows of data, and servers that hold rows of weights."""

    kind: Literal["sparse"] = "sparse"
    """Kind of the job."""
    name: str = Field(default="sparse", min_length=1, max_length=80, pattern=r"^[\w][\w .-]*$")
    """Display name of the job."""
    tags: Tags = ()
    """Tags by which the job is found."""
    group: Group | None = None
    """Group of jobs that belong together."""
    model: SparseModelSpec
    """Sparse model to train."""
    data: SparseDataSpec
    """Files with rows that have few entries."""
    training: SparseTrainingSpec = SparseTrainingSpec()
    """Passes over the data, and how workers and servers share the work."""
    parallelism: SelectionSpec = SelectionSpec()
    """Machines that the job may use."""

    @property
    def is_dual(self) -> bool:
        """Whether the model is trained by CoCoA, which has dual variables at workers, and no servers."""
        return isinstance(self.model, RidgeSpec | SvmSpec)

    @property
    def machines_used(self) -> int:
        """Most machines that the job can use: one for each worker, and two for each range, which may be the same."""
        training = self.training
        if training.hogwild_threads is not None:
            return 1
        return training.workers if self.is_dual else max(training.workers, training.servers + 1)

    @model_validator(mode="after")
    def _format_fits_model(self) -> Self:
        wanted: Format = (
            "ratings"
            if isinstance(self.model, MatrixFactorizationSpec)
            else "bags"
            if isinstance(self.model, LdaSpec)
            else "libsvm"
        )
        if self.data.format != wanted:
            raise ValueError(
                f"model {self.model.name} reads the format {wanted}, not {self.data.format}: "
                f"give data.format {wanted}"
            )
        return self

    @model_validator(mode="after")
    def _target_can_be_reached(self) -> Self:
        target, known = self.training.target, SPARSE_METRICS[self.model.name]
        if target is None:
            return self
        if target.metric not in known:
            raise ValueError(
                f"training.target.metric: {self.model.name} has no {target.metric}: choose {', '.join(known)}"
            )
        if target.metric != "duality_gap" and not self.data.validation_files:
            raise ValueError(
                f"training.target.metric: {target.metric} is measured on data.validation_files: name some"
            )
        return self

    @model_validator(mode="after")
    def _training_fits_model(self) -> Self:
        training, name = self.training, self.model.name
        if training.hogwild_threads is not None and (self.is_dual or isinstance(self.model, LdaSpec)):
            needs = "keeps dual variables" if self.is_dual else "needs the sum of all rows"
            raise ValueError(
                f"training.hogwild_threads: {name} {needs}, which threads cannot share without locks"
            )
        if self.is_dual:
            for field in ("staleness", "servers", "threshold", "values", "batch_size", "learning_rate"):
                if getattr(training, field) != SparseTrainingSpec.model_fields[field].default:
                    raise ValueError(
                        f"training.{field}: {name} is trained by CoCoA, whose rounds are synchronous, "
                        "without servers, minibatches and filters; leave it out, or choose logistic"
                    )
        return self
