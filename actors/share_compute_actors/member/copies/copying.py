"""The owner's side of a copy: a shard is given away piece by piece while it is trained."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from share_compute.errors import ShareComputeError, StaleEpoch
from share_compute.planning.profile import FLOAT_BYTES
from share_compute.protocol.roster import Worker
from share_compute.training.loss_scale import LossScale
from share_compute.training.optimizers import optimizer_tensors, parameter_of, undecayed_parameters
from share_compute_actors.member.pieces import Piece
from share_compute_actors.member.runner import Runner

ShardRange = tuple[int, int]
"""Layers [start, stop)."""
_MOST_ASIDE_BYTES = 256 * 2**20
"""Set aside for all at one time; a single tensor may be larger, with its state, and is then alone."""


@dataclass(frozen=True, slots=True)
class Outline:
    """What a shard consists of, all by stored name."""

    sizes: Mapping[str, int]
    """Bytes of each parameter and persistent buffer."""
    buckets: tuple[tuple[tuple[str, tuple[int, ...]], ...], ...]
    """Names and shapes of what is trained, as the buckets of its gradient hold them one after the other."""
    undecayed: frozenset[str]
    """Parameters whose weights do not decay, unless all do."""

    def copy_bytes(self, state_tensors: int) -> int:
        """Return what a copy takes at least: a snapshot, and the gradient of one step.

        Args:
            state_tensors: as large as the weights, that the optimizer keeps.
        """
        trained = sum(math.prod(shape) for group in self.buckets for _, shape in group)
        return sum(self.sizes.values()) + FLOAT_BYTES * (state_tensors + 1) * trained


class Part(NamedTuple):
    """One tensor that can be fetched."""

    name: str
    """Of a parameter or buffer, or of a tensor of the optimizer's state."""
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Copied:
    """Some parameters as they were at one moment, ready to be fetched."""

    ticket: int
    """To be shown at `Owner.piece`."""
    step: int
    """Whose update they have."""
    loss_scale: LossScale
    """Where it stands after that step."""
    parts: tuple[Part, ...]


class Legacy(NamedTuple):
    """State after one step that is on this machine already, but will not be used there any more."""

    shard: ShardRange
    step: int
    loss_scale: LossScale
    """Where it stands after that step."""
    names: Collection[str]
    """Of parameters and buffers."""
    state: Callable[[str], Mapping[str, Tensor]]
    """Returns one of them with what the optimizer knows of it, by name."""

    @classmethod
    def of_runner(cls, runner: Runner, step: int) -> Legacy:
        """Return what a runner has that no step is computed with any more.

        Args:
            runner: the runner.
            step: whose update its weights have.
        """
        tensors = runner.stage.persistent()
        known = {} if runner.optimizer is None else optimizer_tensors(runner.optimizer, runner.parameters)
        slots: dict[str, dict[str, Tensor]] = {}
        for slot, tensor in known.items():
            slots.setdefault(parameter_of(slot), {})[slot] = tensor
        shard = runner.stage.shard
        return cls(
            (shard.start, shard.stop),
            step,
            runner.loss_scale,
            tensors.keys(),
            lambda name: {name: tensors[name], **slots.get(name, {})},
        )


class Owner(Protocol):
    """Somebody whose shard is copied."""

    def outline(self, shard: ShardRange) -> Outline:
        """Say what the shard consists of."""

    def copy(self, shard: ShardRange, names: Sequence[str]) -> Copied:
        """Set some parameters or buffers aside, with what the optimizer knows of them."""

    def piece(self, ticket: int, name: str, start: int, stop: int) -> Piece:
        """Return bytes [start, stop) of a tensor that was set aside."""


