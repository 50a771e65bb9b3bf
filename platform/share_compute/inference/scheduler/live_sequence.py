"""State of one sequence in the scheduler: its known tokens, and the part of them that has been sent."""

from __future__ import annotations

from dataclasses import dataclass, field

from share_compute.inference.scheduler.engine_steps import Chunk, Opening, SlotGrowth
from share_compute.inference.scheduler.options import Generation
from share_compute.inference.scheduler.prefixes import add_keys


@dataclass(slots=True, eq=False)
class LiveSequence:
    """A sequence that waits or runs.

    Args:
        generation: the prompt, the sampling options, and the tokens that were emitted before.
        order: position in the order of arrival.
        new_tokens: maximum number of tokens to generate: as requested, or fewer if not all fit after the prompt.
        answer_tokens: length of a typical answer in tokens. The KV capacity reserved for the answer starts at this
            number, and doubles whenever it is too small.
    """

    generation: Generation
    order: int
    new_tokens: int
    answer_tokens: int
    tokens: list[int] = field(init=False)
    """Tokens of the prompt, then the tokens emitted so far."""
    keys: list[int] = field(init=False)
    """Keys of the full blocks of tokens; see `share_compute.inference.scheduler.prefixes`."""
    is_open: bool = False
    """Whether the sequence runs: it has a KV slot, or is a text that an encoder computes."""
    prefill_tokens: int = 0
    """Number of tokens that were known when the KV slot was opened."""
    slot_tokens: int = 0
    """Capacity of the sequence's KV slot, in positions."""
    first_step: int = 0
    """Id of the first engine step that can contain this sequence. Tokens of earlier steps belong to an older sequence
    with the same id."""
    sent: int = 0
    """Number of positions of the KV slot that are written once all engine steps sent so far have been computed."""
    planned: int = 0
    """Number of generated tokens, including those of engine steps in flight."""
    charged: int = 0
    """Number of positions, from the first, that were copied from another slot or charged to the owner."""
    cached_tokens: int | None = None
    """Number of prompt tokens that were copied from another sequence at the first start; None before the start."""
    passes: int = 0
    """Number of times that a sequence of another owner overtook this sequence, because this one lacked KV capacity."""
    batch: int | None = None
    """Decode batch; None while the sequence is in no batch."""
    last_step: int = -1
    """Id of the last engine step in which the sequence decoded; -1 if there is none."""

    def __post_init__(self) -> None:
        self.tokens = [*self.generation.prompt, *self.generation.emitted]
        self.keys = []
        add_keys(self.keys, self.tokens)
        self.settle()

    @property
    def id(self) -> int:
        """Number of the sequence."""
        return self.generation.sequence

    @property
    def owner(self) -> str:
        """Owner of the sequence: id of the API key."""
        return self.generation.owner

    @property
    def prompt_tokens(self) -> int:
        """Length of the prompt."""
        return len(self.generation.prompt)

    @property
    def num_emitted(self) -> int:
        """Number of generated tokens that are known."""
        return len(self.tokens) - self.prompt_tokens

    @property
    def most_tokens(self) -> int:
        """Maximum number of KV positions that this sequence writes.

        The last generated token is never an input and needs no position.
        """
        return self.prompt_tokens + self.new_tokens - 1

    @property
    def wanted_tokens(self) -> int:
        """KV capacity to reserve when the slot is opened or grows; at most `most_tokens`."""
        return self._slot_tokens_for(max(len(self.tokens), self.sent + 1))

    @property
    def next_slot_tokens(self) -> int:
        """KV capacity to grow to when the KV slot is full; 0 if the slot already has `most_tokens`."""
        return 0 if self.slot_tokens == self.most_tokens else self._slot_tokens_for(self.slot_tokens + 1)

    def _slot_tokens_for(self, tokens: int) -> int:
        answer = self.answer_tokens
        while self.prompt_tokens + answer - 1 < tokens:
            answer *= 2
        return min(self.most_tokens, self.prompt_tokens + answer - 1)

    @property
    def is_full(self) -> bool:
        """Whether the KV slot has no position left for the next input token."""
        return self.sent == self.slot_tokens

    @property
    def is_sent_whole(self) -> bool:
        """Whether the step that samples the last permitted token was sent."""
        return self.planned == self.new_tokens

    @property
    def is_settled(self) -> bool:
        """Whether the sampled token of each engine step that was sent for this sequence has arrived."""
        return self.planned == self.num_emitted

    @property
    def work_tokens(self) -> int:
        """Maximum number of tokens to process if the sequence starts now: known tokens, and tokens left to generate."""
        return len(self.tokens) + self.new_tokens - self.num_emitted

    def open(self, copy_from: int | None, copy_tokens: int) -> Opening:
        """Start the sequence; return the message that opens its KV slot.

        Args:
            copy_from: sequence whose first positions are copied; None if there is none.
            copy_tokens: number of positions that are copied.
        """
        self.is_open = True
        self.prefill_tokens = len(self.tokens)
        self.slot_tokens, self.sent = self.wanted_tokens, copy_tokens
        if self.cached_tokens is None:
            self.cached_tokens = min(copy_tokens, self.prompt_tokens)
        self.charged = max(self.charged, copy_tokens)
        return Opening(
            self.id,
            self.slot_tokens,
            self.generation.options,
            tuple(self.tokens),
            self.prompt_tokens,
            copy_from,
            copy_tokens,
        )

    def grow(self) -> SlotGrowth:
        """Grow the sequence's KV slot to `wanted_tokens`; return the message that grows it."""
        self.slot_tokens = self.wanted_tokens
        return SlotGrowth(self.id, self.slot_tokens)

    def shorten(self, longest_tokens: int) -> bool:
        """Limit prompt and answer together to ``longest_tokens``; return whether tokens are left to generate."""
        self.new_tokens = min(self.new_tokens, longest_tokens - self.prompt_tokens)
        return self.new_tokens > self.num_emitted

    def close(self) -> None:
        """Record that the KV slot was closed. Tokens of engine steps in flight are still expected; see `settle`."""
        self.is_open, self.batch = False, None
        self.slot_tokens = self.sent = self.passes = 0

    def settle(self) -> None:
        """Forget the engine steps in flight: their results will not be used."""
        self.planned = self.num_emitted

    def prefill(self, most: int) -> Chunk:
        """Return a chunk of at most ``most`` of the known tokens that were not sent yet, and record them as sent.

        Only the chunk that ends with the last known token samples the next token.
        """
        start = self.sent
        self.sent = min(start + most, self.prefill_tokens)
        samples = self.sent == self.prefill_tokens
        self.planned += samples
        inputs = tuple(self.tokens[start : self.sent])
        return Chunk(self.id, start, len(inputs), inputs, samples)

    def decode(self, step: int) -> Chunk:
        """Record the next position as sent; return the chunk that computes it and samples the next token.

        The chunk does not contain its input token, because the scheduler may not know this token yet.
        """
        self.last_step = step
        self.sent += 1
        self.planned += 1
        return Chunk(self.id, self.sent - 1, 1, None, samples=True)

    def charge(self) -> int:
        """Record the positions sent since the last call as charged, and return their number."""
        new = max(0, self.sent - self.charged)
        self.charged += new
        return new

    def append(self, token: int) -> None:
        """Append a sampled token."""
        self.tokens.append(token)
        add_keys(self.keys, self.tokens)
