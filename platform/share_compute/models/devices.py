"""Operations of each kind of device: the only module that calls ``torch.cuda`` and ``torch.mps``.

`share_compute.device_kinds` has the facts about each kind that need no torch. The operations of MPS follow torch's
documentation; they have not been run.
"""

from __future__ import annotations

import errno
import os
import platform
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, cast

import torch

from share_compute.device_kinds import KINDS, DeviceKind, KindFacts
from share_compute.errors import UserError

if TYPE_CHECKING:  # the probe starts faster without the models of job files
    from share_compute.specification import Precision


class DeviceOperations(ABC):
    """Operations of one kind of device; they act on the device of this kind that this process chose in torch."""

    kind: ClassVar[DeviceKind]
    lower_precision: ClassVar[Precision] = "float16"
    """Precision to use where a device of this kind cannot compute in bfloat16."""

    @property
    def facts(self) -> KindFacts:
        """Facts about the kind."""
        return KINDS[self.kind]

    @property
    def device(self) -> torch.device:
        """The device that members compute on."""
        return torch.device(self.kind)

    def current(self) -> torch.device:
        """Return the device with its index."""
        return torch.device(self.kind, 0)

    @abstractmethod
    def count(self) -> int:
        """Return the number of devices that this process can use."""

    def choose(self, index: int) -> None:
        """Choose a device by its index for the calling thread; do nothing if the kind has only one device."""

    @abstractmethod
    def name(self) -> str:
        """Return the name that the vendor gives the device."""

    def uuid(self, index: int | None = None) -> str:  # noqa: ARG002 - most kinds have none
        """Return the UUID of a device, by index or of the chosen device; empty for kinds without UUIDs."""
        return ""

    @abstractmethod
    def total_bytes(self) -> int | None:
        """Return the memory of the device; None if it uses the machine's main memory without a separate limit."""

    @abstractmethod
    def peak_bytes(self) -> int | None:
        """Return the peak memory of this process on the device; None if it is the process's resident memory."""

    def synchronize(self) -> None:
        """Wait until the device has done all work that was enqueued on it."""

    def wait(self) -> None:
        """Wait until the device has done what the calling thread enqueued; sums of other streams may go on."""

    def check(self) -> None:
        """Raise the error of an earlier operation after which the device does not work any more, without waiting."""

    def compute_deterministically(self) -> None:
        """Make this process get the same bits in every run of an operation.

        Without this, for example, the backward pass of attention adds in an order that varies on a GPU. Operations that
        have no deterministic algorithm raise a RuntimeError from now on. torch's option to warn instead is not used,
        because its attention kernels would then stay nondeterministic.
        """

    def computes_in(self, precision: Precision) -> bool:
        """Return whether autocast can compute in ``precision`` on the device."""
        return precision == "float32" or bool(torch.amp.is_autocast_available(self.kind))

    @abstractmethod
    def mark(self) -> Any:
        """Return a mark of the present point in the device's work, for `seconds`."""

    @abstractmethod
    def seconds(self, start: Any, stop: Any) -> float:
        """Return the time between two marks in seconds, after `synchronize`."""

    def has_run_out(self, failure: BaseException) -> bool:  # noqa: ARG002
        """Return whether an exception means a lack of memory of such a device."""
        return False


class CpuOperations(DeviceOperations):
    """Operations of a CPU, which needs no settings and executes synchronously."""

    kind = "cpu"
    lower_precision = "float32"

    def count(self) -> int:
        """Return 1."""
        return 1

    def name(self) -> str:
        """Return the model name of the processor."""
        try:
            lines = Path("/proc/cpuinfo").read_text().splitlines()
        except FileNotFoundError:
            return platform.processor() or platform.machine()
        names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
        return next(names, platform.machine())

    def total_bytes(self) -> None:
        """Return None."""

    def peak_bytes(self) -> None:
        """Return None."""

    def mark(self) -> float:
        """Return the time of a monotonic clock, in seconds."""
        return time.perf_counter()

    def seconds(self, start: float, stop: float) -> float:
        """Return the difference of two marks."""
        return stop - start

    def has_run_out(self, failure: BaseException) -> bool:
        """Return whether an allocation in main memory failed."""
        if isinstance(failure, OSError):
            return failure.errno == errno.ENOMEM
        is_of_torch = isinstance(failure, RuntimeError) and any(
            text in str(failure) for text in ("DefaultCPUAllocator", "std::bad_alloc")
        )
        return is_of_torch or isinstance(failure, MemoryError)


class _GpuOperations(DeviceOperations):
    def compute_deterministically(self) -> None:
        torch.use_deterministic_algorithms(mode=True)
        # Filling new tensors would take time, and all new tensors are written before they are read.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]

    def synchronize(self) -> None:
        torch.get_device_module(self.kind).synchronize()

    def wait(self) -> None:
        self.synchronize()

    def check(self) -> None:
        self.synchronize()

    def seconds(self, start: Any, stop: Any) -> float:
        return float(start.elapsed_time(stop)) / 1000  # from milliseconds


