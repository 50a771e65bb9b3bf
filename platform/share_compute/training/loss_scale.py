"""What the loss is multiplied by, so that gradients in float16 do not vanish; and what is done with a gradient.

The scale follows from the steps that are committed and nothing else: every member moves it by the same rule when it
applies a step, and whoever joins later, or continues from a checkpoint, is told where it stands. A step whose gradient
is not finite is committed as one that changes nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from share_compute.errors import UserError
from share_compute.specification import Precision
from share_compute.training.gradients import clip_factor

SKIPPED = 0.0
"""Instead of a factor: the step leaves weights and optimizer as they are."""
_FIRST = 2.0**16
_GROWTH_STEPS = 2000
"""Clean steps in a row after which the scale is doubled; as torch's GradScaler has it."""
_LEAST = 2.0**-14
"""Below that not the scale is at fault: some gradient is infinite or not a number, whatever it is multiplied by."""


@dataclass(frozen=True, slots=True)
class LossScale:
    """Where the scale stands before a step."""

    factor: float = 1.0
    """What the loss is multiplied by: a power of two, so that no bit of a gradient changes."""
    clean_steps: int = 0
    """Steps in a row that were not skipped."""
    is_dynamic: bool = False
    """Whether it ever changes."""

    def after(self, update_factor: float, step: int) -> LossScale:
        """Return where it stands after a committed step.

        Args:
            update_factor: what the step was committed with, see `update_factor`.
            step: its number.

        Raises:
            UserError: no scale makes the gradients finite.
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
                mend="set training.precision to bfloat16 or float32, or lower the learning rate",
            )
        return replace(self, factor=self.factor / 2, clean_steps=0)


class NotFinite(UserError):
    """A loss or a gradient is not finite, and no loss scale is at fault: nothing of its step was applied."""

    witnesses: str = ""
    """What is said of the machines that found it, at the end of the message."""


def not_finite(what: str, step: int) -> NotFinite:
    """Return the error that says so."""
    return NotFinite(
        f"the {what} is not finite at step {step}",
        step=step,
        mend="lower the learning rate, clip gradients (training.max_gradient_norm), or look at the data",
    )


def first_loss_scale(precision: Precision) -> LossScale:
    """Return where the scale stands before the first step."""
    return LossScale(_FIRST, is_dynamic=True) if precision == "float16" else LossScale()


def update_factor(norm: float, limit: float | None, precision: Precision, step: int) -> float:
    """Return what the gradient of a step is multiplied by; `SKIPPED` when the step must change nothing.

    Args:
        norm: of the whole gradient, without the loss scale.
        limit: what it is clipped to; None leaves it.
        precision: what layers compute in.
        step: its number.

    Raises:
        NotFinite: the gradient is not finite, and no loss scale is at fault.
    """
    if math.isfinite(norm):
        return 1.0 if limit is None else clip_factor(norm, limit)
    if precision == "float16":
        return SKIPPED
    raise not_finite("gradient", step)
