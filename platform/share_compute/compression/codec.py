"""The interface of codecs, codecs that work row by row, and error feedback.

A codec is pure: it changes neither its inputs nor itself. The layout of a payload follows from the codec and the shape
of the tensor alone, so a receiver trusts no size that the sender names. Payloads are little-endian, as safetensors are.

The bits of a payload depend on the tensor and the state alone, and not on the number of threads. No sum crosses a row,
and PyTorch does not divide the sum of one row among threads if there are other rows.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Final, TypeAlias

import torch
from torch import Tensor
from torch.nn.functional import pad

from share_compute.errors import UserError, VerificationFailed

State: TypeAlias = Mapping[str, Tensor]
"""Tensors that a codec carries from one call for a parameter to the next, by name; for checkpoints and backups."""
LARGEST: Final = 2.0**100
"""Magnitude up to which values are accepted. Sums of some thousand such values are finite in float32."""
FLOATS: Final = (torch.float32, torch.bfloat16, torch.float16)
RESIDUAL: Final = "residual"
_GROUP: Final = 4096
"""Number of values that are summed without a break."""
SLAB: Final = 2**19
"""Number of values that are encoded at a time, so that temporary tensors stay in a core's cache."""


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
            UserError: a value is not finite. Values of more than `LARGEST` may be refused as well.
            VerificationFailed: the state does not fit the tensor.
        """

    @abstractmethod
    def decode(self, payload: Tensor, shape: Sequence[int], out: Tensor | None = None) -> Tensor:
        """Return the tensor that a payload holds, as float32 of the given shape, on the CPU.

        Args:
            payload: result of `encode`, as it was received.
            shape: shape of the encoded tensor.
            out: contiguous tensor to write to and return; by default a new one.

        Raises:
            VerificationFailed: the payload is damaged: its length is wrong, or a value in it is not possible.
        """


class RowCodec(Codec):
    """A codec without state that encodes rows of values, each row for itself.

    A tensor is flattened and cut into rows of `length` values. The last row may be shorter. Slabs of many rows are
    encoded one after the other, and the payload is the concatenation of their bytes.
    """

    length: int
    """Number of values in a row."""

    @abstractmethod
    def row_bytes(self, rows: int, length: int) -> int:
        """Return the number of bytes of ``rows`` rows of ``length`` values that are encoded together."""

    @abstractmethod
    def encode_rows(self, rows: Tensor, content: Tensor, spare: Tensor) -> None:
        """Write float32 values ``[rows, length]`` as bytes to ``content``, uint8 ``[row_bytes]``; see `encode`.

        ``spare`` is memory of the size of ``rows`` for intermediate results. New memory for each slab would be slow.
        """

    @abstractmethod
    def decode_rows(self, content: Tensor, rows: Tensor) -> None:
        """Write the values that bytes ``[row_bytes]`` hold to ``rows``, float32 ``[rows, length]``; see `decode`."""

    def num_bytes(self, shape: Sequence[int]) -> int:
        """Return the size of the payload; see `Codec.num_bytes`."""
        return sum(slabs * self.row_bytes(rows, length) for slabs, rows, length in self._layout(prod(shape)))

    def encode(self, tensor: Tensor, state: State) -> tuple[Tensor, State]:
        """Return the payload and the same state; see `Codec.encode`."""
        values = flattened(tensor)
        payload = torch.empty(self.num_bytes(tensor.shape), dtype=torch.uint8)
        spare = torch.empty(min(len(values), max(SLAB, self.length)))
        for first, start, rows, length in self._slabs(len(values)):
            slab = values[first : first + rows * length].float().view(rows, length)
            content = payload[start : start + self.row_bytes(rows, length)]
            self.encode_rows(slab, content, spare[: slab.numel()].view_as(slab))
        return payload, state

    def decode(self, payload: Tensor, shape: Sequence[int], out: Tensor | None = None) -> Tensor:
        """Return the tensor that a payload holds; see `Codec.decode`."""
        require_length(payload, self.num_bytes(shape))
        out = output(shape, out)
        values = out.view(-1)
        for first, start, rows, length in self._slabs(len(values)):
            slab = values[first : first + rows * length].view(rows, length)
            self.decode_rows(payload[start : start + self.row_bytes(rows, length)], slab)
        return out

    def _layout(self, size: int) -> Iterator[tuple[int, int, int]]:
        """Yield (number of slabs, rows in each, values in a row) for ``size`` values, in order."""
        rows, rest = divmod(size, self.length)
        most = max(1, SLAB // self.length)
        for slabs, slab_rows in ((rows // most, most), (1, rows % most)):
            if slabs and slab_rows:
                yield slabs, slab_rows, self.length
        if rest:
            yield 1, 1, rest

    def _slabs(self, size: int) -> Iterator[tuple[int, int, int, int]]:
        """Yield (index of the first value, index of the first byte, rows, values in a row) of each slab."""
        first = start = 0
        for slabs, rows, length in self._layout(size):
            for _ in range(slabs):
                yield first, start, rows, length
                first += rows * length
                start += self.row_bytes(rows, length)


@dataclass(frozen=True, slots=True)
class ErrorFeedback(Codec):
    """Adds the error of earlier calls to the next tensor before another codec encodes it.

    With ``sum = decay * residual + tensor``, the next residual is ``sum - decode(encode(sum))`` in float32. Hence
    ``decoded + residual`` is ``sum``: to the bit where the decoded value is 0, or within a factor of 2 of the sum
    (Sterbenz's lemma), and elsewhere to half a unit in the last place of the residual.

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
        residual = from_state(state, RESIDUAL, tensor.shape)
        # Two operations: one fused operation would round elements at the ends of threads' ranges differently.
        total = residual.mul(self.decay).add_(flattened(tensor).view(tensor.shape))
        inner = {name: value for name, value in state.items() if name != RESIDUAL}
        payload, inner_next = self.codec.encode(total, inner)
        rest = total.sub_(self.codec.decode(payload, tensor.shape))
        return payload, {**inner_next, RESIDUAL: rest}

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


def output(shape: Sequence[int], out: Tensor | None) -> Tensor:
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


def row_sums(rows: Tensor) -> Tensor:
    """Return the sum of each row of ``[rows, length]``; its bits do not depend on the number of threads.

    PyTorch divides a sum among threads if it is the only one, and has at least 2**15 summands.
    """
    count, length = rows.shape
    groups = -(-length // _GROUP)
    if groups <= 1:
        return rows.sum(1)
    return pad(rows, (0, groups * _GROUP - length)).view(count, groups, _GROUP).sum(2).sum(1)


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


def from_state(state: State, name: str, shape: Sequence[int]) -> Tensor:
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
        what: name of one of them, for the error.

    Raises:
        VerificationFailed: a value is NaN, less than ``least``, or more than ``largest``.
    """
    if not values.numel():
        return
    low, high = torch.aminmax(values)
    if not bool((low >= least) & (high <= largest)):
        raise damaged(f"{what} is not finite, or out of range")


def as_bytes(values: Tensor) -> Tensor:
    """Return the bytes of a contiguous tensor as one row."""
    return values.reshape(-1).view(torch.uint8)


def from_bytes(content: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the numbers that bytes hold; a view of the bytes if their place in memory allows it."""
    if content.storage_offset() % dtype.itemsize or content.data_ptr() % dtype.itemsize:
        content = content.clone()
    return content.view(dtype)
