"""Ranges of the weights: each range is merged on its own machine, and the server only receives the updates.

A range is a set of whole parameters. A merge computes each parameter separately, so merges on several machines give the
same bits as one aggregator. The server adds the decoded updates to its weights, as the branches do. It thus has each
whole version, but neither contributions nor the state of the outer optimizer pass its link.
"""

from __future__ import annotations

import hashlib
import math
import shutil
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor

from share_compute.compression.factory import codec_of_round, codec_of_update
from share_compute.errors import ContributorLost, UserError, VerificationFailed
from share_compute.models.numbers import is_finite
from share_compute.models.storage.checkpoints import STATE
from share_compute.models.storage.slots import parameter_of, slot_name
from share_compute.models.storage.weights import WeightFolder
from share_compute.specification import TrainingSpec
from share_compute.specification.synchronization import BranchesSpec, LocalSpec
from share_compute.synchronization.aggregator import CODEC, Aggregator, part_file
from share_compute.synchronization.merge_files import opened, write, writer_of
from share_compute.synchronization.merging import outer_state
from share_compute.synchronization.records import BranchRun, MergeRecord

Shapes: TypeAlias = Mapping[str, tuple[int, ...]]
Fill: TypeAlias = Callable[[Mapping[str, Tensor]], None]
"""Loads tensors, given by name, from another machine."""


@dataclass(frozen=True, slots=True)
class RangeLayout:
    """The parameters of a range."""

    groups: tuple[tuple[str, ...], ...]
    """Names of the parameters that are read and written together."""
    shapes: Shapes

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all parameters of the range."""
        return tuple(name for group in self.groups for name in group)


@dataclass(frozen=True, slots=True)
class RangeDigests:
    """Digests of the files that a merge of one range wrote."""

    weights: str
    others: str
    """Digest of the update and of the outer optimizer's state."""


def divided(whole: RangeLayout, policy: BranchesSpec, rounds: int, count: int) -> tuple[RangeLayout, ...]:
    """Return disjoint ranges of whole parameters with about the same size; equal arguments give equal ranges.

    Each parameter goes to the range that is smallest so far, the largest parameters first (the LPT rule, Graham 1969).
    Parameters of different rounds are divided separately, so that the ranges share the work of each round. There are
    fewer ranges if a round merges fewer parameters.

    Args:
        whole: all trained parameters.
        policy: options of the policy.
        rounds: number of rounds of the job.
        count: wanted number of ranges.
    """
    fragments = policy.fragments if isinstance(policy, LocalSpec) else 1
    together: dict[tuple[bool, ...], list[str]] = defaultdict(list)
    for name in whole.names:
        together[
            tuple(policy.merges(name, number + 1, rounds) for number in range(min(fragments, rounds)))
        ].append(name)
    count = max(1, min(count, *map(len, together.values())))
    loads = [0] * count
    place: dict[str, int] = {}
    for names in together.values():
        added = [0] * count
        for name in sorted(names, key=lambda each: (-math.prod(whole.shapes[each]), each)):
            place[name] = min(range(count), key=lambda each: (added[each], loads[each], each))
            added[place[name]] += math.prod(whole.shapes[name])
        loads = [load + more for load, more in zip(loads, added, strict=True)]
    return tuple(
        RangeLayout(
            tuple(tuple(name for name in group if place[name] == number) for group in whole.groups),
            {name: whole.shapes[name] for name in whole.names if place[name] == number},
        )
        for number in range(count)
    )


class _CheckedAggregator(Aggregator):
    """An aggregator that copies the outer optimizer's state from other machines; this state may be damaged."""

    def _slots(self, shapes: Shapes) -> tuple[dict[str, tuple[int, ...]], dict[str, tuple[int, ...]]]:
        """Return the shapes of all slots that some parameters must have, and of the slots that they may have."""
        empty = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
        needed = {slot: tuple(value.shape) for slot, value in outer_state(self._outer, empty).items()}
        codec = codec_of_update(
            self._training, self._policy.branches * self._policy.rounds(self._training.steps)
        )
        possible = {
            slot_name(name, f"{CODEC}{slot}"): tuple(value.shape)
            for name, shape in shapes.items()
            for slot, value in codec.begin(name, shape).items()
        }
        return needed, possible

    def _odd_slot(self, slots: Shapes, shapes: Shapes) -> str | None:
        """Return a slot that is missing, unknown or of a wrong shape; None if all slots fit these shapes."""
        needed, possible = self._slots(shapes)
        missing = sorted(needed.keys() - slots.keys())
        known = needed | possible
        wrong = (slot for slot, shape in slots.items() if known.get(slot) != tuple(shape))
        return missing[0] if missing else next(wrong, None)

    def _require_slots(self, slots: Shapes, shapes: Shapes) -> None:
        odd = self._odd_slot(slots, shapes)
        if odd is not None:
            raise _unfit(f"{odd} is missing, unknown, or has a wrong shape")


