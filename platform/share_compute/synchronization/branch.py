"""The state that a branch keeps of its trained parameters between merges."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from share_compute.compression.checks import require_length
from share_compute.compression.codec import State
from share_compute.compression.factory import codec_of, codec_of_round, codec_of_update
from share_compute.errors import VerificationFailed
from share_compute.models.storage.slots import slot_name
from share_compute.models.storage.weights import WeightFolder
from share_compute.specification import TrainingSpec

_MARK: Final = slot_name("", "branch.")
"""Between a parameter's name and the name of a slot; other slots belong to the optimizer (`training.optimizers`)."""
_BASE: Final = "base"
_VERSION: Final = "version"
_SENT: Final = "sent"
_PENDING: Final = "pending"


def is_branch_slot(name: str) -> bool:
    """Return whether a tensor of a checkpoint's optimizer state belongs to a `BranchState`, from the tensor's name."""
    return _MARK in name


def version_of(folder: WeightFolder) -> int | None:
    """Return the lowest version of the parameters in the optimizer's part of a checkpoint; None without versions."""
    slots = [name for name in folder.names() if name.endswith(f"{_MARK}{_VERSION}")]
    return min((int(folder.read(name)) for name in slots), default=None)


@dataclass(slots=True)
class _Kept:
    """State of one parameter."""

    base: Tensor
    """Weights of version `version`, with which the round began; contiguous float32 on the CPU."""
    version: int
    """Number of merges that `base` includes."""
    state: State
    """State of the codec before the open round."""
    sent: Tensor | None
    """Weights at the end of the round that is being merged; None if merges do not overlap with training."""
    is_pending: bool = False
    """Whether the round has ended, and training goes on while it is merged: then `sent` has a meaning."""


