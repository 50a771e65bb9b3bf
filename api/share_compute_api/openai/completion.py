"""One request for text: starts its sequences together, reads them as pieces of text, and cancels them together."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import secrets
from collections.abc import AsyncGenerator, Sequence
from typing import TYPE_CHECKING

from share_compute.errors import ShareComputeError, TooLong, Unavailable, UserError
from share_compute.inference.scheduler.events import Embedded, Finished
from share_compute.inference.scheduler.options import Generation, SamplingOptions
from share_compute.specification.token_options import TokenOptions
from share_compute_api.openai.answers import Usage
from share_compute_api.openai.engine import ModelFacts, Stream, StreamEvent, TextEngine
from share_compute_api.openai.requests import TextRequest
from share_compute_api.openai.tool_use import ToolUse
from share_compute_api.openai.tools.parsing import ToolCallParser
from share_compute_api.openai.writing import AnswerPiece, FullAnswer, Writer

if TYPE_CHECKING:
    from share_compute_api.workers.isolated.vocabulary import Vocabulary

_NOTHING = AnswerPiece()
_log = logging.getLogger(__name__)


class Completion:
    """Generates the sequences of one request. The answers to one prompt have consecutive indexes.

    Call `begin` once, then `pieces` or `collected`. After `begin`, call `close` in every case.

    Args:
        request: the client's request; any JSON schema in it must have been checked.
        prompts: the request's prompts as token ids.
        facts: facts about the model.
        vocabulary: the model's vocabulary.
        owner: id of the API key or of the batch that the request belongs to.
        tools: tools that the model may call; None if it may call none.

    Raises:
        TooLong: a prompt leaves too little of the model's context window for its answer.
        UserError: a token id is not in the vocabulary, or ``min_tokens`` is more than an answer may have.
    """

    def __init__(
        self,
        request: TextRequest,
        prompts: Sequence[tuple[int, ...]],
        facts: ModelFacts,
        vocabulary: Vocabulary,
        owner: str,
        tools: ToolUse | None = None,
    ) -> None:
        marks = {stop: vocabulary.special_id(stop) for stop in request.stop}
        ends = tuple(id_ for id_ in marks.values() if id_ is not None)
        if not request.ignore_eos:
            ends = (*vocabulary.end_ids, *ends)
        ends = tuple(dict.fromkeys((*ends, *request.stop_token_ids)))
        require_known_tokens(request, vocabulary)
        stops = [stop for stop, id_ in marks.items() if id_ is None]
        seed = secrets.randbits(63) if request.seed is None else request.seed
        self._generations: list[Generation] = []
        self._writers: list[Writer] = []
        self._parsers: list[ToolCallParser] = []
        """Parser of each sequence's tool calls; empty without tools."""
        grammar = None if tools is None else tools.grammar
        for prompt in prompts:
            most = _most_tokens(request, len(prompt), facts.window_tokens)
            require_min_tokens_fit(request, most)
            for _ in range(request.choices):
                options = _options(request, _seed(seed, len(self._generations)), most, ends, grammar)
                self._generations.append(
                    Generation(sequence=secrets.randbits(62), owner=owner, prompt=prompt, options=options)
                )
                self._writers.append(
                    Writer(
                        vocabulary if request.skip_special_tokens is not False else vocabulary.with_special,
                        prompt,
                        end_ids=ends,
                        stops=stops,
                        min_tokens=0 if options.is_constrained else options.min_tokens,
                        keeps_tokens=options.logprobs is not None,
                        shown=None if tools is None else tools.shown,
                    )
                )
                if tools is not None:
                    self._parsers.append(tools.parser(len(self._parsers)))
        self._choices = request.choices
        self._stream: Stream | None = None
        self._open: dict[int, int] = {}
        """Sequences that have not ended: sequence number in the engine -> index in this request."""
        self.prompt_tokens = sum(map(len, prompts))
        """Number of tokens in all prompts, each prompt counted once."""

    @property
    def num_sequences(self) -> int:
        """Number of sequences, which is also the number of answers."""
        return len(self._writers)

    @property
    def most_tokens(self) -> int:
        """Maximum number of tokens that all answers together may have."""
        return sum(generation.options.max_tokens for generation in self._generations)

    @property
    def usage(self) -> Usage:
        """Number of tokens of the request so far."""
        return Usage.of(self.prompt_tokens, self.completion_tokens, self.cached_tokens)

    @property
    def completion_tokens(self) -> int:
        """Number of tokens generated so far in all sequences."""
        return sum(writer.num_tokens for writer in self._writers)

    @property
    def cached_tokens(self) -> int:
        """Number of prompt tokens from the prefix cache, summed over the first sequence of each prompt."""
        return sum(writer.cached_tokens for writer in self._writers[:: self._choices])

    async def begin(self, engine: TextEngine) -> None:
        """Submit all sequences to the engine, which accepts all of them or none.

        Raises:
            ShareComputeError: any error of the engine.
        """
        self._stream = await engine.generate(self._generations)
        self._open = {generation.sequence: place for place, generation in enumerate(self._generations)}

    async def pieces(
        self, quiet_s: float | None = None
    ) -> AsyncGenerator[list[tuple[int, AnswerPiece]], None]:
        """Yield new pieces as they arrive, in lists of (sequence index, piece); end after the last sequence.

        Args:
            quiet_s: seconds without a piece after which an empty list is yielded; None to yield no empty lists.

        Raises:
            ShareComputeError: a sequence cannot continue; the error is raised after all earlier pieces were yielded.
        """
        assert self._stream is not None
        while self._open:
            batch: list[tuple[int, AnswerPiece]] = []
            failure: ShareComputeError | None = None
            limit = asyncio.timeout(quiet_s)
            try:
                async with limit:
                    events = await anext(self._stream)
                for event in events:
                    self._read(event, batch)
            except ShareComputeError as error:
                failure = error
            except Exception:  # noqa: BLE001 - it is logged, and the reader gets an error
                if not limit.expired():
                    _log.exception("an engine failed")
                    mistake = "internal server error"
                    failure = ShareComputeError(mistake, hint="look into its log, and report it")
            if batch or limit.expired():
                yield batch
            if failure is not None:
                raise failure

    def _read(self, event: StreamEvent, batch: list[tuple[int, AnswerPiece]]) -> None:
        """Append the piece of an event to ``batch``, unless the piece is empty or the sequence's text has ended."""
        place = self._open.get(event.sequence)
        if place is None:
            return  # the text had already ended, for example at a stop string
        assert not isinstance(event, Embedded), "a text that became a vector has no tokens"
        if isinstance(event, Finished) and event.reason == "cancelled":
            # The client did not cancel the sequence, so the client gets an error.
            raise Unavailable("the request was cancelled", hint="ask again")
        piece = self._writers[place].read(event)
        if self._parsers:
            piece = self._parsers[place].read(piece)
        if piece.finish is not None:
            del self._open[event.sequence]
            assert self._stream is not None
            self._stream.complete(event.sequence)
        if piece != _NOTHING:
            batch.append((place, piece))

    async def collected(self) -> list[FullAnswer]:
        """Wait until all sequences have ended, and return the whole answer of each.

        Raises:
            ShareComputeError: a sequence cannot continue; ``details["partial"]`` has the text generated so far, if any.
        """
        answers = [FullAnswer() for _ in self._writers]
        try:
            async for batch in self.pieces():
                for index, piece in batch:
                    answers[index].add(piece)
        except ShareComputeError as failure:
            if any(answer.text for answer in answers):
                failure.details = {**failure.details, "partial": [answer.text for answer in answers]}
            raise
        return answers

    def close(self) -> None:
        """Cancel the sequences that are still being generated."""
        if self._stream is not None:
            self._stream.close()


