"""Checks in isolated processes with torch whether a model's layers support ``parallelism``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from share_compute.errors import UserError
from share_compute.files.field_errors import refused
from share_compute.specification import TrainJob
from share_compute_api.workers.isolated.messages import CheckParallelism, CheckRanks
from share_compute_api.workers.isolated.remembered import Asks

_LIMITS = ("too_much_time", "too_much_memory")


def check_divided(ranks: int, config: Mapping[str, Any], processes: Asks) -> None:
    """Check that the ranks of a member can divide a language model that is to be served.

    Args:
        ranks: number of ranks; 1 needs no check.
        config: contents of the model's config.json.
        processes: isolated processes, which build the model without its weights.

    Raises:
        UserError: the ranks cannot divide the model; the error names the field.
    """
    if ranks > 1:
        with _naming_field():
            processes.ask(CheckRanks(config=dict(config), ranks=ranks))


def check_parallelism(spec: TrainJob, config: Mapping[str, Any], processes: Asks) -> None:
    """Check that the model of a training job supports the ranks or slices that the job requests.

    Declared layers are not checked, because members plan each of them separately.

    Args:
        spec: the job.
        config: configuration of the model.
        processes: isolated processes, which build the model without its weights.

    Raises:
        UserError: the model does not support them; the error names the field.
    """
    if spec.parallelism.needs_a_check and spec.model.layers is None:
        # Fields that do not change the layers are removed, so that a form need not repeat the check when they are
        # edited.
        job = spec.model_copy(update={"name": "train", "tags": (), "group": None, "report": ()})
        with _naming_field():
            processes.ask(CheckParallelism(job=job, config=dict(config)))


@contextmanager
def _naming_field() -> Iterator[None]:
    """Name the field of an error. Ignore errors about exceeded limits, since members check their layers, too."""
    try:
        yield
    except UserError as failure:
        if failure.details.get("code") in _LIMITS:
            return
        field, _, problem = failure.message.partition(": ")
        if field.startswith("parallelism."):
            raise refused(field, problem, failure.hint or "") from failure
        raise refused("parallelism", failure.message, failure.hint or "") from failure
