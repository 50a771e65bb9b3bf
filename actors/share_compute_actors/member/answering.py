"""Encode the results and errors of actors' methods as bytes, so that the caller unpickles nothing."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import ray
from ray.exceptions import RayActorError, RayTaskError

from share_compute.errors import ShareComputeError
from share_compute_actors.member.allocator import as_told
from share_compute_actors.member.rows import shard_store_lost
from share_compute_actors.wire import Packs, answers_by, unpack_answer

Parameters = ParamSpec("Parameters")
T = TypeVar("T")
_log = logging.getLogger(__name__)


def answers(schema: Packs[T]) -> Callable[[Callable[Parameters, T]], Callable[Parameters, bytes]]:
    """Return a decorator that makes an actor's method answer in bytes; see `share_compute_actors.wire.answers_by`."""
    return answers_by(schema, _told)


def _told(failure: Exception) -> ShareComputeError:
    if isinstance(failure, RayActorError):
        # Members call the shard store or another member. The coordinator notices the loss of a member by itself.
        return shard_store_lost()
    cause = failure.cause if isinstance(failure, RayTaskError) else failure
    if isinstance(cause, ShareComputeError):
        return cause
    _log.error("a call failed", exc_info=failure)
    return as_told(failure)


def answered(schema: Packs[T], asked: Any, sender: str) -> T:
    """Wait for the answer to a call, and return what the method returned.

    Args:
        schema: schema of the return value.
        asked: the reference that the call gave.
        sender: name of the machine or the actor that answers.

    Raises:
        Undeclared: the answer is not of this kind.
        ShareComputeError: the method raised this error.
        RayError: the actor died.
    """
    return unpack_answer(schema, ray.get(asked), sender)
