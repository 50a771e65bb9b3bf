"""How much a deployment takes on at a time."""

from __future__ import annotations

from dataclasses import dataclass

from share_compute.errors import UserError

_LEAST = {
    "window_tokens": 2,
    "kv_tokens": 2,
    "max_sequences": 1,
    "turn_tokens": 2,
    "pools": 1,
    "max_queued": 1,
    "run_ahead": 0,
    "answer_tokens": 1,
}


@dataclass(frozen=True, slots=True)
class Limits:
    """What the pools of one epoch can hold, and how they are kept busy."""

    window_tokens: int
    """Longest sequence that the model was made for, prompt and generated tokens together."""
    kv_tokens: int
    """Most tokens whose keys and values fit in the tightest pool, all slabs together."""
    max_sequences: int
    """Most sequences that run at a time."""
    turn_tokens: int
    """Most positions that one turn computes."""
    pools: int
    """Pools in a row; there are as many batches."""
    max_queued: int
    """Most sequences that wait to be begun."""
    run_ahead: int = 1
    """Turns of a batch that are sent before the tokens of its last one are back."""
    answer_tokens: int = 128
    """Tokens of a typical answer: room for so many is kept for each sequence, and twice as many whenever it is full."""
    embeds: bool = False
    """Whether the model is an encoder: texts are computed whole, each in one turn, and nothing of them is kept."""

    def __post_init__(self) -> None:
        for name, least in _LEAST.items():
            if getattr(self, name) < least:
                raise UserError(
                    f"{name} is {getattr(self, name)}; it must be at least {least}",
                    mend=f"set {name} to {least} or more",
                )

    @property
    def room_tokens(self) -> int:
        """Longest slab that fits; of an encoder, longest text that fits into a turn."""
        return self.turn_tokens if self.embeds else self.kv_tokens

    @property
    def longest_tokens(self) -> int:
        """Longest sequence that can be served: by the model's window, and by the memory."""
        return min(self.window_tokens, self.room_tokens)
