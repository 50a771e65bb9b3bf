"""Update rules: the state that a server keeps for each row, and how it applies gradients.

A rule is a pure function of arrays. All rules are lazy: rows that no push touches do not change. Decay follows from
counters of the range (examples, or a common factor).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np

from share_compute.sparse.blocks import Floats
from share_compute.sparse.keys import Places, uniform


@dataclass(slots=True)
class RangeCounters:
    """Numbers that belong to a range as a whole."""

    examples: int = 0
    """Rows of data in all updates that were applied."""
    updates: int = 0
    """Number of updates."""
    factor: float = 1.0
    """Common factor of all rows, for rules that shrink all of them."""
    folded: float = 1.0
    """Product of earlier factors, by which the rows were multiplied."""
    scale: float = 1.0
    """Factor of the update that is being applied."""


class UpdateRule(ABC):
    """Defines the state that a server keeps for each row, and how it applies updates."""

    @property
    @abstractmethod
    def width(self) -> int:
        """Number of weights of a row."""

    @property
    @abstractmethod
    def state_width(self) -> int:
        """Number of scalars that are kept for a row."""

    @property
    def has_totals(self) -> bool:
        """Whether workers need the sum of all rows."""
        return False

    @property
    def is_by_column(self) -> bool:
        """Whether the values of one column are contiguous in memory, for rules that compute column by column."""
        return False

    @abstractmethod
    def initial(self, places: Places, counters: RangeCounters) -> Floats:
        """Return the state of rows that were never touched, ``[places, state_width]``."""

    @abstractmethod
    def weights(self, state: Floats, bias: slice, counters: RangeCounters) -> Floats:
        """Return the weights of rows, ``[rows, width]``.

        Args:
            state: state of the rows, ``[rows, state_width]``.
            bias: slice of the bias among the rows, see `bias_rows`.
            counters: numbers of the range.
        """

    def begin(self, counters: RangeCounters, examples: int) -> None:
        """Prepare the counters for an update, before its rows are changed."""

    @abstractmethod
    def changed(self, state: Floats, update: Floats, bias: slice, counters: RangeCounters) -> Floats:
        """Return the state of rows after an update ``[rows, width]``."""


@dataclass(frozen=True, slots=True)
class FollowTheLeader(UpdateRule):
    """FTRL-Proximal for each weight (McMahan et al. 2013, algorithm 1).

    State: z and n. L1 and L2 apply to each example, so their strengths are multiplied by the number of examples.
    """

    learning_rate: float = 0.1
    beta: float = 1.0
    l1: float = 0.0
    l2: float = 0.0

    @property
    def width(self) -> int:
        """Rows have one weight."""
        return 1

    @property
    def state_width(self) -> int:
        """Two numbers."""
        return 2

    def initial(self, places: Places, counters: RangeCounters) -> Floats:  # noqa: ARG002 -- rows begin at zero
        """Return zeros."""
        return np.zeros((len(places), self.state_width), np.float32)

    @property
    def is_by_column(self) -> bool:
        """All operations are on z or n as a whole."""
        return True

    def weights(self, state: Floats, bias: slice, counters: RangeCounters) -> Floats:
        """Return the minimizer of the sums: sparse if L1 is used."""
        z, n = state[:, : self.width], state[:, self.width :]
        weights = self._minimizer(z, np.sqrt(n), bias, counters)
        return np.negative(weights, out=weights)

    def _minimizer(self, z: Floats, roots: Floats, bias: slice, counters: RangeCounters) -> Floats:
        """Return the weights from z and the square roots of n, with the opposite sign."""
        l1, l2 = np.float32(self.l1 * counters.examples), np.float32(self.l2 * counters.examples)
        rate = roots + np.float32(self.beta)
        rate *= np.float32(1 / self.learning_rate)
        rest = z
        if l1:
            rest = np.sign(z) * np.maximum(np.abs(z) - l1, np.float32(0))
            rest[bias] = z[bias]
        if l2:
            bias_rate = rate[bias].copy()
            rate += l2
            rate[bias] = bias_rate
        weights: Floats = np.divide(rest, rate, out=rate)
        return weights

    def changed(self, state: Floats, update: Floats, bias: slice, counters: RangeCounters) -> Floats:
        """Return z + g - sigma w and n + g^2."""
        z, n = state[:, : self.width], state[:, self.width :]
        roots = np.sqrt(n)
        weights = self._minimizer(z, roots, bias, counters)
        result = np.empty_like(state)
        grown = result[:, self.width :]
        np.multiply(update, update, out=grown)
        grown += n
        sigma = np.sqrt(grown)
        sigma -= roots
        sigma *= np.float32(1 / self.learning_rate)
        sigma *= weights
        changed = result[:, : self.width]
        np.add(z, update, out=changed)
        changed += sigma
        return result


@dataclass(frozen=True, slots=True)
class AdaGradRows(UpdateRule):
    """AdaGrad (Duchi et al. 2011) with one accumulator for each row: the sum of its gradients' mean squares.

    State: the weights, and the sum. L2 is part of the gradient, for each example that touches a row.
    """

    columns: int
    learning_rate: float = 0.1
    seed: int = 0
    scale: float = 0.01
    """Standard deviation of the first values of all columns but the first, which begins at zero."""

    @property
    def width(self) -> int:
        """Number of weights of a row."""
        return self.columns

    @property
    def state_width(self) -> int:
        """The weights and one number."""
        return self.width + 1

    def initial(self, places: Places, counters: RangeCounters) -> Floats:  # noqa: ARG002
        """Return initial values that depend only on seed and place."""
        state = np.zeros((len(places), self.state_width), np.float32)
        if self.width > 1:
            spread = self.scale * np.sqrt(12)
            state[:, 1 : self.width] = (uniform(places, self.seed, self.width - 1) - 0.5) * spread
        return state

    def weights(self, state: Floats, bias: slice, counters: RangeCounters) -> Floats:  # noqa: ARG002
        """Return the weights."""
        return state[:, : self.width].copy()

    def changed(
        self,
        state: Floats,
        update: Floats,
        bias: slice,  # noqa: ARG002
        counters: RangeCounters,  # noqa: ARG002
    ) -> Floats:
        """Return the rows after one step."""
        result = state.copy()
        result[:, -1] += np.mean(update * update, axis=1)
        step = np.float32(self.learning_rate) / (np.sqrt(result[:, -1:]) + np.float32(1e-8))
        result[:, :-1] -= step * update
        return result


@dataclass(frozen=True, slots=True)
class FactorizationRule(UpdateRule):
    """FTRL-Proximal for the linear weight of a row, and AdaGrad for its factors (Li et al. 2016, DiFacto)."""

    linear: FollowTheLeader
    factors: AdaGradRows
    """Its first column is unused."""

    @property
    def width(self) -> int:
        """Number of weights of a row."""
        return self.factors.width

    @property
    def state_width(self) -> int:
        """Both states side by side."""
        return 2 + self.factors.state_width

    def initial(self, places: Places, counters: RangeCounters) -> Floats:
        """Return both first states."""
        return np.hstack([self.linear.initial(places, counters), self.factors.initial(places, counters)])

    def weights(self, state: Floats, bias: slice, counters: RangeCounters) -> Floats:
        """Return the linear weight and the factors."""
        linear = self.linear.weights(state[:, :2], bias, counters)
        return np.hstack([linear, state[:, 3:-1]])

    def changed(self, state: Floats, update: Floats, bias: slice, counters: RangeCounters) -> Floats:
        """Return both states after an update."""
        linear = self.linear.changed(state[:, :2], update[:, :1], bias, counters)
        only_factors = update.copy()
        only_factors[:, 0] = 0
        return np.hstack([linear, self.factors.changed(state[:, 2:], only_factors, bias, counters)])


@dataclass(frozen=True, slots=True)
class TopicRule(UpdateRule):
    """M step of online variational Bayes for LDA (Hoffman et al. 2010): lambda of each word, without the prior eta.

    With m = lambda - eta, an update is m = (1 - rho) m + rho D / S s, where s are the expected counts in S documents.
    All rows shrink by the same factor. So the range keeps the product of all (1 - rho), and stores each row as m
    divided by it.
    """

    topics: int
    documents: int
    """Documents of the data, D."""
    seed: int = 0
    decay: float = 0.7
    offset: float = 10.0

    def __post_init__(self) -> None:
        if self.offset <= 1:
            raise ValueError("the offset must be above 1, or the first update would forget all rows")

    @property
    def width(self) -> int:
        """Number of topics."""
        return self.topics

    @property
    def has_totals(self) -> bool:
        """Topics are distributions over all words."""
        return True

    @property
    def state_width(self) -> int:
        """One number for each topic."""
        return self.width

    def initial(self, places: Places, counters: RangeCounters) -> Floats:
        """Return values near 1, as if the rows had existed from the beginning."""
        numbers = (0.7 + 0.6 * uniform(places, self.seed, self.width)) * counters.folded
        return numbers.astype(np.float32)

    def weights(self, state: Floats, bias: slice, counters: RangeCounters) -> Floats:  # noqa: ARG002
        """Return m."""
        return state * np.float32(counters.factor)

    def begin(self, counters: RangeCounters, examples: int) -> None:
        """Shrink all rows by 1 - rho."""
        rho = (self.offset + counters.updates) ** -self.decay
        counters.factor *= 1 - rho
        counters.scale = rho * self.documents / max(1, examples)

    def changed(self, state: Floats, update: Floats, bias: slice, counters: RangeCounters) -> Floats:  # noqa: ARG002
        """Return the rows after an update with the expected counts of its documents."""
        return state + update * np.float32(counters.scale / counters.factor)
