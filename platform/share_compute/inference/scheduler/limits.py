"""Limits on the load that a replica accepts at a time."""

from __future__ import annotations

from dataclasses import dataclass

from share_compute.errors import UserError

_LEAST = {
    "window_tokens": 2,
    "kv_tokens": 2,
    "max_sequences": 1,
    "step_tokens": 2,
    "stages": 1,
    "max_queued": 1,
    "run_ahead": 0,
    "answer_tokens": 1,
}


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """Capacity of the stages of one epoch, and the scheduler's limits for them."""

    window_tokens: int
    """Context window of the deployment: longest sequence, prompt and generated tokens together."""
    kv_tokens: int
    """KV capacity of all slots together, in tokens, on the stage where it is smallest."""
    max_sequences: int
    """Maximum number of sequences that run at a time."""
    step_tokens: int
    """Maximum number of positions that one engine step computes."""
    stages: int
    """Number of stages in the pipeline; also the number of decode batches."""
    max_queued: int
    """Maximum number of sequences that wait to start."""
    run_ahead: int = 1
    """Number of engine steps of a batch that may be sent ahead while the result of its previous step is pending."""
    answer_tokens: int = 128
    """Length of a typical answer in tokens; see `LiveSequence`."""
    embeds: bool = False
    """Whether the model is an encoder."""

    def __post_init__(self) -> None:
        for name, least in _LEAST.items():
            if getattr(self, name) < least:
                raise UserError(
                    f"{name} is {getattr(self, name)}; it must be at least {least}",
                    hint=f"set {name} to {least} or more",
                )

    @property
    def capacity_tokens(self) -> int:
        """Largest KV slot that fits, in positions; for an encoder, the longest text that fits into an engine step."""
        return self.step_tokens if self.embeds else self.kv_tokens

    @property
    def longest_tokens(self) -> int:
        """Maximum length of a sequence in tokens that both ``window_tokens`` and `capacity_tokens` allow."""
        return min(self.window_tokens, self.capacity_tokens)
