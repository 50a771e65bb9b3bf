"""Computes merges from files: contributions of branches in, the next version of the weights and its update out.

The aggregator's folder contains:

- ``versions/VERSION``: the weights after a merge, in the format of a checkpoint without optimizer state.
- ``outer/VERSION``: state of the outer optimizer, and of the codec of updates.
- ``updates/VERSION``: the encoded change of the weights from one version to the next.
- ``own/BRANCH/VERSION`` and ``updates/VERSION-BRANCH``, if branches keep their own weights: the weights of a branch
  after a merge that includes it, and the encoded change of its weights (`share_compute.synchronization.aggregators`).

The next version is the last one plus the decoded update, so the aggregator and all members have the same bits. Updates
have error feedback at the aggregator, as contributions have at the branches (DoubleSqueeze, Tang et al. 2019, arXiv
1905.05957). Weights are read and written shard by shard, so the aggregator never holds the whole model in memory.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import Tensor

from share_compute.compression.factory import codec_of_round, codec_of_update
from share_compute.errors import UserError
from share_compute.models.numbers import is_finite
from share_compute.models.profiles.profile import FLOAT_BYTES
from share_compute.models.storage.checkpoints import STATE
from share_compute.models.storage.checksums import damage
from share_compute.models.storage.slots import slot_name
from share_compute.models.storage.weights import WeightFolder, finished_folders
from share_compute.specification import TrainingSpec
from share_compute.specification.synchronization import LocalSpec, OuterSgdSpec, OuterSpec
from share_compute.synchronization.merge_files import damaged, decoded, opened, read_slots, write, writer_of
from share_compute.synchronization.merging import Tensors, apply_merge, outer_state
from share_compute.synchronization.records import Branch, BranchRun, MergeRecord

_GROUPS = "groups.json"
"""File with the names of the trained parameters of each shard, in the folder of version 0."""
CODEC = "codec."
"""Prefix of the codec's state among the slots of a parameter."""
VERSIONS_KEPT = 2
"""Number of newest versions whose files are kept."""
_DIGITS = 8
"""Digits of a version in the name of its folder."""


