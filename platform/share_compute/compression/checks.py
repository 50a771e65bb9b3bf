"""Checks of the inputs of codecs, and the errors of these checks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import torch
from torch import Tensor

from share_compute.errors import UserError, VerificationFailed

LARGEST: Final = 2.0**100
"""Magnitude up to which all codecs accept values. Sums of some thousand such values are finite in float32."""


def require_encodable(magnitudes: Tensor, largest: float = LARGEST) -> None:
    """Check values, or bounds of values, that are to be encoded.

    Raises:
        UserError: a magnitude is NaN, or more than ``largest``.
    """
    if magnitudes.numel() and not bool(magnitudes.amax() <= largest):
        raise too_large()


def too_large() -> UserError:
    """Return the error for a tensor that cannot be encoded."""
    return UserError(
        f"a tensor cannot be compressed: a value in it is not finite, or more than {LARGEST:.0e}",
        hint="lower the learning rate, or clip gradients (training.max_gradient_norm)",
    )


def require_state(state: Mapping[str, Tensor], name: str, shape: Sequence[int]) -> Tensor:
    """Return a float32 tensor of the state.

    Raises:
        VerificationFailed: there is no such tensor, or its shape or dtype is wrong.
    """
    tensor = state.get(name)
    if tensor is None or tensor.shape != torch.Size(shape) or tensor.dtype != torch.float32:
        found = "is missing" if tensor is None else f"has shape {list(tensor.shape)} and type {tensor.dtype}"
        raise VerificationFailed(
            f"{name} of a codec {found}; float32 of shape {list(shape)} is needed",
            hint="resume with the model and the compression with which the checkpoint was written",
        )
    return tensor


def damaged(fault: str) -> VerificationFailed:
    """Return the error for a payload that no encoder wrote.

    Args:
        fault: the defect.
    """
    return VerificationFailed(
        f"a compressed tensor is damaged: {fault}",
        hint="check memory and software of the machine that sent it",
    )


def require_length(payload: Tensor, num_bytes: int) -> None:
    """Check the type and the length of a payload.

    Raises:
        VerificationFailed: the payload is not ``[num_bytes]``, uint8.
    """
    if payload.dtype != torch.uint8 or payload.shape != (num_bytes,):
        raise damaged(f"{payload.dtype} {list(payload.shape)}, not {num_bytes} bytes")


def require_decodable(values: Tensor, least: float, largest: float, what: str) -> None:
    """Check decoded values or scales.

    Args:
        values: the values.
        least: least possible value.
        largest: largest possible value.
        what: name of one value, for the error.

    Raises:
        VerificationFailed: a value is NaN, less than ``least``, or more than ``largest``.
    """
    if not values.numel():
        return
    low, high = torch.aminmax(values)
    if not bool((low >= least) & (high <= largest)):
        raise damaged(f"{what} is not finite, or out of range")


def require_output(shape: Sequence[int], out: Tensor | None) -> Tensor:
    """Return ``out``, or a new float32 tensor of the shape if it is None.

    Raises:
        ValueError: ``out`` is not contiguous float32 of the shape.
    """
    if out is None:
        return torch.empty(tuple(shape))
    if out.shape != torch.Size(shape) or out.dtype != torch.float32 or not out.is_contiguous():
        raise ValueError(
            f"cannot decode into {out.dtype} {list(out.shape)}: {list(shape)} is needed, in float32"
        )
    return out
