"""A check whether the numbers of a tensor are finite."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def is_finite(values: Tensor) -> bool:
    """Return whether all numbers of a tensor are finite."""
    if not values.is_floating_point():
        return True
    # A finite sum proves that all numbers are finite. A sum that is not finite may be an overflow.
    return math.isfinite(values.sum(dtype=torch.float32).item()) or bool(torch.isfinite(values).all())