@dataclass(frozen=True, slots=True)
class InitialShard:
    """Initial tensors of some layers, by stored name."""

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
        assert training.rounds is not None
        self._folder = folder
        self._training = training
        self._policy = training.rounds

    def version_folder(self, version: int) -> Path:
        """Return the path of the weights after a merge; version 0 is the initial weights."""
        return self._folder / "versions" / f"{version:08}"

    def update_folder(self, version: int, branch: Branch) -> Path:
        """Return the path of the encoded change of a branch's weights by the merge that makes a version."""
        name = f"{version:08}-{branch:04}" if self._policy.keeps_own_weights else f"{version:08}"
        return self._folder / "updates" / name

    def _own_folder(self, version: int, branch: Branch) -> Path:
        return self._folder / "own" / f"{branch:04}" / f"{version:08}"

    def _own_versions(self, branch: Branch) -> list[int]:
        """Return, in ascending order, the versions for which a branch's own weights are stored."""
        return [int(folder.name) for folder in finished_folders(self._own_folder(0, branch).parent)]

    def beginning(self, version: int, branch: Branch) -> tuple[Path, int]:
        """Return the folder of a branch's initial weights, and the last merge that these weights include.

        Args:
            version: the newest version.
            branch: the branch.
        """
        if not self._policy.keeps_own_weights:
            return self.version_folder(version), version
        versions = [each for each in self._own_versions(branch) if each <= version]
        if not versions:
            return self.version_folder(0), 0
        return self._own_folder(versions[-1], branch), versions[-1]

    def follows(self, base: int, version: int, branch: Branch) -> bool:
        """Return whether all updates exist that lead a branch from the weights of one version to those of another."""
        versions = range(base + 1, version + 1)
        return all(self.update_folder(each, branch).is_dir() for each in versions)

    def outer_folder(self, version: int) -> Path:
        """Return the folder with the state of the outer optimizer after a merge."""
        return self._folder / "outer" / f"{version:08}"

    @property
    def weight_bytes(self) -> int:
        """Size of the trained weights in float32."""
        return FLOAT_BYTES * sum(math.prod(shape) for shape in self._shapes.values())

    def newest_whole(self, version: int) -> int | None:
        """Return the newest version, at most this one, whose files are intact; None if there is none."""
        for each in range(version, -1, -1):
            if all(folder.is_dir() and damage(folder) is None for folder in self._needed(each)):
                return each
        return None

    def forget_after(self, version: int) -> None:
        """Remove the files of merges after a version. Their records are missing, so their next merge may differ."""
        for name in ("versions", "outer", "updates"):
            self._remove(self._folder / name, lambda each: each > version)

    def require_fragments(self) -> None:
        """Check that each round merges a parameter.

        Raises:
            UserError: a part of the model has no trained parameter.
        """
        fragments = self._policy.fragments if isinstance(self._policy, LocalSpec) else 1
        rounds = min(
            fragments, self._policy.rounds(self._training.steps)
        )  # later rounds merge the same parts
        for number in range(1, rounds + 1):
            if not any(self._merges(name, number) for name in self._shapes):
                raise UserError(
                    f"training.synchronization.fragments: round {number} would merge no trained parameter",
                    hint="give at most as many fragments as the model has trained layers",
                )

    def _needed(self, version: int) -> Iterable[Path]:
        """Return the folders that the job needs to continue after a merge."""
        return self.version_folder(version), self.outer_folder(version)

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
                writer_of(stack, folder) for folder in (self.version_folder(0), self.outer_folder(0))
            )
            known: set[str] = set()
            groups: list[list[str]] = []
            for number, shard in enumerate(shards):
                # The last shard repeats a tied parameter of the first shard.
                trained = {name: value for name, value in shard.trained.items() if name not in known}
                frozen = {name: value for name, value in shard.frozen.items() if name not in known}
                known |= trained.keys() | frozen.keys()
                groups.append(sorted(trained))
                write(weights, part_file(number), trained)
                write(weights, f"model-frozen-{number:04}.safetensors", frozen)
                write(outer, part_file(number), outer_state(self._outer, trained))
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
        found = opened(folder, run)
        shapes = {name: shape for name, shape in self._shapes.items() if self._merges(name, run.round)}
        if odd := sorted(shapes.keys() ^ set(found.names())):
            raise damaged(run, f"only one of it and the model has {odd[0]}")
        codec = codec_of_round(self._training, run.round)
        for name, shape in shapes.items():
            if not is_finite(decoded(codec, found, name, shape, run)):
                raise damaged(run, f"{name} is not finite")
        return found.digest()

    def merge(
        self, record: MergeRecord, contributions: Mapping[BranchRun, Path], facts: Mapping[str, Any]
    ) -> float | None:
        """Compute and write the version that a record makes, and its update.

        Repeating a merge writes the same bits again. Return the consensus distance if branches keep their own weights:
        the root mean square of the branches' distances from the merged weights, divided by the norm of the merged
        weights.

        Args:
            record: record of the merge.
            contributions: folder of each contribution in the record.
            facts: content of the file with the training state.

        Raises:
            Unavailable: the disk is full or cannot be written.
            UserError: the weights are not finite after the merge, or cannot be encoded.
            VerificationFailed: a contribution is damaged.
        """
        found = {run: opened(contributions[run], run) for run in record.runs}
        frozen = sorted(self.version_folder(record.version - 1).glob("model-frozen-*.safetensors"))
        whole, others = self._outputs(record)
        with ExitStack() as stack:
            writers = {folder: writer_of(stack, folder) for folder in (*others, *whole)}
            merge_group = self._group_merger(record, found)
            for number, names in enumerate(self._groups):
                for folder, tensors in merge_group(names).items():
                    write(writers[folder], part_file(number), tensors)
            for folder in whole:
                writers[folder].link(frozen)
                writers[folder].write_json(STATE, facts)
            for writer in writers.values():
                writer.finish()
        return self._distance

    def _outputs(self, record: MergeRecord) -> tuple[list[Path], list[Path]]:
        """Return the checkpoints that a merge writes, the version last, and the other folders that the merge writes."""
        version = record.version
        return [self.version_folder(version)], [self.update_folder(version, 0), self.outer_folder(version)]

    def _group_merger(
        self, record: MergeRecord, found: Mapping[BranchRun, WeightFolder]
    ) -> Callable[[Sequence[str]], dict[Path, Tensors]]:
        """Return a function that merges some parameters, and returns the tensors for each folder of `_outputs`."""
        version = record.version
        before = WeightFolder(self.version_folder(version - 1))
        slots = read_slots(self.outer_folder(version - 1))

        def merge_group(names: Sequence[str]) -> dict[Path, Tensors]:
            whole = {name: before.read(name) for name in names}
            state = {slot: tensor for name in names for slot, tensor in slots(name).items()}
            old = {name: value for name, value in whole.items() if self._merges(name, version)}
            changes = {run: self._changes(folder, old, run) for run, folder in found.items()}
            wanted, following = apply_merge(record, changes, self._outer, old, state)
            new, payloads, errors = self._encoded(version, old, wanted, state, CODEC)
            return {
                self.version_folder(version): {**whole, **new},
                self.outer_folder(version): {**state, **following, **errors},
                self.update_folder(version, 0): payloads,
            }

        return merge_group

    def _merges(self, name: str, version: int) -> bool:
        return self._policy.merges(name, version, self._policy.rounds(self._training.steps))

    @property
    def _distance(self) -> float | None:
        """Consensus distance after the last merge; None if all branches have the same weights."""
        return None

    def _changes(
        self, folder: WeightFolder, weights: Mapping[str, Tensor], run: BranchRun
    ) -> dict[str, Tensor]:
        codec = codec_of_round(self._training, run.round)
        return {name: decoded(codec, folder, name, value.shape, run) for name, value in weights.items()}

    def _encoded(
        self,
        version: int,
        old: Mapping[str, Tensor],
        wanted: Mapping[str, Tensor],
        state: Mapping[str, Tensor],
        codec_slot: str,
    ) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]:
        """Return the weights after an update, the payloads of the update, and the next state of its codec.

        Args:
            version: version that the update makes.
            old: weights before the update.
            wanted: weights that the update should make.
            state: slots of the parameters.
            codec_slot: prefix of the names of the codec's slots.
        """
        codec = codec_of_update(self._training, version)
        new: dict[str, Tensor] = {}
        payloads: dict[str, Tensor] = {}
        following: dict[str, Tensor] = {}
        for name, value in old.items():
            prefix = slot_name(name, codec_slot)
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
                    hint="lower training.optimizer.learning_rate, or the learning rate of the outer optimizer",
                )
        return new, payloads, following

    def prune(self, version: int, oldest_base: int, loading: Iterable[int] = ()) -> None:
        """Remove files that are no longer needed.

        Args:
            version: the newest version; this version and the previous one are kept.
            oldest_base: the oldest version that a branch uses; later updates are kept.
            loading: versions that members of branches load; their weights are kept.
        """
        # Names and shapes of parameters are read from version 0.
        kept = {0, *loading, *range(version - VERSIONS_KEPT + 1, version + 1)}
        self._remove(self._folder / "versions", lambda each: each not in kept)
        self._remove(self._folder / "outer", lambda each: each <= version - VERSIONS_KEPT)
        self._remove(self._folder / "updates", lambda each: each <= oldest_base)

    @staticmethod
    def _remove(parent: Path, is_old: Callable[[int], bool]) -> None:
        """Remove the folders of old versions in ``parent``; their names begin with the version."""
        for folder in finished_folders(parent):
            if is_old(int(folder.name[:_DIGITS])):
                shutil.rmtree(folder, ignore_errors=True)

    @property
    def _outer(self) -> OuterSpec:
        return self._policy.outer if isinstance(self._policy, LocalSpec) else OuterSgdSpec()

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


def folder_bytes(folder: Path) -> int:
    """Return the size of all files in a folder, also in folders within it."""
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def part_file(number: int) -> str:
    """Return the name that the file with a shard's tensors has until the folder is complete."""
    return f"model-0000-{number:04}.part"
