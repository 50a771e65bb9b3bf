"""Each kind of device has facts and operations, and other code asks these. The GPUs' operations need a GPU to run."""

from __future__ import annotations

import pytest
import torch

from share_compute.device_kinds import KINDS
from share_compute.models.devices import OPERATIONS, DeviceOperations, lacking, operations


def test_each_kind_has_facts_and_operations() -> None:
    assert set(OPERATIONS) == set(KINDS)
    for kind, found in OPERATIONS.items():
        assert (found.kind, found.device) == (kind, torch.device(kind))
        assert operations(torch.device(kind, 0)) is found
        assert found.computes_in("float32")
        assert found.count() >= (kind == "cpu")


def test_a_processor_needs_no_settings_and_has_no_memory_of_its_own() -> None:
    cpu = OPERATIONS["cpu"]
    assert cpu.name()
    assert (cpu.uuid(), cpu.total_bytes(), cpu.peak_bytes()) == ("", None, None)
    cpu.compute_deterministically()
    assert not torch.are_deterministic_algorithms_enabled()
    start = cpu.mark()
    cpu.synchronize()
    assert cpu.seconds(start, cpu.mark()) >= 0


@pytest.mark.parametrize(
    ("failure", "kind"),
    [
        (MemoryError(), "cpu"),
        (RuntimeError("[enforce fail at alloc_cpu.cpp:117] DefaultCPUAllocator: can't allocate"), "cpu"),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), "cuda"),
        (torch.AcceleratorError("CUDA error: out of memory"), "cuda"),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), "cuda"),
        (torch.distributed.DistBackendError("unhandled cuda error\nCuda failure 2 'out of memory'"), "cuda"),
        (torch.AcceleratorError("CUDA error: unspecified launch failure"), None),
        (RuntimeError("MPS backend out of memory (MPS allocated: 9.06 GB, max allowed: 9.07 GB)"), "mps"),
        (RuntimeError("shapes differ"), None),
    ],
)
def test_a_lack_of_memory_names_the_kind_whose_memory_it_was(failure: Exception, kind: str | None) -> None:
    found = lacking(failure)
    assert (found and found.kind) == kind


def test_bfloat16_needs_a_card_or_a_system_that_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for is_new in (False, True):
        monkeypatch.setattr(
            torch.cuda, "get_device_capability", lambda _, is_new=is_new: (8 if is_new else 7, 5)
        )
        monkeypatch.setattr(torch.backends.mps, "is_macos_or_newer", lambda *_, is_new=is_new: is_new)
        for kind in ("cuda", "mps"):
            assert OPERATIONS[kind].computes_in("bfloat16") == is_new
            assert OPERATIONS[kind].computes_in("float16")


def require_measured(gpu: DeviceOperations) -> None:
    """Check the time and the memory of a product of matrices on a GPU."""
    left = torch.rand(2048, 2048, device=gpu.device)
    start = gpu.mark()
    left.mm(left)
    stop = gpu.mark()
    gpu.synchronize()
    assert 0 < gpu.seconds(start, stop) < 1
    assert left.nbytes <= gpu.peak_bytes() <= gpu.total_bytes()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
def test_a_gpu_is_measured_by_its_own_clock_and_counters() -> None:
    gpu = OPERATIONS["cuda"]
    assert gpu.count() >= 1
    assert gpu.name()
    assert gpu.current().index is not None
    require_measured(gpu)


@pytest.mark.skipif(not torch.backends.mps.is_available(), reason="there is no Apple GPU")
def test_an_apple_gpu_is_measured_by_its_own_clock_and_counters() -> None:
    require_measured(OPERATIONS["mps"])
