"""Assigns hosts to groups so that all links between two groups (a block) are similar."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from share_compute.planning.network.clustering import LEAST_BYTES_PER_S, LEAST_LATENCY_S
from share_compute.planning.network.network import Floats

_SWEEPS = 4
"""Maximum number of rounds in which every host may change its group."""
_CHUNK = 1 << 20
"""Approximate maximum number of elements in a temporary array."""

Labels = NDArray[np.int64]


def fit(
    groups: Sequence[Sequence[int]],
    links: Sequence[tuple[float, float, int, int]],
    factor: float,
    least_evidence: int,
    most: int,
) -> dict[int, int]:
    """Return a label for each host: hosts with similar links get the same label.

    In several rounds, each host moves to the group that fits it best. Then each group, the smallest first, is dissolved
    if all its hosts fit into other groups.

    Args:
        groups: groups of hosts with good links between them, the largest group first.
        links: (latency in s, bytes/s, one host, other host), each pair once. An end that is in no group counts as a
            group of one host.
        factor: maximum ratio of latencies, and of bandwidths, of similar links, as a geometric mean.
        least_evidence: minimum number of a host's links that must be comparable with links of a group before the host
            may join it.
        most: maximum number of groups that hosts can join; further groups are ignored.
    """
    blocks = _Blocks(groups, links, factor, least_evidence, most)
    blocks.sweep()
    blocks.dissolve()
    return blocks.labels()


class _Blocks:
    """Labels of all hosts, and the links between hosts."""

    def __init__(
        self,
        groups: Sequence[Sequence[int]],
        links: Sequence[tuple[float, float, int, int]],
        factor: float,
        least_evidence: int,
        most: int,
    ) -> None:
        self._tolerance, self._least_evidence = math.log(factor), least_evidence
        self._hosts = sorted(host for group in groups for host in group)
        place = {host: index for index, host in enumerate(self._hosts)}
        others = sorted({end for link in links for end in link[2:] if end not in place})
        place |= {end: len(self._hosts) + index for index, end in enumerate(others)}
        self._groups = min(len(groups), most)
        self._columns = self._groups + len(others)
        self._label: Labels = np.full(len(place), -1, dtype=np.int64)
        for label, group in enumerate(groups[:most]):
            self._label[[place[host] for host in group]] = label
        self._label[len(self._hosts) :] = self._groups + np.arange(len(others))
        ends = np.array([(place[one], place[other]) for _, _, one, other in links], dtype=np.int64).reshape(
            -1, 2
        )
        values = np.array([link[:2] for link in links], dtype=np.float64).reshape(-1, 2)
        values = np.log(np.maximum(values, (LEAST_LATENCY_S, LEAST_BYTES_PER_S)))
        source, target = np.concatenate([ends, ends[:, ::-1]]).T
        order = np.lexsort((target, source))
        self._source, self._target = source[order], target[order]
        self._value = np.concatenate([values, values])[order]
        """Logarithms of latency and bandwidth ``[2 * links, 2]``."""
        self._first = np.searchsorted(self._source, np.arange(len(place) + 1))
        """Index of each host's first link in the sorted links."""

    def labels(self) -> dict[int, int]:
        """Return the label of each host; a host that fits no group has its own label."""
        found = self._label[: len(self._hosts)].tolist()
        return {
            host: label if label >= 0 else self._columns + index
            for index, (host, label) in enumerate(zip(self._hosts, found, strict=True))
        }

    def sweep(self) -> None:
        """Move hosts to the groups that fit them best, in up to `_SWEEPS` rounds."""
        everybody = np.arange(len(self._hosts))
        for _ in range(_SWEEPS):
            best = self._best(everybody, without=None)
            changed = (best >= 0) & (best != self._label[everybody])
            if not changed.any():
                return
            self._label[everybody[changed]] = best[changed]

    def dissolve(self) -> None:
        """Dissolve each group whose hosts all fit into other groups, the smallest group first."""
        sizes = np.bincount(self._label[self._label >= 0], minlength=self._columns)[: self._groups]
        for label in sorted(range(self._groups), key=lambda label: (sizes[label], -label)):
            members = np.flatnonzero(self._label == label)
            if not len(members):
                continue
            best = self._best(members, without=label)
            if (best >= 0).all():
                self._label[members] = best

    def _best(self, members: Labels, without: int | None) -> Labels:
        """Return the label other than ``without`` that fits each member best, shape ``[members]``; -1 if none fits."""
        means, counts = self._means()
        found = np.full(len(members), -1, dtype=np.int64)
        if not self._groups:
            return found
        step = max(1, _CHUNK // self._groups // max(1, len(self._source) // max(1, len(self._hosts))))
        for begin in range(0, len(members), step):
            some = members[begin : begin + step]
            found[begin : begin + step] = self._best_of(some, means, counts, without)
        return found

    def _best_of(self, some: Labels, means: Floats, counts: Floats, without: int | None) -> Labels:
        spans = [np.arange(self._first[host], self._first[host + 1]) for host in some]
        edges = np.concatenate(spans) if spans else np.empty(0, dtype=np.int64)
        owner = np.repeat(np.arange(len(some)), [len(span) for span in spans])
        toward = self._label[self._target[edges]]
        known = toward >= 0
        edges, owner, toward = edges[known], owner[known], toward[known]
        # Members of a dissolved group may move together, so links between them must match links inside the new group.
        is_own = toward == without
        block, count = means[:, :, toward], counts[:, toward]
        if without is not None and is_own.any():
            inside = np.arange(self._groups)
            seen = counts[:, toward] > 0
            alone = is_own[None, :] & ~seen
            block = np.where(alone[None], means[:, inside, inside][:, :, None], block)
            count = np.where(alone, counts[inside, inside][:, None], count)
        distance = np.abs(block - self._value[edges].T[:, None, :]).max(axis=0)
        has = count > 0
        cell = np.arange(self._groups)[:, None] * len(some) + owner

        def per_member(values: Floats | NDArray[np.bool_]) -> Floats:
            sums = np.bincount(cell.ravel(), values.ravel().astype(np.float64), self._groups * len(some))
            return sums.astype(np.float64).reshape(self._groups, len(some))

        total = per_member(np.where(has, distance, 0.0))
        matching, evidence = per_member(has), per_member(has & ~is_own)
        # One extra link at the limit of similarity gives labels with few comparable links a worse score.
        score = (total + self._tolerance) / (matching + 1)
        fits = (evidence >= self._least_evidence) & (total <= self._tolerance * matching)
        if without is not None:
            fits[without] = False
        score = np.where(fits, score, np.inf)
        best: Labels = score.argmin(axis=0)
        return np.where(np.isfinite(score.min(axis=0)), best, -1)

    def _means(self) -> tuple[Floats, Floats]:
        """Return mean logarithms ``[2, groups, columns]`` and numbers of links ``[groups, columns]`` of all blocks."""
        one, other = self._label[self._source], self._label[self._target]
        known = (one >= 0) & (one < self._groups) & (other >= 0)
        cell = one[known] * self._columns + other[known]
        shape = (self._groups, self._columns)
        counts = np.bincount(cell, minlength=self._groups * self._columns).reshape(shape).astype(float)
        sums = [
            np.bincount(cell, self._value[known, kind], self._groups * self._columns).reshape(shape)
            for kind in range(2)
        ]
        return np.array(sums) / np.maximum(counts, 1), counts