class RangeAggregator(_CheckedAggregator):
    """The weights of one range.

    Besides the folders of `Aggregator`, its folder contains ``contributions/KEY``: this range's part of a contribution.

    Args:
        folder: folder of the range.
        training: training settings of the job.
        layout: the parameters of the range.
    """

    def __init__(self, folder: Path, training: TrainingSpec, layout: RangeLayout) -> None:
        super().__init__(folder, training)
        self._layout = layout

    @cached_property
    def _groups(self) -> list[list[str]]:
        """Names of the trained parameters of each shard."""
        return [list(group) for group in self._layout.groups]

    @cached_property
    def _shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the trained parameters."""
        return dict(self._layout.shapes)

    def has(self, version: int) -> bool:
        """Return whether the files that the job needs to continue after a merge are intact."""
        return self.newest_whole(version) == version

    @property
    def names(self) -> Collection[str]:
        """Names of the parameters of the range."""
        return self._shapes.keys()

    def contribution_folder(self, key: str) -> Path:
        """Return the path of this range's part of a contribution."""
        return self._folder / "contributions" / key

    def copy(self, version: int, weights: Fill, slots: Shapes | None, state: Fill) -> None:
        """Copy a version and its state of the outer optimizer from another machine.

        Args:
            version: the version.
            weights: function that loads weights.
            slots: shapes of the slots of the state, by name; None resets the outer optimizer.
            state: function that loads slots.

        Raises:
            VerificationFailed: the slots do not fit the range, or a number is not finite.
        """
        known = {} if slots is None else slots
        if slots is not None:
            self._require_slots(slots, self._shapes)
        with ExitStack() as stack:
            writers = [
                writer_of(stack, self.outer_folder(version)),
                writer_of(stack, self.version_folder(version)),
            ]
            for number, names in enumerate(self._groups):
                values = {name: torch.empty(self._shapes[name]) for name in names}
                weights(values)
                kept = {
                    slot: torch.empty(shape) for slot, shape in known.items() if parameter_of(slot) in values
                }
                state(kept)
                for name, value in (*values.items(), *kept.items()):
                    if not is_finite(value):
                        raise _unfit(f"{name} is not finite")
                write(
                    writers[0], part_file(number), outer_state(self._outer, values) if slots is None else kept
                )
                write(writers[1], part_file(number), values)
            writers[1].write_json(STATE, {})
            for writer in writers:
                writer.finish()

    def fits(self, slots: Shapes) -> bool:
        """Return whether slots of the outer optimizer and the codec have the names and shapes of this range."""
        return self._odd_slot(slots, self._shapes) is None

    @property
    def has_state(self) -> bool:
        """Whether the outer optimizer or the codec of updates has state."""
        needed, possible = self._slots(self._shapes)
        return bool(needed or possible)

    def copy_update(self, version: int, fill: Fill) -> None:
        """Write the update to a version, which another machine has.

        Args:
            version: version that the update makes.
            fill: loads payloads.
        """
        codec = codec_of_update(self._training, version)
        with ExitStack() as stack:
            writer = writer_of(stack, self.update_folder(version, 0))
            for number, names in enumerate(self._groups):
                payloads = {
                    name: torch.empty(codec.num_bytes(self._shapes[name]), dtype=torch.uint8)
                    for name in names
                    if self._merges(name, version)
                }
                fill(payloads)
                write(writer, part_file(number), payloads)
            writer.finish()

    def contribution_bytes(self, run: BranchRun) -> list[dict[str, int]]:
        """Return the size of each payload of the range's part of a contribution, by name, in groups."""
        codec = codec_of_round(self._training, run.round)
        return [
            {name: codec.num_bytes(self._shapes[name]) for name in names if self._merges(name, run.round)}
            for names in self._groups
        ]

    def receive(self, key: str, run: BranchRun, fill: Fill) -> str:
        """Store this range's part of a contribution, unless it is stored already; return its digest.

        Args:
            key: name of the contribution; equal keys stand for equal contributions.
            run: the branch and its round.
            fill: loads payloads.

        Raises:
            VerificationFailed: as `check`.
        """
        folder = self.contribution_folder(key)
        if folder.is_dir():
            return opened(folder, run).digest()
        with ExitStack() as stack:
            writer = writer_of(stack, folder)
            for number, sizes in enumerate(self.contribution_bytes(run)):
                payloads = {name: torch.empty(size, dtype=torch.uint8) for name, size in sizes.items()}
                fill(payloads)
                write(writer, part_file(number), payloads)
            writer.finish()
        try:
            return self.check(run, folder)
        except VerificationFailed:
            shutil.rmtree(folder, ignore_errors=True)
            raise

    def merge_range(self, record: MergeRecord, keys: Mapping[BranchRun, str]) -> RangeDigests:
        """Compute and write this range's part of a version; see `Aggregator.merge`.

        Args:
            record: record of the merge.
            keys: name of each contribution in the record.
        """
        self.merge(record, {run: self.contribution_folder(key) for run, key in keys.items()}, {})
        return self.digests(record.version)

    def digests(self, version: int) -> RangeDigests:
        """Return the digests of the files of a merge."""
        outer = self.outer_folder(version)
        others = [self.update_folder(version, 0)] + [outer] * any(outer.glob("model*.safetensors"))
        return RangeDigests(
            WeightFolder(self.version_folder(version)).digest(),
            "".join(WeightFolder(folder).digest() for folder in others),
        )

    def forget_after(self, version: int) -> None:
        """Remove the files of merges after a version, and all contributions."""
        super().forget_after(version)
        shutil.rmtree(self._folder / "contributions", ignore_errors=True)

    def forget(self, keys: Iterable[str]) -> None:
        """Remove contributions that are merged or will not be used."""
        for key in keys:
            shutil.rmtree(self.contribution_folder(key), ignore_errors=True)


