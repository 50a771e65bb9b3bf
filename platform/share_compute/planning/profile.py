"""What a model costs, layer by layer: counted from its own code, the same on every machine."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

from share_compute.planning.partitioning import Shard
from share_compute.strict import StrictModel

FLOAT_BYTES = 4


class Growth(NamedTuple):
    """A quantity of one sample that grows with its tokens s: ``constant + linear * s + quadratic * s * s``."""

    constant: float = 0.0
    linear: float = 0.0
    quadratic: float = 0.0

    def at(self, tokens: int) -> float:
        """Return the quantity for one sample of so many tokens."""
        return self.constant + (self.linear + self.quadratic * tokens) * tokens


NOTHING = Growth()


class LayerProfile(StrictModel):
    """One layer, or what stands before the first or after the last."""

    parameters: int
    """Numbers that it holds."""
    frozen: int = 0
    """Of these, numbers that are not trained: they have no gradient, and no state of the optimizer."""
    largest: int = 0
    """Numbers of its largest parameter that is trained."""
    forward_flops: Growth = NOTHING
    """Floating point operations of one sample's forward pass; a multiply and an add are two."""
    backward_flops: Growth = NOTHING
    """The same for its backward pass, gradients of inputs and of parameters."""
    forward_operations: int = 0
    """Calls of kernels in a forward pass, whatever its size, without those that only look at a tensor otherwise."""
    backward_operations: int = 0
    """The same for its backward pass."""
    activation_bytes: Growth = NOTHING
    """What one sample's forward keeps for its backward, in float32, with its output; without its input and parameters.

    The head's has the logits and the two gradients of their size, which exist at one time while the loss goes backward.
    """
    boundary_numbers: Growth = NOTHING
    """Numbers that one sample hands to the next layer."""
    cache_numbers: Growth = NOTHING
    """Keys and values that one sequence keeps in generation."""


def joined(layers: Sequence[LayerProfile]) -> LayerProfile:
    """Return several layers as one: what each holds and does is added up, and the last one hands on."""
    added: dict[str, int | Growth] = {}
    for name in LayerProfile.model_fields:
        values = [getattr(layer, name) for layer in layers]
        added[name] = (
            Growth(*map(sum, zip(*values, strict=True))) if isinstance(values[0], Growth) else sum(values)
        )
    added["largest"] = max(layer.largest for layer in layers)
    return LayerProfile.model_validate({**added, "boundary_numbers": layers[-1].boundary_numbers})


def forward_only_before_training(pieces: Sequence[LayerProfile]) -> tuple[LayerProfile, ...]:
    """Return the pieces of a model, of which those before the first that is trained go forward only.

    They keep nothing but what enters that one. Only where something is frozen: pieces without parameters that a model
    begins with are counted as they are.
    """
    trained = [place for place, piece in enumerate(pieces) if piece.parameters > piece.frozen]
    first = trained[0] if trained and any(piece.frozen for piece in pieces) else 0
    found = list(pieces)
    for place, piece in enumerate(pieces[:first]):
        entering = piece.boundary_numbers if place == first - 1 else NOTHING
        kept = Growth(*(FLOAT_BYTES * number for number in entering))
        found[place] = piece.model_copy(
            update={"backward_flops": NOTHING, "backward_operations": 0, "activation_bytes": kept}
        )
    return tuple(found)


class ModelProfile(StrictModel):
    """All layers of a model, counted where they live. Tied weights count once, with the embedding."""

    layers: tuple[LayerProfile, ...]
    embedding: LayerProfile = LayerProfile(parameters=0)
    """Everything before the first layer; lives where layer 0 lives."""
    head: LayerProfile = LayerProfile(parameters=0)
    """Everything after the last layer, without a tied head; lives where the last layer lives."""
    tied: int = 0
    """Parameters of a head that is the embedding again: the last shard holds a second copy of these."""
    tied_trains: bool = True
    """Whether these are trained."""
    tied_name: str | None = None
    """Stored name of that parameter, if it is trained."""
    counted: bool = True
    """Whether operations and activations were counted from the model's code, not estimated from its parameters."""

    @cached_property
    def parameters(self) -> int:
        """Parameters of the whole model."""
        return sum(layer.parameters for layer in (self.embedding, *self.layers, self.head))

    def parameters_of(self, shard: Shard) -> int:
        """Return the parameters that a member holding ``shard`` has in memory."""
        held = sum(layer.parameters for layer in self.layers[shard.start : shard.stop])
        if shard.is_first:
            held += self.embedding.parameters
        if shard.is_last:
            held += self.head.parameters + (0 if shard.is_first else self.tied)
        return held
