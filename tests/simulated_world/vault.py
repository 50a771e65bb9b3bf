"""Backups of the state of a shard that only one member has."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from tests.simulated_world.symbols import Gradient, SymbolicModel, Weights


@dataclass
class Vault:
    """A backup's copy of a shard: its weights at some step, and the complete gradients since."""

    step: int
    weights: Weights
    gradients: dict[int, Gradient] = field(default_factory=dict)

    def reaches(self, step: int, scales: Mapping[int, float]) -> bool:
        """Return whether the weights after a step can be rebuilt with the known scales.

        A backup that missed a step, and then received the weights after it, does not know how that step was scaled.
        """
        replayed = range(self.step + 1, step + 1)
        return self.step <= step and all(each in self.gradients and each in scales for each in replayed)

    def rebuilt(self, step: int, scales: Mapping[int, float], model: SymbolicModel) -> Weights:
        """Return the weights after a step."""
        weights = dict(self.weights)
        for each in range(self.step + 1, step + 1):
            gradient = self.gradients[each]
            weights = {
                layer: model.update(symbol, gradient[layer], scales[each])
                for layer, symbol in weights.items()
            }
        return weights
