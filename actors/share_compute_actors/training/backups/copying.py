"""The primary's side of a backup copy: it clones parts of its shard, which backup members fetch during training."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import Parameter

from share_compute.errors import ShareComputeError, StaleEpoch
from share_compute.models.profiles.profile import FLOAT_BYTES
from share_compute.models.stage import Stage
from share_compute.models.storage.slots import parameter_of
from share_compute.protocol.membership import ShardPart, Worker
from share_compute.training.gradients import GradientBuckets
from share_compute.training.loss_scale import LossScale
from share_compute.training.optimizers import undecayed_parameters
from share_compute_actors.transport.pieces import Piece


@dataclass(frozen=True, slots=True)
class ShardOutline:
    """Description of a shard's contents: sizes, shapes and weight decay, by stored name."""

    sizes: Mapping[str, int]
    """Size of each parameter and persistent buffer, in bytes."""
    buckets: tuple[tuple[tuple[str, tuple[int, ...]], ...], ...]
    """Name and shape of each trained parameter, by gradient bucket, in the order in which the bucket stores them."""
    undecayed: frozenset[str]
    """Names of biases and normalization parameters, which get no weight decay unless the job decays all parameters."""
    statistics: Mapping[str, float] = field(default_factory=dict)
    """Momentum of each running statistic, which no optimizer updates."""

    def copy_bytes(self, state_tensors: int) -> int:
        """Return the minimum size of a copy in bytes: a snapshot, and the gradient of one step.

        Args:
            state_tensors: number of state tensors per trained parameter; each has the size of the parameter.
        """
        trained = sum(math.prod(shape) for group in self.buckets for _, shape in group)
        return sum(self.sizes.values()) + FLOAT_BYTES * (state_tensors + 1) * trained


class ClonedTensor(NamedTuple):
    """Description of a cloned tensor that can be fetched."""

    name: str
    """Name of a parameter or buffer, or of a tensor of the optimizer's state."""
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Copied:
    """Description of clones of some parameters and buffers, which `Primary.piece` returns piece by piece."""

    ticket: int
    """Number of this set of clones, to pass to `Primary.piece`."""
    step: int
    """Last step whose update is included in the clones."""
    loss_scale: LossScale
    """Loss scale after step `step`."""
    parts: tuple[ClonedTensor, ...]


class ShardState(Protocol):
    """The attributes of a `Runner` that a copy of its shard needs."""

    stage: Stage
    parameters: dict[str, Parameter]
    gradients: GradientBuckets
    loss_scale: LossScale

    @property
    def part(self) -> ShardPart:
        """The layers of the runner, and its share of the optimizer's state for them."""

    def state_tensors(self) -> dict[str, Tensor]:
        """Return the state of the optimizer and of the branch, by name."""


def own_tensors(runner: ShardState) -> dict[str, Tensor]:
    """Return the parameters and buffers that a copy of a runner's part has, by stored name.

    With a share of the optimizer's state, these are only the parameters of the share, because other members of the
    stage have the buffers and the frozen parameters, too.
    """
    tensors = runner.stage.persistent()
    if runner.gradients.share.total == 1:
        return tensors
    own = runner.gradients.own_names
    return {name: tensor for name, tensor in tensors.items() if name in own}


def current_names(runner: ShardState) -> list[str]:
    """Return the stored names of a runner's tensors that are up to date without an exchange of weights."""
    own = runner.gradients.own_names
    trained = runner.stage.trained()
    return [name for name in runner.stage.persistent() if name in own or name not in trained]


class Legacy(NamedTuple):
    """State of a shard after step `step`, in a runner or backup copy on this machine. New copies can start from it."""

    shard: ShardPart
    step: int
    loss_scale: LossScale
    """Loss scale after step `step`."""
    names: Collection[str]
    """Names of parameters and buffers."""
    state: Callable[[str], Mapping[str, Tensor]]
    """Function from the name of a parameter or buffer to this tensor and its optimizer state, by tensor name."""

    @classmethod
    def of_runner(cls, runner: ShardState, step: int) -> Legacy:
        """Return the state of a runner. The runner must not compute further steps.

        Args:
            runner: the runner.
            step: last step whose update its weights include.
        """
        tensors = own_tensors(runner)
        slots: dict[str, dict[str, Tensor]] = {}
        for slot, tensor in runner.state_tensors().items():
            slots.setdefault(parameter_of(slot), {})[slot] = tensor
        return cls(
            runner.part,
            step,
            runner.loss_scale,
            tensors.keys(),
            lambda name: {name: tensors[name], **slots.get(name, {})},
        )


class Primary(Protocol):
    """The interface of a primary whose shard is copied."""

    def outline(self, shard: ShardPart) -> ShardOutline:
        """Return the outline of a shard."""

    def copy(self, shard: ShardPart, names: Sequence[str]) -> Copied:
        """Clone some parameters or buffers, with their optimizer state; return a description of the clones."""

    def piece(self, ticket: int, name: str, start: int, stop: int) -> Piece:
        """Return bytes [start, stop) of a cloned tensor."""


