"""A rank that fails or stops at its first command, as its argument says."""

from __future__ import annotations

import sys

import torch

from share_compute_actors.group.ranks.processes import RankPlace, follow_member

_TOO_MANY_BYTES = 1 << 60


def _follow(place: RankPlace, fault: str) -> None:
    place.received(1)
    if fault == "torch":
        torch.empty(_TOO_MANY_BYTES, dtype=torch.uint8)
    elif fault == "python":
        bytearray(_TOO_MANY_BYTES)
    elif fault == "none":
        place.received(1)
    raise ValueError("the numbers are odd")


if __name__ == "__main__":
    follow_member(sys.argv[1:], _follow)
