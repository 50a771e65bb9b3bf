"""Text generation while a model is trained: greedy decoding, without a KV cache."""

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
    """Return the ids that greedy decoding adds. It ends at one of ``ends``, which is left out.

    If several tokens are equally likely, the one with the lowest id follows, so that all processes that compute the
    same continue alike.

    Args:
        forward: function from ids ``[1, seq]`` to the logits of the last position ``[vocabulary]``; in `eval` mode.
        ids: ids of the prompt; at least one.
        max_tokens: largest number of ids that are added.
        window: largest number of tokens that the model reads; older ones are left out; None if all fit.
        ends: ids that end a text.
    """
    row, made = list(ids), list[int]()
    while len(made) < max_tokens:
        seen = row if window is None else row[-window:]
        logits = forward(torch.tensor([seen]))
        token = int(logits.argmax())  # the first of equal ones
        if token in ends:
            break
        row.append(token)
        made.append(token)
    return made
