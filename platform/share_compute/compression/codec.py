"""The interface of codecs, and error feedback.

A codec is pure: it changes neither its inputs nor itself. The layout of a payload follows from the codec and the shape
of the tensor alone, so a receiver trusts no size that the sender names. Payloads are little-endian, as safetensors are.

The bits of a payload and of decoded values do not depend on the number of threads, nor on the place of tensors in
memory. Codecs compute each value separately, or sum in a fixed order, or sum exactly.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

import torch
from torch import Tensor

from share_compute.compression.checks import require_state

State: TypeAlias = Mapping[str, Tensor]
"""Tensors that a codec carries from one call for a parameter to the next, by name; for checkpoints and backups."""
FLOATS: Final = (torch.float32, torch.bfloat16, torch.float16)
"""Types of tensors that codecs encode."""
RESIDUAL: Final = "residual"


class Codec(ABC):
    """Encodes float tensors as bytes, usually with a loss."""

    @abstractmethod
    def num_bytes(self, shape: Sequence[int]) -> int:
        """Return the size of the payload of a tensor of this shape."""

    def begin(self, name: str, shape: Sequence[int]) -> State:  # noqa: ARG002 - for codecs with state
        """Return the state before the first call of `encode` for the parameter called ``name``."""
        return {}

    @abstractmethod
    def encode(self, tensor: Tensor, state: State) -> tuple[Tensor, State]:
        """Return the payload of a tensor, and the next state.

        Args:
            tensor: values of any shape; float32, bfloat16 or float16.
            state: result of `begin`, or of the last call for the same parameter.

        Returns:
            The payload as uint8, ``[num_bytes]``, on the CPU, and the state for the next call.

        Raises:
            UserError: a value is not finite. Values of more than `checks.LARGEST` may be refused as well.
            VerificationFailed: the state does not fit the tensor.
        """

    def extract(self, total: Tensor, state: State) -> tuple[Tensor, State]:
        """Return the payload of a tensor and the next state, and subtract the decoded values from the tensor in place.

        Args:
            total: contiguous float32 values on the CPU.
            state: as for `encode`.

        Raises:
            UserError, VerificationFailed: as `encode`; ``total`` is then invalid.
        """
        payload, following = self.encode(total, state)
        total.sub_(self.decode(payload, total.shape))
        return payload, following

    @abstractmethod
    def decode(self, payload: Tensor, shape: Sequence[int], out: Tensor | None = None) -> Tensor:
        """Return the tensor that a payload holds, as float32 of the given shape, on the CPU.

        Args:
            payload: result of `encode`, as it was received.
            shape: shape of the encoded tensor.
            out: contiguous tensor to write to and return; by default a new one.

        Raises:
            VerificationFailed: the payload is damaged: its length is wrong, or a value in it is not possible. ``out``
                may be partly written then.
        """


@dataclass(frozen=True, slots=True)
class ErrorFeedback(Codec):
    """Adds the error of earlier calls to the next tensor before another codec encodes it.

    With ``sum = decay * residual + tensor``, the next residual is ``sum - decode(encode(sum))`` in float32. Hence
    ``decoded + residual`` equals ``sum``. It is exact where the decoded value is 0 or within a factor of 2 of the sum
    (Sterbenz's lemma). Elsewhere the error is at most half a unit in the last place of the residual.

    Sources: Karimireddy et al. 2019, arXiv 1901.09847 (decay 1); SparseLoCo, arXiv 2508.15706 (decay 0.95).
    """

    codec: Codec
    """The codec that encodes the sum; its state is part of this codec's state."""
    decay: float = 1.0
    """Factor of the residual, more than 0 and at most 1."""

    def num_bytes(self, shape: Sequence[int]) -> int:
        """Return the size of the payload; see `Codec.num_bytes`."""
        return self.codec.num_bytes(shape)

    def begin(self, name: str, shape: Sequence[int]) -> State:
        """Return a residual of zeros; see `Codec.begin`."""
        return {**self.codec.begin(name, shape), RESIDUAL: torch.zeros(tuple(shape))}

    def encode(self, tensor: Tensor, state: State) -> tuple[Tensor, State]:
        """Return the payload, and the state with the next residual; see `Codec.encode`."""
        residual = require_state(state, RESIDUAL, tensor.shape)
        # Multiply and add separately: a fused operation would round elements at the ends of threads' ranges
        # differently.
        total = residual.contiguous().mul(self.decay).add_(flattened(tensor).view(tensor.shape))
        inner = {name: value for name, value in state.items() if name != RESIDUAL}
        payload, following = self.codec.extract(total, inner)
        return payload, {**following, RESIDUAL: total}

    def decode(self, payload: Tensor, shape: Sequence[int], out: Tensor | None = None) -> Tensor:
        """Return the tensor that a payload holds; see `Codec.decode`."""
        return self.codec.decode(payload, shape, out)


def flattened(tensor: Tensor) -> Tensor:
    """Return the values of a tensor as one row on the CPU, in their own dtype.

    Raises:
        ValueError: the dtype is not one of `FLOATS`.
    """
    if tensor.dtype not in FLOATS:
        raise ValueError(f"cannot compress a tensor of {tensor.dtype}")
    return tensor.detach().cpu().reshape(-1)
