"""Turns a request for text into sequences for an engine, and a writer for each."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from share_compute.errors import TooLong
from share_compute.serving.options import Generation, SamplingOptions
from share_compute_api.serving.engine import ModelFacts
from share_compute_api.serving.requests import TextRequest
from share_compute_api.serving.writing import Writer

if TYPE_CHECKING:
    from share_compute_api.serving.vocabulary import Vocabulary


@dataclass(frozen=True, slots=True)
class Sequences:
    """The sequences of one request: all answers to its first prompt, then to its second, ..."""

    generations: tuple[Generation, ...]
    writers: tuple[Writer, ...]
    prompt_tokens: int
    """Number of tokens in all prompts, each prompt counted once."""
    choices: int
    """Number of answers to each prompt."""

    @property
    def completion_tokens(self) -> int:
        """Tokens generated so far."""
        return sum(writer.num_tokens for writer in self.writers)

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that were copied from other sequences when each prompt's first answer began."""
        return sum(writer.cached_tokens for writer in self.writers[:: self.choices])


def sequences(
    request: TextRequest,
    prompts: Sequence[tuple[int, ...]],
    facts: ModelFacts,
    vocabulary: Vocabulary,
    owner: str,
) -> Sequences:
    """Return the sequences of a request.

    Args:
        request: the client's request; its JSON schema was checked.
        prompts: its prompts as token ids.
        facts: facts about the model.
        vocabulary: the model's vocabulary.
        owner: id of the client's API key.

    Raises:
        TooLong: a prompt leaves too little of the window for its answer.
    """
    marks = {stop: vocabulary.special_id(stop) for stop in request.stop}
    ends = tuple(id_ for id_ in marks.values() if id_ is not None)
    if not request.ignore_eos:
        ends = (*vocabulary.end_ids, *ends)
    stops = [stop for stop, id_ in marks.items() if id_ is None]
    seed = secrets.randbits(63) if request.seed is None else request.seed
    generations: list[Generation] = []
    writers: list[Writer] = []
    for prompt in prompts:
        most = _most_tokens(request, len(prompt), facts.window_tokens)
        for _ in range(request.choices):
            options = _options(request, _seed(seed, len(generations)), most, ends)
            generations.append(
                Generation(sequence=secrets.randbits(62), owner=owner, prompt=prompt, options=options)
            )
            writers.append(
                Writer(
                    vocabulary,
                    prompt,
                    end_ids=ends,
                    stops=stops,
                    keeps_tokens=options.logprobs is not None,
                )
            )
    return Sequences(
        tuple(generations), tuple(writers), sum(len(prompt) for prompt in prompts), request.choices
    )


def _most_tokens(request: TextRequest, prompt_tokens: int, window_tokens: int) -> int:
    room = window_tokens - prompt_tokens
    wanted = request.most_tokens
    if wanted is None:
        wanted = room if request.default_tokens is None else min(room, request.default_tokens)
    if room < max(1, wanted):
        raise TooLong(
            f"the prompt has {prompt_tokens} tokens and asks for {max(1, wanted)} more, "
            f"the model's window is {window_tokens}",
            hint="shorten the prompt, or ask for fewer tokens",
            details={"window_tokens": window_tokens},
        )
    return wanted


def _options(request: TextRequest, seed: int, most_tokens: int, ends: tuple[int, ...]) -> SamplingOptions:
    given = {name: value for name in _SAME_NAME if (value := getattr(request, name)) is not None}
    return SamplingOptions(
        **given,
        top_k=max(0, request.top_k or 0),
        seed=seed,
        max_tokens=most_tokens,
        stop_token_ids=ends,
        logprobs=request.top_tokens,
        json_schema=None if request.response_format is None else request.response_format.grammar,
    )


_SAME_NAME = (
    "temperature",
    "top_p",
    "min_p",
    "repetition_penalty",
    "frequency_penalty",
    "presence_penalty",
)


def _seed(seed: int, index: int) -> int:
    """Return the seed of one of a request's sequences; the first sequence has the request's own."""
    if index == 0:
        return seed
    return int.from_bytes(hashlib.sha256(f"{seed} {index}".encode()).digest()[:8], "little") >> 1
