"""Files of merges: untrusted contributions, and the folders that an aggregator writes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

import torch
from torch import Tensor

from share_compute.compression.codec import Codec
from share_compute.errors import UserError, VerificationFailed
from share_compute.models.storage.slots import parameter_of
from share_compute.models.storage.weights import FolderWriter, WeightFolder, stream_file
from share_compute.synchronization.records import BranchRun


def writer_of(stack: ExitStack, folder: Path) -> FolderWriter:
    """Return a writer whose incomplete folder is removed at the end of the stack."""
    writer = FolderWriter(folder)
    stack.callback(writer.discard)
    return writer


def write(writer: FolderWriter, file: str, tensors: Mapping[str, Tensor]) -> None:
    """Write tensors to a file, in the order of their names; write no file without tensors."""
    if tensors:
        for content in stream_file({name: tensors[name] for name in sorted(tensors)}):
            writer.write(file, content)


def read_slots(folder: Path) -> Callable[[str], dict[str, Tensor]]:
    """Return a function from the name of a slot to a parameter's state; empty for a parameter without state."""
    if not any(folder.glob("model*.safetensors")):
        return lambda _name: {}
    found, names = WeightFolder(folder), defaultdict[str, list[str]](list)
    for slot in found.names():
        names[parameter_of(slot)].append(slot)
    return lambda name: {slot: found.read(slot) for slot in names[name]}


def opened(folder: Path, run: BranchRun) -> WeightFolder:
    """Open the folder of a contribution; raise `VerificationFailed` if it is not a folder of tensors."""
    try:
        return WeightFolder(folder)
    except UserError as failure:
        raise damaged(run, failure.message) from failure


def decoded(codec: Codec, folder: WeightFolder, name: str, shape: Sequence[int], run: BranchRun) -> Tensor:
    """Decode one parameter of a contribution; raise `VerificationFailed` if its payload is damaged."""
    try:
        payload = folder.read(name)
        if payload.dtype is not torch.uint8 or payload.numel() != codec.num_bytes(shape):
            raise damaged(run, f"{name} is {payload.dtype} {list(payload.shape)}")
        return codec.decode(payload, shape)
    except (UserError, VerificationFailed) as failure:
        raise damaged(run, failure.message) from failure


def damaged(run: BranchRun, what: str) -> VerificationFailed:
    """Return the error that refuses a contribution."""
    return VerificationFailed(
        f"the contribution of branch {run.branch} to round {run.round} is damaged: {what}",
        hint="no action needed: the branch is run again",
    )
