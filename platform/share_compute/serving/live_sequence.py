"""One sequence in the scheduler's hands: what is known of it, and what of it has been sent."""

from __future__ import annotations

from dataclasses import dataclass, field

from share_compute.serving.options import Generation
from share_compute.serving.prefixes import add_keys
from share_compute.serving.turns import Chunk, Growth, Opening


@dataclass(slots=True, eq=False)
class LiveSequence:
    """A sequence that waits or runs.

    Args:
        generation: what was asked for.
        order: counts arrivals.
        new_tokens: most tokens to generate: what was asked for, or what fits behind the prompt.
        answer_tokens: of a typical answer; its slab has room for so many, or for twice, four times, ... as many.
    """

    generation: Generation
    order: int
    new_tokens: int
    answer_tokens: int
    tokens: list[int] = field(init=False)
    """Prompt, then what was emitted so far."""
    keys: list[int] = field(init=False)
    """Of the whole blocks of tokens; see `share_compute.serving.prefixes`."""
    is_open: bool = False
    """Whether it has a slab."""
    prefill_tokens: int = 0
    """Tokens that were known when its slab was opened: they come as inputs, all others are fed back."""
    room_tokens: int = 0
    """Positions of its slab."""
    first_turn: int = 0
    """The next when it came; tokens of earlier ones are of another sequence of this number."""
    sent: int = 0
    """Positions that are in its slab once all turns that were sent have passed."""
    planned: int = 0
    """Generated tokens, with those that turns in flight will bring."""
    charged: int = 0
    """Positions that count for its owner already: what is computed again after a loss does not."""
    cached_tokens: int | None = None
    """Tokens copied when it was first begun."""
    passes: int = 0
    """Sequences of other owners that were begun while this one lacked room."""
    batch: int | None = None
    last_turn: int = -1
    """Turn that it last decoded in."""

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
        """Whose it is."""
        return self.generation.owner

    @property
    def prompt_tokens(self) -> int:
        """Length of the prompt."""
        return len(self.generation.prompt)

    @property
    def num_emitted(self) -> int:
        """Generated tokens that are known."""
        return len(self.tokens) - self.prompt_tokens

    @property
    def most_tokens(self) -> int:
        """Positions that are ever written of it. The last token is never an input."""
        return self.prompt_tokens + self.new_tokens - 1

    @property
    def wanted_tokens(self) -> int:
        """Positions that its slab should have, so that it can go on: the most, or fewer that are likely enough."""
        return self._room_for(max(len(self.tokens), self.sent + 1))

    @property
    def next_room_tokens(self) -> int:
        """Positions that its slab should have when it is full; 0 where it will not be."""
        return 0 if self.room_tokens == self.most_tokens else self._room_for(self.room_tokens + 1)

    def _room_for(self, tokens: int) -> int:
        answer = self.answer_tokens
        while self.prompt_tokens + answer - 1 < tokens:
            answer *= 2
        return min(self.most_tokens, self.prompt_tokens + answer - 1)

    @property
    def is_full(self) -> bool:
        """Whether its slab has no room for the token that is fed back next."""
        return self.sent == self.room_tokens

    @property
    def is_sent_whole(self) -> bool:
        """Whether turns that bring its last token are on their way: none will be needed after them."""
        return self.planned == self.new_tokens

    @property
    def is_settled(self) -> bool:
        """Whether no token of it is on its way."""
        return self.planned == self.num_emitted

    @property
    def work_tokens(self) -> int:
        """Positions that it needs, at most, when it is begun now."""
        return len(self.tokens) + self.new_tokens - self.num_emitted

    def open(self, copy_from: int | None, copy_tokens: int) -> Opening:
        """Begin, with so many positions copied from another sequence."""
        self.is_open = True
        self.prefill_tokens = len(self.tokens)
        self.room_tokens, self.sent = self.wanted_tokens, copy_tokens
        if self.cached_tokens is None:
            self.cached_tokens = min(copy_tokens, self.prompt_tokens)
        self.charged = max(self.charged, copy_tokens)
        return Opening(
            self.id,
            self.room_tokens,
            self.generation.options,
            tuple(self.tokens),
            self.prompt_tokens,
            copy_from,
            copy_tokens,
        )

    def grow(self) -> Growth:
        """Get the room that it wants."""
        self.room_tokens = self.wanted_tokens
        return Growth(self.id, self.room_tokens)

    def shorten(self, longest_tokens: int) -> bool:
        """Let it end where prompt and answer together have so many tokens; return whether any are to come."""
        self.new_tokens = min(self.new_tokens, longest_tokens - self.prompt_tokens)
        return self.new_tokens > self.num_emitted

    def close(self) -> None:
        """Forget that it was begun: its slab is lost, what was emitted, or will be by turns in flight, is not."""
        self.is_open, self.batch = False, None
        self.room_tokens = self.sent = self.passes = 0

    def settle(self) -> None:
        """Forget the turns in flight: they bring nothing any more."""
        self.planned = self.num_emitted

    def prefill(self, most: int) -> Chunk:
        """Send known tokens, at most so many; with the last of them the next token is sampled."""
        start = self.sent
        self.sent = min(start + most, self.prefill_tokens)
        samples = self.sent == self.prefill_tokens
        self.planned += samples
        inputs = tuple(self.tokens[start : self.sent])
        return Chunk(self.id, start, len(inputs), inputs, samples)

    def decode(self, turn: int) -> Chunk:
        """Send the token that the last pool feeds back, and sample the next."""
        self.last_turn = turn
        self.sent += 1
        self.planned += 1
        return Chunk(self.id, self.sent - 1, 1, None, samples=True)

    def charge(self) -> int:
        """Return the positions sent for the first time since this was last asked."""
        new = max(0, self.sent - self.charged)
        self.charged += new
        return new

    def append(self, token: int) -> None:
        """Take in a sampled token."""
        self.tokens.append(token)
        add_keys(self.keys, self.tokens)
