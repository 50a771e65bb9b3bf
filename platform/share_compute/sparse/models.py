"""Models with one row of weights for each key: logistic regression, and factorisation of rows and of matrices."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import sparse

from share_compute.sparse.blocks import Block, Floats

Totals = NDArray[np.float64]
NO_TOTALS: Totals = np.zeros(0)
"""Totals for models that need none."""


class SparseModel(ABC):
    """Computes scores and gradients of the rows that a block touches. It stores no weights."""

    @property
    @abstractmethod
    def width(self) -> int:
        """Number of weights of a row."""

    @abstractmethod
    def scores(self, block: Block, weights: Floats) -> Floats:
        """Return the output of each row, ``[rows]``, from the weights of the touched places, ``[places, width]``."""

    @abstractmethod
    def gradient(self, block: Block, weights: Floats, totals: Totals) -> tuple[Floats, float]:
        """Return the sum of the gradients over the rows, ``[places, width]``, and the sum of the losses.

        Args:
            block: the rows.
            weights: weights of the touched places.
            totals: sum of the weights of all rows, and their number, ``[width + 1]``.
        """

    @abstractmethod
    def loss(self, block: Block, weights: Floats, totals: Totals) -> float:
        """Return the sum of the losses over the rows."""


def probabilities(scores: Floats) -> Floats:
    """Return the probability of the positive class, ``[rows]``."""
    result: Floats = 0.5 * (1 + np.tanh(0.5 * scores))
    return result


def _log_loss(scores: Floats, targets: Floats) -> float:
    # log(1 + exp(x)) = max(x, 0) + log(1 + exp(-|x|)); `numpy.logaddexp` takes four times as long.
    softplus = np.log1p(np.exp(-np.abs(scores, dtype=np.float64)))
    return float(np.sum(softplus + np.maximum(scores, 0) - targets * scores))


@dataclass(frozen=True, slots=True)
class Logistic(SparseModel):
    """Logistic regression with targets 0 and 1."""

    @property
    def width(self) -> int:
        """Rows have one weight."""
        return 1

    def scores(self, block: Block, weights: Floats) -> Floats:
        """Return the log odds of each row."""
        scores: Floats = block.matrix @ weights[:, 0]
        return scores + weights[block.bias, 0] if block.bias >= 0 else scores

    def gradient(self, block: Block, weights: Floats, totals: Totals = NO_TOTALS) -> tuple[Floats, float]:  # noqa: ARG002
        """Return the gradient and the log-loss, both summed."""
        scores = self.scores(block, weights)
        residuals = probabilities(scores) - block.targets
        sums: Floats = block.transposed @ residuals
        if block.bias >= 0:
            sums[block.bias] = residuals.sum()
        return sums[:, None], _log_loss(scores, block.targets)

    def loss(self, block: Block, weights: Floats, totals: Totals = NO_TOTALS) -> float:  # noqa: ARG002
        """Return the summed log-loss."""
        return _log_loss(self.scores(block, weights), block.targets)


@dataclass(frozen=True, slots=True)
class FactorizationMachine(SparseModel):
    """Factorisation machine of degree 2 (Rendle 2010): a linear weight and ``factors`` numbers for each key.

    The sum over pairs is computed as half of (sum of products)^2 - sum of squares, in linear time.
    """

    factors: int
    is_classifier: bool = True
    """Whether targets are 0 and 1, with log-loss; if not, they are numbers, with half the squared error."""
    l2: float = 0.0
    """Strength of L2 on the factors, for each row that touches a key. The linear weights are the rule's."""

    @property
    def width(self) -> int:
        """Number of weights of a row."""
        return 1 + self.factors

    def scores(self, block: Block, weights: Floats) -> Floats:
        """Return the output of each row: log odds for classes."""
        return self._forward(block, weights)[0]

    def _forward(self, block: Block, weights: Floats) -> tuple[Floats, Floats]:
        factors = weights[:, 1:]
        sums: Floats = block.matrix @ factors
        squares: Floats = block.matrix.power(2) @ (factors * factors)
        scores: Floats = block.matrix @ weights[:, 0] + 0.5 * (sums * sums - squares).sum(axis=1)
        return (scores + weights[block.bias, 0] if block.bias >= 0 else scores), sums

    def _residuals(self, scores: Floats, targets: Floats) -> Floats:
        return (probabilities(scores) if self.is_classifier else scores) - targets

    def _loss(self, scores: Floats, targets: Floats) -> float:
        if self.is_classifier:
            return _log_loss(scores, targets)
        return 0.5 * float(np.sum((scores - targets) ** 2, dtype=np.float64))

    def gradient(self, block: Block, weights: Floats, totals: Totals = NO_TOTALS) -> tuple[Floats, float]:  # noqa: ARG002
        """Return the gradient and the loss, both summed."""
        scores, sums = self._forward(block, weights)
        residuals = self._residuals(scores, block.targets)
        gradient = np.empty_like(weights)
        gradient[:, 0] = block.transposed @ residuals
        if block.bias >= 0:
            gradient[block.bias, 0] = residuals.sum()
        squares = block.transposed.power(2) @ residuals
        factors = weights[:, 1:]
        gradient[:, 1:] = block.transposed @ (residuals[:, None] * sums) - squares[:, None] * factors
        if self.l2:
            gradient[:, 1:] += (self.l2 * block.counts)[:, None] * factors
        if block.bias >= 0:
            gradient[block.bias, 1:] = 0
        return gradient, self._loss(scores, block.targets)

    def loss(self, block: Block, weights: Floats, totals: Totals = NO_TOTALS) -> float:  # noqa: ARG002
        """Return the summed loss, without L2."""
        return self._loss(self.scores(block, weights), block.targets)


