"""Computes embeddings: each text is a sequence that has a prompt and generates no token."""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeAlias

import numpy as np

from share_compute.errors import Unavailable
from share_compute.inference.scheduler.events import Embedded
from share_compute.inference.scheduler.options import Generation, SamplingOptions
from share_compute_api.openai.engine import Stream

Generate: TypeAlias = Callable[[Sequence[Generation]], Awaitable[Stream]]
"""Function that accepts all of the given sequences or none; see `TextEngine.generate`."""
_NO_ANSWER = SamplingOptions(seed=0, max_tokens=0)


async def embedded(generate: Generate, owner: str, prompts: Sequence[tuple[int, ...]]) -> list[list[float]]:
    """Return one vector for each prompt; if the call fails or is cancelled, cancel its sequences.

    Args:
        generate: the engine's function that starts sequences.
        owner: id of the API key or of the batch that the prompts belong to.
        prompts: token ids, at least one each.

    Raises:
        ShareComputeError: a prompt cannot be turned into a vector.
    """
    generations = [
        Generation(sequence=secrets.randbits(62), owner=owner, prompt=prompt, options=_NO_ANSWER)
        for prompt in prompts
    ]
    stream = await generate(generations)
    vectors: dict[int, list[float]] = {}
    try:
        async for events in stream:
            for event in events:
                if not isinstance(event, Embedded):
                    raise Unavailable("the request was cancelled", hint="send it again")
                vectors[event.sequence] = np.frombuffer(event.vector, "<f4").tolist()
    finally:
        stream.close()
    return [vectors[generation.sequence] for generation in generations]
