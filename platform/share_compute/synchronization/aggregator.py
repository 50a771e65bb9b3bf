"""Computes merges from files: contributions of branches in, the next version of the weights and its update out.

The aggregator's folder contains:

- ``versions/STEP``: the weights after a merge, in the format of a checkpoint without optimizer state. ``STEP`` is the
  number of steps that each branch takes until then.
- ``outer/VERSION``: state of the outer optimizer, and of the codec of updates.
- ``updates/VERSION``: the encoded change of the weights from one version to the next.

The next version is the last one plus the decoded update, so the aggregator and all members have the same bits. Updates
have error feedback at the aggregator, as contributions have at the branches (DoubleSqueeze, Tang et al. 2019, arXiv
1905.05957). Weights are read and written shard by shard, so the aggregator never holds the whole model in memory.
"""

from __future__ import annotations

import json
import math
import shutil
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from share_compute.compression.codec import Codec
from share_compute.compression.factory import codec_of_round, codec_of_update
from share_compute.errors import UserError, VerificationFailed
from share_compute.models.numbers import is_finite
from share_compute.models.profiles.profile import FLOAT_BYTES
from share_compute.models.storage.checkpoints import STATE
from share_compute.models.storage.checksums import damage
from share_compute.models.storage.slots import parameter_of, slot_name
from share_compute.models.storage.weights import FolderWriter, WeightFolder, finished_folders, stream_file
from share_compute.specification import TrainingSpec
from share_compute.specification.synchronization import LocalSpec
from share_compute.synchronization.merging import apply_merge, outer_state
from share_compute.synchronization.records import BranchRun, MergeRecord

_GROUPS = "groups.json"
"""File with the names of the trained parameters of each shard, in the folder of version 0."""
_CODEC = "codec."
"""Prefix of the codec's state among the slots of a parameter."""
_VERSIONS_KEPT = 2


@dataclass(frozen=True, slots=True)
class InitialShard:
    """Tensors of some layers with which training begins, by stored name."""

    trained: Mapping[str, Tensor]
    frozen: Mapping[str, Tensor]
    """Parameters that are not trained, and buffers."""


