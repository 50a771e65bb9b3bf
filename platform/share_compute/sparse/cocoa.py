"""CoCoA+ for ridge regression and linear support vector machines (Ma et al. 2015, ICML), with sigma' = K and adding.

Primal: P(w) = l2/2 |w|^2 + 1/n sum loss(x_i w). Dual: D(a) = -l2/2 |w(a)|^2 - 1/n sum conj(-a_i), where
w(a) = 1/(l2 n) sum a_i x_i. Each worker keeps the a_i of its rows and improves them by coordinate ascent
(Shalev-Shwartz & Zhang 2013). P - D bounds the error of w, so each round proves its own result.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from share_compute.errors import UserError
from share_compute.sparse.blocks import Block

Vector = NDArray[np.float64]
DualLoss = Literal["squared", "hinge"]


@dataclass(frozen=True, slots=True)
class DualProblem:
    """A problem that all workers solve together."""

    loss: DualLoss
    """Half the squared error (ridge), or hinge loss for targets -1 and 1."""
    l2: float
    rows: int
    """Rows of all workers together, n."""
    workers: int
    """Number of workers K, which is sigma'."""

    @property
    def scale(self) -> float:
        """Factor 1 / (l2 n) between dual variables and weights."""
        return 1 / (self.l2 * self.rows)

    def gap(self, weights: Vector, primal_sum: float, dual_sum: float) -> float:
        """Return P - D from the sums that workers report."""
        return self.l2 * float(weights @ weights) + (primal_sum - dual_sum) / self.rows


@dataclass(frozen=True, slots=True)
class RoundResult:
    """Result of one round of one worker."""

    change: Vector
    """Sum of a_i x_i over the changes of its dual variables, for its places."""
    primal_sum: float
    """Sum of the losses at the weights with which the round began."""
    dual_sum: float
    """Sum of -conj(-a_i) at the dual variables with which the round began."""


class DualWorker:
    """Rows of one worker with their dual variables.

    Args:
        problem: the common problem.
        block: the rows of the worker.

    Raises:
        UserError: a target of the hinge loss is not -1 or 1.
    """

    def __init__(self, problem: DualProblem, block: Block) -> None:
        self._problem, self._block = problem, block
        self._matrix = block.matrix.astype(np.float64)
        self._targets = block.targets.astype(np.float64)
        if problem.loss == "hinge" and not np.isin(self._targets, (-1, 1)).all():
            raise UserError(
                "a target of the hinge loss is neither -1 nor 1", hint="use targets of two classes"
            )
        squares = np.asarray(self._matrix.power(2).sum(axis=1)).ravel()
        if block.bias >= 0:
            squares += 1
        self._norms = squares
        self.duals: Vector = np.zeros(block.rows)
        """Dual variable of each row."""

    def solve(self, weights: Vector, passes: int, draw: np.random.Generator) -> RoundResult:
        """Improve the dual variables of all rows ``passes`` times, each time in a new order.

        Args:
            weights: weights of the places of the block.
            passes: number of passes over the rows.
            draw: source of the orders.
        """
        scores = self._scores(weights)
        primal_sum, dual_sum = self._sums(scores)
        factor = self._problem.scale * self._problem.workers
        before = self.duals.copy()
        # Python lists and slices of arrays are faster here than numpy operations on single numbers.
        view = np.array(weights, np.float64)
        starts = self._matrix.indptr.tolist()
        columns, values = self._matrix.indices, self._matrix.data
        targets, norms, duals = self._targets.tolist(), self._norms.tolist(), self.duals.tolist()
        is_hinge, bias = self._problem.loss == "hinge", self._block.bias
        for _ in range(passes):
            for row in draw.permutation(self._block.rows).tolist():
                start, stop = starts[row], starts[row + 1]
                at, of = columns[start:stop], values[start:stop]
                score = float(of @ view[at])
                if bias >= 0:
                    score += float(view[bias])
                old, target, curvature = duals[row], targets[row], norms[row] * factor
                if not is_hinge:
                    new = old + (target - score - old) / (1 + curvature)
                elif curvature:
                    new = target * min(1.0, max(0.0, old * target + (1 - target * score) / curvature))
                else:
                    new = target
                if new != old:
                    duals[row] = new
                    view[at] += (factor * (new - old)) * of
                    if bias >= 0:
                        view[bias] += factor * (new - old)
        self.duals = np.array(duals)
        moved = self.duals - before
        change: Vector = self._matrix.T @ moved
        if bias >= 0:
            change[bias] = moved.sum()
        return RoundResult(change, primal_sum, dual_sum)

    def measured(self, weights: Vector) -> tuple[float, float]:
        """Return the sums for the gap at these weights."""
        return self._sums(self._scores(weights))

    def _scores(self, weights: Vector) -> Vector:
        scores: Vector = self._matrix @ weights
        return scores + weights[self._block.bias] if self._block.bias >= 0 else scores

    def _sums(self, scores: Vector) -> tuple[float, float]:
        if self._problem.loss == "hinge":
            losses = np.maximum(0, 1 - self._targets * scores)
            return float(losses.sum()), float(self._targets @ self.duals)
        losses = 0.5 * (scores - self._targets) ** 2
        return float(losses.sum()), float(self._targets @ self.duals - 0.5 * self.duals @ self.duals)
