"""Which tensors of a shard go into a folder."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from share_compute.specification import LoraSpec
from share_compute.training.optimizers import optimizer_tensors
from share_compute_actors.messages import FolderKind
from share_compute_actors.runner import Runner


def folder_tensors(runner: Runner, lora: LoraSpec | None, kind: FolderKind) -> dict[str, dict[str, Tensor]]:
    """Return a shard's tensors by the first part of the names of the files that they go into.

    Args:
        runner: has the shard and the optimizer.
        lora: of the job; its artifact has the adapters alone, or the model with them added to its weights.
        kind: of the folder.
    """
    stage = runner.stage
    borrowed = set(stage.tied.values()) if not stage.shard.is_first else set()

    def own(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: value for name, value in tensors.items() if name not in borrowed}

    if kind == "artifact":
        if lora is None:
            return {"model": own(stage.persistent())}
        from share_compute.models.adapters import (  # noqa: PLC0415 - slow to import, and few need it
            adapter_tensors,
            merged_tensors,
        )

        return (
            {"model": own(merged_tensors(stage))} if lora.merge else {"adapter_model": adapter_tensors(stage)}
        )
    parts = {"model": own(stage.persistent())}
    if runner.optimizer is not None:
        trained = {name: value for name, value in runner.parameters.items() if name not in borrowed}
        parts["optimizer"] = optimizer_tensors(runner.optimizer, trained)
    return parts
