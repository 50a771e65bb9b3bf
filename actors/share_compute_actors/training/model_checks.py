"""Checks of a job's model against its data, before members load any of it."""

from __future__ import annotations

from collections.abc import Sequence

from share_compute.data import PreparedData
from share_compute.models.blueprint import Blueprint
from share_compute.models.image_types import require_images
from share_compute.specification import TrainJob
from share_compute.training.metric_checks import require_metrics


def check_model(spec: TrainJob, blueprint: Blueprint, prepared: Sequence[PreparedData]) -> tuple[str, ...]:
    """Check that a model fits its data, its metrics and the job's settings; return notes for the job's log.

    Args:
        spec: the job.
        blueprint: its model.
        prepared: data of each task.

    Raises:
        UserError: a check failed.
    """
    for single, objective, own in zip(spec.single_tasks, blueprint.objectives, prepared, strict=True):
        require_metrics(single, objective, own.samples)
    if spec.parallelism.needs_a_check:
        from share_compute.sharding.layer_plans import require_parallelism  # noqa: PLC0415 - imports torch

        require_parallelism(blueprint, spec)
    if blueprint.config is None:
        from share_compute.models.layers import note_on_tiles, require_fit  # noqa: PLC0415 - imports torch

        require_fit(blueprint)
        tiles = note_on_tiles(blueprint)
        return () if tiles is None else (tiles,)
    if blueprint.classifies_images:
        from share_compute.models.huggingface.hub_configuration import hub_configuration  # noqa: PLC0415 - slow to import

        require_images(hub_configuration(blueprint.config).to_dict(), blueprint.sample_shape)
    elif any(each.reads_text for each in blueprint.objectives) and not blueprint.uses_encoder:
        from share_compute.models.huggingface.cut_check import require_causal  # noqa: PLC0415 - slow to import

        require_causal(blueprint.config)
    return ()