class Copier:
    """Clones parts of a runner's shard for backup members; implements `Primary`.

    Args:
        run: runs a function on the compute thread, and returns its result.
        here: returns the runner (None before weights are loaded), and the last step whose update its weights include.
            Called on the compute thread.
        most_cloned_bytes: maximum total size of the clones for several backup members, in bytes. Clones for a single
            backup member have no limit.
    """

    def __init__(
        self,
        run: Callable[[Callable[[], Any]], Any],
        here: Callable[[], tuple[ShardState | None, int]],
        most_cloned_bytes: int = 256 * 2**20,
    ) -> None:
        self._run = run
        self._here = here
        self._most_cloned_bytes = most_cloned_bytes
        self._ticket = 0
        """The last ticket that was issued."""
        self._staged: dict[Worker, tuple[int, dict[str, Tensor]]] = {}
        """Ticket and cloned tensors, by backup member."""
        self._versions: dict[str, int] = {}
        """torch's version counter of each buffer when it was first cloned."""

    def forget(self) -> None:
        """Drop all clones after the runner was replaced. Backup members that still fetch clones get `StaleEpoch`."""
        self._staged.clear()
        self._versions.clear()

    def forget_all_but(self, backups: Collection[Worker]) -> None:
        """Drop all clones except those for members in `backups`."""
        for backup in self._staged.keys() - set(backups):
            self._staged.pop(backup, None)

    def outline(self, shard: ShardPart) -> ShardOutline:
        """Return the outline of a shard.

        Raises:
            StaleEpoch: this member does not compute with the shard.
        """
        outline: ShardOutline = self._run(partial(self._outline, shard))
        return outline

    def _outline(self, shard: ShardPart) -> ShardOutline:
        runner, _ = self._at(shard)
        undecayed = set(undecayed_parameters(runner.stage.module))
        return ShardOutline(
            sizes={name: tensor.nbytes for name, tensor in own_tensors(runner).items()},
            buckets=runner.gradients.layout,
            undecayed=frozenset(
                name for name, parameter in runner.parameters.items() if parameter in undecayed
            ),
            statistics=runner.stage.statistics(),
        )

    def copy(self, shard: ShardPart, names: Sequence[str], backup: Worker = "") -> Copied:
        """Clone some parameters or buffers, with their optimizer state; return a description of the clones.

        Args:
            shard: layers, and the share of the optimizer's state.
            names: names of parameters or buffers; if empty, nothing is cloned.
            backup: the backup member that will fetch the clones. Its previous clones are dropped.

        Raises:
            StaleEpoch: this member does not compute with the shard, or clones for other members use up the space.
        """
        copied: Copied = self._run(partial(self._copy, shard, names, backup))
        return copied

    def _copy(self, shard: ShardPart, names: Sequence[str], backup: Worker) -> Copied:
        runner, step = self._at(shard)
        here = runner.stage.persistent()
        found = {name: here[name] for name in names}
        for name in found.keys() - runner.parameters.keys():
            self._versions.setdefault(name, here[name]._version)  # noqa: SLF001 - torch has no public name for it
        state = runner.state_tensors() if found else {}
        found |= {name: tensor for name, tensor in state.items() if parameter_of(name) in found}
        others = [tensors for one, (_, tensors) in list(self._staged.items()) if one != backup]
        staged_bytes = sum(tensor.nbytes for tensors in (*others, found) for tensor in tensors.values())
        if found and any(others) and staged_bytes > self._most_cloned_bytes:
            raise StaleEpoch(
                "other members fetch copies from this member now",
                hint="no action needed: the fetch is repeated",
            )
        self._ticket += 1
        clones = {name: tensor.detach().to("cpu", copy=True) for name, tensor in found.items()}
        self._staged.pop(backup, None)
        if clones:
            self._staged[backup] = self._ticket, clones
        parts = tuple(
            ClonedTensor(name, str(clone.dtype).removeprefix("torch."), tuple(clone.shape))
            for name, clone in clones.items()
        )
        return Copied(self._ticket, step, runner.loss_scale, parts)

    def piece(self, ticket: int, name: str, start: int, stop: int) -> Piece:
        """Return bytes [start, stop) of a cloned tensor.

        Raises:
            StaleEpoch: the clones of this ticket were dropped.
        """
        clones = dict(list(self._staged.values())).get(ticket)
        if clones is None:
            raise StaleEpoch(
                "these clones were replaced by later ones", hint="no action needed: the fetch is repeated"
            )
        content = clones[name].contiguous().reshape(-1).view(torch.uint8)[start:stop].numpy()
        return Piece.sealed(name, content)

    def require_still(self) -> None:
        """Check that no buffer has changed since it was first cloned, because backup members get no later values.

        Raises:
            ShareComputeError: a buffer has changed.
        """
        runner, _ = self._here()
        assert runner is not None
        here = runner.stage.persistent() if self._versions else {}
        for name, version in self._versions.items():
            if name in here and here[name]._version != version:  # noqa: SLF001
                raise ShareComputeError(
                    f"{name} changes during training and is no parameter, so no backup copy of it can be kept",
                    hint="set parallelism.backups to false",
                )

    def _at(self, shard: ShardPart) -> tuple[ShardState, int]:
        runner, step = self._here()
        if runner is None or runner.part != shard:
            raise StaleEpoch(
                "this member does not hold the shard any more",
                hint="no action needed: another copy is made",
            )
        return runner, step