class Aggregator:
    """The weights of a job whose branches merge in rounds.

    Args:
        folder: folder of the aggregator.
        training: training settings of the job.
    """

    def __init__(self, folder: Path, training: TrainingSpec) -> None:
        assert isinstance(training.synchronization, LocalSpec)
        self._folder = folder
        self._training = training
        self._policy = training.synchronization

    def version_folder(self, version: int) -> Path:
        """Return the path of the weights after a merge; version 0 is the initial weights."""
        return self._folder / "versions" / f"step-{self.step_of(version):08}"

    def update_folder(self, version: int) -> Path:
        """Return the path of the encoded change from the version before to this version."""
        return self._folder / "updates" / f"{version:08}"

    def _outer_folder(self, version: int) -> Path:
        return self._folder / "outer" / f"{version:08}"

    def step_of(self, version: int) -> int:
        """Return the number of steps that a branch takes until a version, if it is never late."""
        return min(version * self._policy.every, self._training.steps)

    @property
    def weight_bytes(self) -> int:
        """Size of the trained weights in float32."""
        return FLOAT_BYTES * sum(math.prod(shape) for shape in self._shapes.values())

    def newest_whole(self, version: int) -> int | None:
        """Return the newest version up to this one whose files are whole; None if there is none."""
        for each in range(version, -1, -1):
            folders = (self.version_folder(each), self._outer_folder(each))
            if all(folder.is_dir() and damage(folder) is None for folder in folders):
                return each
        return None

    def begin(self, shards: Iterable[InitialShard], facts: Mapping[str, Any]) -> None:
        """Write version 0.

        Args:
            shards: the initial weights, shard after shard.
            facts: content of the file with the training state.

        Raises:
            Unavailable: the disk is full or cannot be written.
        """
        with ExitStack() as stack:
            weights, outer = (
                _writer(stack, folder) for folder in (self.version_folder(0), self._outer_folder(0))
            )
            known: set[str] = set()
            groups: list[list[str]] = []
            for number, shard in enumerate(shards):
                # The last shard repeats a tied parameter of the first one.
                trained = {name: value for name, value in shard.trained.items() if name not in known}
                frozen = {name: value for name, value in shard.frozen.items() if name not in known}
                known |= trained.keys() | frozen.keys()
                groups.append(sorted(trained))
                _write(weights, _part(number), trained)
                _write(weights, f"model-frozen-{number:04}.safetensors", frozen)
                _write(outer, _part(number), outer_state(self._policy.outer, trained))
            weights.write_json(STATE, facts)
            weights.write_json(_GROUPS, groups)
            outer.finish()
            weights.finish()

    def check(self, run: BranchRun, folder: Path) -> str:
        """Check a contribution, and return its digest.

        Args:
            run: the branch and its round.
            folder: folder of the contribution.

        Raises:
            VerificationFailed: the contribution has other parameters than the model, wrong sizes, or numbers that are
                not finite.
        """
        found = _opened(folder, run)
        if odd := sorted(self._shapes.keys() ^ set(found.names())):
            raise _damaged(run, f"only one of it and the model has {odd[0]}")
        codec = codec_of_round(self._training, run.round)
        for name, shape in self._shapes.items():
            if not is_finite(_decoded(codec, found, name, shape, run)):
                raise _damaged(run, f"{name} is not finite")
        return found.digest()

    def merge(
        self, record: MergeRecord, contributions: Mapping[BranchRun, Path], facts: Mapping[str, Any]
    ) -> None:
        """Compute and write the version that a record makes, and its update.

        Repeating a merge writes the same bits again.

        Args:
            record: record of the merge.
            contributions: folder of each contribution in the record.
            facts: content of the file with the training state.

        Raises:
            Unavailable: the disk is full or cannot be written.
            UserError: the weights are not finite after the merge, or cannot be encoded.
            VerificationFailed: a contribution is damaged.
        """
        before = WeightFolder(self.version_folder(record.version - 1))
        slots = _slots(self._outer_folder(record.version - 1))
        opened = [(run, _opened(contributions[run], run)) for run in record.runs]
        with ExitStack() as stack:
            weights, outer, update = (
                _writer(stack, folder)
                for folder in (
                    self.version_folder(record.version),
                    self._outer_folder(record.version),
                    self.update_folder(record.version),
                )
            )
            for number, names in enumerate(self._groups):
                old = {name: before.read(name) for name in names}
                changes = {run: self._changes(found, old, run) for run, found in opened}
                state = {slot: tensor for name in names for slot, tensor in slots(name).items()}
                wanted, following = apply_merge(record, changes, self._policy.outer, old, state)
                new, payloads, errors = self._encoded(record.version, old, wanted, state)
                _write(weights, _part(number), new)
                _write(outer, _part(number), {**following, **errors})
                _write(update, _part(number), payloads)
            weights.link(sorted(before.folder.glob("model-frozen-*.safetensors")))
            weights.write_json(STATE, facts)
            update.finish()
            outer.finish()
            weights.finish()

    def _changes(
        self, folder: WeightFolder, weights: Mapping[str, Tensor], run: BranchRun
    ) -> dict[str, Tensor]:
        codec = codec_of_round(self._training, run.round)
        return {name: _decoded(codec, folder, name, value.shape, run) for name, value in weights.items()}

    def _encoded(
        self,
        version: int,
        old: Mapping[str, Tensor],
        wanted: Mapping[str, Tensor],
        state: Mapping[str, Tensor],
    ) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]:
        """Return the weights that everybody gets, the payloads of the update, and the next state of its codec."""
        codec = codec_of_update(self._training, version)
        new: dict[str, Tensor] = {}
        payloads: dict[str, Tensor] = {}
        following: dict[str, Tensor] = {}
        for name, value in old.items():
            prefix = slot_name(name, _CODEC)
            known = {
                slot.removeprefix(prefix): tensor for slot, tensor in state.items() if slot.startswith(prefix)
            }
            payloads[name], after = codec.encode(
                wanted[name] - value, known or codec.begin(name, value.shape)
            )
            following |= {f"{prefix}{slot}": tensor for slot, tensor in after.items()}
            new[name] = value + codec.decode(payloads[name], value.shape)
            if not is_finite(new[name]):
                raise UserError(
                    f"{name} is not finite after round {version}",
                    hint="lower training.synchronization.outer.learning_rate, or optimizer.learning_rate",
                )
        return new, payloads, following

    def prune(self, version: int, oldest_base: int, loading: Iterable[int] = ()) -> None:
        """Remove files that are no longer needed.

        Args:
            version: the newest version; it and the one before are kept.
            oldest_base: the oldest version with which a branch computes; later updates are kept.
            loading: versions that members of branches load; their weights are kept.
        """
        # Names and shapes of parameters are read from version 0.
        kept = {0, *loading, *range(version - _VERSIONS_KEPT + 1, version + 1)}
        names = {self.version_folder(each).name for each in kept}
        for folder in finished_folders(self._folder / "versions"):
            if folder.name not in names:
                shutil.rmtree(folder, ignore_errors=True)
        for folder in finished_folders(self._folder / "outer"):
            if int(folder.name) <= version - _VERSIONS_KEPT:
                shutil.rmtree(folder, ignore_errors=True)
        for folder in finished_folders(self._folder / "updates"):
            if int(folder.name) <= oldest_base:
                shutil.rmtree(folder, ignore_errors=True)

    @cached_property
    def _groups(self) -> list[list[str]]:
        """Names of the trained parameters of each shard."""
        groups: list[list[str]] = json.loads((self.version_folder(0) / _GROUPS).read_text())
        return groups

    @cached_property
    def _shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the trained parameters."""
        shapes = WeightFolder(self.version_folder(0)).shapes()
        return {name: shapes[name] for group in self._groups for name in group}


def payload_bytes(folder: Path) -> int:
    """Return the size of a contribution or an update: its payloads, and the headers of their files."""
    return sum(file.stat().st_size for file in folder.glob("model*.safetensors"))


def _part(number: int) -> str:
    return f"model-0000-{number:04}.part"


def _writer(stack: ExitStack, folder: Path) -> FolderWriter:
    """Return a writer whose incomplete folder is removed at the end of the stack."""
    writer = FolderWriter(folder)
    stack.callback(writer.discard)
    return writer


def _write(writer: FolderWriter, file: str, tensors: Mapping[str, Tensor]) -> None:
    if tensors:
        for content in stream_file({name: tensors[name] for name in sorted(tensors)}):
            writer.write(file, content)


def _slots(folder: Path) -> Callable[[str], dict[str, Tensor]]:
    """Return a function that reads the state of a parameter, by slot's name; empty if it has none."""
    if not any(folder.glob("model*.safetensors")):
        return lambda _name: {}
    found, names = WeightFolder(folder), defaultdict[str, list[str]](list)
    for slot in found.names():
        names[parameter_of(slot)].append(slot)
    return lambda name: {slot: found.read(slot) for slot in names[name]}


def _opened(folder: Path, run: BranchRun) -> WeightFolder:
    try:
        return WeightFolder(folder)
    except UserError as failure:
        raise _damaged(run, failure.message) from failure


def _decoded(codec: Codec, folder: WeightFolder, name: str, shape: Sequence[int], run: BranchRun) -> Tensor:
    try:
        payload = folder.read(name)
        if payload.dtype is not torch.uint8 or payload.numel() != codec.num_bytes(shape):
            raise _damaged(run, f"{name} is {payload.dtype} {list(payload.shape)}")
        return codec.decode(payload, shape)
    except (UserError, VerificationFailed) as failure:
        raise _damaged(run, failure.message) from failure


def _damaged(run: BranchRun, what: str) -> VerificationFailed:
    return VerificationFailed(
        f"the contribution of branch {run.branch} to round {run.round} is damaged: {what}",
        hint="no action needed: the branch is run again",
    )
