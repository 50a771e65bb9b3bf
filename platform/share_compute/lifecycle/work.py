"""Work that machines did, as periods and sums."""

from __future__ import annotations

from datetime import datetime

from pydantic import ConfigDict

from share_compute.files.described import DescribedModel


class _Work(DescribedModel):
    model_config = ConfigDict(frozen=True, from_attributes=True)


class WorkPeriodRecord(_Work):
    """A period in which a machine held the same part of one model for one job or deployment."""

    job_id: str | None
    deployment_id: str | None
    name: str
    """Name of the job or the deployment."""
    start: int | None
    """First layer of the machine's part; null while there was no plan."""
    stop: int | None
    """One past the last layer."""
    num_layers: int | None
    """Number of layers of the whole model."""
    microbatches: int | None
    """Number of microbatches that the machine computed in each batch."""
    of_microbatches: int | None
    """Total number of microbatches of each batch."""
    began_at: datetime
    ended_at: datetime | None
    """End of the period; null while it lasts."""
    seconds: float
    """Duration of the period, up to now while it lasts."""
    steps: int
    """Number of steps committed in the period; 0 for deployments."""
    samples: int
    """The machine's share of the samples of ``steps``, such as images, rows or sequences of text. 0 for deployments."""


class WorkSums(_Work):
    """Sums of the work that a machine did."""

    seconds: float
    """Time in which the machine held a part of a model."""
    steps: int
    microbatches: int
    """Number of microbatches that the machine computed in committed steps."""
    samples: int
    """The machine's share of the samples of ``steps``, such as images, rows or sequences of text."""


NO_WORK = WorkSums(seconds=0.0, steps=0, microbatches=0, samples=0)


class WorkRecord(WorkSums):
    """The work that a machine did."""

    periods: tuple[WorkPeriodRecord, ...]
    """The machine's periods of work, newest first."""
    is_complete: bool
    """Whether ``periods`` contains all recorded periods. The sums cover only ``periods``."""


class BusyRecord(_Work):
    """Utilization of a machine by a training job at one time."""

    at: datetime
    """Time of the measurement, which covers the steps before it."""
    busy_fraction: float
    """Fraction of a step in which the machine computed, from 0 to 1."""
    job_id: str
