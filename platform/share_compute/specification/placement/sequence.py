"""Checks of ``parallelism.sequence``: the jobs whose sequences can be cut into slices."""

from __future__ import annotations

from typing import Protocol

from share_compute.specification.placement.pinned_plan import PinnedPlan
from share_compute.specification.training import TrainingSpec


class SlicedLayout(Protocol):
    """The fields of ``parallelism`` that this module reads."""

    @property
    def sequence(self) -> int:
        """Number of slices of each sequence."""

    @property
    def tensor(self) -> int:
        """Number of processes of each machine."""

    @property
    def shares_optimizer(self) -> bool:
        """Whether members keep shares of the optimizer's state."""

    @property
    def plan(self) -> PinnedPlan | None:
        """The pinned plan."""

    @property
    def members_per_stage(self) -> int | None:
        """Number of machines of a stage that the job requests."""


def require_slices(layout: SlicedLayout, training: TrainingSpec, *, is_language_model: bool) -> None:
    """Check that the sequences of a job can be cut, if the job requests slices.

    Args:
        layout: placement of the job.
        training: the settings of training.
        is_language_model: whether the job trains a Hugging Face language model, without other tasks.

    Raises:
        ValueError: another setting of the job does not allow it.
    """
    if layout.sequence == 1:
        return
    name = f"parallelism.sequence {layout.sequence}"
    if not is_language_model:
        raise ValueError(f"{name} needs a Hugging Face language model without tasks")
    if training.sequence_length % layout.sequence:
        raise ValueError(
            f"training.sequence_length {training.sequence_length} is not a multiple of {name}: all slices have equally "
            "many tokens"
        )
    if training.precision != "float32":
        raise ValueError(f"{name} needs training.precision float32, and it is {training.precision}")
    if training.compile != "off":
        raise ValueError(
            f"{name} needs training.compile off, and it is {training.compile}: slices are computed eagerly"
        )
    if training.synchronization.kind != "allreduce":
        raise ValueError(f"{name} needs training.synchronization {{kind: allreduce}}: branches are not cut")
    if training.lora is not None and training.lora.dropout > 0:
        raise ValueError(
            f"{name} needs training.lora.dropout 0: slices would draw other numbers than whole sequences"
        )
    for other, is_used in {
        "tensor": layout.tensor > 1,
        "optimizer sharded": layout.shares_optimizer,
        "members_per_stage": layout.members_per_stage is not None,
    }.items():
        if is_used:
            raise ValueError(
                f"{name} is not possible together with parallelism.{other}: leave out one of them"
            )
    if layout.plan is not None:
        _require_whole_slices(layout.plan, layout.sequence)


def _require_whole_slices(plan: PinnedPlan, slices: int) -> None:
    """Raise ValueError unless each machine of a pinned plan has the microbatches of one slice."""
    for place, stage in enumerate(plan.stages):
        found = [member.microbatches for member in stage.machines]
        if len(found) != slices or set(found) != {plan.microbatches / slices}:
            raise ValueError(
                f"parallelism.plan has {len(found)} machines with {', '.join(map(str, found[:8]))} microbatches in "
                f"stages.{place}, and with parallelism.sequence {slices} each stage has {slices} machines with equally "
                "many microbatches: write another plan file with share-compute plan --output"
            )
