"""Selects the tensors of a shard that a folder stores, and copies them."""

from __future__ import annotations

from collections.abc import Mapping

import psutil
from torch import Tensor

from share_compute.models.storage.slots import parameter_of
from share_compute.specification import LoraSpec
from share_compute_actors.group.allocator import is_out_of_memory
from share_compute_actors.messages import FolderKind
from share_compute_actors.training.member.runner import Runner


def folder_tensors(runner: Runner, lora: LoraSpec | None, kind: FolderKind) -> dict[str, dict[str, Tensor]]:
    """Return the tensors of a shard that a folder stores, by the stem of their file's name, then by stored name.

    If two stages hold a tied parameter, only the first stage stores it. If the members of a stage have shares of the
    optimizer's state, the weights are stored by the member with the first share.

    Args:
        runner: runner with the shard and the optimizer.
        lora: the job's LoRA settings; None without LoRA. With LoRA, an artifact contains the model with
            merged adapters if ``lora.merge`` is set, otherwise only the adapters.
        kind: whether the folder is a checkpoint, an artifact or a contribution.

    Raises:
        UserError: the contribution has a value that is not finite or too large.
        VerificationFailed: the shard has no contribution now; see `BranchState.contribution`.
    """
    stage = runner.stage
    borrowed = set(stage.tied.values()) if not stage.shard.is_first else set()

    def own(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: value for name, value in tensors.items() if parameter_of(name) not in borrowed}

    if kind == "contribution":
        return {"model": own(runner.branch.contribution() if runner.branch is not None else {})}

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
    parts = {"model": own(stage.persistent())} if runner.gradients.share.number == 0 else {}
    if runner.optimizer is not None:
        parts["optimizer"] = own(runner.state_tensors())
    return parts


def copied(parts: Mapping[str, Mapping[str, Tensor]], lent_bytes: int) -> dict[str, dict[str, Tensor]] | None:
    """Return copies of tensors in main memory, so that training may change the originals.

    Return None if there is too little free or lent memory for the copies.

    Args:
        parts: tensors by the stem of their file's name, then by stored name.
        lent_bytes: main memory that the machine's owner lends, in bytes; 0 if unknown.
    """
    need = sum(tensor.nbytes for tensors in parts.values() for tensor in tensors.values())
    resident = psutil.Process().memory_info().rss
    if need > psutil.virtual_memory().available or (lent_bytes and resident + need > lent_bytes):
        return None
    try:
        return {
            stem: {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}
            for stem, tensors in parts.items()
        }
    except (MemoryError, RuntimeError) as failure:
        if not is_out_of_memory(failure):
            raise
        return None
