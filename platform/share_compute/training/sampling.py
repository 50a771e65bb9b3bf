"""Text that a model makes while it is trained: always the likeliest token next, without a cache."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import torch
from torch import Tensor


def continue_greedily(
    forward: Callable[[Tensor], Tensor],
    ids: Sequence[int],
    max_tokens: int,
    window: int | None = None,
    ends: Collection[int] = (),
) -> list[int]:
    """Return the ids that follow; one of ``ends`` is the last, and is left out.

    Of equally likely tokens the one with the lowest id follows, so that all who compute the same go on alike.

    Args:
        forward: takes ids ``[1, seq]`` and returns the logits of the last position ``[vocabulary]``; in `eval` mode.
        ids: of the prompt; at least one.
        max_tokens: how many follow at most.
        window: most tokens that the model looks at: older ones fall out; None when all fit.
        ends: ids that end a text.
    """
    row, made = list(ids), list[int]()
    while len(made) < max_tokens:
        seen = row if window is None else row[-window:]
        logits = forward(torch.tensor([seen]))
        token = int(logits.argmax())  # of equal ones the first
        if token in ends:
            break
        row.append(token)
        made.append(token)
    return made
