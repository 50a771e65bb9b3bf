"""The choice between compiled and eager code; all members of a job or deployment share one choice.

This module does not import torch, so that a new server of a deployment starts fast.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, TypeAlias

from pydantic import Field

from share_compute.lifecycle.computation import Computation
from share_compute.quantities import seconds_text
from share_compute.specification import Compiling
from share_compute_actors.wire import Schema, Seconds

LEAST_GAIN = 1.05
"""Least ratio of the eager time to the compiled time with which ``auto`` chooses compiled code.

A smaller gain is within the noise of the measurement."""

_PositiveSeconds: TypeAlias = Annotated[float, Field(ge=1e-9, le=1e9)]


@dataclass(frozen=True, slots=True)
class CompiledTimes:
    """Times of one case, such as a microbatch forward and backward through a stage, in seconds."""

    eager_s: _PositiveSeconds
    compiled_s: _PositiveSeconds
    warm_up_s: Seconds
    """Time until the first compiled results were computed."""


COMPILED_TIMES: Schema[CompiledTimes] = Schema(CompiledTimes)


def gain_of(times: Sequence[CompiledTimes], total: Callable[[Iterable[float]], float] = max) -> float:
    """Return the speed of compiled code divided by that of eager code.

    Args:
        times: times of each stage.
        total: `max` if the slowest stage determines the speed; `sum` if stages compute one after the other.
    """
    return total(each.eager_s for each in times) / total(each.compiled_s for each in times)


def choose(mode: Compiling, times: Sequence[CompiledTimes], gain: float) -> Computation:
    """Return the choice, with a sentence for users.

    Args:
        mode: ``on`` or ``auto``, as the user requested.
        times: times of each stage.
        gain: see `gain_of`.
    """
    if mode == "on" or gain >= LEAST_GAIN:
        warm_up = seconds_text(max(each.warm_up_s for each in times))
        sentence = f"compiled: {gain:.2f} times as fast as eager, after {warm_up} of compiling"
        return Computation(is_compiled=True, gain=gain, sentence=sentence)
    sentence = f"eager: compiled code is {gain:.2f} times as fast"
    return Computation(is_compiled=False, gain=gain, sentence=sentence)
