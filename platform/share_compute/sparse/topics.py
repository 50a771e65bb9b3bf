"""Latent Dirichlet allocation by online variational Bayes (Hoffman, Blei & Bach 2010)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import sparse
from scipy.special import gammaln, psi

from share_compute.sparse.blocks import Block, Floats
from share_compute.sparse.models import SparseModel, Totals

_TINY = np.float64(1e-100)


@dataclass(frozen=True, slots=True)
class TopicModel(SparseModel):
    """Topics of documents. The weights of a word are m = lambda - eta, one number for each topic.

    The gradient of a block is the expected counts of each word in each topic (E step).
    """

    topics: int
    alpha: float
    """Prior of the topics of a document."""
    eta: float
    """Prior of the words of a topic."""
    most_iterations: int = 100
    tolerance: float = 1e-3
    """Mean change of gamma at which the E step ends."""

    @property
    def width(self) -> int:
        """Number of topics."""
        return self.topics

    def scores(self, block: Block, weights: Floats) -> Floats:
        """Return nothing: documents have no target."""
        raise NotImplementedError

    def gradient(self, block: Block, weights: Floats, totals: Totals) -> tuple[Floats, float]:
        """Return the expected counts, ``[words, topics]``, and the negative bound of the documents."""
        beta = self._topics(weights, totals)
        gamma, theta, ratios = self._infer(block, beta)
        counts = beta * (ratios.T @ theta)
        return counts.astype(np.float32), -float(self._bounds(block, gamma, theta, beta).sum())

    def loss(self, block: Block, weights: Floats, totals: Totals) -> float:
        """Return the negative bound of the documents on their log likelihood."""
        return -float(self.bounds(block, weights, totals).sum())

    def _topics(self, weights: Floats, totals: Totals) -> NDArray[np.float64]:
        """Return exp(E[log beta]), ``[words, topics]``."""
        all_words = totals[:-1] + self.eta * totals[-1]
        if not totals[-1]:  # nothing is trained yet, so the words of the block count as the whole vocabulary
            all_words = weights.sum(axis=0, dtype=np.float64) + self.eta * len(weights)
        result: NDArray[np.float64] = np.exp(psi(weights.astype(np.float64) + self.eta) - psi(all_words))
        return result

    def _infer(
        self, block: Block, beta: NDArray[np.float64]
    ) -> tuple[NDArray[np.float64], NDArray[np.float64], sparse.csr_array]:
        """Return gamma, exp(E[log theta]), and counts / normalizers of phi, for all documents at once."""
        counts = block.matrix.astype(np.float64)
        documents = np.repeat(np.arange(block.rows), np.diff(counts.indptr))
        words_beta = beta[counts.indices]
        gamma = np.ones((block.rows, self.topics))
        ratios = counts.copy()
        for _ in range(self.most_iterations):
            theta = _expected(gamma)
            normalizers = np.einsum("nk,nk->n", theta[documents], words_beta) + _TINY
            ratios.data = counts.data / normalizers
            updated = self.alpha + theta * (ratios @ beta)
            change = float(np.abs(updated - gamma).mean(axis=1).max(initial=0))
            gamma = updated
            if change < self.tolerance:
                break
        theta = _expected(gamma)
        ratios.data = counts.data / (np.einsum("nk,nk->n", theta[documents], words_beta) + _TINY)
        return gamma, theta, ratios

    def bounds(self, block: Block, weights: Floats, totals: Totals) -> NDArray[np.float64]:
        """Return the bound of each document on its log likelihood, ``[documents]``.

        If the tolerance is 0, the bound of a document does not depend on other documents in the block.
        """
        beta = self._topics(weights, totals)
        gamma, theta, _ = self._infer(block, beta)
        return self._bounds(block, gamma, theta, beta)

    def _bounds(
        self,
        block: Block,
        gamma: NDArray[np.float64],
        theta: NDArray[np.float64],
        beta: NDArray[np.float64],
    ) -> NDArray[np.float64]:
        """Return E[log p(words, theta) - log q(theta)] of each document."""
        documents = np.repeat(np.arange(block.rows), np.diff(block.matrix.indptr))
        logs = block.matrix.astype(np.float64)
        mixed = np.einsum("nk,nk->n", theta[documents], beta[logs.indices]) + _TINY
        logs.data = logs.data * np.log(mixed)
        bounds: NDArray[np.float64] = logs @ np.ones(logs.shape[1])
        bounds += ((self.alpha - gamma) * np.log(theta + _TINY)).sum(axis=1)
        bounds += (gammaln(gamma) - gammaln(self.alpha)).sum(axis=1)
        bounds += gammaln(self.alpha * self.topics) - gammaln(gamma.sum(axis=1))
        return bounds


def _expected(gamma: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return exp(E[log theta])."""
    result: NDArray[np.float64] = np.exp(psi(gamma) - psi(gamma.sum(axis=1))[:, None])
    return result
