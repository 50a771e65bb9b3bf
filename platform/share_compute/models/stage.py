"""The interface of a model's stage."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from share_compute.errors import UserError
from share_compute.models.blueprint import Blueprint
from share_compute.models.devices import computing_in, require_precision
from share_compute.models.objective import Objective, task_of
from share_compute.shards import Shard


class Stage(ABC):
    """One shard of a model, ready to compute.

    The first stage takes samples: token ids ``[batch, seq]``, or for declared layers ``[batch, ...]`` with the shape of
    a sample (`Blueprint.sample_shape`). Each later stage takes the outputs of the previous stage, such as hidden states
    ``[batch, seq, hidden]``. The last stage returns logits.

    Args:
        blueprint: blueprint of the whole model.
        shard: part of the model that this stage holds.
        device: device of the shard.

    Raises:
        UserError: the device cannot compute in the blueprint's precision.
    """

    module: nn.Module
    """The torch module; `stored_name` maps the names of its tensors to stored names."""
    tied: Mapping[str, str]
    """Map from each tied parameter's name to its stored name: ``{"lm_head.weight": "model.embed_tokens.weight"}``."""
    trains_before: bool
    """Whether an earlier stage trains parameters."""

    def __init__(self, blueprint: Blueprint, shard: Shard, device: torch.device) -> None:
        require_precision(blueprint.precision, device)
        self.shard = shard
        self._device = device
        self._precision = blueprint.precision
        self._cell: tuple[int, ...] = ()
        self.objectives = blueprint.objectives
        """Task and loss of each task, for the outputs of the last stage."""
        self.task = 0
        """Index of the task of the microbatch that the next forward computes."""

    @property
    def objective(self) -> Objective:
        """Task and loss of the present microbatch."""
        return self.objectives[self.task]

    def objective_of(self, microbatch: int) -> Objective:
        """Return the task and the loss of a microbatch of a training step."""
        return self.objectives[task_of(microbatch, len(self.objectives))]

    @property
    @abstractmethod
    def layers(self) -> Mapping[int, nn.Module]:
        """The shard's layers, by their index in the whole model."""

    def forward(self, inputs: Tensor) -> Tensor:
        """Run the shard's layers on one microbatch, in the blueprint's precision."""
        with computing_in(self._precision, self._device):
            return self.compute(inputs)

    @abstractmethod
    def compute(self, inputs: Tensor) -> Tensor:
        """Run the shard's layers on one microbatch, in the precision that `forward` has selected."""

    def cut_sequences(self) -> None:
        """Let `compute` take a slice of the tokens of each sequence, with `parallelism.sequence`.

        Raises:
            UserError: the model has no attention whose sequences can be cut.
        """
        raise UserError(
            "parallelism.sequence: only Hugging Face language models have sequences that can be cut",
            hint="set parallelism.sequence to 1",
        )

    @abstractmethod
    def initialize(self, seed: int) -> None:
        """Initialize every tensor; the values do not depend on the division into stages."""

    def initialize_added(self, seed: int) -> None:
        """Initialize the tensors in `added`, which folders of pretrained weights lack; by default, there are none."""

    @property
    def added(self) -> frozenset[str]:
        """Stored names of the tensors that `initialize_added` initializes."""
        return frozenset()

    def prepare_cell(self, *key: int) -> None:
        """Set the key of the microbatch that the next forward computes; it seeds dropout, and determines the task.

        Args:
            key: (seed, step, microbatch), see `share_compute.models.cells.Cell`.
        """
        self._cell = key
        self.task = task_of(key[-1], len(self.objectives))

    def stored_name(self, name: str) -> str:
        """Return the name under which a tensor of `module` is stored; for a tied tensor, the name of its source."""
        return self.tied.get(name, name)

    def parameters(self) -> dict[str, nn.Parameter]:
        """Return the parameters by stored name."""
        return {self.stored_name(name): parameter for name, parameter in self.module.named_parameters()}

    def trained(self) -> dict[str, nn.Parameter]:
        """Return the parameters that are not frozen, by stored name."""
        return {name: parameter for name, parameter in self.parameters().items() if parameter.requires_grad}

    def statistics(self) -> dict[str, float]:
        """Return the momentum of each running statistic of batch norms, by stored name; by default, there are none.

        These parameters are not trained by the optimizer; see `update_statistic`.
        """
        return {}

    def persistent(self) -> dict[str, Tensor]:
        """Return the tensors that a checkpoint stores (parameters and persistent buffers), by stored name."""
        return {self.stored_name(name): tensor for name, tensor in self.module.state_dict().items()}