class BranchState:
    """The base weights, the version and the codec's state of each trained parameter of a shard.

    A round turns ``base`` into the weights by training. The contribution of the branch is ``weights - base``, encoded.
    The update of the merge is the decoded change of the common weights. All branches add the same update to the same
    base, so they begin the next round with the same bits. If branches keep their own weights, the update is the change
    of the branch's weights in addition to its contribution.

    If merges overlap with training, ``sent`` has the weights at the end of the round. After the merge, the branch
    continues with the common weights plus its own change since then.

    Each parameter has its own version, because a shard may be loaded from several members, some of which have merged.

    Args:
        training: training settings of the branch. The seed may differ from the job's seed; see `codec_of_round`.
        parameters: trained parameters, by stored name, on any device; `merge` changes them in place.
        version: number of merges that the parameters include.
    """

    def __init__(self, training: TrainingSpec, parameters: Mapping[str, Tensor], version: int) -> None:
        self._training = training
        self._parameters = dict(parameters)
        codec = codec_of(training.compression, training.seed)
        assert training.rounds is not None
        self._policy = training.rounds
        self._rounds = self._policy.rounds(training.steps)
        self._kept: dict[str, _Kept] = {}
        for name, weight in self._parameters.items():
            base = _on_cpu(weight).clone(memory_format=torch.contiguous_format)
            sent = torch.zeros_like(base) if self._policy.overlapping else None
            self._kept[name] = _Kept(base, version, codec.begin(name, weight.shape), sent)
        self._following: dict[str, State] = {}
        """State of the codec after the contribution of the open round, if it is known, by parameter."""

    @property
    def version(self) -> int | None:
        """The lowest version of all parameters; None without parameters."""
        return min((kept.version for kept in self._kept.values()), default=None)

    def contribution(self) -> dict[str, Tensor]:
        """Return the encoded change of each parameter since the round began: uint8 payloads by stored name.

        The next state of the codec takes effect in `merge`. Until then, repeated calls return the same payloads, and so
        does any member that loads this state.

        Raises:
            UserError: a value is not finite or too large.
            VerificationFailed: some parameters include a merge that others lack.
        """
        versions = {kept.version for kept in self._kept.values()}
        if len(versions) > 1:
            raise VerificationFailed(
                f"the weights of a branch are of different versions, {min(versions)} to {max(versions)}",
                hint="no action needed if the job continues: the last merge is repeated first",
            )
        payloads: dict[str, Tensor] = {}
        for name, kept in self._kept.items():
            if self._merges(name, kept.version + 1):
                payloads[name], self._following[name] = self._encoded(name)
        return payloads

    def end_round(self, base: int) -> None:
        """End the open round; training continues while the round is merged. Repeated calls have no effect.

        Args:
            base: initial version of the round; parameters of later versions stay unchanged.
        """
        for name, kept in self._kept.items():
            if kept.sent is not None and not kept.is_pending and kept.version == base:
                kept.sent.copy_(self._parameters[name].detach())
                kept.is_pending = True

    def _merges(self, name: str, version: int) -> bool:
        return self._policy.merges(name, version, self._rounds)

    def forget_contribution(self) -> None:
        """Drop the codec's next state; call this whenever training changes the weights."""
        self._following.clear()

    def update_bytes(self, version: int, before: int) -> dict[str, int]:
        """Return the size of the payload of each parameter that lacks the update to a version.

        Args:
            version: version that the update makes.
            before: version of the weights to which the update is added.

        Raises:
            VerificationFailed: an update before this one is missing.
        """
        codec = codec_of_update(self._training, version)
        lacking = self._lacking(version, before)
        merged = (name for name in lacking if self._merges(name, version))
        return {name: codec.num_bytes(self._parameters[name].shape) for name in merged}

    def merge(
        self, version: int, before: int, payloads: Mapping[str, Tensor], *, closes_round: bool
    ) -> tuple[str, ...]:
        """Add an update to the base, and replace the weights with the result.

        If the branch keeps its own weights, its decoded contribution is added first. Parameters that already include
        the update stay unchanged, so a repeated merge changes nothing.

        Args:
            version: version that the update makes.
            before: version of the weights to which the update is added.
            payloads: encoded update of each parameter, by stored name; others are ignored.
            closes_round: whether the update ends the open round of this branch. If so, the codec's next state takes
                effect. A late branch also applies further updates, which do not end a round.

        Returns:
            Names of the parameters that were changed.

        Raises:
            UserError: the change of a parameter in this round is not finite or too large.
            VerificationFailed: an update before this one is missing, or a payload is missing or damaged. Parameters
                before the damaged one then already include the update.
        """
        sizes = self.update_bytes(version, before)
        for name, size in sizes.items():
            if name not in payloads:
                raise VerificationFailed(
                    f"the update to version {version} has no values for {name}",
                    hint="report this together with the job's log",
                )
            require_length(payloads[name], size)
        codec = codec_of_update(self._training, version)
        for name in self._lacking(version, before):
            weight, kept = self._parameters[name], self._kept[name]
            if name not in sizes:  # another fragment is merged
                kept.version, kept.is_pending = version, kept.is_pending and not closes_round
                continue
            learned = self._learned_apart(name, version, closes_round=closes_round)
            change = codec.decode(payloads[name], weight.shape)
            following = self._following.pop(name, None)
            if self._policy.keeps_own_weights:
                contribution, following = self._encoded(name)
                round_codec = codec_of_round(self._training, kept.version + 1)
                kept.base.add_(round_codec.decode(contribution, weight.shape))
                kept.state = following
            elif closes_round:
                # The next state depends on the weights that the merge is about to replace.
                kept.state = self._encoded(name)[1] if following is None else following
            kept.base.add_(change)
            with torch.no_grad():
                weight.copy_(kept.base)
                if learned is not None and learned.any():  # adding zeros would change the sign of some zeros
                    weight.add_(learned)
            kept.version, kept.is_pending = version, False
        return tuple(sizes)

    def _learned_apart(self, name: str, version: int, *, closes_round: bool) -> Tensor | None:
        """Return the change of a parameter that is in no contribution and that a merge must keep; None if none."""
        if version >= self._rounds:
            return None  # the result is the merged weights
        weight, kept = self._parameters[name].detach(), self._kept[name]
        if kept.is_pending and kept.sent is not None:
            return weight - kept.sent.to(weight.device)
        return None if closes_round else weight - kept.base.to(weight.device)

    def tensors(self) -> dict[str, Tensor]:
        """Return the whole state as float32 tensors ``{"<parameter>::branch.<slot>": tensor}``; not copies."""
        found: dict[str, Tensor] = {}
        for name, kept in self._kept.items():
            slots = {_BASE: kept.base, _VERSION: torch.tensor(float(kept.version)), **kept.state}
            if kept.sent is not None:
                slots |= {_SENT: kept.sent, _PENDING: torch.tensor(float(kept.is_pending))}
            found |= {f"{name}{_MARK}{slot}": tensor for slot, tensor in slots.items()}
        return found

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy a state from `tensors`, or a part of one; parameters without tensors stay unchanged.

        Raises:
            VerificationFailed: a tensor is missing or unknown, or does not fit its parameter.
        """
        own = self.tensors()
        names = {name.partition(_MARK)[0] for name in tensors}
        expected = {name: tensor.shape for name, tensor in own.items() if name.partition(_MARK)[0] in names}
        odd = sorted(tensors.keys() ^ expected.keys())
        odd = odd or [name for name, shape in expected.items() if tensors[name].shape != shape]
        if odd:
            raise _unfit(odd[0])
        self._following.clear()
        for name in names:
            version = float(tensors[f"{name}{_MARK}{_VERSION}"])
            if not version.is_integer() or version < 0:
                raise _unfit(f"{name}{_MARK}{_VERSION}")
            self._kept[name].version = int(version)
            if self._kept[name].sent is not None:
                self._kept[name].is_pending = bool(tensors[f"{name}{_MARK}{_PENDING}"])
        for name in expected:
            if not name.endswith((f"{_MARK}{_VERSION}", f"{_MARK}{_PENDING}")):
                own[name].copy_(tensors[name])

    def _lacking(self, version: int, before: int) -> tuple[str, ...]:
        """Return the names of the parameters that lack one update: that from version ``before`` to ``version``."""
        behind = tuple(name for name, kept in self._kept.items() if kept.version < version)
        for name in behind:
            if self._kept[name].version != before:
                raise VerificationFailed(
                    f"{name} is of version {self._kept[name].version}, so the update from version {before} to "
                    f"{version} cannot be applied: updates between them are missing",
                    hint="no action needed if the job continues: the branch begins again with common weights",
                )
        return behind

    def _encoded(self, name: str) -> tuple[Tensor, State]:
        """Return the payload of a parameter's change in the open round, and the codec's next state."""
        kept = self._kept[name]
        weights = kept.sent if kept.is_pending and kept.sent is not None else _on_cpu(self._parameters[name])
        change = weights - kept.base
        codec = codec_of_round(self._training, kept.version + 1)
        return codec.encode(change, kept.state)


def _on_cpu(weight: Tensor) -> Tensor:
    return weight.detach().float().cpu()


def _unfit(name: str) -> VerificationFailed:
    return VerificationFailed(
        f"the state of a branch does not fit the job: {name}",
        hint="resume with the model and the compression with which the checkpoint was written",
    )
