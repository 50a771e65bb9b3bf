"""Encodes and decodes the results and errors of actors' methods."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import ray
from ray.exceptions import RayActorError, RayTaskError

from share_compute.errors import ShardStoreLost, ShareComputeError
from share_compute_actors.wire import Packs, answers_by, unpack_answer

Parameters = ParamSpec("Parameters")
T = TypeVar("T")
_log = logging.getLogger(__name__)


def answers(schema: Packs[T]) -> Callable[[Callable[Parameters, T]], Callable[Parameters, bytes]]:
    """Return a decorator that encodes a method's result or error as bytes; see `wire.answers_by`."""
    return answers_by(schema, _reported)


def _reported(failure: Exception) -> ShareComputeError:
    if isinstance(failure, RayActorError):
        # The dead actor may be another member. Then this error is wrong, but the failure detector reports the loss.
        return shard_store_lost()
    cause = failure.cause if isinstance(failure, RayTaskError) else failure
    if isinstance(cause, ShareComputeError):
        return cause
    _log.error("a call failed", exc_info=failure)
    from share_compute_actors.group.allocator import as_reported  # noqa: PLC0415 - loads torch

    return as_reported(failure)


def answered(schema: Packs[T], ref: Any, sender: str) -> T:
    """Wait for the answer to a call, and return the method's result.

    Args:
        schema: schema of the return value.
        ref: the reference that the Ray call returned.
        sender: name of the machine or the actor that answers.

    Raises:
        Undeclared: the answer does not match the schema.
        ShareComputeError: the method raised this error.
        RayError: the call failed.
    """
    return unpack_answer(schema, ray.get(ref), sender)


def shard_store_lost() -> ShardStoreLost:
    """Return the error for a shard store whose actor died."""
    return ShardStoreLost(
        "the shard store on the server died",
        hint="look for lack of memory on the server, then resume the job",
    )


def ask_shard_store(schema: Packs[T], ref: Any) -> T:
    """Wait for the answer to a call of the shard store or of `ServedWeights`, and return the method's result.

    Args:
        schema: schema of the return value.
        ref: the reference that the Ray call returned.

    Raises:
        Undeclared: the answer does not match the schema.
        ShareComputeError: the method raised this error.
        ShardStoreLost: the actor died.
    """
    try:
        return unpack_answer(schema, ray.get(ref), "the shard store")
    except RayActorError as failure:
        raise shard_store_lost() from failure
