"""Mixed precision: compute a stage in bfloat16 or float16."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

from share_compute.errors import UserError
from share_compute.specification import Precision


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
    if precision == "float32":
        return
    able = torch.amp.is_autocast_available(device.type)
    if able and device.type == "cuda" and precision == "bfloat16":
        able = torch.cuda.get_device_capability(device) >= (8, 0)
    if not able:
        instead = "float16" if device.type == "cuda" else "float32"
        raise UserError(
            f"{device} cannot compute in {precision}",
            hint=f"set training.precision to {instead}, or use other machines",
        )
