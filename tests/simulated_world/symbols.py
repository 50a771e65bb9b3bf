"""A model whose weights, tensors and sums are symbols, so that every wrong, missing or duplicated part shows."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from share_compute.errors import VerificationFailed
from share_compute.protocol.membership import ShardPart, Worker
from share_compute.protocol.messages import Prepared
from share_compute.protocol.tree import Node, SummationTree

Symbol = int
"""Hash of the expression that made a value. Equal symbols stand for equal bits."""
Gradient = dict[int, Symbol]
"""Symbol of the gradient, by layer."""
Weights = dict[int, Symbol]
"""Symbol of the weights, by layer."""


NOT_FINITE: Symbol = -(2**70)
"""Symbol of numbers that are not finite. Any result that is computed from it is the same symbol."""
MISFIT: Symbol = -(2**71)
"""Symbol of a tensor that does not match the model."""


def _of(kind: int, *parts: float) -> Symbol:
    return NOT_FINITE if NOT_FINITE in parts else hash((kind, *parts))


@dataclass(frozen=True)
class SymbolicModel:
    """A chain of layers, trained on fixed microbatches.

    Args:
        layers: number of layers.
        tree: order in which gradients are added.
        is_tied: whether the first and the last layer share their parameter.
    """

    layers: int
    tree: SummationTree
    is_tied: bool = False
    diverges_at: tuple[int, int, int] | None = None
    """Step, microbatch and layer whose output is not finite on any machine."""

    def own_layers(self, part: ShardPart) -> frozenset[int]:
        """Return the layers that a member updates. The shared parameter belongs to the first share."""
        return frozenset(
            layer
            for layer in range(part.start, part.stop)
            if (0 if self._is_shared(layer) else layer - part.start) % part.total == part.number
        )

    def initial(self, layer: int) -> Symbol:
        """Return the weights of a layer before the first step."""
        return hash((0, 0 if self._is_shared(layer) else layer))

    def sample(self, step: int, microbatch: int) -> Symbol:
        """Return the input of the first layer."""
        return hash((1, step, microbatch))

    def diverges(self, step: int, microbatch: int, shard: tuple[int, int]) -> bool:
        """Return whether a cell's output is not finite on any machine."""
        if self.diverges_at is None:
            return False
        return self.diverges_at[:2] == (step, microbatch) and self.diverges_at[2] in range(*shard)

    def forward(self, weights: Symbol, value: Symbol) -> Symbol:
        """Return the output of a layer."""
        return _of(2, weights, value)

    def loss(self, step: int, microbatch: int, output: Symbol) -> Symbol:
        """Return the gradient of the last layer's output."""
        return _of(3, step, microbatch, output)

    def backward(self, weights: Symbol, value: Symbol, gradient: Symbol) -> tuple[Symbol, Symbol]:
        """Return the gradient of a layer's input and that of its weights."""
        return _of(4, weights, value, gradient), _of(5, weights, value, gradient)

    def add(self, left: Symbol, right: Symbol) -> Symbol:
        """Return a sum. As with floating point, the order counts."""
        return _of(6, left, right)

    def tie(self, first: Symbol, last: Symbol) -> Symbol:
        """Return the gradient of the shared parameter from those of both layers."""
        return _of(7, first, last)

    def update(self, weights: Symbol, gradient: Symbol, scale: float) -> Symbol:
        """Return the weights of a layer after a step."""
        return hash((8, weights, gradient, scale))

    def norms(self, gradient: Gradient) -> dict[str, float]:
        """Return the norms that members report for a complete gradient, by parameter."""
        return {
            str(0 if self._is_shared(layer) else layer): math.nan
            if symbol == NOT_FINITE
            else float(symbol % 9973)
            for layer, symbol in gradient.items()
        }

    def digest(self, gradient: Gradient) -> str:
        """Return the digest of a complete gradient."""
        return str(hash(tuple(sorted(gradient.items()))))

    def decide(self, prepared: Mapping[Worker, Prepared]) -> float | None:
        """Return the factor for the gradient of all layers; None if the gradient is not finite."""
        norms: dict[str, float] = {}
        for each in prepared.values():
            norms.update(each.squared_norms)
        if len(norms) != self.layers - self.is_tied:
            raise VerificationFailed(f"norms of {sorted(norms)} only", hint="commit when all are prepared")
        total = sum(norms.values())
        return 1.0 / (1.0 + total) if math.isfinite(total) else None

    def merge(self, held: dict[Node, Gradient], new: Node, gradient: Gradient) -> None:
        """Add a sum of gradients to the sums that a member holds, in place.

        Raises:
            VerificationFailed: the sum contains a microbatch that was added before.
        """
        if any(node.start < new.stop and new.start < node.stop for node in held):
            raise VerificationFailed(f"{new} is added to {sorted(held)}", hint="add each microbatch once")
        held[new] = gradient
        for left, right, parent in self.tree.merges(tuple(held), new):
            first, second = held.pop(left), held.pop(right)
            held[parent] = {layer: self.add(first[layer], second[layer]) for layer in first}

    def whole(self, parts: Iterable[Mapping[Node, Gradient]]) -> Gradient:
        """Return the sum over all microbatches from the sums that the members of a stage hold.

        Raises:
            VerificationFailed: a microbatch is missing or duplicated.
        """
        held: dict[Node, Gradient] = {}
        for part in parts:
            for node, gradient in part.items():
                self.merge(held, node, gradient)
        if set(held) != {self.tree.root}:
            raise VerificationFailed(f"a stage reduces {sorted(held)}", hint="compute every microbatch first")
        return held[self.tree.root]

    def complete(self, reduced: Gradient, others: Symbol | None) -> Gradient:
        """Return a reduced gradient that includes the gradient of the shared parameter.

        Args:
            reduced: gradient of the layers of a shard.
            others: the other stage's sum of the shared parameter; None if one stage has both layers.
        """
        first, last = 0, self.layers - 1
        if not self.is_tied or not {first, last} & reduced.keys():
            return dict(reduced)
        if first in reduced and last in reduced:
            both = self.tie(reduced[first], reduced[last])
        elif others is None:
            raise VerificationFailed("half of a shared parameter's gradient", hint="wait for the other half")
        else:
            both = self.tie(reduced[first], others) if first in reduced else self.tie(others, reduced[last])
        return {layer: both if self._is_shared(layer) else value for layer, value in reduced.items()}

    def _is_shared(self, layer: int) -> bool:
        return self.is_tied and layer in (0, self.layers - 1)