class CudaOperations(_GpuOperations):
    """Operations of an NVIDIA GPU."""

    kind = "cuda"

    def count(self) -> int:
        """Return the number of GPUs that ``CUDA_VISIBLE_DEVICES`` selects and the driver offers."""
        return torch.cuda.device_count() if torch.cuda.is_available() else 0

    def choose(self, index: int) -> None:
        """Make the GPU with this index torch's current device of the calling thread."""
        torch.cuda.set_device(index)

    def current(self) -> torch.device:
        """Return the device with its index."""
        return torch.device(self.kind, torch.cuda.current_device())

    def wait(self) -> None:
        """Wait for the current stream of the calling thread."""
        torch.cuda.current_stream().synchronize()

    def check(self) -> None:
        """Ask for the state of the current stream, which tells errors that last."""
        torch.cuda.current_stream().query()

    def name(self) -> str:
        """Return the name of the card."""
        return str(torch.cuda.get_device_properties(self.device).name)

    def uuid(self, index: int | None = None) -> str:
        """Return the UUID of a GPU in the form that torch reports."""
        device = self.device if index is None else torch.device(self.kind, index)
        return str(torch.cuda.get_device_properties(device).uuid)

    def total_bytes(self) -> int:
        """Return the memory of the card."""
        return int(torch.cuda.get_device_properties(self.device).total_memory)

    def peak_bytes(self) -> int:
        """Return the peak memory that torch reserved."""
        return torch.cuda.max_memory_reserved()

    def compute_deterministically(self) -> None:
        """Choose deterministic algorithms, also in cuBLAS."""
        # cuBLAS reads this variable when its first handle is made. The value is one of the two that torch accepts.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        super().compute_deterministically()

    def computes_in(self, precision: Precision) -> bool:
        """Return whether the GPU supports ``precision``; bfloat16 needs compute capability 8.0."""
        able = super().computes_in(precision)
        return able and (precision != "bfloat16" or torch.cuda.get_device_capability(self.device) >= (8, 0))

    def mark(self) -> torch.cuda.Event:
        """Return an event that was recorded on the current stream."""
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def has_run_out(self, failure: BaseException) -> bool:
        """Return whether the card's memory was lacking, also for CUDA's driver, cuBLAS or NCCL."""
        if isinstance(failure, torch.OutOfMemoryError):
            return True
        return isinstance(failure, RuntimeError) and any(text in str(failure) for text in _CUDA_RAN_OUT)


_CUDA_RAN_OUT = ("CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "'out of memory'")
"""Parts of torch's messages if memory is lacking in CUDA's driver, in cuBLAS, or in NCCL."""


class MpsOperations(_GpuOperations):
    """Operations of the GPU of Apple's processors, which uses main memory. They have not been run."""

    kind = "mps"

    def count(self) -> int:
        """Return 1 if torch can use the GPU, else 0."""
        return int(torch.backends.mps.is_available())

    def name(self) -> str:
        """Return a fixed name, because torch has no function for the name of a Metal device."""
        return f"{self.facts.label} ({platform.machine()})"

    def total_bytes(self) -> int:
        """Return the recommended maximum of main memory for the GPU, as reported by Metal."""
        return int(torch.mps.recommended_max_memory())

    def peak_bytes(self) -> int:
        """Return the memory that Metal's driver has allocated for this process now; torch records no peak."""
        return int(torch.mps.driver_allocated_memory())

    def computes_in(self, precision: Precision) -> bool:
        """Return whether autocast supports ``precision``; bfloat16 needs macOS 14."""
        able = super().computes_in(precision)
        return able and (precision != "bfloat16" or torch.backends.mps.is_macos_or_newer(14, 0))

    def mark(self) -> Any:
        """Return an event that was recorded on the GPU's stream."""
        event = torch.mps.event.Event(enable_timing=True)
        event.record()
        return event

    def has_run_out(self, failure: BaseException) -> bool:
        """Return whether Metal refused an allocation."""
        return isinstance(failure, RuntimeError) and "MPS backend out of memory" in str(failure)


OPERATIONS: Mapping[DeviceKind, DeviceOperations] = MappingProxyType(
    {each.kind: each for each in (CpuOperations(), CudaOperations(), MpsOperations())}
)
"""The operations of each kind of device."""


def operations(device: torch.device) -> DeviceOperations:
    """Return the operations of a device's kind."""
    return OPERATIONS[cast("DeviceKind", device.type)]


def lacking(failure: BaseException) -> DeviceOperations | None:
    """Return the operations of the kind of device whose memory was lacking; None for other exceptions."""
    return next((kind for kind in OPERATIONS.values() if kind.has_run_out(failure)), None)


def computing_in(precision: Precision, device: torch.device) -> AbstractContextManager[object]:
    """Return a context in which matrices are multiplied in ``precision``; weights keep their own type.

    Autocast's cache is off. With the cache, the gradients of a weight that two layers share would be summed in low
    precision.
    """
    if precision == "float32":
        return nullcontext()
    return torch.autocast(device.type, dtype=getattr(torch, precision), cache_enabled=False)


def require_precision(precision: Precision, device: torch.device) -> None:
    """Check that a device can compute in ``precision``.

    Raises:
        UserError: the device does not support ``precision``.
    """
    kind = operations(device)
    if not kind.computes_in(precision):
        raise UserError(
            f"{device} cannot compute in {precision}",
            hint=f"set training.precision to {kind.lower_precision}, or use other machines",
        )
