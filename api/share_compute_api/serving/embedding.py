"""Turns texts into vectors: each text is a sequence with a prompt and no answer."""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeAlias

import numpy as np

from share_compute.serving.options import Generation, SamplingOptions
from share_compute_api.serving.mailboxes import Mailbox

Begin: TypeAlias = Callable[[Sequence[Generation]], Awaitable[Sequence[Mailbox]]]
"""Function that accepts sequences, all or none."""
_NO_ANSWER = SamplingOptions(seed=0, max_tokens=0)


async def embedded(begin: Begin, owner: str, prompts: Sequence[tuple[int, ...]]) -> list[list[float]]:
    """Return one vector for each prompt; if cancelled, leave no sequence behind.

    Args:
        begin: the engine's function that accepts sequences.
        owner: id of the API key that the prompts belong to.
        prompts: token ids, at least one each.

    Raises:
        ShareComputeError: a prompt cannot be turned into a vector.
    """
    boxes = await begin(
        [
            Generation(sequence=secrets.randbits(62), owner=owner, prompt=prompt, options=_NO_ANSWER)
            for prompt in prompts
        ]
    )
    try:
        return [np.frombuffer(await box.vector(), "<f4").tolist() for box in boxes]
    finally:
        for box in boxes:
            await box.aclose()
