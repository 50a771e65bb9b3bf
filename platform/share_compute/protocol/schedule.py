"""The order in which each member runs forwards and backwards: a 1F1B schedule for stages with several members.

All members take the microbatches in one global order. The rank of a microbatch is its position in this order. A member
of stage ``p`` runs the backward of rank ``r`` after all its forwards up to rank ``r + windows[p]``. Windows decrease
toward the last stage, so that members do not wait for each other in a cycle.

With one member in each stage, this is the one-forward-one-backward schedule of PipeDream-Flush (Narayanan et al. 2021).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Literal


@dataclass(frozen=True, slots=True)
class Action:
    """The forward or the backward of one microbatch; for microbatch 2 they print as ``2F`` and ``2B``."""

    kind: Literal["F", "B"]
    microbatch: int

    def __str__(self) -> str:
        return f"{self.microbatch}{self.kind}"


def even_shares(num_microbatches: int, num_members: int) -> tuple[int, ...]:
    """Divide microbatches evenly among equally fast members of a stage; return the number for each member."""
    base, extra = divmod(num_microbatches, num_members)
    return tuple(base + (1 if member < extra else 0) for member in range(num_members))


def blocks(shares: Sequence[int]) -> list[tuple[int, ...]]:
    """Return the microbatch ids of each member of a stage: contiguous blocks of ``shares[member]`` ids, in order."""
    edges = [0, *accumulate(shares)]
    return [tuple(range(start, stop)) for start, stop in pairwise(edges)]


def global_order(shares: Sequence[int]) -> list[int]:
    """Return microbatch ids in the global order: round robin over the blocks of the widest stage.

    A block of twice the size is visited twice as often.

    Args:
        shares: number of microbatches of each member of the widest stage.
    """
    return round_the_blocks(blocks(shares))


def round_the_blocks(owned: Sequence[Sequence[int]]) -> list[int]:
    """Return microbatch ids in the global order, from the ids of each member of the widest stage."""
    turns = [
        ((2 * place + 1) / (2 * len(block)), member, microbatch)
        for member, block in enumerate(owned)
        for place, microbatch in enumerate(block)
    ]
    return [microbatch for _, _, microbatch in sorted(turns)]


def windows(stage_sizes: Sequence[int]) -> list[int]:
    """Return the window of each stage: the number of positions by which its forwards may run ahead of its backwards.

    Positions refer to the global order.
    """
    ahead = [0] * len(stage_sizes)
    for stage in range(len(stage_sizes) - 2, -1, -1):
        ahead[stage] = ahead[stage + 1] + max(stage_sizes[stage], stage_sizes[stage + 1])
    return ahead


def one_forward_one_backward(shares: Sequence[Sequence[int]], stage: int, member: int) -> list[Action]:
    """Return the actions of one member in the order in which it runs them.

    Args:
        shares: number of microbatches of each member of each stage, in pipeline order; every stage has all
            microbatches.
        stage: index of the member's stage.
        member: index of the member in the stage.
    """
    order = global_order(max(shares, key=len))
    return in_order(
        order, windows([len(members) for members in shares])[stage], blocks(shares[stage])[member]
    )


def in_order(order: Sequence[int], window: int, microbatches: Iterable[int]) -> list[Action]:
    """Return the forward and backward actions of one member's microbatches, in 1F1B order.

    Args:
        order: all microbatch ids in the global order.
        window: window of the member's stage, see `windows`.
        microbatches: ids of the member's microbatches.
    """
    rank = {microbatch: place for place, microbatch in enumerate(order)}
    waiting = sorted(microbatches, key=rank.__getitem__)
    actions: list[Action] = []
    forwarded = 0
    for microbatch in waiting:
        while forwarded < len(waiting) and rank[waiting[forwarded]] <= rank[microbatch] + window:
            actions.append(Action("F", waiting[forwarded]))
            forwarded += 1
        actions.append(Action("B", microbatch))
    return actions
