"""A check whether the numbers of a tensor are finite."""

from __future__ import annotations

import torch
from torch import Tensor


def is_finite(values: Tensor) -> bool:
    """Return whether all numbers of a tensor are finite, in one pass if their sum is finite."""
    if not values.is_floating_point():
        return True
    # A sum of finite numbers is finite unless it overflows. Each number is checked only if the sum is not finite.
    return bool(torch.isfinite(values.sum(dtype=torch.float32))) or bool(torch.isfinite(values).all())
