"""Gloo groups whose members are threads of this process, for tests of sums."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from share_compute.protocol.tree import Node, SummationTree
from share_compute_actors.transport.collective.algorithms import GlooLinks

_links: dict[tuple[int, type[GlooLinks]], list[GlooLinks]] = {}


def links(size: int, kind: type[GlooLinks] = GlooLinks) -> list[GlooLinks]:
    """Return the links of each member of a gloo group in this process; each kind has groups of its own."""
    if (size, kind) not in _links:
        _links[size, kind] = [kind(group, rank, size) for rank, group in enumerate(_form(size))]
    return _links[size, kind]


def _form(size: int) -> list[Any]:
    dist: Any = torch.distributed
    store = dist.HashStore()

    def join(rank: int) -> Any:
        options = dist.ProcessGroupGloo._Options()  # noqa: SLF001
        options._timeout = timedelta(seconds=30)  # noqa: SLF001
        options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]  # noqa: SLF001
        return dist.ProcessGroupGloo(store, rank, size, options)

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(join, range(size)))


def values(microbatch: int, length: int) -> Tensor:
    """Return numbers whose sum depends on the order."""
    generator = torch.Generator().manual_seed(microbatch)
    return torch.randn(length, generator=generator) * 10.0 ** (microbatch % 7)


def sum_of(tree: SummationTree, node: Node, length: int) -> Tensor:
    """Return the sum of the microbatches of a node, added by one process in the order of the tree."""
    children = tree.children(node)
    if children is None:
        return values(node.start, length)
    left, right = (sum_of(tree, child, length) for child in children)
    return left + right
