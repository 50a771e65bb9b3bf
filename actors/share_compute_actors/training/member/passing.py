"""Forward passes between steps: evaluation, and sampling through one member of each stage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import ray
import torch
from numpy.typing import NDArray
from torch import Tensor

from share_compute.errors import WrongTensor
from share_compute.protocol.membership import Worker
from share_compute_actors.messages import EvaluationResult
from share_compute_actors.training.member.runner import Runner
from share_compute_actors.training.member.samples import Part
from share_compute_actors.transport.channel import Channel
from share_compute_actors.transport.envelope import WireLabel

Held = Literal["validation", "test"]
"""A held-out split, on which the model is not trained."""


@dataclass(frozen=True, slots=True)
class Passing:
    """Runs this member's part of forward passes through all stages, for evaluation and sampling.

    Args:
        runner: runner of this member's shard.
        channel: channel of the epoch.
        names: name of each member's machine, by member.
        shard_store: the shard store, which has the samples.
        deadline_s: longest wait for another member, in seconds.
    """

    runner: Runner
    channel: Channel
    names: Mapping[Worker, str]
    shard_store: Any
    deadline_s: float

    def evaluate(
        self,
        me: Worker,
        split: Held,
        step: int,
        microbatches: Sequence[int],
        stage: int,
        stages: Sequence[Sequence[Worker]],
        most_outputs: int,
        task: int,
    ) -> dict[int, EvaluationResult]:
        """Evaluate this member's share of some microbatches; at the last stage, return the results by microbatch.

        Args:
            me: this member.
            split: the split that the microbatches belong to.
            step: number of the last step that was applied.
            microbatches: ids of the microbatches. They are distributed among the members of a stage in turn.
            stage: index of this member's stage.
            stages: members of each stage.
            most_outputs: maximum number of a classifier's outputs that are returned for each sample; more are left out.
            task: index of the task that the microbatches belong to.

        Raises:
            ContributorLost: a tensor from another member did not arrive in time.
            RayActorError: the shard store died.
            StaleEpoch: a halt for a later epoch arrived, or a tensor was lost in transit.
            WrongTensor: a tensor has a wrong shape or dtype, or cannot be read.
        """

        def owner(place: int, microbatch: int) -> Worker:
            return stages[place][microbatch % len(stages[place])]

        def label(place: int, microbatch: int) -> WireLabel:
            return WireLabel(split, step, "activation", microbatch, place)

        def arriving(microbatch: int) -> Tensor:
            return self._receive(label(stage - 1, microbatch), owner(stage - 1, microbatch))

        def leaving(microbatch: int, outputs: Tensor) -> None:
            self.channel.send(owner(stage + 1, microbatch), label(stage, microbatch), outputs)

        own = [microbatch for microbatch in microbatches if owner(stage, microbatch) == me]
        inputs = self._samples(split, own, "inputs") if stage == 0 else {}
        targets = self._samples(split, own, "targets") if stage == len(stages) - 1 else {}
        entering = inputs.__getitem__ if stage == 0 else arriving
        self.runner.stage.task = task
        result = self.runner.evaluate(own, entering, leaving, targets, most_outputs)
        self.channel.forget_evaluations()
        return result

    def next_logits(
        self, step: int, ids: Sequence[int], stage: int, way: Sequence[Worker]
    ) -> NDArray[np.float32] | None:
        """Run a text through this stage.

        Return the logits of the next token, ``[vocabulary]``, if this is the last stage, otherwise None.

        Args:
            step: number of the last step that was applied.
            ids: token ids of the text.
            stage: index of this member's stage.
            way: for each stage, the member that processes the text.

        Raises:
            ContributorLost: the tensor from the previous stage did not arrive in time.
            StaleEpoch: a halt for a later epoch arrived, or a tensor was lost in transit.
            WrongTensor: a tensor has a wrong shape or dtype, or cannot be read.
        """

        def label(place: int) -> WireLabel:
            return WireLabel("sample", step, "activation", 0, place)

        entering = torch.tensor([ids]) if stage == 0 else self._receive(label(stage - 1), way[stage - 1])
        outputs = self.runner.predict(entering)
        self.channel.forget_evaluations()
        if stage < len(way) - 1:
            self.channel.send(way[stage + 1], label(stage), outputs)
            return None
        logits: NDArray[np.float32] = outputs[0, -1].float().cpu().numpy()
        return logits

    def _receive(self, label: WireLabel, source: Worker) -> Tensor:
        tensor = self.channel.receive(label, self.names[source], self.deadline_s)
        expected = self.runner.expected("activation")
        what = None if expected is None else expected.misfit_of_some(tensor)
        if what is not None:
            raise WrongTensor.of(self.names[source], source, f"an activation: {what}", label.step)
        return tensor

    def _samples(self, split: Held, microbatches: Sequence[int], part: Part) -> dict[int, Tensor]:
        rows: Mapping[int, NDArray[Any]] = ray.get(
            self.shard_store.evaluation_rows.remote(split, list(microbatches), part)
        )
        return {microbatch: torch.tensor(values) for microbatch, values in rows.items()}