@dataclass(frozen=True)
class Reference:
    """The undisturbed run, computed without any protocol.

    Args:
        weights: weights after each step; at 0 before the first.
        gradients: complete gradient of each step; at 0 empty.
        scales: gradient factor of each step.
    """

    weights: tuple[Weights, ...]
    gradients: tuple[Gradient, ...]
    scales: tuple[float, ...]

    @classmethod
    def of(cls, model: SymbolicModel, steps: int) -> Reference:
        """Compute all steps."""
        weights = [{layer: model.initial(layer) for layer in range(model.layers)}]
        gradients: list[Gradient] = [{}]
        scales = [1.0]
        for step in range(1, steps + 1):
            whole = _summed(model, model.tree.root, weights[-1], step)
            gradients.append(model.complete(whole, None))
            norms = model.norms(gradients[-1])
            scales.append(1.0 / (1.0 + sum(norms.values())))
            weights.append(
                {
                    layer: model.update(weights[-1][layer], gradients[-1][layer], scales[-1])
                    for layer in range(model.layers)
                }
            )
        return cls(tuple(weights), tuple(gradients), tuple(scales))


def _summed(model: SymbolicModel, node: Node, weights: Weights, step: int) -> Gradient:
    children = model.tree.children(node)
    if children is not None:
        left, right = (_summed(model, child, weights, step) for child in children)
        return {layer: model.add(left[layer], right[layer]) for layer in left}
    values = [model.sample(step, node.start)]
    for layer in range(model.layers):
        values.append(model.forward(weights[layer], values[-1]))
    gradient = model.loss(step, node.start, values[-1])
    gradients: Gradient = {}
    for layer in reversed(range(model.layers)):
        gradient, gradients[layer] = model.backward(weights[layer], values[layer], gradient)
    return gradients