def _most_tokens(request: TextRequest, prompt_tokens: int, window_tokens: int) -> int:
    left_tokens = window_tokens - prompt_tokens
    wanted = request.most_tokens
    if wanted is None:
        wanted = left_tokens if request.default_tokens is None else min(left_tokens, request.default_tokens)
    if left_tokens < max(1, wanted):
        raise TooLong(
            f"the prompt has {prompt_tokens} tokens and asks for {max(1, wanted)} more, "
            f"the model's window is {window_tokens}",
            hint="shorten the prompt, or ask for fewer tokens",
            details={"window_tokens": window_tokens},
        )
    return wanted


def require_known_tokens(options: TokenOptions, vocabulary: Vocabulary) -> None:
    """Raise UserError if ``stop_token_ids`` or ``logit_bias`` has ids that the vocabulary lacks."""
    vocabulary.require_known(options.stop_token_ids, "stop_token_ids")
    vocabulary.require_known([token for token, _ in options.logit_bias], "logit_bias")


def require_min_tokens_fit(options: TokenOptions, most_tokens: int) -> None:
    """Raise UserError if ``min_tokens`` is more than ``most_tokens``, the maximum number of an answer's tokens."""
    if (options.min_tokens or 0) > most_tokens:
        raise UserError(
            f"min_tokens is {options.min_tokens}, but an answer has at most {most_tokens} tokens",
            hint="lower min_tokens, or raise max_tokens",
            details={"param": "min_tokens", "code": "invalid_value"},
        )


def _options(
    request: TextRequest, seed: int, most_tokens: int, ends: tuple[int, ...], grammar: str | None
) -> SamplingOptions:
    given = {name: value for name in _SAME_NAME if (value := getattr(request, name)) is not None}
    return SamplingOptions(
        **given,
        top_k=max(0, request.top_k or 0),
        seed=seed,
        max_tokens=most_tokens,
        stop_token_ids=ends,
        logprobs=request.top_tokens,
        json_schema=None if request.response_format is None else request.response_format.grammar,
        grammar=grammar,
    )


_SAME_NAME = (
    "temperature",
    "top_p",
    "min_p",
    "repetition_penalty",
    "frequency_penalty",
    "presence_penalty",
    "logit_bias",
    "min_tokens",
)


def _seed(seed: int, index: int) -> int:
    """Return the seed of the sequence with this index in a request; the first sequence uses the request's own seed."""
    if index == 0:
        return seed
    return int.from_bytes(hashlib.sha256(f"{seed} {index}".encode()).digest()[:8], "little") >> 1
