"""Stages that execute steps as real ones do, and refuse every step that real ones could not execute.

Their model is a hash: the next token depends on all tokens before it, on the seed and on the position, so a wrong,
lost, doubled or swapped token changes all that follow. Keys and values of a position are the hash of all tokens up to
it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from share_compute.inference.scheduler.engine_steps import (
    Chunk,
    EngineStep,
    Opening,
    SampledToken,
    StepResult,
)
from share_compute.inference.scheduler.limits import SchedulerLimits
from share_compute.inference.scheduler.options import Generation, SamplingOptions

VOCABULARY = 40
_BEGINNING = 17

Cell = tuple[int, int]
"""(hash of all tokens before a position, hash of those up to it): the tensor that stages send to each other."""


def mixed(*values: int) -> int:
    return hash(values) & 0x7FFF_FFFF_FFFF


def digest(tokens: Iterable[int]) -> int:
    value = _BEGINNING
    for token in tokens:
        value = mixed(value, token)
    return value


def drawn(context: int, position: int, options: SamplingOptions) -> tuple[int, Literal["stop"] | None]:
    """Return the token at a position, and whether it ends the sequence."""
    token = mixed(context, position, options.seed) % VOCABULARY
    return token, "stop" if token in options.stop_token_ids else None


def reference(generation: Generation, longest_tokens: int) -> tuple[list[int], str]:
    """Return all tokens that a sequence must get if it is not cancelled, and the reason for its end."""
    tokens = [*generation.prompt]
    most = min(generation.options.max_tokens, longest_tokens - len(tokens))
    context = digest(tokens)
    for _ in range(most):
        token, finish = drawn(context, len(tokens), generation.options)
        tokens.append(token)
        context = mixed(context, token)
        if finish:
            return tokens[len(generation.prompt) :], finish
    return tokens[len(generation.prompt) :], "length"


@dataclass
class KVSlot:
    opening: Opening
    capacity_tokens: int
    cells: list[int]
    history: int = 0
    """Digest of the sampler's history: the tokens that it was given, and those that it has drawn since."""
    known: int = 0
    """Number of tokens in the history."""


@dataclass
class Stage:
    """One stage: its slots, and the steps that were sent to it and not executed yet."""

    limits: SchedulerLimits
    inbox: deque[EngineStep] = field(default_factory=deque)
    slots: dict[int, KVSlot] = field(default_factory=dict)
    most_kv_tokens: int = 0

    def make_slots(self, step: EngineStep) -> None:
        for sequence in step.closes:
            del self.slots[sequence]
        for growth in step.grows:
            assert self.used + growth.capacity_tokens <= self.limits.kv_tokens, (
                "it is there twice for a moment"
            )
            assert growth.capacity_tokens > self.slots[growth.sequence].capacity_tokens
            self.slots[growth.sequence].capacity_tokens = growth.capacity_tokens
        for opening in step.opens:
            assert opening.sequence not in self.slots
            assert opening.copy_from not in {other.sequence for other in step.opens}
            assert opening.copy_tokens < len(opening.history) <= opening.capacity_tokens
            cells: list[int] = []
            if opening.copy_from is not None:
                there = self.slots[opening.copy_from].cells
                assert 16 <= opening.copy_tokens <= len(there)
                cells = there[: opening.copy_tokens]
            self.slots[opening.sequence] = KVSlot(
                opening, opening.capacity_tokens, cells, digest(opening.history), len(opening.history)
            )
        assert self.used <= self.limits.kv_tokens
        self.most_kv_tokens = max(self.most_kv_tokens, self.used)

    @property
    def used(self) -> int:
        return sum(slot.capacity_tokens for slot in self.slots.values())

    def begin(self, chunk: Chunk, tokens: Sequence[int]) -> list[Cell]:
        """Return the first stage's output for a chunk of tokens."""
        cells = self.slots[chunk.sequence].cells
        made = []
        for token in tokens:
            before = cells[chunk.start + len(made) - 1] if chunk.start + len(made) else _BEGINNING
            made.append((before, mixed(before, token)))
            self._write(chunk, made[-1], len(made) - 1)
        return made

    def go_on(self, chunk: Chunk, arrived: list[Cell]) -> list[Cell]:
        """Return a later stage's output for the cells that arrived from the stage before it."""
        for place, cell in enumerate(arrived):
            self._write(chunk, cell, place)
        return arrived

    def sample(self, chunk: Chunk, last: Cell) -> SampledToken:
        slot = self.slots[chunk.sequence]
        position = chunk.start + chunk.count
        assert (slot.history, slot.known) == (last[1], position), "the sampler knows other tokens"
        token, finish = drawn(last[1], position, slot.opening.options)
        slot.history, slot.known = mixed(slot.history, token), position + 1
        return SampledToken(chunk.sequence, position, token, finish=finish)

    def _write(self, chunk: Chunk, cell: Cell, place: int) -> None:
        slot = self.slots[chunk.sequence]
        position = chunk.start + place
        assert position == len(slot.cells), "a gap, or written twice"
        assert position < slot.capacity_tokens, "the slot is full"
        assert cell[0] == (slot.cells[-1] if slot.cells else _BEGINNING), "keys and values of other tokens"
        slot.cells.append(cell[1])


