"""Links of a training job: a deployment and a batch that start from its result."""

from __future__ import annotations

from typing import Literal, Self, TypeAlias

from pydantic import Field, model_validator

from share_compute.specification.base import SpecModel
from share_compute.specification.batch import (
    BatchOptions,
    BatchSamplingSpec,
    GenerateDataSpec,
    GenerateJob,
)
from share_compute.specification.placement.selection import SelectionSpec
from share_compute.specification.serve import DeploymentName, ServedModelSpec, ServeJob, ServingOptions

LinkName: TypeAlias = Literal["serve", "generate"]


class ServeLinkSpec(ServingOptions, DeploymentName):
    """Deployment of the result, with the fields of a deployment except its model."""

    def deployment(self, job_id: str) -> ServeJob:
        """Return the deployment of this job's result."""
        given = self.model_dump(exclude_unset=True)
        return ServeJob.model_validate({**given, "model": ServedModelSpec(job=job_id)})


class GenerateLinkSpec(BatchOptions):
    """Batch whose rows the result answers, with the fields of a batch except its model."""

    name: str = Field(default="generate", min_length=1, max_length=80, pattern=r"^[\w][\w .-]*$")
    """Display name of the batch."""
    data: GenerateDataSpec
    """Files whose rows are answered."""
    sampling: BatchSamplingSpec = BatchSamplingSpec()
    """Sampling options and end conditions of answers."""
    parallelism: SelectionSpec = SelectionSpec()
    """Machines that may hold the result for the batch; not with ``serve``, whose deployment has machines of its own."""

    def batch(self, job_id: str, deployment: str | None) -> GenerateJob:
        """Return the batch that this job's result answers.

        Args:
            job_id: id of the training job.
            deployment: name of the deployment that answers; None for a deployment of the batch's own.
        """
        given = self.model_dump(exclude_unset=True)
        answerer = (
            {"model": ServedModelSpec(job=job_id)} if deployment is None else {"deployment": deployment}
        )
        return GenerateJob.model_validate({**given, **answerer})


class ThenSpec(SpecModel):
    """Links that start from the result of a training job when it has succeeded."""

    serve: ServeLinkSpec | None = Field(default=None, title="Serve the result")
    """Serve the result when the job has succeeded."""
    generate: GenerateLinkSpec | None = Field(default=None, title="Answer rows with the result")
    """Answer rows with the result when the job has succeeded; by the deployment of ``serve``, if it is given."""

    @model_validator(mode="after")
    def _deployment_has_its_machines(self) -> Self:
        if (
            self.serve is not None
            and self.generate is not None
            and self.generate.parallelism != SelectionSpec()
        ):
            raise ValueError(
                "generate.parallelism: the deployment of serve answers the rows: give serve.parallelism in its place"
            )
        return self

    @property
    def links(self) -> tuple[LinkName, ...]:
        """Names of the given links, in the order in which they start."""
        given: tuple[tuple[LinkName, SpecModel | None], ...] = (
            ("serve", self.serve),
            ("generate", self.generate),
        )
        return tuple(name for name, link in given if link is not None)
