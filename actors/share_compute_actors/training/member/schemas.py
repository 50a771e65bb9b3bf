"""Schemas of the messages and answers that members of a training job send to the coordinator."""

from __future__ import annotations

import math
from typing import Any, TypeAlias, get_args

import numpy as np
from numpy.typing import NDArray

from share_compute.errors import ShareComputeError
from share_compute.planning.cost.timings import LayerTiming
from share_compute.protocol.membership import ShardPart, Worker
from share_compute.protocol.messages import Prepared, Rejected, Report, ToCoordinator
from share_compute.training.finiteness import NonFiniteValue
from share_compute_actors.messages import EvaluationResult, MemberStatus, StepFigures
from share_compute_actors.wire import (
    Content,
    Messages,
    Natural,
    Raised,
    Schema,
    WithContent,
    undeclared,
)

STATUS: Schema[MemberStatus] = Schema(MemberStatus)
HOLDING: Schema[ShardPart | None] = Schema(ShardPart | None)
EVALUATION: Schema[dict[int, EvaluationResult]] = Schema(dict[int, EvaluationResult], 64 << 20)
VERSION: Schema[int | None] = Schema(Natural | None)
FINDING: Schema[NonFiniteValue | None] = Schema(NonFiniteValue | None)

_LOGIT = np.dtype("<f4")
_MOST_REASON = 2000
"""Maximum length, in characters, of the description of a wrong tensor, which goes to the job's log."""


class Logits:
    """Encodes the logits of the next token, ``[vocabulary]``; None stands for no logits."""

    _frame = WithContent(Schema(int | None))

    def pack(self, message: NDArray[np.float32] | None) -> bytes:
        """Return logits as bytes: their number (None without logits), then their values as little-endian float32."""
        if message is None:
            return self._frame.pack(Content(None, b""))
        return self._frame.pack(Content(len(message), message.astype(_LOGIT).tobytes()))

    def unpack(self, data: Any, sender: str) -> NDArray[np.float32] | None:
        """Return the logits, or None, that `pack` wrote; see `share_compute_actors.wire.Packs`."""
        count, content = self._frame.unpack(data, sender)
        if len(content) != (count or 0) * _LOGIT.itemsize:
            raise undeclared(sender, f"{len(content)} bytes for {count} numbers")
        return None if count is None else np.frombuffer(content, _LOGIT)


LOGITS = Logits()

# -- messages to the coordinator -----------------------------------------------------------------------------------

Said: TypeAlias = tuple[ToCoordinator | ShareComputeError, StepFigures | None]

_KINDS: tuple[Any, ...] = (*get_args(ToCoordinator), Raised)
_SAID: Messages[tuple[ToCoordinator | Raised, StepFigures | None]] = Messages(
    **{kind.__name__: Schema(tuple[kind, StepFigures | None]) for kind in _KINDS}  # type: ignore[valid-type]
)


def pack_said(message: ToCoordinator | ShareComputeError, figures: StepFigures | None) -> bytes:
    """Return the bytes of a member's message or error to its coordinator, with the figures of a step, if any."""
    said = Raised.of(message) if isinstance(message, ShareComputeError) else message
    return _SAID.pack(type(said).__name__, (said, figures))


def unpack_said(data: Any, worker: Worker, sender: str, microbatches: int) -> Said:
    """Return a member's message or error, and the figures of a step; the figures are None if none were sent.

    Args:
        data: the message as it was received.
        worker: the member that sent it.
        sender: name of the member's machine.
        microbatches: number of microbatches in a step.

    Raises:
        Undeclared: the message matches no schema, names another member, or has impossible values.
    """
    message, figures = _SAID.unpack(data, sender)
    if isinstance(message, Raised):
        return message.error(sender), figures
    if message.worker != worker:
        raise undeclared(sender, f"{type(message).__name__} in the name of another member")
    if not _microbatches_of(message).issubset(range(microbatches)):
        raise undeclared(sender, f"{type(message).__name__} of microbatches that there are not")
    if isinstance(message, Prepared) and any(square < 0 for square in message.squared_norms.values()):
        raise undeclared(sender, "a squared norm below zero")
    if isinstance(message, Rejected) and len(message.what) > _MOST_REASON:
        raise undeclared(sender, f"a reason of {len(message.what)} characters")
    if figures is not None and not all(map(_is_time, (figures.layer_timings or {}).values())):
        raise undeclared(sender, "times that are none")
    return message, figures


def _microbatches_of(message: ToCoordinator) -> frozenset[int]:
    match message:
        case Report():
            return message.summed | message.forwarded | message.activations | message.gradients
        case Prepared():
            return frozenset(message.losses)
        case _:
            return frozenset()


def _is_time(timing: LayerTiming) -> bool:
    return all(math.isfinite(seconds) and seconds >= 0 for seconds in (timing.forward_s, timing.backward_s))