class FollowingAggregator(_CheckedAggregator):
    """The weights of a job whose ranges are merged on other machines."""

    def _needed(self, version: int) -> Iterator[Path]:
        """Return the folders from which the job can continue after a merge."""
        yield self.version_folder(version)

    @property
    def layout(self) -> RangeLayout:
        """All trained parameters."""
        return RangeLayout(tuple(map(tuple, self._groups)), self._shapes)

    def follow(
        self,
        version: int,
        fill: Fill,
        digests: Sequence[tuple[Collection[str], str]],
        facts: Mapping[str, Any],
    ) -> dict[str, str]:
        """Add an update to the last version, and write both; return the digest of each payload.

        Args:
            version: the version.
            fill: loads payloads of the update.
            digests: names of the parameters of each range, and the digest of the weights that its machine computed.
            facts: content of the file with the training state.

        Raises:
            ContributorLost: payloads could not be loaded; ``details`` has their ``range``.
            VerificationFailed: payloads are damaged, or the weights are not those that a machine computed; ``details``
                has their ``range``.
        """
        before = WeightFolder(self.version_folder(version - 1))
        frozen = sorted(self.version_folder(version - 1).glob("model-frozen-*.safetensors"))
        codec = codec_of_update(self._training, version)
        sealed: dict[str, str] = {}
        with ExitStack() as stack:
            folders = self.update_folder(version, 0), self.version_folder(version)
            update, weights = (writer_of(stack, folder) for folder in folders)
            for number, names in enumerate(self._groups):
                values = {name: before.read(name) for name in names}
                payloads = {
                    name: torch.empty(codec.num_bytes(value.shape), dtype=torch.uint8)
                    for name, value in values.items()
                    if self._merges(name, version)
                }
                for place, (own, _) in enumerate(digests):
                    with _accusing(place):
                        known = set(own)
                        part = {name: payload for name, payload in payloads.items() if name in known}
                        fill(part)
                        for name, payload in part.items():
                            sealed[name] = payload_digest(name, payload)
                            values[name] = values[name] + codec.decode(payload, values[name].shape)
                write(update, part_file(number), payloads)
                write(weights, part_file(number), values)
            weights.link(frozen)
            weights.write_json(STATE, facts)
            update.finish()
            weights.finish()
        found = WeightFolder(folders[1])
        for place, (own, digest) in enumerate(digests):
            with _accusing(place):
                if found.digest(own) != digest:
                    raise _unfit(f"range {place} differs from the weights that its machine computed")
        return sealed

    def keep_outer(self, version: int, groups: Sequence[tuple[Collection[str], Shapes, Fill]]) -> None:
        """Fetch the state of the outer optimizer from the machines with ranges, and write it.

        Args:
            version: version of the weights to which the state belongs.
            groups: names of the parameters of each range, shapes of its slots, and a function that loads them.

        Raises:
            VerificationFailed: slots do not fit the parameters, or a number is not finite.
        """
        for names, shapes, _ in groups:
            self._require_slots(shapes, {name: self._shapes[name] for name in names})
        with ExitStack() as stack:
            writer = writer_of(stack, self.outer_folder(version))
            for number, (_, shapes, fill) in enumerate(groups):
                slots = {name: torch.empty(shape) for name, shape in shapes.items()}
                fill(slots)
                for name, value in slots.items():
                    if not is_finite(value):
                        raise _unfit(f"{name} is not finite")
                write(writer, part_file(number), slots)
            writer.finish()


def payload_digest(name: str, payload: Tensor) -> str:
    """Return the SHA-256 of a payload and the name of its parameter."""
    return hashlib.sha256(name.encode() + payload.contiguous().numpy().tobytes()).hexdigest()


@contextmanager
def _accusing(place: int) -> Iterator[None]:
    """Add a range to the details of errors that the range's machine caused."""
    try:
        yield
    except (ContributorLost, UserError, VerificationFailed) as failure:
        kind = ContributorLost if isinstance(failure, ContributorLost) else VerificationFailed
        details = {**failure.details, "range": place}
        raise kind(failure.message, machine=failure.machine, hint=failure.hint, details=details) from failure


def _unfit(what: str) -> VerificationFailed:
    return VerificationFailed(
        f"a part of the merged weights is damaged: {what}",
        hint="no action needed if the job continues: another machine has the part as well",
    )
