"""Text generation by greedy decoding, without a KV cache."""

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
    """Return the ids that greedy decoding adds to a prompt, up to the first of ``ends``, which is left out.

    Among equally likely tokens, the one with the lowest id is chosen.

    Args:
        forward: function from ids ``[1, seq]`` to the logits of the last position ``[vocabulary]``, in `eval` mode.
        ids: ids of the prompt; at least one.
        max_tokens: maximum number of ids to add.
        window: maximum number of tokens that the model reads; earlier tokens are left out. None for no limit.
        ends: ids that end a text.
    """
    row, made = list(ids), list[int]()
    while len(made) < max_tokens:
        seen = row if window is None else row[-window:]
        logits = forward(torch.tensor([seen]))
        token = int(logits.argmax())  # argmax returns the first of equal logits
        if token in ends:
            break
        row.append(token)
        made.append(token)
    return made