class Copier:
    """Lets a runner's shard be copied. An `Owner`.

    Args:
        run: runs something where the runner computes, between two of its turns, and returns what that returns.
        here: gives the runner and the last step whose update its weights have; asked inside ``run``.
    """

    def __init__(
        self,
        run: Callable[[Callable[[], Any]], Any],
        here: Callable[[], tuple[Runner | None, int]],
    ) -> None:
        self._run = run
        self._here = here
        self._ticket = 0
        """The last one that was given out."""
        self._aside: dict[Worker, tuple[int, dict[str, Tensor]]] = {}
        """By who fetches them: a ticket, and tensors by name."""
        self._versions: dict[str, int] = {}
        """How often each buffer had been changed when it was copied."""

    def forget(self) -> None:
        """Forget what was set aside: the runner is another one. Who fetches it hears that it is not there any more."""
        self._aside.clear()
        self._versions.clear()

    def forget_all_but(self, keepers: Collection[Worker]) -> None:
        """Forget what was set aside for others than these: they do not come for it any more."""
        for keeper in self._aside.keys() - set(keepers):
            self._aside.pop(keeper, None)

    def outline(self, shard: ShardRange) -> Outline:
        """Say what the shard consists of.

        Raises:
            StaleEpoch: it is not here.
        """
        outline: Outline = self._run(partial(self._outline, shard))
        return outline

    def _outline(self, shard: ShardRange) -> Outline:
        runner, _ = self._at(shard)
        undecayed = set(undecayed_parameters(runner.stage.module))
        return Outline(
            sizes={name: tensor.nbytes for name, tensor in runner.stage.persistent().items()},
            buckets=runner.gradients.layout,
            undecayed=frozenset(
                name for name, parameter in runner.parameters.items() if parameter in undecayed
            ),
        )

    def copy(self, shard: ShardRange, names: Sequence[str], keeper: Worker = "") -> Copied:
        """Set some parameters or buffers aside, with what the optimizer knows of them.

        Args:
            shard: layers [start, stop).
            names: of parameters or buffers; none: nothing is kept aside for this one any more.
            keeper: who fetches them; what was set aside for it before is forgotten.

        Raises:
            StaleEpoch: the shard is not here.
        """
        copied: Copied = self._run(partial(self._copy, shard, names, keeper))
        return copied

    def _copy(self, shard: ShardRange, names: Sequence[str], keeper: Worker) -> Copied:
        runner, step = self._at(shard)
        here = runner.stage.persistent()
        found = {name: here[name] for name in names}
        for name in found.keys() - runner.parameters.keys():
            self._versions.setdefault(name, here[name]._version)  # noqa: SLF001 - torch has no other word for it
        if runner.optimizer is not None:
            state = optimizer_tensors(runner.optimizer, runner.parameters)
            found |= {name: tensor for name, tensor in state.items() if parameter_of(name) in found}
        others = [tensors for one, (_, tensors) in list(self._aside.items()) if one != keeper]
        aside = sum(tensor.nbytes for tensors in (*others, found) for tensor in tensors.values())
        if found and any(others) and aside > _MOST_ASIDE_BYTES:
            raise StaleEpoch("others fetch from here now", mend="nothing: it is asked for again")
        self._ticket += 1
        clones = {name: tensor.detach().to("cpu", copy=True) for name, tensor in found.items()}
        self._aside.pop(keeper, None)
        if clones:
            self._aside[keeper] = self._ticket, clones
        parts = tuple(
            Part(name, str(clone.dtype).removeprefix("torch."), tuple(clone.shape))
            for name, clone in clones.items()
        )
        return Copied(self._ticket, step, runner.loss_scale, parts)

    def piece(self, ticket: int, name: str, start: int, stop: int) -> Piece:
        """Return bytes [start, stop) of a tensor that was set aside.

        Raises:
            StaleEpoch: others were set aside since.
        """
        clones = dict(list(self._aside.values())).get(ticket)
        if clones is None:
            raise StaleEpoch(
                "other parameters were set aside since", mend="nothing: they are asked for again"
            )
        content = clones[name].contiguous().reshape(-1).view(torch.uint8)[start:stop].numpy()
        return Piece.sealed(name, content)

    def require_still(self) -> None:
        """See that no buffer has changed since it was copied: only gradients are given to who keeps a copy.

        Raises:
            ShareComputeError: one has.
        """
        runner, _ = self._here()
        assert runner is not None
        here = runner.stage.persistent() if self._versions else {}
        for name, version in self._versions.items():
            if name in here and here[name]._version != version:  # noqa: SLF001
                raise ShareComputeError(
                    f"{name} changes while the model is trained, and is no parameter: no other machine can follow it",
                    mend="set parallelism.buddies to false",
                )

    def _at(self, shard: ShardRange) -> tuple[Runner, int]:
        runner, step = self._here()
        if runner is None or (runner.stage.shard.start, runner.stage.shard.stop) != shard:
            raise StaleEpoch("the shard is not here any more", mend="nothing: another copy is made")
        return runner, step
