"""Dynamic loss scaling for float16, and the factor that clips the gradient of a step or skips the step."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from share_compute.errors import UserError
from share_compute.specification import Precision
from share_compute.training.gradients import clip_factor

SKIPPED = 0.0
"""Update factor of a skipped step: weights and optimizer stay as they are."""
_FIRST = 2.0**16
_GROWTH_STEPS = 2000
"""Number of consecutive steps without a skip after which the scale is doubled, as in ``torch.amp.GradScaler``."""
_LEAST = 2.0**-14
"""Smallest scale. Gradients that are not finite even with this scale are an error."""


@dataclass(frozen=True, slots=True)
class LossScale:
    """Loss scale of one step."""

    factor: float = 1.0
    """Factor by which the loss is multiplied: a power of two, so that scaling does not round."""
    clean_steps: int = 0
    """Number of consecutive steps without a skip since the scale last changed."""
    is_dynamic: bool = False
    """Whether `after` adapts the scale; False unless layers compute in float16."""

    def after(self, update_factor: float, step: int) -> LossScale:
        """Return the loss scale after a committed step.

        Args:
            update_factor: `SKIPPED` if the step was skipped; any other value if it was not.
            step: number of the step.

        Raises:
            UserError: the step was skipped although it had the smallest scale.
        """
        if not self.is_dynamic:
            return self
        if update_factor != SKIPPED:
            clean = self.clean_steps + 1
            grows = clean == _GROWTH_STEPS
            return replace(self, factor=self.factor * (2 if grows else 1), clean_steps=0 if grows else clean)
        if self.factor / 2 < _LEAST:
            raise UserError(
                f"gradients are not finite up to step {step}, however small the loss is made",
                step=step,
                hint="set training.precision to bfloat16 or float32, or lower the learning rate",
            )
        return replace(self, factor=self.factor / 2, clean_steps=0)


class NotFinite(UserError):
    """Raised when a loss or a gradient is not finite."""

    witnesses: str = ""
    """Text about the machines that found the numbers; it is appended to the error's message."""


def not_finite(what: str, step: int) -> NotFinite:
    """Return the error for a loss or gradient that is not finite."""
    return NotFinite(
        f"the {what} is not finite at step {step}",
        step=step,
        hint="lower the learning rate, clip gradients (training.max_gradient_norm), or look at the data",
    )


def first_loss_scale(precision: Precision) -> LossScale:
    """Return the loss scale before the first step."""
    return LossScale(_FIRST, is_dynamic=True) if precision == "float16" else LossScale()


def update_factor(norm: float, limit: float | None, precision: Precision, step: int) -> float:
    """Return the factor by which to multiply the gradient of a step; `SKIPPED` if the step must change nothing.

    Args:
        norm: global norm of the gradient, divided by the loss scale.
        limit: norm to which the gradient is clipped; None for no clipping.
        precision: type in which layers compute.
        step: number of the step.

    Raises:
        NotFinite: the gradient is not finite, and the precision is not float16.
    """
    if math.isfinite(norm):
        return 1.0 if limit is None else clip_factor(norm, limit)
    if precision == "float16":
        return SKIPPED
    raise not_finite("gradient", step)