@dataclass(frozen=True, slots=True)
class MatrixFactorization(SparseModel):
    """Matrix factorisation with biases (Koren et al. 2009): rating = mean + b_user + b_item + p_user . q_item.

    It is the factorisation machine with two entries of value 1 in each row, with half the squared error, and L2 on all
    weights for each rating that touches them.
    """

    factors: int
    mean: float = 0.0
    """Mean rating of the training data."""
    l2: float = 0.0

    @property
    def width(self) -> int:
        """Number of weights of a row."""
        return 1 + self.factors

    def scores(self, block: Block, weights: Floats) -> Floats:
        """Return the predicted rating of each row."""
        first, second = block.matrix.indices.reshape(-1, 2).T
        products = np.einsum("nk,nk->n", weights[first, 1:], weights[second, 1:])
        scores: Floats = weights[first, 0] + weights[second, 0] + products + np.float32(self.mean)
        return scores

    def gradient(self, block: Block, weights: Floats, totals: Totals = NO_TOTALS) -> tuple[Floats, float]:  # noqa: ARG002
        """Return the gradient and half the squared error, both summed."""
        residuals = self.scores(block, weights) - block.targets
        first, second = block.matrix.indices.reshape(-1, 2).T
        # Symmetric matrix of residuals: each row of weights receives the residual times the factors of the other row.
        places = len(weights)
        pairs = sparse.coo_array(
            (np.tile(residuals, 2), (np.append(first, second), np.append(second, first))), (places, places)
        ).tocsr()
        gradient = np.empty_like(weights)
        gradient[:, 0] = pairs.sum(axis=1)
        gradient[:, 1:] = pairs @ weights[:, 1:]
        if self.l2:
            gradient += (self.l2 * block.counts)[:, None] * weights
        return gradient, 0.5 * float(np.sum(residuals**2, dtype=np.float64))

    def loss(self, block: Block, weights: Floats, totals: Totals = NO_TOTALS) -> float:  # noqa: ARG002
        """Return half the squared error, summed, without L2."""
        return 0.5 * float(np.sum((self.scores(block, weights) - block.targets) ** 2, dtype=np.float64))
