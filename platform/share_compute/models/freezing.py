"""Which parameters of a model are trained, by their stored names."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from typing import NamedTuple, TypeAlias

from torch import nn

from share_compute.errors import UserError
from share_compute.strict import nearest

BEFORE = -1
"""Place of what stands before the first layer."""
Named: TypeAlias = tuple[str, nn.Parameter]
_LAYERS = re.compile(r"layers\[(-?\d*):(-?\d*)\]")


class Places(NamedTuple):
    """Tells by its stored name where in the whole model a parameter is."""

    stack: str
    """What names of layers begin with: ``model.layers.`` before the number."""
    num_layers: int
    opening: tuple[str, ...] = ()
    """What names of things before the first layer begin with."""

    def of(self, name: str) -> int:
        """Return the layer that a parameter is in; `BEFORE` the first, or ``num_layers`` after the last."""
        if name.startswith(self.stack):
            number = name[len(self.stack) :].partition(".")[0]
            if number.isdecimal():
                return int(number)
        return BEFORE if name.startswith(self.opening) else self.num_layers


def frozen_names(names: Iterable[str], patterns: Sequence[str], places: Places) -> set[str]:
    """Return the names that some pattern stands for: a glob of stored names, or a range of layers ``layers[:6]``."""
    found: set[str] = set()
    known = list(names)
    for pattern in patterns:
        found.update(_matches(known, pattern, places))
    return found


def require_sense(names: Sequence[str], patterns: Sequence[str], places: Places) -> None:
    """Make sure that each pattern freezes something of a model, and that something is left to train.

    Args:
        names: stored names of all parameters of the whole model.
        patterns: what is frozen.
        places: of the model.

    Raises:
        UserError: it is not so.
    """
    for pattern in patterns:
        if not _matches(names, pattern, places):
            guess = nearest(pattern, list(names))
            hint = f"did you mean {guess!r}?" if guess else f"names are like {names[0]!r}"
            raise UserError(
                f"training.freeze: no parameter of the model is meant by {pattern!r}; {hint}",
                mend="give stored names, patterns of them such as model.embed_tokens.*, or layers such as layers[:6]",
            )
    if patterns and len(frozen_names(names, patterns, places)) == len(set(names)):
        raise UserError(
            "training.freeze leaves nothing to train",
            mend="freeze less: leave out a pattern, or make one narrower",
        )


def freeze(parameters: Iterable[Named], patterns: Sequence[str], places: Places) -> None:
    """Let those that are frozen take no gradient.

    Args:
        parameters: with their stored names.
        patterns: what is frozen.
        places: of the whole model.
    """
    given = list(parameters)
    frozen = frozen_names((name for name, _ in given), patterns, places)
    for name, parameter in given:
        if name in frozen:
            parameter.requires_grad_(False)  # noqa: FBT003 - torch has no other way


def trains_before(parameters: Iterable[Named], layer: int, places: Places) -> bool:
    """Return whether something before a layer is trained, so that gradients have to get there.

    Args:
        parameters: of the whole model, with their stored names.
        layer: the first of a shard.
        places: of the model.
    """
    return any(parameter.requires_grad and places.of(name) < layer for name, parameter in parameters)


def _matches(names: Iterable[str], pattern: str, places: Places) -> list[str]:
    layers = _LAYERS.fullmatch(pattern)
    if layers is None:
        return [name for name in names if fnmatchcase(name, pattern)]
    start, stop = (int(edge) if edge.strip("-") else None for edge in layers.groups())
    chosen = range(places.num_layers)[start:stop]
    return [name for name in names if places.of(name) in chosen]