class Row:
    """The stages of one epoch in a row, with the messages between them."""

    def __init__(self, limits: SchedulerLimits) -> None:
        self.limits = limits
        self.stages = [Stage(limits) for _ in range(limits.stages)]
        self.hidden: list[deque[dict[int, list[Cell]]]] = [deque() for _ in self.stages]
        """For each stage, the hidden states of the steps that it has not computed yet, by sequence."""
        self.fed_back: deque[SampledToken] = deque()
        """Sampled tokens that the last stage sent and the first stage has not received."""
        self.mailbox: dict[int, deque[SampledToken]] = {}
        """Sampled tokens that the first stage received and has not used yet, by sequence."""
        self._next_id: int | None = None

    def send(self, step: EngineStep) -> None:
        """Queue a step at all stages."""
        assert self._next_id in (None, step.id)
        self._next_id = step.id + 1
        sequences = [chunk.sequence for chunk in step.chunks]
        assert len(set(sequences)) == len(sequences)
        assert step.num_tokens <= self.limits.step_tokens
        assert 0 <= step.batch < self.limits.stages
        for stage in self.stages:
            stage.inbox.append(step)

    def ready(self) -> list[int]:
        """Return the stages that can execute their next step."""
        return [place for place, stage in enumerate(self.stages) if stage.inbox and self._has_inputs(place)]

    def _has_inputs(self, place: int) -> bool:
        if place:
            return bool(self.hidden[place])
        return all(
            any(sampled.position == chunk.start for sampled in self.mailbox.get(chunk.sequence, ()))
            for chunk in self.stages[0].inbox[0].chunks
            if chunk.tokens is None
        )

    def deliver_token(self) -> None:
        sampled = self.fed_back.popleft()
        self.mailbox.setdefault(sampled.sequence, deque()).append(sampled)

    def execute(self, place: int) -> StepResult | None:
        """Execute the next step of a stage; return the last stage's result for the server."""
        stage = self.stages[place]
        step = stage.inbox.popleft()
        stage.make_slots(step)
        if place == 0:
            for sequence in step.closes:
                self.mailbox.pop(sequence, None)
            made = {chunk.sequence: stage.begin(chunk, self._inputs(chunk)) for chunk in step.chunks}
        else:
            arrived = self.hidden[place].popleft()
            made = {chunk.sequence: stage.go_on(chunk, arrived[chunk.sequence]) for chunk in step.chunks}
        if place + 1 < len(self.stages):
            self.hidden[place + 1].append(made)
            return None
        sampled = tuple(
            stage.sample(chunk, made[chunk.sequence][-1]) for chunk in step.chunks if chunk.samples
        )
        self.fed_back.extend(sampled)
        return StepResult(step.id, step.epoch, sampled)

    def _inputs(self, chunk: Chunk) -> Sequence[int]:
        if chunk.tokens is not None:
            assert len(chunk.tokens) == chunk.count
            known = len(self.stages[0].slots[chunk.sequence].opening.history)
            late = self.mailbox.pop(chunk.sequence, ())  # the slot that the sequence had before
            assert all(one.position < known for one in late), "a token that was fed back would be used late"
            return chunk.tokens
        mail = self.mailbox[chunk.sequence]
        while (sampled := mail.popleft()).position < chunk.start:
            assert chunk.start == len(self.stages[0].slots[chunk.sequence].opening.history)
        assert (sampled.position, chunk.count, chunk.samples) == (chunk.start, 1, True)
        return [sampled.token]
