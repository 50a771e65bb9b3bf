"""Cost profile of a model, layer by layer, independent of the machine."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cached_property
from hashlib import sha256
from typing import NamedTuple

from share_compute.errors import PlanInfeasible
from share_compute.files.strict import StrictModel
from share_compute.models.profiles.places import Places
from share_compute.shards import Shard

FLOAT_BYTES = 4


class QuadraticGrowth(NamedTuple):
    """A quantity, such as FLOPs, of one sample of s tokens: ``constant + linear * s + quadratic * s * s``."""

    constant: float = 0.0
    linear: float = 0.0
    quadratic: float = 0.0

    def at(self, tokens: int) -> float:
        """Return the quantity for one sample of ``tokens`` tokens."""
        return self.constant + (self.linear + self.quadratic * tokens) * tokens


NOTHING = QuadraticGrowth()


class LayerProfile(StrictModel):
    """Cost profile of one layer, of the part before the first layer, or of the part after the last one."""

    parameters: int
    """Number of parameters."""
    frozen: int = 0
    """Number of parameters that are not trained: these have no gradient and no optimizer state."""
    largest: int = 0
    """Number of scalars in the largest trained parameter tensor; 0 if none is trained."""
    forward_flops: QuadraticGrowth = NOTHING
    """Floating point operations of one sample's forward pass; a multiply and an add are two."""
    backward_flops: QuadraticGrowth = NOTHING
    """Floating point operations of one sample's backward pass, for gradients of inputs and of parameters."""
    forward_operations: int = 0
    """Number of kernel calls in a forward pass, without view operations."""
    backward_operations: int = 0
    """Number of kernel calls in a backward pass, without view operations."""
    forward_traffic: QuadraticGrowth = NOTHING
    """Bytes in float32 that kernels other than matrix products, such as norms, move in one sample's forward pass."""
    backward_traffic: QuadraticGrowth = NOTHING
    """Bytes in float32 that kernels other than matrix products move in one sample's backward pass.

    The sums of the parameters' gradients do not count.
    """
    activation_bytes: QuadraticGrowth = NOTHING
    """Bytes in float32 that one sample keeps between its forward and its backward pass.

    Inputs and parameters do not count. In the head, tensors of the logits' size in the backward pass of the loss count
    too.
    """
    recomputed_bytes: QuadraticGrowth = NOTHING
    """Bytes in float32 that one sample takes while a tile of the layer is computed again in the backward pass.

    0 for layers that are not computed in tiles.
    """
    boundary_numbers: QuadraticGrowth = NOTHING
    """Number of scalars in the output of one sample."""
    cache_numbers: QuadraticGrowth = NOTHING
    """Number of scalars in the key-value cache of one sequence."""

    def for_rows(self, rows: int) -> LayerProfile:
        """Return the profile of samples that each take several rows of a batch: the costs of the rows add up."""
        if rows == 1:
            return self
        growths = {
            name: QuadraticGrowth(*(rows * number for number in value))
            for name, value in self
            if isinstance(value, QuadraticGrowth)
        }
        return self.model_copy(update=growths)


def joined(layers: Sequence[LayerProfile]) -> LayerProfile:
    """Return one profile for consecutive layers.

    ``largest`` is the maximum of all layers, ``boundary_numbers`` is taken from the last layer, and other fields are
    sums.
    """
    added: dict[str, int | QuadraticGrowth] = {}
    for name in LayerProfile.model_fields:
        values = [getattr(layer, name) for layer in layers]
        added[name] = (
            QuadraticGrowth(*map(sum, zip(*values, strict=True)))
            if isinstance(values[0], QuadraticGrowth)
            else sum(values)
        )
    added["largest"] = max(layer.largest for layer in layers)
    return LayerProfile.model_validate({**added, "boundary_numbers": layers[-1].boundary_numbers})


def forward_only_before_training(pieces: Sequence[LayerProfile]) -> tuple[LayerProfile, ...]:
    """Return the profiles, with no backward costs in the pieces before the first piece that has trained parameters.

    The piece just before the first trained piece keeps only its output as activation; earlier pieces keep nothing. If
    nothing is frozen, or nothing is trained, all profiles stay unchanged.
    """
    trained = [place for place, piece in enumerate(pieces) if piece.parameters > piece.frozen]
    first = trained[0] if trained and any(piece.frozen for piece in pieces) else 0
    found = list(pieces)
    for place, piece in enumerate(pieces[:first]):
        entering = piece.boundary_numbers if place == first - 1 else NOTHING
        kept = QuadraticGrowth(*(FLOAT_BYTES * number for number in entering))
        found[place] = piece.model_copy(
            update={
                "backward_flops": NOTHING,
                "backward_operations": 0,
                "backward_traffic": NOTHING,
                "activation_bytes": kept,
                "recomputed_bytes": NOTHING,
            }
        )
    return tuple(found)


class ModelProfile(StrictModel):
    """Cost profiles of all parts of a model. Tied parameters count once, in the embedding."""

    layers: tuple[LayerProfile, ...]
    embedding: LayerProfile = LayerProfile(parameters=0)
    """Costs of all modules before the first layer. These modules are always in the first layer's shard."""
    head: LayerProfile = LayerProfile(parameters=0)
    """Costs of all modules after the last layer, and of the loss if the model can be trained.

    The modules are always in the last layer's shard.
    """
    tied: int = 0
    """Number of parameters that the head shares with the embedding. Unless the last shard is also the first, it holds a
    second copy of these parameters.
    """
    tied_trains: bool = True
    """Whether the tied parameters are trained; True if there are none."""
    tied_name: str | None = None
    """Stored name of the tied parameter; None if there is none, or it is frozen."""
    counted: bool = True
    """Whether the FLOPs of all parts were counted by running the model's code; False if any were estimated."""
    no_cut_reason: str | None = None
    """Reason why the model cannot be cut into stages; None if it can."""

    layer_types: tuple[str, ...] = ()
    """Name of the class of each layer; empty if it is unknown."""
    places: Places | None = None
    """Naming scheme of the model's parameters; None if it is unknown."""

    @cached_property
    def digest(self) -> str:
        """Digest of the layers' types and numbers of parameters, 32 hexadecimal digits.

        Parts before and after the layers do not count: their sizes follow from the vocabulary or the classes, which
        are unknown before the data is read.
        """
        sizes = [layer.parameters for layer in self.layers]
        return sha256(json.dumps([self.layer_types, sizes]).encode()).hexdigest()[:32]

    def require_stages(self, requested: int | None) -> int | None:
        """Return the number of stages that a plan must have; None leaves it to the planner.

        Args:
            requested: number of stages that the submitter wants; None if any number will do.

        Raises:
            PlanInfeasible: several stages are requested, and the model cannot be cut.
        """
        if self.no_cut_reason is None:
            return requested
        if requested not in {None, 1}:
            raise PlanInfeasible(
                f"this model cannot be cut into {requested} stages: {self.no_cut_reason}",
                hint="leave out the number of stages; one machine then holds the whole model",
                details={"stages": requested},
            )
        return 1

    @cached_property
    def parameters(self) -> int:
        """Number of parameters of the whole model."""
        return sum(layer.parameters for layer in (self.embedding, *self.layers, self.head))

    def parameters_of(self, shard: Shard) -> int:
        """Return the number of parameters in a shard; tied parameters count in the first and in the last shard."""
        held = sum(layer.parameters for layer in self.layers[shard.start : shard.stop])
        if shard.is_first:
            held += self.embedding.parameters
        if shard.is_last:
            held += self.head.parameters + (0 if shard.is_first else self.tied)
        return held
