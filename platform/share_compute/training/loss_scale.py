"""Loss scaling, which keeps float16 gradients from underflowing, and the factor that clips a gradient or skips a step.

The scale depends on the committed steps and nothing else. Every member changes it by the same rule when it applies a
step. A member that joins later, or continues from a checkpoint, receives the current scale. In float16, a step whose
gradient is not finite is committed as a step that changes nothing.
"""

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
"""Steps in a row without a skipped one after which the scale is doubled, as in torch's GradScaler."""
_LEAST = 2.0**-14
"""Smallest scale. If gradients are not finite with it, then the cause is not the scale."""


@dataclass(frozen=True, slots=True)
class LossScale:
    """Loss scale before a step."""

    factor: float = 1.0
    """Factor by which the loss is multiplied: a power of two, so that scaling does not round."""
    clean_steps: int = 0
    """Steps in a row that were not skipped."""
    is_dynamic: bool = False
    """Whether `after` adapts the scale; False unless layers compute in float16."""

    def after(self, update_factor: float, step: int) -> LossScale:
        """Return the loss scale after a committed step.

        Args:
            update_factor: factor with which the step was committed, see `update_factor`.
            step: number of the step.

        Raises:
            UserError: the gradients are not finite even with the smallest scale.
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
    """Error: a loss or a gradient is not finite, and the loss scale is not the cause. The step was not applied."""

    witnesses: str = ""
    """Text for the end of the message: the machines whose numbers are not finite, or that no other machine
    could check the numbers."""


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
        NotFinite: the gradient is not finite, and the loss is not scaled, since the precision is not float16.
    """
    if math.isfinite(norm):
        return 1.0 if limit is None else clip_factor(norm, limit)
    if precision == "float16":
        return SKIPPED
    raise not_finite("gradient", step)
