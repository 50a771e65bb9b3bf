"""A member ends if its device does not work any more after an error; other errors leave the member as it is."""

from __future__ import annotations

import pytest
import torch

from share_compute.errors import ContributorLost, ShareComputeError
from share_compute.models.devices import CpuOperations
from share_compute_actors.machine.device import end_if_lost

STICKY = torch.AcceleratorError(
    "CUDA error: an illegal memory access was encountered\nCUDA kernel errors might"
)


class _Reported(Exception):
    """An error of this project that an error of torch caused."""

    def __init__(self, cause: BaseException) -> None:
        super().__init__("a sum failed")
        self.__cause__ = cause


def _break(_: CpuOperations) -> None:
    raise STICKY


@pytest.mark.parametrize(
    ("failure", "is_broken", "ends"),
    [
        (STICKY, True, True),
        (_Reported(STICKY), True, True),
        (STICKY, False, False),  # the device works on
        (ValueError("no error of torch"), True, False),
    ],
)
def test_a_member_ends_if_its_device_stopped_working(
    failure: BaseException, is_broken: bool, ends: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if is_broken:
        monkeypatch.setattr(CpuOperations, "check", _break)
    lost: list[ShareComputeError] = []
    end_if_lost("cpu", lost.append, failure)
    assert [type(each) for each in lost] == [ContributorLost] * ends
    for each in lost:
        assert each.message == (
            "the CPU of this member stopped working: CUDA error: an illegal memory access was encountered"
        )
        assert each.details == {"ends_member": True}
